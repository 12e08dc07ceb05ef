"""What the ranks of a trial decide together: every rank sees the slowest rank's times and takes the same turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Team:
    """All ranks of a trial; with one rank nothing is exchanged."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size = world_size
        self.device = device if device.type == "cuda" else torch.device("cpu")

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return self.slowest([float(flag)])[0] > 0

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.slowest([0.0])
