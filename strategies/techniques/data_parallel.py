"""Data parallelism: DDP where each rank holds the whole model, FSDP2 (and HSDP) where ranks share it.

The gradient of a run is a sum over all samples divided by the count of the whole global batch. DDP and FSDP2 average
over the data-parallel ranks, so `Build.gradients.ranks` multiplies the loss by their number (strategies/run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.config import PLAIN
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.techniques.mesh import GlobalNormClipper, axis_size, data_position, sum_over_axes
from autoplan.strategies.workloads.workload import Workload

# What the blocks' parameters are gathered in. The blocks' matmuls run in this type under autocast in any case; what
# lies outside the blocks stays fp32, so that the residual stream does too.
GATHER_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DataParallelStrategy:
    """Replicas (DDP), shards (FSDP2), or shards within replicas (HSDP)."""

    name = "dp_replicate"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """One rank; more ranks come from `techniques.degrees.legal_degrees`, which sees all degrees together."""
        return offer(self.name, (1,))

    def apply(self, build: Build) -> None:
        """Wraps build.module and sets how gradients are synchronised, summed and clipped."""
        if build.mesh is None:
            return
        mesh: DeviceMesh = build.mesh
        build.gradients.sum_over_ranks = lambda tensor: sum_over_axes(mesh, tensor, ("dp_replicate", "dp_shard"))
        build.gradients.clip = GlobalNormClipper(mesh, build.gradients.norm_weights)
        _, build.gradients.ranks = data_position(mesh)
        if build.pipeline.cut is None:  # else each stage is wrapped by PipelineEngineStrategy
            build.module = wrap_data_parallel(build, mesh, [build.module])[0]


def wrap_data_parallel(build: Build, mesh: DeviceMesh, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Wraps what a step calls, one module or one per pipeline stage of this rank, and sets hooks.set_sync."""
    if build.config.dp == 1:
        return list(modules)
    return apply_ddp(build, mesh, modules) if uses_ddp(build) else apply_fsdp(build, mesh, modules)


def uses_ddp(build: Build) -> bool:
    """DDP for replicas of plain parameters; FSDP2 for shards, and for replicas of tensor-parallel parameters.

    DDP's buckets do not take DTensors; FSDP2 over a mesh of (dp_replicate, 1) does the same job for them.
    """
    return build.config.dp_shard == 1 and build.config.tp == 1


def apply_ddp(build: Build, mesh: DeviceMesh, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Wraps modules in DistributedDataParallel: one all-reduce per bucket, overlapped with the backward."""
    wrapped = [_wrap_ddp(build, mesh, module) for module in modules]

    def set_sync(sync: bool) -> None:
        for module in wrapped:
            module.require_backward_grad_sync = sync  # type: ignore[assignment]  # what no_sync() sets

    build.hooks.set_sync = set_sync
    return wrapped


def _wrap_ddp(build: Build, mesh: DeviceMesh, module: nn.Module) -> nn.Module:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module  # DDP refuses a stage that trains nothing
    # torch's own default is None: 25 MiB with a first bucket of 1 MiB. A number given is the first bucket's too.
    bucket = build.config.ddp_bucket_mb
    return DistributedDataParallel(
        module,
        device_ids=[build.device.index] if build.device.type == "cuda" and build.device.index is not None else None,
        process_group=mesh.get_group("dp_replicate"),
        bucket_cap_mb=None if bucket == PLAIN.ddp_bucket_mb else bucket,
        static_graph=build.config.ddp_static_graph,
        gradient_as_bucket_view=True,  # saves one copy of the gradients
        broadcast_buffers=False,  # each rank keeps the running statistics of its own micro-batches
    )


def apply_fsdp(build: Build, mesh: DeviceMesh, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Shards each repeated block, then what is left, with fully_shard; over (dp_replicate, dp_shard) it is HSDP."""
    config = build.config
    shard_mesh = mesh["dp_replicate", "dp_shard"] if config.dp_replicate > 1 else mesh["dp_shard"]
    reshard = config.reshard_after_forward and config.dp_shard > 1
    gathered = gather_dtype(build)
    policy = MixedPrecisionPolicy(
        param_dtype=gathered,
        reduce_dtype=torch.float32 if gathered is not None else None,
        cast_forward_inputs=False,  # autocast casts where it should; the residual stream stays fp32
    )
    units = [
        fully_shard(block, mesh=shard_mesh, reshard_after_forward=reshard, mp_policy=policy)
        for block in shard_units(build)
    ]
    # The outermost unit is needed again at once in the backward: gathering it twice would gain nothing.
    roots = [fully_shard(module, mesh=shard_mesh, reshard_after_forward=False) for module in modules]

    set_prefetch(units, config.fsdp_prefetch)

    build.hooks.set_sync = fsdp_gradient_sync(roots, every=config.gradient_sync == "every")
    return list(modules)


def fsdp_gradient_sync(roots: Sequence[FSDPModule], *, every: bool) -> Callable[[bool], None]:
    """What is called before each micro-step, with True before the last.

    A reduce-scatter averages over the ranks and is added to the shard's gradient, so that the sum over micro-steps is
    the same whether each is scattered or their sum is.

    Args:
        roots: The outermost units.
        every: Each micro-step's gradients are scattered: a rank keeps its shard of them. Replicas (HSDP) share their
            sums at the last. Else all ranks keep whole gradients up to the last micro-step, which scatters the sum.
    """

    def at_the_last(sync: bool) -> None:
        for root in roots:
            root.set_requires_gradient_sync(sync)
            root.set_is_last_backward(sync)

    def at_every(sync: bool) -> None:
        for root in roots:
            root.set_requires_all_reduce(sync)

    return at_every if every else at_the_last


def set_prefetch(units: Sequence[FSDPModule], ahead: int) -> None:
    """Has each unit start gathering the next `ahead` units in the forward, and those before it in the backward.

    0 leaves torch's own order: in the forward the next gathering starts when the host reaches the next unit, in the
    backward one unit ahead.
    """
    if ahead == 0:
        return
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + ahead]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, place - ahead) : place])))


def shard_units(build: Build) -> list[nn.Module]:
    """The modules that are gathered and freed as one: the repeated blocks, with what already wraps them."""
    blocks = (build.model.get_submodule(name) for name, _ in build.structure.all_blocks)
    return [block for block in blocks if next(block.parameters(), None) is not None]


def gather_dtype(build: Build) -> torch.dtype | None:
    """The type that the blocks' parameters are gathered in; None: as they are stored.

    On CPU they stay fp32: CPU autocast leaves layer_norm to types that agree, and bytes on loopback cost little.
    """
    return GATHER_DTYPES.get(build.config.precision) if build.device.type == "cuda" else None


def expected_shard_bytes(parameter_bytes: int, mesh: DeviceMesh | None) -> float:
    """What one rank keeps of parameters (or gradients, or states) of that size: its share over dp_shard."""
    return parameter_bytes / axis_size(mesh, "dp_shard")
