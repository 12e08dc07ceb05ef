"""Products of linear layers in 8 bits: which of a variant's products, their seconds, and those of their casts.

Traced are the products of bf16. For a linear layer with a weight of (n, k) and t tokens these are three, each with two
operands that are cast anew (torchao.float8, matmul_with_hp_or_float8_args):

    output (t x k by k x n)        gradient of the input (t x n by n x k)        of the weight (n x t by t x k)

None of it was timed on a GPU: bytes are counted, rates are the probe's or in proportion to the datasheet's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autoplan.planner.cost.columns import STATES, Floats
from autoplan.planner.cost.traced.candidates import FP8, Candidates
from autoplan.planner.cost.traced.rates import Rates
from autoplan.planner.trace.model_profile import ModelProfile, OperationGroup, VariantProfile
from autoplan.strategies.techniques.fp8_rules import RECIPES, reason_against_sizes

# Bytes of each number of an operand, read and written by its cast, counted. Compiled: read for the largest, read and
# written in 8 bits. Eager, each operation by itself: abs, max, to fp32, times the scale, clamp, to 8 bits (torchao
# 0.18), and the copy that puts one of two operands in the order that the kernel wants.
COMPILED_CAST = {2: 2 + 2 + 1, 4: 4 + 4 + 1}
EAGER_CAST = {2: 34, 4: 34}
# What is no longer done: autocast's cast of an fp32 weight to bf16, once in a forward (4 read, 2 written).
AUTOCAST_WEIGHT_BYTES = 6
# Launches of a product with its casts beyond the product's own, counted: compiled, two kernels for each operand; eager,
# some 12 (the scale is made in half a dozen operations on one number).
COMPILED_LAUNCHES, EAGER_LAUNCHES = 4.0, 25.0

Fp8Shares = Mapping[int, Floats]
"""By place of a group of products in its variant, the share of it that runs in 8 bits, for each candidate."""


def fp8_shares(variant: VariantProfile, profile: ModelProfile, c: Candidates) -> dict[int, Floats]:
    """The shares of a variant's products; empty where no candidate has products in 8 bits.

    A product is one of a linear layer that is taken if it has that layer's sizes. Where the trace has more products of
    these sizes than layers are taken, it is that share of them.
    """
    shares: dict[int, Floats] = {}
    for recipe in RECIPES:
        here = c.fp8 == FP8.index(recipe)
        if not here.any():
            continue
        taken = {(n, k): count for n, k, count in profile.linear_weights if reason_against_sizes(n, k, recipe) is None}
        by_sizes: dict[frozenset[int], int] = {}  # a product tells the weight's sizes, not which of them is which
        for (n, k), count in taken.items():
            by_sizes[frozenset((n, k))] = by_sizes.get(frozenset((n, k)), 0) + count
        made: dict[frozenset[int], float] = {}
        for group in variant.groups:
            if group.phase == "forward" and (sizes := _sizes(group)) is not None:
                blocks = profile.num_blocks if group.segment == "block" else 1
                made[sizes] = made.get(sizes, 0.0) + group.count * blocks
        for place, group in enumerate(variant.groups):
            sizes = _sizes(group)
            if sizes is not None and sizes in by_sizes:
                share = min(1.0, by_sizes[sizes] / made[sizes]) if made.get(sizes) else 1.0
                shares[place] = np.where(here, share, shares.get(place, np.zeros(len(c))))
    return shares


def _sizes(group: OperationGroup) -> frozenset[int] | None:
    """The two sizes of a single product that no sample changes, beside one that samples do: a weight's."""
    if group.kind != "matmul" or group.m.at(1) == 0 or group.batch.at(2) > 1:
        return None
    fixed = [round(fit.fixed) for fit in (group.m, group.n, group.k) if fit.per_sample == 0]
    return frozenset(fixed) if len(fixed) == 2 else None


def product_seconds(group: OperationGroup, plain_s: Floats, rates: Rates, c: Candidates) -> Floats:
    """Seconds of one product in 8 bits, from its seconds in bf16: in proportion to the rates at its sizes."""
    m, n, k = (fit.fixed + fit.per_sample * c.micro_batch for fit in (group.m, group.n, group.k))
    ratio = rates.matmul_fit("float8").seconds(m, n, k) / rates.matmul_fit("bfloat16").seconds(m, n, k)
    return np.asarray(plain_s * ratio)


def cast_seconds(group: OperationGroup, rates: Rates, c: Candidates) -> Floats:
    """Seconds of the casts of both operands of one product.

    The layers that are taken lie in blocks, which any compiled run compiles: there the passes of a cast are fused.
    """
    m, n, k = (fit.fixed + fit.per_sample * c.micro_batch for fit in (group.m, group.n, group.k))
    moved = np.zeros(len(c))
    in_fp32 = c.states == STATES.index("fp32")
    for numbers, is_weight in (
        (m * k, group.m.per_sample == 0 and group.k.per_sample == 0),
        (k * n, group.n.per_sample == 0 and group.k.per_sample == 0),
    ):
        wide = in_fp32 & is_weight
        compiled = np.where(wide, COMPILED_CAST[4], COMPILED_CAST[2])
        eager = np.where(wide, EAGER_CAST[4], EAGER_CAST[2])
        saved = np.where(wide & (group.phase == "forward"), AUTOCAST_WEIGHT_BYTES, 0)
        moved += numbers * (np.where(c.compiled > 0, compiled, eager) - saved)
    return np.asarray(moved / rates.memory_bytes_per_s)


def fp8_seconds(group: OperationGroup, plain_s: Floats, rates: Rates, c: Candidates) -> Floats:
    """Seconds of one product in 8 bits with its casts."""
    return product_seconds(group, plain_s, rates, c) + cast_seconds(group, rates, c)


def fp8_dispatch_s(rates: Rates, c: Candidates) -> Floats:
    """Host seconds of one product's casts."""
    return np.where(c.compiled > 0, COMPILED_LAUNCHES, EAGER_LAUNCHES) * rates.dispatch_s
