"""Looks on several parts of a machine at once: what overlaps, what runs alone, the same load, kills, the budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import UsageError
from autoplan.planner.records.trials import Outcome, Trial, WorkLine
from autoplan.planner.search import run as search_run
from autoplan.planner.search.next_work import BESIDE, State, Work, next_work
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.selection import CandidateRuns, is_behind, measured_spread
from autoplan.planner.search.side_by_side import SideBySide
from autoplan.planner.search.work import keep_ended
from autoplan.planner.trials.measure import Spread
from autoplan.planner.trials.parts import EndedRun
from autoplan.planner.trials.runner import TrialOrder
from autoplan.report.pieces import time_words
from autoplan.strategies.config import TrainingConfig
from tests.planner.search.stand_in import (
    CANDIDATES,
    ClockedStore,
    Killed,
    Observer,
    Searched,
    Searches,
    World,
    searches,
    usual_s,
)
from tests.recorded import make_plan, make_trial

__all__ = ["searches"]

BEST = TrainingConfig(micro_batch=16, precision="bf16", optimizer_step="fused")
LOAD = 1.3
"""A step takes so many times as long while the other part is busy."""


class VirtualParts:
    """Parts whose runs are drawn, as the runs of a world are; the clock is the store's, and goes to the next end."""

    def __init__(self, world: World, store: ClockedStore, count: int) -> None:
        self.world, self.store, self.count = world, store, count
        self.running: dict[int, tuple[float, EndedRun]] = {}
        self.filled: dict[int, TrainingConfig] = {}

    def __len__(self) -> int:
        return self.count

    @property
    def free(self) -> list[int]:
        return [part for part in range(self.count) if part not in self.running]

    def begin(self, part: int, order: TrialOrder, left_s: Callable[[], float]) -> None:
        self.filled.pop(part, None)
        trial = self.world.run(order)
        self.running[part] = (self.store.spent_s + trial.seconds_spent, EndedRun(part=part, order=order, trial=trial))

    def fill(self, config: TrainingConfig) -> None:
        self.filled |= dict.fromkeys(self.free, config)

    def empty(self) -> None:
        self.filled.clear()

    def sit(self, part: int) -> None:
        assert part not in self.running, "a decision is a load to no look"

    def wait(self, **hooks: Any) -> EndedRun:
        part = min(self.running, key=lambda part: self.running[part][0])
        assert len(self.running) + len(self.filled) == self.count, "each part is busy while a look runs"
        end_s, ended = self.running.pop(part)
        self.store.moved_s += max(0.0, end_s - self.store.spent_s)
        return ended

    def close(self) -> list[EndedRun]:
        now_s = self.store.spent_s
        return [ended for end_s, ended in self.running.values() if end_s <= now_s]


def slowed(order: TrialOrder, before: int) -> dict[str, Any]:
    """The load of the other part: on all that runs beside it."""
    return {} if order.purpose in ("finalist", "claim") else {"slower": LOAD}


def side_by_side(
    searches: Searches, world: World, *, count: int = 2, observer: Observer | None = None, **options: Any
) -> Searched:
    """A search whose looks run on parts of a machine."""
    observer = observer or Observer()
    run = searches.open(world, observer=observer, side_by_side=count, **options)
    session, store = run.session, run.store
    assert session is not None and isinstance(store, ClockedStore)
    parts: Any = VirtualParts(world, store, count)
    side = SideBySide(
        parts=parts,
        on_gpus=False,
        on_progress=session.on_progress,
        on_attempt=lambda order, report: None,
        left_s=lambda: session.hard_deadline_s(0.0),
    )

    def find() -> Any:
        session.side = side
        try:
            return search_run._find(run, session)
        except Killed:
            session.side = None  # nothing of it runs any more
            raise
        finally:
            if session.side is not None:
                keep_ended(session, side)

    with store:
        result = search_run._to_its_end(run, find)
    return Searched(result=result, session=session, observer=observer)


def overlaps(lines: Sequence[WorkLine]) -> Iterator[tuple[WorkLine, WorkLine]]:
    """The pairs of pieces that ran at the same time."""
    for one, two in itertools.combinations(lines, 2):
        if min(one.began_s + one.seconds, two.began_s + two.seconds) - max(one.began_s, two.began_s) > 1e-6:
            yield one, two


def looks(searched: Searched) -> int:
    return sum(trial.purpose == "search" for trial in searched.result.trials)


# What overlaps.


def test_looks_overlap_all_else_runs_alone_and_the_ledger_says_so(searches: Searches):
    found = side_by_side(searches, World())
    plan, ledger = found.result.plan, found.result.ledger
    assert plan is not None and plan.config == BEST and plan.claim is not None and plan.claim.claimed
    pairs = list(overlaps(ledger))
    assert pairs
    for one, two in pairs:
        assert {one.kind, two.kind} <= set(BESIDE) and one.part != two.part
    alone = [line for line in ledger if line.kind not in BESIDE]
    assert alone and all(line.part is None for line in alone)
    assert {line.kind for line in alone} >= {"baseline", "parity", "claim"}
    numbers = [trial.number for trial in found.result.trials]
    assert len(set(numbers)) == len(numbers)
    words = time_words(ledger)
    assert words is not None
    end_s = max(line.began_s + line.seconds for line in ledger)
    said = sum(float(part.split()[-2]) for part in words.split(", "))
    assert said <= end_s + 0.5 * len(words.split(", ")), "shared time counts once"
    assert sum(line.seconds for line in ledger) > end_s, "the pieces overlap"


def test_more_looks_are_made_in_the_same_time(searches: Searches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Looks of one length, and nothing to stop them early: two parts have nearly always two of them."""

    def even(config: TrainingConfig) -> float:
        return 0.5 + 1e-4 * CANDIDATES.index(config) if config in CANDIDATES else 0.5

    def world() -> World:
        return World(seconds=even, predicted=lambda config: 0.5, width=3.0, sd=1e-4)

    other = Searches(tmp_path / "alone", monkeypatch)
    together, single = side_by_side(searches, world(), budget=60.0), other.search(world(), budget=60.0)
    assert looks(together) > looks(single)
    lines = [line for line in together.result.ledger if line.kind == "look"]
    shared_s = sum(
        min(one.began_s + one.seconds, two.began_s + two.seconds) - max(one.began_s, two.began_s)
        for one, two in overlaps(lines)
    )
    all_s = sum(line.seconds for line in lines)
    assert all_s / (all_s - shared_s) > 1.7


def test_no_more_looks_than_asked_for(searches: Searches):
    found = side_by_side(searches, World(), max_trials=6)
    assert sum(not trial.is_repeat for trial in found.result.trials) == 6


@pytest.mark.parametrize("budget_s", [20.0, 35.0, 60.0])
def test_the_budget_holds(searches: Searches, budget_s: float):
    found = side_by_side(searches, World(fate=slowed), budget=budget_s)
    assert found.result.spent_s <= 1.1 * budget_s
    assert found.result.status in ("plan_found", "budget_ended")
    if budget_s >= 60.0:
        assert found.result.status == "plan_found"


# The same load.


def test_what_is_compared_had_the_same_load_and_the_claim_had_none(searches: Searches):
    world = World(fate=slowed)
    found = side_by_side(searches, world)
    for trial in found.result.trials:
        assert trial.beside == (0 if trial.is_repeat else 1), trial.purpose
    plan = found.result.plan
    assert plan is not None and plan.config == BEST
    gain = usual_s(found.session.plain_config) / usual_s(BEST)  # type: ignore[arg-type]
    assert plan.speedup.median == pytest.approx(gain, rel=0.03), "that of runs that were alone"
    assert plan.measurement.step_time_s.median == pytest.approx(usual_s(BEST), rel=0.03)
    for other in plan.alternatives:
        ratio = usual_s(BEST) / usual_s(other.config)
        assert other.speed_ratio.median == pytest.approx(ratio, rel=0.05), other.config.describe()


def test_a_look_beside_others_is_dropped_only_if_no_load_explains_it(searches: Searches):
    world = World(seconds=lambda config: usual_s(config) * (3.0 if config.micro_batch == 1 else 1.0), predicted=usual_s)
    found = side_by_side(searches, world)
    orders = [order for order in world.orders if order.to_beat is not None]
    assert orders and all(order.to_beat.slack == pytest.approx(math.log(2)) for order in orders)  # type: ignore[union-attr]
    best_s = usual_s(BEST)
    for trial in found.result.trials:
        if trial.outcome is Outcome.PRUNED:
            assert world.seconds(trial.config) > 1.8 * best_s


def test_a_look_beside_others_is_not_pooled_with_runs_that_were_alone():
    look = make_trial(1, CANDIDATES[0], 0.5, beside=1)
    assert look.step_time_s is not None
    quick = look.step_time_s.model_copy(update={"median": look.step_time_s.median / LOAD})
    pair = look.model_copy(update={"purpose": "finalist", "number": 2, "round": 0, "beside": 0, "step_time_s": quick})
    runs = CandidateRuns(config=look.config, first=look, finalist_runs=(pair,))
    assert runs.runs == (pair,) and runs.look_s == look.step_time_s.median
    before = look.model_copy(update={"beside": 0})
    assert CandidateRuns(config=look.config, first=before, finalist_runs=(pair,)).runs == (before, pair)
    assert measured_spread([look, pair]).freedom == 0, "another load is no spread between runs"
    assert measured_spread([before, pair]).freedom == 1


def test_a_bound_from_looks_beside_others_is_wider():
    def runs(config: TrainingConfig, factor: float, beside: int) -> CandidateRuns:
        return CandidateRuns(config=config, first=make_trial(1, config, 0.5 * factor, beside=beside))

    spread = Spread(sd=0.002, freedom=30)
    for beside, behind in ((0, True), (1, False)):
        fast, slow = runs(CANDIDATES[0], 1.0, beside), runs(CANDIDATES[1], 1.1, beside)
        assert is_behind(slow, fast, spread, [fast, slow]) is behind
    fast, slow = runs(CANDIDATES[0], 1.0, 1), runs(CANDIDATES[1], 1.5, 1)
    assert is_behind(slow, fast, spread, [fast, slow])


# Failures, kills, resuming.


def test_a_failed_look_does_nothing_to_the_others(searches: Searches):
    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        bad = order.purpose == "search" and order.config.micro_batch in (2, 8)
        return {"outcome": Outcome.CRASHED, "reason": "killed by signal 9"} if bad else None

    found = side_by_side(searches, World(fate=fate))
    kinds = {trial.config.micro_batch: trial.outcome for trial in found.result.trials if trial.purpose == "search"}
    assert kinds and all((outcome is Outcome.CRASHED) == (size in (2, 8)) for size, outcome in kinds.items())
    assert found.result.plan is not None and found.result.plan.config == BEST


@pytest.mark.parametrize("die_before", [1, 2, 4, 7, 9])
def test_a_planner_that_is_killed_goes_on_where_it_was(searches: Searches, die_before: int):
    world = World()
    with pytest.raises(Killed):
        side_by_side(searches, world, observer=Observer(die_before=die_before))
    found = side_by_side(searches, world)
    assert found.result.plan is not None and found.result.plan.config == BEST
    kept = [trial.config for trial in found.result.trials if trial.purpose == "search"]
    assert len(kept) == len(set(kept)), "no finished look is repeated"
    numbers = [trial.number for trial in found.result.trials]
    assert len(set(numbers)) == len(numbers)


def test_ctrl_c_keeps_what_had_ended_and_the_search_goes_on(searches: Searches):
    class Impatient(Observer):
        def on_trial_finished(self, trial: Trial, best: Trial | None, budget: Any) -> None:
            if trial.purpose == "search" and not trial.resumed:
                raise KeyboardInterrupt

    world = World()
    stopped = side_by_side(searches, world, observer=Impatient())
    assert stopped.result.status == "interrupted"
    kept = [trial for trial in stopped.result.trials if trial.purpose == "search"]
    assert kept
    found = side_by_side(searches, world)
    again = {trial.number for trial in found.result.trials if trial.resumed}
    assert {trial.number for trial in kept} <= again
    assert found.result.plan is not None


def test_a_look_that_something_outside_ended_is_no_verdict(searches: Searches):
    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        lost = order.purpose == "search" and order.config == BEST
        return {"outcome": Outcome.INTERRUPTED, "reason": "something killed it"} if lost else None

    found = side_by_side(searches, World(fate=fate))
    assert BEST not in {trial.config for trial in found.result.trials}
    assert found.session.did_not_run and found.result.plan is not None


# What is next.


def test_what_runs_elsewhere_counts_in_what_is_left():
    config, other = CANDIDATES[:2]
    look = Work(kind="look", config=config, gain=0.1, cost_s=10.0, needs_s=20.0, check_s=20.0)
    running = Work(kind="look", config=other, cost_s=4.0, needs_s=50.0, check_s=50.0)
    state = State(looks=[look], running=[running])
    assert next_work(state, 60.0).kind == "look", "it ends after what runs, and either may lead then"
    assert next_work(state, 59.9).kind == "end"
    pair = Work(kind="pair", config=config, gain=0.2, cost_s=10.0, needs_s=20.0, check_s=20.0)
    state = State(pairs=[pair], running=[running])
    assert next_work(state, 64.0).kind == "pair", "it waits for what runs"
    assert next_work(state, 63.9).kind == "end"


# Options.


@pytest.mark.parametrize(
    "option",
    [
        {"storage": "postgresql://host/x"},
        {"sampler": "random"},
        {"objective": "memory"},
        {"launcher": "slurm", "nodes": "2x2"},
    ],
)
def test_what_does_not_go_with_it_is_refused(option: dict[str, Any]):
    with pytest.raises(UsageError, match="side_by_side is 2, with"):
        SearchOptions(spec=make_plan().workload, side_by_side=2, **option)
    SearchOptions(spec=make_plan().workload, side_by_side=1, **option)
