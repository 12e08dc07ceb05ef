"""What a plan may claim: simulated searches through the real rounds, choice and claim; disturbed runs; the spread."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoplan.planner.records import Interval, Outcome, Trial, Window
from autoplan.planner.search.claim import (
    MOST_ROUNDS,
    ROUNDS_AGAIN,
    ROUNDS_WITHOUT_HOPE,
    Comparison,
    compare,
    faster_reference,
    rounds_needed,
)
from autoplan.planner.search.learned import NOTHING
from autoplan.planner.search.objective import THROUGHPUT
from autoplan.planner.search.options import SearchObserver
from autoplan.planner.search.rounds import repeat_if_due, run_claim, run_finalists
from autoplan.planner.search.selection import collect_runs, is_tie, measured_spread, rank
from autoplan.planner.search.session import remeasure_boxes
from autoplan.planner.trials.measure import ASSUMED, Spread, half_width, student_quantile
from autoplan.strategies.config import TrainingConfig

BASE = TrainingConfig(micro_batch=1)
OTHERS = [TrainingConfig(micro_batch=size) for size in range(2, 18)]
LOAD = "other work took 48% of the CPU time"


def a_trial(number: int, purpose: str, config: TrainingConfig, time_s: float, **facts: Any) -> Trial:
    step = Interval(median=time_s, low=0.995 * time_s, high=1.005 * time_s, samples=9)
    base: dict[str, Any] = {"phase": "done", "seconds_spent": 1.0, "method": "whole_steps", "outcome": Outcome.OK}
    return Trial(number=number, purpose=purpose, config=config, step_time_s=step, **(base | facts))


class Simulated:
    """What the rounds need of a session; a run takes a drawn time instead of a measured one."""

    def __init__(self, seed: int, spread: float, *, left_s: float = 1000.0, gain: float = 0.0) -> None:
        self.random = np.random.default_rng(seed)
        self.spread, self.left_s, self.gain = spread, left_s, gain
        self.store = SimpleNamespace(trials=(), spent_s=0.0)
        self.options = SimpleNamespace(seed=seed, allows=lambda config: True)
        self.observer = SearchObserver()
        self.parity_reserve_s = self.claim_reserve_s = 0.0
        self.trial_cost = SimpleNamespace(repeat_s=lambda trial: trial.seconds_spent)
        self.hand_left_out = False
        self.hand: Trial | None = None
        self.search_left_s = 1000.0
        self.notes: list[str] = []
        self.objective, self.taken_over = THROUGHPUT, NOTHING

    @property
    def run_spread(self) -> Spread:
        return measured_spread(self.store.trials)

    @property
    def baseline(self) -> Trial | None:
        return next((trial for trial in self.store.trials if trial.purpose == "baseline"), None)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def hard_deadline_s(self, reserve_s: float) -> float:
        return 100.0

    def measure(self, purpose: str, config: TrainingConfig, **facts: Any) -> Trial:
        time_s = math.exp(self.random.normal(-self.gain if config == OTHERS[0] else 0.0, self.spread))
        trial = a_trial(len(self.store.trials), purpose, config, time_s, round=facts.get("round"))
        self.store.trials = (*self.store.trials, trial)
        self.left_s -= 1.0
        self.store.spent_s += 1.0
        return trial


def simulate(session: Any, candidates: int, repeats: int) -> Comparison:
    """Baseline, trials, repeats, finalists, claim, as a search has them."""
    session.measure("baseline", BASE)
    for config in OTHERS[:candidates]:
        session.measure("search", config)
    for _ in range(repeats):
        session.measure("repeat", BASE)
    run_finalists(session)
    winner = rank(collect_runs(session.store.trials), measured_spread(session.store.trials))[0]
    assert run_claim(session, winner.config)
    candidates_now = {runs.config: runs for runs in collect_runs(session.store.trials)}
    spread = measured_spread(session.store.trials)
    return compare(candidates_now[winner.config], candidates_now[BASE], spread, chosen_from=len(candidates_now))


@pytest.mark.parametrize("repeats", [0, 3])
@pytest.mark.parametrize("rounds", ["no time for any", "one", "all"])
@pytest.mark.parametrize("spread", [0.025, 0.04])
def test_the_best_of_sixteen_equals_is_seldom_claimed_to_be_faster(spread: float, rounds: str, repeats: int):
    """Under 5 % of such searches claim a win; when one round decided and claimed together, 19 % did at 4 %."""
    cases, wins = 150, 0
    for case in range(cases):
        left_s = {"no time for any": 17.0 + repeats, "one": 17.0 + repeats + 2 * 3 + 3.5, "all": 1000.0}[rounds]
        found = simulate(Simulated(case, spread, left_s=left_s), 16, repeats)
        wins += found.claim.claimed
        assert found.claim.claimed == (found.claim.why_not is None)
    assert wins / cases < 0.05


@pytest.mark.parametrize("spread", [0.01, 0.025])
def test_a_gain_of_fifteen_percent_is_claimed(spread: float):
    claimed = [simulate(Simulated(case, spread, gain=math.log(1.15)), 4, 2).claim.claimed for case in range(100)]
    assert np.mean(claimed) > 0.8


def test_the_claims_runs_are_not_the_choices():
    session: Any = Simulated(1, 0.02)
    found = simulate(session, 4, 0)
    numbers = {t.number for t in session.store.trials if t.purpose == "claim"}
    assert set(found.claim.trials) <= numbers and found.claim.chosen_from == 1
    assert found.claim.rounds == len(found.claim.trials) / 2


def test_the_order_within_a_round_is_drawn():
    orders = set()
    for seed in range(6):
        session: Any = Simulated(seed, 0.02)
        simulate(session, 2, 0)
        by_round: dict[Any, list[int]] = {}
        for trial in session.store.trials:
            if trial.purpose == "claim":
                by_round.setdefault(trial.round, []).append(trial.config.micro_batch)
        orders |= {tuple(sizes) != tuple(sorted(sizes)) for sizes in by_round.values()}
    assert orders == {True, False}


def test_the_hand_setting_runs_beside_the_plan_unless_the_time_is_short():
    for left_s, beside in ((1000.0, True), (5.0, False)):
        session: Any = Simulated(3, 0.01, gain=0.5)
        for purpose, config in (("baseline", BASE), ("search", OTHERS[0]), ("reference", OTHERS[1])):
            session.measure(purpose, config)
        session.hand = session.store.trials[2]
        session.left_s = left_s if beside else 2.5
        assert run_claim(session, OTHERS[0])
        measured = {trial.config for trial in session.store.trials if trial.purpose == "claim"}
        assert measured == ({BASE, OTHERS[0], OTHERS[1]} if beside else {BASE, OTHERS[0]})


def test_a_disturbed_claim_is_no_claim_and_its_interval_contains_one():
    """Seen for real: with other work on the cores a workload that sleeps got a speed-up of 9.28 (3.16 to 27.2)."""
    loud = Window(seconds=1.0, others_cpu_share=0.48, disturbed=LOAD)
    trials = [a_trial(0, "baseline", BASE, 9.3), a_trial(1, "search", OTHERS[0], 1.0)]
    for number in range(2):
        trials.append(a_trial(2 + 2 * number, "claim", BASE, 9.3, round=number, window=loud))
        trials.append(a_trial(3 + 2 * number, "claim", OTHERS[0], 1.0, round=number))
    found = compare_of(trials)
    assert not found.claim.claimed
    assert found.claim.why_not == f"disturbed: not a claim ({LOAD} while it was measured)"
    assert found.speedup.low <= 1.0 <= found.speedup.high
    for number in range(2):  # rounds made again, in quiet
        trials.append(a_trial(6 + 2 * number, "claim", BASE, 1.5, round=2 + number))
        trials.append(a_trial(7 + 2 * number, "claim", OTHERS[0], 1.0, round=2 + number))
    again = compare_of(trials)
    assert again.claim.claimed and again.speedup.median == pytest.approx(1.5)
    assert again.claim.rounds == 2 and set(again.claim.trials) == {6, 7, 8, 9}


def compare_of(trials: list[Trial]) -> Comparison:
    runs = {one.config: one for one in collect_runs(trials)}
    return compare(runs[OTHERS[0]], runs[BASE], ASSUMED, chosen_from=2)


def test_disturbed_rounds_are_made_again_and_at_most_twice():
    session: Any = Simulated(5, 0.01, gain=0.5)
    quiet = session.measure

    def disturbed(purpose: str, config: TrainingConfig, **facts: Any) -> Trial:
        trial = quiet(purpose, config, **facts).model_copy(update={"window": Window(seconds=1.0, disturbed=LOAD)})
        session.store.trials = (*session.store.trials[:-1], trial)
        return trial

    session.measure("baseline", BASE)
    session.measure("search", OTHERS[0])
    session.measure = disturbed
    assert run_claim(session, OTHERS[0])
    assert sum(trial.purpose == "claim" for trial in session.store.trials) == 2 * (1 + ROUNDS_AGAIN)
    assert run_claim(session, OTHERS[0])  # resumed: nothing is measured again
    assert sum(trial.purpose == "claim" for trial in session.store.trials) == 2 * (1 + ROUNDS_AGAIN)


def test_a_winner_that_fails_in_its_claim_is_no_winner():
    session: Any = Simulated(5, 0.01, gain=0.5)
    session.measure("baseline", BASE)
    session.measure("search", OTHERS[0])
    quiet = session.measure

    def failing(purpose: str, config: TrainingConfig, **facts: Any) -> Trial:
        trial = quiet(purpose, config, **facts)
        if config == OTHERS[0]:
            trial = trial.model_copy(update={"outcome": Outcome.CRASHED, "step_time_s": None})
            session.store.trials = (*session.store.trials[:-1], trial)
        return trial

    session.measure = failing
    assert not run_claim(session, OTHERS[0])


# The spread between runs.


def test_the_spread_is_that_of_undisturbed_runs_of_the_same_configuration():
    loud = Window(seconds=1.0, disturbed=LOAD)
    trials = [a_trial(0, "baseline", BASE, 1.0), a_trial(1, "repeat", BASE, 1.02), a_trial(2, "search", OTHERS[0], 9.0)]
    spread = measured_spread(trials)
    assert spread.freedom == 1 and spread.sd == pytest.approx(math.log(1.02) / math.sqrt(2))
    assert measured_spread([*trials, a_trial(3, "repeat", BASE, 5.0, window=loud)]) == spread
    assert measured_spread([*trials, a_trial(3, "claim", BASE, 5.0, round=0)]) == spread
    assert measured_spread(trials[:1]) == ASSUMED


def test_the_assumed_spread_gives_way_to_what_is_measured():
    quiet, loud = Spread(sd=0.003, freedom=6), Spread(sd=0.08, freedom=6)
    assert half_width(quiet, 2) < 0.01 < half_width(ASSUMED, 2) < half_width(loud, 2)
    assert rounds_needed(quiet, 0.0) == 2 and rounds_needed(loud, 0.1) == MOST_ROUNDS
    assert rounds_needed(ASSUMED, 1.0) == 2
    assert rounds_needed(loud, 0.01) == ROUNDS_WITHOUT_HOPE


def test_what_is_a_tie_depends_on_the_measured_spread():
    trials = [a_trial(0, "search", OTHERS[0], 1.0), a_trial(1, "search", OTHERS[1], 1.015)]
    trials += [a_trial(2 + i, "finalist", config, time_s, round=0) for i, (config, time_s) in enumerate(
        [(OTHERS[0], 1.0), (OTHERS[1], 1.015)] * 2)]  # fmt: skip
    fastest, other = collect_runs(trials)
    assert is_tie(other, fastest)
    assert not is_tie(other, fastest, Spread(sd=0.002, freedom=6))


def test_repeats_of_the_reference_take_a_twentieth_of_the_time_at_most():
    session: Any = Simulated(7, 0.02)
    session.measure("baseline", BASE)
    for _ in range(200):
        repeat_if_due(session)
        session.measure("search", OTHERS[0])
    repeats = [trial for trial in session.store.trials if trial.purpose == "repeat"]
    assert 4 <= len(repeats) <= 0.05 * len(session.store.trials)
    assert {trial.config for trial in repeats} == {BASE}
    assert repeats[1].number - repeats[0].number > 10


def test_students_t_is_that_of_the_tables():
    for freedom, value in ((1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)):
        assert student_quantile(freedom, 0.025) == pytest.approx(value, rel=2e-3)


def test_a_lasting_load_ends_the_measuring_again():
    loud, quiet = Window(seconds=1.0, disturbed=LOAD), Window(seconds=1.0)
    trials = [a_trial(number, "search", BASE, 1.0, window=window) for number, window in enumerate([quiet, loud, loud])]
    assert remeasure_boxes(trials) == 0.0
    assert remeasure_boxes(trials[:2]) == remeasure_boxes([*trials, trials[0]]) == 1.0


def test_a_round_that_something_outside_ended_ends_the_rounds():
    """Such a trial is not in the record: the rounds must not begin it for ever."""
    session: Any = Simulated(5, 0.01)
    for purpose, config in (("baseline", BASE), ("search", OTHERS[0]), ("search", OTHERS[1])):
        session.measure(purpose, config)
    before = session.store.trials
    lost: list[TrainingConfig] = []

    def measure(purpose: str, config: TrainingConfig, **facts: Any) -> Trial:
        lost.append(config)
        return a_trial(99, purpose, config, 1.0, outcome=Outcome.INTERRUPTED, reason="killed from outside")

    session.measure = measure
    run_finalists(session)
    assert run_claim(session, OTHERS[0])
    assert len(lost) == 2 and session.store.trials == before
    assert session.notes == ["the rounds ended early: killed from outside"] * 2


def test_a_run_of_the_claim_that_is_late_does_not_cost_the_plan():
    """The budget's end, or a slow moment: the winner has run before, and was checked."""
    session: Any = Simulated(5, 0.01, gain=0.5)
    session.measure("baseline", BASE)
    session.measure("search", OTHERS[0])
    quiet, late = session.measure, []

    def measure(purpose: str, config: TrainingConfig, **facts: Any) -> Trial:
        trial = quiet(purpose, config, **facts)
        if config == OTHERS[0] and facts["round"] == 1:
            late.append(config)
            trial = trial.model_copy(update={"outcome": Outcome.TIMEOUT, "step_time_s": None, "reason": "late"})
            session.store.trials = (*session.store.trials[:-1], trial)
        return trial

    session.measure = measure
    assert run_claim(session, OTHERS[0])
    assert len(late) == 1 and session.notes == ["the rounds ended early: late"]
    runs = {one.config: one for one in collect_runs(session.store.trials)}
    found = compare(runs[OTHERS[0]], runs[BASE], ASSUMED, chosen_from=2)
    assert found.claim.rounds == 1 and found.claim.chosen_from == 1


def test_a_repeat_that_the_budget_ended_does_not_cost_its_configuration_the_plan():
    """Its kernels left the cache: a finalist that compiles again ran into the end of the time for the rounds."""
    session: Any = Simulated(5, 0.01, left_s=1000.0)
    for purpose, config in (("baseline", BASE), ("search", OTHERS[0]), ("search", OTHERS[1])):
        session.measure(purpose, config)
    quiet, asked = session.measure, []

    def measure(purpose: str, config: TrainingConfig, **facts: Any) -> Trial:
        asked.append((purpose, facts["deadline_s"], facts["deadline_of_budget"]))
        trial = quiet(purpose, config, **facts)
        if purpose == "finalist" and facts["round"] == 1:
            ended = {"outcome": Outcome.TIMEOUT, "step_time_s": None, "reason": "late"}
            trial = trial.model_copy(update=ended | {"budget_ended": facts["deadline_of_budget"]})
            session.store.trials = (*session.store.trials[:-1], trial)
        return trial

    session.measure, session.hard_deadline_s = measure, lambda reserve_s: 7.0
    run_finalists(session)
    assert set(asked) == {("finalist", 7.0, True)}
    assert session.notes == ["the rounds ended early: late"]
    assert {one.config for one in collect_runs(session.store.trials)} == {BASE, OTHERS[0], OTHERS[1]}
    stuck = session.store.trials[-1].model_copy(update={"budget_ended": False})  # over a deadline of its own
    assert stuck.config not in {one.config for one in collect_runs([*session.store.trials[:-1], stuck])}


def test_a_repeat_may_take_four_times_the_longest_run_of_its_configuration():
    """The first run found its kernels in the cache of an earlier search; the second one compiled."""
    session: Any = Simulated(5, 0.01)
    reference = a_trial(0, "baseline", BASE, 1.0, seconds_spent=10.0)
    session.store.trials = (reference, a_trial(1, "repeat", BASE, 1.0, seconds_spent=20.0))
    session.store.spent_s = 3000.0
    asked: list[dict[str, Any]] = []
    session.measure = lambda purpose, config, **facts: asked.append(facts)
    repeat_if_due(session)
    assert asked[0]["deadline_s"] == 4 * 20.0 and not asked[0]["deadline_of_budget"]


# What the rounds of the claim show to be faster than the winner.


def side_by_side(times_s: dict[TrainingConfig, float], window: Window | None = None) -> dict[TrainingConfig, Any]:
    """Three rounds of the claim; in their first trials all took 1 s."""
    trials = [a_trial(number, "search", config, 1.0) for number, config in enumerate(times_s)]
    for round in range(3):
        for config, time_s in times_s.items():
            trials.append(a_trial(len(trials), "claim", config, time_s, round=round, window=window))
    return {runs.config: runs for runs in collect_runs(trials)}


def test_the_fastest_of_what_beat_the_winner_is_found():
    quiet = Spread(sd=0.01, freedom=6)
    winner, hand = OTHERS[0], OTHERS[1]

    def faster(winner_s: float, base_s: float, hand_s: float, window: Window | None = None) -> TrainingConfig | None:
        runs = side_by_side({winner: winner_s, BASE: base_s, hand: hand_s}, window)
        found = faster_reference(runs[winner], [runs[BASE], runs[hand]], quiet)
        return None if found is None else found.config

    assert faster(1.5, 1.0, 1.1) == BASE
    assert faster(1.5, 1.0, 0.8) == hand
    assert faster(1.5, 2.0, 1.2) == hand
    assert faster(1.0, 1.5, 1.1) is None
    assert faster(1.01, 1.0, 1.0) is None, "a tie does not move the plan"
    assert faster(1.5, 1.0, 1.0, Window(seconds=1.0, disturbed=LOAD)) is None, "disturbed runs do not move it"


def test_without_rounds_nothing_beat_the_winner():
    trials = [a_trial(0, "baseline", BASE, 1.0), a_trial(1, "search", OTHERS[0], 2.0)]
    runs = {one.config: one for one in collect_runs(trials)}
    assert faster_reference(runs[OTHERS[0]], [runs[BASE]], ASSUMED) is None


def test_what_the_rounds_chose_has_a_wider_interval_from_them():
    runs = side_by_side({OTHERS[1]: 0.9, BASE: 1.0})
    one, three = (
        compare(runs[OTHERS[1]], runs[BASE], ASSUMED, chosen_from=5, chosen_in_rounds=n).speedup for n in (1, 3)
    )
    assert three.low < one.low < one.median == three.median
