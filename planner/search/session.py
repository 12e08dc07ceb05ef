"""The state of a running search: its clock, its trials, and the objects that the stages share.

In: what `run.py` opened (options, store, zygote, context, picker, runner). Out: trials in the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from autoplan.planner.records import REPEATS, Objective, Outcome, Prediction, Purpose, Trial
from autoplan.planner.search import parity_time
from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.learned import NOTHING, TakenOver
from autoplan.planner.search.objective import best_trial_for
from autoplan.planner.search.options import BudgetState, SearchObserver, SearchOptions
from autoplan.planner.search.parity_time import ModelCost
from autoplan.planner.search.sampler import CandidateSampler
from autoplan.planner.search.selection import best_trial, measured_spread
from autoplan.planner.search.setup import SearchContext
from autoplan.planner.search.trial_cost import TrialCost
from autoplan.planner.store.optuna_study import SearchStudy
from autoplan.planner.store.store import Store
from autoplan.planner.trials.drop import ToBeat
from autoplan.planner.trials.first_loss import with_first_loss_compared
from autoplan.planner.trials.measure import Spread
from autoplan.planner.trials.runner import TrialOrder, TrialRunner, make_attempt
from autoplan.processes import ProcessReport, Progress, Zygote
from autoplan.strategies.config import PLAIN, TrainingConfig

if TYPE_CHECKING:
    import optuna

OVERRUN = 0.05
"""A running trial is ended when it is this share of the budget past the budget; the whole search stays within 10 %."""

FINALIST_SHARE = 0.3
"""At most this share of the time for trials is kept for the finalists and the claim (`Session.trials_s`)."""

CLAIM_ROUNDS = 2
"""Rounds of the plan against the baseline and the hand setting that time is kept for."""


REMEASURE = 1.0
"""Measuring disturbed stretches again may take as long as measuring does without any."""

LASTING_LOAD_TRIALS = 2
"""After so many disturbed trials in a row the load is lasting: time for measuring again would be lost."""


class BudgetOver(Exception):
    """There is no time left for the next stage, which the text names; `needed_s` is a budget that should do."""

    def __init__(self, stage: str, *, needed_s: float | None = None) -> None:
        super().__init__(stage)
        self.needed_s = needed_s


@dataclass(kw_only=True)
class Session:
    """The state of one run of a search.

    Attributes:
        options, observer, store, zygote, context: As given to the search.
        budget_s: Seconds over all runs.
        model: What is known of the candidates.
        sampler: Says which candidate is next, and when no further trial is worth making.
        study: Optuna's study.
        runner: Runs trials.
        notes: Sentences for the plan.
        did_not_run: What something outside ended each time, in sentences; a later run of the search tries it again.
        lost_in_a_row: How many trials, one after another, did not run.
        hand_left_out: The time was too short to measure the hand setting beside the plan.
        chosen_in_rounds: Of how many configurations the rounds of the claim chose the plan; 1: they had no part in it.
        taken_over: What earlier searches on this device taught.
        loading_s: Seconds of the search's budget that are kept for the loader; `budget_s` is without them.
        ended_by: Why no further trial was made: "time", "max_trials", or "nothing_left" that could still win.
    """

    options: SearchOptions
    observer: SearchObserver
    store: Store
    zygote: Zygote
    context: SearchContext
    budget_s: float
    model: CandidateModel
    sampler: CandidateSampler
    study: SearchStudy
    runner: TrialRunner
    notes: list[str] = field(default_factory=list)
    did_not_run: list[str] = field(default_factory=list)
    lost_in_a_row: int = 0
    ended_by: Literal["time", "max_trials", "nothing_left"] = "nothing_left"
    hand_left_out: bool = False
    chosen_in_rounds: int = 1
    loading_s: float = 0.0
    taken_over: TakenOver = NOTHING

    @property
    def objective(self) -> Objective:
        """What is looked for."""
        return self.options.wanted

    @property
    def run_spread(self) -> Spread:
        """Between runs of one configuration on this device, by what is known now."""
        return measured_spread(self.store.trials, self.taken_over.assumed_spread)

    # The clock.

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_s - self.store.spent_s

    @property
    def parity_reserve_s(self) -> float:
        """Seconds kept for the parity check of the best configuration so far; before there is one, of the plain run."""
        best = self.best or self.baseline
        return self.parity_reserve_of(PLAIN if best is None else best.config)

    def parity_reserve_of(self, config: TrainingConfig) -> float:
        """Seconds that are kept if this configuration is to be checked: what its compilation takes counts."""
        return parity_time.reserve_s(self.trial_cost, self.parity_cost, config, self.budget_s)

    @property
    def parity_cost(self) -> ModelCost:
        """What the parts of a parity check cost on this model: predicted, then as the baseline measured them."""
        profile, spec, base = self.context.estimator.profile, self.context.spec, self.baseline
        training = self.context.facts.training
        if base is not None and base.step_time_s is not None:
            step_s, optimizer_s = base.step_time_s.median, base.parts_s.get("optimizer_step", 0.0)
        else:
            step_s, optimizer_s = self.predict(PLAIN).step_time_s, 0.0
        return ModelCost(
            sequence_length=spec.sequence_length,
            parameters=profile.trainable,
            sample_s=step_s / spec.global_batch,
            optimizer_s=optimizer_s,
            has_dropout=training is None or bool(training.dropout),
            fixed_micro_batch=len(self.context.space.values["micro_batch"]) == 1,
        )

    @property
    def trial_cost(self) -> TrialCost:
        """What trials cost."""
        cost = self.model.trial_cost
        assert cost is not None, "a search always knows what trials cost"
        return cost

    @property
    def trials_s(self) -> float:
        """Seconds of the budget for trials of all purposes: without probes, inspection, trace and parity check."""
        setup_s = self.store.spent_s - sum(trial.seconds_spent for trial in self.store.trials)
        setup_s -= sum(group.seconds for group in self.store.compiled_ahead)
        return max(0.0, self.budget_s - setup_s - self.parity_reserve_s)

    @property
    def finalist_reserve_s(self) -> float:
        """Seconds kept for the rounds after the trials: those of the claim, and one more run of the best."""
        best = best_trial(self.store.trials)
        wanted = math.inf if best is None else self.claim_reserve_s + self.trial_cost.repeat_s(best)
        return min(FINALIST_SHARE * self.trials_s, wanted)

    @property
    def claim_reserve_s(self) -> float:
        """Seconds kept for the rounds of the claim, at most a share of the time for trials."""
        compared = {t.config: t for t in (best_trial(self.store.trials), self.baseline, self.hand) if t is not None}
        wanted = CLAIM_ROUNDS * sum(map(self.trial_cost.repeat_s, compared.values()))
        return min(0.8 * FINALIST_SHARE * self.trials_s, wanted)

    @property
    def search_left_s(self) -> float:
        """Seconds left for the trials of the search, without those kept for the finalists and the parity check."""
        return self.left_s - self.parity_reserve_s - self.finalist_reserve_s

    def budget(self) -> BudgetState:
        """How much of the budget is used, for the observer."""
        return BudgetState(
            budget_s=self.budget_s,
            spent_s=self.store.spent_s,
            reserved_s=self.parity_reserve_s + self.finalist_reserve_s,
            trials_done=self.trials_done,
            max_trials=self.options.max_trials,
        )

    # The trials.

    @property
    def trials_done(self) -> int:
        """Trials that count towards --max-trials: all except those that measure a configuration again."""
        return sum(not trial.is_repeat for trial in self.store.trials)

    @property
    def baseline(self) -> Trial | None:
        """The plain run, if it was measured."""
        for trial in self.store.trials:
            if trial.purpose == "baseline" and trial.outcome is Outcome.OK:
                return trial
        return None

    @property
    def hand(self) -> Trial | None:
        """The fastest of the hand settings that ran; the plain run is one on CPU."""
        kinds = ("reference",) if self.context.device == "cuda" else ("reference", "baseline")
        good = [t for t in self.store.trials if t.purpose in kinds and t.outcome is Outcome.OK and t.step_time_s]
        return min(good, key=lambda trial: trial.step_time_s.median, default=None)  # type: ignore[union-attr]

    @property
    def best(self) -> Trial | None:
        """The fastest good trial so far that keeps what the user fixed; the plain baseline may not."""
        return best_trial_for(self.objective, [t for t in self.store.trials if self.options.allows(t.config)])

    def predict(self, config: TrainingConfig) -> Prediction:
        """The cost model's prediction, as it is calibrated now."""
        return self.context.estimator.estimate([config])[0]

    def measure(
        self,
        purpose: Purpose,
        config: TrainingConfig,
        *,
        deadline_s: float,
        deadline_of_budget: bool = False,
        to_beat: ToBeat | None = None,
        method: Literal["whole_steps", "parts"] | None = None,
        round: int | None = None,
        asked: optuna.trial.Trial | None = None,
    ) -> Trial:
        """Runs one trial and writes it to disk before anything else happens.

        `asked` is the study's own trial, where the study chose the configuration. A Ctrl-C passes through; the trial
        that it ended is closed in the study and not kept in the record.
        """
        number = self.store.next_number
        prediction = self.predict(config)
        self.observer.on_trial_started(number, purpose, config, prediction, self.budget())
        order = TrialOrder(
            number=number,
            purpose=purpose,
            config=config,
            prediction=prediction,
            deadline_s=max(deadline_s, 5.0),
            deadline_of_budget=deadline_of_budget,
            to_beat=to_beat,
            method=method,
            round=round,
            remeasure=self.remeasure,
        )
        if asked is None and purpose not in REPEATS:
            asked = self.study.ask(number, config)
        try:
            trial = self.runner.run(
                order,
                on_progress=self.on_progress,
                on_attempt=lambda report: self.add_attempt(purpose, report, number=number, config=config),
                left_s=lambda: self.hard_deadline_s(0.0),
            )
        except BaseException:
            if asked is not None:
                self.study.drop(asked)
            raise
        if trial.did_not_run:
            return self._set_aside(trial, asked)
        trial = with_first_loss_compared(trial, self.baseline)
        self.lost_in_a_row = 0
        self.store.add_trial(trial)
        if asked is not None:
            self.model.observe(trial)
            self.study.tell(asked, trial)
        self.store.tick(force=True)
        self.observer.on_trial_finished(trial, self.best, self.budget())
        return trial

    @property
    def remeasure(self) -> float:
        """How many times what measuring takes may go into measuring disturbed stretches again."""
        return remeasure_boxes(self.store.trials)

    def add_attempt(
        self, part: str, report: ProcessReport, *, number: int | None = None, config: TrainingConfig | None = None
    ) -> None:
        """Keeps a run that something outside ended: in the record, and as a line on the screen."""
        attempt = make_attempt(part, report, number=number, config=config)
        self.store.add_attempt(attempt)
        self.observer.on_note(f"something outside ended {attempt.describe()}")

    def _set_aside(self, trial: Trial, asked: optuna.trial.Trial | None) -> Trial:
        """A configuration that did not run: neither the record nor the sampler has a verdict on it.

        It is not tried again in this run of the search, but in the next one.
        """
        if asked is not None:
            self.study.drop(asked)
        self.model.set_aside(trial.config)
        self.did_not_run.append(f"{trial.purpose} trial of {trial.config.describe()}: {trial.reason}")
        self.lost_in_a_row += 1
        self.store.tick(force=True)
        self.observer.on_trial_finished(trial, self.best, self.budget())
        return trial

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

    def hard_deadline_s(self, reserve_s: float) -> float:
        """Seconds after which a trial that starts now is ended, so that the budget is kept with the reserve."""
        return self.left_s - reserve_s + OVERRUN * self.budget_s

    def trial_deadlines(self) -> Callable[[TrainingConfig], float]:
        """Gives the seconds after which a trial of the search that starts now is ended, by its configuration.

        What it leaves is for the rounds, and for the parity check of this configuration or of the best so far.
        """
        trials, cost, budget_s = self.trial_cost, self.parity_cost, self.budget_s
        left_s, best_s = self.hard_deadline_s(0.5 * self.finalist_reserve_s), self.parity_reserve_s
        return lambda config: left_s - max(best_s, parity_time.reserve_s(trials, cost, config, budget_s))


def remeasure_boxes(trials: Sequence[Trial]) -> float:
    """How often what measuring takes may go into disturbed stretches; none where the load has stayed for a while."""
    last = [trial for trial in trials if trial.window is not None][-LASTING_LOAD_TRIALS:]
    return 0.0 if len(last) == LASTING_LOAD_TRIALS and all(trial.disturbed for trial in last) else REMEASURE
