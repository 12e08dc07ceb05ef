"""Data parallelism: DDP where each rank holds the whole model, FSDP2 (and HSDP) where ranks share it.

The gradient of a run is a sum over all samples divided by the count of the whole global batch. DDP and FSDP2 average
over the data-parallel ranks, so `Build.gradients.ranks` multiplies the loss by their number (strategies/run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from autoplan.strategies.techniques.base import Build, Strategy
from autoplan.strategies.techniques.mesh import GlobalNormClipper, data_position, sum_over_axes
from autoplan.strategies.techniques.precision import AUTOCAST_DTYPES


class DataParallelStrategy(Strategy):
    """Replicas (DDP), shards (FSDP2), or shards within replicas (HSDP)."""

    name = "dp_replicate"

    def apply(self, build: Build) -> None:
        """Wraps build.module and sets how gradients are synchronised, summed and clipped."""
        if build.mesh is None:
            return
        mesh: DeviceMesh = build.mesh
        build.gradients.sum_over_ranks = lambda tensor: sum_over_axes(mesh, tensor, ("dp_replicate", "dp_shard"))
        build.gradients.clip = GlobalNormClipper(mesh, build.gradients.norm_weights)
        _, build.gradients.ranks = data_position(mesh)
        if build.cut is None:  # else each stage is wrapped by PipelineEngineStrategy
            build.module = wrap_data_parallel(build, mesh, [build.module])[0]


def wrap_data_parallel(build: Build, mesh: DeviceMesh, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Wraps what a step calls, one module or one per pipeline stage of this rank, and sets hooks.set_sync.

    DDP for replicas of plain parameters; FSDP2 for shards, over (dp_replicate, dp_shard) for HSDP, and for replicas of
    tensor-parallel parameters: DDP's buckets do not take DTensors, and over (dp_replicate, 1) it does the same job.
    """
    config = build.config
    if config.dp == 1:
        return list(modules)
    if config.dp_shard == 1 and config.tp == 1:
        find_unused = build.workload.find_unused_parameters
        wrapped = [wrap_ddp(module, mesh, build.device, find_unused=find_unused) for module in modules]
        build.hooks.set_sync = ddp_gradient_sync(wrapped)
        return wrapped
    roots = shard_modules(
        with_parameters(build.model, [name for name, _ in build.structure.all_blocks]),
        modules,
        mesh["dp_replicate", "dp_shard"] if config.dp_replicate > 1 else mesh["dp_shard"],
        reshard=config.reshard_after_forward and config.dp_shard > 1,
        gathered=gather_dtype(config.precision, build.device.type),
        reduced=torch.float32 if config.parameters != "own" else None,
        on_host=config.offload == "parameters",
    )
    build.hooks.set_sync = fsdp_gradient_sync(roots, every=config.gradient_sync == "every")
    return list(modules)


def ddp_gradient_sync(wrapped: Sequence[nn.Module]) -> Callable[[bool], None]:
    """The function to call before each micro-step, with True before the last: only the last one reduces gradients."""

    def set_sync(sync: bool) -> None:
        for module in wrapped:
            module.require_backward_grad_sync = sync  # type: ignore[assignment]  # what no_sync() sets

    return set_sync


def wrap_ddp(module: nn.Module, mesh: DeviceMesh, device: torch.device, *, find_unused: bool = False) -> nn.Module:
    """A module whose gradients DDP averages over the replicas; itself where it trains nothing.

    Args:
        module: What a step calls.
        mesh: The mesh, with an axis dp_replicate.
        device: This rank's.
        find_unused: A backward may leave a parameter without a gradient; where all ranks do, it has none.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module  # DDP refuses a stage that trains nothing
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" and device.index is not None else None,
        process_group=mesh.get_group("dp_replicate"),
        gradient_as_bucket_view=True,  # saves one copy of the gradients
        broadcast_buffers=False,  # each rank keeps the running statistics of its own micro-batches
        find_unused_parameters=find_unused,
    )


def shard_modules(
    blocks: Sequence[nn.Module],
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard: bool,
    gathered: torch.dtype | None,
    reduced: torch.dtype | None = None,
    on_host: bool = False,
) -> list[FSDPModule]:
    """Shards blocks one by one, in place, then what is left of the modules that hold them; returns the latter.

    Args:
        blocks: What is gathered and freed as one.
        modules: What a step calls.
        mesh: Of one axis (shards), or of two (replicas of shards).
        reshard: Free a block's parameters after its forward.
        gathered: The type that parameters are gathered in; None: as they are stored.
        reduced: The type that gradients are reduced in; None: fp32 where parameters are gathered in another type.
        on_host: Shards of parameters, gradients and states lie in the host's memory, where the optimizer steps.
    """
    reduce_dtype = torch.float32 if gathered is not None else reduced
    policy = MixedPrecisionPolicy(
        param_dtype=gathered,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,  # autocast casts where it should; the residual stream stays fp32
    )
    rest = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
    # The outermost unit is needed again at once in the backward: gathering it twice would gain nothing.
    return [
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=rest, offload_policy=offload)
        for module in modules
    ]


def fsdp_gradient_sync(roots: Sequence[FSDPModule], *, every: bool) -> Callable[[bool], None]:
    """The function to call before each micro-step, with True before the last.

    A reduce-scatter averages over the ranks, and its result is added to the shard's gradient. So the sum over
    micro-steps is the same whether each micro-step's gradients are scattered or only their sum.

    Args:
        roots: The outermost units.
        every: True: each micro-step's gradients are scattered, and a rank keeps its shard. Replicas (HSDP) share their
            sums at the last. False: all ranks keep whole gradients up to the last micro-step, which scatters the sum.
    """

    def at_the_last(sync: bool) -> None:
        for root in roots:
            root.set_requires_gradient_sync(sync)
            root.set_is_last_backward(sync)

    def at_every(sync: bool) -> None:
        for root in roots:
            root.set_requires_all_reduce(sync)

    return at_every if every else at_the_last


def with_parameters(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these names that have parameters."""
    modules = (model.get_submodule(name) for name in names)
    return [module for module in modules if next(module.parameters(), None) is not None]


def gather_dtype(precision: str, device_type: str) -> torch.dtype | None:
    """The type that the blocks' parameters are gathered in; None: as they are stored.

    The blocks' matmuls run in it under autocast in any case; what lies outside the blocks stays fp32, so that the
    residual stream does too. On CPU the blocks stay fp32: CPU autocast leaves layer_norm to types that agree, and bytes
    on loopback cost little.
    """
    return AUTOCAST_DTYPES.get(precision) if device_type == "cuda" else None
