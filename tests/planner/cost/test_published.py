"""The scoreboard's own bars: the closed form against published tables stays as good as it was recorded."""

from __future__ import annotations

import pytest

from benchmarks import accuracy


@pytest.mark.parametrize(
    "load, untouched, fitted",
    [(accuracy.llm_foundry, 0.09, 0.09), (accuracy.fms_fsdp, 0.11, 0.12), (accuracy.vtrain, 0.13, 0.13)],
    ids=["llm_foundry", "fms_fsdp", "vtrain"],
)
def test_published_tables_are_priced_as_well_as_recorded(load: object, untouched: float, fitted: float) -> None:
    score = accuracy.score(load(), draws=3)  # type: ignore[operator]
    assert score["mean"] < untouched
    assert score["fitted_mean"] < fitted


def test_regret_within_groups_of_equal_work_stays_small() -> None:
    score = accuracy.score(accuracy.vtrain(), draws=2)
    assert score["regret"] < 0.06 and score["top5"] > 0.9


def test_the_formulas_are_those_of_the_paper() -> None:
    found = accuracy.korthikanti()
    assert found["states"] < 0.02 and found["activations"] < 0.01
