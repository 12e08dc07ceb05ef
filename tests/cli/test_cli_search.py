"""autoplan search as a person runs it: a tiny model, for real, then again from its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.plan.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("probed_machine")]
ROOT = Path(__file__).resolve().parents[2]
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


class Searches:
    """One folder with a tiny model and a store, in which commands are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tiny.json").write_text(json.dumps(TINY))

    def run(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        home = {"XDG_STATE_HOME": str(self.folder / "state"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        module = "tests.time_box" if arguments[0] == "search" else "autoplan"
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, **home}, capture_output=True, text=True, timeout=400
        )
        assert code is None or done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    def search(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        fixed = ("--model", "tiny.json", "--global-batch", "8", "--fix", "compile=off", "--seq-len", "16")
        done = self.run("search", *fixed, *arguments, "--json", code=code)
        document: dict[str, Any] = json.loads(done.stdout)
        return document


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> Searches:
    return Searches(tmp_path_factory.mktemp("searches"))


@pytest.fixture(scope="module")
def found(searches: Searches) -> dict[str, Any]:
    return searches.search("--budget", "60s", "--max-trials", "3")


def test_the_document(searches: Searches, found: dict[str, Any]) -> None:
    assert found["schema_version"] == 1 and found["status"] == "plan_found"
    assert {"baseline", "plan", "trials", "left_out"} <= set(found)
    for trial in found["trials"]:
        wanted = {"config", "outcome", "reason", "phase", "tokens_per_s", "step_time_s", "peak_memory_bytes"}
        assert wanted | {"seconds_spent", "resumed"} <= set(trial)
        assert not trial["resumed"]
        if trial["outcome"] == "ok":
            assert set(trial["tokens_per_s"]) == {"median", "low", "high", "samples"}
    assert found["baseline"]["config"]["precision"] == "fp32"
    assert all({"family", "limit", "by"} <= set(family) for family in found["left_out"])
    plan = Plan.load(searches.folder / "plan.json")
    assert plan == Plan.model_validate(found["plan"]) and plan.parity.passed
    assert plan.config.micro_batch * plan.accumulation == 8


def test_the_same_command_answers_from_its_record(searches: Searches, found: dict[str, Any]) -> None:
    again = searches.search("--budget", "60s", "--max-trials", "3")
    assert again["from_record"] and again["status"] == "plan_found"
    assert [t["number"] for t in again["trials"]] == [t["number"] for t in found["trials"]]
    assert all(trial["resumed"] for trial in again["trials"])


def test_a_dry_run_runs_nothing(searches: Searches) -> None:
    fixed = ("--model", "tiny.json", "--global-batch", "8", "--seq-len", "16", "--fix", "compile=off")
    done = searches.run("search", *fixed, "--dry-run", "--out", "dry.json")
    assert "configurations; the" in done.stdout and "dry run" in done.stderr
    assert not (searches.folder / "dry.json").exists()


def test_a_limit_in_which_nothing_fits_ends_with_3(searches: Searches) -> None:
    document = searches.search("--memory-limit", "1MiB", code=3)
    assert document["status"] == "no_feasible_plan" and document["reason"] and document["hint"]


def test_the_plan_runs_verifies_and_exports(searches: Searches, found: dict[str, Any]) -> None:
    ran = json.loads(searches.run("run", "--steps", "2", "--json").stdout)
    assert len(ran["steps"]) == 2 and ran["tokens_per_s"] > 0
    done = searches.run("verify", "--budget", "5s", "--json", code=None)  # how fast it is depends on what else runs
    checked = json.loads(done.stdout)
    assert checked["status"] == "verified" and checked["other_hardware"] is None
    assert {"parity", "trial", "plan_measured", "speed_ratio", "causes", "spread"} <= set(checked)
    assert "1 of 2: the parity check" in done.stderr and "2 of 2: the measurement" in done.stderr
    assert checked["verdict"] in ("holds", "faster", "slower") and checked["exit_code"] == done.returncode
    assert (done.returncode != 0) == (checked["verdict"] == "slower")
    done = searches.run("verify", "--budget", "2s", "--memory-limit", "32MiB", code=3)
    assert "does not fit" in done.stderr and "--memory-limit" in done.stderr
    searches.run("export", "--to", "pytorch", "--out", "train.py")
    done = subprocess.run(
        [sys.executable, "train.py", "--steps", "2"], cwd=searches.folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and "step 2: loss" in done.stdout, done.stderr[-2000:]
    searches.run("report", "--out", "page.html")
    assert "Baseline against plan" in (searches.folder / "page.html").read_text()
    assert "Baseline against plan" in searches.run("show").stdout
