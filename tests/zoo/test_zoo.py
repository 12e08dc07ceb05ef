"""Four strangers of the zoo, end to end, and the catalogue itself. `make test-zoo` runs all of them."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import run as zoo
from tests.zoo import same_training
from tests.zoo.catalogue import BY_NAME, CATALOGUE, FOLDER
from tests.zoo.one import Ending, write
from tests.zoo.plain_loop import PlainRun, train

BUDGET_S, TRIALS = 60.0, 2  # the trials end a search early; the budget is for a busy machine
FOUR = ("sequentials", "two-tasks", "graph", "lstm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the four, so that the machine is probed once."""
    found = tmp_path_factory.mktemp("zoo")
    zoo.probe(found)
    return found


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOUR)
def test_a_stranger_is_planned_verified_and_applied(name: str, folder: Path) -> None:
    ending = zoo.run_one(BY_NAME[name], BUDGET_S, folder, TRIALS)
    assert ending.ended == "plan", f"{ending.in_words}: {ending.error}\n{ending.raised}"
    assert ending.parity["passed"] and len(ending.losses) == 2


@pytest.mark.exhaustive  # the refusal itself: tests/strategies/test_run.py
def test_what_only_the_user_knows_is_asked_for(folder: Path) -> None:
    ending = zoo.run_one(BY_NAME["resnet-unfixed"], BUDGET_S, folder)
    assert ending.ended == "refused", f"{ending.in_words}: {ending.error}\n{ending.raised}"


def test_the_catalogue_names_every_workload_once() -> None:
    written = {
        f"{path.name}:{node.name}"
        for path in FOLDER.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and not node.args.args
        and ast.unparse(node.returns or node) == "autoplan.Workload"
    }
    assert {entry.function for entry in CATALOGUE} == written
    assert len(BY_NAME) == len(CATALOGUE), "names differ"
    assert sum(entry.expected == "plans" for entry in CATALOGUE) >= 54
    assert all(entry.because and entry.says for entry in CATALOGUE if entry.expected == "refused")


def test_an_ending_says_whether_it_is_the_expected_one() -> None:
    assert Ending(name="llama", ended="plan").as_expected
    assert not Ending(name="llama", ended="refused").as_expected
    assert Ending(name="resnet-unfixed", ended="refused").as_expected
    assert not Ending(name="resnet-unfixed", ended="plan").as_expected
    failed = Ending(name="llama", stage="trace", error="WorkloadError: why\nmore")
    assert not failed.as_expected
    assert "failed in trace (!)" in zoo.row(failed, markdown=False) and "more" not in zoo.row(failed, markdown=False)
    assert zoo.counts([failed, Ending(name="mlp", ended="plan")]) == "1 of 2 as expected: 1 failed in trace, 1 plan"


def test_a_process_that_dies_or_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Ending(name="mlp", stage="trace"), tmp_path)  # what a killed search leaves
    monkeypatch.setattr(zoo, "LIMIT_BUDGETS", 0.0)
    monkeypatch.setattr(zoo, "LIMIT_MORE_S", 0.2)
    ending = zoo.run_one(BY_NAME["mlp"], BUDGET_S, tmp_path)
    assert (ending.ended, ending.stage) == ("failed", "trace")
    assert "killed after" in ending.error


def test_the_plain_loop_sees_a_training_that_learns_nothing() -> None:
    def verdict(*losses: float) -> str:
        return PlainRun(losses=losses, step_s=0.1, parameters=1).verdict

    assert verdict(3.0, 2.5, 2.0) == "falls"
    assert verdict(3.0, 3.0, 3.0) == "stands still"
    assert verdict(3.0, float("nan"), 2.0) == "not finite"
    assert verdict(2.0, 2.5, 3.0) == "changes"


@pytest.mark.parametrize("name", ["frozen-norms", "vae", "batchnorm"])
def test_a_plain_run_is_the_plain_loop_to_rounding(name: str) -> None:
    assert same_training.difference(BY_NAME[name]) <= same_training.TOLERANCE


def test_the_comparison_with_the_plain_loop_sees_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(workload: Any, micro_batch: int | None, steps: int) -> PlainRun:
        return train(dataclasses.replace(workload, seed=1), micro_batch, steps)

    monkeypatch.setattr(same_training, "train", other)
    assert same_training.difference(BY_NAME["vae"]) > same_training.TOLERANCE
