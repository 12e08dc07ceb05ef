"""autoplan report: a plan as one self-contained page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import output, plans
from autoplan.errors import PlanError, UsageError
from autoplan.files import replace_file


def report_command(
    plan: plans.PlanArgument = plans.DEFAULT_PLAN,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")] = Path("report.html"),
    json_output: output.JsonOption = False,
) -> None:
    """Write an HTML page about a plan.

    Tables and drawings in one file of some 50 KB. It loads nothing; its one script sorts the table of trials. A
    staircase that was measured (autoplan explain --staircase) is in it.
    """
    from autoplan.planner.verify.climb import beside, load_staircase
    from autoplan.report.html import render_page

    loaded, stairs = plans.load_plan(plan), None
    if beside(plan).exists():
        try:
            stairs = load_staircase(beside(plan), loaded)
        except PlanError as error:
            output.tell(f"note: the page has no staircase: {error.flag_message}", error.flag_hint)
    write_page(out, render_page(loaded, stairs, str(plan)))
    if json_output:
        output.print_json({"status": "ok", "file": str(out)})
    else:
        print(out)


def write_page(out: Path, page: str) -> None:
    """Writes a page.

    Raises:
        UsageError: the place cannot be written to.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, page)
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {out}: {error.strerror}", hint="Give another place with --out."
        ) from error
