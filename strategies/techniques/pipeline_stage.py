"""The modules of a pipeline stage: the model with placeholders for parts that the rank, or the stage, does not hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoplan.strategies.analysis.pipeline_trace import PipelineTrace
from autoplan.strategies.techniques.checkpointing import replace_module
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.workload import TrainingModule


class Stand(nn.Module):
    """Stands for a module that is elsewhere: what a forward reads of it, other than its result, is still there.

    A ViT asks its patch embedding for the type of its weights, and some models ask a block which attention it has.

    Args:
        module: Answers. It is no part of this module: not of its parameters, nor of its state.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._absent = [module]  # in a list: it is no submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_absent" not in self.__dict__:  # while it is copied
                raise
            return getattr(self._absent[0], name)


def without_memory(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the device "meta"."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


class Skip(Stand):
    """Replaces a block that another rank, or another stage of this rank, holds: returns its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


class EmbeddingPlaceholder(Stand):
    """Replaces an embedding: zeros of the right shape, or its input."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...] | None) -> None:
        super().__init__(module)
        self.dimension = getattr(module, "embedding_dim", None)
        self.shape = shape
        self.dtype = next(module.parameters()).dtype

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.shape is None:
            return x
        if self.dimension is not None:
            return torch.zeros(*x.shape, self.dimension, dtype=self.dtype, device=x.device)
        return torch.zeros(x.shape[0], *self.shape[1:], dtype=self.dtype, device=x.device)


class Absent(nn.Module):
    """Replaces a module that runs after this rank's last block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a stage leaves the forward before this module")


class Receive(nn.Module):
    """Replaces the block before a stage's first: returns the hidden states that the stage received."""

    def __init__(self, tuples: bool) -> None:
        super().__init__()
        self.tuples = tuples
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return (hidden,) if self.tuples else hidden


class Leave(nn.Module):
    """Replaces the block after a stage's last: leaves the model's forward with the hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise LeaveForward(args[0] if args else kwargs["hidden_states"])


class LeaveForward(Exception):
    """Carries the hidden states out of a forward."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("the hidden states leave the stage")
        self.hidden = hidden


PLACEHOLDERS = (Skip, EmbeddingPlaceholder, Absent, Receive, Leave)


def drop_absent(
    model: nn.Module, trace: PipelineTrace, ranges: list[tuple[int, int]], *, first: bool, last: bool
) -> None:
    """Replaces what this rank does not hold, so that its memory is freed."""
    held = {index for start, stop in ranges for index in range(start, stop)}
    for index, name in enumerate(trace.blocks):
        if index not in held:
            replace_module(model, name, Skip(without_memory(model.get_submodule(name))))
    if not first:
        for name in _outermost(trace.before):
            module = without_memory(model.get_submodule(name))
            replace_module(model, name, EmbeddingPlaceholder(module, trace.output_shapes[name]))
    if not last:
        for name in _outermost(trace.after):
            replace_module(model, name, Absent())


def _outermost(names: tuple[str, ...]) -> list[str]:
    """Those of some modules that are inside no other of them."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def view_of_blocks(model: nn.Module, blocks: tuple[str, ...], start: int, stop: int) -> nn.Module:
    """A copy of the modules on the way to the blocks; every other module is the same object."""
    path = blocks[0].rpartition(".")[0].split(".")
    top = node = _copy_shallow(model)
    for part in path:
        child = _copy_shallow(node._modules[part])
        node._modules[part] = child
        node = child
    for index, name in enumerate(blocks):
        if not start <= index < stop:
            block = name.rpartition(".")[2]
            module = node._modules[block]
            if not isinstance(module, Skip):
                assert module is not None
                node._modules[block] = Skip(module)
    return top


def _copy_shallow(module: nn.Module | None) -> nn.Module:
    assert module is not None
    copied = copy.copy(module)
    copied.__dict__["_modules"] = dict(module._modules)
    return copied


def drop_outside(model: nn.Module, trace: PipelineTrace, *, first: bool, last: bool) -> None:
    """In a view: placeholders for what runs before and after the blocks, where another stage of the rank holds it."""
    parents_copied = trace.blocks[0].rpartition(".")[0].split(".")
    for name in _outermost((*(() if first else trace.before), *(() if last else trace.after))):
        module = model.get_submodule(name)
        if isinstance(module, PLACEHOLDERS):
            continue
        # Parents that are not on the way to the blocks are shared with the other view: copy them first.
        node, parts = model, name.split(".")
        for depth, part in enumerate(parts[:-1]):
            if parts[: depth + 1] != parents_copied[: depth + 1]:
                node._modules[part] = _copy_shallow(node._modules[part])
            node = node.get_submodule(part)
        before = name in trace.before
        node._modules[parts[-1]] = EmbeddingPlaceholder(module, trace.output_shapes[name]) if before else Absent()


class Stage(nn.Module):
    """One stage: the training module, with an entry and an exit where the model goes on elsewhere."""

    def __init__(
        self, training: TrainingModule, receive: Receive | None, dtype: torch.dtype, context: Callable[[], Any]
    ) -> None:
        super().__init__()
        self.training_module = training
        self._receive = [receive]  # in a list: it is a module of the model already
        self._dtype = dtype
        self._context = context
        self.counts: list[torch.Tensor] = []

    def forward(self, *received: torch.Tensor, micro: Batch) -> torch.Tensor:
        """The hidden states to send, or, of the last stage, the summed loss."""
        receive = self._receive[0]
        if receive is not None:
            receive.hidden = received[0]
        try:
            with self._context():
                total, count = self.training_module(micro)
        except LeaveForward as leaving:
            hidden = leaving.hidden
            # GPT-2 under autocast ends a block in fp32, other models need not; what is sent has one type
            return hidden.to(self._dtype)
        self.counts.append(count.detach().float())
        return total
