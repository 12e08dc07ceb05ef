"""The fp8 knob: the products of large linear layers in 8-bit floating point, through torchao, over bf16 autocast.

Taken are plain nn.Linear of the repeated blocks whose weight trains and is large enough (sizes.py). Left as they are:
routers, whose small differences choose experts; LoRA's adapters; frozen weights, for which torchao would compute
gradients that nobody wants; layers with hooks or with a forward of their own, which a replaced module would lose; and
Conv1D of transformers (GPT-2), which torchao does not know. Recipes and formats: docs/techniques.md.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.config import TORCHAO_INSTALL
from autoplan.strategies.techniques.base import Build, check_applies, compute_capability
from autoplan.strategies.techniques.sizes import MULTIPLE, RECIPES, reason_against_sizes
from autoplan.strategies.workloads.devices import is_elsewhere
from autoplan.strategies.workloads.workload import Workload

LEAST_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""Compute capability from which torch._scaled_mm multiplies: Ada and Hopper with one scale, Hopper with rows of them
(torch's own check, aten/src/ATen/native/cuda/Blas.cpp)."""


class Fp8Strategy:
    """off; tensorwise and rowwise: torchao's recipes of those names."""

    name = "fp8"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """The recipes that the chip and torchao can run, if the model has linear layers that are large enough."""
        capability = compute_capability(hardware)
        reasons = {recipe: reason_against_fp8(structure, recipe, device, capability) for recipe in RECIPES}
        return offer(self.name, ("off",), reasons)

    def apply(self, build: Build) -> None:
        """Replaces the selected linear layers, in place; parameters stay the objects that they are.

        Raises:
            ConfigError: another chip, no torchao, or no layer that is large enough.
        """
        recipe = build.config.fp8
        if recipe == "off":
            return
        check_applies(build.config, self.name, reason_against_fp8(build.structure, recipe, build.device.type))
        names = [name for name, _ in selected_linears(build.structure, recipe)]
        use_fp8(build.model, names, recipe)


def reason_against_fp8(
    structure: Structure, recipe: str, device: str, capability: tuple[int, int] | None = None
) -> str | None:
    """Why the products of a model cannot be in fp8; None if they can. `capability`: None is that of the GPU here."""
    chip = _reason_against_chip(recipe, device, capability)
    reasons = [] if chip is None else [chip]
    if is_elsewhere(device):
        pass  # what is installed there is not known
    elif importlib.util.find_spec("torchao") is None:
        reasons.append(f"torchao is not installed: {TORCHAO_INSTALL}")
    elif not reasons and (reason := _reason_against_torchao()) is not None:
        reasons.append(reason)
    if not reasons and not selected_linears(structure, recipe):
        reasons.append(reason_against_layers(structure.model, _blocks(structure), recipe))
    return "; ".join(reasons) or None


def _reason_against_chip(recipe: str, device: str, capability: tuple[int, int] | None) -> str | None:
    least = LEAST_CAPABILITY[recipe]
    need = f"products in fp8 need an NVIDIA GPU of compute capability {least[0]}.{least[1]}"
    if device != "cuda":
        return need
    if torch.version.hip is not None:
        return f"{need}; it was not tried on AMD's"
    if capability is None:
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return None if capability >= least else f"{need}; this one has {capability[0]}.{capability[1]}"


def _reason_against_torchao() -> str | None:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: F401
    except Exception as error:  # built against another torch, it raises what its extension meets
        return f"this torchao has no fp8 training ({error}): {TORCHAO_INSTALL}"
    return None


def selected_linears(structure: Structure, recipe: str) -> list[tuple[str, nn.Linear]]:
    """The linear layers of a model whose products are in fp8, by name."""
    names = fp8_linears(structure.model, _blocks(structure), recipe)
    return [(name, structure.model.get_submodule(name)) for name in names]  # type: ignore[misc]


def _blocks(structure: Structure) -> list[str]:
    return [name for name, _ in structure.blocks]


def reason_against_layers(model: nn.Module, blocks: Sequence[str], recipe: str) -> str:
    """Why no linear layer of a model is taken."""
    if not blocks:
        return "the model has no repeated blocks, whose linear layers it is for"
    found = list(_linears(model, blocks))
    if not found:
        kinds = {type(part).__name__ for name in blocks for part in model.get_submodule(name).modules()}
        conv = ", but Conv1D of transformers, which torchao does not know" if "Conv1D" in kinds else ""
        return f"no block has a plain nn.Linear that trains{conv}"
    _, largest = max(found, key=lambda pair: pair[1].weight.numel())
    reason = reason_against_sizes(largest.out_features, largest.in_features, recipe)
    return f"no linear layer of the blocks is taken; the weight of the largest, {reason or 'a router or adapter'}"


def fp8_linears(model: nn.Module, blocks: Sequence[str], recipe: str) -> list[str]:
    """The names of the linear layers whose products are in fp8.

    Args:
        model: The model.
        blocks: The names of its repeated blocks.
        recipe: tensorwise or rowwise, for what is large enough.
    """
    return [
        name
        for name, linear in _linears(model, blocks)
        if reason_against_sizes(linear.out_features, linear.in_features, recipe) is None
    ]


def linear_weights(structure: Structure) -> tuple[tuple[int, int, int], ...]:
    """The sizes of the linear layers of a model that fp8 takes if they are large enough: outputs, inputs, how many."""
    linears = (linear for _, linear in _linears(structure.model, _blocks(structure)))
    sizes = Counter((one.out_features, one.in_features) for one in linears)
    return tuple((n, k, count) for (n, k), count in sorted(sizes.items()) if n % MULTIPLE == k % MULTIPLE == 0)


def _linears(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The plain linear layers of the blocks that train; a layer that several parts share has several names."""
    for block in blocks:
        for inner, module in model.get_submodule(block).named_modules(remove_duplicate=False):
            name = f"{block}.{inner}"
            if type(module) is nn.Linear and module.weight.requires_grad and not _is_special(name, module):
                yield name, module


def _is_special(name: str, module: nn.Linear) -> bool:
    """Whether a layer is a router or an adapter, or holds what a replaced module would lose."""
    parts = name.split(".")
    if parts[-1] in ("router", "gate", "wg") or any(part == "router" or part.startswith("lora_") for part in parts):
        return True
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(getattr(module, name) for name in hooks)


def use_fp8(model: nn.Module, names: Sequence[str], recipe: str) -> None:
    """Has torchao replace linear layers, in place.

    The gradient of a weight sums over the rows of a batch, in steps of MULTIPLE (`torch._scaled_mm`). Rows that it does
    not divide are filled up, which takes a copy of them: only then, since lengths of batches may differ.

    Args:
        model: The model.
        names: Of the layers.
        recipe: tensorwise or rowwise.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=False)
    taken = set(names)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in taken)
    for name in names:
        linear: Any = model.get_submodule(name)
        whole = linear.linear_mm_config
        filled = type(whole)(*(product._replace(pad_inner_dim=True) for product in whole))
        linear.register_forward_pre_hook(_filling(whole, filled))


def _filling(whole: Any, filled: Any) -> Any:
    """The hook before a layer's forward: it has the products filled up if the rows of the batch need it."""

    def choose(linear: Any, inputs: tuple[Any, ...]) -> None:
        rows = inputs[0].numel() // inputs[0].shape[-1]
        linear.linear_mm_config = filled if rows % MULTIPLE else whole

    return choose


def replaced_linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear layers that torchao has replaced, by name."""
    from torchao.float8.float8_linear import Float8Linear

    return [(name, module) for name, module in model.named_modules() if isinstance(module, Float8Linear)]
