"""The state of a running search: its trials, and the objects that its pieces of work share.

In: what `run.py` opened (options, store, zygote, context, sampler, runner). Out: trials in the store. What runs next is
decided in `next_work.py`; what a piece of work does is in `work.py`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

from autoplan.planner.parity.records import CHECK_MICRO_BATCH
from autoplan.planner.records.baseline import YOURS, is_plain_run, may_stand_in, run_words
from autoplan.planner.records.trials import (
    IN_FP32,
    ClaimRounds,
    Objective,
    Outcome,
    Parity,
    Prediction,
    Purpose,
    Trial,
    WorkLine,
)
from autoplan.planner.search.candidate_model import FEWEST_LOOKS, CandidateModel
from autoplan.planner.search.claim import LEAST_ROUNDS, Comparison, claim_progress, compare, is_claim_over, until_next
from autoplan.planner.search.device_hours import alone_s, used_s
from autoplan.planner.search.next_work import EndedBy, Work
from autoplan.planner.search.objective import best_trial, contenders
from autoplan.planner.search.objective import order as ordered
from autoplan.planner.search.options import BudgetState, SearchObserver, SearchOptions
from autoplan.planner.search.selection import (
    CandidateRuns,
    collect_runs,
    has_lasting_load,
    measured_spread,
    without_void,
)
from autoplan.planner.search.setup import SearchContext
from autoplan.planner.search.side_by_side import SideBySide
from autoplan.planner.search.trial_cost import SLOW_MODE_SHARE, ModelCost, TrialCost
from autoplan.planner.store.store import Store
from autoplan.planner.trials.measure import Spread
from autoplan.planner.trials.runner import TrialLimits, TrialOrder, TrialRunner, make_attempt, with_first_loss_compared
from autoplan.processes import Ended, ProcessReport, Progress, Zygote
from autoplan.strategies.config import TrainingConfig

if TYPE_CHECKING:
    from autoplan.planner.search.sampler import MovingSampler

OVERRUN = 0.05
"""A running trial is ended when it is this share of the budget past the budget; the whole search stays within 10 %."""


PLAIN_PARITY = Parity(
    passed=True,
    tolerance=0.0,
    worst_gradient_difference=0.0,
    worst_update_difference=0.0,
    worst_group="",
    loss_difference=0.0,
    global_batch=0,
    sequence_length=None,
    changes_numerics=False,
    note="the plan is the plain run, with which a parity check compares: nothing was checked",
)
"""Of a plan that is the plain run."""

OWN_PARITY = PLAIN_PARITY.model_copy(
    update={"note": f"the plan is {YOURS}, the training as it was: nothing was checked"}
)
"""Of a plan that is the user's own setting."""

POLL_S = 0.5
"""Seconds between two looks at what other planners do."""

REMEASURE = 1.0
"""A trial may take so many times longer to measure disturbed stretches again; not at all under a load that lasts."""


class BudgetOver(Exception):
    """There is no time left for the next piece, which the text names; `needed_s` is a budget that should do."""

    def __init__(self, stage: str, *, needed_s: float | None = None) -> None:
        super().__init__(stage)
        self.needed_s = needed_s


@dataclass(kw_only=True)
class Session:
    """The state of one run of a search."""

    options: SearchOptions
    observer: SearchObserver
    store: Store
    zygote: Zygote
    context: SearchContext
    budget_s: float  # over all runs, without `loading_s`
    model: CandidateModel  # what is known of the candidates
    runner: TrialRunner
    sampler: MovingSampler | None = None  # what draws the looks, where --sampler names one
    notes: list[str] = field(default_factory=list)  # sentences for the plan
    did_not_run: list[str] = field(default_factory=list)  # a sentence for each piece that something outside ended
    lost_in_a_row: int = 0  # trials, one after another, that did not run
    ended_by: EndedBy = "nothing_left"  # why no further look was made
    loading_s: float = 0.0  # of the search's budget, kept for the loader
    unchecked: set[TrainingConfig] = field(default_factory=set)  # whose parity check did not end, in this run
    hung: set[TrainingConfig] = field(default_factory=set)  # of these, those whose check no end of the budget ended
    ended_claims: set[int] = field(default_factory=set)  # numbers of claims whose rounds ended early
    unpaired: set[TrainingConfig] = field(default_factory=set)  # whose pair ended early or is void: no other is made
    taken: frozenset[str] = frozenset()  # keys (`Work.key`) of what other planners, or other parts of this machine, do
    _spread: tuple[int, Spread] | None = None  # by the number of trials
    _firsts: tuple[int, dict[TrainingConfig, Trial]] | None = None
    _parity_cost: tuple[int, SearchContext, ModelCost] | None = None  # and by what is known of the model
    _shown: tuple[tuple[int, int], Trial | None] | None = None  # by the number of looks and of pieces
    devices: int = 1  # that this planner holds (device_hours.py)
    _began_s: float | None = None
    _others_since: dict[str, float] = field(default_factory=dict)  # their pieces, and our clock when we saw them first
    side: SideBySide | None = None  # runs looks on several parts of this machine at once
    apart: bool = False  # rounds run one after the other, since in slices one did not come to its end

    @property
    def objective(self) -> Objective:
        """The objective of the search."""
        return self.options.wanted

    @property
    def run_spread(self) -> Spread:
        """Between runs of one configuration on this device, by what is known now."""
        trials = self.store.trials
        if self._spread is None or self._spread[0] != len(trials):
            self._spread = len(trials), measured_spread(trials)
        return self._spread[1]

    @property
    def left_s(self) -> float:
        """Seconds of the budget, and of the device-hours, that are left."""
        return min(self.budget_s - self.store.spent_s, self.device_left_s)

    @property
    def device_left_s(self) -> float:
        """Seconds until the device-hours of all planners are used up by this one; infinite: no limit was given."""
        limit_s = alone_s(self.options, self.devices)
        if limit_s == math.inf:
            return limit_s
        spent_s = self.store.spent_s
        running_s = 0.0 if self._began_s is None else spent_s - self._began_s  # looks side by side: as they end
        running_s += sum(spent_s - since_s for since_s in self._others_since.values())  # on as many devices as here
        return limit_s - self.loading_s - used_s(self.store.ledger) / self.devices - running_s

    @property
    def trial_cost(self) -> TrialCost:
        """The cost of trials."""
        return self.model.trial_cost

    @property
    def parity_cost(self) -> ModelCost:
        """The cost of the parts of a parity check on this model: predicted, then as the baseline measured them."""
        known, made = self._parity_cost, len(self.store.trials)
        if known is None or known[0] != made or known[1] is not self.context:
            known = self._parity_cost = made, self.context, self._find_parity_cost()
        return known[2]

    def _find_parity_cost(self) -> ModelCost:
        profile, spec, base = self.context.estimator.profile, self.context.spec, self.baseline
        training = self.context.facts.training
        if base is not None and base.step_time_s is not None:
            step_s, optimizer_s = base.step_time_s.median, base.parts_s.get("optimizer_step", 0.0)
            plain = TrainingConfig(micro_batch=base.config.micro_batch)  # a check compares with the plain run
            if base.config == self.own_config != plain:
                step_s *= self.predict(plain).step_time_s / self.predict(base.config).step_time_s
        else:
            sizes = self.context.space.values["micro_batch"]  # none where a replay has no plain run
            largest = max(sizes, default=1)  # one of one sample may be bound by launches
            step_s, optimizer_s = self.predict(TrainingConfig(micro_batch=largest)).step_time_s, 0.0
        return ModelCost(
            sequence_length=spec.sequence_length,
            parameters=profile.trainable,
            sample_s=step_s / spec.global_batch,
            optimizer_s=optimizer_s,
            has_dropout=training is None or bool(training.dropout),
            fixed_micro_batch=len(self.context.space.values["micro_batch"]) == 1,
        )

    def budget(self) -> BudgetState:
        """How much of the budget is used, for the observer, and how fast the best so far is."""
        best, base = self.shown_best, self.baseline
        gain = None
        if best is not None and base is not None and best.step_time_s is not None and base.step_time_s is not None:
            gain = base.step_time_s.median / best.step_time_s.median
            gain *= self.model.pace_of(best) / self.model.pace_of(base)
        return budget_of(self.options, self.store, self.budget_s).model_copy(update={"gain": gain})

    # What was measured.

    @property
    def trials_done(self) -> int:
        """Trials that count towards --max-trials."""
        return budget_of(self.options, self.store, self.budget_s).trials_done

    @property
    def baseline(self) -> Trial | None:
        """The baseline, if it was measured: the user's own setting, the plain run, or what stands for that."""
        good = [trial for trial in self.baseline_trials if trial.outcome is Outcome.OK]
        return next(iter(without_void(good)), None)

    @property
    def baseline_trials(self) -> list[Trial]:
        """The trials of what may be the baseline, from the first of the user's present setting on."""
        made, own = [trial for trial in self.store.trials if trial.purpose == "baseline"], self.own_config
        if own is None:  # an earlier run of the search may have known one
            return [trial for trial in made if may_stand_in(trial.config)]
        return list(itertools.dropwhile(lambda trial: trial.config != own, made))

    @property
    def plain_is_known(self) -> bool:
        """Whether the baseline has its step time; a replay may have none to measure."""
        return self.baseline is not None

    @property
    def plain_config(self) -> TrainingConfig | None:
        """Of the baseline that was measured."""
        return None if self.baseline is None else self.baseline.config

    @property
    def claim_fitted(self) -> bool:
        """Whether enough looks were made while there was time for their claims."""
        return sum(line.with_claim for line in self.store.ledger) >= FEWEST_LOOKS

    @property
    def own_config(self) -> TrainingConfig | None:
        """The setting that the training has now; None: it is not known."""
        return self.context.spec.own_setting

    def run_words(self, config: TrainingConfig) -> str:
        """What a baseline is called: see `autoplan.planner.records.baseline.run_words`."""
        return run_words(config, self.own_config)

    def is_given(self, config: TrainingConfig) -> bool:
        """Whether a baseline needs no parity check: it is the training as the user has it, or the plain run."""
        return config == self.plain_config and (config == self.own_config or is_plain_run(config))

    def known_parity(self, config: TrainingConfig) -> Parity | None:
        """The verdict on a configuration: of its check, or that it needs none; None: it was not checked."""
        if not self.is_given(config):
            return self.store.parity_of(config)
        return OWN_PARITY if config == self.own_config else PLAIN_PARITY

    @property
    def best(self) -> Trial | None:
        """The fastest good trial so far that keeps what the user fixed, as if the cores had kept their speed."""
        kept = {trial.number: trial for trial in self.store.trials if self._keeps(trial.config)}
        found = best_trial((t.at_pace(1 / self.model.pace_of(t)) for t in kept.values()), self.objective)
        return None if found is None else kept[found.number]

    @property
    def shown_best(self) -> Trial | None:
        """What a person is told to be the best so far: the look of what is claimed, or of the fastest by all trials."""
        made = sum(not trial.is_repeat for trial in self.store.trials), len(self.store.ledger)
        if self._shown is None or self._shown[0] != made:
            leading = self.ranked(self.eligible)
            claimed = (runs for runs in leading if self.claim_rounds(runs.config) is not None)
            first = next(claimed, leading[0] if leading else None)
            self._shown = made, None if first is None else first.first
        return self._shown[1]

    @property
    def eligible(self) -> list[CandidateRuns]:
        """What may become the plan, fastest first: it ran, keeps what the user fixed, and failed no parity check."""
        return [runs for runs in self.may_be_plan if runs.config not in self.unchecked]

    @property
    def may_be_plan(self) -> list[CandidateRuns]:
        """The same, with those whose parity check did not come to its end."""
        ran = collect_runs(self.store.trials)
        return [r for r in ran if self._keeps(r.config) and not failed_parity(self.store, r.config)]

    def _keeps(self, config: TrainingConfig) -> bool:
        """Whether it keeps what the user fixed, and does not rest on other work's load."""
        return self.options.allows(config) and not self.model.hangs_on_load(config)

    def ranked(self, candidates: Sequence[CandidateRuns]) -> list[CandidateRuns]:
        """Configurations, best first; a single look counts by what all trials say of it."""
        believed = self.model.believed_s
        runs = [one if one.finalist_runs else replace(one, believed_s=believed(one.config)) for one in candidates]
        return ordered(self.objective, runs, self.run_spread)

    def contenders(self, leader: CandidateRuns) -> list[CandidateRuns]:
        """The configurations that may be as good as the leader, best first, without it."""
        return contenders(self.objective, self.eligible, leader, self.run_spread)

    def first_run(self, config: TrainingConfig) -> Trial | None:
        """The first good trial of a configuration."""
        trials = self.store.trials
        if self._firsts is None or self._firsts[0] != len(trials):
            self._firsts = len(trials), {runs.config: runs.first for runs in collect_runs(trials)}
        return self._firsts[1].get(config)

    def has_verdict(self, config: TrainingConfig) -> bool:
        """Whether a trial of it came to its end; one that the budget ended says nothing."""
        return any(trial.config == config and not trial.budget_ended for trial in self.store.trials)

    @property
    def hand_config(self) -> TrainingConfig | None:
        """The hand setting that was chosen; None: none was yet."""
        return next((line.config for line in self.store.ledger if line.kind == "hand setting"), None)

    @property
    def hand(self) -> Trial | None:
        """The look at the hand setting; one that was stopped early has a bound on its step time."""
        config = self.hand_config
        good = [t for t in self.store.trials if t.config == config and t.step_time_s is not None and not t.is_repeat]
        return good[0] if good else None

    # The claim.

    @property
    def whole_budget_s(self) -> float:
        """With what is kept for the loader: a search that is given one later has the same budget."""
        return self.budget_s + self.loading_s

    def claim_rounds(self, config: TrainingConfig) -> ClaimRounds | None:
        """The claim of this configuration that was begun with these limits or larger ones; None: it was not."""
        last, most = next(reversed(self.store.claims), None), self.options.max_trials
        if last is None or last.config != config or last.reference != self.plain_config:
            return None
        if last.budget_s < self.whole_budget_s:
            return None
        grown = last.max_trials is not None and (most is None or most > last.max_trials)
        return None if grown else last

    def claim_is_over(self, config: TrainingConfig) -> bool:
        """Whether all its rounds are made, or no more may be."""
        began = self.claim_rounds(config)
        return began is not None and (began.number in self.ended_claims or is_claim_over(self.store.trials, began))

    def take_context(self, context: SearchContext) -> None:
        """Goes on with a context that knows more: the candidates are predicted anew, and all trials taken in again."""
        model = make_model(self.options, context, self.store, self.budget_s)
        for config in self.model.out_of_turn:
            model.set_aside(config)
        for config in self.unchecked:
            model.set_back(config)
        self.context, self.model = context, model
        if self.sampler is not None:
            self.sampler.model = model

    def forget_void(self) -> None:
        """Learns nothing from a run of the baseline that a second one has shown to be wrong."""
        counted = {trial.number for trial in without_void(self.store.trials)}
        if any(trial.number not in counted for trial in self.model.trials):
            self.take_context(self.context.anew())

    def predict(self, config: TrainingConfig) -> Prediction:
        """The cost model's prediction, as it is calibrated now, for cores as fast as those of the last trial."""
        told, pace = self.context.estimator.estimate([config])[0], self.model.pace
        times = {name: pace * getattr(told, name) for name in ("step_time_s", "step_time_low_s", "step_time_high_s")}
        return told.model_copy(update=times)

    def comparison(self, runs: CandidateRuns) -> Comparison | None:
        """A configuration against the baseline: by the rounds of its last claim that has enough, else by the choice's.

        A search that goes on and has no time for a new claim keeps the earlier one of the same configuration.
        """
        trials, pair = self.store.trials, (runs.config, self.plain_config)
        claims = [one for one in self.store.claims if (one.config, one.reference) == pair]
        enough = [
            one for one in claims if claim_progress(until_next(trials, self.store.claims, one), one)[1] >= LEAST_ROUNDS
        ]
        claim = next(reversed(enough or claims), None)
        candidates = collect_runs(trials if claim is None else until_next(trials, self.store.claims, claim))
        plain = next((one for one in candidates if one.config == self.plain_config), None)
        if plain is None:
            return None
        runs = next((one for one in candidates if one.config == runs.config), runs)
        return compare(
            runs,
            plain,
            self.run_spread,
            chosen_from=len(candidates),
            claim=claim,
            paces=(self.model.pace_of(runs.first), self.model.pace_of(plain.first)),
        )

    # What runs elsewhere.

    @property
    def elsewhere(self) -> frozenset[TrainingConfig]:
        """The configurations that are looked at now: by other planners, or on other parts of this machine."""
        keys = (key.partition(" ") for key in self.taken)
        return frozenset(TrainingConfig.model_validate_json(config) for kind, _, config in keys if kind == "look")

    def take_in_others(self) -> None:
        """Takes in what other planners did since the last call, and what they work on now."""
        if not self.store.shared:
            return
        verdicts = len(self.store.parities)
        for trial in self.store.refresh():
            if not trial.is_repeat:
                self.model.observe(trial)
            self.observer.on_trial_finished(trial, self.shown_best, self.budget())
        self.forget_void()
        if len(self.store.parities) > verdicts:
            leave_out_failed(self.model, self.context, self.store)
        self._shown = None
        others, now_s = self.store.others(), self.store.spent_s
        self._others_since = {key: self._others_since.get(key, now_s) for key in others}
        self.set_taken(others)

    def set_taken(self, keys: Iterable[str]) -> None:
        """Notes the pieces of work that run elsewhere: none of them is chosen."""
        self.taken = frozenset(keys)
        self.model.set_elsewhere(self.elsewhere)

    def wait_for_others(self, said: str) -> str:
        """Waits for a moment, where only others can do what is next; says once what for, and returns what was said."""
        kinds = ", ".join(sorted({key.partition(" ")[0] for key in self.taken}))
        text = f"waiting for other planners of this study: {kinds}" if kinds else said
        if text != said:
            self.observer.on_note(text)
        self.store.tick()
        time.sleep(POLL_S)
        return text

    # What is done.

    @contextmanager
    def entry(self, work: Work) -> Iterator[None]:
        """Writes a line of the ledger for a piece of work, also if it ends in an error."""
        self._began_s = began_s = self.store.spent_s
        try:
            yield
        finally:
            self._began_s = None
            self.write_line(work, began_s)

    def write_line(self, work: Work, began_s: float, part: int | None = None) -> None:
        """Writes the line of a piece that began at `began_s` of the budget; `part`: of the machine, beside others."""
        seconds = self.store.spent_s - began_s
        self.store.add(
            WorkLine(
                kind=work.kind,
                config=work.config,
                began_s=began_s,
                seconds=seconds,
                devices=self.devices,
                predicted_s=work.cost_s,
                gain=work.gain,
                why=work.why,
                over=work.over,
                part=part,
                with_claim=work.kind == "look" and work.cost_s + work.needs_s <= self.left_s + seconds,
            )
        )

    def measure(self, purpose: Purpose, config: TrainingConfig, **limits: Unpack[TrialLimits]) -> Trial:
        """Runs one trial and writes it to disk before anything else. Ctrl-C passes through; its trial is not kept."""
        order = self.begin_trial(purpose, config, **limits)
        if self.side is not None and purpose == "baseline" and self.side.fits_a_part(config):
            return self.end_trial(self.side.run_with_copies(order))
        trial = self.runner.run(
            order,
            on_progress=self.on_progress,
            on_attempt=lambda report: self.add_attempt(purpose, report, number=order.number, config=config),
            left_s=lambda: self.hard_deadline_s(0.0),
        )
        return self.end_trial(trial)

    def in_slices(self, *runs: Trial) -> bool:
        """Whether runs of these configurations can share this machine in slices (planner/trials/slices.py).

        Over several nodes none of them is the machine of both.
        """
        return self.options.launcher == "local" and not self.apart and self.runner.may_slice(runs)

    def measure_round(
        self, purpose: Purpose, runs: Sequence[Trial], limits: Sequence[TrialLimits]
    ) -> tuple[Trial, ...] | None:
        """Runs two trials in slices, and writes both to disk; `runs`: earlier ones of both configurations.

        Returns:
            Both; none if the time was over, or something outside ended them each time; None if one did not come to its
            end for another reason, which is no verdict: all further rounds run one after the other.
        """
        orders: list[TrialOrder] = []
        for run, limit in zip(runs, limits, strict=True):
            taken = [order.number for order in orders]
            orders.append(self.begin_trial(purpose, run.config, taken=taken, **limit))

        def attempt(report: ProcessReport) -> None:
            failed = orders[min(report.failed_rank or 0, len(orders) - 1)]
            self.add_attempt(purpose, report, number=failed.number, config=failed.config)

        made = self.runner.run_round(
            orders,
            known=runs,
            on_progress=self.on_progress,
            on_attempt=attempt,
            left_s=lambda: self.hard_deadline_s(0.0),
        )
        self.store.tick(force=True)
        if made.trials:
            return tuple(self.end_trial(trial) for trial in made.trials)
        if made.report.ended is Ended.DEADLINE or not made.settled:
            return ()
        self.apart = True
        self.note(
            f"two runs in slices did not come to their end ({made.report.describe()}): they run one after another"
        )
        return None

    def begin_trial(
        self, purpose: Purpose, config: TrainingConfig, *, taken: Sequence[int] = (), **limits: Unpack[TrialLimits]
    ) -> TrialOrder:
        """The order for a trial, with a number that no other has; `taken`: numbers of trials that begin with it."""
        beside = () if self.side is None else self.side.numbers
        number = max([self.store.take_number(), *(1 + other for other in (*taken, *beside))])
        prediction = self.predict(config)
        self.observer.on_trial_started(number, purpose, config, prediction, self.budget())
        return TrialOrder(
            number=number,
            purpose=purpose,
            config=config,
            prediction=prediction,
            **limits | {"deadline_s": max(limits["deadline_s"], 5.0)},
            remeasure=0.0 if has_lasting_load(self.store.trials) else REMEASURE,
        )

    def end_trial(self, trial: Trial) -> Trial:
        """Writes a trial to disk, and takes in what it taught; of one that did not run there is nothing."""
        if trial.did_not_run:  # no verdict on it: it is tried again in the next run of the search, not in this one
            self.model.set_aside(trial.config)
            self.did_not_run.append(f"{trial.purpose} trial of {trial.config.describe()}: {trial.reason}")
            self.lost_in_a_row += 1
        else:
            trial = with_first_loss_compared(trial, self.baseline)
            self.lost_in_a_row = 0
            self.store.add(trial)
            if not trial.is_repeat:
                self.model.observe(trial)
        self.store.tick(force=True)
        self.observer.on_trial_finished(trial, self.shown_best, self.budget())
        return trial

    def add_attempt(
        self, part: str, report: ProcessReport, *, number: int | None = None, config: TrainingConfig | None = None
    ) -> None:
        """Keeps a run that something outside ended: in the record, and as a line on the screen."""
        attempt = make_attempt(part, report, number=number, config=config)
        self.store.add(attempt)
        self.observer.on_note(f"something outside ended {attempt.describe()}")

    def on_progress(self, progress: Progress) -> None:
        """Passes a trial's progress on, and keeps the clock on disk."""
        self.store.tick()
        facts: dict[str, Any] = dict(progress.facts[0]) if progress.facts else {}
        facts["memory_bytes"] = progress.memory_bytes
        self.observer.on_progress(progress.phase, facts, self.budget())

    def note(self, text: str) -> None:
        """A sentence for the screen and the plan."""
        self.notes.append(text)
        self.observer.on_note(text)

    def hard_deadline_s(self, needs_s: float) -> float:
        """Seconds after which a trial that starts now is ended, so that the budget holds what is needed after it."""
        return self.left_s - needs_s + OVERRUN * self.budget_s


def budget_of(options: SearchOptions, store: Store, budget_s: float) -> BudgetState:
    """How much of a budget is used. Trials that measure a configuration again do not count towards --max-trials."""
    return BudgetState(
        budget_s=budget_s,
        spent_s=store.spent_s,
        trials_done=sum(not trial.is_repeat for trial in without_void(store.trials)),
        max_trials=options.max_trials,
    )


def failed_parity(store: Store, config: TrainingConfig) -> bool:
    """Whether a configuration was checked and did not pass, or one was whose check computes the same: never the plan.

    What all others are compared with has no other's verdict.
    """
    found = store.parity_of(config)
    if found is not None:
        return not found.passed
    if any(trial.config == config for trial in store.trials if trial.purpose == "baseline"):
        return False
    failed = [(other, parity) for other, parity in store.parities.items() if not parity.passed and parity.finished]
    return any(is_checked_alike(config, other, parity) for other, parity in failed)


BEFORE_THE_OPTIMIZER = ("step 1", "own length", "dropout on", "start", "loss")
"""Ends of the names of what a check compares before the optimizer has stepped (`planner/parity/judge.py`)."""


def leave_out_failed(model: CandidateModel, context: SearchContext, store: Store) -> None:
    """Takes what would fail its check, as one of its kind has, out of what is untried."""
    for failed, parity in store.parities.items():
        if parity.passed or not parity.finished:
            continue
        model.set_failed(failed)
        varied = {
            knob: context.space.values[knob] for knob in ("micro_batch", "optimizer_step", "allocator", "threads")
        }
        for values in itertools.product(*varied.values()):
            config = failed.model_copy(update=dict(zip(varied, values, strict=True)))
            if config in model.legal and is_checked_alike(config, failed, parity):
                model.set_aside(config)


def is_checked_alike(config: TrainingConfig, failed: TrainingConfig, parity: Parity) -> bool:
    """Whether the check of a configuration computes what that of a failed one did.

    A check has micro-batches of its own, if it does not take those of training. The allocator changes no number, and
    threads only the order of sums. Where it failed before the first step of the optimizer, it has nothing to do with
    how that step runs.
    """
    names = [one.name.removesuffix(IN_FP32) for one in parity.checks if not one.difference <= one.allowed]
    same: dict[str, Any] = {"allocator": failed.allocator, "threads": failed.threads}
    if any(name.endswith(BEFORE_THE_OPTIMIZER) for name in names):
        same["optimizer_step"] = failed.optimizer_step
    if not parity.own_shapes and min(config.micro_batch, failed.micro_batch) >= CHECK_MICRO_BATCH:
        same["micro_batch"] = failed.micro_batch
    return config.model_copy(update=same) == failed


def make_model(options: SearchOptions, context: SearchContext, store: Store, budget_s: float) -> CandidateModel:
    """The model of the candidates: predictions, the cost of trials, and what the trials so far have taught."""
    cost = TrialCost(
        context.candidates,
        global_batch=context.spec.global_batch,
        num_blocks=context.facts.num_blocks,
        device=context.device,
    )
    model = CandidateModel(
        context.candidates,
        context.estimator,
        cost,
        memory_limit_bytes=context.memory_limit_bytes,
        device=context.device,
        allows=lambda config: options.allows(config) and not failed_parity(store, config),
        slow_mode_limit_s=SLOW_MODE_SHARE * budget_s,
        objective=options.wanted,
    )
    leave_out_failed(model, context, store)
    for trial in without_void(store.trials):
        if not trial.is_repeat:
            model.observe(trial)
    return model
