"""Tables for a terminal; the same tables as plain aligned lines where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import LeftOutFamily, Trial
from autoplan.report import facts, pieces
from autoplan.text import printable

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_FAMILIES = 10  # of those ruled out: a table that fits on a screen

BETWEEN_COLUMNS = 3
"""Characters between two columns of a table on a terminal."""


def show_table(console: Console, content: facts.Rows, *, title: str, right: Sequence[int] = ()) -> None:
    """Prints a table if it has rows; text is never read as markup. Off a terminal: aligned columns, nothing wrapped.

    In a table that is wider than the terminal, columns of configurations and of single words are as wide as their
    longest word, so that none is cut; the others share what is left.

    Args:
        console: Where.
        content: Headings and rows.
        title: Above the table.
        right: The columns of numbers.
    """
    if not content.rows:
        return
    lines = (content.headings, *content.rows)
    widths = [max(len(row[column]) for row in lines) for column in range(len(content.headings))]
    if not console.is_terminal:
        console.print(Text(title + ":"))
        for row in lines:
            cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            console.print(Text(printable("  " + cells).rstrip()), soft_wrap=True)
        console.print()
        return
    narrow = sum(width + BETWEEN_COLUMNS for width in widths) > console.width
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, header_style="bold"
    )
    for number, heading in enumerate(content.headings):
        table.add_column(
            Text(heading),
            justify="right" if number in right else "left",
            overflow="fold",
            width=_uncut(content, number) if narrow else None,
        )
    for row in content.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)


def _uncut(content: facts.Rows, column: int) -> int | None:
    """Characters of a column's longest word, where its cells are configurations or single words; None: other text."""
    cells = [row[column].split() for row in content.rows]
    settings = sum("=" in words[0] for words in cells if words)
    if settings <= len(cells) / 2 and any(len(words) > 1 for words in cells):
        return None
    return max(len(word) for words in (*cells, content.headings[column].split()) for word in words)


GO_ON = "the same search with a larger --budget"


def show_plan(console: Console, plan: Plan, *, more: str = GO_ON) -> None:
    """The plan for a person: what it is, what it gains, why, what was ruled out, what came next.

    Args:
        console: Where.
        plan: The plan.
        more: What goes on from here, where no gain was found.
    """
    say_unverified(console, plan)
    if plan.edited:
        say(console, "edited", f"nobody measured this plan as it is now (changed: {', '.join(plan.edited)})")
    _say_headline(console, plan, more, facts.headline(plan))
    say(console, "workload", facts.workload_line(plan.workload))
    say(console, "hardware", facts.hardware_line(plan))
    say(console, "found", f"{plan.created}, study {plan.study}, {len(plan.evidence)} trials")
    for topic, text in facts.about(plan):
        say(console, topic, text)
    console.print()
    show_table(console, facts.comparison(plan), title="Baseline against plan")
    show_table(console, facts.configuration(plan), title="The plan")
    show_table(console, facts.loading(plan), title="The loader, measured beside the step")
    show_table(console, facts.alternatives(plan), title="Next best")
    show_left_out(console, plan.left_out)
    say(console, "parity", facts.parity_words(plan.parity))
    for topic, text in facts.remarks(plan):
        say(console, topic, text)


def show_summary(console: Console, plan: Plan, *, more: str = GO_ON) -> None:
    """A search's end for a person: with what the command adds, at most a dozen lines; `show_plan` has the rest.

    Args:
        console: Where.
        plan: The plan.
        more: What goes on from here, where no gain was found.
    """
    say_unverified(console, plan)
    _say_headline(console, plan, more, facts.headline_clause(plan))
    more_notes = f" (and {len(plan.notes) - 1} more)" if len(plan.notes) > 1 else ""
    lines = {
        "objective": facts.objective_words(plan),
        "measured": facts.measured_words(plan),
        "changed": facts.changed_words(plan),
        "parity": None if facts.is_baseline(plan) else facts.parity_words(plan.parity).partition(";")[0],
        "loader": facts.loading_words(plan),
        "not tried": facts.untried_clause(plan),
        "time": pieces.time_words(plan.ledger, plan.workload.own_setting, most=3),
        "notes": plan.notes[0] + more_notes if plan.notes else None,
    }
    for topic, text in lines.items():
        if text is not None:
            say(console, topic, text)


def _say_headline(console: Console, plan: Plan, more: str, headline: str) -> None:
    """Prints the first line: the gain; if there is none, that and what to do."""
    if not facts.is_baseline(plan):
        say(console, "speed-up", headline)
        return
    todo = f"go on with: {more}" if facts.may_go_on(plan) else "nothing is left that a longer search would try"
    console.print(
        Text.assemble((printable(headline), "bold"), f"; {printable(todo)}"), soft_wrap=not console.is_terminal
    )


def say_unverified(console: Console, plan: Plan) -> None:
    """The first line about a plan that nobody verified."""
    if plan.unverified is not None:
        say(console, "UNVERIFIED", plan.unverified)


def show_left_out(
    console: Console, families: Sequence[LeftOutFamily], *, more: str = "autoplan explain or --json"
) -> None:
    """The largest families that were never tried, those whose limit has a figure first; and how many more there are.

    Args:
        console: Where.
        families: All of them.
        more: Where the rest can be read.
    """
    families = facts.by_reason(families)
    largest = sorted(families, key=lambda family: (not family.by, -family.configurations))[:SHOWN_FAMILIES]
    shown = [family for family in families if family in largest]
    show_table(console, facts.left_out_rows(shown), title="Ruled out, never tried", right=(3,))
    if len(families) > len(shown):
        rest = sum(f.configurations for f in families) - sum(f.configurations for f in shown)
        say(console, "and", f"{len(families) - len(shown)} more families, {rest:,} configurations: {more}")


def show_trials(console: Console, trials: Sequence[Trial], unit: str) -> None:
    """Every trial in a table."""
    show_table(console, facts.trial_rows(trials, unit), title="Trials", right=(0,))


def say(console: Console, topic: str, text: str) -> None:
    """`topic: text`, wrapped under itself on a terminal."""
    console.print(Text.assemble((f"{topic}: ", "bold"), printable(text)), soft_wrap=not console.is_terminal)
