"""Summed cross-entropy of a linear head on CUDA: our Triton kernel for the rows of logits, or Liger's fused operation.

A chunk's logits come out of a matmul in the precision of the run. One kernel then reads each row twice: once for its
log-sum-exp (online: the largest number so far, and the sum of exponentials relative to it; Milakov and Gimelshein,
arXiv:1805.02867), once to write the gradient, softmax less one-hot, over the logits. torch's own operations pass over
an fp32 copy of the chunk some ten times. What is summed is summed in fp32, as in `loss_kernels.py`, whose chunks,
padding of the head and fp32 weight gradient stay.

Liger's operation is taken where it is installed and the head needs no padding: it knows none, and a matmul with an odd
number of rows is slow. Either is used only after it agreed with torch's operations on this device, in this process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._guards import detect_fake_mode

from autoplan.strategies.techniques.loss_kernels import (
    Kernel,
    choose_kernel,
    padded_rows,
    precomputed_cross_entropy,
)
from autoplan.strategies.workloads.workload import IGNORE_INDEX

tl: Any = None  # triton.language, once `_compiled_row_kernel` has run

LARGEST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of gradients, relative to the largest, where a kernel is compared with torch's operations: a rounding each."""


def choose_gpu_kernel(precision: str, *, compiled: bool) -> Kernel:
    """The kernel for a precision on CUDA; `compiled`: inside torch.compile, which fuses torch's operations by itself.

    In fp16 the gradients have to see the loss scale, which neither Liger's operation nor ours does.
    """
    if precision == "fp16" or compiled or importlib.util.find_spec("triton") is None:
        return choose_kernel(precision, compiled=compiled)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if not agrees(rows_cross_entropy_gpu, dtype):
        return choose_kernel(precision, compiled=compiled)
    return functools.partial(gpu_cross_entropy, dtype=dtype, liger=has_liger() and agrees(liger_cross_entropy, dtype))


def has_liger() -> bool:
    """Whether Liger's kernels are installed (`pip install liger-kernel`)."""
    return importlib.util.find_spec("liger_kernel") is not None


def gpu_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    dtype: torch.dtype,
    liger: bool,
    cap: float | None = None,
) -> torch.Tensor:
    """Liger's operation where `liger` and the head allow it, else our kernel; capped logits by torch's operations."""
    if liger and cap is None and padded_rows(weight.shape[0], "cuda") == weight.shape[0]:
        return liger_cross_entropy(hidden, weight, bias, targets, dtype=dtype)
    return rows_cross_entropy_gpu(hidden, weight, bias, targets, dtype=dtype, cap=cap)


def rows_cross_entropy_gpu(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    dtype: torch.dtype,
    cap: float | None = None,
) -> torch.Tensor:
    """`precomputed_cross_entropy` with our kernel for each chunk's rows."""
    own = None if cap is not None else rows_in_place
    return precomputed_cross_entropy(hidden, weight, bias, targets, dtype=dtype, cap=cap, of_logits=own)


def liger_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Liger's fused linear cross-entropy, matmuls in `dtype`, the weight gradient added up in fp32."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    with torch.autocast(hidden.device.type, enabled=False):
        loss: torch.Tensor = liger_fused_linear_cross_entropy(
            hidden.to(dtype),
            weight.to(dtype),
            targets,
            bias=None if bias is None else bias.to(dtype),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            accum_dtype=torch.float32,
        )
    return loss


def rows_in_place(
    logits: torch.Tensor, classes: torch.Tensor, vocabulary: int, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of rows of logits in fp32, and its gradient, written over the logits in their own type.

    Args:
        logits: (rows, at least vocabulary), contiguous rows; columns past the vocabulary are padding.
        classes: (rows,), whole numbers; IGNORE_INDEX is not counted. One outside of the vocabulary gives NaN.
        vocabulary: Columns that count.
        cap: None: this kernel caps nothing.
    """
    assert cap is None and logits.stride(1) == 1
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        _compiled_row_kernel()[(logits.shape[0],)](
            logits,
            classes.contiguous(),
            losses,
            logits.stride(0),
            vocabulary,
            logits.shape[1],
            IGNORE_INDEX,
            BLOCK=4096,
            num_warps=8,
        )
    return losses.sum(), logits


@functools.cache
def _compiled_row_kernel() -> Any:
    global tl
    import triton
    import triton.language

    tl = triton.language
    return triton.jit(_row_kernel)


def _row_kernel(logits, classes, losses, stride, vocabulary, width, ignored, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    picked = tl.load(classes + row)
    own_row = logits + row * stride
    counted = picked != ignored
    known = (picked >= 0) & (picked < vocabulary)
    own = tl.load(own_row + picked, mask=known, other=float("nan")).to(tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(own_row + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    log_total = tl.log(total)  # of log-sum-exp, what is beyond the largest: apart, so that large logits lose no bits
    tl.store(losses + row, tl.where(counted, log_total + (largest - own), 0.0))
    tl.debug_barrier()  # all have read the row's own logit, which is about to be written over
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(own_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp((x - largest) - log_total) - tl.where(columns == picked, 1.0, 0.0)
        gradient = tl.where(inside & counted, gradient, 0.0)
        tl.store(own_row + columns, gradient.to(logits.dtype.element_ty), mask=columns < width)


_AGREED: dict[tuple[Any, torch.dtype], bool] = {}


def agrees(kernel: Callable[..., torch.Tensor], dtype: torch.dtype, device: str = "cuda") -> bool:
    """Whether a kernel runs here and agrees with torch's operations, in loss and gradients; asked once per process.

    Asked without TF32, whatever the process has set: its rounding (2^-11 of a number) is larger than the difference
    that is allowed in fp32, and one kernel's matmuls may take it where another's do not.
    """
    if detect_fake_mode() is not None:
        return False  # a trace: nothing runs, and torch's operations can be counted
    key = kernel, dtype
    if key not in _AGREED:
        try:
            with _full_fp32():
                _AGREED[key] = _agree(kernel, dtype, device)
        except Exception:  # no compiler, a chip that it does not know: torch's operations are used
            _AGREED[key] = False
    return _AGREED[key]


@contextlib.contextmanager
def _full_fp32() -> Iterator[None]:
    """fp32 matmuls in fp32 inside; afterwards as the process had them, by whichever of torch's two interfaces.

    Set through the older one, which sets the newer along: after the newer alone, torch's getters raise.
    """
    modes: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    newer = [(mode, mode.fp32_precision) for mode in modes]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer interface has been used since
        older = "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for mode, precision in newer:
            mode.fp32_precision = precision


def _agree(kernel: Callable[..., torch.Tensor], dtype: torch.dtype, device: str) -> bool:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 192, (48,), generator=generator)
    targets[::7] = IGNORE_INDEX
    found = []
    for one in (precomputed_cross_entropy, kernel):
        generator.manual_seed(1)
        hidden, weight = (torch.randn(rows, 32, generator=generator).to(device).requires_grad_() for rows in (48, 192))
        loss = one(hidden, weight, None, targets.to(device), dtype=dtype)
        found.append((loss.detach(), *torch.autograd.grad(loss * 0.5, [hidden, weight])))
    pairs = list(zip(*found, strict=True))
    return all(float((a - b).abs().max()) <= LARGEST_DIFFERENCE[dtype] * float(a.abs().max()) for a, b in pairs)
