"""Pipeline parallelism: each rank holds some of the blocks; torch.distributed.pipelining moves the hidden states.

A stage runs the model's own forward on the real micro-batch, so that masks, positions and whatever else the model
derives from its input are as they always are. Modules it does not hold are replaced: embeddings by a stand-in of the
right shape, the block before its first by one that hands in the hidden states received, the block after its last by
one that leaves the forward with the hidden states to send. Any model with one row of blocks can be cut so.

Two steps in prepare(): PipelineStrategy drops what the rank does not hold, then the techniques of a stage are applied
to what is left, then PipelineEngineStrategy makes stages and schedule of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.base import Build, Choices
from autoplan.strategies.batch import Batch, batch_size, move_batch, slice_batch
from autoplan.strategies.checkpointing import replace_module
from autoplan.strategies.data_parallel import wrap_data_parallel
from autoplan.strategies.degrees import reason_against_knobs
from autoplan.strategies.mesh import AXES, axis_rank, local_tensor
from autoplan.strategies.pipeline_trace import PipelineTrace, trace_pipeline
from autoplan.strategies.stages import cut_stages
from autoplan.strategies.structure import Structure, find_structure
from autoplan.strategies.tensor_parallel import plan_tensor_parallel
from autoplan.strategies.workload import TrainingModule, Workload

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
SEVERAL_STAGES_PER_RANK = ("interleaved_1f1b", "zero_bubble")


class PipelineStrategy:
    """Keeps this rank's blocks and drops the rest of the model."""

    name = "pp"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """One stage; more come from autoplan.strategies.degrees.legal_degrees, which sees all degrees together."""
        return Choices(knob=self.name, values=(1,))

    def apply(self, build: Build) -> None:
        """Cuts the model.

        Raises:
            ConfigError: the model cannot be cut, or not into so many stages, or the knobs do not go together.
        """
        config = build.config
        if config.pp == 1:
            return
        assert build.mesh is not None
        trace = trace_pipeline(build.model, build.structure, build.workload)
        if isinstance(trace, str):
            raise ConfigError(f"pp={config.pp} does not apply: {trace}", hint="Use pp=1 for this model.")
        stages = config.pp * config.virtual_stages
        _check_schedule(build, len(trace.blocks), stages)
        cuts = cut_stages(trace.block_costs, stages, first_cost=trace.first_cost, last_cost=trace.last_cost)
        own = range(axis_rank(build.mesh, "pp"), stages, config.pp)
        if config.tp > 1:
            build.tensor_plan = plan_tensor_parallel(build)
        tied = tied_across(build.structure, trace)
        drop_absent(build.model, trace, [cuts[stage] for stage in own], first=0 in own, last=stages - 1 in own)
        build.structure = find_structure_of_stage(build.model, build.structure, trace)
        build.pipeline = PipelinePlan(trace=trace, cuts=cuts, own=list(own), tied=tied)


class PipelinePlan:
    """What PipelineStrategy leaves for PipelineEngineStrategy."""

    def __init__(
        self, *, trace: PipelineTrace, cuts: list[tuple[int, int]], own: list[int], tied: list[tuple[str, str]]
    ) -> None:
        self.trace = trace
        self.cuts = cuts
        self.own = own
        self.tied = tied


def _check_schedule(build: Build, num_blocks: int, stages: int) -> None:
    config = build.config
    accumulation = config.accumulation(build.workload.global_batch)
    problem = None
    if num_blocks < stages:
        problem = f"{num_blocks} blocks cannot make pp {config.pp} x virtual_stages {config.virtual_stages} stages"
    elif (config.pp_schedule in SEVERAL_STAGES_PER_RANK) != (config.virtual_stages > 1):
        problem = f"pp_schedule={config.pp_schedule} does not go with virtual_stages={config.virtual_stages}"
    elif accumulation % config.pp_microbatches:
        problem = f"pp_microbatches={config.pp_microbatches} does not divide the {accumulation} micro-batches of a step"
    elif config.pp_microbatches < config.pp:
        problem = f"{config.pp_microbatches} micro-batches per pass leave some of {config.pp} stages idle throughout"
    elif config.pp_microbatches % max(1, config.pp_microbatches // config.pp) and config.virtual_stages > 1:
        problem = f"interleaved schedules go in rounds of about {config.pp}: {config.pp_microbatches} does not divide"
    else:
        problem = reason_against_knobs(config.model_dump())
    if problem is not None:
        raise ConfigError(
            f"{config.describe()}: {problem}",
            hint="pp_microbatches is at least pp and divides accumulation; interleaved_1f1b and zero_bubble take "
            "virtual_stages of 2 or more; zero_bubble takes one data-parallel rank and nothing compiled or recomputed.",
        )


# Dropping.


def drop_absent(
    model: nn.Module, trace: PipelineTrace, ranges: list[tuple[int, int]], *, first: bool, last: bool
) -> None:
    """Replaces what this rank does not hold, so that its memory is freed."""
    held = {index for start, stop in ranges for index in range(start, stop)}
    for index, name in enumerate(trace.blocks):
        if index not in held:
            replace_module(model, name, Skip())
    if not first:
        for name in trace.before:
            replace_module(model, name, StandIn(model.get_submodule(name), trace.output_shapes[name]))
    if not last:
        for name in trace.after:
            replace_module(model, name, Absent())


def find_structure_of_stage(model: nn.Module, whole: Structure, trace: PipelineTrace) -> Structure:
    """The structure of what a rank still holds: blocks, embeddings and head by the names they always had."""
    held = {name for name, module in model.named_modules() if not isinstance(module, STAND_INS)}
    found = find_structure(model)

    def keep(pairs: tuple[tuple[str, nn.Module], ...]) -> tuple[tuple[str, nn.Module], ...]:
        return tuple((name, module) for name, module in pairs if name in held)

    return type(whole)(
        **{
            **{field: getattr(found, field) for field in found.__dataclass_fields__},
            "stacks": (keep(whole.stacks[0]),),
            "embeddings": keep(whole.embeddings),
            "head": whole.head if whole.head is not None and whole.head[0] in held else None,
            "attention": keep(whole.attention),
        }
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


class Skip(nn.Module):
    """Stands where a block is that another rank or another of this rank's stages holds, and hands its input on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


class StandIn(nn.Module):
    """Stands where an embedding was: zeros of the right shape, or what came in."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        self.embedding_dim = getattr(module, "embedding_dim", None)
        self.shape = shape
        self.dtype = next(module.parameters()).dtype

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.shape is None:
            return x
        if self.embedding_dim is not None:
            return torch.zeros(*x.shape, self.embedding_dim, dtype=self.dtype, device=x.device)
        return torch.zeros(x.shape[0], *self.shape[1:], dtype=self.dtype, device=x.device)


class Absent(nn.Module):
    """Stands where a module was that runs after this rank's last block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a stage leaves the forward before this module")


class Receive(nn.Module):
    """Stands before a stage's first block: gives the hidden states that the stage got instead of its input."""

    def __init__(self, tuples: bool) -> None:
        super().__init__()
        self.tuples = tuples
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return (hidden,) if self.tuples else hidden


class Leave(nn.Module):
    """Stands after a stage's last block: leaves the model's forward with the hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise LeaveForward(args[0] if args else kwargs["hidden_states"])


class LeaveForward(Exception):
    """Carries the hidden states out of a forward."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("the hidden states leave the stage")
        self.hidden = hidden


STAND_INS = (Skip, StandIn, Absent, Receive, Leave)


# Stages and schedule.


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


class PipelineEngineStrategy:
    """Makes the stages and the schedule; wraps each stage for data parallelism."""

    name = "pp_schedule"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """The plain value; schedules come with the degrees."""
        return Choices(knob=self.name, values=("1f1b",))

    def apply(self, build: Build) -> None:
        """Sets build.step_engine."""
        plan: PipelinePlan | None = build.pipeline
        if plan is None:
            return
        mesh: DeviceMesh = build.mesh
        training = build.training_module
        stages = [make_stage(build, plan, training, stage) for stage in plan.own]
        # The model that is saved keeps its names; what a step calls are the stages.
        wrapped = wrap_data_parallel(build, mesh, stages)
        build.module = nn.ModuleList(wrapped)
        build.step_engine = PipelineEngine(build, plan, mesh, stages, wrapped)
        build.model.__dict__["tied_over_stages"] = {late: early for early, late in plan.tied}
        for early, late in plan.tied:
            _share_tied_gradient(build, mesh, early, late)


def make_stage(build: Build, plan: PipelinePlan, training: TrainingModule, stage: int) -> Stage:
    """A stage around its own view of the model: shared modules, other stand-ins."""
    start, stop = plan.cuts[stage]
    blocks = plan.trace.blocks
    model = training.model
    if len(plan.own) > 1:
        model = view_of_blocks(model, blocks, start, stop)
        _drop_outside(model, plan.trace, first=start == 0, last=stop == len(blocks))
    receive = None
    if start > 0:
        receive = Receive(plan.trace.tuples)
        replace_module(model, blocks[start - 1], receive)
    if stop < len(blocks):
        replace_module(model, blocks[stop], Leave())
    module = TrainingModule(model, training.loss)
    return Stage(module, receive, plan.trace.hidden_dtype, build.forward_context)


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
            node._modules[name.rpartition(".")[2]] = Skip()
    return top


def _copy_shallow(module: nn.Module | None) -> nn.Module:
    assert module is not None
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin


def _drop_outside(model: nn.Module, trace: PipelineTrace, *, first: bool, last: bool) -> None:
    """In a view: stand-ins for what runs before and after the blocks, where another stage of the rank holds it."""
    parents_copied = trace.blocks[0].rpartition(".")[0].split(".")
    for name in (*(() if first else trace.before), *(() if last else trace.after)):
        module = model.get_submodule(name)
        if isinstance(module, STAND_INS):
            continue
        # Parents that are not on the way to the blocks are shared with the other view: copy them first.
        node, parts = model, name.split(".")
        for depth, part in enumerate(parts[:-1]):
            if parts[: depth + 1] != parents_copied[: depth + 1]:
                node._modules[part] = _copy_shallow(node._modules[part])
            node = node.get_submodule(part)
        before = name in trace.before
        node._modules[parts[-1]] = StandIn(module, trace.output_shapes[name]) if before else Absent()


class PipelineEngine:
    """Runs a rank's share of a step through the pipeline."""

    def __init__(
        self, build: Build, plan: PipelinePlan, mesh: DeviceMesh, stages: list[Stage], wrapped: list[nn.Module]
    ) -> None:
        config = build.config
        self._build = build
        self._stages = stages
        self._group = mesh.get_group("pp")
        self._first, self._last = 0 in plan.own, len(plan.cuts) - 1 in plan.own
        self._scale: torch.Tensor = torch.ones((), device=build.device)
        shape = list(plan.trace.hidden_shape)
        shape[0] = config.micro_batch
        if config.tp > 1:
            shape[1] //= config.tp  # between blocks the sequence is split
        hidden = torch.empty(shape, dtype=plan.trace.hidden_dtype, device="meta")
        total = torch.empty((), device="meta")
        parts = [
            PipelineStage(
                module,
                stage,
                len(plan.cuts),
                build.device,
                input_args=() if stage == 0 else (hidden.clone().requires_grad_(),),
                output_args=(total if stage == len(plan.cuts) - 1 else hidden.clone().requires_grad_(),),
                group=self._group,
            )
            for stage, module in zip(plan.own, wrapped, strict=True)
        ]
        self._schedule: Any = SCHEDULES[config.pp_schedule](
            parts if config.pp_schedule in SEVERAL_STAGES_PER_RANK else parts[0],
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
        config, device = self._build.config, self._build.device
        self._scale = scale
        if self._build.scaler is not None:
            self._build.scaler.scale(torch.zeros((), device=device))  # stages without a loss need its state too
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
                sums[0] += torch.stack([loss.detach() for loss in losses]).sum() / self._unscale()
                for stage in self._stages:
                    if stage.counts:
                        sums[1] += torch.stack(stage.counts).sum()
                        stage.counts.clear()
        dist.all_reduce(sums, group=self._group)
        return sums[0], sums[1]

    def _unscale(self) -> torch.Tensor:
        scaler = self._build.scaler
        return self._scale if scaler is None else self._scale * scaler.get_scale()


def _share_tied_gradient(build: Build, mesh: DeviceMesh, early: str, late: str) -> None:
    """Sums the gradient of a parameter over the two stages that hold it, once per step, and counts it once."""
    rank, stages = axis_rank(mesh, "pp"), build.config.pp
    group = _ends_group(mesh)
    if rank not in (0, stages - 1):
        return
    name = early if rank == 0 else late
    parameter = build.model.get_parameter(name)
    build.gradient_weights[id(parameter)] = 0.5

    def share() -> None:
        assert parameter.grad is not None
        dist.all_reduce(local_tensor(parameter.grad), group=group)

    build.finish_gradients.append(share)


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
