"""What comes back from a task: how it ended (`ProcessReport`), rank by rank, and the error for one that had to finish.

`TaskFailedError` is here and not in errors.py, since it carries a report and `ProcessReport.check` raises it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from autoplan.errors import AutoplanError
from autoplan.record import Record


class Ended(StrEnum):
    """How a task ended."""

    FINISHED = "finished"
    """Every rank exited with status 0; independent ones (`Task.independent`) may have ended in any way."""
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
    """What it last gave to `context.heartbeat(...)`, merged over its life."""
    result: Any | None
    error: ErrorReport | None
    stderr_tail: str
    stdout_tail: str
    started: bool
    """Whether the target was entered."""
    failed_after_s: float | None
    """Seconds from the request to its failure; None where it did not fail by itself."""


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
    """Why the ranks could not be started, where they could not."""

    @property
    def first_failure(self) -> RankReport | None:
        """The rank that ended the task; None if it finished, was cancelled or lost its zygote."""
        return None if self.failed_rank is None else self.ranks[self.failed_rank]

    @property
    def results(self) -> tuple[Any, ...]:
        """The results, by rank."""
        return tuple(rank.result for rank in self.ranks)

    def check(self) -> ProcessReport:
        """This report, if the task finished; of independent processes each one's end is to be looked at.

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
