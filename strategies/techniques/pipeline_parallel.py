"""Pipeline parallelism: each rank holds some of the blocks; torch.distributed.pipelining moves the hidden states.

A stage runs the model's own forward on the real micro-batch, so that masks, positions and whatever else the model
derives from its input are as they always are. Modules it does not hold are replaced: embeddings by a placeholder of
the right shape, the block before its first by one that hands in the hidden states received, the block after its last by
one that leaves the forward with the hidden states to send. Any model with one row of blocks can be cut so.

Two steps in prepare(): PipelineStrategy drops what the rank does not hold, then the techniques of a stage are applied
to what is left, then PipelineEngineStrategy makes stages and schedule of it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from autoplan.errors import ConfigError
from autoplan.strategies.analysis.pipeline_trace import PipelineTrace, trace_pipeline
from autoplan.strategies.analysis.structure import Structure, find_structure
from autoplan.strategies.config import INTERLEAVED_SCHEDULES
from autoplan.strategies.techniques.base import Build, PipelineCut, Strategy
from autoplan.strategies.techniques.checkpointing import replace_module
from autoplan.strategies.techniques.data_parallel import wrap_data_parallel
from autoplan.strategies.techniques.mesh import AXES, axis_rank, local_tensor
from autoplan.strategies.techniques.tensor_parallel import make_tensor_plan
from autoplan.strategies.workloads.batch import Batch, batch_size, move_batch, slice_batch
from autoplan.strategies.workloads.workload import TrainingModule

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class PipelineStrategy(Strategy):
    """Keeps this rank's blocks and drops the rest of the model."""

    name = "pp"

    def apply(self, build: Build) -> None:
        """Cuts the model.

        Raises:
            ConfigError: the model cannot be cut, or not into so many stages, or all that a rank holds is frozen.
        """
        config = build.config
        if config.pp == 1:
            return
        assert build.mesh is not None
        trace = trace_pipeline(build.model, build.structure, build.workload)
        if isinstance(trace, str):
            raise ConfigError(f"pp={config.pp} does not apply: {trace}", hint="Use pp=1 for this model.")
        stages = config.pp * config.virtual_stages
        if len(trace.blocks) < stages:
            raise ConfigError(
                f"{len(trace.blocks)} blocks cannot make pp {config.pp} x virtual_stages {config.virtual_stages} = "
                f"{stages} stages",
                hint="A stage takes at least one block: use fewer stages.",
            )
        cuts = cut_stages(trace.block_costs, stages, first_cost=trace.first_cost, last_cost=trace.last_cost)
        refuse_frozen_ranks(build.model, trace, cuts, config.pp)
        own = range(axis_rank(build.mesh, "pp"), stages, config.pp)
        if config.tp > 1:
            build.tensor_plan = make_tensor_plan(build.model, build.structure, build.workload, config.tp)
        tied = tied_across(build.structure, trace)
        drop_absent(build.model, trace, [cuts[stage] for stage in own], first=0 in own, last=stages - 1 in own)
        build.structure = find_structure_of_stage(build.model, build.structure, trace)
        build.cut = PipelineCut(trace=trace, bounds=cuts, own=list(own), tied=tied)


def cut_stages(
    block_costs: Sequence[float], num_stages: int, *, first_cost: float = 0.0, last_cost: float = 0.0
) -> list[tuple[int, int]]:
    """Cuts a row of blocks into stages of at least one block each.

    The largest cost of a stage is as small as it can be (dynamic programming over the cuts); among equal cuts the
    later stages get the fewer blocks, since the earlier ones hold more micro-batches in flight either way.

    Args:
        block_costs: What each block costs, in any unit.
        num_stages: Stages, at most as many as blocks.
        first_cost: What the first stage bears besides its blocks (embeddings), in the same unit.
        last_cost: What the last stage bears besides (output head, loss).

    Returns:
        (first block, one past the last block) per stage.

    Raises:
        ValueError: more stages than blocks.
    """
    count = len(block_costs)
    if not 1 <= num_stages <= count:
        raise ValueError(f"{count} blocks cannot make {num_stages} stages")
    total = [0.0]
    for cost in block_costs:
        total.append(total[-1] + cost)
    # best[i]: the smallest largest cost of the stages so far, when they hold the first i blocks
    best = [first_cost + total[i] for i in range(count + 1)]
    cuts: list[list[int]] = [[0] * (count + 1)]
    for stage in range(1, num_stages):
        extra = last_cost if stage == num_stages - 1 else 0.0
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count + 1):
            for start in range(stage, stop):
                worst = max(best[start], total[stop] - total[start] + extra)
                if worst <= row[stop]:
                    row[stop], cut[stop] = worst, start
        best = row
        cuts.append(cut)
    bounds = [count]
    for cut in reversed(cuts[1:]):
        bounds.append(cut[bounds[-1]])
    bounds.append(0)
    bounds.reverse()
    return list(zip(bounds, bounds[1:], strict=False))


def refuse_frozen_ranks(model: nn.Module, trace: PipelineTrace, cuts: list[tuple[int, int]], pp: int) -> None:
    """Refuses a cut that leaves some rank nothing to train: no optimizer is made over no parameters.

    Raises:
        ConfigError: there is such a rank; every rank says so.
    """
    for rank in range(pp):
        own = range(rank, len(cuts), pp)
        names = [name for stage in own for name in trace.blocks[slice(*cuts[stage])]]
        names += [*(trace.before if 0 in own else ()), *(trace.after if len(cuts) - 1 in own else ())]
        held = {id(parameter): parameter for name in names for parameter in model.get_submodule(name).parameters()}
        if not any(parameter.requires_grad for parameter in held.values()):
            raise ConfigError(
                f"pp={pp} does not apply: all {len(held)} parameters of pipeline rank {rank} are frozen",
                hint="Use pp=1, or fewer stages, so that each has a parameter that trains.",
            )


def find_structure_of_stage(model: nn.Module, whole: Structure, trace: PipelineTrace) -> Structure:
    """The structure of what a rank still holds: blocks, embeddings and head by the names they always had."""
    held = {name for name, module in model.named_modules() if not isinstance(module, PLACEHOLDERS)}
    found = find_structure(model)

    def keep(pairs: tuple[tuple[str, nn.Module], ...]) -> tuple[tuple[str, nn.Module], ...]:
        return tuple((name, module) for name, module in pairs if name in held)

    return dataclasses.replace(
        found,
        stacks=(keep(whole.stacks[0]),),
        embeddings=keep(whole.embeddings),
        head=whole.head if whole.head is not None and whole.head[0] in held else None,
    )


def tied_across(structure: Structure, trace: PipelineTrace) -> list[tuple[str, str]]:
    """Pairs of names of one parameter, of which the first stage holds one and the last the other."""
    pairs = []
    for group in structure.tied:
        owners = {name: name.rpartition(".")[0] for name in group}
        early = [name for name, owner in owners.items() if owner in trace.before]
        late = [name for name, owner in owners.items() if owner in trace.after]
        if early and late:
            pairs.append((early[0], late[0]))
    return pairs


# Stages and schedule.


class PipelineEngineStrategy(Strategy):
    """Makes the stages and the schedule; wraps each stage for data parallelism."""

    name = "pp_schedule"

    def apply(self, build: Build) -> None:
        """Sets build.run_pipeline."""
        cut = build.cut
        if cut is None:
            return
        mesh: DeviceMesh = build.mesh
        training = build.training_module
        stages = [make_stage(build, cut, training, stage) for stage in cut.own]
        # The model that is saved keeps its names; what a step calls are the stages.
        wrapped = wrap_data_parallel(build, mesh, stages)
        build.module = nn.ModuleList(wrapped)
        build.run_pipeline = PipelineEngine(build, cut, mesh, stages, wrapped).forward_backward
        build.model.__dict__["tied_over_stages"] = {late: early for early, late in cut.tied}
        for early, late in cut.tied:
            _share_tied_gradient(build, mesh, early, late)


def make_stage(build: Build, cut: PipelineCut, training: TrainingModule, stage: int) -> Stage:
    """A stage around its own view of the model: shared modules, other placeholders."""
    start, stop = cut.bounds[stage]
    blocks = cut.trace.blocks
    model = training.model
    if len(cut.own) > 1:
        model = view_of_blocks(model, blocks, start, stop)
        drop_outside(model, cut.trace, first=start == 0, last=stop == len(blocks))
    receive = None
    if start > 0:
        receive = Receive(model.get_submodule(blocks[start - 1]), cut.trace.tuples)
        replace_module(model, blocks[start - 1], receive)
    if stop < len(blocks):
        replace_module(model, blocks[stop], Leave(model.get_submodule(blocks[stop])))
    module = TrainingModule(model, training.loss)
    return Stage(module, receive, cut.trace.hidden_dtype, build.hooks.forward_context)


class PipelineEngine:
    """Runs a rank's share of a step through the pipeline."""

    def __init__(
        self, build: Build, cut: PipelineCut, mesh: DeviceMesh, stages: list[Stage], wrapped: list[nn.Module]
    ) -> None:
        config = build.config
        self._build = build
        self._stages = stages
        self._group = mesh.get_group("pp")
        self._last = len(cut.bounds) - 1 in cut.own
        self._scale: torch.Tensor = torch.ones((), device=build.device)
        shape = list(cut.trace.hidden_shape)
        shape[0] = config.micro_batch
        if config.tp > 1:
            shape[1] //= config.tp  # between blocks the sequence is split
        hidden = torch.empty(shape, dtype=cut.trace.hidden_dtype, device="meta")
        total = torch.empty((), device="meta")
        parts = [
            PipelineStage(
                module,
                stage,
                len(cut.bounds),
                build.device,
                input_args=() if stage == 0 else (hidden.clone().requires_grad_(),),
                output_args=(total if stage == len(cut.bounds) - 1 else hidden.clone().requires_grad_(),),
                group=self._group,
            )
            for stage, module in zip(cut.own, wrapped, strict=True)
        ]
        self._schedule: Any = SCHEDULES[config.pp_schedule](
            parts if config.pp_schedule in INTERLEAVED_SCHEDULES else parts[0],
            config.pp_microbatches,
            loss_fn=self._scaled,
            scale_grads=False,
        )

    def _scaled(self, total: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = total * self._scale
        return loss if self._build.scaler is None else self._build.scaler.scale(loss)

    def forward_backward(self, batch: Batch, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All micro-batches of a step, forward and backward.

        Args:
            batch: This data-parallel rank's share of the global batch; every stage gets all of it.
            scale: What each summed loss is multiplied by in the backward.

        Returns:
            The summed loss and the count, on every stage.
        """
        config, device, scaler = self._build.config, self._build.device, self._build.scaler
        self._scale = scale
        if scaler is not None:
            scaler.scale(torch.zeros((), device=device))  # stages without a loss need its state too
        batch = move_batch(batch, device)
        size = config.pp_microbatches * config.micro_batch
        sums = torch.zeros(2, device=device)
        for start in range(0, batch_size(batch), size):
            losses: list[torch.Tensor] = []
            self._schedule.step(
                micro=slice_batch(batch, start, start + size),
                target=torch.zeros(config.pp_microbatches, device=device) if self._last else None,
                losses=losses if self._last else None,
                return_outputs=False,
            )
            if self._last:
                scaled = torch.stack([loss.detach() for loss in losses]).sum()
                sums[0] += scaled / (scale if scaler is None else scale * scaler.get_scale())
                for stage in self._stages:
                    if stage.counts:
                        sums[1] += torch.stack(stage.counts).sum()
                        stage.counts.clear()
        dist.all_reduce(sums, group=self._group)
        return sums[0], sums[1]


def _share_tied_gradient(build: Build, mesh: DeviceMesh, early: str, late: str) -> None:
    """Sums the gradient of a parameter over the two stages that hold it, once per step, and counts it once."""
    rank, stages = axis_rank(mesh, "pp"), build.config.pp
    group = _ends_group(mesh)
    if rank not in (0, stages - 1):
        return
    name = early if rank == 0 else late
    parameter = build.model.get_parameter(name)
    if not parameter.requires_grad:
        return
    build.gradients.norm_weights[id(parameter)] = 0.5

    def share() -> None:
        assert parameter.grad is not None
        dist.all_reduce(local_tensor(parameter.grad), group=group)

    build.gradients.finish.append(share)


def _ends_group(mesh: DeviceMesh) -> Any:
    """The group of the first and the last stage with this rank's other coordinates; every rank makes all of them."""
    ranks = mesh.mesh.reshape(mesh.size(AXES.index("pp")), -1)
    own = None
    for column in range(ranks.shape[1]):
        members = [int(ranks[0, column]), int(ranks[-1, column])]
        group = dist.new_group(members)
        if dist.get_rank() in ranks[:, column].tolist():
            own = group
    return own


# The modules of a stage: placeholders for parts that the rank, or the stage, does not hold.


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


class Receive(Stand):
    """Replaces the block before a stage's first: returns the hidden states that the stage received."""

    def __init__(self, module: nn.Module, tuples: bool) -> None:
        super().__init__(module)
        self.tuples = tuples
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return (hidden,) if self.tuples else hidden


class Leave(Stand):
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
