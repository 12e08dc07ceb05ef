"""The scoreboard's own bars: the closed form against published tables stays as good as it was recorded."""

from __future__ import annotations

import pytest

from benchmarks import accuracy, accuracy_memory

MEMORY = {
    "torchtune": (0.1, 18),
    "LitGPT, one GPU": (0.05, 72),
    "LitGPT, FSDP": (0.12, 32),
    "InternEvo A800": (0.2, 16),
}
"""Of each table the largest mean error, and how many rows were published."""


@pytest.mark.parametrize(
    "load, untouched, fitted",
    [(accuracy.llm_foundry, 0.09, 0.09), (accuracy.fms_fsdp, 0.11, 0.12), (accuracy.vtrain, 0.13, 0.13)],
    ids=["llm_foundry", "fms_fsdp", "vtrain"],
)
def test_published_tables_are_priced_as_well_as_recorded(load: object, untouched: float, fitted: float) -> None:
    score = accuracy.score(load(), draws=5)  # type: ignore[operator]
    assert score["mean"] < untouched
    for drawn in score["drawn"].values():
        assert drawn["mean"] < fitted and drawn["median_change"] <= 0.005 and drawn["covered"] > 0.8


def test_calibration_mends_a_table_that_is_off_as_a_whole() -> None:
    score = accuracy.score(accuracy.nemo(), draws=5)
    assert score["mean"] > 0.2
    assert all(drawn["mean"] < 0.07 and drawn["used"] == 1 for drawn in score["drawn"].values())


def test_regret_within_groups_of_equal_work_stays_small() -> None:
    score = accuracy.score(accuracy.vtrain(), draws=0, numbers=())
    assert score["regret"] < 0.06 and score["top5"] > 0.9


def test_the_formulas_are_those_of_the_paper() -> None:
    found = accuracy.korthikanti()
    # the paper spreads the embedding over all stages; the first stage, which is priced, has it whole
    assert found["states"] < 0.06 and found["activations"] < 0.01


@pytest.mark.parametrize("name", accuracy_memory.TABLES)
def test_published_memory_is_priced_as_well_as_recorded(name: str) -> None:
    mean, rows = MEMORY[name]
    score = accuracy_memory.score_memory(accuracy_memory.TABLES[name]())
    assert score["mean"] < mean
    assert score["confusion"]["out_of_memory"]["fits"] == score["confusion"]["ran"]["does_not_fit"] == 0
    assert score["rows"] + sum(score["left_out"].values()) == rows, "each is priced, or left out with its reason"
