"""What a search says of the candidates that it did not try, against what recorded searches show of them."""

import math

import numpy as np
import pytest

from autoplan.planner.records import Interval, Untried
from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.untried import find_untried
from autoplan.report import facts
from autoplan.strategies.config import TrainingConfig
from benchmarks.trials_saved import LIMIT_BYTES, RESULTS, answer, make_estimator
from benchmarks.trials_saved_record import read
from tests.planner.search.test_search_sampler import CANDIDATES, LIMIT, make_trial
from tests.recorded import make_plan


def test_nothing_is_said_where_all_were_tried():
    model = CandidateModel(CANDIDATES, memory_limit_bytes=LIMIT)
    for number, config in enumerate(CANDIDATES):
        assert find_untried(model, 1.0) is not None
        model.observe(make_trial(number, config))
    assert find_untried(model, 1.0) is None


def test_a_faster_winner_leaves_less_to_gain():
    model = CandidateModel(CANDIDATES, memory_limit_bytes=LIMIT)
    for number, config in enumerate(CANDIDATES[:4]):
        model.observe(make_trial(number, config))
    found = [find_untried(model, seconds) for seconds in (0.5, 2.0, 8.0)]
    chances = [untried.probability for untried in found if untried is not None]
    assert len(chances) == 3 and chances == sorted(chances) and chances[0] < 0.5 < chances[2]
    assert found[0] is not None and found[0].candidates == len(CANDIDATES) - 4


def test_its_probabilities_are_those_of_recorded_searches():
    """After each of the first trials in the order of the record: how often is what it names really faster?"""
    said, true, inside = [], [], []
    for recorded in read(RESULTS):
        for trials in recorded.rounds:
            times = dict(zip(recorded.candidates, recorded.seconds.tolist(), strict=True))
            model = CandidateModel(
                recorded.candidates, make_estimator(recorded, "timed", LIMIT_BYTES), memory_limit_bytes=LIMIT_BYTES
            )
            for number, trial in enumerate(trials[:-1]):
                model.observe(answer(trial, number, LIMIT_BYTES))
                best = model.best_trial()
                if best is None or best.step_time_s is None:
                    continue
                untried = find_untried(model, best.step_time_s.median)
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
    text = facts.untried_words(make_plan().model_copy(update={"untried": untried}))
    assert text is not None and text.startswith("1,234 configurations were not tried")
    assert "micro_batch=8 precision=bf16: predicted 0.95 to 1.3 times" in text and "62%" in text and "41" in text
    assert facts.untried_words(make_plan()) is None and math.isfinite(untried.probability)
