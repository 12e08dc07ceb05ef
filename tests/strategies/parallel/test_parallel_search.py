"""Searches over two ranks, from the options to the trials' records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.errors import ConfigError
from autoplan.planner.records.trials import Outcome
from autoplan.planner.search.options import SearchOptions, SearchResult
from autoplan.planner.search.run import run_search
from autoplan.planner.search.setup import Target, degree_combinations
from autoplan.strategies.workloads.sources import make_spec
from tests.strategies.tiny import GPT2

SMALL = {"precision": "fp32", "compile": "off", "optimizer_step": "own", "checkpointing": "none"}


pytestmark = pytest.mark.usefixtures("quick_searches")


def search(folder: Path, **options: Any) -> SearchResult:
    path = folder / "config.json"
    path.write_text(json.dumps(GPT2))
    spec = make_spec(model=str(path), sequence_length=32, global_batch=8)
    values: dict[str, Any] = {"budget": 60.0, "device": "cpu", "store": folder / "s", "max_trials": 2, "nproc": 2}
    return run_search(SearchOptions(spec=spec, **(values | options)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"dp_shard": 2},
        *(
            pytest.param(knobs, marks=pytest.mark.exhaustive)
            for knobs in ({"dp_shard": 2, "gradient_sync": "every"}, {"tp": 2}, {"pp": 2})
        ),
    ],
    ids=str,
)
def test_a_search_measures_two_ranks(tmp_path: Path, knobs: dict[str, Any]) -> None:
    result = search(tmp_path, fix=SMALL | knobs)
    assert result.status == "plan_found", result.reason
    shared = [trial for trial in result.trials if trial.config.model_dump().items() >= knobs.items()]
    assert shared
    assert {trial.outcome for trial in shared} <= {Outcome.OK, Outcome.PRUNED}, [t.reason for t in shared]
    assert result.plan is not None and result.plan.parity.passed
    assert {reading.group_size for reading in result.plan.hardware.collectives} == {2}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "knobs",
    [
        {"dp_replicate": 2, "tp": 2},
        {"dp_replicate": 2, "pp": 2},
        {"tp": 2, "pp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "tp": 2, "pp": 2},
        {"dp_replicate": 8},
    ],
    ids=str,
)
def test_four_and_eight_ranks_end_in_a_verified_plan(tmp_path: Path, knobs: dict[str, Any]) -> None:
    nproc = math.prod(knobs.values())
    result = search(tmp_path, fix=SMALL | knobs, nproc=nproc, max_trials=2, budget=200.0)
    assert result.status == "plan_found", result.reason
    plan = result.plan
    assert plan is not None and plan.unverified is None
    assert plan.config.world_size == nproc and plan.config.model_dump().items() >= knobs.items()
    assert plan.parity.passed and plan.parity.finished and plan.parity.checks


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_search_that_is_free_to_use_eight_ranks_ends_in_a_plan(tmp_path: Path) -> None:
    result = search(tmp_path, fix=SMALL, nproc=8, budget=200.0)
    assert result.status == "plan_found", result.reason
    assert result.plan is not None and result.plan.unverified is None and result.plan.parity.passed
    assert any(trial.config.world_size > 1 for trial in result.trials)


def test_a_fixed_degree_that_is_not_legal_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4 attention heads: tp can be 1, 2, 4"):
        search(tmp_path, fix={"tp": 3}, nproc=3)
    facts: Any = SimpleNamespace(spec=SimpleNamespace(global_batch=8), parallel=None)
    target = Target(device="cpu", nproc=2, given_limit_bytes=None)
    with pytest.raises(ConfigError, match="needs 4 ranks; nproc is 2") as caught:
        degree_combinations({"dp_replicate": 4}, facts, target)
    assert "Add nproc=4, or leave dp_replicate to the search" in str(caught.value.hint)
