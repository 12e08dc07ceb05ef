"""Verifies a plan on this machine: its parity check and one trial, in ranks of their own, and what they say."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.errors import PlanError
from autoplan.planner.parity.check import check_parity
from autoplan.planner.parity.compare import unfinished, where_ended
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.prepare import check_before_use
from autoplan.planner.plan.surroundings import find_differences
from autoplan.planner.records.baseline import YOURS
from autoplan.planner.records.trials import Parity
from autoplan.planner.records.trust import own_workload
from autoplan.planner.search.nodes import make_launcher, options_for, with_engine
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.session import OWN_PARITY
from autoplan.planner.search.setup import limits
from autoplan.planner.store.locks import DeviceLock, device_names
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.planner.verify.verdict import Verification, judge
from autoplan.probes.profile import HardwareProfile
from autoplan.probes.run import pick_device, read_host_profile
from autoplan.processes import TaskFailedError, folder_prefix
from autoplan.processes.nodes import Nodes
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import parse_duration_s

if TYPE_CHECKING:
    from autoplan.processes.nodes import Engine

DEFAULT_BUDGET_S = 60.0
PARITY_DEADLINE_S = 1200.0


def say_nothing(text: str) -> None:
    """For whoever wants to be told of no progress."""


def verify(
    plan: Plan | str | Path,
    *,
    budget: str | float | None = None,
    memory_limit: str | int | None = None,
    unverified_ok: bool = False,
    changed_ok: bool = False,
    workload: str | Path | WorkloadSpec | None = None,
    wait: bool = False,
    launcher: str | None = None,
    nodes: str | None = None,
    on_progress: Callable[[str], None] = say_nothing,
) -> Verification:
    """Checks a plan on this machine: does it train the same thing as the plain run, does it fit, how fast is it?

    Args:
        plan: A plan, or the file of one.
        budget: Time for the measurement, like `"2m"`, or seconds. Default: 60 s. The parity check takes its own time.
        memory_limit: What the plan may take, like `"8GiB"` or `"80%"` of all the memory (of the GPU on CUDA). Default:
            as in a search, 80 % of what is available; of a GPU 95 %, less its context.
        unverified_ok: Verify it although it is unverified: the best so far of a search that ended before its proof.
        changed_ok: Verify it although the plan was edited, or the workload's code changed.
        workload: What the plan is of, as you name it: a text as `--model` takes it; of Python objects their spec
            (`spec_from_objects`). Not needed where you searched a file.
        wait: Wait where a search measures on this device. Default: an error.
        launcher: What starts the ranks on several nodes: elastic, slurm or ray, as in a search; local: all ranks run on
            this machine. None: local, for a plan that was measured on one machine.
        nodes: N nodes with R ranks each, `"2x8"`. None: as the plan was measured.
        on_progress: Is told what is done, in words: `print` for example. It takes minutes for a large model.

    Returns:
        The verdict, the speed against the plan's with its interval, and the likely causes where it is slower.

    Raises:
        PlanError: the plan was edited, its code changed, it alone names that code, or it is of Python objects; or it
            was measured on several nodes, and no launcher was given.
        UsageError: a budget or a limit that is none.
        DeviceError: the plan's kind of device is not here.
        DeviceBusyError: a search measures on the device.
    """
    loaded = (plan if isinstance(plan, Plan) else Plan.load(plan)).accepted(unverified_ok)
    loaded = open_plan(loaded, changed_ok=changed_ok, workload=workload)
    seconds = parse_duration_s(budget or DEFAULT_BUDGET_S)
    options = options_for(loaded, launcher, nodes, memory_limit=memory_limit, wait=wait)
    return verify_plan(loaded, seconds, options, on_progress=on_progress)


def open_plan(
    plan: Plan,
    *,
    changed_ok: bool,
    workload: str | Path | WorkloadSpec | None,
    tell: Callable[[str], None] | None = None,
) -> Plan:
    """The plan with the workload that the user named or gave; what else changed is told, by default in a warning.

    Raises:
        AutoplanError: it must not be run here.
    """
    if isinstance(workload, WorkloadSpec):
        if workload.identity != plan.workload.identity:
            raise PlanError(
                f"the plan is of {plan.workload.name}, and the workload that was given is another: {workload.name}",
                hint="Give the spec of the objects that were searched.",
            )
        unused = {"find_unused_parameters": plan.workload.find_unused_parameters}
        plan, workload = plan.model_copy(update={"workload": workload.model_copy(update=unused)}), None
    if plan.workload.kind == "object" and plan.workload.payload is None:
        raise PlanError(
            f"{plan.workload.name} was made of Python objects, which a plan does not carry",
            hint="In Python give them: workload=autoplan.spec_from_objects(...). Or search again with the same "
            "objects, which answers from its record; or use plan.prepare(model, optimizer, loss).",
        )
    named = str(workload) if isinstance(workload, Path) else workload
    plan = plan.model_copy(update={"workload": own_workload(plan.workload, plan.study, named)})
    changed = check_before_use(plan, changed_ok=changed_ok, checks_parity=False)
    if changed is not None:
        warnings.warn(changed, stacklevel=3) if tell is None else tell(changed)
    return plan


def verify_plan(
    plan: Plan,
    seconds: float,
    options: SearchOptions,
    *,
    on_progress: Callable[[str], None] = say_nothing,
) -> Verification:
    """The parity check and one measured trial of a plan's configuration, and what they say of it.

    Args:
        plan: The plan.
        seconds: For the measurement.
        options: Of `options_for`.
        on_progress: Is told what is done.
    """
    order = TrialOrder(
        number=0,
        purpose="finalist",
        config=plan.config,
        prediction=plan.prediction,
        most_s=seconds,
        deadline_s=seconds * 4 + PARITY_DEADLINE_S,
    )

    def run(engine: Engine | Nodes | None) -> Verification:
        profile = read_host_profile()
        with open_runner(plan, options, profile, engine, on_wait=on_progress) as runner:
            parity = _check(plan, options.spec, runner, on_progress)
            part = "2 of 2: the measurement"
            on_progress(part)
            trial = runner.run(order, on_progress=lambda progress: on_progress(f"{part}, {progress.phase}"))
        return judge(plan, parity, trial, find_differences(plan, profile), runner.memory_limit_bytes)

    return with_engine(options, run, lambda found: found.exit_code, on_progress)


def _check(plan: Plan, spec: WorkloadSpec, runner: TrialRunner, on_progress: Callable[[str], None]) -> Parity:
    """The parity check of a plan's configuration here; one that ran out of time has no verdict.

    The user's own setting needs none, as in a search.
    """
    if plan.config == plan.workload.own_setting:
        on_progress(f"1 of 2: no parity check, since the plan is {YOURS}")
        return OWN_PARITY
    on_progress("1 of 2: the parity check, the plan beside a plain run")
    try:
        return check_parity(
            runner.zygote,
            spec,
            plan.config,
            plain=None if plan.has_own_baseline else plan.baseline.config,
            device=runner.device,
            directory=runner.directory.parent / "parity",
            deadline_s=PARITY_DEADLINE_S,
            memory_limit_bytes=runner.host_limit_bytes,
        )
    except TaskFailedError as error:
        return unfinished(plan.config, where_ended(error.report))


@contextmanager
def open_runner(
    plan: Plan,
    options: SearchOptions,
    profile: HardwareProfile,
    engine: Engine | Nodes | None = None,
    *,
    on_wait: Callable[[str], None] = say_nothing,
) -> Iterator[TrialRunner]:
    """What runs trials of a plan's workload here, while no search measures on the device.

    Args:
        plan: The plan.
        options: What is trained, the memory limit, the seed, whether a device that is in use is waited for.
        profile: This machine.
        engine: What starts agents on the nodes of the options; None: all runs on this machine.
        on_wait: Is told that the device is waited for.

    Raises:
        DeviceError: the plan's kind of device is not here.
        DeviceBusyError: a search measures on the device.
    """
    device = pick_device(profile, plan.device)
    wanted = options.memory_limit_bytes(profile.device(device).memory_total_bytes.value)
    limit, host_limit = limits(profile, device, wanted, ranks=plan.config.world_size, measured=plan.hardware)
    if device == "cpu":  # of all ranks together; each node holds its own to host_limit
        limit *= options.layout[0]
    outside = isinstance(engine, Nodes)  # SLURM gives the nodes to this command alone
    names = () if outside else device_names(profile, device, plan.config.world_size)
    with (
        DeviceLock(names, wait=options.wait, on_wait=on_wait),
        tempfile.TemporaryDirectory(prefix=folder_prefix("verify")) as folder,
        make_launcher(options, profile, engine, on_wait) as zygote,
    ):
        yield TrialRunner(
            zygote,
            options.spec,
            device=device,
            memory_limit_bytes=limit,
            host_limit_bytes=host_limit,
            directory=Path(folder, "trials"),
            seed=options.seed,
        )
