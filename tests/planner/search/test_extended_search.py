"""A search that goes on with a larger budget: what its earlier runs measured is beside what it measures now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.planner.records import Interval, Outcome, Trial
from autoplan.planner.search import stages
from autoplan.planner.search.objective import THROUGHPUT
from autoplan.planner.search.options import SearchObserver
from autoplan.planner.search.rounds import run_claim, run_finalists
from autoplan.planner.search.selection import collect_runs, match_rounds, rank
from autoplan.planner.search.session import BudgetOver
from autoplan.planner.trials.measure import ASSUMED
from autoplan.strategies.config import TrainingConfig

BASE, FIRST, SECOND, LATER = (TrainingConfig(micro_batch=size) for size in (1, 2, 4, 8))


def a_trial(number: int, purpose: str, config: TrainingConfig, time_s: float, **facts: Any) -> Trial:
    step = Interval(median=time_s, low=0.99 * time_s, high=1.01 * time_s, samples=9)
    base: dict[str, Any] = {"phase": "done", "seconds_spent": 1.0, "method": "whole_steps", "outcome": Outcome.OK}
    return Trial(number=number, purpose=purpose, config=config, **({"step_time_s": step} | base | facts))


class Recorded:
    """What the rounds need of a session; each configuration always takes the same time."""

    def __init__(self, times_s: dict[TrainingConfig, float], *runs: tuple[str, TrainingConfig, int | None]) -> None:
        self.times_s = times_s
        self.store = SimpleNamespace(trials=(), spent_s=0.0)
        self.options = SimpleNamespace(seed=0, allows=lambda config: config != BASE)
        self.observer, self.objective, self.run_spread = SearchObserver(), THROUGHPUT, ASSUMED
        self.taken_over = SimpleNamespace(assumed_spread=0.01)
        self.parity_reserve_s = self.claim_reserve_s = 0.0
        self.left_s = 1000.0
        self.trial_cost = SimpleNamespace(repeat_s=lambda trial: trial.seconds_spent)
        self.hand, self.hand_left_out = None, False
        self.notes: list[str] = []
        for purpose, config, number in runs:
            self.measure(purpose, config, round=number)
        self.before = len(self.store.trials)

    @property
    def baseline(self) -> Trial | None:
        return next((trial for trial in self.store.trials if trial.purpose == "baseline"), None)

    @property
    def made_now(self) -> list[tuple[str, TrainingConfig, int | None]]:
        return [(trial.purpose, trial.config, trial.round) for trial in self.store.trials[self.before :]]

    def note(self, text: str) -> None:
        self.notes.append(text)

    def hard_deadline_s(self, reserve_s: float) -> float:
        return 100.0

    def measure(self, purpose: str, config: TrainingConfig, **facts: Any) -> Trial:
        trial = a_trial(len(self.store.trials), purpose, config, self.times_s[config], round=facts.get("round"))
        self.store.trials = (*self.store.trials, trial)
        return trial


OLD_FINALISTS = (
    *(("search", config, None) for config in (FIRST, SECOND)),
    *(("finalist", config, number) for number in (0, 1) for config in (FIRST, SECOND)),
)


def test_a_later_trial_that_leads_clearly_comes_before_the_old_finalists():
    session: Any = Recorded({FIRST: 1.0, SECOND: 1.01, LATER: 0.8}, *OLD_FINALISTS, ("search", LATER, None))
    run_finalists(session)
    assert session.made_now == [], "nothing is near to it"
    assert [runs.config for runs in rank(collect_runs(session.store.trials))] == [LATER, FIRST, SECOND]


def test_a_single_trial_that_the_finalists_are_near_to_stays_behind_them():
    session: Any = Recorded({FIRST: 1.0, SECOND: 1.01, LATER: 0.98}, *OLD_FINALISTS, ("search", LATER, None))
    assert [runs.config for runs in rank(collect_runs(session.store.trials))] == [FIRST, SECOND, LATER]


def test_old_finalists_run_again_beside_a_later_one():
    session: Any = Recorded({FIRST: 1.0, SECOND: 1.01, LATER: 0.98}, *OLD_FINALISTS, ("search", LATER, None))
    run_finalists(session)
    first_round = [run for run in session.made_now if run[2] == 2]
    assert {run[:2] for run in first_round} == {("finalist", config) for config in (FIRST, SECOND, LATER)}
    by_config = {runs.config: runs for runs in collect_runs(session.store.trials)}
    old, new = match_rounds(by_config[FIRST], by_config[LATER])
    assert [run.round for run in old.finalist_runs] == [run.round for run in new.finalist_runs]
    assert 0 not in {run.round for run in old.finalist_runs}


def test_a_new_winner_is_claimed_beside_the_baseline_and_not_beside_its_old_runs():
    session: Any = Recorded(
        {BASE: 2.0, FIRST: 1.0, LATER: 0.8},
        ("baseline", BASE, None),
        ("search", FIRST, None),
        *(("claim", config, number) for number in (0, 1, 2) for config in (BASE, FIRST)),
        ("search", LATER, None),
    )
    assert run_claim(session, LATER)
    rounds = {run[2] for run in session.made_now}
    assert rounds and min(rounds) > 2
    assert all({c for _, c, number in session.made_now if number == one} == {BASE, LATER} for one in rounds)


def test_a_round_that_was_cut_short_is_made_again_as_a_whole():
    session: Any = Recorded(
        {BASE: 2.0, FIRST: 1.0}, ("baseline", BASE, None), ("search", FIRST, None), ("claim", BASE, 0)
    )
    assert run_claim(session, FIRST)
    assert 0 not in {run[2] for run in session.made_now}
    runs = {one.config: one for one in collect_runs(session.store.trials)}
    assert len(runs[BASE].claim_runs) == 1 + len(runs[FIRST].claim_runs)


# What the budget ended is no verdict.


class WithBaseline:
    """What the stage of the baseline needs of a session; a run ends by the budget where it has less than 60 s."""

    def __init__(self, left_s: float, trials: tuple[Trial, ...] = ()) -> None:
        self.store = SimpleNamespace(trials=trials, spent_s=10.0)
        self.left_s, self.notes = left_s, []
        self.observer = SearchObserver()
        self.model = SimpleNamespace(cost_s=lambda config: 60.0)
        self.flags: list[bool] = []

    @property
    def baseline(self) -> Trial | None:
        return next((t for t in self.store.trials if t.purpose == "baseline" and t.outcome is Outcome.OK), None)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def hard_deadline_s(self, reserve_s: float) -> float:
        return self.left_s - reserve_s

    def measure(self, purpose: str, config: TrainingConfig, *, deadline_s: float, deadline_of_budget: bool) -> Trial:
        self.flags.append(deadline_of_budget)
        late = {"outcome": Outcome.TIMEOUT, "step_time_s": None, "reason": "late", "budget_ended": True}
        facts = {"seconds_spent": deadline_s} | (late if deadline_s < 60 else {})
        trial = a_trial(len(self.store.trials), purpose, config, 1.0, **facts)
        self.store.trials = (*self.store.trials, trial)
        self.left_s -= deadline_s if deadline_s < 60 else 60.0
        return trial


def test_a_baseline_that_the_budget_ended_runs_again_with_a_larger_one(monkeypatch):
    monkeypatch.setattr(stages, "plain_configs", lambda session: [BASE])
    monkeypatch.setattr(stages, "needed_offload", lambda session: "none")
    short: Any = WithBaseline(left_s=50.0)
    with pytest.raises(BudgetOver, match="the baseline") as over:
        stages.run_baseline(short)
    assert short.flags == [True] and over.value.needed_s == pytest.approx(140.0)
    same: Any = WithBaseline(left_s=15.0, trials=short.store.trials)
    with pytest.raises(BudgetOver):
        stages.run_baseline(same)
    assert same.flags == [], "with less time than before it would end in the same way"
    longer: Any = WithBaseline(left_s=600.0, trials=short.store.trials)
    found = stages.run_baseline(longer)
    assert found is not None and found.outcome is Outcome.OK
