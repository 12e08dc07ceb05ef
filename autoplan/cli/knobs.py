"""autoplan knobs: what a search may change, and what each change is predicted to bring here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli import output
from autoplan.cli.workloads import make_spec, named_workload
from autoplan.strategies.config import KNOBS, PLAIN
from autoplan.strategies.knob_text import HEADINGS, knob_rows

if TYPE_CHECKING:
    from autoplan.planner.search.options import Candidate, SearchResult


def knobs_command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of the file.py:function.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="As autoplan search takes it. With it: the predicted gain here."),
    ] = None,
    trainer: Annotated[
        str | None, typer.Option("--trainer", metavar="FILE.PY:FUNCTION", help="Instead of --model: a Trainer's.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option("--seq-len", metavar="N", help="Tokens per sequence.")] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", metavar="N", help="Samples per optimizer step.")
    ] = None,
    json_output: output.JsonOption = False,
) -> None:
    """List the knobs of a search.

    With a workload: what each may gain on this machine, as the cost model predicts it. That traces the model, which
    takes some seconds to a minute; no trial is run.
    """
    found = None
    if model is not None or trainer is not None:
        spec = make_spec(named_workload(model, trainer), sequence_length, global_batch, arguments)
        from autoplan import api
        from autoplan.planner.search.options import SearchOptions

        found = api.run(SearchOptions(spec=spec, dry_run=True))
    gains = None if found is None else predicted_gains(found)
    if json_output:
        keys = ("knob", "values", "what", "numerics", "left_out")
        every = [dict(zip(keys, row, strict=True)) | (gains or {}).get(row[0], {}) for row in knob_rows()]
        output.print_json({"status": "ok", "knobs": every})
        return
    from autoplan.report import facts, terminal

    console = output.console(stderr=False)
    headings: tuple[str, ...] = HEADINGS[:3]
    rows: list[tuple[str, ...]] = [row[:3] for row in knob_rows()]
    if gains is not None:
        headings, rows = ("Knob", "Gain here", "Values"), [(row[0], _words(gains[row[0]]), row[1]) for row in rows]
    elif console.is_terminal:  # what a knob does stands under its values: three columns would break words
        headings, rows = ("Knob", "Values, and what it does"), [(row[0], f"{row[1]}\n{row[2]}") for row in rows]
    content = facts.Rows(headings, [tuple(cell.replace("`", "") for cell in row) for row in rows])
    terminal.show_table(console, content, title="Knobs for --fix and --bound (plain value first)")


def predicted_gains(found: SearchResult) -> dict[str, dict[str, Any]]:
    """For each knob: the predicted speed with its best other value over the best with the plain one, and that value.

    `gain` is None where no configuration here has another value; `reason` then says why, where it is known.
    """
    gains = {}
    for knob in KNOBS:
        first: dict[bool, Candidate] = {}  # the fastest with the plain value, and with another: they come fastest first
        for one in found.candidates:
            first.setdefault(getattr(one.config, knob) == getattr(PLAIN, knob), one)
        seconds = [
            best.prediction.step_time_s for which in (True, False) if (best := first.get(which)) and best.prediction
        ]
        if len(seconds) == 2:
            gains[knob] = {"gain": seconds[0] / seconds[1], "value": getattr(first[False].config, knob), "reason": None}
            continue
        reasons = (family.limit for family in found.left_out if family.family.startswith(f"{knob}="))
        gains[knob] = {"gain": None, "value": None, "reason": next(reasons, None)}
    return gains


def _words(found: dict[str, Any]) -> str:
    if found["gain"] is None:
        return found["reason"] or "nothing to choose here"
    return f"{found['gain']:.2f} times, with {found['value']}" if found["gain"] > 1.005 else "none predicted"
