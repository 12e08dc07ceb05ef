"""Summed cross-entropy of a linear head on CUDA: by torch's operations or Liger's, as timed there.

Liger's operation is used only after it agreed with torch's on this device, in this process; then each head gets the one
that took less time there. It pads no head, and makes the host wait in each micro-step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._guards import detect_fake_mode

from autoplan.strategies.techniques.loss_kernels import (
    Kernel,
    choose_kernel,
    limit_chunk_rows,
    precomputed_cross_entropy,
)
from autoplan.strategies.workloads.workload import IGNORE_INDEX

LARGEST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of gradients, relative to the largest, where Liger's are compared with torch's: a rounding each."""

TIMED_ROWS = 8192
"""Of hidden states, at most, on which kernels are timed."""

TIMED_RUNS = 3
"""Whose shortest counts: others of a machine's work only lengthen them."""


def choose_gpu_kernel(precision: str, *, compiled: bool) -> Kernel:
    """The kernel for a precision on CUDA; `compiled`: inside torch.compile, which fuses torch's operations by itself.

    In fp16 the gradients have to see the loss scale, which Liger's operation does not.
    """
    plain = choose_kernel(precision, compiled=compiled)
    if precision == "fp16" or compiled or importlib.util.find_spec("liger_kernel") is None:
        return plain
    return FastestKernel(plain, torch.bfloat16 if precision == "bf16" else torch.float32)


class FastestKernel:
    """A kernel that takes the fastest for each head: found by `choose`, else at its first call.

    Args:
        plain: torch's operations.
        dtype: Of the matmuls.
    """

    def __init__(self, plain: Kernel, dtype: torch.dtype) -> None:
        self.plain = plain
        self.dtype = dtype

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        *,
        cap: float | None = None,
    ) -> torch.Tensor:
        """The summed loss; capped logits by torch's operations, as under a trace, where nothing runs."""
        if cap is not None:
            return self.plain(hidden, weight, bias, targets, cap=cap)
        if detect_fake_mode() is not None:
            return self.plain(hidden, weight, bias, targets)
        return self.choose(weight, bias, hidden.shape[0])(hidden, weight, bias, targets)

    def choose(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> Kernel:
        """The fastest kernel for a head; asked before a run has activations, its timing takes no memory beside them.

        Args:
            weight, bias: Of the head; their numbers do not matter.
            rows: Of hidden states in a micro-batch, about.
        """
        key = tuple(weight.shape), bias is not None, self.dtype, weight.device
        if key not in _FASTEST:
            _FASTEST[key] = self.plain
            liger: Kernel = functools.partial(liger_cross_entropy, dtype=self.dtype)
            if agrees(liger, self.dtype, weight.device):
                sizes = min(rows, TIMED_ROWS), weight.shape[0], weight.shape[1]
                case = random_case(*sizes, bias is not None, self.dtype, weight.device)
                _FASTEST[key] = min((self.plain, liger), key=lambda kernel: seconds_of(kernel, case))
                if weight.device.type == "cuda":
                    torch.cuda.empty_cache()
        return _FASTEST[key]


_FASTEST: dict[Any, Kernel] = {}


def random_case(rows: int, vocabulary: int, size: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Any:
    """Hidden states, weight, bias or None, and targets, of which some are not counted."""
    shapes = (rows, size), (vocabulary, size), (vocabulary,)
    generator = torch.Generator(device).manual_seed(0)
    made = [torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(0, vocabulary, (rows,), generator=generator, device=device)
    targets[::7] = IGNORE_INDEX
    return *made[: 2 + bias], *([] if bias else [None]), targets


def loss_and_gradients(kernel: Kernel, case: Any) -> list[torch.Tensor]:
    """Of a kernel on a case of `random_case`; the loss is halved, as the count of a batch divides it."""
    loss = kernel(*case)
    leaves = [one for one in case[:3] if one is not None]
    return [loss.detach(), *torch.autograd.grad(loss * 0.5, leaves)]


def seconds_of(kernel: Kernel, case: Any) -> float:
    """The shortest time of a kernel's forward and backward on a case; infinite where it fails."""
    device = case[0].device
    found = []
    try:
        for _ in range(1 + TIMED_RUNS):  # the first compiles
            began = time.perf_counter()
            loss_and_gradients(kernel, case)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - began)
    except RuntimeError:  # no memory for this one
        return float("inf")
    return min(found[1:])


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


_AGREED: dict[Any, bool] = {}


def agrees(kernel: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel runs here and agrees with torch's operations, in loss and gradients; asked once per process.

    Asked with several chunks of rows, of which the last is partly filled, and more logits than a block has. Asked
    without TF32, whatever the process has set: its rounding (2^-11 of a number) is larger than the difference that is
    allowed in fp32, and one kernel's matmuls may take it where another's do not.
    """
    key = getattr(kernel, "func", kernel), dtype, device
    if key not in _AGREED:
        try:
            case = random_case(40, 4227, 32, True, dtype, device)
            plain = functools.partial(precomputed_cross_entropy, dtype=dtype)
            with full_fp32(), limit_chunk_rows(16):
                pairs = zip(*(loss_and_gradients(one, case) for one in (plain, kernel)), strict=True)
            most = LARGEST_DIFFERENCE[dtype]
            _AGREED[key] = all(float((a - b).abs().max()) <= most * float(a.abs().max()) for a, b in pairs)
        except Exception:  # no compiler, a chip that it does not know: torch's operations are used
            _AGREED[key] = False
    return _AGREED[key]


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
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
