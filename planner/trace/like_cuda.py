"""The operations of CUDA, as far as a CPU's differ in what they keep: for the trace of a model where no GPU is.

A torch built for CPUs has no CUDA tensors, not even fake ones: its autograd asks for a device guard that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

TRACED_ELSEWHERE = "no GPU is here: the operations are those of the CPU, with CUDA's autocast, attention and dropout"

IN_FP32 = frozenset(
    name
    for line in (
        "pow __pow__ __rpow__ __rdiv__ __rtruediv__ acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2",
        "reciprocal rsqrt cumprod cumsum dist norm prod sum renorm softmax softmin log_softmax softplus",
        "layer_norm group_norm normalize cdist pdist cosine_similarity cross_entropy nll_loss mse_loss l1_loss",
        "smooth_l1_loss kl_div binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss",
        "margin_ranking_loss multilabel_margin_loss multi_margin_loss poisson_nll_loss soft_margin_loss",
        "triplet_margin_loss",
    )
    for name in line.split()
)
"""Operations that autocast runs in fp32 on CUDA; the list for CPUs is shorter.

Source: torch's documentation of torch.amp, "CUDA Ops that can autocast to float32".
"""

HALVES = (torch.bfloat16, torch.float16)


class LikeCuda(TorchFunctionMode):
    """Runs on the CPU what CUDA would run: fp32 where its autocast has it, attention with dropout in one operation,
    dropout that keeps a mask of one byte a number, and products of experts of equal shares."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":  # fused, it draws its mask anew in the backward, and keeps none
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            return _attention(func, **{**named, **kwargs, "dropout_p": 0.0})
        if func is torch.Tensor.backward and not (
            args[1:] or any(v is not None and v is not False for v in kwargs.values())
        ):
            return self._backward(args[0])
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if name in ("grouped_mm", "_grouped_mm"):
            return _evenly_grouped(*args, **kwargs)
        if name in IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> Any:
        """The backward of a loss. Checkpointed blocks run their forward in it, which is CUDA's too: but a mode is off
        while it handles a call, and every form of `backward` is such a call. So autograd's engine is asked itself."""
        with self:
            return torch.autograd.graph._engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _attention(
    func: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Fused attention whose values have another width than its queries, as latent attention has (MLA).

    CUDA has kernels for it (memory-efficient, cuDNN). A CPU would take the plain form, with scores in fp32; the mean of
    both widths has the same FLOPs and bytes: 2 t^2 (queries' + values').
    """
    wide, narrow = query.shape[-1], value.shape[-1]
    if wide == narrow:
        return func(query=query, key=key, value=value, **options)
    query, key, value = (_of_width(one, (wide + narrow) // 2) for one in (query, key, value))
    return _of_width(func(query=query, key=key, value=value, **options), narrow)


def _of_width(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(tensor, (0, width - tensor.shape[-1])) if tensor.shape[-1] < width else tensor[..., :width]


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _evenly_grouped(
    input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Products of each expert's rows with its weight, as if all experts had equally many; tensors without values do not
    say how many each has, and torch's form for them takes bf16 alone."""
    if input.dim() != 2 or weight.dim() != 3:
        return F.grouped_mm(input, weight, offs=offs, **options)
    rows, experts = input.shape[0], weight.shape[0]
    padded = F.pad(input, (0, 0, 0, -rows % experts)) if rows % experts else input
    return torch.bmm(padded.reshape(experts, -1, input.shape[1]), weight).reshape(-1, weight.shape[2])[:rows]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor
