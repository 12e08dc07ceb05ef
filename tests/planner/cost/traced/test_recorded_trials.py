"""The scoreboard of recorded searches: read from a search's document or its store, scored by hand-made numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoplan.planner.records.trials import Outcome, PeakMemory, Prediction, Trial
from autoplan.planner.trials.runner import _predicted
from autoplan.strategies.config import TrainingConfig
from benchmarks import accuracy_trials
from tests.recorded import interval

LIMIT = 10_000


def trial(number: int, predicted_s: float, measured_s: float, outcome: Outcome = Outcome.OK) -> Trial:
    prediction = Prediction(
        step_time_s=predicted_s,
        step_time_low_s=predicted_s * 0.85,
        step_time_high_s=predicted_s * 1.15,
        peak_memory_bytes=1100,
        peak_memory_low_bytes=1050,
        peak_memory_high_bytes=1150,
        verdict="fits",
        bound="compute",
    )
    return Trial(
        number=number,
        purpose="search",
        config=TrainingConfig(micro_batch=2**number),
        outcome=outcome,
        phase="done",
        step_time_s=interval(measured_s) if outcome is Outcome.OK else None,
        peak_memory=PeakMemory(resident_bytes=1000, limit_bytes=LIMIT),
        seconds_spent=1.0,
        **_predicted(prediction),
    )


TRIALS = [
    trial(0, 1.0, 1.0),
    trial(1, 2.2, 2.0),
    trial(2, 2.4, 3.0),
    trial(3, 3.9, 4.0),
    trial(4, 5.0, 5.0),
    trial(5, 0.9, 6.0),
    trial(6, 7.0, 7.0, Outcome.OUT_OF_MEMORY),
]


def document(trials: list[Trial]) -> dict[str, Any]:
    return {"trials": [t.model_dump(mode="json") | {"peak_memory_bytes": t.peak_memory_bytes} for t in trials]}


def test_the_figures_are_those_of_the_trials() -> None:
    found = accuracy_trials.score_trials(document(TRIALS)["trials"])
    assert (found["trials"], found["timed"], found["out_of_memory"]) == (7, 6, 1)
    assert found["time_mean"] == pytest.approx(np.mean([0, 0.1, 0.2, 0.025, 0, 0.85]))
    assert found["time_bias"] == pytest.approx(np.mean([0, 0.1, -0.2, -0.025, 0, -0.85]))
    assert found["time_mean_after_3"] == pytest.approx(np.mean([0.025, 0, 0.85]))
    assert found["covered"] == pytest.approx(4 / 6)
    assert found["memory_mean"] == pytest.approx(0.1) and found["memory_covered"] == 0
    assert found["called_safe"] == 1
    # predicted ranks 2 3 4 5 6 1 beside measured 1 2 3 4 5 6
    assert found["rank"] == pytest.approx(1 - 6 * (5 * 1 + 25) / (6 * 35))
    assert found["top5"] == 1


def test_top_5_misses_where_the_best_was_thought_slow() -> None:
    trials = [trial(i, 1.0 + i, 1.0 + i) for i in range(5)] + [trial(5, 99.0, 0.5)]
    assert accuracy_trials.score_trials(document(trials)["trials"])["top5"] == 0


def test_a_document_and_a_store_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "search.json").write_text(json.dumps(document(TRIALS)))
    (tmp_path / "other.json").write_text('{"rows": []}')
    store = tmp_path / "store"
    store.mkdir()
    lines = [json.dumps({"kind": "budget"})]
    lines += [json.dumps({"kind": "trial", "trial": t.model_dump(mode="json", exclude={"resumed"})}) for t in TRIALS]
    (store / "record.jsonl").write_text("\n".join([*lines, '{"kind": "trial", "tri']))
    read = [accuracy_trials.read_record(p) for p in (tmp_path / "search.json", store / "record.jsonl")]
    assert read[0] is not None and read[1] is not None
    assert accuracy_trials.score_trials(read[0].trials) == accuracy_trials.score_trials(read[1].trials)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "search.json").write_text(json.dumps(document(TRIALS)))
    (tmp_path / "alone" / "other.json").write_text('{"rows": []}')
    assert accuracy_trials.find_records([tmp_path / "alone"]) == [tmp_path / "alone" / "search.json"]
    accuracy_trials.show_trials([tmp_path / "search.json", tmp_path / "other.json"], markdown=True)
    shown = capsys.readouterr().out
    assert f"| {tmp_path.name} | 7 | 6 |" in shown and "no record of a search: other.json" in shown


def test_ties_share_their_rank() -> None:
    a, b = np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])
    assert accuracy_trials.rank_correlation(a, b) == pytest.approx(np.corrcoef([0.5, 0.5, 2], [0, 1, 2])[0, 1])
