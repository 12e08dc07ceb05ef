"""The limit that ended a task, in words: which stage, which function of the user's, and what to do next.

In: a `ProcessReport`. Out: a `LimitHit`, or None where no limit ended the task. What user code does outside trials
(inspecting, tracing, checking, exporting) ends with these texts; a trial's end is an outcome.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from autoplan.processes.report import Ended, ErrorReport, ProcessReport

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
    if report.ended is not Ended.MEMORY_LIMIT and _failed_on_device(report):
        return LimitHit(
            kind="memory",
            text=f"{doing} ran out of the device's memory{_in(function)}",
            hint="End what else holds memory there (on NVIDIA, nvidia-smi lists it), or take a device with more; "
            f"or make {function or 'the function'} take less.",
        )
    if report.ended is Ended.MEMORY_LIMIT or _failed_allocation(report):
        limit_bytes = report.memory_limit_bytes or 0
        used = f"used {_size(report.peak_memory_bytes)} of host memory"
        if report.ended is not Ended.MEMORY_LIMIT:
            used = "asked for more host memory than there is for it"
        return LimitHit(
            kind="memory",
            text=f"{doing} {used}{_in(function)}; the limit is {_size(limit_bytes)}",
            hint=f"Raise the limit, for example --memory-limit {math.ceil(2 * limit_bytes / 2**20)}MiB, if the machine "
            f"has it; or make {function or 'the function'} take less.",
        )
    if report.ended is Ended.DEADLINE:
        place = hanging_frame(report)
        seconds = report.phase_deadline_s or report.seconds
        return LimitHit(
            kind="time",
            text=f"{doing} was ended after {seconds:.0f} s{_in(function)}" + (f" ({place})" if place else ""),
            hint=f"Give it more time with a larger --budget. If {function or 'it'} never returns, run it by itself in "
            "Python.",
        )
    return None


def _in(function: str | None) -> str:
    return f" in {function}" if function else ""


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def is_out_of_memory(error: ErrorReport | BaseException) -> bool:
    """Whether an exception says that memory ran out, on the host or on a device."""
    if isinstance(error, ErrorReport):
        names, message = error.type_names, error.message
    else:
        names, message = tuple(kind.__qualname__ for kind in type(error).__mro__), str(error)
    if {name.rpartition(".")[2] for name in names} & {"MemoryError", "OutOfMemoryError"}:
        return True
    return any(text in message for text in _OUT_OF_MEMORY_TEXTS)


def _failed_allocation(report: ProcessReport) -> bool:
    """Whether a rank failed at the hard limit that stands behind the polled one."""
    failure = report.first_failure
    return failure is not None and failure.error is not None and is_out_of_memory(failure.error)


def _failed_on_device(report: ProcessReport) -> bool:
    """Whether the memory that a rank lacked was a device's: torch has an exception type for that."""
    failure = report.first_failure
    return failure is not None and failure.error is not None and failure.error.is_a("OutOfMemoryError")


def hanging_frame(report: ProcessReport) -> str | None:
    """Where a rank was when it was told to end: the innermost frame of the user's own, as "file.py, line 3, in f".

    A rank writes its stack when it gets SIGTERM (rank.py). None where it could not, or ran no code of the user's.
    """
    failure = report.first_failure
    if failure is None:
        return None
    for stack in failure.stderr_tail.split(_STACK_BEGINS)[1:]:
        for frame in _FRAME.finditer(stack):
            if _is_users(frame["file"]):
                return f"{Path(frame['file']).name}, line {frame['line']}, in {frame['function']}"
    return None


def _is_users(file: str) -> bool:
    if file.startswith("<") or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
        return False
    return not any(Path(file).is_relative_to(folder) for folder in _library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    """Where Python's own modules and autoplan's are; with and without its links followed."""
    own = Path(__file__).parent.parent
    folders = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")]
    folders += [own, own.resolve(), *(own.resolve().parent / name for name in ("planner", "probes", "strategies"))]
    return tuple({str(folder) for path in folders for folder in (path, path.resolve())})
