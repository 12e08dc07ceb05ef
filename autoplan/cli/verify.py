"""autoplan verify: is a plan still right here? Its parity check and a short measurement, on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli import output, plans
from autoplan.errors import DidNotRunError, NoFeasiblePlanError
from autoplan.units import format_bytes, format_number, parse_duration_s

if TYPE_CHECKING:
    from autoplan.planner.plan.plan import Plan
    from autoplan.planner.verify.verdict import Verification


def verify_command(
    plan: plans.PlanArgument = plans.DEFAULT_PLAN,
    time_box: Annotated[
        str,
        typer.Option("--budget", metavar="TIME", help="Time for the measurement. The parity check takes its own time."),
    ] = "60s",
    memory_limit: plans.MemoryOption = None,
    wait: plans.WaitOption = False,
    launcher: plans.LauncherOption = None,
    nodes: plans.NodesOption = None,
    unverified_ok: plans.UnverifiedOption = False,
    changed_ok: plans.ChangedOption = False,
    model: plans.ModelOption = None,
    quiet: plans.QuietOption = False,
    json_output: output.JsonOption = False,
) -> None:
    """Check a plan on this machine.

    Does it train the same thing as the plain run, does it fit, and how fast is it here? Exit codes: 0 it holds or is
    faster; 3 it is slower, does not fit, does not run, or trains otherwise: search again; 4 it is slower while
    something else used the machine, or something outside ended it: verify again.
    """
    from autoplan.planner.plan.hardware import found_elsewhere
    from autoplan.planner.search.nodes import options_for
    from autoplan.planner.verify.measure import open_plan, verify_plan

    loaded = plans.load_plan(plan, unverified_ok)
    seconds = parse_duration_s(time_box)
    loaded = open_plan(loaded, changed_ok=changed_ok, workload=model, tell=lambda text: output.tell(f"warning: {text}"))
    options = options_for(loaded, launcher, nodes, memory_limit=memory_limit, wait=wait)
    elsewhere = found_elsewhere(loaded)
    with output.progress("starting", quiet=quiet) as tell:
        found = verify_plan(loaded, seconds, options, on_progress=tell)
    if json_output:
        output.print_json(_document(loaded, found, elsewhere))
        if found.exit_code:
            raise typer.Exit(found.exit_code)
        return
    _show(loaded, found, elsewhere)


def _document(plan: Plan, found: Verification, elsewhere: str | None) -> dict[str, object]:
    """The document that --json prints. `status` is verified if the plan trains the same and runs, at any speed."""
    document = found.model_dump(mode="json")
    document["trial"]["peak_memory_bytes"] = found.trial.peak_memory_bytes
    return {
        "status": "verified" if found.parity.passed and found.trial.outcome.value == "ok" else "failed",
        "other_hardware": elsewhere,
        "plan_measured": plan.measurement.tokens_per_s.model_dump(mode="json"),
        "plan_peak_memory_bytes": plan.measurement.peak_memory_bytes,
        **document,
    }


def _show(plan: Plan, found: Verification, elsewhere: str | None) -> None:
    """The verdict as lines, and as an error where the plan is wrong here."""
    from autoplan.report import facts

    trial = found.trial
    print(f"parity: {facts.parity_words(found.parity)}")
    if trial.tokens_per_s is not None:
        then, unit = plan.measurement.tokens_per_s, plan.workload.unit
        print(f"speed: {facts.with_interval(trial.tokens_per_s)} {unit}/s here; the plan measured "
              f"{format_number(then.median)}; {found.spread}")  # fmt: skip
        if trial.disturbed:
            print(f"disturbed: that speed is not this plan's: {trial.disturbed}")
        measured = plan.measurement.peak_memory_bytes
        beside = "" if measured is None else f"; the plan measured {format_bytes(measured)}"
        limit = f", limit {format_bytes(found.memory_limit_bytes)}"
        print(f"peak memory: {format_bytes(trial.peak_memory_bytes)} here{limit}{beside}")
    if elsewhere:
        output.tell(f"note: {elsewhere}")
    for cause in found.causes:
        print(f"likely cause: {cause.text}")
    if found.exit_code == 0:
        print(f"verdict: {found.text}")
        return
    if found.exit_code == DidNotRunError.exit_code:
        raise DidNotRunError(found.text, hint="Verify again when nothing else uses the machine.")
    raise NoFeasiblePlanError(found.text, hint=HINTS[found.verdict])


HINTS = {
    "slower": "Search on this machine: autoplan search.",
    "does_not_fit": "Give it more with --memory-limit, or search on this machine: autoplan search.",
    "does_not_run": "Search on this machine: autoplan search.",
    "trains_otherwise": "Search on this machine: autoplan search. If the plan was made here, please report it.",
    "not_checked": "Search on this machine: autoplan search, with a larger --memory-limit where that was the reason.",
}
