"""Finds the repeated blocks, embeddings, output head and tied weights of any nn.Module.

Only structure is read, never a number, so a model on the meta device is enough.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoplan.strategies.analysis.facts import Dependence

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
MAIN_PART = 16
"""A list of blocks is a side part of one beside it that has so many times its parameters."""

_DROPOUT_NAMES = ("dropout", "pdrop", "drop_prob", "drop_path", "drop_rate")


Stacks = tuple[tuple[tuple[str, nn.Module], ...], ...]
"""Runs of repeated blocks, each block with its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The parts of a model; names are the model's own (fully qualified).

    Attributes:
        model: The model that this is the structure of.
        stacks: Runs of repeated blocks, in the order of the model: one for a decoder, two for an encoder-decoder,
            one per stage for a staged image model. Runs in which nothing trains are left out if others train.
        frozen_stacks: Those runs: a frozen reference or teacher beside what trains. They keep no activations.
        embeddings: Modules that look tokens up.
        head: The output head of what trains: what the model names as such, or the last linear layer outside the
            blocks, tied to an embedding or widest of them.
        tied: Groups of parameter names that are one tensor.
        micro_batch_dependent: Why the micro-batch is not free, module by module.
    """

    model: nn.Module
    stacks: Stacks
    frozen_stacks: Stacks = ()
    embeddings: tuple[tuple[str, nn.Module], ...]
    head: tuple[str, nn.Module] | None
    tied: tuple[tuple[str, ...], ...]
    micro_batch_dependent: tuple[Dependence, ...]

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        """The repeated blocks that are trained, stack after stack."""
        return [block for stack in self.stacks for block in stack]

    @property
    def all_blocks(self) -> list[tuple[str, nn.Module]]:
        """The repeated blocks, then those of frozen stacks."""
        return [block for stack in (*self.stacks, *self.frozen_stacks) for block in stack]


def find_structure(model: nn.Module) -> Structure:
    """Reads the structure of a model.

    Blocks are modules with submodules that are in a list (ModuleList, Sequential) with another of their class, or are
    siblings of the same class and size; where such a module contains a list of blocks itself (the stages of a Swin
    transformer, the two halves of an encoder-decoder), the inner ones are the blocks. Where each item of a list is a
    list itself (norm, attention, residual), which nothing calls, the modules in the items are the blocks.
    """
    stacks, frozen = repeated_blocks(model)
    inside = {id(part) for stack in (*stacks, *frozen) for _, block in stack for part in block.modules()}
    inside |= _frozen_parts(model, {id(block) for stack in frozen for _, block in stack})
    outside = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
    embeddings = tuple((name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    return Structure(
        model=model,
        stacks=stacks,
        frozen_stacks=frozen,
        embeddings=embeddings,
        head=_head(model, outside, embeddings, has_blocks=bool(stacks)),
        tied=_tied(model),
        micro_batch_dependent=tuple(_micro_batch_dependent(model)),
    )


def repeated_blocks(model: nn.Module) -> tuple[Stacks, Stacks]:
    """The runs of repeated blocks: those that train, and those that do not beside others that do."""
    found = tuple(_stacks(model, ""))
    trained = tuple(stack for stack in found if any(_trains(block) for _, block in stack)) or found
    return trained, tuple(stack for stack in found if stack not in trained)


def clean_name(name: str) -> str:
    """The model's own name of a parameter or module: without what checkpointing, compile and FSDP put before it."""
    for prefix in ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module."):
        name = name.replace(prefix, "")
    return name


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout rate to 0: of dropout modules, and the rates that modules and configs keep as floats.

    The modules get copies of their configs: the user's own may belong to every model that build_model makes.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        attributes = vars(module)
        _zero_rates(attributes)
        for name, value in attributes.items():
            if (name == "config" or name.endswith("_config")) and hasattr(value, "__dict__") and not callable(value):
                with contextlib.suppress(Exception):  # one that cannot be copied keeps its rates
                    attributes[name] = copy.deepcopy(value, copies)
    for config in copies.values():
        if not isinstance(config, nn.Module) and hasattr(config, "__dict__"):
            _zero_rates(vars(config))


def _zero_rates(attributes: dict[str, object]) -> None:
    for name, value in attributes.items():
        if isinstance(value, float) and any(part in name for part in _DROPOUT_NAMES):
            attributes[name] = 0.0


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _frozen_parts(model: nn.Module, blocks: set[int]) -> set[int]:
    """The ids of all modules in frozen parts that hold some of these blocks: a reference model, a teacher."""
    if not blocks:
        return set()
    return {
        id(part)
        for module in model.modules()
        if not _trains(module) and any(id(inner) in blocks for inner in module.modules())
        for part in module.modules()
    }


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_composite(module: nn.Module) -> bool:
    """Whether a module could be a block: it has submodules, is not a mere list of them, and has two or more matrices.

    With one (a convolution with its norm and activation) it is a layer inside a block.
    """
    if isinstance(module, _CONTAINERS) or not any(True for _ in module.children()):
        return False
    return _has_two_matrices(module)


def _has_two_matrices(module: nn.Module) -> bool:
    return sum(parameter.dim() >= 2 for parameter in module.parameters()) >= 2


def _is_block_of(parent: nn.Module, child: nn.Module) -> bool:
    """Whether a child could be a block of its parent. In a ModuleList, a Sequential may be a block too.

    A Sequential of Sequentials is left out: its parts are stages or layers.
    """
    if isinstance(parent, nn.ModuleList) and isinstance(child, nn.Sequential):
        return _has_two_matrices(child)
    return _is_composite(child)


def _stacks(module: nn.Module, name: str) -> Iterator[tuple[tuple[str, nn.Module], ...]]:
    children = list(_children(module, f"{name}." if name else ""))
    members = [pair for pair in children if _is_block_of(module, pair[1])]
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        # two siblings of other sizes lift and project; one that trains beside one that does not is a student
        alike = Counter(key for _, child in members for key in _likeness(child))
        members = [pair for pair in members if any(alike[key] >= least for key, least in _likeness(pair[1]).items())]
    elif not _repeats(child for _, child in members):
        members = []
    members = [pair for pair in members if not _contains_stack(pair[1])]
    if members:
        yield tuple(members)
    taken = {id(child) for _, child in members}
    for child_name, child in children:
        if id(child) not in taken and not _is_side_list(child, module):
            yield from _stacks(child, child_name)


def _repeats(modules: Iterable[nn.Module]) -> bool:
    """Whether two modules are of one class."""
    return max(Counter(map(type, modules)).values(), default=0) >= 2


def _likeness(module: nn.Module) -> dict[Any, int]:
    """Properties that repeated siblings share, and how many must: two for class and size, three for the class alone."""
    common = (type(module), _trains(module))
    return {(*common, _size(module)): 2, common: 3}


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module; of a list of layers that are lists themselves, the modules in the layers."""
    for name, child in module.named_children():
        layer = isinstance(module, nn.ModuleList) and isinstance(child, nn.ModuleList)
        if layer and not _repeats(filter(_is_composite, child.children())):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _is_side_list(module: nn.Module, parent: nn.Module) -> bool:
    """Whether a list has a small part of each layer only: a larger list beside it has the main part.

    A Fourier neural operator keeps its convolutions, skips and MLPs in lists of their own.
    """
    if not isinstance(module, nn.ModuleList):
        return False
    others = [other for other in parent.children() if isinstance(other, nn.ModuleList) and len(other) == len(module)]
    plain = [other for other in others if not any(map(_is_composite, other.modules()))]
    return any(_size(other) > MAIN_PART * _size(module) for other in others) or any(
        _size(other) > _size(module) for other in plain
    )


def _contains_stack(module: nn.Module) -> bool:
    """Whether a module contains a list of two or more blocks of one class; a list of experts is not one."""
    for name, part in module.named_modules():
        listed = isinstance(part, (nn.ModuleList, nn.Sequential)) and "expert" not in name.lower()
        if listed and _repeats(child for _, child in _children(part, "") if _is_composite(child)):
            return True
    return False


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _head(
    model: nn.Module,
    outside: list[tuple[str, nn.Module]],
    embeddings: tuple[tuple[str, nn.Module], ...],
    *,
    has_blocks: bool,
) -> tuple[str, nn.Module] | None:
    named = _named_heads(model)
    if named:
        return next((pair for owner, pair in named if _trains(owner)), named[0][1])
    linears = [(name, module) for name, module in outside if isinstance(module, nn.Linear)]
    looked_up = {id(module.weight) for _, module in embeddings}
    for name, module in linears:
        if id(module.weight) in looked_up:
            return name, module
    return linears[-1] if linears and has_blocks else None


def _named_heads(model: nn.Module) -> list[tuple[nn.Module, tuple[str, nn.Module]]]:
    """The output heads that models name themselves (get_output_embeddings of transformers), each with its model."""
    found: dict[int, tuple[nn.Module, tuple[str, nn.Module]]] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for owner in model.modules():
        get_output = getattr(owner, "get_output_embeddings", None)
        try:
            given = get_output() if callable(get_output) else None
        except (NotImplementedError, AttributeError):
            continue
        if isinstance(given, nn.Module) and id(given) in names:
            found.setdefault(id(given), (owner, (names[id(given)], given)))
    return list(found.values())


def language_models(model: nn.Module) -> list[Any]:
    """The models of transformers in a module, outermost first: itself, or those that it holds."""
    if hasattr(model, "set_attn_implementation") and getattr(model, "config", None) is not None:
        return [model]
    return [found for child in model.children() for found in language_models(child)]


def _micro_batch_dependent(model: nn.Module) -> Iterator[Dependence]:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats):
            why = "normalises with the mean and variance of its micro-batch"
            yield Dependence(module=name, kind=type(module).__name__, why=why)
    for inner in language_models(model) or [model]:
        config = getattr(inner, "config", None)
        if not getattr(config, "output_router_logits", False) or not _trains(inner):
            continue
        yield Dependence(
            module="config.output_router_logits",
            kind=type(config).__name__,
            why="adds the auxiliary loss of a mixture of experts, which is computed over a micro-batch",
        )
