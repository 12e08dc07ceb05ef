"""The cost model beside what one H100 measured (benchmarks/results/h100)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.cost.traced.estimator import Estimator
from autoplan.planner.cost.traced.rates import from_device
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.planner.trace.model_profile import TraceRequest, variants_to_trace
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import load_workload, make_spec

HARDWARE = Path(__file__).resolve().parents[4] / "benchmarks/results/h100/hardware.json"

MEASURED: dict[str, tuple[dict[str, Any], float, float]] = {
    "plain fp32": ({}, 0.688, 57.8),
    "bf16": ({"precision": "bf16", "optimizer_step": "fused"}, 0.238, 47.3),
    "compiled blocks": ({"precision": "fp16", "compile": "block"}, 0.158, 39.0),
    "fused loss": ({"precision": "bf16", "optimizer_step": "fused", "loss": "fused"}, 0.168, 28.0),
    "compiled blocks, fused loss": (
        {"precision": "bf16", "optimizer_step": "fused", "loss": "fused", "compile": "block"},
        0.0787,
        13.5,
    ),
}
"""Seconds of a step of GPT-2 124M, 32 sequences of 1,024 tokens, and GiB at the peak: gpt2_240s.txt, gpt2_300s.txt."""

PLAIN = TrainingConfig(micro_batch=32)

SECONDS, MEMORY, MEMORY_FUSED_LOSS = 0.15, 0.15, 0.3
"""The largest errors. The last row has set two constants of the model (FUSED_PASSES, FUSED_LOSS_BYTES)."""


@pytest.fixture(scope="module")
def hardware() -> HardwareProfile:
    return HardwareProfile.model_validate_json(HARDWARE.read_text())


@pytest.fixture(scope="module")
def estimator(hardware: HardwareProfile) -> Estimator:
    """Of the variants that the configurations below read."""
    configs = [PLAIN.model_copy(update=knobs) for knobs, *_ in MEASURED.values()]
    request = TraceRequest(variants=variants_to_trace(configs, has_blocks=True))
    profile = profile_workload(load_workload(make_spec(model="gpt2")), "cuda", identity="gpt2", request=request)
    return Estimator(profile, hardware, device="cuda", global_batch=32, memory_limit_bytes=74 << 30)


@pytest.mark.parametrize("name", MEASURED)
def test_a_step_and_its_memory_are_predicted_before_anything_runs(estimator: Estimator, name: str):
    knobs, seconds, gib = MEASURED[name]
    (prediction,) = estimator.estimate([PLAIN.model_copy(update=knobs)])
    assert prediction.step_time_s == pytest.approx(seconds, rel=SECONDS)
    assert prediction.peak_memory_bytes / 2**30 == pytest.approx(
        gib, rel=MEMORY_FUSED_LOSS if "loss" in knobs else MEMORY
    )


def test_a_head_whose_size_is_not_aligned_is_faster_compiled_as_a_whole(estimator: Estimator):
    """Inductor pads its operands; compiled blocks leave the head as it is."""
    config = PLAIN.model_copy(update={"precision": "bf16", "optimizer_step": "fused", "compile": "block"})
    blocks, whole = estimator.estimate([config, config.model_copy(update={"compile": "model"})])
    assert whole.step_time_s < 0.75 * blocks.step_time_s


def test_products_that_are_not_aligned_are_slow_in_the_formats_of_tensor_cores_alone(hardware: HardwareProfile):
    rates = from_device(hardware.device("cuda"))
    assert rates.matmul_fit("float32").misaligned == pytest.approx(1.0, abs=0.1)
    assert rates.matmul_fit("tf32").misaligned == pytest.approx(2.8, rel=0.15)
    assert rates.matmul_fit("bfloat16").misaligned == pytest.approx(7.3, rel=0.15)
