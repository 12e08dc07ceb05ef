"""The report that comes back from a task: how it ended (`ProcessReport`), rank by rank; and the error raised instead.

`build_report` puts a report together from what the supervisor saw and what the ranks wrote. A rank that fails is no
error here: the report says so. `TaskFailedError` is for callers that need the result of a task.
"""

from __future__ import annotations

import time
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoplan.errors import AutoplanError, DeviceError
from autoplan.processes.files import rank_file, read_json, read_tail
from autoplan.processes.task import FIRST_PHASE, Task
from autoplan.record import Record
from autoplan.text import printable


class Ended(StrEnum):
    """How a task ended."""

    FINISHED = "finished"
    """Every rank exited with status 0."""
    RANK_FAILED = "rank_failed"
    """A rank raised, exited with another status or was killed by a signal that the supervisor did not send."""
    DEADLINE = "deadline"
    """A phase, or the whole task, ran past its deadline."""
    MEMORY_LIMIT = "memory_limit"
    """The ranks and their descendants used more host memory than allowed."""
    CANCELLED = "cancelled"
    """The caller asked for the end."""
    ZYGOTE_LOST = "zygote_lost"
    """The zygote died or fell silent; the ranks were killed with it."""
    NODE_LOST = "node_lost"
    """A node of several is gone, or there were too few; the ranks on the others were ended."""
    NOT_STARTED = "not_started"
    """The machine had no process, descriptor or port to give: the ranks could not be started."""


class ErrorReport(Record):
    """A Python exception that left the target."""

    type_name: str
    """Fully qualified, for example "torch.OutOfMemoryError"."""
    type_names: tuple[str, ...]
    """The qualified names of the class and its bases, so that a caller can look for a base by name."""
    message: str
    traceback: str

    def is_a(self, name: str) -> bool:
        """Whether the exception is of this class, by qualified or by plain name."""
        return any(entry == name or entry.rpartition(".")[2] == name for entry in self.type_names)


class RankReport(Record):
    """How one rank ended."""

    rank: int
    pid: int | None
    exit_code: int | None
    """None if it was killed by a signal, or if its end was not seen."""
    signal: int | None
    phase: str
    facts: dict[str, Any]
    """The facts that it last gave to `context.heartbeat(...)`, merged over its life."""
    result: Any | None
    error: ErrorReport | None
    stderr_tail: str
    stdout_tail: str
    started: bool
    """Whether the target was entered."""
    failed_after_s: float | None
    """Seconds from the request to its failure; None where it did not fail by itself."""
    phase_seconds: dict[str, float]
    """Seconds in each phase."""


class ProcessReport(Record):
    """How a task ended, rank by rank."""

    ended: Ended
    phase: str
    """Of the rank that ended the task, else of rank 0 at the end."""
    phase_deadline_s: float | None
    """The deadline that was passed; None if `ended` is not DEADLINE."""
    failed_rank: int | None
    """The rank that ended the task, where one did."""
    ranks: tuple[RankReport, ...]
    seconds: float
    """From the request to this report."""
    startup_s: float | None
    """From the request to the first line of the target, in the slowest rank; None if one never got there."""
    peak_memory_bytes: int
    """Largest host memory seen by the poll: anonymous and shared pages of the ranks and their descendants. A page
    shared by several of them counts in each, so this is an upper bound."""
    memory_limit_bytes: int | None
    data_limit_bytes: int | None
    """The hard limit behind the polled one (RLIMIT_DATA, per process), where it was set."""
    kernel_oom_kills: int
    """How often the kernel's OOM killer acted during the task: in our cgroup, else anywhere on this machine."""
    swept: int
    """Processes other than ranks that were still there and were killed."""
    left_behind: int
    """Processes that SIGKILL did not end within the time allowed (uninterruptible sleep)."""
    phase_seconds: dict[str, float]
    """Seconds in each phase, of `failed_rank` or else rank 0."""
    trouble: str = ""
    """Why the ranks could not be started, or which node was lost."""

    @property
    def first_failure(self) -> RankReport | None:
        """The rank that ended the task; None if it finished, was cancelled or lost its zygote."""
        return None if self.failed_rank is None else self.ranks[self.failed_rank]

    @property
    def results(self) -> tuple[Any, ...]:
        """The results, by rank."""
        return tuple(rank.result for rank in self.ranks)

    def check(self) -> ProcessReport:
        """This report, if the task finished.

        Raises:
            TaskFailedError: It did not; the text is `describe()`.
        """
        if self.ended is not Ended.FINISHED:
            raise TaskFailedError(self)
        return self

    def describe(self) -> str:
        """How the task ended, in one line."""
        failure = self.first_failure
        where = f"in phase {self.phase!r} after {self.seconds:.1f} s"
        if failure is not None and len(self.ranks) > 1:
            where = f"rank {failure.rank} " + where
        match self.ended:
            case Ended.DEADLINE:
                return f"over its deadline of {self.phase_deadline_s:g} s {where}"
            case Ended.MEMORY_LIMIT:
                return (
                    f"used {self.peak_memory_bytes / 2**30:.2f} GiB of host memory "
                    f"{where}; the limit is {(self.memory_limit_bytes or 0) / 2**30:.2f} GiB"
                )
            case Ended.RANK_FAILED if failure is not None:
                return f"{_describe_end(failure)} {where}"
            case Ended.ZYGOTE_LOST:
                return f"the process that starts the trials was lost {where}"
            case Ended.NODE_LOST:
                return f"{self.trouble} {where}"
            case Ended.NOT_STARTED:
                return f"no process could be started: {self.trouble}"
            case _:
                return f"{self.ended.value.replace('_', ' ')} {where}"


def _describe_end(rank: RankReport) -> str:
    if rank.error is not None:
        return f"{rank.error.type_name}: {rank.error.message.strip() or '(no text)'}"
    if rank.signal is not None:
        return f"killed by signal {rank.signal}"
    return f"exit status {rank.exit_code}"


class TaskFailedError(AutoplanError):
    """A task whose result is needed did not finish; `report` says how it ended."""

    code = "task_failed"

    def __init__(self, report: ProcessReport) -> None:
        super().__init__(report.describe())
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        return (TaskFailedError, (self.report,))


class ZygoteError(DeviceError):
    """The helper process that starts the ranks could not be started or used.

    `transient`: the machine had no process or memory to give, or the helper was killed; another try may do.
    """

    code = "zygote"

    def __init__(self, message: str, *, hint: str | None = None, transient: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.transient = transient


class StopTask(Exception):
    """Raised by a caller's `on_progress` to end the task: `Zygote.run` then returns a report, `CANCELLED`."""


# From what the supervisor saw, and what the ranks wrote.


def build_report(task: Task, directory: Path, requested_at: float, ended: dict[str, Any]) -> ProcessReport:
    """The report of a task.

    Args:
        task: As it was requested.
        directory: Where the ranks wrote.
        requested_at: CLOCK_MONOTONIC at the request.
        ended: The supervisor's last message; from a lost zygote only `ended` and `swept`.
    """
    now = time.monotonic()
    seen = ended.get("ranks") or [{} for _ in range(task.ranks)]
    seen += [{} for _ in range(task.ranks - len(seen))]
    beats = [read_json(rank_file(directory, rank, "heartbeat.json")) or {} for rank in range(task.ranks)]
    failed_rank, failed_ranks = ended.get("failed_rank"), ended.get("failed_ranks", [])
    ranks = tuple(
        _rank_report(directory, rank, seen[rank], beats[rank], failed=rank in failed_ranks, since=requested_at, now=now)
        for rank in range(task.ranks)
    )
    lead = failed_rank or 0
    starts = [beat["started_at"] for beat in beats if beat.get("started_at") is not None]
    return ProcessReport(
        ended=Ended(ended["ended"]),
        phase=ranks[lead].phase,
        phase_deadline_s=ended.get("phase_deadline_s"),
        failed_rank=failed_rank,
        ranks=ranks,
        seconds=now - requested_at,
        startup_s=max(starts) - requested_at if len(starts) == task.ranks else None,
        peak_memory_bytes=ended.get("peak_memory_bytes", 0),
        memory_limit_bytes=task.memory_limit_bytes,
        data_limit_bytes=ended.get("data_limit_bytes"),
        kernel_oom_kills=ended.get("kernel_oom_kills", 0),
        swept=ended.get("swept", 0),
        left_behind=ended.get("left_behind", 0),
        phase_seconds=ranks[lead].phase_seconds,
        trouble=ended.get("trouble", ""),
    )


def _rank_report(
    directory: Path, rank: int, seen: dict[str, Any], beat: dict[str, Any], *, failed: bool, since: float, now: float
) -> RankReport:
    written = read_json(rank_file(directory, rank, "result.json"))
    failure = read_json(rank_file(directory, rank, "error.json"))
    failed_at = failure["at"] if failure else seen["ended_at"] if failed else None
    # without the list of C extensions that faulthandler writes below a stack: it says nothing of the fault
    stderr = read_tail(rank_file(directory, rank, "stderr")).splitlines()
    stderr = [line for line in stderr if not line.startswith("Extension modules: ")]
    return RankReport(
        rank=rank,
        pid=seen.get("pid", beat.get("pid")),
        exit_code=seen.get("exit_code"),
        signal=seen.get("signal"),
        phase=beat["phases"][-1][0] if beat else FIRST_PHASE,
        facts=beat.get("facts", {}),
        result=written["result"] if written else None,
        error=None if failure is None else ErrorReport.model_validate(_printable(failure["error"])),
        stderr_tail=printable("\n".join(stderr)),
        stdout_tail=printable(read_tail(rank_file(directory, rank, "stdout"))),
        started=beat.get("started_at") is not None,
        failed_after_s=None if failed_at is None else failed_at - since,
        phase_seconds=_phase_seconds(beat, seen.get("ended_at") or now),
    )


def _printable(error: dict[str, Any]) -> dict[str, Any]:
    """The exception that a rank wrote, as a screen may show it."""
    shown = {key: printable(error[key]) for key in ("type_name", "message", "traceback")}
    return shown | {"type_names": tuple(map(printable, error["type_names"]))}


def _phase_seconds(beat: dict[str, Any], ended_at: float) -> dict[str, float]:
    """Seconds in each phase; one that was entered more than once counts as the sum."""
    seconds: dict[str, float] = {}
    for (name, since), (_, until) in pairwise([*beat.get("phases", []), ("", ended_at)]):
        seconds[name] = seconds.get(name, 0.0) + until - since
    return seconds
