"""autoplan run: a script with a plan, in the plan's ranks; or some steps of the plan's own workload."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from autoplan.cli import ends, output, plans
from autoplan.errors import AutoplanError, ConfigError, DeviceError, NoFeasiblePlanError, UsageError
from autoplan.units import format_number, format_seconds

if TYPE_CHECKING:
    from autoplan.planner.plan.plan import Plan
    from autoplan.planner.verify.steps import PlanRun, StepRecord


def run_command(
    plan: plans.PlanArgument = plans.DEFAULT_PLAN,
    script: Annotated[
        Path | None,
        typer.Argument(metavar="SCRIPT", help="A Python file, which asks autoplan.current_plan() for the plan."),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="What the script is given.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", metavar="N", help="Without a script: optimizer steps. The first does not count for the speed."
        ),
    ] = None,
    launcher: plans.LauncherOption = None,
    nodes: plans.NodesOption = None,
    unverified_ok: plans.UnverifiedOption = False,
    changed_ok: plans.ChangedOption = False,
    model: plans.ModelOption = None,
    json_output: output.JsonOption = False,
) -> None:
    """Run a script with a plan, in as many ranks as the plan has.

    Without a script: some steps of the plan's own workload, and their speed. The exit code is the script's.
    """
    from autoplan.planner.plan.prepare import check_before_use
    from autoplan.planner.records.trust import own_workload
    from autoplan.planner.search.nodes import options_for
    from autoplan.planner.verify.steps import DEFAULT_STEPS, run_plan

    if steps is not None and steps < 1:
        raise UsageError(f"--steps is {steps}", hint="Give a whole number of at least 1.")
    if script is None and plan.suffix == ".py":
        raise UsageError(f"{plan} was given as the plan", hint=f"The plan comes first: autoplan run plan.json {plan}.")
    if script is not None:
        given = {"--steps": steps, "--model": model, "--json": json_output}
        given |= {"--launcher": launcher, "--nodes": nodes}
        if names := [name for name, value in given.items() if value]:
            raise UsageError(
                f"{' and '.join(names)} and a script were given: a script runs its own code",
                hint="Leave it out. What the script itself is to be given goes after --. On several nodes start the "
                "command with torchrun on each.",
            )
        run_script(plan, script, arguments or [], changed_ok=changed_ok, unverified_ok=unverified_ok)
    loaded = plans.load_plan(plan, unverified_ok)
    if launcher not in (None, "local"):
        found = run_plan(
            loaded,
            steps=steps or DEFAULT_STEPS,
            launcher=launcher,
            nodes=nodes,
            changed_ok=changed_ok,
            workload=model,
            on_step=_say_step,
        )
        _show(found, json_output)
        return
    if "RANK" not in os.environ:
        options_for(loaded, launcher, nodes)  # refuses what was measured on several nodes
    # What `prepare` checks in each rank, before any starts; first of all, who named the code that is called.
    named = own_workload(loaded.workload, loaded.study, model)
    check_before_use(loaded.model_copy(update={"workload": named}), changed_ok=changed_ok)
    _say_too_many_threads(loaded, plan)
    if loaded.config.world_size > 1 and "RANK" not in os.environ:
        _end(start(["-m", "autoplan", *sys.argv[1:]], loaded, plan))
    _run_workload(loaded, steps or DEFAULT_STEPS, changed_ok, model, json_output)


def run_script(
    path: Path, script: Path, arguments: list[str], *, changed_ok: bool, unverified_ok: bool = False
) -> NoReturn:
    """Runs a script with a plan and ends this process with its exit code.

    Raises:
        UsageError: there is no such script.
        PlanError: the plan cannot be used (`check_before_use`).
        ConfigError: this is a rank of a world of another size.
        DeviceError: the machine has not the plan's devices.
    """
    from autoplan.planner.plan.prepare import check_before_use

    if not script.is_file():
        raise UsageError(
            f"there is no script {script}",
            hint="Give the file of a training script after the plan, and its own arguments after --.",
        )
    loaded = plans.load_plan(path, unverified_ok).accepted(unverified_ok, changed_ok=changed_ok)
    said = check_before_use(loaded, changed_ok=changed_ok)
    if said is not None:
        output.tell(f"warning: {said}")
    if loaded.nodes is not None and "RANK" not in os.environ:
        output.tell(
            f"note: the plan was measured on {loaded.nodes.describe()}; all its ranks start on this machine. On nodes "
            "start the same command with torchrun on each"
        )
    _say_too_many_threads(loaded, path)
    _end(start([*_runner(script), str(script), *arguments], loaded, path))


def _runner(script: Path) -> list[str]:
    """The runner that says at the end of a script that it never asked for the plan; empty if the script needs none."""
    from autoplan.planner.export.base import MADE_BY
    from autoplan.processes.owner import folder_prefix, sweep_folders
    from autoplan.processes.script import ASKED_VARIABLE, RUNNER

    os.environ.pop(ASKED_VARIABLE, None)
    try:
        with script.open("rb") as file:
            exported = MADE_BY.encode() in file.read(4096)
    except OSError:
        return []  # Python will say why it cannot be read
    if exported or script.suffix != ".py" or not is_first_rank():
        return []
    sweep_folders()
    os.environ[ASKED_VARIABLE] = str(Path(tempfile.mkdtemp(prefix=folder_prefix("asked"))) / "asked")
    return [RUNNER]


def _say_too_many_threads(plan: Plan, path: Path) -> None:
    """Once, before the ranks: a rank that this command started says nothing."""
    from autoplan.planner.plan.current import PLAN_VARIABLE, too_many_threads, variables_for

    if not is_first_rank() or ("RANK" in os.environ and PLAN_VARIABLE in os.environ):
        return
    cores = len(os.sched_getaffinity(0))
    text = too_many_threads(plan, os.environ | variables_for(plan, path, os.environ, cores), cores)
    if text is not None:
        output.tell(f"note: {text}")


def start(arguments: list[str], plan: Plan, path: Path) -> int:
    """Runs `python ARGUMENTS` with a plan; one rank takes the place of this process and never returns.

    Returns:
        The exit code of the ranks.
    """
    from autoplan.planner.plan.current import not_taken, variables_for

    ranks = plan.config.world_size
    world = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if world is not None and world != str(ranks):
        raise ConfigError(
            f"the plan is for {ranks} rank(s), and this is a rank of {world}",
            hint=f"Start it without torchrun, or with --nproc-per-node {ranks}.",
        )
    cores = len(os.sched_getaffinity(0))
    variables = variables_for(plan, path, os.environ, cores)
    missing = not_taken(plan, os.environ)
    if missing is not None and is_first_rank():
        output.tell(f"note: {missing}")
    ends.flush()
    if world is not None or ranks == 1:
        os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **variables})
    if plan.device == "cuda":
        from autoplan.probes.run import read_host_profile

        found = sum(device.type == "cuda" for device in read_host_profile().devices)
        if found < ranks:
            raise DeviceError(
                f"the plan has {ranks} ranks, and this machine shows {found} GPU(s)",
                hint="Check CUDA_VISIBLE_DEVICES. On several nodes start `autoplan run` with torchrun on each.",
            )
    from autoplan.processes.launch import run_ranks

    return run_ranks(["-u", *arguments], ranks=ranks, env=variables)


def _end(code: int) -> NoReturn:
    """Ends with the code of the ranks, which said themselves what there was to say."""
    ends.said.append("the script")
    raise typer.Exit(code)


def _run_workload(plan: Plan, steps: int, changed_ok: bool, model: str | None, json_output: bool) -> None:
    """Some steps of the plan's own workload; the first rank prints the speed.

    With --json what the workload prints goes to stderr: stdout has the one document.

    Raises:
        NoFeasiblePlanError: the plan does not fit here.
        WorkloadError: the workload raised something.
    """
    from autoplan.planner.verify.steps import PlanRun, run_steps

    try:
        with contextlib.redirect_stdout(sys.stderr) if json_output else contextlib.nullcontext():
            run = plan.prepare(changed_ok=changed_ok, workload=model)
            records = run_steps(run, steps, plan.workload.counted, on_step=_say_step)
    except (AutoplanError, ends.ReaderGone):
        raise
    except Exception as error:
        raise _failed(plan, error) from error
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # a process that ends with Gloo's threads running can abort
    if is_first_rank():
        _show(PlanRun.of(plan, records), json_output)


def _failed(plan: Plan, error: Exception) -> AutoplanError:
    """The error of a run of the plan's own workload, by what ended it."""
    from autoplan.processes import is_out_of_memory
    from autoplan.strategies.workloads.user_errors import user_error

    name = plan.workload.name
    if is_out_of_memory(error):
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        return NoFeasiblePlanError(
            f"the plan does not fit here: {name} ran out of memory: {first}",
            hint="Free some memory, or search on this machine: autoplan search.",
        )
    return user_error(
        error,
        f"the run of {name}",
        "The plan does not run here. See that the workload trains by itself; if it does, search on this machine: "
        "autoplan search.",
    )


def _say_step(record: StepRecord) -> None:
    if is_first_rank():
        sys.stderr.write(f"{record.describe()}\n")


def _show(found: PlanRun, json_output: bool) -> None:
    """The speed, on stdout."""
    unit, rate, measured = found.unit, found.items_per_s, found.plan_measured
    if json_output:
        steps = [record.model_dump(mode="json") for record in found.steps]
        document = {"status": "ok", "steps": steps, "step_time_s": found.step_time_s, f"{unit}_per_s": rate}
        output.print_json(document | {"plan_measured": measured})
        return
    sys.stderr.write(f"the plan measured {format_number(measured)} {unit}/s; this run is {rate / measured:.0%} of it\n")
    print(f"{format_number(rate)} {unit}/s, {format_seconds(found.step_time_s)} a step")


def is_first_rank() -> bool:
    """True but in the other ranks of a torchrun."""
    return os.environ.get("RANK", "0") == "0"
