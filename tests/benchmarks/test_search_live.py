"""The live comparison of ways to choose: its bookkeeping, and what a real finder of batch sizes does at a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.records.trials import Interval, Outcome, Trial
from autoplan.strategies.config import TrainingConfig
from benchmarks import search_live
from benchmarks.search_cases import CASES, GLOBAL_BATCHES, case_spec
from benchmarks.search_live_table import Choice, best_known, lines_of, table

ROOT = Path(__file__).parents[2]
SMALL, LARGE, BIG = (TrainingConfig(micro_batch=size) for size in (8, 32, 64))


def trial_of(config: TrainingConfig, rate: float | None) -> Trial:
    shown = None if rate is None else Interval(median=rate, low=rate, high=rate, samples=5)
    step = None if rate is None else Interval(median=1 / rate, low=1 / rate, high=1 / rate, samples=5)
    return Trial(
        number=0,
        purpose="search",
        config=config,
        outcome=Outcome.OUT_OF_MEMORY if rate is None else Outcome.OK,
        reason="above the limit" if rate is None else None,
        phase="done",
        step_time_s=step,
        tokens_per_s=shown,
        seconds_spent=1.0,
    )


def choice_of(config: TrainingConfig | None, global_batch: int = 32, **other: Any) -> Choice:
    return Choice(config=config, global_batch=global_batch, seconds=10.0, tried=3, **other)


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    choices = {
        "autoplan": choice_of(SMALL),
        "lightning": choice_of(BIG, 64),
        "accelerate": choice_of(LARGE),
        "trainer": choice_of(None, why_not="it ended with status 1: MemoryError"),
    }
    trials = {(SMALL, 32): trial_of(SMALL, 200.0), (BIG, 64): trial_of(BIG, 150.0), (LARGE, 32): trial_of(LARGE, None)}
    trials[SMALL.model_copy(update={"precision": "bf16"}), 32] = trial_of(SMALL, 250.0)  # known from an earlier round
    return lines_of("vision", 32, 0, choices, trials)


def test_a_share_is_of_the_fastest_that_the_round_measured(lines: list[dict[str, Any]]):
    by = {line["method"]: line for line in lines}
    assert (by["autoplan"]["share"], by["lightning"]["share"]) == (0.8, 0.6)
    assert by["accelerate"]["share"] is None and by["accelerate"]["why_not"] == "above the limit"
    assert by["trainer"]["config"] is None and by["trainer"]["rate"] is None
    assert json.loads(json.dumps(lines)) == lines
    known = best_known(lines, "vision")
    assert known is not None and known["method"] == "autoplan" and best_known(lines, "gpt") is None


def test_the_table_says_who_keeps_the_global_batch_and_who_has_no_answer(lines: list[dict[str, Any]]):
    again = [line | {"round": 1, "share": 1.0} if line["method"] == "autoplan" else line for line in lines]
    rows = {row.split(" | ")[1]: row for row in table([*lines, *again]).splitlines()[2:]}
    assert "| 2 | 90% (80% to 100%; 2 of 2) | 10 | 3 | kept | micro_batch=8 |" in rows["autoplan.search"]
    assert "| 60% (60% to 60%; 2 of 2) | 10 | 3 | 32 -> 64 |" in rows["Lightning BatchSizeFinder"]
    assert "| - | 10 | 3 | kept | micro_batch=32 (above the limit) |" in rows["accelerate find_executable_batch_size"]
    assert "| - | nothing (it ended with status 1: MemoryError) |" in rows["Trainer auto_find_batch_size"]


def test_the_power_of_two_recipe_tries_what_keeps_the_global_batch():
    assert search_live.doubled(32) == [1, 2, 4, 8, 16, 32]
    assert search_live.doubled(24) == [1, 2, 4, 8]
    assert search_live.doubled(1) == [1]


def test_the_fastest_of_the_trials_is_chosen_among_those_that_ran(tmp_path: Path):
    live: Any = search_live.Live(
        case="vision",
        budget_s=1.0,
        memory_limit_bytes=1,
        zygote=None,
        folder=tmp_path,  # type: ignore[arg-type]
    )
    chosen = search_live.fastest(live, [trial_of(SMALL, 5.0), trial_of(LARGE, 7.0), trial_of(BIG, None)], 12.0)
    assert chosen == Choice(config=LARGE, global_batch=32, seconds=12.0, tried=3)
    nothing = search_live.fastest(live, [trial_of(BIG, None)], 1.0)
    assert nothing.config is None and nothing.why_not == "no trial ran to its end"


def test_each_method_has_its_own_empty_compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    live: Any = search_live.Live(
        case="vision",
        budget_s=1.0,
        memory_limit_bytes=1,
        zygote=None,
        folder=tmp_path,  # type: ignore[arg-type]
    )
    monkeypatch.setenv(search_live.CACHE, "before")
    with live.fresh_cache("a") as first, live.fresh_cache("b") as second:
        assert first != second and os.environ[search_live.CACHE] == second[search_live.CACHE]
        assert not any(Path(os.environ[search_live.CACHE]).iterdir())
    assert os.environ[search_live.CACHE] == "before"


def test_a_library_that_is_missing_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert search_live.missing("lightning") == "lightning is not installed: pip install lightning"
    both = "deepspeed and tabulate are not installed: pip install deepspeed tabulate"
    assert search_live.missing("deepspeed") == both
    assert search_live.missing("autoplan") is None and search_live.missing("doubling") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert search_live.missing("trainer") is None


@pytest.mark.parametrize("case", CASES)
def test_each_case_trains_at_another_global_batch_too(case: str, tmp_path: Path):
    own, other = case_spec(case, tmp_path), case_spec(case, tmp_path, global_batch=6)
    assert (own.global_batch, other.global_batch) == (GLOBAL_BATCHES[case], 6)


HEAVY = """
import json, sys, torch
from autoplan.strategies.workloads.workload import LossSum, Workload
from benchmarks import search_peers

workload = Workload(
    name="2 MiB a sample",
    build_model=lambda: torch.nn.Linear(1, 1, bias=False),
    make_batch=lambda count, index: {"x": torch.ones(count, 1 << 19)},
    loss=lambda model, batch: LossSum((batch["x"] * model.weight).square().sum(), len(batch["x"])),
    build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-9),
    global_batch=64,
)
find, tried = search_peers.PEERS[sys.argv[1]](workload, sys.argv[2])
limit = search_peers.psutil.Process().memory_info().rss + (160 << 20)
search_peers.limit_memory(limit)
print(json.dumps([find(), tried]))
"""


@pytest.mark.parametrize("peer", ["accelerate", pytest.param("trainer", marks=pytest.mark.exhaustive)])
def test_a_real_finder_meets_the_memory_limit_and_shrinks_the_batch(peer: str, tmp_path: Path):
    pytest.importorskip("accelerate")
    ran = subprocess.run(
        [sys.executable, "-c", HEAVY, peer, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found, tried = json.loads(ran.stdout.splitlines()[-1])
    assert tried[0] == 64 and found == tried[-1] < 64  # 64 samples alone are 128 MiB, and the step needs several times
    assert tried == sorted(tried, reverse=True)
