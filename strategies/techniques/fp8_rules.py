"""Which matrices the fp8 knob takes, and what it goes with. Loads no torch."""

from __future__ import annotations

from autoplan.strategies.config import TrainingConfig

READS = ("precision", "fp8", "offload", "tp", "pp")
"""The knobs that `incompatible` reads."""

RECIPES = ("tensorwise", "rowwise")
"""torchao's recipes, which are the knob's values beside off."""

MULTIPLE = 16
"""Both sizes of a weight are multiples of it: torch._scaled_mm takes no others."""


def incompatible(config: TrainingConfig, global_batch: int | None = None) -> str | None:
    """Why products in fp8 do not go with the rest of a configuration; None if they do."""
    if config.fp8 == "off":
        return None
    if config.precision != "bf16":
        return f"fp8={config.fp8} needs precision=bf16: all but the products of linear layers stays in bf16"
    for knob, ranks in (("tp", config.tp), ("pp", config.pp)):
        if ranks > 1:
            return f"fp8={config.fp8} does not go with {knob}={ranks}: it was not compared over such ranks"
    if config.offload == "parameters":
        return f"fp8={config.fp8} does not go with offload=parameters: it was not compared with shards on the host"
    return None


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
