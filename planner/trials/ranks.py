"""A rank of a trial: its device, its process group, and what all ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autoplan.errors import DeviceError

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext

RENDEZVOUS_TIMEOUT_S = 300.0
"""Seconds for all ranks to join; a cold file system makes them slow."""

COLLECTIVE_TIMEOUT_S = 100.0
"""A collective that takes longer is stuck."""


def pick_device(context: RankContext, kind: str) -> torch.device:
    """This rank's own device.

    Raises:
        DeviceError: there is no such device for this rank.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or torch.cuda.device_count() <= context.local_rank:
        raise DeviceError(
            f"rank {context.local_rank} has no CUDA device: torch sees "
            f"{torch.cuda.device_count() if torch.cuda.is_available() else 0}",
            hint="Use --device cpu, or fewer ranks with --nproc.",
        )
    device = torch.device("cuda", context.local_rank)
    torch.cuda.set_device(device)
    return device


def join_ranks(context: RankContext, device: str) -> None:
    """Joins the process group if there is more than one rank."""
    if context.world_size == 1:
        return
    context.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", RENDEZVOUS_TIMEOUT_S)
    limit_collectives()  # the timeout was for joining


def limit_collectives() -> None:
    """Sets COLLECTIVE_TIMEOUT_S for every process group of this rank: torch gives those of a mesh 10 minutes and more.

    torch has no public names for it.
    """
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    world = getattr(dist.distributed_c10d, "_world", None)
    if change is not None and world is not None and dist.is_initialized():
        for group in list(world.pg_map):
            change(timedelta(seconds=COLLECTIVE_TIMEOUT_S), group)


class RankSync:
    """Exchanges values between all ranks of a trial, so that all decide the same; with one rank nothing is exchanged.

    Args:
        world_size: Number of ranks.
        device: Where the exchanged tensors are made, if it is a GPU.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size = world_size
        self.device = device if device.type == "cuda" else torch.device("cpu")

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def mean(self, value: float) -> float:
        """The mean of a value over the ranks."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return float(tensor) / self.world_size

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.largest([float(flag)])[0] > 0

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.largest([0.0])
