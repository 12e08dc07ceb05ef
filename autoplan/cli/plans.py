"""What the commands that take a plan share: the argument, and loading it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from autoplan.planner.plan import Plan

PlanArgument = Annotated[Path, typer.Argument(metavar="[PLAN]", help="A plan file, as autoplan search writes it.")]
DEFAULT_PLAN = Path("plan.json")


def load_plan(path: Path) -> Plan:
    """The plan in a file; PlanError says what is wrong with it."""
    from autoplan.planner.plan import Plan

    return Plan.load(path)
