"""How much of the time of a check is left: parts that a verdict does not need are left out where it is short."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

_SAFETY = 1.5  # a part is begun where this many times its expected time is left


class TimeLimit:
    """The time of one run of the check.

    Args:
        time_s: Seconds from now; None: no limit.
        mesh: The mesh of the run; all its ranks decide alike.
    """

    def __init__(self, time_s: float | None = None, mesh: Any = None) -> None:
        self._end = None if time_s is None else time.monotonic() + time_s
        self._mesh = mesh

    def allows(self, expected_s: float) -> bool:
        """Whether a part that takes so many seconds should be begun; on several ranks, whether all of them say so."""
        allowed = self._end is None or time.monotonic() + _SAFETY * expected_s < self._end
        if self._mesh is None:
            return allowed
        votes = torch.tensor(float(allowed), device=self._mesh.device_type)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        return bool(votes.item())
