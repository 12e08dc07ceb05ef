"""Agreement between the ranks of a trial: each rank gets the slowest rank's times, so that all decide the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class RankSync:
    """Exchanges values between all ranks of a trial; with one rank nothing is exchanged.

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
