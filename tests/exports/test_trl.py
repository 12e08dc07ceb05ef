"""The target trl: the real SFTConfig reads the file back, and the real SFTTrainer trains as the plan does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.exports import planted
from tests.exports.environments import needs_environment, run_python
from tests.exports.six_steps import WORKLOAD
from tests.exports.trained import differences

pytestmark = needs_environment("trl")


@pytest.mark.parametrize("knobs", [{}, {"dp_replicate": 2}], ids=["one rank", "two ranks"])
def test_sfttrainer_trains_as_the_plan_does(knobs: dict[str, Any], tmp_path: Path) -> None:
    assert differences("trl", tmp_path, WORKLOAD, environment="trl", interleaved=True, **knobs) == []


def test_planted_keys_and_values_are_caught() -> None:
    said = json.loads(run_python("trl", [planted.__file__, "trl"]).stdout.splitlines()[-1])
    assert said.pop("right") is None
    assert len(said) > 3 and [what for what, text in said.items() if text is None] == []
