"""The examples run as a person would run them, small."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("probed_machine")]
ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *command: str) -> str:
    """What a command prints, started in a folder of its own."""
    home = {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **home}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses(text: str) -> dict[int, float]:
    """Step number to loss."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


def test_train_gpt2_searches_trains_and_resumes(tmp_path: Path) -> None:
    small = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq-len", "32", "--global-batch", "8"]
    small += ["--budget", "30s", "--max-trials", "2", "--fix", "compile=off", "--device", "cpu"]
    small += ["--data", str(tmp_path), "--learning-rate", "0.01", "--total-steps", "40"]
    script = str(ROOT / "examples" / "train_gpt2.py")
    whole = run(tmp_path, script, *small, "--steps", "12", "--checkpoint", "whole.pt")
    assert losses(whole)[1] == pytest.approx(5.6, abs=0.3), "a random model over 256 bytes starts near ln 256"
    assert losses(whole)[12] < losses(whole)[1] - 0.5, "it learns"
    run(tmp_path, script, *small, "--steps", "7", "--checkpoint", "parts.pt")
    resumed = run(tmp_path, script, *small, "--steps", "5", "--checkpoint", "parts.pt")
    assert "made before" in resumed and "resumed at step 7" in resumed
    for step, loss in losses(resumed).items():
        assert loss == pytest.approx(losses(whole)[step], abs=2e-4), f"step {step} differs after resuming"


def test_image_classifier_is_planned(tmp_path: Path) -> None:
    workload = str(ROOT / "examples" / "image_classifier.py") + ":tiny_classifier"
    command = ["-m", "autoplan", "search", "--model", workload, "--budget", "30s", "--max-trials", "2", "--json"]
    document = json.loads(run(tmp_path, *command, "--fix", "compile=off", "--device", "cpu"))
    assert document["status"] == "plan_found" and document["plan"]["workload"]["unit"] == "samples"
    assert document["plan"]["parity"]["passed"] and document["plan"]["workload"]["global_batch"] == 16
    run(tmp_path, "-m", "autoplan", "run", "--steps", "2")


def test_the_tutorial_searches_trains_and_resumes(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "tutorial.py")
    search = ["-m", "autoplan", "search", "--model", f"{script}:workload", "--global-batch", "8", "--budget", "30s"]
    run(tmp_path, *search, "--max-trials", "2", "--fix", "compile=off", "--device", "cpu", "--out", "plan.json")
    whole = run(tmp_path, script, "--steps", "40", "--checkpoint", "whole.pt")
    assert losses(whole)[20] < 5.0, "it begins near ln 256 = 5.5, and learns"
    run(tmp_path, script, "--steps", "20", "--checkpoint", "parts.pt")
    resumed = run(tmp_path, script, "--steps", "20", "--checkpoint", "parts.pt")
    assert "resumed at step 20" in resumed
    assert losses(resumed)[40] == pytest.approx(losses(whole)[40], abs=2e-4), "the loss differs after resuming"
