"""autoplan show: a plan for a person."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.cli import output
from autoplan.cli.plans import DEFAULT_PLAN, PlanArgument, load_plan


def show_command(
    plan: PlanArgument = DEFAULT_PLAN,
    trials: Annotated[bool, typer.Option("--trials", help="List every trial of the search too.")] = False,
    json_output: output.JsonOption = False,
) -> None:
    """Show a plan.

    Its speed and memory beside the plain run's, each choice with its reason, what was ruled out, and the next best.
    """
    from autoplan.api import found_elsewhere

    loaded = load_plan(plan)
    elsewhere = found_elsewhere(loaded)
    if json_output:
        document = {"status": "ok", "other_hardware": elsewhere, "edited": list(loaded.edited)}
        output.print_json(document | {"plan": loaded.model_dump(mode="json")})
        return
    from autoplan.report import terminal

    console = output.console(stderr=False)
    terminal.show_plan(console, loaded)
    if trials:
        console.print()
        terminal.show_trials(console, loaded.evidence, loaded.workload.unit)
    if elsewhere:
        output.console().print(f"note: {elsewhere}", markup=False)
