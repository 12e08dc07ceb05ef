"""Which kernel loss=fused takes on CUDA; the numbers of Liger's are Triton's interpreter's (test_kernels.py)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.strategies.techniques import loss_kernels
from autoplan.strategies.techniques.loss import kernel_on
from autoplan.strategies.techniques.loss_kernels import (
    FastestKernel,
    agrees,
    choose_kernel,
    precomputed_cross_entropy,
    random_case,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(("precision", "compiled"), [("fp16", False), ("bf16", True)])
def test_fp16_and_compiled_runs_keep_torchs_operations(
    precision: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_kernels.importlib.util, "find_spec", lambda name: name)
    assert isinstance(kernel_on(torch.device("cuda"), "bf16", compiled=False), FastestKernel)
    assert not isinstance(kernel_on(torch.device("cuda"), precision, compiled=compiled), FastestKernel)
    monkeypatch.setattr(loss_kernels.importlib.util, "find_spec", lambda name: None)
    assert not isinstance(kernel_on(torch.device("cuda"), "bf16", compiled=False), FastestKernel)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels ran: Liger's, for which torch's operations stand in here."""
    names: list[str] = []

    def stand_in(name: str, *case: Any, dtype: torch.dtype) -> torch.Tensor:
        names.append(name)
        return precomputed_cross_entropy(*case, dtype=dtype)

    monkeypatch.setattr(loss_kernels, "liger_cross_entropy", functools.partial(stand_in, "liger_cross_entropy"))
    monkeypatch.setattr(loss_kernels, "_AGREED", {})
    monkeypatch.setattr(loss_kernels, "_FASTEST", {})
    monkeypatch.setattr(loss_kernels.importlib.util, "find_spec", lambda name: name)
    return names


def name_of(kernel: Any) -> str:
    while isinstance(kernel, functools.partial):
        kernel = kernel.args[0] if kernel.args else kernel.func
    return kernel if isinstance(kernel, str) else "torch"


@pytest.mark.parametrize("fastest", ["torch", "liger_cross_entropy"])
def test_a_head_gets_the_kernel_that_took_the_least_time(
    fastest: str, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def seconds_of(kernel: Any, case: Any) -> float:
        timed.append(name_of(kernel))
        return 1.0 if name_of(kernel) == fastest else 2.0

    monkeypatch.setattr(loss_kernels, "seconds_of", seconds_of)
    kernel = FastestKernel(choose_kernel("fp32", compiled=False), torch.float32)
    hidden, weight, bias, targets = random_case(12, 40, 8, True, torch.float32, CPU)
    plain = kernel.plain(hidden, weight, bias, targets)
    kernel.choose(weight, bias, 12)
    assert sorted(timed) == ["liger_cross_entropy", "torch"]
    called.clear()
    assert float(kernel(hidden, weight, bias, targets).detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert called == ([] if fastest == "torch" else [fastest])
    assert len(timed) == 2, "a head is timed once"
    kernel(hidden, weight, None, targets)
    assert len(timed) == 4, "another head is timed too"


def test_capped_logits_and_a_trace_take_torchs_operations(called: list[str]) -> None:
    kernel = FastestKernel(choose_kernel("fp32", compiled=False), torch.float32)
    case = random_case(12, 40, 8, False, torch.float32, CPU)
    assert kernel(*case, cap=3.0).isfinite()
    with FakeTensorMode(allow_non_fake_inputs=True):
        kernel(*random_case(12, 40, 8, False, torch.float32, CPU))
    assert not called


def test_a_kernel_that_is_wrong_or_fails_is_not_taken(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no kernel for this chip")

    def counts_what_is_ignored(hidden: Any, weight: Any, bias: Any, targets: Any, **options: Any) -> torch.Tensor:
        return precomputed_cross_entropy(hidden, weight, bias, targets.clamp(min=0), **options)

    def first_chunk_alone(hidden: Any, weight: Any, bias: Any, targets: Any, **options: Any) -> torch.Tensor:
        return precomputed_cross_entropy(hidden[:16], weight, bias, targets[:16], **options)

    for wrong in (fails, counts_what_is_ignored, first_chunk_alone):
        assert not agrees(functools.partial(wrong, dtype=torch.float32), torch.float32, CPU)
        monkeypatch.setattr(loss_kernels, "liger_cross_entropy", wrong)
        kernel = FastestKernel(choose_kernel("fp32", compiled=False), torch.float32)
        _, weight, bias, _ = random_case(1, 40, 8, True, torch.float32, CPU)
        assert kernel.choose(weight, bias, 12) is kernel.plain
        loss_kernels._FASTEST.clear()


@pytest.mark.parametrize("interface", ["older", "newer"])
def test_kernels_are_compared_without_tf32_which_is_put_back(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    seen = []

    def kernel(*args: object, **options: object) -> torch.Tensor:
        seen.append((torch.get_float32_matmul_precision(), matmul.fp32_precision, matmul.allow_tf32))
        return precomputed_cross_entropy(*args, **options, dtype=torch.float32)  # type: ignore[arg-type]

    monkeypatch.setattr(loss_kernels, "_AGREED", {})
    try:
        if interface == "older":
            torch.set_float32_matmul_precision("high")
        else:
            matmul.fp32_precision = "tf32"
        assert agrees(kernel, torch.float32, CPU)
        assert seen == [("highest", "ieee", False)] and matmul.fp32_precision == "tf32"
        if interface == "older":
            assert torch.get_float32_matmul_precision() == "high" and matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
