"""Data parallelism: DDP where each rank holds the whole model, FSDP2 (and HSDP) where ranks share it.

The gradient of a run is a sum over all samples divided by the count of the whole global batch. DDP and FSDP2 average
over the data-parallel ranks, so `gradient_ranks` multiplies the loss by their number (strategies/run.py).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.base import Build, Choices
from autoplan.strategies.mesh import GlobalNormClipper, axis_size, data_position, sum_over_axes
from autoplan.strategies.structure import Structure
from autoplan.strategies.workload import Workload

# What the blocks' parameters are gathered in. The blocks' matmuls run in this type under autocast in any case; what
# lies outside the blocks stays fp32, so that the residual stream does too.
GATHER_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DataParallelStrategy:
    """Replicas (DDP), shards (FSDP2), or shards within replicas (HSDP)."""

    name = "dp_replicate"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """One rank; more ranks come from autoplan.strategies.degrees.legal_degrees, which sees all degrees together."""
        return Choices(knob=self.name, values=(1,))

    def apply(self, build: Build) -> None:
        """Wraps build.module and sets how gradients are synchronised, summed and clipped."""
        if build.mesh is None:
            return
        mesh: DeviceMesh = build.mesh
        build.sum_over_ranks = lambda tensor: sum_over_axes(mesh, tensor, ("dp_replicate", "dp_shard"))
        build.clip_gradients = GlobalNormClipper(mesh, build.gradient_weights)
        build.dp_rank, build.gradient_ranks = data_position(mesh)
        if build.config.dp == 1:
            return
        if uses_ddp(build):
            apply_ddp(build, mesh)
        else:
            apply_fsdp(build, mesh)


def uses_ddp(build: Build) -> bool:
    """DDP for replicas of plain parameters; FSDP2 for shards, and for replicas of tensor-parallel parameters.

    DDP's buckets do not take DTensors; FSDP2 over a mesh of (dp_replicate, 1) does the same job for them.
    """
    return build.config.dp_shard == 1 and build.config.tp == 1


def apply_ddp(build: Build, mesh: DeviceMesh) -> None:
    """Wraps the module in DistributedDataParallel: one all-reduce per bucket, overlapped with the backward."""
    if not any(parameter.requires_grad for parameter in build.module.parameters()):
        return
    wrapped = DistributedDataParallel(
        build.module,
        device_ids=[build.device.index] if build.device.type == "cuda" and build.device.index is not None else None,
        process_group=mesh.get_group("dp_replicate"),
        gradient_as_bucket_view=True,  # saves one copy of the gradients
        broadcast_buffers=False,  # buffers that depend on the batch are refused (micro_batch_dependent)
    )

    def set_gradient_sync(sync: bool) -> None:
        wrapped.require_backward_grad_sync = sync  # what no_sync() sets

    build.module = wrapped
    build.set_gradient_sync = set_gradient_sync


def apply_fsdp(build: Build, mesh: DeviceMesh) -> None:
    """Shards each repeated block, then what is left, with fully_shard; over (dp_replicate, dp_shard) it is HSDP.

    Raises:
        ConfigError: a block's parameters do not all live on the run's device.
    """
    config = build.config
    hybrid = config.dp_replicate > 1
    shard_mesh = mesh["dp_replicate", "dp_shard"] if hybrid else mesh["dp_shard"]
    reshard = config.reshard_after_forward and config.dp_shard > 1
    gathered = gather_dtype(build)
    block_policy = MixedPrecisionPolicy(
        param_dtype=gathered,
        reduce_dtype=torch.float32 if gathered is not None else None,
        cast_forward_inputs=False,  # autocast casts where it should; the residual stream stays fp32
    )
    for module in shard_units(build):
        fully_shard(module, mesh=shard_mesh, reshard_after_forward=reshard, mp_policy=block_policy)
    # The outermost unit is needed again at once in the backward: gathering it twice would gain nothing.
    root = fully_shard(build.module, mesh=shard_mesh, reshard_after_forward=False)
    if not isinstance(root, FSDPModule):
        raise ConfigError(
            f"{type(build.module).__name__} cannot be sharded by FSDP2", hint="Leave dp_shard at 1 for this model."
        )

    def set_gradient_sync(sync: bool) -> None:
        root.set_requires_gradient_sync(sync)
        root.set_is_last_backward(sync)

    build.set_gradient_sync = set_gradient_sync


def shard_units(build: Build) -> list[nn.Module]:
    """The modules that are gathered and freed as one: the repeated blocks, with what already wraps them."""
    blocks = (build.model.get_submodule(name) for name, _ in build.structure.blocks)
    return [block for block in blocks if next(block.parameters(), None) is not None]


def gather_dtype(build: Build) -> torch.dtype | None:
    """The type that the blocks' parameters are gathered in; None: as they are stored.

    On CPU they stay fp32: CPU autocast leaves layer_norm to types that agree, and bytes on loopback cost little.
    """
    return GATHER_DTYPES.get(build.config.precision) if build.device.type == "cuda" else None


def expected_shard_bytes(parameter_bytes: int, mesh: DeviceMesh | None) -> float:
    """What one rank keeps of parameters (or gradients, or states) of that size: its share over dp_shard."""
    return parameter_bytes / axis_size(mesh, "dp_shard")
