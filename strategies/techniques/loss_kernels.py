"""Summed cross-entropy of a linear head without all logits at once: torch's own operation, and two of ours.

torch's chunked linear_cross_entropy (2.13) is used in fp32. In bf16 it returns the sum itself in bf16, which is off
by up to 0.4 % (measured), so this file has the same algorithm with an fp32 sum and an fp32 weight gradient. All
take the gradients of a chunk while its logits are there: three matmuls, as the full loss has. In fp16 the gradients
must see the loss scale, which the forward does not know: chunks with recomputation, four matmuls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoplan.strategies.workloads.workload import IGNORE_INDEX

Kernel = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor], torch.Tensor]
"""(hidden (rows, size), weight (vocabulary, size), bias or None, targets (rows,)) -> the summed loss in fp32."""

_CHUNK_ELEMENTS = 2**27  # logits held at once: 512 MiB in fp32, enough rows for matmuls at full rate


def choose_kernel(precision: str, *, compiled: bool) -> Kernel:
    """The kernel for a precision; `compiled`: it runs inside torch.compile."""
    if precision == "fp16":
        return recomputed_cross_entropy
    if precision == "bf16":
        return functools.partial(precomputed_cross_entropy, dtype=torch.bfloat16)
    if has_torch_kernel():
        return functools.partial(_torch_kernel, keep_graph=compiled)
    return functools.partial(precomputed_cross_entropy, dtype=torch.float32)


def has_torch_kernel() -> bool:
    """Whether this torch has the chunked linear_cross_entropy."""
    return hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


def chunk_rows(vocabulary: int) -> int:
    """Rows of logits held at once: a power of two, at least 256; no more than `limit_chunk_rows` allows."""
    return limited_rows(max(256, 1 << (_CHUNK_ELEMENTS // vocabulary).bit_length() - 1))


def limited_rows(rows: int) -> int:
    """The number of rows, or what `limit_chunk_rows` allows where that is less."""
    return rows if _most_rows is None else min(rows, _most_rows)


_most_rows: int | None = None


@contextlib.contextmanager
def limit_chunk_rows(rows: int | None) -> Iterator[None]:
    """Has every fused loss of this process take at most so many rows at once; None: no limit.

    The parity check uses it: its batches are small, and a mistake in a later chunk needs several chunks to show.
    """
    global _most_rows
    before, _most_rows = _most_rows, rows
    try:
        yield
    finally:
        _most_rows = before


def _torch_kernel(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    keep_graph: bool,
) -> torch.Tensor:
    # keep_graph: torch forces it under compile, with a warning, since its guard against a second backward is lost
    # chunks of our size: torch's own choice, 16 rows for GPT-2 at 1 x 1024, is three times slower (measured on a CPU)
    rows_at_once = min(hidden.shape[0], chunk_rows(weight.shape[0]))
    options = nn.LinearCrossEntropyOptions(
        allow_retain_graph=keep_graph, batch_chunk_size=rows_at_once, chunking_method=None
    )
    return F.linear_cross_entropy(
        hidden, weight, targets, linear_bias=bias, reduction="sum", ignore_index=IGNORE_INDEX, options=options
    )


def recomputed_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Chunk by chunk, logits computed again in the backward; the matmul follows autocast like any linear layer."""
    rows_at_once = chunk_rows(weight.shape[0])
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for rows, classes in zip(hidden.split(rows_at_once), targets.split(rows_at_once), strict=True):
        total = total + checkpoint(_chunk_loss, rows, weight, bias, classes, use_reentrant=False)
    return total


def _chunk_loss(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, classes: torch.Tensor
) -> torch.Tensor:
    logits = F.linear(rows, weight, bias).float()
    return F.cross_entropy(logits, classes, ignore_index=IGNORE_INDEX, reduction="sum")


def precomputed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Chunk by chunk, gradients taken in the forward; matmuls in `dtype`, everything summed in fp32."""
    with torch.autocast(hidden.device.type, enabled=False):
        return _Precomputed.apply(hidden, weight, bias, targets, dtype)


class _Precomputed(torch.autograd.Function):
    """The gradient of a summed cross-entropy by its logits is softmax - one-hot, known as soon as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        low_weight = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradients = []
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        bias_gradient = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=weight.device)
        rows_at_once = chunk_rows(weight.shape[0])
        for rows, classes in zip(hidden.split(rows_at_once), targets.split(rows_at_once), strict=True):
            rows = rows.to(dtype)
            logits = F.linear(rows, low_weight, None if bias is None else bias.to(dtype)).float()
            counted = (classes != IGNORE_INDEX).unsqueeze(1)
            picked = classes.clamp(min=0).unsqueeze(1)
            log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
            total = total + ((log_sum - logits.gather(1, picked)) * counted).sum()
            gradient = torch.exp(logits - log_sum)
            gradient = gradient.scatter_add(1, picked, torch.full_like(log_sum, -1.0)) * counted
            low_gradient = gradient.to(dtype)
            hidden_gradients.append((low_gradient @ low_weight).to(hidden.dtype))
            weight_gradient += (low_gradient.t() @ rows).float()
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
        saved = (torch.cat(hidden_gradients), weight_gradient.to(weight.dtype))
        ctx.save_for_backward(*saved, *(() if bias_gradient is None else (bias_gradient,)))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (scale,) = gradients
        hidden, weight, *bias = ctx.saved_tensors
        return (
            hidden * scale.to(hidden.dtype) if ctx.needs_input_grad[0] else None,
            weight * scale if ctx.needs_input_grad[1] else None,
            bias[0] * scale if bias and ctx.needs_input_grad[2] else None,
            None,
            None,
        )
