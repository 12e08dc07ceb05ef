"""Exported files in the real tools, each in its environment: six steps are the plan's, planted mistakes are caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoplan.processes import Zygote
from tests.exports import planted
from tests.exports.environments import needs_environment, run_python
from tests.exports.six_steps import BATCH_NORM, WORKLOAD
from tests.exports.trained import differences

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

TWO = {"dp_replicate": 2}
ENVIRONMENTS = {
    "deepspeed": "deepspeed",
    "trl": "trl",
    "lightning": "lightning",
    "fabric": "lightning",
    "torchtitan": "torchtitan",
}
"""Of the targets whose tool is not in the test extra."""

TRAINED: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "accelerate": {"one rank": (WORKLOAD, {}), "two ranks": (WORKLOAD, TWO), "BatchNorm": (BATCH_NORM, TWO)},
    "transformers": {"one rank": (WORKLOAD, {}), "two ranks": (WORKLOAD, TWO), "BatchNorm": (BATCH_NORM, TWO)},
    "trl": {"one rank": (WORKLOAD, {}), "two ranks": (WORKLOAD, TWO)},
    "deepspeed": {
        "one rank": (WORKLOAD, {}),
        "two ranks": (WORKLOAD, TWO),
        "ZeRO-2": (WORKLOAD, {"dp_shard": 2, "reshard_after_forward": False}),
        "ZeRO-3": (WORKLOAD, {"dp_shard": 2}),
        "BatchNorm": (BATCH_NORM, TWO),
    },
}
"""What trains by exported settings and a companion; the modules for Lightning are in test_lightning.py."""


def marks(target: str, *, in_make_test: bool = True) -> list[pytest.MarkDecorator]:
    """Those of a case: its environment; of what needs none, `make test` runs a part."""
    if target in ENVIRONMENTS:
        return needs_environment(ENVIRONMENTS[target])
    return [pytest.mark.exhaustive] * (not in_make_test)


@pytest.mark.parametrize(
    ("target", "case"),
    [
        pytest.param(target, case, marks=marks(target, in_make_test=case == "two ranks"))
        for target, cases in TRAINED.items()
        for case in cases
    ],
)
def test_a_tool_trains_as_the_plan_does(target: str, case: str, tmp_path: Path, training_zygote: Zygote) -> None:
    workload, knobs = TRAINED[target][case]
    given = {"environment": ENVIRONMENTS.get(target), "interleaved": target != "deepspeed", "zygote": training_zygote}
    assert differences(target, tmp_path, workload, **given, **knobs) == []


@pytest.mark.parametrize(
    "target",
    [pytest.param(target, marks=marks(target, in_make_test=target != "transformers")) for target in planted.PLANTED],
)
def test_planted_keys_and_values_are_caught(target: str) -> None:
    if target in ENVIRONMENTS:
        ended = run_python(ENVIRONMENTS[target], [planted.__file__, target], env={"DS_ACCELERATOR": "cpu"})
        said = json.loads(ended.stdout.splitlines()[-1])
    else:
        said = planted.main(target)
    assert {what: said[what] for what in said if what.startswith("right: ") and said[what]} == {}
    for mistake in planted.PLANTED[target]:
        assert said[mistake.what] and mistake.words in said[mistake.what], (mistake, said[mistake.what])


@pytest.mark.parametrize(
    ("environment", "file"),
    [
        pytest.param("lightning", "test_lightning_read.py", marks=needs_environment("lightning")),
        pytest.param("trl", "test_trl.py", marks=needs_environment("trl")),
    ],
)
def test_the_trainings_of_a_tool_are_read(environment: str, file: str) -> None:
    """The tests of the framework, where it is installed."""
    done = run_python(environment, ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/frameworks/{file}"])
    assert " passed" in done.stdout and "skipped" not in done.stdout
