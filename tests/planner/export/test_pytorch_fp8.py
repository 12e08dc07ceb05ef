"""The PyTorch script of a plan with products in fp8, run in torch's slow kernel for a CPU beside the plan's own run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoplan.planner.export.run import export_plan
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques import fp8
from tests.planner.export.test_pytorch_script import STEPS, guard_against_autoplan, run_plan, tiny_plan

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 2064,  # large enough for both recipes beside 1040 inputs; for tensorwise beside 32 too
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.mark.slow
@pytest.mark.torchao
@pytest.mark.parametrize("micro_batch", [4, 1])
def test_the_script_trains_as_the_plan_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, micro_batch: int) -> None:
    monkeypatch.setattr(fp8, "_reason_against_chip", lambda *_: None)  # all else is as on a GPU
    plan = tiny_plan(tmp_path, TrainingConfig(micro_batch=micro_batch, precision="bf16", fp8="tensorwise"), LLAMA)
    (path,) = export_plan(plan, "pytorch", tmp_path / "train.py").paths
    text = path.read_text()
    assert "FP8 = 'tensorwise'" in text and "use_fp8(model, in_fp8, FP8)" in text
    guard_against_autoplan(tmp_path)
    places = [str(tmp_path / "guard"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), "--steps", str(STEPS)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = run_plan(plan)
    assert [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)] == pytest.approx(wanted, rel=1e-5)
    plain = run_plan(plan.model_copy(update={"config": plan.config.model_copy(update={"fp8": "off"})}))
    assert wanted != pytest.approx(plain, rel=1e-6), "something ran in fp8"
