"""autoplan search as a person runs it: a tiny model, for real, then what is done with its plan.

The commands run in this process: each of their own would import torch for seconds. That they also run as processes is
in test_cli_ends.py, test_cli_run.py and the tutorial (tests/examples); exported scripts train in tests/exports.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.plan.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_searches")]
TINY = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 128,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
WORKLOAD = ("--model", "tiny.json", "--global-batch", "8", "--seq-len", "16", "--fix", "compile=off")
LOOKS = ("--budget", "60s", "--max-trials", "3", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tiny model and a store; what one test finds there the next one reads."""
    made = tmp_path_factory.mktemp("searches")
    (made / "tiny.json").write_text(json.dumps(TINY))
    return made


@pytest.fixture
def command(cli: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command in the folder; its end, or its document where it prints one."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))

    def run(*arguments: str, code: int | None = 0) -> Any:
        done = cli(*arguments)
        assert code is None or done.code == code, done.out[-2000:] + done.err[-4000:]
        return json.loads(done.out) if "--json" in arguments and code is not None else done

    return run


def test_a_search_its_record_and_what_is_done_with_its_plan(command: Any, folder: Path) -> None:
    found = command("search", *WORKLOAD, *LOOKS)
    assert found["schema_version"] == 1 and found["status"] == "plan_found"
    assert {"baseline", "plan", "trials", "left_out"} <= set(found)
    for trial in found["trials"]:
        wanted = {"config", "outcome", "reason", "phase", "tokens_per_s", "step_time_s", "peak_memory_bytes"}
        assert wanted | {"seconds_spent", "resumed"} <= set(trial)
        assert not trial["resumed"]
        if trial["outcome"] == "ok":
            assert set(trial["tokens_per_s"]) == {"median", "low", "high", "samples"}
    assert found["baseline"]["config"]["precision"] == "fp32" and found["baseline_is_your_setting"] is False
    assert all({"family", "limit", "by"} <= set(family) for family in found["left_out"])
    plan = Plan.load(folder / "plan.json")
    assert plan == Plan.model_validate(found["plan"]) and plan.parity.passed
    assert plan.config.micro_batch * plan.accumulation == 8

    again = command("search", *WORKLOAD, *LOOKS)
    assert again["from_record"] and again["status"] == "plan_found"
    assert [t["number"] for t in again["trials"]] == [t["number"] for t in found["trials"]]
    assert all(trial["resumed"] for trial in again["trials"])

    done = command("verify", "--budget", "5s", "--json", code=None)  # how fast it is depends on what else runs
    checked = json.loads(done.out)
    assert checked["status"] == "verified" and checked["other_hardware"] is None
    assert {"parity", "trial", "plan_measured", "speed_ratio", "causes", "spread"} <= set(checked)
    assert "1 of 2: the parity check" in done.err and "2 of 2: the measurement" in done.err
    assert checked["verdict"] in ("holds", "faster", "slower") and checked["exit_code"] == done.code
    assert (done.code != 0) == (checked["verdict"] == "slower")
    done = command("verify", "--budget", "2s", "--memory-limit", "32MiB", code=3)
    assert "does not fit" in done.err and "--memory-limit" in done.err

    command("report", "--out", "page.html")
    assert "Baseline against plan" in (folder / "page.html").read_text()
    assert "Baseline against plan" in command("show").out
    command("export", "--to", "pytorch", "--out", "train.py")
    assert "def train_step" in (folder / "train.py").read_text()
    assert "tokens/s" in command("run", "--steps", "2").out


def test_a_dry_run_runs_nothing(command: Any, folder: Path) -> None:
    done = command("search", *WORKLOAD, "--dry-run", "--store", "dry", "--out", "dry.json")
    assert "configurations; the" in done.out and "dry run" in done.err
    assert not (folder / "dry.json").exists() and not (folder / "dry").exists()


def test_a_baseline_that_is_not_possible_is_refused_before_anything_is_measured(command: Any) -> None:
    done = command("search", *WORKLOAD, "--store", "refused", "--baseline", "micro_batch=3,precision=bf16", code=2)
    assert "micro_batch=3 does not divide the global batch of 8" in done.err and "--baseline plain" in done.err
    assert "space:" not in done.err and "tracing" not in done.err


def test_a_limit_in_which_nothing_fits_ends_with_3(command: Any) -> None:
    document = command("search", *WORKLOAD, *LOOKS, "--memory-limit", "300MiB", code=3)
    assert document["status"] == "no_feasible_plan" and document["hint"] and document["trials"] == []
    assert "300 MiB" in document["reason"] and document["left_out"]
