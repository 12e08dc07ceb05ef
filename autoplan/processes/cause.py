"""The cause of a task's end: the program, a limit, its own fatal signal, something outside; and when to run it again.

Whoever asks for a task needs to know whether its end says something about the task. A Python exception does: the same
task would raise it again. A SIGKILL that nobody here sent does not: the task is run again (`run_again`). What user code
does outside trials (inspecting, tracing, checking, exporting) ends with the words of `limit_hit`, where a limit ended
it; a trial's end is an outcome.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Literal

from autoplan.processes.client import Zygote
from autoplan.processes.compile_cache import CUT_OFF_TEXTS, remove_cut_off
from autoplan.processes.report import Ended, ErrorReport, ProcessReport, ZygoteError
from autoplan.processes.task import Progress, Task

MAX_RETRIES = 2
"""A task is run at most this many times more."""

PAUSE_S = 1.0
"""Before it is run again: the driver frees a killed process's memory, and other programs their shared memory, late."""

LEAST_LEFT_S = 5.0
"""With less time than this left, a task is not run again."""

FATAL_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals that a program's own fault raises. Memory that another program damaged, or a rare race, raises them too."""

LIMIT_SIGNALS = frozenset({signal.SIGXCPU, signal.SIGXFSZ})
"""The limits of the user's shell on CPU time and file size (setrlimit(2)): the same again would meet them again."""

# Texts of exceptions that come from the state of the machine: a full disk or /dev/shm, no process or thread to be had,
# a port that is taken, a worker that was killed, a device that is busy or broken, a library that was cut off.
OUTSIDE_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
    "unable to allocate shared memory",
    "out of shared memory",
    "Resource temporarily unavailable",
    "can't start new thread",
    "Too many open files in system",
    "Address already in use",
    "is killed by signal: Killed",
    "is killed by signal: Terminated",
    "is killed by signal: Bus error",
    "devices are busy or unavailable",
    "device(s) is/are busy or unavailable",
    "uncorrectable ECC error",
    "GPU is lost",
    *CUT_OFF_TEXTS,
)
WORKER_KILLED = "is killed by signal: Killed"

WORKER_GONE = ("DataLoader worker", "exited unexpectedly")
"""Of torch's text where a loader's worker is gone and its signal is not known: killed, or ended by the dataset."""


class Cause(StrEnum):
    """The cause of the end of a task that did not finish."""

    PROGRAM = "program"
    """It raised, exited by itself, or gave no result: the same again would do the same. Never run again."""
    LIMIT = "limit"
    """Our memory limit or deadline, a limit of the shell, or the kernel's out-of-memory killer. Never run again."""
    FATAL_SIGNAL = "fatal_signal"
    """SIGSEGV, SIGBUS, SIGABRT and the like, or a loader's worker that is gone, which may be the program's own doing or
    not. The same in the same phase a second time is a verdict."""
    OUTSIDE = "outside"
    """A signal that nobody here sent, a lost zygote, a failed fork, a full /dev/shm: it says nothing about the task."""


def cause_of(report: ProcessReport) -> Cause | None:
    """The cause of a task's end; None if the task finished, or if the caller ended it."""
    match report.ended:
        case Ended.FINISHED | Ended.CANCELLED:
            return None
        case Ended.MEMORY_LIMIT | Ended.DEADLINE:
            return Cause.LIMIT
        case Ended.ZYGOTE_LOST:
            return Cause.LIMIT if report.kernel_oom_kills else Cause.OUTSIDE
        case Ended.NOT_STARTED | Ended.NODE_LOST:
            return Cause.OUTSIDE
        case Ended.RANK_FAILED:
            return _cause_of_rank(report)


def _cause_of_rank(report: ProcessReport) -> Cause:
    rank = report.first_failure
    assert rank is not None, "a failed task names the rank that failed"
    if killed_for_memory(report):
        return Cause.LIMIT
    if rank.error is not None:
        if is_from_outside(rank.error):
            return Cause.OUTSIDE
        gone = all(text in rank.error.message for text in WORKER_GONE)
        return Cause.FATAL_SIGNAL if gone else Cause.PROGRAM
    if rank.signal is None:
        return Cause.PROGRAM
    if rank.signal in LIMIT_SIGNALS:
        return Cause.LIMIT
    return Cause.FATAL_SIGNAL if rank.signal in FATAL_SIGNALS else Cause.OUTSIDE


def killed_for_memory(report: ProcessReport) -> bool:
    """Whether the kernel's out-of-memory killer ended the task: its counter rose, and a process died of SIGKILL."""
    if not report.kernel_oom_kills:
        return False
    if report.ended is Ended.ZYGOTE_LOST:
        return True
    rank = report.first_failure
    if rank is None:
        return False
    return rank.signal == signal.SIGKILL or (rank.error is not None and WORKER_KILLED in rank.error.message)


def is_from_outside(error: ErrorReport) -> bool:
    """Whether an exception, or one that it was raised from, comes from the state of the machine.

    Known by its type and by known texts. In a traceback the lines of exceptions are not indented, those of source are.
    """
    if error.is_a("KeyboardInterrupt"):
        return True
    lines = [error.message, *(line for line in error.traceback.splitlines() if not line.startswith(" "))]
    return any(text in line for line in lines for text in OUTSIDE_TEXTS)


def raised_from_outside(error: BaseException) -> BaseException | None:
    """The exception in a chain of causes that comes from the state of the machine; None if none does."""
    found: BaseException | None = error
    while found is not None and not any(text in str(found) for text in OUTSIDE_TEXTS):
        found = found.__cause__ or found.__context__
    return found


def machine_trouble(error: BaseException) -> BaseException | None:
    """The exception behind an error that says nothing about the code that raised it; None if there is none.

    Where memory ran out, or something outside failed, the rank raises this one instead of its own error: then the
    report shows it, and the task is run again or the limit is named.
    """
    found: BaseException | None = error
    while found is not None and not is_out_of_memory(found):
        found = found.__cause__ or found.__context__
    return found or raised_from_outside(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """A task that was run until its end says something about it, or until no further run was allowed.

    Attributes:
        report: Of the run that counts, or of the last one that did not.
        lost: The runs that do not count, in their order.
        settled: False: no run counts, and nothing is known of the task.
    """

    report: ProcessReport
    lost: tuple[ProcessReport, ...]
    settled: bool


def run_again(
    zygote: Zygote,
    task: Task,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_attempt: Callable[[ProcessReport], None] | None = None,
    left_s: Callable[[], float] | None = None,
) -> Runs:
    """Runs a task, and runs it again where something outside ended it: at most twice, after a pause.

    Args:
        zygote: Starts the ranks; where they could not be started, or could not be ended, by a new process of its own.
        task: What to run. Each run has the task's whole time, as far as `left_s` allows.
        on_progress: As `Zygote.run` takes it.
        on_attempt: Is told of each run that does not count.
        left_s: Seconds that are left now; None: as many as it takes.

    Raises:
        ZygoteError: no zygote could be started, also after pauses.
    """
    lost: list[ProcessReport] = []
    total_s = task.total_deadline_s
    while True:
        report = _run(zygote, task, on_progress)
        shortened = bool(lost) and report.ended is Ended.DEADLINE and task.total_deadline_s != total_s
        if not shortened and not _does_not_count(report, lost):
            return Runs(report=report, lost=tuple(lost), settled=True)
        if shortened:  # it had less time than the first run: that is no verdict on it
            return Runs(report=lost[-1], lost=tuple(lost), settled=False)
        lost.append(report)
        if on_attempt is not None:
            on_attempt(report)
        left = None if left_s is None else left_s() - PAUSE_S * len(lost)
        if len(lost) > MAX_RETRIES or (left is not None and left < max(LEAST_LEFT_S, report.seconds)):
            return Runs(report=report, lost=tuple(lost), settled=False)
        if report.left_behind or report.ended is Ended.NOT_STARTED:
            zygote.renew()
        for rank in report.ranks:
            if rank.error is not None:
                remove_cut_off(rank.error)
        time.sleep(PAUSE_S * len(lost))
        if left is not None:
            task = replace(task, total_deadline_s=left if total_s is None else min(left, total_s))


def _run(zygote: Zygote, task: Task, on_progress: Callable[[Progress], None] | None) -> ProcessReport:
    """One run; a zygote that does not start is tried again as a task is."""
    for retry in range(MAX_RETRIES):
        try:
            zygote.start()
            break
        except ZygoteError as error:
            if not error.transient:
                raise
            time.sleep(PAUSE_S * (retry + 1))
    return zygote.run(task, on_progress=on_progress)


def _does_not_count(report: ProcessReport, lost: list[ProcessReport]) -> bool:
    cause = cause_of(report)
    if cause is Cause.FATAL_SIGNAL:
        return _fatal_end(report) not in {_fatal_end(one) for one in lost if cause_of(one) is Cause.FATAL_SIGNAL}
    return cause is Cause.OUTSIDE


def _fatal_end(report: ProcessReport) -> tuple[int | None, str]:
    rank = report.first_failure
    return (None if rank is None else rank.signal), report.phase


# The limit that ended a task, in words.

_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+) in (?P<function>\S+)')
_STACK_BEGINS = "(most recent call first):"

# Texts of a plain RuntimeError that mean: the host's memory, or the limit on a process's data, was used up.
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitHit:
    """A limit that ended a task.

    Attributes:
        kind: time or memory.
        text: What was done, in which function, what it used and what the limit is.
        hint: What to do next.
    """

    kind: Literal["time", "memory"]
    text: str
    hint: str


def limit_hit(report: ProcessReport, doing: str, functions: Mapping[str, str] | None = None) -> LimitHit | None:
    """The limit that ended a task; None where none did.

    Args:
        report: How the task ended.
        doing: What the task did, as a noun: "the inspection of gpt2".
        functions: By phase, the function of the user's that runs in it, as a reader knows it: "make_batch(2, 0)".
    """
    function = (functions or {}).get(report.phase)
    where = f" in {function}" if function else ""
    error = None if report.first_failure is None else report.first_failure.error
    polled = report.ended is Ended.MEMORY_LIMIT
    if not polled and error is not None and error.is_a("OutOfMemoryError"):  # torch's own, where a device's ran out
        return LimitHit(
            kind="memory",
            text=f"{doing} ran out of the device's memory{where}",
            hint="End what else holds memory there (on NVIDIA, nvidia-smi lists it), or take a device with more; "
            f"or make {function or 'the function'} take less.",
        )
    if polled or (error is not None and is_out_of_memory(error)):  # or at the hard limit that stands behind that one
        limit_bytes = report.memory_limit_bytes or 0
        used = "asked for more host memory than there is for it"
        if polled:
            used = f"used {report.peak_memory_bytes / 2**30:.2f} GiB of host memory"
        return LimitHit(
            kind="memory",
            text=f"{doing} {used}{where}; the limit is {limit_bytes / 2**30:.2f} GiB",
            hint=f"Raise the limit, for example --memory-limit {math.ceil(2 * limit_bytes / 2**20)}MiB, if the machine "
            f"has it; or make {function or 'the function'} take less.",
        )
    if report.ended is Ended.DEADLINE:
        place = hanging_frame(report)
        seconds = report.phase_deadline_s or report.seconds
        return LimitHit(
            kind="time",
            text=f"{doing} was ended after {seconds:.0f} s{where}" + (f" ({place})" if place else ""),
            hint=f"Give it more time with a larger --budget. If {function or 'it'} never returns, run it by itself in "
            "Python.",
        )
    return None


def is_out_of_memory(error: ErrorReport | BaseException) -> bool:
    """Whether an exception says that memory ran out, on the host or on a device."""
    if isinstance(error, ErrorReport):
        names, message = error.type_names, error.message
    else:
        names, message = tuple(kind.__qualname__ for kind in type(error).__mro__), str(error)
    if {name.rpartition(".")[2] for name in names} & {"MemoryError", "OutOfMemoryError"}:
        return True
    return any(text in message for text in _OUT_OF_MEMORY_TEXTS)


def hanging_frame(report: ProcessReport) -> str | None:
    """Where a rank was when it was told to end: the innermost frame of the user's own, as "file.py, line 3, in f".

    A rank writes its stack when it gets SIGTERM (rank.py). None where it could not, or ran no code of the user's.
    """
    failure = report.first_failure
    if failure is None:
        return None
    for stack in failure.stderr_tail.split(_STACK_BEGINS)[1:]:
        for frame in _FRAME.finditer(stack):
            if is_users_file(frame["file"]):
                return f"{Path(frame['file']).name}, line {frame['line']}, in {frame['function']}"
    return None


def is_users_file(file: str) -> bool:
    """Whether a file of source is the user's own: no installed package, none of Python's or of autoplan's.

    Nor one that torch.compile has written, into its cache.
    """
    parts = Path(file).parts
    if file.startswith("<") or not {"site-packages", "dist-packages"}.isdisjoint(parts):
        return False
    if any(part.startswith("torchinductor_") for part in parts):
        return False
    return not any(Path(file).is_relative_to(folder) for folder in _library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    """Where Python's own modules and autoplan's are; with and without its links followed."""
    own = Path(__file__).parent.parent
    caches = (os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))
    folders = [Path(cache) for cache in caches if cache] + [
        Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")
    ]
    folders += [own, own.resolve(), *(own.resolve().parent / name for name in ("planner", "probes", "strategies"))]
    return tuple({str(folder) for path in folders for folder in (path, path.resolve())})
