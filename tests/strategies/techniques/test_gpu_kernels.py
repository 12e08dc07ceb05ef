"""The kernels of loss=fused on CUDA: as numbers, by Triton's interpreter; as programs, compiled for two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoplan.strategies.techniques import loss_kernels_gpu
from autoplan.strategies.techniques.loss import kernel_on
from autoplan.strategies.techniques.loss_kernels import precomputed_cross_entropy, recomputed_cross_entropy
from tests.exports.environments import needs_environment, run_python

HERE = Path(__file__).parent
environment = [*needs_environment("kernels"), pytest.mark.slow]


def marked(function):  # type: ignore[no-untyped-def]
    for mark in environment:
        function = mark(function)
    return function


@marked
def test_the_numbers_by_tritons_interpreter() -> None:
    file = HERE / "interpreted_kernels.py"
    done = run_python("kernels", ["-m", "pytest", "-q", "--no-header", file], env={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@marked
def test_the_kernel_compiles_for_gpus_that_are_not_here() -> None:
    done = run_python("kernels", [HERE / "compiled_kernels.py"])
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all(line.endswith("True True") for line in lines)


def test_fp16_and_compiled_runs_keep_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert kernel_on(cuda, "fp16", compiled=False) is recomputed_cross_entropy
    monkeypatch.setattr(loss_kernels_gpu, "agrees", lambda kernel, dtype: True)
    monkeypatch.setattr(loss_kernels_gpu.importlib.util, "find_spec", lambda name: name)
    chosen = kernel_on(cuda, "bf16", compiled=False)
    assert chosen.func is loss_kernels_gpu.gpu_cross_entropy  # type: ignore[attr-defined]
    assert chosen.keywords == {"dtype": torch.bfloat16, "liger": True}  # type: ignore[attr-defined]
    compiled = kernel_on(cuda, "bf16", compiled=True)
    assert compiled.func is not loss_kernels_gpu.gpu_cross_entropy  # type: ignore[attr-defined]
    monkeypatch.setattr(loss_kernels_gpu.importlib.util, "find_spec", lambda name: None)
    without = kernel_on(cuda, "bf16", compiled=False)
    assert without.func is not loss_kernels_gpu.gpu_cross_entropy  # type: ignore[attr-defined]


@pytest.mark.parametrize("interface", ["older", "newer"])
def test_kernels_are_compared_without_tf32_which_is_put_back(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    seen = []

    def kernel(*args: object, **options: object) -> torch.Tensor:
        seen.append((torch.get_float32_matmul_precision(), matmul.fp32_precision, matmul.allow_tf32))
        return precomputed_cross_entropy(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loss_kernels_gpu, "_AGREED", {})
    try:
        if interface == "older":
            torch.set_float32_matmul_precision("high")
        else:
            matmul.fp32_precision = "tf32"
        assert loss_kernels_gpu.agrees(kernel, torch.float32, "cpu")
        assert seen == [("highest", "ieee", False)] and matmul.fp32_precision == "tf32"
        if interface == "older":
            assert torch.get_float32_matmul_precision() == "high" and matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
