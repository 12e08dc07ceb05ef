"""A search that goes on: after it was killed between any two pieces, with a larger budget, from an older store."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Interval, Outcome, PeakMemory, Trial
from autoplan.planner.search import run as search_run
from autoplan.planner.search import work as search_work
from autoplan.planner.search.next_work import Work
from autoplan.planner.search.options import SearchObserver
from autoplan.planner.search.selection import collect_runs, match_rounds, rank
from autoplan.planner.search.session import BudgetOver, Session
from autoplan.planner.trials.runner import TrialOrder
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loading.settings import LoaderSpec
from tests.planner.search.stand_in import PLAIN, Killed, Searched, Searches, World, searches

__all__ = ["searches"]

BASE, FIRST, SECOND, LATER = (TrainingConfig(micro_batch=size) for size in (1, 2, 4, 8))
BEST = TrainingConfig(micro_batch=16, precision="bf16", optimizer_step="fused")
FEW = (PLAIN, BEST, TrainingConfig(micro_batch=8, precision="bf16"), TrainingConfig(micro_batch=4))


def a_trial(number: int, purpose: str, config: TrainingConfig, time_s: float, **facts: Any) -> Trial:
    step = Interval(median=time_s, low=0.99 * time_s, high=1.01 * time_s, samples=9)
    base: dict[str, Any] = {"phase": "done", "seconds_spent": 1.0, "method": "whole_steps", "outcome": Outcome.OK}
    base["peak_memory"] = PeakMemory(resident_bytes=1 << 30, limit_bytes=8 << 30)
    return Trial(number=number, purpose=purpose, config=config, **({"step_time_s": step} | base | facts))


def lines(searched: Searched) -> list[tuple[str, TrainingConfig | None]]:
    return [(line.kind, line.config) for line in searched.result.ledger]


# Killed.


def test_killed_between_any_two_pieces_a_search_goes_on_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The ledger goes on, a claim that was begun goes on with its rounds, and the plan is the same kind of plan."""
    whole = Searches(tmp_path / "whole", monkeypatch).search(World(candidates=FEW))
    assert whole.result.status == "plan_found"
    pieces = len(whole.observer.works)
    assert pieces >= 6 and whole.observer.kinds[-2:] == ["claim", "claim"]
    for place in range(1, pieces):
        searches = Searches(tmp_path / str(place), monkeypatch)
        before = World(candidates=FEW)
        with pytest.raises(Killed):
            searches.search(before, die_before=place)
        record = (searches.folder / "record.jsonl").read_text()
        after = World(candidates=FEW, seed=1)
        found = searches.search(after)
        assert found.result.status == "plan_found" and found.result.plan is not None
        assert (searches.folder / "record.jsonl").read_text().startswith(record), "what was on disk stays"
        assert found.observer.notes[0].startswith(f"resumed: {len(before.made)} finished trial(s)")
        configs = [trial.config for trial in found.result.trials if not trial.is_repeat]
        assert len(configs) == len(set(configs)), "a finished look was repeated"
        assert not set(before.checked) & set(after.checked), "a finished check was repeated"
        assert [trial.number for trial in found.result.trials] == list(range(len(before.made) + len(after.made)))
        assert [line.kind for line in found.result.ledger][:place] == whole.observer.kinds[:place]
        assert len(found.result.ledger) == place + len(found.observer.works)
        (claim,) = found.session.store.claims
        made = [trial for trial in found.result.trials if trial.purpose == "claim" and trial.config == claim.config]
        assert len(made) == claim.rounds == found.result.plan.claim.rounds, f"killed before piece {place}"


def test_a_round_that_was_cut_short_is_made_again_as_a_whole(searches: Searches):
    """Its runs would not be side by side."""

    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        if sum(one.purpose == "claim" for one in world.orders) == 2:  # the second run of the first round
            raise Killed
        return None

    world = World(candidates=FEW, fate=fate)
    with pytest.raises(Killed):
        searches.search(world)
    after = World(candidates=FEW, seed=1)
    found = searches.search(after)
    assert found.result.plan is not None
    rounds = [round for purpose, _, round in after.made if purpose == "claim"]
    (claim,) = found.session.store.claims
    assert 0 not in rounds and len(rounds) == 2 * claim.rounds
    assert found.result.plan.claim.rounds == claim.rounds and set(found.result.plan.claim.trials) <= {
        trial.number for trial in found.result.trials if trial.round in rounds
    }


def test_a_hand_setting_that_was_interrupted_is_looked_at_by_the_next_call(searches: Searches):
    """Its line is in the ledger, and no run of it in the record."""

    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        if order.purpose == "reference":
            raise KeyboardInterrupt
        return None

    slow_hand = TrainingConfig(micro_batch=8, precision="bf16")
    world = World(candidates=[*FEW, TrainingConfig(micro_batch=2, precision="bf16", optimizer_step="fused")], fate=fate)
    ended = searches.search(world).result
    assert (ended.status, ended.exit_code) == ("interrupted", 130)
    assert Plan.load(ended.unverified_path or "").unverified is not None, "the best so far is kept"
    after = World(candidates=world.candidates, seed=1)
    found = searches.search(after)
    assert ("reference", slow_hand, None) in after.made
    assert found.result.plan is not None and found.result.plan.hand is not None
    assert found.result.plan.hand.config == slow_hand
    assert lines(found).count(("hand setting", slow_hand)) == 2


# A larger budget, and others.


def test_a_larger_budget_goes_on_and_makes_a_second_claim(searches: Searches):
    """With rounds of its own, and a third of the level."""
    first = searches.search(World(candidates=FEW), budget=100.0)
    same = World(candidates=FEW)
    assert searches.search(same, budget=100.0).result.from_record and same.made == []
    after = World(candidates=FEW, seed=1)
    more = searches.search(after, budget=150.0)
    assert not more.result.from_record and more.result.plan is not None and first.result.plan is not None
    one, two = more.session.store.claims
    assert (one.number, two.number, one.budget_s, two.budget_s) == (1, 2, 100.0, 150.0)
    assert two.first_round > max(t.round or 0 for t in first.result.trials if t.purpose == "claim")
    claim = more.result.plan.claim
    assert claim.chosen_from == 3 and not set(claim.trials) & set(first.result.plan.claim.trials)
    assert more.result.resumed_trials == len(first.result.trials)
    assert lines(more)[: len(lines(first))] == lines(first)


def test_a_second_claim_that_shows_no_gain_leaves_the_plan_of_the_first(searches: Searches):
    first = searches.search(World(candidates=FEW), budget=100.0).result.plan
    assert first is not None and first.claim.claimed
    lucky = TrainingConfig(micro_batch=4, precision="bf16", optimizer_step="foreach")

    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        return {"slower": 8.0 if order.purpose == "claim" else 0.2} if order.config == lucky else None

    more = searches.search(World(candidates=[*FEW, lucky], fate=fate, seed=1), budget=200.0)
    assert [claim.config for claim in more.session.store.claims] == [first.config, lucky]
    plan = more.result.plan
    assert plan is not None and plan.config == first.config and plan.claim == first.claim
    assert any("whose gain an earlier claim shows" in note for note in plan.notes)


@pytest.mark.parametrize("budget", [100.0, 60.0])
def test_no_larger_budget_is_no_second_claim(searches: Searches, budget: float):
    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        if sum(one.purpose == "claim" for one in world.orders) == 3:  # the first run of the second round
            raise Killed
        return None

    world = World(candidates=FEW, fate=fate)
    with pytest.raises(Killed):
        searches.search(world, budget=100.0)
    after = World(candidates=FEW, seed=1)
    found = searches.search(after, budget=budget)
    assert [claim.number for claim in found.session.store.claims] == [1]
    assert found.result.plan is not None and found.result.plan.claim.chosen_from == 1


def test_a_loader_that_is_given_later_is_no_reason_for_another_claim(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
):
    """Some of the budget is kept for it: what is left is another time, and no other budget."""
    first = searches.search(World(candidates=FEW), budget=100.0)
    monkeypatch.setattr(search_run, "measure_loading", lambda session, leader: None)
    after = World(candidates=FEW, seed=1)
    loader = LoaderSpec(kind="function", reference="train.py:rows", identity="rows")
    again = searches.search(after, budget=100.0, loader=loader)
    assert again.session.budget_s < 100.0 == again.session.whole_budget_s
    assert after.made == [] and again.result.plan is not None and first.result.plan is not None
    assert again.result.plan.claim == first.result.plan.claim


# Runs of the choice, earlier and later.

OLD_PAIRS = (
    *(("search", config, None) for config in (FIRST, SECOND)),
    *(("finalist", config, number) for number in (0, 1) for config in (FIRST, SECOND)),
)


def made(times_s: dict[TrainingConfig, float], *runs: tuple[str, TrainingConfig, int | None]) -> list[Trial]:
    return [
        a_trial(i, purpose, config, times_s[config], round=round) for i, (purpose, config, round) in enumerate(runs)
    ]


def test_a_later_look_that_leads_clearly_comes_before_those_that_ran_side_by_side():
    trials = made({FIRST: 1.0, SECOND: 1.01, LATER: 0.7}, *OLD_PAIRS, ("search", LATER, None))
    assert [runs.config for runs in rank(collect_runs(trials))] == [LATER, FIRST, SECOND]


def test_a_single_look_that_is_near_stays_behind_those_that_ran_side_by_side():
    """A leader needs one won pair."""
    trials = made({FIRST: 1.0, SECOND: 1.01, LATER: 0.98}, *OLD_PAIRS, ("search", LATER, None))
    assert [runs.config for runs in rank(collect_runs(trials))] == [FIRST, SECOND, LATER]
    pair = [("finalist", FIRST, 2), ("finalist", LATER, 2)]
    trials = made({FIRST: 1.0, SECOND: 1.01, LATER: 0.9}, *OLD_PAIRS, ("search", LATER, None), *pair)
    runs = {one.config: one for one in collect_runs(trials)}
    old, new = match_rounds(runs[FIRST], runs[LATER])
    assert [run.round for run in old.finalist_runs] == [run.round for run in new.finalist_runs] == [2]
    assert rank(list(runs.values()))[0].config == LATER, "it has won its pair"


# What the budget ended is no verdict.


class WithBaseline:
    """What the plain run needs of a session; a run ends by the budget where it has less than 60 s."""

    own_config = None
    baseline_trials = Session.baseline_trials

    def run_words(self, config: TrainingConfig) -> str:
        return "the plain run"

    def is_given(self, config: TrainingConfig) -> bool:
        return True

    def __init__(self, left_s: float, trials: tuple[Trial, ...] = ()) -> None:
        self.store = SimpleNamespace(trials=trials, spent_s=10.0)
        self.left_s, self.notes = left_s, []
        self.observer = SearchObserver()
        self.model = SimpleNamespace(cost_s=lambda config: 60.0)
        self.flags: list[bool] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def predict(self, config: TrainingConfig) -> None:
        """Nothing disturbs a run here: what was expected is not asked for."""

    def hard_deadline_s(self, needs_s: float) -> float:
        return self.left_s - needs_s

    def measure(self, purpose: str, config: TrainingConfig, *, deadline_s: float, deadline_of_budget: bool) -> Trial:
        self.flags.append(deadline_of_budget)
        late = {"outcome": Outcome.TIMEOUT, "step_time_s": None, "reason": "late", "budget_ended": True}
        facts = {"seconds_spent": deadline_s} | (late if deadline_s < 60 else {})
        trial = a_trial(len(self.store.trials), purpose, config, 1.0, **facts)
        self.store.trials = (*self.store.trials, trial)
        self.left_s -= deadline_s if deadline_s < 60 else 60.0
        return trial


def test_a_baseline_that_the_budget_ended_runs_again_with_a_larger_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search_work, "plain_configs", lambda session: [BASE])
    piece = Work(kind="baseline", config=BASE)
    short: Any = WithBaseline(left_s=50.0)
    with pytest.raises(BudgetOver, match="the baseline") as over:
        search_work.run_baseline(short, piece)
    assert short.flags == [True] and over.value.needed_s == pytest.approx(140.0)
    same: Any = WithBaseline(left_s=15.0, trials=short.store.trials)
    with pytest.raises(BudgetOver):
        search_work.run_baseline(same, piece)
    assert same.flags == [], "with less time than before it would end in the same way"
    longer: Any = WithBaseline(left_s=600.0, trials=short.store.trials)
    search_work.run_baseline(longer, piece)
    assert longer.store.trials[-1].outcome is Outcome.OK


def test_no_other_baseline_is_run_after_one_that_the_budget_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search_work, "plain_configs", lambda session: [SECOND, FIRST, BASE])
    short: Any = WithBaseline(left_s=50.0)
    with pytest.raises(BudgetOver, match="the baseline"):
        search_work.run_baseline(short, Work(kind="baseline", config=SECOND))
    assert [trial.config for trial in short.store.trials] == [SECOND]
