"""Other people's code that an export runs: in a process of its own, within limits, and ended with all it started.

In: a function and its arguments. Out: what it returned. Two exports need it: one builds the workload's model, one has
the class of the other trainer read its arguments back.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from autoplan.errors import ExportError, UsageError
from autoplan.processes import Ended, Task, Zygote, limit_hit
from autoplan.units import parse_duration_s, parse_memory_bytes

DEFAULT_TIME_S = 300.0
"""Seconds that one function may take."""

MEMORY_SHARE = 0.8
"""Of the available memory, as a search takes by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportLimits:
    """The limits of one such function.

    Attributes:
        time_s: Seconds.
        memory_bytes: Host memory of all its processes together; None: MEMORY_SHARE of what is available.
    """

    time_s: float = DEFAULT_TIME_S
    memory_bytes: int | None = None


DEFAULT_LIMITS = ExportLimits()
LIMITS: ContextVar[ExportLimits] = ContextVar("LIMITS", default=DEFAULT_LIMITS)
"""The limits of the export that runs now."""


def make_limits(budget: str | float | None, memory_limit: str | int | None) -> ExportLimits:
    """The limits that the options of an export say.

    Raises:
        UsageError: not a duration, or not a size.
    """
    time_s = DEFAULT_TIME_S if budget is None else parse_duration_s(budget)
    size = None if memory_limit is None else parse_memory_bytes(memory_limit)
    if isinstance(size, float):
        size = int(size * _host_bytes("memory_total_bytes"))
    return ExportLimits(time_s=time_s, memory_bytes=size)


def run_user_code(
    target: str,
    args: tuple[Any, ...],
    *,
    doing: str,
    functions: Mapping[str, str],
    refused: str,
    hint: str,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Runs a function in a rank and returns its result.

    Args:
        target: "package.module:function"; it is called with a RankContext and the arguments.
        args: Its arguments.
        doing: What is done, as a noun, for the text about a limit.
        functions: By phase, the function of the user's that runs in it.
        refused: The beginning of the text where it fails by itself; its error follows.
        hint: What to do then.
        env: Set in the rank before torch and transformers are imported.

    Raises:
        ExportError: it failed, or a limit ended it.
    """
    limits = LIMITS.get()
    memory_bytes = limits.memory_bytes or int(MEMORY_SHARE * _host_bytes("memory_available_bytes"))
    task = Task(target=target, args=args, total_deadline_s=limits.time_s, memory_limit_bytes=memory_bytes)
    with Zygote(preload=("torch",), env=env) as zygote:
        report = zygote.run(task)
    if report.ended is Ended.FINISHED:
        return report.ranks[0].result
    hit = limit_hit(report, doing, functions)
    if hit is not None:
        raise ExportError(hit.text, hint=f"Nothing was written. {hit.hint}")
    failure = report.first_failure
    error = None if failure is None else failure.error
    said = (
        report.describe()
        if error is None
        else f"{error.type_name.rpartition('.')[2]}: {error.message.strip() or '(no text)'}"
    )
    raise ExportError(f"{refused}: {said.splitlines()[0]}", hint=hint)


def read_by_tool(
    target: str, args: tuple[Any, ...], *, tool: str, what: str = "the arguments", env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The values that a tool's own parser or class reads of what an export would write, in a process of its own.

    Args:
        target: "package.module:function"; it is called with a RankContext and the arguments.
        args: Its arguments.
        tool: The tool with its version, as the subject of a sentence.
        what: What the tool reads, for the text of an error.
        env: Set in the process before the tool is imported.

    Raises:
        ExportError: the tool refuses it, or a limit ended the process.
    """
    found: dict[str, Any] = run_user_code(
        target,
        args,
        doing=f"the check with {tool}",
        functions={},
        refused=f"{tool} refuses {what}",
        hint="Nothing was written. What the export knows of this version may be out of date: please report it.",
        env=env,
    )
    return found


def _host_bytes(name: str) -> int:
    """A figure of this machine's memory, by its name in the profile of the host."""
    from autoplan.probes.run import read_host_profile

    value = getattr(read_host_profile().host, name).value
    if value is None:
        raise UsageError(
            "how much memory this machine has is not known", hint="Say what an export may take: --memory-limit 8GiB."
        )
    return int(value)
