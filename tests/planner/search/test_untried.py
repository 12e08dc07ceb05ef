"""What a search says of the candidates that it did not try, against what recorded searches show of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoplan.planner.records.trials import Interval, Objective, Outcome
from autoplan.planner.records.untried import Untried
from autoplan.planner.search.answer import SearchRun, budget_ended
from autoplan.planner.search.candidate_model import CandidateModel, find_untried
from autoplan.report import facts
from autoplan.strategies.config import TrainingConfig
from benchmarks.recorded import EARLIER, LIMIT_BYTES, read
from benchmarks.replay import answer, make_estimator
from tests.planner.search.stand_in import ASecondEach, flat_model
from tests.planner.search.test_search_sampler import CANDIDATES, LIMIT, Search, make_trial
from tests.recorded import make_plan


def test_nothing_is_said_where_all_were_tried():
    model = flat_model(CANDIDATES, memory_limit_bytes=LIMIT)
    for number, config in enumerate(CANDIDATES):
        assert find_untried(model, CANDIDATES[0], 1.0) is not None
        model.observe(make_trial(number, config))
    assert find_untried(model, CANDIDATES[0], 1.0) is None


def test_a_faster_winner_leaves_less_to_gain():
    model = flat_model(CANDIDATES, memory_limit_bytes=LIMIT)
    for number, config in enumerate(CANDIDATES[:4]):
        model.observe(make_trial(number, config))
    found = [find_untried(model, CANDIDATES[0], seconds) for seconds in (0.5, 2.0, 8.0)]
    chances = [untried.probability for untried in found if untried is not None]
    assert len(chances) == 3 and chances == sorted(chances) and chances[0] < 0.5 < chances[2]
    assert found[0] is not None and found[0].candidates == len(CANDIDATES) - 4


def test_it_is_what_the_search_would_try_next():
    """With all the time it needs: after each trial the sampler chooses what was said before it."""
    search = Search()
    said = search.run(1)
    while True:
        best = search.model.best_trial()
        assert best is not None and best.step_time_s is not None
        untried = find_untried(search.model, best.config, best.step_time_s.median)
        config = search.run_one(len(said))
        if config is None:
            break
        assert untried is not None and untried.tried_next and untried.config == config
        said.append(config)
    assert len(said) > 3
    assert untried is None or untried.tried_next is False


def test_what_the_budget_stopped_is_not_untried():
    model = flat_model(CANDIDATES, memory_limit_bytes=LIMIT)
    for number, config in enumerate(CANDIDATES[:-2]):
        model.observe(make_trial(number, config))
    late = {"outcome": Outcome.TIMEOUT, "budget_ended": True, "step_time_s": None}
    model.observe(make_trial(90, CANDIDATES[-2], **late))
    model.observe(make_trial(91, CANDIDATES[-1], **late | {"budget_ended": False}))  # too slow for any budget
    untried = find_untried(model, CANDIDATES[0], 1.0)
    assert untried is not None and (untried.config, untried.candidates, untried.begun) == (CANDIDATES[-2], 0, True)
    text = untried.describe("the plan's")
    assert text.startswith("every configuration was tried; ")
    assert f"{CANDIDATES[-2].describe()}, which the end of the budget stopped" in text


def test_where_another_sampler_draws_the_next_one_is_not_known():
    model = flat_model(CANDIDATES, memory_limit_bytes=LIMIT)
    model.observe(make_trial(0, CANDIDATES[0]))
    untried = find_untried(model, CANDIDATES[0], 1.0, drawn=True)
    assert untried is not None and untried.tried_next is None
    assert "not tried; most is expected of" in untried.describe("the plan's")


def test_cost_is_compared_per_rank_and_memory_is_left_out():
    one, two, four = (TrainingConfig(micro_batch=1, dp_replicate=ranks) for ranks in (1, 2, 4))
    ratios = {}
    for name in ("throughput", "cost", "memory"):
        model = flat_model([one, two, four], objective=Objective(name=name))  # type: ignore[arg-type]
        model.observe(make_trial(0, one))
        model.observe(make_trial(1, two))
        ratios[name] = find_untried(model, two, 3.0)
    plain, cost = ratios["throughput"], ratios["cost"]
    assert plain is not None and cost is not None and ratios["memory"] is None
    assert cost.config == plain.config == four
    assert cost.speed_ratio.median == pytest.approx(plain.speed_ratio.median / 2)  # a step takes twice the ranks
    assert cost.probability < plain.probability
    assert "times the plan's speed per rank, cheaper with" in cost.describe("the plan's")


def test_a_search_whose_budget_ended_says_what_it_would_try_next():
    search = Search()
    search.run(3)
    best = search.model.best_trial()
    assert best is not None and best.step_time_s is not None
    untried = find_untried(search.model, best.config, best.step_time_s.median)
    assert untried is not None and untried.tried_next
    session: Any = SimpleNamespace(sampler=None, model=search.model, shown_best=best)

    class Run(SearchRun):
        def finish(self, status: Any, reason: str, hint: str, *, ended_by: str = "time") -> Any:
            return hint

    options = SimpleNamespace(max_device_hours=None)
    facts_: dict[str, Any] = {"options": options, "observer": None, "store": None}
    hint: Any = budget_ended(Run(budget_s=60.0, session=session, **facts_), "the budget ended before the parity check")
    assert hint.startswith("Give it more time, for example --budget 2m; what finished is not repeated. So far, ")
    assert f"a longer search tries {untried.config.describe()} next: predicted" in hint
    assert "times the best trial's speed, faster with a probability of" in hint
    assert "So far" not in str(budget_ended(Run(budget_s=60.0, **facts_), "the budget ended before the baseline"))


def test_its_probabilities_are_those_of_recorded_searches():
    """After every second of the first trials in the order of the record: how often is what it names really faster?"""
    said, true, inside = [], [], []
    for recorded in read(EARLIER):
        for trials in recorded.rounds:
            times = dict(zip(recorded.candidates, recorded.seconds.tolist(), strict=True))
            cost: Any = ASecondEach()
            model = CandidateModel(recorded.candidates, make_estimator(recorded), cost, memory_limit_bytes=LIMIT_BYTES)
            for number, trial in enumerate(trials[:-1]):
                model.observe(answer(trial, number, LIMIT_BYTES))
                best = model.best_trial()
                if number % 2 or best is None or best.step_time_s is None:
                    continue
                untried = find_untried(model, best.config, best.step_time_s.median)
                assert untried is not None
                ratio = best.step_time_s.median / times[untried.config]
                said.append(untried.probability)
                true.append(ratio > 1)
                inside.append(untried.speed_ratio.low <= ratio <= untried.speed_ratio.high)
    assert len(said) > 50
    assert np.mean(said) == pytest.approx(np.mean(true), abs=0.15), "probabilities"
    assert np.mean(inside) > 0.7, "intervals of 90 %"


def test_the_sentence_says_what_how_much_and_how_long():
    untried = Untried(
        config=TrainingConfig(micro_batch=8, precision="bf16"),
        candidates=1234,
        speed_ratio=Interval(median=1.1, low=0.95, high=1.3, samples=0),
        probability=0.62,
        trial_s=41.0,
    )
    plan = make_plan()
    text = facts.untried_words(plan.model_copy(update={"untried": untried.model_copy(update={"tried_next": True})}))
    assert text is not None and text.startswith(
        "1,234 configurations were not tried; a longer search tries micro_batch=8"
    )
    assert (
        "precision=bf16 next: predicted 0.95 to 1.3 times the plan's speed" in text and "62%" in text and "41" in text
    )
    none = untried.model_copy(update={"tried_next": False}).describe("the plan's")
    assert "none of them could still win" in none
    assert untried.tried_next is None  # an earlier version's
    assert facts.untried_words(plan) is None
