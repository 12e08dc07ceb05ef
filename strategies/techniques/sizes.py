"""Sizes by which techniques work and the cost model counts. Loads no torch: the planner's process reads them too."""

from __future__ import annotations

from typing import get_args

from autoplan.strategies.config import Fp8

PIECE_BYTES = 128 * 2**20
"""Of parameters that an optimizer with its states on the host steps at once; a larger one is a piece by itself."""

RECIPES: tuple[str, ...] = get_args(Fp8)[1:]
"""torchao's recipes of products in 8 bits, which are the fp8 knob's values beside off."""

MULTIPLE = 16
"""Both sizes of a weight in 8 bits are multiples of it: torch._scaled_mm takes no others."""


def reason_against_sizes(out_features: int, in_features: int, recipe: str) -> str | None:
    """Why a weight of these sizes stays in bf16; None where fp8 is said to gain.

    Source: torchao's own filter (`torchao.float8._auto_filter_for_recipe`, 0.18), whose limits are from its
    measurements of forward and backward on an H100: below them the casts take more than the products save.

    Args:
        out_features, in_features: Of the linear layer.
        recipe: tensorwise or rowwise.
    """
    n, k = out_features, in_features
    if n % MULTIPLE or k % MULTIPLE:
        return f"{n} x {k} is not made of multiples of {MULTIPLE}"
    if recipe == "tensorwise":
        small = k <= 4096 and n <= 1024
    else:
        small = n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    return f"{n} x {k} is too small to gain (torchao's measurements on an H100)" if small else None
