"""Attention, forward and backward: torch's fused kernels against the plain formula.

Shapes are (batch, heads, sequence, head size); causal. The work is counted as 6 b h s^2 d flop: two products
of 2 b h s^2 d forward, twice that backward, and half of it all because of the causal mask. What a kernel
recomputes is not counted, so that the two kinds compare.

- "sdpa_train": `scaled_dot_product_attention` with the backend that torch picks.
- "eager_attention_train": softmax(q k^T / sqrt(d)) v, the s x s matrix written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from autoplan.probes.timing import TORCH_DTYPES, Operation, filled

Shape = tuple[int, int, int, int]

CPU_SHAPES: tuple[Shape, ...] = ((1, 12, 256, 64), (1, 12, 1024, 64))
CUDA_SHAPES: tuple[Shape, ...] = ((8, 12, 1024, 64), (1, 32, 4096, 128))


def attention_operations(device: torch.device, dtypes: Sequence[str], shapes: Sequence[Shape]) -> Iterator[Operation]:
    """Both kinds for each dtype and shape, smallest first."""
    for shape in sorted(shapes, key=lambda s: s[0] * s[1] * s[2] ** 2 * s[3]):
        for dtype in dtypes:
            for kind, attend in (("sdpa_train", _sdpa), ("eager_attention_train", _eager)):
                b, h, s, d = shape
                yield Operation(
                    kind=kind,
                    dtype=dtype,
                    shape=shape,
                    work=6.0 * b * h * s * s * d,
                    unit="flop/s",
                    # scores, mask sum, softmax and their gradients, in float32 at worst
                    memory_bytes=4 * (8 * b * h * s * d + (6 * b * h * s * s if attend is _eager else 0)),
                    build=_builder(device, dtype, shape, attend),
                )


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask
    return torch.softmax(scores, dim=-1) @ v


def _builder(
    device: torch.device,
    dtype: str,
    shape: Shape,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[], Callable[[], object]]:
    def build() -> Callable[[], object]:
        q, k, v = (filled(shape, TORCH_DTYPES[dtype], device).requires_grad_() for _ in range(3))
        gradient = filled(shape, TORCH_DTYPES[dtype], device)
        s = shape[2]
        mask = torch.full((s, s), float("-inf"), device=device).triu(1).to(TORCH_DTYPES[dtype])
        return lambda: torch.autograd.grad(attend(q, k, v, mask), (q, k, v), gradient)

    return build
