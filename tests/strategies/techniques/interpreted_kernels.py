"""Kernels of Triton on CPU tensors (TRITON_INTERPRET=1), against torch's own operations. Run by test_gpu_kernels.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoplan.strategies.techniques import loss_kernels
from autoplan.strategies.techniques.loss_kernels import precomputed_cross_entropy
from autoplan.strategies.techniques.loss_kernels_gpu import (
    agrees,
    liger_cross_entropy,
    rows_cross_entropy_gpu,
    rows_in_place,
)


def head_case(rows: int, size: int, vocabulary: int, dtype: torch.dtype, *, bias: bool = False) -> Any:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    hidden = torch.randn(rows, size, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=generator).to(dtype).requires_grad_()
    beside = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[::5] = -100
    return hidden, weight, beside, targets


def gradients(loss: torch.Tensor, case: Any, scale: float = 0.37) -> list[torch.Tensor]:
    leaves = [one for one in case[:3] if one is not None]
    return [one.float() for one in torch.autograd.grad(loss * scale, leaves)]


def full(case: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    hidden, weight, bias, targets = case
    logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("vocabulary", [3, 50, 4096, 4097, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_in_place_are_torchs_cross_entropy(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (5 * torch.randn(6, vocabulary, generator=generator)).to(dtype)
    classes = torch.tensor([0, vocabulary - 1, -100, 1, 2, -100])
    leaf = logits.float().requires_grad_()
    expected = F.cross_entropy(leaf, classes, reduction="sum", ignore_index=-100)
    (gradient,) = torch.autograd.grad(expected, leaf)
    padded = F.pad(logits, (0, 7), value=123.0)  # numbers that must not be read
    loss, found = rows_in_place(padded, classes, vocabulary)
    assert found is padded, "the gradient lies in the place of the logits"
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    step = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]  # the interpreter cuts bits off
    torch.testing.assert_close(found[:, :vocabulary].float(), gradient, rtol=step, atol=1e-7)
    assert not found[:, vocabulary:].any() and not found[classes == -100].any()


def test_large_and_lonely_logits() -> None:
    """A sum that overflows without the largest number taken out; one class that has all; a masked class."""
    logits = torch.tensor([[3e4, 3e4 - 1, -3e4], [-3e4, 0.0, 3e4], [1.0, -torch.inf, 2.0]])
    classes = torch.tensor([1, 2, 0])
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, classes, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, leaf)
    loss, found = rows_in_place(logits.clone(), classes, 3)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("first", [4096, 8192, 8999])
def test_a_row_whose_first_blocks_are_all_masked(first: int) -> None:
    logits = torch.randn(2, 9000)
    logits[0, :first] = -torch.inf
    leaf, classes = logits.clone().requires_grad_(), torch.tensor([8999, 5])
    expected = F.cross_entropy(leaf, classes, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, leaf)
    loss, found = rows_in_place(logits.clone(), classes, 9000)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("wrong", [50, -1, 10**6])
def test_a_class_that_is_none_is_not_a_number_and_reads_nothing_else(wrong: int) -> None:
    loss, _ = rows_in_place(torch.randn(2, 50), torch.tensor([3, wrong]), 50)
    assert loss.isnan()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("vocabulary", [50, 64, 131])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_head(vocabulary: int, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernels, "chunk_rows", lambda vocabulary: 8)
    monkeypatch.setattr(loss_kernels, "in_place_rows", lambda vocabulary, dtype: 8)
    monkeypatch.setattr(loss_kernels, "ROW_MULTIPLE", {"cpu": 64})  # as the head is padded on CUDA
    case = head_case(37, 16, vocabulary, torch.float32, bias=bias)
    loss = rows_cross_entropy_gpu(*case, dtype=dtype)
    exact = full(case)
    tolerance = 2e-6 if dtype is torch.float32 else 1e-2
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=tolerance)
    for mine, theirs in zip(gradients(loss, case), gradients(exact, case), strict=True):
        assert mine.shape == theirs.shape and (mine - theirs).norm() <= 2 * tolerance * theirs.norm()
    torch_loss = precomputed_cross_entropy(*case, dtype=dtype)
    assert float(loss.detach()) == pytest.approx(float(torch_loss.detach()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ligers_operation_is_the_full_loss(dtype: torch.dtype) -> None:
    case = head_case(40, 32, 128, torch.float32, bias=True)
    loss, exact = liger_cross_entropy(*case, dtype=dtype), full(case)
    tolerance = 2e-6 if dtype is torch.float32 else 2e-2
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=tolerance)
    for mine, theirs in zip(gradients(loss, case), gradients(exact, case), strict=True):
        assert (mine - theirs).norm() <= 2 * tolerance * theirs.norm()


def test_both_agree_with_torchs_operations() -> None:
    for kernel in (rows_cross_entropy_gpu, liger_cross_entropy):
        assert agrees(functools.partial(kernel, dtype=torch.float32), torch.float32, torch.device("cpu"))
