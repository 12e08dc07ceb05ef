"""The target transformers: a real Trainer trains as the plan does, on one and two ranks, with BatchNorm too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoplan.processes import Zygote
from tests.exports import planted
from tests.exports.six_steps import BATCH_NORM, WORKLOAD
from tests.exports.trained import differences

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("workload", "knobs"),
    [
        pytest.param(WORKLOAD, {}, marks=pytest.mark.exhaustive),
        (WORKLOAD, {"dp_replicate": 2}),
        pytest.param(BATCH_NORM, {"dp_replicate": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=["one rank", "two ranks", "BatchNorm on two ranks"],
)
def test_a_trainer_trains_as_the_plan_does(
    workload: str, knobs: dict[str, Any], tmp_path: Path, training_zygote: Zygote
) -> None:
    assert differences("transformers", tmp_path, workload, interleaved=True, zygote=training_zygote, **knobs) == []


@pytest.mark.exhaustive
def test_planted_keys_and_values_are_caught() -> None:
    said = planted.main("transformers")
    assert said.pop("right") is None
    assert len(said) > 3 and [what for what, text in said.items() if text is None] == []
