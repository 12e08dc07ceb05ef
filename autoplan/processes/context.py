"""The task as the target in it knows it, and the target's reports of its phase, progress and result."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.processes.files import rank_file, write_json
from autoplan.processes.task import FIRST_PHASE, Request

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LEAVE_WAIT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """What a rank gets from the supervisor, apart from the payload."""

    request: Request
    rank: int
    """Its number on this node."""
    global_rank: int
    """Among the ranks of all nodes."""
    world_size: int
    """Of independent processes each is alone."""
    zygote_pid: int
    store_port: int
    listen_fd: int | None
    data_limit_bytes: int | None

    def file(self, kind: str) -> Path:
        """One of the rank's files."""
        return rank_file(Path(self.request.directory), self.rank, kind)


class RankContext:
    """The first argument of every target."""

    def __init__(self, spec: RankSpec) -> None:
        place = spec.request.placement
        self._spec = spec
        self.rank = spec.global_rank
        self.world_size = spec.world_size
        self.local_rank = min(spec.rank, self.world_size - 1)  # of independent processes each is alone on its devices
        self.directory = Path(spec.request.directory)
        self.master_addr = "127.0.0.1" if place is None else place.master_addr
        self.master_port = spec.store_port
        """Bound and listening since before the first rank was started, so no other process can take it."""
        self._interface = None if place is None else interface_of(place.local_addr)
        self.requested_at = spec.request.requested_at
        """CLOCK_MONOTONIC when the planner asked for it: no other run of the task has the same."""
        self.reported = False
        """Whether `report` was called."""
        self._store: Store | None = None
        self._started_at: float | None = None
        self._phases: list[tuple[str, float]] = [(FIRST_PHASE, time.monotonic())]
        self._facts: dict[str, Any] = {}

    def phase(self, name: str) -> None:
        """Starts a phase; its deadline counts from here."""
        self._phases.append((name, time.monotonic()))
        self._write_heartbeat()

    def heartbeat(self, **facts: Any) -> None:
        """Adds facts about the progress (JSON) to those already given. It does not extend any deadline."""
        self._facts.update(facts)
        self._write_heartbeat()

    def report(self, result: Any) -> None:
        """Writes the rank's result; a later call replaces it.

        Args:
            result: Anything JSON can hold, or a pydantic model.
        """
        write_json(self._spec.file("result.json"), {"result": result})
        self.reported = True

    def init_process_group(self, backend: str, timeout_s: float) -> None:
        """Joins all ranks of the task in torch.distributed's default group.

        Rank 0 serves the store on the socket that was bound before the ranks were started. The variables of
        "env://" are set too, so that a later library call finds the same store.

        Args:
            backend: "gloo", "nccl", or one per device such as "cpu:gloo,cuda:nccl".
            timeout_s: For the meeting, and for every collective after it.
        """
        import torch.distributed as dist

        store, timeout = self.open_store(timeout_s), timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        # A rank that is through at once would otherwise close connections that another rank is still making.
        store.set(f"autoplan/joined/{self.rank}", "1")
        store.wait([f"autoplan/joined/{rank}" for rank in range(self.world_size)], timeout)

    def open_store(self, timeout_s: float) -> Store:
        """Meets the other ranks in the store of torchrun's variables, which are set: "env://" finds the same one.

        Args:
            timeout_s: For the meeting, and for a value that another rank is to set.
        """
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_s)
        if self._interface is not None:
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", self._interface)
        elif Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may resolve to nothing
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self.master_addr,
            self.master_port,
            self.world_size,
            is_master=self.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=self._spec.listen_fd,
        )
        os.environ["MASTER_ADDR"] = self.master_addr
        os.environ["MASTER_PORT"] = str(self.master_port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        return self._store

    def mark_started(self) -> None:
        """Notes that the target is about to be entered."""
        self._started_at = time.monotonic()
        self._write_heartbeat()

    def leave(self, wait_s: float = _LEAVE_WAIT_S) -> None:
        """Keeps rank 0, which serves the store, until the others are through, or so many seconds are over."""
        if self._store is None or self.world_size == 1:
            return
        with contextlib.suppress(RuntimeError):  # a rank that ended another way: the supervisor sees it
            self._store.set(f"autoplan/left/{self.rank}", "1")
            if self.rank == 0:
                others = [f"autoplan/left/{rank}" for rank in range(1, self.world_size)]
                self._store.wait(others, timedelta(seconds=wait_s))

    def _write_heartbeat(self) -> None:
        beat = {"pid": os.getpid(), "started_at": self._started_at, "phases": self._phases, "facts": self._facts}
        write_json(self._spec.file("heartbeat.json"), beat)


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address, as collectives want it named; None if none has it."""
    import psutil

    if address.startswith("127."):
        return "lo"
    names = psutil.net_if_addrs().items()
    return next((name for name, having in names if any(one.address == address for one in having)), None)
