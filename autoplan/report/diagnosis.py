"""A diagnosis in words and tables: where the time of a step goes, and the findings with their gain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplan.planner.diagnose.records import PARTS, Diagnosis, Finding
from autoplan.report import facts, terminal
from autoplan.units import format_number, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 20
"""Characters of a bar that is the whole step."""


LEAST_SHOWN = 0.03
"""Of a step, for a kind of operation to be on the screen."""


def headline(found: Diagnosis) -> str:
    """`train.py: 2 findings; a step takes 98.1 ms (95.0 ms to 102 ms), 412 steps in 58 s`."""
    count = len(found.findings)
    said = "nothing found" if not count else f"{count} finding{'s' if count > 1 else ''}, the costliest first"
    step = facts.with_interval(found.step_s, words=format_seconds)
    return f"{found.script}: {said}; a step takes {step}, {found.steps:,} steps in {format_seconds(found.seconds)}"


def part_rows(found: Diagnosis) -> facts.Rows:
    """Where the time of a step goes, the largest part first: mean, 10th to 90th percentile, share, line."""
    rows: list[tuple[str, ...]] = []
    for one in found.parts:
        between = f"{format_seconds(one.low)} to {format_seconds(one.high)}"
        bar = "#" * max(1, round(one.share * BAR_WIDTH)) if one.share >= 0.005 else ""
        rows.append((PARTS[one.part], format_seconds(one.seconds), between, f"{one.share:.0%}", bar, one.line or ""))
    return facts.Rows(("part of a step", "mean", "10 to 90 %", "share", "", "line"), rows)


def operation_rows(found: Diagnosis) -> facts.Rows:
    """The largest kinds of operations: share, calls, what they reach, and what bounds them."""
    rows: list[tuple[str, ...]] = []
    for one in found.operations:
        if one.share < LEAST_SHOWN and one is not found.operations[-1]:
            continue
        rates = [
            "" if rate is None else f"{format_number(rate / 1e9)} {unit}"
            for rate, unit in ((one.flops_per_s, "GFLOP/s"), (one.bytes_per_s, "GB/s"))
        ]
        caches = ", in caches" if one.bound == "memory" and (one.of_rate or 0) > 1 else ""
        bound = "" if one.bound is None else f"{one.bound} ({one.of_rate:.0%}{caches})"
        if one.bound == "launch" and (one.of_rate or 0) > 1:  # on a GPU
            bound = f"launch (takes the host {one.of_rate:.1f} times as long)"
        rows.append((one.kind, f"{one.share:.0%}", f"{one.calls:,.0f}" if one.calls else "", *rates, bound))
    return facts.Rows(("operations", "share", "calls", "FLOPs", "bytes", "bound by (of its rate)"), rows)


def rank_rows(found: Diagnosis) -> facts.Rows:
    """The ranks: the step as it is, the step when none waits for another, and the largest part with its line."""
    rows: list[tuple[str, ...]] = [
        (
            str(one.rank),
            format_seconds(one.step_s),
            "" if one.seconds is None else format_seconds(one.seconds),
            PARTS[one.part],
            one.line or "",
        )
        for one in found.ranks
    ]
    return facts.Rows(("rank", "step", "by itself", "largest part", "line"), rows)


AT_MOST = {"batches": "with batches at hand", "two_backwards": "without the later one"}
"""Causes whose removal takes away more than their mend does: making samples costs something, and so do later losses."""


def gain_words(finding: Finding) -> str:
    """`2.31 times as fast (2.20 to 2.43), measured without it`, or that it is estimated."""
    gain = finding.gain
    if finding.cause == "graphs" and not finding.measured:
        return "memory; what it does to the time was not measured"
    if not finding.measured:
        return f"up to {gain.median:.2f} times as fast, estimated from its own time"
    times = f"{gain.median:.2f} times as fast ({gain.low:.2f} to {gain.high:.2f}), measured"
    how = AT_MOST.get(finding.cause)
    return times if how is None else f"up to {times} {how}"


def show_diagnosis(console: Console, found: Diagnosis) -> None:
    """The diagnosis for a person."""
    terminal.say(console, "doctor", headline(found))
    for number, one in enumerate(found.findings, 1):
        where = f" ({one.line})" if one.line else ""
        terminal.say(console, str(number), f"{one.what}{where}")
        terminal.say(console, "  seen", one.evidence)
        if one.stack is not None and len(one.stack.frames) > 1:
            terminal.say(console, "  stack", f"{' > '.join(one.stack.frames)}: {one.stack.share:.0%} of the time")
        terminal.say(console, "  mend", one.mend)
        terminal.say(console, "  gain", gain_words(one))
    terminal.show_table(console, part_rows(found), title="Where the time of a step goes")
    terminal.show_table(console, operation_rows(found), title="Operations of a traced step")
    terminal.show_table(console, rank_rows(found), title="Ranks")
    for text in found.notes:
        terminal.say(console, "note", text)


def document(found: Diagnosis) -> dict[str, Any]:
    """What `--json` prints of it."""
    return {"headline": headline(found), **found.model_dump(mode="json")}
