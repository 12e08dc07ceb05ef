"""staircase(plan): measures what each technique of a plan gives, and keeps it beside the plan.

First a look at each technique alone and at the plan without each: they decide the order (stairs.py). Then rounds as a
claim has them: each configuration once in a fresh process, in an order that is drawn. The looks have no part in the
figures, so that a step is not the larger for having been chosen as the largest.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from autoplan.errors import (
    BudgetEndedError,
    DidNotRunError,
    InterruptedSearchError,
    NoFeasiblePlanError,
    PlanError,
    UsageError,
)
from autoplan.files import replace_file
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.surroundings import find_differences, read_environment
from autoplan.planner.records.baseline import run_words
from autoplan.planner.records.plan_file import first_problem, one_line, read_document, with_shown_texts
from autoplan.planner.records.trials import Trial
from autoplan.planner.search.claim import LEAST_ROUNDS, ROUNDS_AGAIN
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.work import DEADLINE_FACTOR
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.planner.verify.measure import open_plan, open_runner, say_nothing
from autoplan.planner.verify.stairs import OF_SEARCH, Names, Staircase, is_good
from autoplan.probes.profile import HardwareProfile
from autoplan.probes.run import read_host_profile
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import format_seconds, parse_duration_s

DEFAULT_BUDGET_S = 300.0

ROUNDS = 5
"""Undisturbed rounds after which nothing more is measured: with them a step of 5 % is told from noise where runs of one
configuration differ by 2 % (`half_width` of measure.py)."""

LOOKS_SHARE = 0.4
"""Of the budget, for the looks: what they do not come to has its place in the order by its neighbours."""

DEADLINE_MORE_S = 60.0
"""A run is ended after DEADLINE_FACTOR times the longest so far and these seconds: some compile for the first time."""

MEASURE_ANEW = "Measure it anew: autoplan explain --staircase --fresh, or fresh=True."

ALL_MEASURED, BUDGET_ENDED = "all was measured", "the budget ended"


def beside(plan: str | Path) -> Path:
    """The file of the staircase of a plan's file: `plan.staircase.json`."""
    return Path(plan).with_suffix(".staircase.json")


def staircase(
    plan: Plan | str | Path,
    *,
    budget: str | float | None = None,
    fresh: bool = False,
    start: TrainingConfig | None = None,
    keep: str | Path | None = None,
    memory_limit: str | int | None = None,
    unverified_ok: bool = False,
    changed_ok: bool = False,
    workload: str | Path | WorkloadSpec | None = None,
    wait: bool = False,
    on_progress: Callable[[str], None] = say_nothing,
) -> Staircase:
    """Measures what each technique of a plan gives: from the baseline to the plan one at a time, side by side.

    The steps come in the order of what they gain; techniques that need each other come together. Then the plan is
    measured without each technique. What the search measured side by side on this machine counts too. The result is
    kept in a file; called again, the function reads it, or goes on if the time ended or Ctrl-C came before its end.

    Args:
        plan: A plan, or the file of one.
        budget: Time for all measuring, like `"5m"`, or seconds; with more than before it goes on. Default: 5 minutes.
        fresh: Measure anew, whatever was kept.
        start: Where it begins. Default: the baseline, with which the plan was compared.
        keep: The file of the result. Default: beside the plan's file, `plan.staircase.json`; of a Plan none.
        memory_limit: What a run may take, like `"8GiB"` or `"80%"`. Default: as in a search.
        unverified_ok: Measure it although it is unverified: the best so far of a search that ended before its proof.
        changed_ok: Measure it although the plan was edited, or the workload's code changed.
        workload: What the plan is of, as you name it: a text as `--model` takes it; of Python objects their spec
            (`spec_from_objects`). Not needed where you searched a file.
        wait: Wait where a search measures on this device. Default: an error.
        on_progress: Is told what is done, in words: `print` for example.

    Raises:
        PlanError: the plan may not be used here (see `verify`); the file is no staircase of it, or was begun on other
            hardware or with other versions.
        UsageError: there is no step from the start to the plan; a budget or a limit is none.
        DeviceError, DeviceBusyError: the plan's kind of device is not here, or a search measures on it.
        NoFeasiblePlanError: the start or the plan does not run here.
        DidNotRunError: something outside ended the runs each time.
        BudgetEndedError: no step was measured within the budget.
        InterruptedSearchError: Ctrl-C; what was measured is kept, and the same call goes on.
    """
    place = Path(keep) if keep is not None else None if isinstance(plan, Plan) else beside(plan)
    loaded = (plan if isinstance(plan, Plan) else Plan.load(plan)).accepted(unverified_ok)
    seconds = None if budget is None else parse_duration_s(budget)
    found = None if fresh or place is None or not place.exists() else load_staircase(place, loaded, start)
    if found is not None and found.ended is not None:
        has_more_time = seconds is not None and seconds > found.budget_s
        if found.ended != BUDGET_ENDED or not has_more_time:
            return _with_a_step(found, place)
    loaded = open_plan(loaded, changed_ok=changed_ok, workload=workload)
    if loaded.nodes is not None:
        raise PlanError(
            f"the plan was measured on {loaded.nodes.describe()}, and a staircase is measured on one machine",
            hint="autoplan verify --launcher measures the plan itself on such nodes.",
        )
    profile = read_host_profile()
    if found is None:
        found = begin(loaded, profile, start or loaded.baseline.config, seconds or DEFAULT_BUDGET_S)
    else:
        _refuse_other_machine(found, loaded, profile)
        found = found.model_copy(update={"budget_s": seconds or found.budget_s})
    options = SearchOptions(spec=loaded.workload, memory_limit=memory_limit, wait=wait)
    with open_runner(loaded, options, profile, on_wait=on_progress) as runner:
        climb = Climb(found=found, runner=runner, place=place, on_progress=on_progress)
        try:
            climb.run()
        except KeyboardInterrupt:
            if place is None:
                raise InterruptedSearchError("interrupted; nothing is kept", hint="Name a file with keep.") from None
            kept = f"interrupted; {len(climb.found.trials)} runs are kept in {place}"
            raise InterruptedSearchError(kept, hint="The same call goes on.") from None
    return _with_a_step(climb.found, place)


def _with_a_step(found: Staircase, place: Path | None) -> Staircase:
    """The staircase, where the gain of a step is known.

    Raises:
        BudgetEndedError: the budget was too small for any.
    """
    if any(step.gain is not None for step in found.steps()):
        return found
    kept, lost = "Go on with a larger --budget: what was measured is kept.", "Give a larger --budget. Nothing is kept."
    raise BudgetEndedError(
        f"the budget of {format_seconds(found.budget_s)} ended before two rounds of runs side by side",
        hint=lost if place is None else kept,
    )


def _refuse_other_machine(found: Staircase, plan: Plan, here: HardwareProfile) -> None:
    """Refuses to go on where runs would not be beside those that are kept.

    Raises:
        PlanError: hardware, versions or variables differ from those of the kept runs.
    """
    as_begun = plan.model_copy(update={"hardware": found.machine, "environment": found.environment})
    if differences := find_differences(as_begun, here):
        raise PlanError(
            f"the staircase was begun elsewhere, or with other versions: {'; '.join(one.text for one in differences)}",
            hint=MEASURE_ANEW,
        )


def begin(plan: Plan, profile: HardwareProfile, start: TrainingConfig, budget_s: float) -> Staircase:
    """A staircase before its first run, with what the search measured of it.

    The search's undisturbed trials count where it ran on the same hardware, with the same versions and variables.

    Raises:
        UsageError: start and plan are the same.
        ConfigError: the start's micro-batch does not divide the global batch.
    """
    start.accumulation(plan.workload.global_batch)
    if start == plan.config:
        raise UsageError(
            f"the plan is {run_words(start, plan.workload.own_setting)}, so there is no step between the two",
            hint="autoplan explain says what was tried; a search with a larger --budget may find more.",
        )
    found = Staircase(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        study=plan.study,
        workload=plan.workload.name,
        hardware=profile.device(plan.device).name,
        device=plan.device,
        machine=profile,
        environment=read_environment(),
        global_batch=plan.workload.global_batch,
        start=start,
        own_setting=plan.workload.own_setting,
        plan=plan.config,
        budget_s=budget_s,
    )
    known = [] if find_differences(plan, profile) else [t for t in plan.evidence if is_good(t) and not t.disturbed]
    trials = [_as_known(trial) for trial in known if found.between.names(trial.config) is not None]
    return found.model_copy(update={"trials": tuple(trials)})


def _as_known(trial: Trial) -> Trial:
    """A trial of the search, as a look or as a run of a round that has a number of its own here."""
    if trial.purpose not in ("claim", "finalist") or trial.round is None:
        return trial.model_copy(update={"purpose": "search", "round": None})
    number = (OF_SEARCH if trial.purpose == "claim" else 2 * OF_SEARCH) + trial.round
    return trial.model_copy(update={"purpose": "claim", "round": number})


@dataclass(kw_only=True)
class Climb:
    """The measuring of a staircase, run by run; each is kept before the next begins.

    Attributes:
        found: What is known so far.
        runner: Runs trials.
        place: The file; None: it is not kept.
        on_progress: Is told what is done.
    """

    found: Staircase
    runner: TrialRunner
    place: Path | None
    on_progress: Callable[[str], None]

    def __post_init__(self) -> None:
        self._began, self._spent_before_s = time.monotonic(), self.found.spent_s
        self._lost, self._apart = 0, False

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.found.budget_s - self._spent_before_s - (time.monotonic() - self._began)

    def run(self) -> None:
        """The looks, the order, the rounds; it ends when all is measured, or the budget is over."""
        between = self.found.between
        if not self.found.order:
            self._look(between.looks())
            self._refuse_what_does_not_run()
            order = between.order(self._step_s())
            self._keep(order=tuple(tuple(knob for knob in between.knobs if knob in names) for names in order))
        path = self.found.path
        without = [between.config(between.all - names) for names in between.left_out]
        alone = [between.config(names) for names in between.alone]
        several = ([*path, *without, *alone], [*path, *without], path)
        groups = [list(dict.fromkeys(configs)) for configs in several]
        while any(self._wants(config) for config in groups[0]):
            wanted = (group for group in groups if any(map(self._wants, group)) and self._has_time(group))
            configs = next(wanted, None)
            if configs is None:
                self._keep(ended=BUDGET_ENDED)
                return
            self._round(configs)
        self._keep(ended=ALL_MEASURED)

    def _refuse_what_does_not_run(self) -> None:
        for name, config in (("the start", self.found.start), ("the plan", self.found.plan)):
            if (failed := self.found.failure(config)) is not None:
                raise NoFeasiblePlanError(
                    f"{name} ({config.describe()}) does not run here: {failed}",
                    hint="Give it more with --memory-limit and --fresh, or search on this machine: autoplan search.",
                )

    def _look(self, sets: Sequence[Names]) -> None:
        missing = [names for names in sets if names not in self._step_s()]
        for number, names in enumerate(missing, 1):
            if self.left_s <= (1 - LOOKS_SHARE) * self.found.budget_s:
                return
            words = " ".join(self.found.between.label(names)) or "the start"
            self._measure(self.found.between.config(names), f"look {number} of {len(missing)}: {words}")

    def _step_s(self) -> dict[Names, float]:
        """Seconds of a step of each set of knobs that was looked at; infinity for one that does not run."""
        times: dict[Names, float] = {}
        for trial in self.found.trials:
            names = self.found.between.names(trial.config)
            if names is not None and trial.purpose != "claim" and not trial.budget_ended:
                times[names] = trial.step_time_s.median if trial.step_time_s and is_good(trial) else math.inf
        return times

    def _round(self, configs: Sequence[TrainingConfig]) -> None:
        """One run of each configuration that runs here, in an order that is drawn: in slices of time, if that can be.

        One that does not come to its end in slices says nothing by that: then all run one after the other.
        """
        number = 1 + max((run.round or 0 for run in self._own_runs()), default=-1)
        order = [config for config in configs if self.found.failure(config) is None]
        random.Random(f"staircase/{number}").shuffle(order)
        if self._in_slices(order, number):
            return
        for place, config in enumerate(order, 1):
            if self.left_s <= 0:
                return
            self._measure(config, f"round {number + 1}, run {place} of {len(order)}", round=number)

    def _in_slices(self, order: Sequence[TrainingConfig], number: int) -> bool:
        """Whether a round was made in slices, or the time was over in it.

        Of a configuration that did not run yet, the memory is taken to be that of the largest.
        """
        ran = {trial.config: trial for trial in self.found.trials if is_good(trial)}
        largest = max(ran.values(), key=lambda trial: trial.peak_memory_bytes or 0, default=None)
        if self._apart or largest is None or not self.runner.may_slice([ran.get(c, largest) for c in order]):
            return False
        known = [ran[config] for config in order] if ran.keys() >= set(order) else []
        self.on_progress(f"round {number + 1}, {len(order)} runs in slices of time")
        orders = [self._order_for(config, number, place) for place, config in enumerate(order)]
        share_s = self.left_s / len(orders)
        orders = [replace(one, deadline_s=max(5.0, min(one.deadline_s, share_s))) for one in orders]
        made = self.runner.run_round(orders, known=known, left_s=lambda: self.left_s)
        self._count_lost(not made.settled, made.report.describe())
        if made.trials:
            self._keep(trials=(*self.found.trials, *made.trials))
        failed = not made.trials and made.settled and self.left_s > 0
        self._apart = failed and bool(known)  # else one that ran here for the first time may not run at all
        return not failed

    def _own_runs(self) -> Iterator[Trial]:
        """The runs of rounds that were made here."""
        return (t for t in self.found.trials if t.purpose == "claim" and t.round is not None and t.round < OF_SEARCH)

    def _wants(self, config: TrainingConfig) -> bool:
        """Whether a configuration runs and lacks rounds; disturbed ones are made again, within limits."""
        made = [run for run in self._own_runs() if run.config == config]
        quiet = sum(not run.disturbed for run in made)
        return self.found.failure(config) is None and quiet < ROUNDS and len(made) < ROUNDS + ROUNDS_AGAIN

    def _has_time(self, configs: Sequence[TrainingConfig]) -> bool:
        """Whether so many rounds of these fit into the budget that each has LEAST_ROUNDS; one more, where it has."""
        least, cost_s = ROUNDS, 0.0
        for config in configs:
            if self.found.failure(config) is None:
                least = min(least, sum(run.config == config for run in self._own_runs()))
                cost_s += self._cost_s(config)
        return cost_s * max(1, LEAST_ROUNDS - least) <= self.left_s

    def _cost_s(self, config: TrainingConfig) -> float:
        """Seconds that a further run takes: as the shortest so far, else the median of all configurations.

        The first run filled the compile cache, so that at least half of its compilation is saved later (measured on a
        small ViT: 7.1 s, then 1.8 s).
        """
        spent = [(t.config, t.seconds_spent - t.phase_seconds.get("compile", 0.0) / 2) for t in self.found.trials]
        own = [seconds for known, seconds in spent if known == config]
        return min(own) if own else statistics.median([seconds for _, seconds in spent] or [DEADLINE_MORE_S])

    def _measure(self, config: TrainingConfig, words: str, *, round: int | None = None) -> None:
        """One trial of a configuration, kept in the file.

        Raises:
            DidNotRunError: something outside ended this one and the one before.
        """
        self.on_progress(words)
        trial = self.runner.run(self._order_for(config, round), left_s=lambda: self.left_s)
        self._count_lost(trial.did_not_run, str(trial.reason))
        if not trial.did_not_run:
            self._keep(trials=(*self.found.trials, trial))

    def _count_lost(self, lost: bool, reason: str) -> None:
        self._lost = self._lost + 1 if lost else 0
        if self._lost > 1:
            raise DidNotRunError(f"two runs, one after the other; the last: {reason}")

    def _order_for(self, config: TrainingConfig, round: int | None, place: int = 0) -> TrialOrder:
        before = [trial for trial in self.found.trials if trial.config == config and is_good(trial)]
        longest_s = max((trial.seconds_spent for trial in self.found.trials), default=DEADLINE_MORE_S)
        own_s = DEADLINE_FACTOR * longest_s + DEADLINE_MORE_S
        return TrialOrder(
            number=1 + place + max((trial.number for trial in self.found.trials), default=-1),
            purpose="search" if round is None else "claim",
            config=config,
            prediction=None,
            deadline_s=max(5.0, min(self.left_s, own_s)),
            deadline_of_budget=self.left_s < own_s,
            method=before[0].method if before else None,
            round=round,
        )

    def _keep(self, **changed: object) -> None:
        spent_s = self._spent_before_s + time.monotonic() - self._began
        self.found = self.found.model_copy(update={"spent_s": spent_s} | changed)
        if self.place is not None:
            save_staircase(self.found, self.place)


# The file.


def save_staircase(found: Staircase, path: Path) -> None:
    """Writes a staircase, atomically, with the digest of what it says.

    Raises:
        PlanError: it cannot be written.
    """
    sealed = found.model_copy(update={"seal": _digest(found)})
    try:
        replace_file(path, sealed.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise PlanError(f"the staircase cannot be written to {path}: {error.strerror}") from error


def load_staircase(path: Path, plan: Plan, start: TrainingConfig | None = None) -> Staircase:
    """Reads the staircase of a plan; runs no code.

    Raises:
        PlanError: the file is none, was edited, or is of another plan or start.
    """
    try:
        found = Staircase.model_validate(with_shown_texts(read_document(path)))
    except ValidationError as error:
        raise PlanError(f"{path} is no staircase: {first_problem(error)}", hint=MEASURE_ANEW) from None
    if found.seal != _digest(found):
        raise PlanError(f"{path} was edited after it was measured", hint=MEASURE_ANEW)
    if (found.study, found.plan) != (plan.study, plan.config):
        raise PlanError(
            f"{path} is the staircase of another plan: {one_line(found.plan.describe())}", hint=MEASURE_ANEW
        )
    if start is not None and start != found.start:
        raise PlanError(f"{path} begins at {one_line(found.start.describe())}", hint=MEASURE_ANEW)
    return found


def _digest(found: Staircase) -> str:
    """16 hex digits (SHA-256) of all that a staircase says."""
    text = json.dumps(with_shown_texts(found.model_copy(update={"seal": ""}).model_dump(mode="json")))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
