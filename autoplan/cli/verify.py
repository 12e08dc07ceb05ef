"""autoplan verify: is a plan still right here? Its parity check and a short measurement, on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli import output
from autoplan.cli.plans import DEFAULT_PLAN, ChangedOption, ModelOption, PlanArgument, TrustOption, load_plan
from autoplan.errors import NoFeasiblePlanError, PlanError
from autoplan.units import format_bytes, format_number, parse_duration_s

if TYPE_CHECKING:
    from autoplan.planner.plan import Plan
    from autoplan.planner.records import Parity, Trial


def verify_command(
    plan: PlanArgument = DEFAULT_PLAN,
    time_box: Annotated[
        str,
        typer.Option("--budget", metavar="TIME", help="Time for the measurement. The parity check takes its own time."),
    ] = "60s",
    changed_ok: ChangedOption = False,
    trust_code: TrustOption = False,
    model: ModelOption = None,
    json_output: output.JsonOption = False,
) -> None:
    """Check a plan on this machine.

    Does it train the same thing as the plain run, and how fast is it here?
    """
    from autoplan.api import found_elsewhere
    from autoplan.planner.apply import check_before_use
    from autoplan.planner.trust import require_trust

    loaded = load_plan(plan)
    if model is not None:
        loaded = loaded.with_workload_at(model)
    seconds = parse_duration_s(time_box)
    if loaded.workload.kind == "object":
        raise PlanError(
            f"{loaded.workload.name} was made of Python objects, which a plan does not carry",
            hint="Search again with the same objects, which answers from its record; or use plan.prepare(model, "
            "optimizer, loss).",
        )
    changed = check_before_use(loaded, changed_ok=changed_ok, checks_parity=False)
    require_trust(loaded.workload, loaded.study, trust_code=trust_code, named=model is not None)
    if changed is not None:
        output.console().print(f"warning: {changed}", markup=False, soft_wrap=True)
    elsewhere = found_elsewhere(loaded)
    parity, trial = verify_plan(loaded, seconds)
    verified = parity.passed and trial.tokens_per_s is not None
    if json_output:
        output.print_json(
            {
                "status": "verified" if verified else "failed",
                "other_hardware": elsewhere,
                "parity": parity.model_dump(mode="json"),
                "trial": trial.model_dump(mode="json") | {"peak_memory_bytes": trial.peak_memory_bytes},
                "plan_measured": loaded.measurement.tokens_per_s.model_dump(mode="json"),
            }
        )
        if not verified:
            raise typer.Exit(NoFeasiblePlanError.exit_code)
        return
    _show(loaded, parity, trial, elsewhere)


def _show(plan: Plan, parity: Parity, trial: Trial, elsewhere: str | None) -> None:
    """The verdicts as lines; NoFeasiblePlanError where the plan fails here."""
    from autoplan.report import facts

    print(f"parity: {facts.parity_words(parity)}")
    if trial.tokens_per_s is not None:
        then, now, unit = plan.measurement.tokens_per_s, trial.tokens_per_s, plan.workload.unit
        print(
            f"speed: {facts.with_interval(now)} {unit}/s here; the plan measured {format_number(then.median)} "
            f"({now.median / then.median:.0%} of it)"
        )
        if trial.disturbed:
            print(f"disturbed: that speed is not this plan's: {trial.disturbed}")
        print(f"peak memory: {format_bytes(trial.peak_memory_bytes)}")
    if elsewhere:
        output.console().print(f"note: {elsewhere}", markup=False, soft_wrap=True)
    if not parity.finished:
        raise NoFeasiblePlanError(
            f"the plan could not be checked here: {parity.note}",
            hint="Search on this machine: autoplan search, with a larger --memory-limit where that was the reason.",
        )
    if not parity.passed:
        raise NoFeasiblePlanError(
            "the plan fails the parity check here: it would not train the same thing",
            hint="Search on this machine: autoplan search. If the plan was made here, please report it.",
        )
    if trial.tokens_per_s is None:
        raise NoFeasiblePlanError(
            f"the plan does not run here: {trial.outcome.value}: {trial.reason}",
            hint="Search on this machine: autoplan search.",
        )


def verify_plan(plan: Plan, seconds: float) -> tuple[Parity, Trial]:
    """The parity check and one measured trial of a plan's configuration, in ranks of their own."""
    from autoplan.planner.parity.compare import run_parity
    from autoplan.planner.search.setup import limits
    from autoplan.planner.trials.runner import TrialOrder, TrialRunner
    from autoplan.probes.run import pick_device, read_host_profile
    from autoplan.processes import Zygote, folder_prefix

    profile = read_host_profile()
    device = pick_device(profile, plan.device)
    limit, host_limit = limits(profile, device, None, measured=plan.hardware)
    with tempfile.TemporaryDirectory(prefix=folder_prefix("verify")) as folder, Zygote() as zygote:
        parity = run_parity(
            zygote,
            plan.workload,
            plan.config,
            device=device,
            directory=Path(folder, "parity"),
            deadline_s=1200.0,
            memory_limit_bytes=host_limit,
        )
        runner = TrialRunner(
            zygote,
            plan.workload,
            device=device,
            memory_limit_bytes=limit,
            host_limit_bytes=host_limit,
            directory=Path(folder, "trials"),
        )
        order = TrialOrder(
            number=0,
            purpose="finalist",
            config=plan.config,
            prediction=plan.prediction,
            time_box_s=seconds,
            deadline_s=seconds * 4 + 1200.0,
        )
        return parity, runner.run(order)
