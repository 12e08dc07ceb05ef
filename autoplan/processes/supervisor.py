"""Runs one task inside the zygote: starts the ranks, watches them, ends them, sweeps what they left.

Memory: the limit is polled over all descendants (every 20 to 100 ms; anonymous and shared resident pages, and the
proportional set size before anything is killed for it). In addition each process has RLIMIT_DATA, 1.5 times the
limit and 1 GiB, where no NVIDIA device can be used (a CUDA context maps far more than it touches).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoplan.processes import linux
from autoplan.processes.context import RankSpec
from autoplan.processes.files import drop_early_output, rank_file, read_json
from autoplan.processes.rank import run_forked
from autoplan.processes.report import Ended
from autoplan.processes.task import ANY_PHASE, FIRST_PHASE, Request

_FAST_TICK_S = 0.02
_SLOW_TICK_S = 0.1
_FAST_FOR_S = 2.0
_PROGRESS_S = 1.0
_TERM_GRACE_S = 2.0
_HELPER_GRACE_S = 0.2  # multiprocessing's resource tracker and the like end themselves, and clean up, at end of file
_KILL_WAIT_S = 10.0

# A rank killed by a signal is the cause; a peer's exception (connection reset) within this time is the effect. But for
# SIGABRT, with which a peer's own watchdog ends it.
EFFECT_WITHIN_S = 1.0


@dataclass(kw_only=True, slots=True)
class RankState:
    """One rank, as far as the supervisor knows it."""

    rank: int
    pid: int
    pidfd: int | None
    forked_at: float
    heartbeat_stamp: tuple[int, int] = (0, 0)
    phases: list[tuple[str, float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    signal: int | None = None
    ended_at: float | None = None

    @property
    def failed(self) -> bool:
        return self.ended_at is not None and self.exit_code != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why the task ends."""

    ended: Ended
    failed_rank: int | None = None
    phase_deadline_s: float | None = None
    trouble: str = ""


@dataclass(kw_only=True)
class Supervisor:
    """One task, from the first fork to the last wait.

    Attributes:
        request: What `Zygote.run` sent.
        payload: The pickled target and arguments.
        is_cancelled: Asks the planner: True if the task is to be cancelled.
        planner_fds: Descriptors of the zygote whose readiness is a reason to call `is_cancelled` at once, and which no
            rank may keep.
        send_progress: Takes a message for the planner.
    """

    request: Request
    payload: bytes
    is_cancelled: Callable[[], bool]
    planner_fds: list[int]
    send_progress: Callable[[dict[str, Any]], None]

    def __post_init__(self) -> None:
        self._directory = Path(self.request.directory)
        limit_bytes = self.request.memory_limit_bytes
        self._memory = MemoryWatch(os.getpid(), limit_bytes)
        self._ranks: list[RankState] = []
        self._swept: set[int] = set()
        self._began_at = time.monotonic()
        self._progress_at = 0.0
        env = {**os.environ, **self.request.env}
        self._data_limit_bytes = None if limit_bytes is None else data_limit_bytes(limit_bytes, env)

    def run(self) -> dict[str, Any]:
        """Runs the task to its end; nothing of it is left when this returns (see `left_behind`)."""
        oom_kills_before = linux.kernel_oom_kills()
        try:
            try:
                self._fork_ranks()
            except OSError as error:
                verdict = Verdict(ended=Ended.NOT_STARTED, trouble=f"{type(error).__name__}: {error}")
            else:
                verdict = self._watch()
        except BaseException:
            self._end_all(grace_s=0.0)
            raise
        failed_ranks = [state.rank for state in self._ranks if state.failed]
        urgent = verdict.ended is Ended.MEMORY_LIMIT  # memory runs out faster than a grace period
        left_behind = self._end_all(grace_s=0.0 if urgent else _TERM_GRACE_S)
        return {
            "kind": "ended",
            "ended": verdict.ended.value,
            "failed_rank": verdict.failed_rank,
            "failed_ranks": failed_ranks,
            "phase_deadline_s": verdict.phase_deadline_s,
            "ranks": [
                {"pid": r.pid, "exit_code": r.exit_code, "signal": r.signal, "ended_at": r.ended_at}
                for r in self._ranks
            ],
            "peak_memory_bytes": self._memory.peak_bytes,
            "data_limit_bytes": self._data_limit_bytes,
            "kernel_oom_kills": linux.kernel_oom_kills() - oom_kills_before,
            "swept": len(self._swept),
            "left_behind": left_behind,
            "trouble": verdict.trouble,
        }

    # -- start ---------------------------------------------------------------------------------------------

    def _fork_ranks(self) -> None:
        """Forks the ranks around a store socket that is bound before the first of them exists.

        Raises:
            OSError: the machine has no process, descriptor or port to give.
        """
        request = self.request
        place = request.placement
        first = place is None or place.first_rank == 0
        world_size = (1 if request.independent else request.ranks) if place is None else place.world_size
        here = ("127.0.0.1", 0) if place is None or not first else (place.master_addr, place.master_port)
        with socket.create_server(here, backlog=max(128, world_size)) as listener:
            for rank in range(request.ranks):
                spec = RankSpec(
                    request=request,
                    rank=rank,
                    global_rank=rank if place is None else place.first_rank + rank,
                    world_size=world_size,
                    zygote_pid=os.getpid(),
                    store_port=listener.getsockname()[1] if place is None else place.master_port,
                    listen_fd=listener.fileno() if first and rank == 0 and not request.independent else None,
                    data_limit_bytes=self._data_limit_bytes,
                )
                self._ranks.append(self._fork(spec, listener.fileno()))
        self.payload = b""

    def _fork(self, spec: RankSpec, listener_fd: int) -> RankState:
        own_fds = [r.pidfd for r in self._ranks if r.pidfd is not None]
        forked_at = time.monotonic()
        pid = os.fork()
        if pid == 0:
            run_forked(spec, self.payload, [*self.planner_fds, *own_fds, listener_fd])
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the rank does it too, and either may be first
        return RankState(rank=spec.rank, pid=pid, pidfd=linux.open_pidfd(pid), forked_at=forked_at)

    # -- watch ---------------------------------------------------------------------------------------------

    def _watch(self) -> Verdict:
        while True:
            young = time.monotonic() - self._began_at < _FAST_FOR_S
            self._wait(_FAST_TICK_S if young or self._memory.near_limit else _SLOW_TICK_S, self.planner_fds)
            if self.is_cancelled():
                return Verdict(ended=Ended.CANCELLED)
            self._reap()
            for state in self._ranks:
                self._read_heartbeat(state)
            over_limit = self._memory.poll()
            if failed := [state for state in self._ranks if state.failed]:
                return Verdict(ended=Ended.RANK_FAILED, failed_rank=min(failed, key=self._failed_at).rank)
            if all(state.ended_at is not None for state in self._ranks):
                return Verdict(ended=Ended.FINISHED)
            if (verdict := self._overdue()) is not None:
                return verdict
            if over_limit:
                largest = max(self._ranks, key=lambda state: self._memory.by_pid.get(state.pid, 0))
                return Verdict(ended=Ended.MEMORY_LIMIT, failed_rank=largest.rank)
            self._send_progress_if_due()
            self._limit_output()

    def _wait(self, timeout_s: float, planner_fds: Sequence[int] = ()) -> None:
        """Sleeps until the time is over, a rank ends, or one of the descriptors is ready."""
        pidfds = [state.pidfd for state in self._ranks if state.pidfd is not None]
        linux.await_readable([*planner_fds, *pidfds], timeout_s)

    def _reap(self) -> None:
        """Takes every wait status there is: of the ranks, and of orphans that the zygote adopted."""
        by_pid = {state.pid: state for state in self._ranks}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            state = by_pid.get(pid)
            if state is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            state.exit_code, state.signal = (code, None) if code >= 0 else (None, -code)
            state.ended_at = time.monotonic()
            if state.pidfd is not None:
                os.close(state.pidfd)
                state.pidfd = None

    def _read_heartbeat(self, state: RankState) -> None:
        path = rank_file(self._directory, state.rank, "heartbeat.json")
        try:
            stat = path.stat()
        except OSError:
            return
        stamp = (stat.st_ino, stat.st_mtime_ns)
        if stamp == state.heartbeat_stamp:
            return
        beat = read_json(path)
        if beat is not None:
            state.heartbeat_stamp = stamp
            state.facts = beat["facts"]
            state.phases = [(name, at) for name, at in beat["phases"]]
            self._progress_at = 0.0

    def _failed_at(self, state: RankState) -> float:
        assert state.ended_at is not None
        if state.signal not in (None, signal.SIGABRT):
            return state.ended_at - EFFECT_WITHIN_S
        written = read_json(rank_file(self._directory, state.rank, "error.json"))
        return state.ended_at if written is None else float(written["at"])

    def _overdue(self) -> Verdict | None:
        """The rank that is furthest over its phase's deadline, or the whole task over its own."""
        now, deadlines_s = time.monotonic(), self.request.deadlines_s
        late: list[tuple[float, int, float]] = []
        for state in self._ranks:
            name, since = state.phases[-1] if state.phases else (FIRST_PHASE, state.forked_at)
            limit_s = deadlines_s.get(name, deadlines_s.get(ANY_PHASE))
            if state.ended_at is None and limit_s is not None and now - since > limit_s:
                late.append((now - since - limit_s, state.rank, limit_s))
        if late:
            _, rank, limit_s = max(late)
            return Verdict(ended=Ended.DEADLINE, failed_rank=rank, phase_deadline_s=limit_s)
        total_s = self.request.total_deadline_s
        if total_s is not None and now - self.request.requested_at > total_s:
            running = next(state for state in self._ranks if state.ended_at is None)
            return Verdict(ended=Ended.DEADLINE, failed_rank=running.rank, phase_deadline_s=total_s)
        return None

    def _send_progress_if_due(self) -> None:
        now = time.monotonic()
        if now - self._progress_at < _PROGRESS_S:
            return
        self._progress_at = now
        phase, since = self._ranks[0].phases[-1] if self._ranks[0].phases else (FIRST_PHASE, self._began_at)
        self.send_progress(
            {
                "kind": "progress",
                "seconds": now - self.request.requested_at,
                "phase": phase,
                "phase_seconds": now - since,
                "facts": [state.facts for state in self._ranks],
                "memory_bytes": self._memory.bytes,
            }
        )

    def _limit_output(self) -> None:
        for state in self._ranks:
            for kind in ("stdout", "stderr"):
                drop_early_output(rank_file(self._directory, state.rank, kind))

    # -- end -----------------------------------------------------------------------------------------------

    def _end_all(self, *, grace_s: float) -> int:
        """SIGTERM to the ranks' groups, a grace period, then SIGKILL to every descendant until none is left.

        Every descendant of the zygote belongs to the task: it starts nothing else, and it adopts what loses its
        parent. Returns how many outlived SIGKILL (uninterruptible sleep).
        """
        if grace_s > 0:
            self._end_ranks(grace_s)
            helpers_until = time.monotonic() + _HELPER_GRACE_S
            while self._remaining() and time.monotonic() < helpers_until:
                time.sleep(0.01)
        rank_pids = {state.pid for state in self._ranks}
        give_up_at = time.monotonic() + _KILL_WAIT_S
        pause_s = 0.001
        while True:
            remaining = self._remaining()
            if not remaining or time.monotonic() > give_up_at:
                return len(remaining)
            for pid in remaining:
                linux.signal_quietly(pid, signal.SIGKILL)
            self._swept |= remaining - rank_pids
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _end_ranks(self, grace_s: float) -> None:
        """SIGTERM, the grace period, SIGKILL: to the groups of the ranks that still run."""
        running = [state for state in self._ranks if state.ended_at is None]
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
            for state in running:
                if state.ended_at is None:
                    linux.signal_quietly(state.pid, number, group=True)
                    linux.signal_quietly(state.pid, signal.SIGCONT, group=True)  # it may be stopped (trials/slices.py)
            give_up_at = time.monotonic() + wait_s
            while time.monotonic() < give_up_at and any(state.ended_at is None for state in running):
                self._wait(max(0.0, min(give_up_at - time.monotonic(), 0.05)))
                self._reap()
                self._limit_output()

    def _remaining(self) -> set[int]:
        """The descendants that are left once every wait status there is has been taken."""
        self._reap()
        return linux.descendants(os.getpid())


# The host memory of all descendants of a process.

_RELIST_S = 0.5
_LISTING_SHARE = 0.05  # of one core, at most: a walk of /proc takes long where thousands of processes run
_NEAR_LIMIT = 0.7
_CONFIRM_S = 0.25  # between exact readings: the kernel walks the page tables for each

# RLIMIT_DATA counts what a process maps, not what it touches, so it has to be larger than the polled limit.
_DATA_LIMIT_FACTOR = 1.5
_DATA_LIMIT_EXTRA_BYTES = 1 << 30

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""The files by which a process reaches an NVIDIA GPU: on Linux, and on Windows' Linux (WSL2)."""


def data_limit_bytes(memory_limit_bytes: int, env: dict[str, str]) -> int | None:
    """The RLIMIT_DATA that goes with a memory limit; None where CUDA may be used.

    The driver maps far more than it touches, so no limit on mappings (RLIMIT_AS, RLIMIT_DATA) is usable there.

    Args:
        memory_limit_bytes: The polled limit, for all processes together.
        env: The environment of the ranks.
    """
    uses_cuda = any(map(os.path.exists, GPU_FILES)) and env.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    return None if uses_cuda else int(memory_limit_bytes * _DATA_LIMIT_FACTOR) + _DATA_LIMIT_EXTRA_BYTES


class MemoryWatch:
    """Polls the memory of a process's descendants.

    The cheap reading (anonymous plus shared resident pages, summed) counts shared pages more than once. Only where
    it passes the limit does the exact one (proportional set size: the kernel walks the page tables) decide.
    """

    def __init__(self, root_pid: int, limit_bytes: int | None) -> None:
        self._root_pid = root_pid
        self._limit_bytes = limit_bytes
        self._pids: set[int] = set()
        self._listed_at = 0.0
        self._listing_s = 0.0
        self._confirmed_at = 0.0
        self.bytes = 0
        self.peak_bytes = 0
        self.by_pid: dict[int, int] = {}

    @property
    def near_limit(self) -> bool:
        """Whether the last reading asks for a shorter interval."""
        return self._limit_bytes is not None and self.bytes > _NEAR_LIMIT * self._limit_bytes

    def poll(self) -> bool:
        """Takes a reading.

        Returns:
            True if the limit is passed.
        """
        now = time.monotonic()
        wait_s = 0.0 if self.near_limit else _RELIST_S
        if now - self._listed_at >= max(wait_s, self._listing_s / _LISTING_SHARE):
            self._pids, self._listed_at = linux.descendants(self._root_pid), now
            self._listing_s = time.monotonic() - now
        self.by_pid = {pid: linux.resident_bytes(pid) for pid in self._pids}
        self.bytes = sum(self.by_pid.values())
        if self._limit_bytes is None or self.bytes <= self._limit_bytes:
            self.peak_bytes = max(self.peak_bytes, self.bytes)
            return False
        if now - self._confirmed_at < _CONFIRM_S and self.bytes < 1.5 * self._limit_bytes:
            return False
        self._confirmed_at = now
        self.by_pid = {pid: linux.proportional_bytes(pid) for pid in self._pids}
        self.bytes = sum(self.by_pid.values())
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return self.bytes > self._limit_bytes
