"""A search that has finished is called again: does its plan still run as fast? One short trial, and no parity check.

In: the search's options and its result from the record. Out: the result with a `Recheck`. What is trained is the same
by its identity, so the parity verdict of the search stands; memory and speed are measured again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from autoplan.planner.plan import Plan
from autoplan.planner.records import Recheck
from autoplan.planner.search.options import SearchOptions, SearchResult
from autoplan.planner.search.target import limits
from autoplan.planner.search.trial_cost import was_warm
from autoplan.planner.store.device_lock import DeviceLock, device_names
from autoplan.planner.surroundings import find_differences
from autoplan.planner.trials.runner import PHASE_DEADLINES_S, TrialOrder, TrialRunner
from autoplan.planner.verify.verdict import Verification, judge
from autoplan.processes import Zygote, folder_prefix

DEADLINE_FACTOR, DEADLINE_LEAST_S = 4.0, 60.0
"""The trial is ended after so many times the longest run of the plan's configuration, and these seconds at least."""


def with_recheck(
    options: SearchOptions, result: SearchResult, *, on_note: Callable[[str], None] = lambda text: None
) -> SearchResult:
    """The result of a search with what its plan does here and now; a result that is no answer of a record stays.

    Args:
        options: Of the search, with what is trained (objects too).
        result: As the search gave it.
        on_note: Is told that the device is waited for, and the verdict.
    """
    if not result.from_record or result.plan is None:
        if result.plan is not None:
            on_note("this search had not finished before, so its plan is new and was not checked again")
        return result
    found = _recheck(options, result, result.plan, on_note)
    again = Recheck(
        verdict=found.verdict,
        text=found.text,
        speed_ratio=found.speed_ratio,
        spread=found.spread,
        causes=tuple(cause.text for cause in found.causes),
        trial=found.trial,
        exit_code=found.exit_code,
    )
    on_note(again.describe())
    return result.model_copy(update={"recheck": again})


def make_order(result: SearchResult, plan: Plan) -> TrialOrder:
    """The trial that is run: timed as those of the search were.

    The compile cache may be empty by now, so the deadline comes from all runs of the configuration: the first one
    compiled. Where each of them found its kernels, nobody knows how long that takes, and the compiler has its own time.

    Args:
        result: Of the search, with the budget that it was given.
        plan: What it found.
    """
    runs = [trial for trial in plan.evidence if trial.config == plan.config]
    longest_s = max((trial.seconds_spent for trial in runs), default=0.0)
    deadline_s = max(DEADLINE_FACTOR * longest_s, DEADLINE_LEAST_S)
    if plan.config.compile != "off" and all(map(was_warm, runs)):
        deadline_s += PHASE_DEADLINES_S["compile"]
    return TrialOrder(
        number=0,
        purpose="finalist",
        config=plan.config,
        prediction=plan.prediction,
        deadline_s=deadline_s,
        method="whole_steps" if plan.measurement.method == "whole_steps" else "parts",
    )


def _recheck(options: SearchOptions, result: SearchResult, plan: Plan, on_note: Callable[[str], None]) -> Verification:
    """One trial of a plan's configuration, and the verdict."""
    from autoplan.probes.run import read_host_profile

    profile = read_host_profile()
    wanted = options.memory_limit_bytes(profile.device(plan.device).memory_total_bytes.value)
    limit, host_limit = limits(profile, plan.device, wanted, measured=plan.hardware)
    devices = device_names(profile, plan.device, plan.config.world_size)
    with (
        DeviceLock(devices, wait=options.wait, on_wait=on_note),
        tempfile.TemporaryDirectory(prefix=folder_prefix("recheck")) as folder,
        Zygote() as zygote,
    ):
        runner = TrialRunner(
            zygote,
            options.spec,
            device=plan.device,
            memory_limit_bytes=limit,
            host_limit_bytes=host_limit,
            directory=Path(folder),
            seed=options.seed,
        )
        trial = runner.run(make_order(result, plan))
    return judge(plan, plan.parity, trial, find_differences(plan, profile), limit)
