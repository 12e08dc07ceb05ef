"""Verifies a plan on this machine: its parity check and one trial, in ranks of their own, and what they say."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.errors import PlanError
from autoplan.planner.apply.prepare import check_before_use
from autoplan.planner.plan import Plan
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.target import limits
from autoplan.planner.store.device_lock import DeviceLock, device_names
from autoplan.planner.surroundings import find_differences
from autoplan.planner.trust import own_workload
from autoplan.planner.verify.verdict import Verification, judge
from autoplan.units import parse_duration_s

if TYPE_CHECKING:
    from autoplan.planner.records import Parity, Trial

DEFAULT_BUDGET_S = 60.0
PARITY_DEADLINE_S = 1200.0


def verify(
    plan: Plan | str | Path,
    *,
    budget: str | float | None = None,
    memory_limit: str | int | None = None,
    unverified_ok: bool = False,
    changed_ok: bool = False,
    workload: str | Path | None = None,
    wait: bool = False,
) -> Verification:
    """Checks a plan on this machine: does it train the same thing as the plain run, does it fit, how fast is it?

    Args:
        plan: A plan, or the file of one.
        budget: Time for the measurement, like `"2m"`, or seconds. Default: 60 s. The parity check takes its own time.
        memory_limit: What the plan may take, like `"8GiB"` or `"80%"` of all the memory (of the GPU on CUDA). Default:
            as in a search, 80 % of what is available; of a GPU 95 %, less its context.
        unverified_ok: Verify it although it is unverified: the best so far of a search that ended before its proof.
        changed_ok: Verify it although the plan was edited, or the workload's code changed.
        workload: What the plan is of, as you name it: a text as `--model` takes it. Not needed where you searched it.
        wait: Wait where a search measures on this device. Default: an error.

    Returns:
        The verdict, the speed against the plan's with its interval, and the likely causes where it is slower.

    Raises:
        PlanError: the plan was edited, its code changed, it alone names that code, or it is of Python objects.
        UsageError: a budget or a limit that is none.
        DeviceError: the plan's kind of device is not here.
        DeviceBusyError: a search measures on the device.
    """
    loaded = (plan if isinstance(plan, Plan) else Plan.load(plan)).accepted(unverified_ok)
    loaded, changed = make_verifiable(loaded, None if workload is None else str(workload), changed_ok=changed_ok)
    if changed is not None:
        warnings.warn(changed, stacklevel=2)
    return verify_plan(loaded, parse_duration_s(budget or DEFAULT_BUDGET_S), memory_limit, wait=wait)


def make_verifiable(plan: Plan, workload: str | None, *, changed_ok: bool) -> tuple[Plan, str | None]:
    """The plan with the workload that the user named, and what else changed, in words.

    Raises:
        AutoplanError: it must not be run here.
    """
    if plan.workload.kind == "object":
        raise PlanError(
            f"{plan.workload.name} was made of Python objects, which a plan does not carry",
            hint="Search again with the same objects, which answers from its record; or use plan.prepare(model, "
            "optimizer, loss).",
        )
    plan = plan.model_copy(update={"workload": own_workload(plan.workload, plan.study, workload)})
    return plan, check_before_use(plan, changed_ok=changed_ok, checks_parity=False)


def verify_plan(
    plan: Plan, seconds: float, memory_limit: str | int | None = None, *, wait: bool = False
) -> Verification:
    """The parity check and one measured trial of a plan's configuration, and what they say of it."""
    from autoplan.planner.parity.compare import run_parity
    from autoplan.planner.trials.runner import TrialOrder, TrialRunner
    from autoplan.probes.run import pick_device, read_host_profile
    from autoplan.processes import Zygote, folder_prefix

    profile = read_host_profile()
    device = pick_device(profile, plan.device)
    options = SearchOptions(spec=plan.workload, memory_limit=memory_limit)
    wanted = options.memory_limit_bytes(profile.device(device).memory_total_bytes.value)
    limit, host_limit = limits(profile, device, wanted, measured=plan.hardware)
    parity: Parity
    trial: Trial
    with (
        DeviceLock(device_names(profile, device, plan.config.world_size), wait=wait),
        tempfile.TemporaryDirectory(prefix=folder_prefix("verify")) as folder,
        Zygote() as zygote,
    ):
        parity = run_parity(
            zygote,
            plan.workload,
            plan.config,
            device=device,
            directory=Path(folder, "parity"),
            deadline_s=PARITY_DEADLINE_S,
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
            most_s=seconds,
            deadline_s=seconds * 4 + PARITY_DEADLINE_S,
        )
        trial = runner.run(order)
    return judge(plan, parity, trial, find_differences(plan, profile), limit)
