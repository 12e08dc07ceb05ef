"""The target deepspeed: the real DeepSpeedConfig reads the file back, and the real engine trains as the plan does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.exports import planted
from tests.exports.environments import needs_environment, run_python
from tests.exports.six_steps import BATCH_NORM, WORKLOAD
from tests.exports.trained import differences

pytestmark = needs_environment("deepspeed")

TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": (WORKLOAD, {}),
    "two ranks": (WORKLOAD, {"dp_replicate": 2}),
    "ZeRO-2": (WORKLOAD, {"dp_shard": 2, "reshard_after_forward": False}),
    "ZeRO-3": (WORKLOAD, {"dp_shard": 2}),
    "BatchNorm": (BATCH_NORM, {"dp_replicate": 2}),
}


@pytest.mark.parametrize("case", TRAINED)
def test_deepspeed_trains_as_the_plan_does(case: str, tmp_path: Path) -> None:
    workload, knobs = TRAINED[case]
    assert differences("deepspeed", tmp_path, workload, environment="deepspeed", **knobs) == []


def test_planted_keys_and_values_are_caught() -> None:
    ended = run_python("deepspeed", [planted.__file__, "deepspeed"], env={"DS_ACCELERATOR": "cpu"})
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said.pop("right") is None
    assert len(said) > 6 and [what for what, text in said.items() if text is None] == []
