"""Products in 8-bit floating point as the parity check's reference makes them: operands rounded, multiplied in fp32.

It follows the recipes, not torchao's code, so that an operand that is scaled or rounded wrongly there shows here:

    output = q(x) q(w)^T        gradient of x = q(g) q(w)        gradient of w = q(g)^T q(x)

tensorwise: q has one scale for the tensor, the largest number of the format over the largest of the tensor; x and w are
e4m3, g is e5m2. rowwise: one scale for each row or column that is summed over, rounded down to a power of two; all are
e4m3. Source: Micikevicius et al. 2022 (arXiv 2209.05433); torchao.float8.Float8LinearRecipeName for the second.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.planner.parity.judge import finite
from autoplan.strategies.analysis.structure import clean_name
from autoplan.strategies.techniques.fp8 import replaced_linears
from autoplan.strategies.techniques.mesh import whole_tensor

ROWS = 64
"""Of the inputs that a layer is called with by itself; a multiple of 16."""

_LEAST = 1e-12  # of a largest number, so that zeros have a scale


class RoundedProducts:
    """Has linear layers multiply rounded operands.

    Args:
        linears: The layers; nothing of them is replaced.
        recipe: tensorwise or rowwise.
    """

    def __init__(self, linears: Sequence[nn.Linear], recipe: str) -> None:
        self.enabled = True
        for linear in linears:
            linear.forward = functools.partial(self._forward, linear, recipe)  # type: ignore[method-assign]

    def _forward(self, linear: nn.Linear, recipe: str, x: torch.Tensor) -> torch.Tensor:
        if not self.enabled:
            return F.linear(x, linear.weight, linear.bias)
        if x.device.type == "cuda":  # autocast casts inputs there; torchao's emulation on a CPU takes them as they are
            x = x.bfloat16().to(x.dtype)
        out: torch.Tensor = _RoundedProduct.apply(x, linear.weight, recipe == "rowwise")
        return out if linear.bias is None else out + linear.bias


def product_distances(model: nn.Module, recipe: str) -> dict[str, float]:
    """How far the three products of each replaced layer are from the recipe's, given the same operands.

    Each layer is called by itself, with random inputs and its own weight: over a whole model the rounding of other
    layers would hide a product of one layer that is wrong. On shards all ranks gather the weights together.

    Args:
        model: After its layers were replaced.
        recipe: tensorwise or rowwise.

    Returns:
        By layer, the largest ||a - b|| / ||b|| of its output and both gradients.
    """
    found = {}
    for name, layer in replaced_linears(model):
        own = {key: whole_tensor(value.detach()) for key, value in layer.named_parameters()}
        weight = own["weight"].requires_grad_()
        generator = torch.Generator().manual_seed(0)
        sizes = (ROWS, layer.in_features), (ROWS, layer.out_features)
        x, gradient = (torch.randn(size, generator=generator).to(weight.device, torch.bfloat16) for size in sizes)
        x.requires_grad_()
        ours = torch.func.functional_call(layer, own, (x,))
        theirs = _RoundedProduct.apply(x.float(), weight.float(), recipe == "rowwise") + own.get("bias", 0.0)
        products = [(ours, theirs)]
        of_ours = torch.autograd.grad(ours, (x, weight), gradient.to(ours.dtype))
        of_theirs = torch.autograd.grad(theirs, (x, weight), gradient.float())
        products += zip(of_ours, of_theirs, strict=True)
        pairs = [(a.detach().float(), b.detach().float()) for a, b in products]
        found[clean_name(name)] = max(finite(float((a - b).norm() / b.norm().clamp(min=_LEAST))) for a, b in pairs)
    return found


class _RoundedProduct(torch.autograd.Function):
    """x of (..., k) by the transpose of a weight of (n, k)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, by_row: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        return _round(x, -1, by_row) @ _round(weight, -1, by_row).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = gradient.bfloat16().to(gradient.dtype)  # the output's dtype, which is its gradient's
        by_row, dtype = ctx.by_row, torch.float8_e4m3fn if ctx.by_row else torch.float8_e5m2
        of_x = _round(gradient, -1, by_row, dtype) @ _round(weight, 0, by_row)
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        return of_x, _round(rows, 0, by_row, dtype).T @ _round(inputs, 0, by_row), None


def _round(value: torch.Tensor, summed: int, by_row: bool, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """The numbers of a tensor as 8 bits keep them, in its own dtype.

    Args:
        value: Any shape.
        summed: The dimension that the product sums over, along which numbers share a scale.
        by_row: Whether the others have scales of their own.
        dtype: The format.
    """
    largest = value.abs().amax(dim=summed, keepdim=True) if by_row else value.abs().max()
    most = torch.finfo(dtype).max
    scale = (most / largest.double().clamp(min=_LEAST)).float()
    if by_row:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return ((value.float() * scale).clamp(-most, most).to(dtype).float() / scale).to(value.dtype)
