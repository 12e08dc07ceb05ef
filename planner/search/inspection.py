"""Inspects the workload in a rank, under the limits that user code has outside trials.

Out: its facts; their spec has the setting that the search starts from, if that is possible here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autoplan.errors import (
    BudgetEndedError,
    ConfigError,
    DidNotRunError,
    NoFeasiblePlanError,
    UsageError,
    WorkloadError,
)
from autoplan.planner.records.baseline import YOURS
from autoplan.planner.search.options import DEFAULT_BUDGET_S, SearchObserver, SearchOptions
from autoplan.probes.profile import HardwareProfile
from autoplan.processes import Ended, ProcessReport, Task, Zygote, limit_hit, run_again
from autoplan.strategies.analysis.facts import FUNCTIONS, LOSS_PHASE, Inspection, WorkloadFacts, read_inspection
from autoplan.strategies.config import DEGREES, TrainingConfig
from autoplan.strategies.techniques.rules import incompatible
from autoplan.strategies.workloads.loading.settings import LoaderSpec
from autoplan.strategies.workloads.spec import WorkloadSpec

INSPECT_DEADLINE_S, INSPECT_SHARE = 300.0, 0.25
"""The longest inspection: seconds, or a share of the budget where that is more; and never more than is left of it."""

LEAST_DEADLINE_S = 8.0
"""Seconds that the inspection may take however short the budget is: importing a library takes some of them."""


CHECK_LEAST_S, CHECK_MOST_S = 20.0, 120.0
"""The check before the trials may take what is left of the budget, within these seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """The means that every piece of the setup is made with."""

    options: SearchOptions
    zygote: Zygote  # where ranks are started
    observer: SearchObserver
    saved: Path | None = None  # where the study keeps its hardware profile: every run of a search uses the same one
    budget_s: float = DEFAULT_BUDGET_S  # of the whole search
    left_s: Callable[[], float] | None = None  # how much of it is left now; None: all of it
    on_attempt: Callable[[str, ProcessReport], None] = lambda part, report: None  # of runs ended from outside

    @property
    def time_s(self) -> float:
        """Seconds of the budget that are left now."""
        return self.budget_s if self.left_s is None else self.left_s()


def longest_inspection_s(budget_s: float) -> float:
    """The most seconds that an inspection may take, however much of the budget is left."""
    return max(INSPECT_DEADLINE_S, INSPECT_SHARE * budget_s)


def look_at(
    means: Means, hardware: HardwareProfile, device: str, ranks: int, memory_limit_bytes: int | None
) -> WorkloadFacts:
    """The facts of what a search was given, its dataset checked too; raises what `inspect` and `check_loader` raise."""
    options, observer = means.options, means.observer
    observer.on_phase("inspect", f"looking at {options.spec.name}")
    facts = inspect(means, hardware, device, ranks, memory_limit_bytes)
    spec = with_own_setting(facts, options).model_copy(update={"payload": options.spec.payload})
    observer.on_workload(spec)
    for note in spec.notes:
        observer.on_note(note)
    if options.loader is not None and not options.dry_run:
        observer.on_phase("loader", f"a first look at {options.loader.reference}")
        check_loader(means, options.loader, spec.global_batch, memory_limit_bytes)
    return facts.model_copy(update={"spec": spec})


def inspect(
    means: Means, hardware: HardwareProfile, device: str, ranks: int, memory_limit_bytes: int | None
) -> WorkloadFacts:
    """The workload's facts, from a rank; of several ranks too, where there may be several or one is asked for by name.

    Where the loss alone takes too much memory, the facts without it do: the trials find a micro-batch that fits, and
    the parity check looks at the loss again.

    Raises:
        DidNotRunError: something outside ended the rank each time.
        WorkloadError: the user's functions fail or return the wrong thing.
        BudgetEndedError: they took longer than the budget allows.
        NoFeasiblePlanError: they took more memory than a trial may take.
    """
    spec = means.options.spec
    parallel = ranks > 1 or not means.options.fix.keys().isdisjoint(DEGREES)
    attempted = partial(means.on_attempt, "inspect")
    for real in (False, True):
        task = Task(
            target="autoplan.strategies.inspect:run_inspect_rank",
            args=(spec, hardware, device, parallel, real),
            total_deadline_s=min(max(means.time_s, LEAST_DEADLINE_S), longest_inspection_s(means.budget_s)),
            memory_limit_bytes=memory_limit_bytes,
        )
        runs = run_again(means.zygote, task, on_attempt=attempted, left_s=lambda: means.time_s)
        report = runs.report
        if not runs.settled:
            raise DidNotRunError(f"the inspection of {spec.name}: something outside ended it: {report.describe()}")
        rank = report.ranks[0] if report.ranks else None
        if rank is None or rank.result is None or not Inspection.model_validate(rank.result).met_no_values:
            break
    if report.ended is Ended.FINISHED and rank is not None and rank.result is not None:
        means.zygote.load(Inspection.model_validate(rank.result).imported)
        return read_inspection(rank.result)
    hit = limit_hit(report, f"the inspection of {spec.name}", FUNCTIONS)
    if hit is None:
        failure = report.first_failure
        lines = failure.stderr_tail.strip().splitlines()[-3:] if failure is not None else []
        raise WorkloadError(
            f"{spec.name} could not be looked at: {report.describe()}" + "".join(f"\n    {line}" for line in lines),
            hint="Run its functions by themselves in Python to see where they fail.",
        )
    if hit.kind == "time":
        raise BudgetEndedError(hit.text, hint=hit.hint)
    if report.phase == LOSS_PHASE and rank is not None and rank.result is not None:
        means.observer.on_note(f"{hit.text}. Whether the loss is a sum over samples is left to the parity check")
        return read_inspection(rank.result)
    raise NoFeasiblePlanError(hit.text, hint=hit.hint)


def check_loader(means: Means, loader: LoaderSpec, samples: int, memory_limit_bytes: int | None) -> None:
    """Refuses a dataset whose first batch (of so many samples) or last sample cannot be made, before any trial is.

    Raises:
        WorkloadError: what is wrong, with the index of the sample.
        DidNotRunError: something outside ended the check.
    """
    task = Task(
        target="autoplan.planner.trials.loading:check_loading",
        args=(loader, samples),
        total_deadline_s=min(max(means.time_s, CHECK_LEAST_S), CHECK_MOST_S),
        memory_limit_bytes=memory_limit_bytes,
    )
    attempted = partial(means.on_attempt, "loader")
    runs = run_again(means.zygote, task, on_attempt=attempted, left_s=lambda: means.time_s)
    report = runs.report
    if report.ended is Ended.FINISHED:
        wrong = report.ranks[0].result
        if wrong is not None:
            raise WorkloadError(f"the loader ({loader.reference}): {wrong[0]}", hint=wrong[1])
        return
    if not runs.settled:
        raise DidNotRunError(f"the check of the loader: something outside ended it: {report.describe()}")
    hit = limit_hit(report, f"the check of the loader ({loader.reference})", {"loader": "the dataset"})
    if hit is not None:
        raise WorkloadError(hit.text, hint=hit.hint)
    raise WorkloadError(
        f"the loader ({loader.reference}) could not be looked at: {report.describe()}",
        hint="Go over the dataset by itself in Python to see where it fails.",
    )


def with_own_setting(facts: WorkloadFacts, options: SearchOptions) -> WorkloadSpec:
    """The spec of a workload with the setting that its search starts from: as the user says it, else as it was read.

    Knobs that the user does not name stay as they were read, but for a micro-batch that is fixed now. What was read and
    cannot run here is left out, with a note.

    Raises:
        ConfigError: the user's is not possible here.
        UsageError: it lacks the micro-batch, and none is known.
    """
    spec, said = facts.spec, options.baseline
    if said is None and spec.own_setting is None:
        return spec
    if said == "plain":
        return spec.model_copy(update={"own_setting": None})
    read = {} if spec.own_setting is None else spec.own_setting.knobs_off_default()
    fixed = spec.options.get("fixed_micro_batch")
    knobs = read | ({} if fixed is None else {"micro_batch": fixed}) | dict(said or {})
    if "micro_batch" not in knobs:
        raise UsageError(
            f"--baseline names no micro_batch, and that of {spec.name} is not known",
            hint=f"Name it too: --baseline micro_batch={spec.global_batch} where a step is one micro-batch.",
        )
    own = TrainingConfig.model_validate(knobs)
    why = _why_not_here(own, facts)
    if why is None:
        return spec.model_copy(update={"own_setting": own})
    if said is not None:
        raise ConfigError(
            f"the baseline {own.describe()} is not possible here: {why}",
            hint="It is the setting that the training has now, in one process. --baseline plain: the plain fp32 run.",
        )
    note = f"{YOURS} ({own.describe()}) is not the baseline, since it is not possible here: {why}"
    return spec.model_copy(update={"own_setting": None, "notes": (*spec.notes, note)})


def _why_not_here(config: TrainingConfig, facts: WorkloadFacts) -> str | None:
    """Why a configuration cannot run here in one process; None: it can, if it fits."""
    offered = {choice.knob: choice for choice in facts.choices}
    for knob, value in config.knobs_off_default().items():
        if knob in DEGREES:
            return f"{knob}={value} is of several processes, and a baseline runs in one"
        choice = offered.get(knob)
        if knob == "threads" or choice is None or value in choice.values:
            continue
        if knob == "micro_batch" and facts.spec.global_batch % value:
            return f"micro_batch={value} does not divide the global batch of {facts.spec.global_batch}"
        reasons = (left_out.reason for left_out in choice.left_out if left_out.value == value)
        return f"{knob}={value}: {next(reasons, 'this workload does not offer it on this device')}"
    return incompatible(config, facts.spec.global_batch)
