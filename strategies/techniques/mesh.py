"""The device mesh of a config, and what has to be summed or gathered over all of it.

Four axes, outermost first: pp (stages talk least), dp_replicate, dp_shard, tp (talks most, so its ranks are
neighbours on one node). Every rank holds one coordinate on each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autoplan.errors import ConfigError
from autoplan.strategies.analysis.structure import clean_name
from autoplan.strategies.config import TrainingConfig

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def world_size() -> int:
    """Ranks of the default process group, or of the launcher that started this process, or 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def build_mesh(config: TrainingConfig, device_type: str) -> DeviceMesh | None:
    """The mesh of a config over the default process group; None for one rank.

    A process group that a launcher prepared (torchrun's environment) is initialised here if it is not yet.

    Raises:
        ConfigError: the ranks that run are not the ranks that the config is for.
    """
    ranks = world_size()
    if ranks != config.world_size:
        raise ConfigError(
            f"the plan is for {config.world_size} rank(s) (dp_replicate {config.dp_replicate} x dp_shard "
            f"{config.dp_shard} x tp {config.tp} x pp {config.pp}) and {ranks} run(s)",
            hint=f"Start it with torchrun --nproc-per-node {config.world_size} on one machine (or --nnodes times "
            f"--nproc-per-node with that product), or find a plan for {ranks}: autoplan search --nproc {ranks}.",
        )
    if config.world_size == 1:
        return None
    return make_mesh((config.pp, config.dp_replicate, config.dp_shard, config.tp), device_type)


def make_mesh(shape: tuple[int, int, int, int], device_type: str) -> DeviceMesh:
    """The mesh of these degrees, in the order of AXES, over the default process group, which is initialised here."""
    if not dist.is_initialized():
        # gloo beside NCCL carries objects and CPU tensors
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def axis_size(mesh: DeviceMesh | None, axis: str) -> int:
    """Ranks along an axis; 1 without a mesh."""
    return 1 if mesh is None else int(mesh.size(AXES.index(axis)))


def axis_rank(mesh: DeviceMesh | None, axis: str) -> int:
    """This rank's coordinate on an axis; 0 without a mesh."""
    return 0 if mesh is None else int(mesh.get_local_rank(axis))


def data_position(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Which share of the global batch this rank takes, and of how many: tp and pp ranks share theirs."""
    shard = axis_size(mesh, "dp_shard")
    rank = axis_rank(mesh, "dp_replicate") * shard + axis_rank(mesh, "dp_shard")
    return rank, axis_size(mesh, "dp_replicate") * shard


def broadcast_values(model: nn.Module) -> None:
    """Gives every rank the parameters and buffers of rank 0; what splits a model takes them to be equal already.

    They are sent as bytes, since gloo does not know every dtype.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        values = tensor.data
        if type(values) is not torch.Tensor or values.layout is not torch.strided or values.is_meta:
            continue
        held = values[tuple(slice(1) if stride == 0 else slice(None) for stride in values.stride())]  # of an expand()
        if held.numel() == 0:
            continue
        sent = held.contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), 0)
        if not held.is_contiguous():
            held.copy_(sent)


def sum_over_axes(mesh: DeviceMesh, tensor: torch.Tensor, axes: Iterable[str]) -> torch.Tensor:
    """The sum of a tensor over the ranks of some axes, on each of them. Changes the tensor in place."""
    for axis in axes:
        if axis_size(mesh, axis) > 1:
            dist.all_reduce(tensor, group=mesh.get_group(axis))
    return tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_count(tensor: torch.Tensor) -> int:
    """Over how many ranks a tensor's elements are spread; 1 for a tensor that each rank holds whole."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "gradients are reduced before they are measured"
        if not placement.is_replicate():
            count *= tensor.device_mesh.size(axis)
    return count


class GlobalNormClipper:
    """Clips gradients that are spread over ranks, in whatever mix of layouts, to one norm, with one all-reduce.

    Each rank adds up the squares of its local elements, divided by the number of ranks of its stage that hold the
    same element; the sum over the world is the squared norm of all gradients.

    Args:
        mesh: The mesh of the run.
        weights: By id of a parameter, the share with which this rank counts it (tied over two stages: a half);
            1 where not given.
    """

    def __init__(self, mesh: DeviceMesh, weights: Mapping[int, float] | None = None) -> None:
        self._device = mesh.device_type
        self._stage_ranks = mesh.size() // axis_size(mesh, "pp")
        self._weights = weights if weights is not None else {}  # by reference: a pipeline adds to it later

    def __call__(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clips, by the formula of torch.nn.utils.clip_grad_norm_; returns the 2-norm of all gradients before that.

        Every rank of the world calls it.
        """
        held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        gradients = [local_tensor(gradient) for _, gradient in held]
        square = torch.zeros((), device=self._device)
        if gradients:  # else a stage whose parameters are all frozen
            low = any(gradient.dtype in (torch.bfloat16, torch.float16) for gradient in gradients)
            found = torch._foreach_norm(gradients, 2, dtype=torch.float32) if low else torch._foreach_norm(gradients)
            norms = torch.stack([norm.float() for norm in found])
            shares = [
                self._weights.get(id(parameter), 1.0) * shard_count(gradient) / self._stage_ranks
                for parameter, gradient in held
            ]
            square = (norms.square() * torch.tensor(shares, device=norms.device)).sum()
            square = square.to(self._device)  # shards may lie on the host
        dist.all_reduce(square)
        norm = square.sqrt()
        if gradients:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
        return norm


def agree_on_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """fp16: where the gradients of any rank held inf or NaN, every rank skips the step and lowers the scale.

    Shards and stages differ in what they hold; a rank that stepped alone would leave the others' model.
    """
    # What torch's own ShardedGradScaler reads too: there is no public way.
    for found in scaler._found_inf_per_device(optimizer).values():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)


def rank_seed(seed: int, mesh: DeviceMesh | None) -> int:
    """The seed of what is random while training (dropout): another one on each rank, the workload's own on one."""
    return seed if mesh is None else seed + 1 + dist.get_rank()


def is_fused(placement: Placement, mesh_axis: str | None) -> bool:
    """Whether a weight of several projections side by side is split here: a rank holds its part of each."""
    # FSDP2 uses the same class on its own axis for the order of its shards, which torch puts together itself.
    return isinstance(placement, _StridedShard) and mesh_axis == "tp"


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor of which each rank may hold a part; all ranks of its mesh call it.

    A fused weight is gathered axis by axis: `full_tensor()` of torch 2.11 refuses it, and that of 2.13 puts one that
    is split twice along the same dim together in the wrong order.

    Args:
        tensor: A plain tensor, which is whole already, or a DTensor of any layout that a plan makes.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, axes = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    fused = [p for p, axis in zip(tensor.placements, axes, strict=False) if is_fused(p, axis)]
    if not fused:
        return tensor.full_tensor()
    dim, parts = fused[0].dim, fused[0].split_factor  # type: ignore[attr-defined]
    part, shape = tensor.to_local(), list(tensor.shape)
    shape[dim] //= mesh["tp"].size()
    # FSDP2 cuts what tensor parallelism has left to a rank: its shards come together first.
    for placement, axis in zip(tensor.placements, axes, strict=True):
        if axis != "tp" and not placement.is_replicate():
            part = _gather(part, mesh[axis], placement.dim, shape)  # type: ignore[attr-defined]
    shape[dim : dim + 1] = [parts, tensor.shape[dim] // parts]
    return _gather(part.unflatten(dim, (parts, -1)), mesh["tp"], dim + 1, shape).flatten(dim, dim + 1)


def _gather(part: torch.Tensor, mesh: DeviceMesh, dim: int, shape: list[int]) -> torch.Tensor:
    """The tensor of this shape whose contiguous pieces along `dim` the ranks of a mesh of one axis hold."""
    stride = torch.empty(shape, device="meta").stride()
    pieces = DTensor.from_local(
        part.contiguous(), mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
    )
    return pieces.full_tensor()


def gather_full(named: Mapping[str, torch.Tensor], mesh: DeviceMesh | None) -> dict[str, torch.Tensor]:
    """Whole tensors, on the CPU, of all stages, on every rank: for the parity check and for small models.

    Args:
        named: This rank's tensors by parameter name; shards are DTensors.
        mesh: The mesh of the run.

    Returns:
        By name, the union over the stages.
    """
    full = {name: whole_tensor(tensor).detach().cpu().clone() for name, tensor in named.items()}
    if axis_size(mesh, "pp") == 1:
        return full
    assert mesh is not None
    parts: list[dict[str, torch.Tensor] | None] = [None] * axis_size(mesh, "pp")
    dist.all_gather_object(parts, full, group=mesh.get_group("pp"))
    merged: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in (part or {}).items():
            if name in merged and not torch.equal(merged[name], tensor):
                raise RuntimeError(f"{name} is one parameter, and the copies of it that two stages hold differ")
            merged[name] = tensor
    return merged


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that the plain model gives them, whatever wraps it and whichever stage holds them.

    A parameter that two stages hold, tied, has one name: that of the first.
    """
    tied: Mapping[str, str] = getattr(model, "tied_over_stages", {})
    for name, parameter in model.named_parameters():
        plain = clean_name(name)
        yield tied.get(plain, plain), parameter
