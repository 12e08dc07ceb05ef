"""autoplan knobs: what a search may change."""

from __future__ import annotations

from autoplan.cli import output
from autoplan.strategies.knob_text import HEADINGS, knob_rows


def knobs_command(json_output: output.JsonOption = False) -> None:
    """List the knobs of a search.

    What they would bring on this machine: autoplan search --dry-run.
    """
    if json_output:
        keys = ("knob", "values", "what", "numerics", "left_out")
        every = [dict(zip(keys, row, strict=True)) for row in knob_rows()]
        output.print_json({"status": "ok", "knobs": every})
        return
    from autoplan.report import facts, terminal

    console = output.console(stderr=False)
    headings: tuple[str, ...] = HEADINGS[:3]
    rows: list[tuple[str, ...]] = [row[:3] for row in knob_rows()]
    if console.is_terminal:  # what a knob does stands under its values: three columns would break words
        headings, rows = ("Knob", "Values, and what it does"), [(row[0], f"{row[1]}\n{row[2]}") for row in rows]
    content = facts.Rows(headings, [tuple(cell.replace("`", "") for cell in row) for row in rows])
    terminal.show_table(console, content, title="Knobs for --fix and --bound (plain value first)")
