"""Several ranks of one script: they take each decision together, and exchange what each of them measured.

All ranks make the same optimizer steps, so rank 0's decision at a step is the decision of all. Between the ranks of one
diagnosis go times and names of lines, through the store that torchrun would serve.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autoplan.planner.diagnose.clock import Clock, Step, telling
from autoplan.planner.diagnose.records import PARTS, Exchange, Observation, RankBlock

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

REDUCES = ("all_reduce", "reduce", "broadcast", "barrier")
"""Calls that can be left out: each rank goes on with its own tensor."""

GATHERS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "broadcast_object_list",
    "gather",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
"""Calls that cannot: what they fill would stay empty."""


class Peers:
    """The other ranks; of one rank alone each answer is its own.

    Args:
        store: Where they meet; None for one rank.
        rank: Of this process.
        ranks: How many there are.
    """

    def __init__(self, store: Store | None = None, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self._store, self._count = store, 0

    def agree(self, value: Any) -> Any:
        """What rank 0 gives here. All ranks must come here as often as each other."""
        if self._store is None:
            return value
        self._count += 1
        key = f"autoplan/agreed/{self._count}"
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        return json.loads(self._store.get(key))

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives here, by rank; it waits for the slowest."""
        if self._store is None:
            return [value]
        self._count += 1
        self._store.set(f"autoplan/gathered/{self._count}/{self.rank}", json.dumps(value))
        keys = [f"autoplan/gathered/{self._count}/{rank}" for rank in range(self.ranks)]
        return [json.loads(self._store.get(key)) for key in keys]


class _Done:
    """The handle of an exchange that was left out."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class CollectiveHooks:
    """The exchange between ranks: calls of torch.distributed, and the gradients that DistributedDataParallel averages.

    Attributes:
        calls: How often the script exchanged something that can be left out.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, 0

    def install(self) -> None:
        """Places the hooks; functions that a script imports by name later are these."""
        if not dist.is_available():
            return
        for name in REDUCES:
            setattr(dist, name, self._counted(getattr(dist, name)))
        for name in GATHERS:
            setattr(dist, name, self.clock.region(getattr(dist, name), "communication", skip=False))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def left_out(*args: Any, **kwargs: Any) -> _Done | None:
            return _Done() if kwargs.get("async_op") else None

        def count(*args: Any, **kwargs: Any) -> None:
            self.calls += self.clock.here

        return telling(self.clock.region(function, "communication", instead=left_out), count)

    def facts(self, called: Sequence[torch.nn.Module], steps: int) -> Exchange | None:
        """What the ranks exchange in a step; None without a process group of several ranks."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        wrapped = wrapped_models(called)
        gradients = sum(
            one.numel() * one.element_size() for model in wrapped for one in model.parameters() if one.requires_grad
        )
        return Exchange(ddp=bool(wrapped), gradient_bytes=gradients, calls=self.calls / steps)


def wrapped_models(called: Sequence[torch.nn.Module]) -> list[torch.nn.parallel.DistributedDataParallel]:
    """The models whose gradients DistributedDataParallel averages."""
    kind = torch.nn.parallel.DistributedDataParallel
    return [one for outer in called for one in outer.modules() if isinstance(one, kind)]


def critical(observations: Sequence[Observation]) -> int:
    """The rank that the others wait for: most of its time lies outside backward, where DDP waits, and exchanges."""
    own = [one.mean_s * (1 - one.share("backward") - one.share("communication")) for one in observations]
    return own.index(max(own))


def rank_block(steps: Sequence[Step], peers: Peers) -> RankBlock:
    """A block in which the ranks exchanged nothing, from the steps of this rank and those of the others."""
    means = {part: statistics.fmean(step.parts.get(part, 0.0) for step in steps) for part in PARTS}
    parts = {part: seconds for part, seconds in means.items() if seconds}
    given = peers.gather([[one.seconds for one in steps], [one.inputs for one in steps], parts])
    seconds, inputs = [one[0] for one in given], [one[1] for one in given]
    most, mean = (sum(map(function, zip(*inputs, strict=True))) for function in (max, statistics.fmean))
    return RankBlock(
        seconds=tuple(map(statistics.fmean, seconds)),
        inputs=tuple(map(statistics.fmean, inputs)),
        lockstep_s=statistics.fmean(map(max, zip(*seconds, strict=True))),
        largest_inputs=most / mean if mean else 1.0,
        parts=tuple(one[2] for one in given),
    )
