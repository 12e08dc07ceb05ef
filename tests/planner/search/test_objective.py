"""What a search looks for: memory at a floor of throughput, cost over ranks, and the front of both for one search."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoplan.errors import UsageError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Objective, PeakMemory, Trial
from autoplan.planner.search.candidate_model import LEAST_GAIN, Assessment, prospects
from autoplan.planner.search.objective import THROUGHPUT, contenders, drop_level, order, to_beat
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.selection import collect_runs
from autoplan.planner.search.surrogate import Posterior, expected_improvement
from autoplan.planner.trials.measure import RUN_SPREAD, Spread
from autoplan.report import facts
from autoplan.report.facts import pareto_document, pareto_front, pareto_rows
from autoplan.report.html import render_page
from autoplan.strategies.config import TrainingConfig
from tests.planner.search.stand_in import flat_model
from tests.recorded import make_plan, make_trial

GIB = 2**30
SMALL, MIDDLE, FAST = (TrainingConfig(micro_batch=size) for size in (1, 4, 16))
MEMORY = Objective(name="memory", min_throughput=0.8)


def trial(number: int, config: TrainingConfig, step_s: float, gib: float) -> Trial:
    return make_trial(
        number, config, step_s, peak_memory=PeakMemory(resident_bytes=int(gib * GIB)), items_per_step=1024
    )


def trials() -> list[Trial]:
    return [trial(0, FAST, 1.0, 8.0), trial(1, MIDDLE, 1.2, 3.0), trial(2, SMALL, 2.0, 1.0)]


def test_the_least_memory_above_the_floor_comes_first():
    runs = collect_runs(trials())
    spread = Spread()
    assert [one.config for one in order(THROUGHPUT, runs, spread)] == [FAST, MIDDLE, SMALL]
    assert [one.config for one in order(MEMORY, runs, spread)] == [MIDDLE, FAST, SMALL]
    everything = Objective(name="memory", min_throughput=0.4)
    assert [one.config for one in order(everything, runs, spread)] == [SMALL, MIDDLE, FAST]
    fastest_only = Objective(name="memory", min_throughput=1.0)
    assert order(fastest_only, runs, spread)[0].config == FAST
    leader = order(MEMORY, runs, spread)[0]
    assert contenders(MEMORY, runs, leader, spread)[0].config == FAST, "the floor is a share of its speed"
    assert order(MEMORY, [], spread) == []


def test_runs_in_slices_move_no_configuration_over_the_floor():
    """They take some 5 % longer than looks: those with a pair are compared by it, the others by their looks."""

    def sliced(number: int, config: TrainingConfig, step_s: float) -> Trial:
        return trial(number, config, step_s, 1.0).model_copy(update={"purpose": "finalist", "round": 0, "pauses": 9})

    looks = [trial(0, FAST, 1.0, 8.0), trial(1, MIDDLE, 1.2, 3.0), trial(2, SMALL, 1.28, 1.0)]
    after = collect_runs([*looks, sliced(3, FAST, 1.07), sliced(4, MIDDLE, 1.28)])
    assert [one.config for one in order(MEMORY, after, Spread())] == [MIDDLE, FAST, SMALL]
    behind = collect_runs([*looks, sliced(3, FAST, 1.0), sliced(4, MIDDLE, 1.28)])
    assert order(MEMORY, behind, Spread())[0].config == FAST, "side by side it does not reach the floor"


def test_cost_counts_each_rank():
    one, two = TrainingConfig(micro_batch=8), TrainingConfig(micro_batch=8, dp_replicate=2)
    runs = collect_runs([trial(0, one, 1.0, 2.0), trial(1, two, 0.6, 2.0)])
    objective = Objective(name="cost", price_per_hour=3.6)
    assert [run.config for run in order(THROUGHPUT, runs, Spread())] == [two, one]
    assert [run.config for run in order(objective, runs, Spread())] == [one, two]  # 1.2 rank-seconds against 1.0
    assert order(objective, runs, Spread())[0].step_time.median == 1.0  # in seconds still
    assert objective.cost_per_million(1000.0, 2) == pytest.approx(1e6 / 1000 / 3600 * 2 * 3.6)
    assert Objective(name="cost").cost_per_million(1000.0, 2) is None
    best = runs[-1].first
    seconds = best.step_time_s.median

    def beaten_s(objective: Objective) -> float:
        found = to_beat(objective, best, two, Spread(), 10)
        assert found is not None and found.sd > found.run_sd == pytest.approx(RUN_SPREAD)
        assert found.level == pytest.approx(drop_level(10))
        return math.exp(found.log_s)

    assert beaten_s(objective) == pytest.approx(0.5 * seconds)
    assert beaten_s(THROUGHPUT) == pytest.approx(seconds)
    assert beaten_s(MEMORY) == pytest.approx(seconds / 0.8)
    assert to_beat(MEMORY, None, two, Spread(), 10) is None


def test_the_next_trial_lowers_what_is_looked_for():
    candidates = [TrainingConfig(micro_batch=size) for size in (1, 2, 4, 8, 16, 32)]

    def asked(objective: Objective, number: int) -> Any:
        model = flat_model(candidates, objective=objective)
        for one in trials()[:number]:
            model.observe(one)
        return model.assess()

    plain = asked(THROUGHPUT, 3)
    assert plain.wanted == plain.posterior
    assert plain.best == pytest.approx(0.0, abs=0.01)
    for_memory = asked(MEMORY, 2)  # every second trial looks for memory
    posterior, best = for_memory.wanted, for_memory.best
    assert best == pytest.approx(math.log(3.0 * GIB))
    assert np.allclose(posterior.log_time, for_memory.posterior.log_memory)
    assert (posterior.works <= for_memory.posterior.works).all()
    for_speed = asked(MEMORY, 3)
    assert for_speed.best == plain.best
    assert asked(Objective(name="cost"), 3).best == plain.best, "on one rank the same, and no lucky look either"
    assert flat_model(candidates, objective=MEMORY).ranking()


@pytest.mark.parametrize("early", [False, True])
def test_a_turn_for_speed_in_which_nothing_can_win_goes_to_memory(early: bool):
    """Far slower, but known so badly that some improvement is expected: too little chance to be worth a trial."""
    candidates = [TrainingConfig(micro_batch=size) for size in (16, 8)]
    model = flat_model(candidates, objective=Objective(name="memory", min_throughput=0.3))
    model.observe(trial(0, FAST, 1.0, 8.0))
    belief = Posterior(
        log_time=np.array([0.0, 0.51]),
        log_time_sd=np.array([0.01, 0.30]),
        fits=np.ones(2),
        works=np.ones(2),
        log_memory=np.log(np.array([8.0, 2.0]) * GIB),
        log_memory_sd=np.full(2, 0.1),
    )
    untried = np.array([False, True])
    known = Assessment(posterior=belief, untried=untried, cost_s=np.ones(2), wanted=belief, best=0.0)
    assert expected_improvement(belief, 0.0)[1] > LEAST_GAIN and not prospects(known)[1].any()
    known = replace(known, early=early)
    turn = model._as_wanted(known)
    assert turn.wanted is not belief and prospects(turn)[1].tolist() == [False, True]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"objective": "speed"}, "throughput, memory or cost"),
        ({"min_throughput": 0.9}, "It goes with --objective memory"),
        ({"objective": "memory", "min_throughput": 1.5}, "above 0 and at most 1"),
        ({"objective": "memory", "min_throughput": math.nan}, "above 0 and at most 1"),
        ({"price_per_hour": -1}, "a number above 0"),
        ({"price_per_hour": math.inf}, "a number above 0"),
    ],
)
def test_what_makes_no_objective_is_refused(given: dict[str, Any], says: str):
    with pytest.raises(UsageError) as refused:
        SearchOptions(spec=make_plan().workload, **given)
    assert says in str(refused.value.flag_hint)


def test_the_front_has_what_no_other_beats_in_both(tmp_path: Path):
    wasteful = TrainingConfig(micro_batch=2)
    evidence = (*trials(), trial(3, wasteful, 1.5, 5.0))
    objective = Objective(price_per_hour=2.0)
    plan = make_plan(FAST, evidence=evidence, objective=objective)
    front = pareto_front(plan)
    assert [point.config for point in front] == [FAST, MIDDLE, SMALL]
    assert [round(point.share, 2) for point in front] == [1.0, 0.83, 0.5]
    assert front[0].cost_per_million == pytest.approx(1e6 / 1024 / 3600 * 2.0)
    assert pareto_rows(plan).headings[-1] == "cost of a million tokens"
    assert [point["is_plan"] for point in pareto_document(plan)] == [True, False, False]
    assert json.dumps(pareto_document(plan))
    page = render_page(plan)
    assert "no other is faster with less memory" in page
    words = facts.objective_words(plan)
    assert words is not None
    assert words.startswith("the highest throughput; a million tokens cost")
    assert facts.objective_words(make_plan()) is None
    assert Plan.load(plan.save(tmp_path / "plan.json")).objective == objective
    assert pareto_front(make_plan(evidence=())) == []


def test_what_failed_parity_is_not_on_the_front(tmp_path: Path):
    """Its loss was the baseline's, and its gradients were not: the trials alone do not show it."""
    plan = make_plan(MIDDLE, evidence=tuple(trials()), failed_parity=(FAST,))
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert [(point.config, round(point.share, 2)) for point in pareto_front(loaded)] == [(MIDDLE, 1.0), (SMALL, 0.6)]
    checked = [one.model_copy(update={"loss_differs": True}) for one in trials()[1:]]
    assert [point.config for point in pareto_front(make_plan(MIDDLE, evidence=checked))] == [MIDDLE]
    # A plan of an earlier version does not say what failed.
    document = json.loads((tmp_path / "plan.json").read_text())
    del document["failed_parity"]
    (tmp_path / "earlier.json").write_text(json.dumps(document))
    assert Plan.load(tmp_path / "earlier.json").failed_parity == ()
