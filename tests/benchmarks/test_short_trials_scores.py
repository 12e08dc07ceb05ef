"""The scores of benchmarks/short_trials.py: ratios of extrapolated and whole step times, candidates a minute."""

from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.planner.records import Interval, Outcome, ShortTrial, ShortTrials, Trial
from autoplan.planner.search.options import SearchResult
from autoplan.strategies.config import TrainingConfig
from benchmarks.short_trials import DEPTH, SECOND_DEPTH, Measured, _row, _scores


def trial(number: int, micro_batch: int, seconds: float, purpose: str = "search", **fields: Any) -> Trial:
    values: dict[str, Any] = {
        "number": number,
        "purpose": purpose,
        "config": TrainingConfig(micro_batch=micro_batch),
        "outcome": Outcome.OK,
        "phase": "done",
        "step_time_s": Interval(median=seconds, low=seconds, high=seconds, samples=3),
        "seconds_spent": 10 * seconds,
    }
    return Trial.model_validate(values | fields)


def test_extrapolated_over_whole_step_times():
    """A step is 1 s and 0.25 s for each of 12 blocks; the ratios say 10 % too much, the line is right."""
    found = [
        Measured(
            config=TrainingConfig(micro_batch=size),
            trials={
                None: [trial(0, size, 4.0), trial(1, size, 4.0)],
                DEPTH: [trial(2, size, 1.5, "short")],
                SECOND_DEPTH: [trial(3, size, 2.0, "short")],
            },
        )
        for size in (1, 2, 4)
    ]
    found.append(Measured(config=TrainingConfig(micro_batch=8), trials={None: [trial(9, 8, 1.0, outcome="crashed")]}))
    ratio = 1.1 * 4.0 / 1.5
    cut: Any = SimpleNamespace(blocks=12, ratios=lambda config: (ratio, ratio))
    scores = _scores(found, cut)
    assert [row["by_ratios"] for row in scores["rows"]] == pytest.approx([1.1] * 3)
    assert all(1.0 < row["with_level"] < 1.02 for row in scores["rows"]), "by the others' level"
    assert [row["by_line"] for row in scores["rows"]] == pytest.approx([1.0] * 3)
    assert scores["seconds_whole_over_short"] == pytest.approx(4.0 / 1.5)
    assert scores["whole_runs_apart"] == 1.0 and scores["disturbed"] == 0
    assert scores["left_out"] == ["micro_batch=8"]


def test_a_candidate_counts_once_whole_or_short():
    whole = (trial(0, 1, 4.0, "baseline"), trial(4, 4, 4.0), trial(5, 4, 4.0, "claim"))
    cut = [trial(number, size, 1.0, "short") for number, size in ((1, 1), (2, 4), (3, 8))]
    shorts = ShortTrials(
        trials=tuple(ShortTrial(trial=t, depth=2, blocks=12, micro_ratio=4.0, optimizer_ratio=4.0) for t in cut),
        allowed=0.07,
    )
    result = SearchResult(status="plan_found", trials=whole, short_trials=shorts)
    row = _row(0, "auto", result, 100.0)
    assert row["candidates"] == 2, "micro-batches 4 and 8; the baseline is none"
    assert row["seconds_of_them"] == pytest.approx(40.0 + 3 * 10.0), "what the checks took counts, the claim does not"
    assert row["candidates_per_minute"] == pytest.approx(60 * 2 / 70.0)
