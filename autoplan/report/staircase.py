"""A staircase in words and tables: the terminal and the HTML page show the same."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autoplan.planner.records.baseline import is_plain_run, run_words
from autoplan.planner.verify.stairs import Effect, Staircase, interactions, is_noise
from autoplan.report import facts, terminal
from autoplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

NAME_WIDTH = 26
"""Characters of a technique's name in a line: with them both tables fit 80 columns."""

LEGEND = "+ faster, - slower, ~ within noise: steps in a row that are within noise are one"


def headline(found: Staircase) -> str:
    """`tutorial on Xeon: 2.9 times (2.7 to 3.1) the speed of the plain run in 4 steps, 5 rounds side by side`."""
    gain, rounds, _ = found.gain(found.plan, found.start)
    return (
        f"{found.workload} on {found.hardware}: {facts.with_interval(gain, ' times')} the speed of "
        f"{start_words(found)} in {len(found.order)} steps, {rounds} rounds side by side"
    )


def start_words(found: Staircase) -> str:
    """Where the staircase begins."""
    if found.start != found.own_setting and not is_plain_run(found.start):
        return found.start.describe()
    return run_words(found.start, found.own_setting)


def title(found: Staircase) -> str:
    """Over its steps."""
    return f"From {start_words(found)} to the plan, a step at a time"


def sign(effect: Effect) -> str:
    """One character: whether a step is faster (+), slower (-), within noise (~) or not measured (?)."""
    if effect.gain is None:
        return "?"
    return "~" if is_noise(effect.gain) else "+" if effect.gain.median > 1 else "-"


def step_rows(found: Staircase) -> facts.Rows:
    """The steps: the speed over the step before and over the start, and the peak memory."""
    memory = format_bytes(found.peak_memory_bytes(found.start))
    rows = _lines("", (start_words(found), found.start.describe()), "", "1.00", memory)
    for step in found.steps():
        so_far = "" if step.so_far is None else f"{step.so_far.median:.2f}"
        rows += _lines(sign(step), step.changes, gain_words(step), so_far, format_bytes(step.peak_memory_bytes))
    return facts.Rows(("step", "gain", "so far", "memory"), rows)


def part_rows(found: Staircase) -> facts.Rows:
    """Each technique alone, as a share of the start's speed; and the plan without it, as a share of the plan's."""
    alone, without = ({one.changes: one for one in some} for some in (found.alone(), found.left_out()))
    rows = []
    for changes in dict.fromkeys((*alone, *without)):
        one, other = alone.get(changes), without.get(changes)
        memory = "" if other is None else format_bytes(other.peak_memory_bytes)
        rows += _lines("", changes, *("" if e is None else gain_words(e) for e in (one, other)), memory)
    return facts.Rows(("technique", "alone", "plan without it", "memory"), rows)


def gain_words(effect: Effect) -> str:
    """`1.42 (1.36 to 1.48)`, or why there is no gain."""
    if effect.gain is not None:
        return f"{effect.gain.median:.2f} ({effect.gain.low:.2f} to {effect.gain.high:.2f})"
    return "not measured" if (effect.why_not or "").startswith("not measured") else "does not run"


def _lines(mark: str, names: Sequence[str], *cells: str) -> list[tuple[str, ...]]:
    """A row for each name, the figures in the last: a long list of names makes no wide table."""
    parts = [part for name in names for part in textwrap.wrap(name, NAME_WIDTH - 2, break_on_hyphens=False)]
    marked = [f"{mark if not number else '':1} {part}" for number, part in enumerate(parts)]
    return [(name.rstrip(), *([""] * len(cells))) for name in marked[:-1]] + [(marked[-1], *cells)]


def remarks(found: Staircase) -> list[str]:
    """Sentences: what depends on what, what does not run, what was disturbed, and what is left to measure."""
    steps, alone, left_out = found.steps(), found.alone(), found.left_out()
    said = [f"together: {text}" for text in interactions(steps, alone, left_out)]
    for where, effects in (("", steps), (" alone", alone), (" left out", left_out)):
        for effect in effects:
            if effect.why_not is not None and not effect.why_not.startswith("not measured"):
                said.append(f"{' '.join(effect.changes)}{where}: {effect.why_not}")
    unmeasured = sum(effect.gain is None and (effect.why_not or "").startswith("not") for effect in (*alone, *left_out))
    rest = f"; {unmeasured} of the second table are not measured" if unmeasured else ""
    said.append(f"measured in {format_seconds(found.spent_s)}: {found.ended or 'it was interrupted'}{rest}")
    return list(dict.fromkeys(said))


def show_staircase(console: Console, found: Staircase) -> None:
    """The staircase for a person."""
    terminal.say(console, "staircase", headline(found))
    terminal.show_table(console, step_rows(found), title=title(found))
    terminal.say(console, "signs", LEGEND)
    terminal.show_table(console, part_rows(found), title="Each technique alone, and the plan without it")
    for text in remarks(found):
        terminal.say(console, "note", text)


def document(found: Staircase) -> dict[str, Any]:
    """What `--json` prints of it: the figures, without the trials behind them."""
    parts = {"steps": found.steps(), "alone": found.alone(), "left_out": found.left_out()}
    return {
        "headline": headline(found),
        **found.model_dump(mode="json", exclude={"trials", "seal", "schema_version", "machine"}),
        **{name: [effect.model_dump(mode="json") for effect in effects] for name, effects in parts.items()},
        "notes": remarks(found),
    }
