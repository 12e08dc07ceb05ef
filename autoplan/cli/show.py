"""autoplan show: a plan for a person."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.cli import output, plans


def show_command(
    plan: plans.PlanArgument = plans.DEFAULT_PLAN,
    trials: Annotated[bool, typer.Option("--trials", help="List every trial of the search too.")] = False,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="List the configurations that no other beats in speed and memory.")
    ] = False,
    json_output: output.JsonOption = False,
) -> None:
    """Show a plan.

    Its speed and memory beside the baseline's, each choice with its reason, what was ruled out, and the next best.
    """
    from autoplan.planner.plan.hardware import found_elsewhere
    from autoplan.report import facts, terminal

    loaded = plans.load_plan(plan)
    elsewhere = found_elsewhere(loaded)
    if json_output:
        document = {"status": "ok", "other_hardware": elsewhere, "edited": list(loaded.edited)}
        front = {"pareto": facts.pareto_document(loaded)} if pareto else {}
        output.print_json(document | front | {"plan": loaded.model_dump(mode="json")})
        return
    console = output.console(stderr=False)
    terminal.show_plan(console, loaded)
    if trials:
        console.print()
        terminal.show_trials(console, loaded.evidence, loaded.workload.unit)
    if pareto:
        console.print()
        terminal.show_table(console, facts.pareto_rows(loaded), title="Throughput against memory")
    if elsewhere:
        output.tell(f"note: {elsewhere}")
