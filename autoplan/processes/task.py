"""The input of a run of ranks (`Task`), and how far the run is (`Progress`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoplan.errors import UsageError
from autoplan.record import Record

ANY_PHASE = "*"
FIRST_PHASE = "start"


class Placement(Record):
    """Which ranks of a world over several nodes are a node's, and where all of them meet."""

    first_rank: int
    """Of the node's ranks, which follow each other."""
    world_size: int
    master_addr: str
    """Of the first node, which serves torch's store."""
    master_port: int
    local_addr: str
    """Of this node, in the same network: collectives use its interface."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A function to run in one or more ranks, with the limits it runs under.

    `target` is called as `target(context, *args)` with a `RankContext`. What it returns becomes the rank's result
    (anything JSON can hold, or a pydantic model) unless it called `context.report(...)`.
    """

    target: str | Callable[..., Any]
    """"package.module:function", or any callable: it travels by cloudpickle, so closures and functions of a
    notebook or of an unguarded script work."""
    args: tuple[Any, ...] = ()
    ranks: int = 1
    directory: Path | None = None
    """Where heartbeats, results and output of the ranks are written; None takes a temporary one and removes it.
    Files of an earlier task in it are removed first: use one directory per task."""
    deadlines_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds allowed per phase; "*" is for phases not named. A phase with neither has no deadline of its own.
    Before the first `context.phase(...)` a rank is in phase "start"."""
    total_deadline_s: float | None = None
    """Seconds allowed from the request to the end of the last rank."""
    memory_limit_bytes: int | None = None
    """Host memory of all ranks and their descendants together. Polled; see `autoplan.processes.supervisor`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set in the ranks before the target runs; what torch reads while it is imported is read already. The rest of the
    environment is the planner's when the zygote was started."""
    independent: bool = False
    """The ranks have nothing to do with each other: each is a plain single process (`world_size` 1, its number is
    `context.rank`). One that fails ends the others, as it does where they train together."""
    placement: Placement | None = None
    """These ranks are a part of a world over several nodes; None: they are all there are."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(f"a task was given {self.ranks} ranks; it needs at least one")
        if isinstance(self.target, str) and self.target.count(":") != 1:
            raise UsageError(f"the target {self.target!r} is not of the form 'package.module:function'")


class Request(Record):
    """A task as it travels to the zygote; its arguments, and a target that has no name, are pickled beside it."""

    target: str | None
    ranks: int
    directory: str
    deadlines_s: dict[str, float]
    total_deadline_s: float | None
    memory_limit_bytes: int | None
    env: dict[str, str]
    independent: bool
    placement: Placement | None = None
    requested_at: float
    cwd: str
    sys_path: list[str]


class Progress(Record):
    """The state of a task while it runs."""

    seconds: float
    """Since the request."""
    phase: str
    """Of rank 0."""
    phase_seconds: float
    facts: tuple[dict[str, Any], ...]
    """Per rank."""
    memory_bytes: int
