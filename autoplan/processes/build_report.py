"""Puts a report together: from what the supervisor saw, and from what the ranks wrote."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from autoplan.processes.files import rank_file, read_json, read_tail
from autoplan.processes.report import Ended, ErrorReport, ProcessReport, RankReport
from autoplan.processes.task import FIRST_PHASE, Task
from autoplan.text import printable


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
        _rank_report(directory, rank, seen[rank], beats[rank], failed=rank in failed_ranks, since=requested_at)
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
        phase_seconds=_phase_seconds(beats[lead], seen[lead].get("ended_at") or now),
        trouble=ended.get("trouble", ""),
    )


def _rank_report(
    directory: Path, rank: int, seen: dict[str, Any], beat: dict[str, Any], *, failed: bool, since: float
) -> RankReport:
    written = read_json(rank_file(directory, rank, "result.json"))
    failure = read_json(rank_file(directory, rank, "error.json"))
    failed_at = failure["at"] if failure else seen["ended_at"] if failed else None
    return RankReport(
        rank=rank,
        pid=seen.get("pid", beat.get("pid")),
        exit_code=seen.get("exit_code"),
        signal=seen.get("signal"),
        phase=beat["phases"][-1][0] if beat else FIRST_PHASE,
        facts=beat.get("facts", {}),
        result=written["result"] if written else None,
        error=_error_report(failure["error"]) if failure else None,
        stderr_tail=printable(_without_modules(read_tail(rank_file(directory, rank, "stderr")))),
        stdout_tail=printable(read_tail(rank_file(directory, rank, "stdout"))),
        started=beat.get("started_at") is not None,
        failed_after_s=None if failed_at is None else failed_at - since,
    )


def _without_modules(text: str) -> str:
    """Without the list of C extensions that faulthandler writes below a stack: it says nothing of the fault."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("Extension modules: "))


def _error_report(error: dict[str, Any]) -> ErrorReport:
    """The exception that a rank wrote, as a screen may show it."""
    return ErrorReport(
        type_name=printable(error["type_name"]),
        type_names=tuple(map(printable, error["type_names"])),
        message=printable(error["message"]),
        traceback=printable(error["traceback"]),
    )


def _phase_seconds(beat: dict[str, Any], ended_at: float) -> dict[str, float]:
    """Seconds in each phase; one that was entered more than once counts as the sum."""
    phases = beat.get("phases", [])
    ends = [at for _, at in phases[1:]] + [ended_at]
    seconds: dict[str, float] = {}
    for (name, since), until in zip(phases, ends, strict=True) if phases else ():
        seconds[name] = seconds.get(name, 0.0) + until - since
    return seconds
