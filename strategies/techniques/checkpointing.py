"""The checkpointing knob: which activations are dropped in the forward and recomputed in the backward.

Nothing changes in the numerics: the recomputation sees the same inputs and, for dropout, the same random state.
BatchNorm would count a micro-batch twice into its running statistics; the recomputation leaves them alone. torch's
non-reentrant checkpoint is used, the form that composes with compile, FSDP2 and frozen inputs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.config import CHECKPOINT_EVERY
from autoplan.strategies.techniques.base import Build, check_applies
from autoplan.strategies.workloads.workload import Workload

# The operations whose results the selective policy keeps: those that cost the most to compute again per byte kept.
_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


NO_BLOCKS = "the model has no repeated blocks to wrap"


class CheckpointingStrategy:
    """Wraps repeated blocks; selective keeps matmuls and attention of every block, the others keep a block's input."""

    name = "checkpointing"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """The values that the number of blocks allows."""
        count = len(structure.blocks)
        if count == 0:
            return offer(self.name, ("none",), dict.fromkeys(CHECKPOINT_EVERY, NO_BLOCKS))
        longest = max(len(stack) for stack in structure.stacks)
        reasons = {
            value: f"the longest run of blocks has {longest}" if every > 1 and every >= longest else None
            for value, every in CHECKPOINT_EVERY.items()
        }
        return offer(self.name, ("none",), reasons)

    def apply(self, build: Build) -> None:
        """Puts a checkpoint wrapper around the chosen blocks, in place.

        Raises:
            ConfigError: the model has no repeated blocks.
        """
        value = build.config.checkpointing
        if value == "none":
            return
        if not build.structure.blocks:
            check_applies(build.config, self.name, NO_BLOCKS)
        compiled = build.config.compile != "off"
        for stack in build.structure.stacks:
            for index, (name, block) in enumerate(stack):
                if index % CHECKPOINT_EVERY[value] == 0:
                    wrapped = wrap(block, selective=value == "selective", compiled=compiled)
                    replace_module(build.model, name, wrapped)


def wrap(block: nn.Module, *, selective: bool, compiled: bool) -> nn.Module:
    """A block whose forward is recomputed in the backward.

    Args:
        block: Any module.
        selective: Keep the results of matmuls and attention.
        compiled: torch.compile traces it; it updates running statistics once by itself, and it takes no contexts
            but the selective policy's.
    """
    options: dict[str, Any] = {}
    norms = (part for part in block.modules() if isinstance(part, nn.modules.batchnorm._NormBase))
    normalised = [] if compiled else [norm for norm in norms if norm.track_running_stats]
    if normalised:
        options["context_fn"] = functools.partial(_contexts_with_statistics, normalised, selective)
    elif selective:
        options["context_fn"] = selective_context
    return checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=True, **options)


def _contexts_with_statistics(normalised: list[Any], selective: bool) -> Any:
    forward, recompute = selective_context() if selective else (contextlib.nullcontext(), contextlib.nullcontext())
    return forward, _statistics_kept(normalised, recompute)


@contextlib.contextmanager
def _statistics_kept(normalised: list[Any], inner: Any) -> Iterator[None]:
    """A momentum of 0 leaves the running statistics as they are; the count of batches is put back."""
    before = [
        (module, module.momentum, None if module.num_batches_tracked is None else module.num_batches_tracked.clone())
        for module in normalised
    ]
    for module in normalised:
        module.momentum = 0.0
    try:
        with inner:
            yield
    finally:
        for module, momentum, count in before:
            module.momentum = momentum
            if count is not None:
                module.num_batches_tracked.copy_(count)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module in the place of the one with this name."""
    parent_name, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent_name), child, module)


@functools.cache
def kept_operations() -> frozenset[Any]:
    """The overloads that the selective policy keeps."""
    return frozenset(getattr(torch.ops.aten, name).default for name in _KEPT_NAMES)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps the result of a kept operation, unless it draws dropout.

    The recomputation draws from the random state that the forward began with, and leaves out what is kept: attention
    that draws and is kept would shift what every later dropout draws, and the gradients would be of other masks.
    """
    if operation in kept_operations() and not _dropout_of(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _dropout_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The rate of dropout that an operation is called with; 0: it has none."""
    place = next((n for n, one in enumerate(operation._schema.arguments) if one.name == "dropout_p"), None)
    if place is None:
        return 0.0
    return args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)


def selective_context() -> Any:
    """The pair of contexts that torch's checkpoint asks for, one for the forward and one for the recomputation."""
    return create_selective_checkpoint_contexts(_policy)
