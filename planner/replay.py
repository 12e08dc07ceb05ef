"""Times recorded operations on the device, one by one, on tensors of the recorded shapes.

Whole-model timing would take every variant; the operations of all variants together are some hundred, and each is run
a few times. What the sum leaves out (the host's own time between operations) the cost model adds as dispatch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from autoplan.planner.recorder import Recipe, TensorShape

REPEATS = 3
# an operation slower than this is run once after its first run
SLOW_S = 0.15

Key = TypeVar("Key", bound=Hashable)


def time_recipes(
    recipes: Mapping[Key, tuple[Recipe, int, float]], device: torch.device, budget_s: float
) -> dict[Key, float]:
    """Seconds of each group of operations, as far as the budget goes; the small ones first, since they teach the rate.

    Args:
        recipes: For each group how to run one of its operations, how many it stands for, and the FLOPs of one.
        device: Where they run.
        budget_s: Seconds for all of them. One that is expected to take more than what is left is skipped.
    """
    ends = time.perf_counter() + budget_s
    timed: dict[Key, float] = {}
    rates: dict[str, float] = {}
    kept: dict[str, float] = {}
    for key, (recipe, count, flops) in sorted(recipes.items(), key=lambda item: item[1][2]):
        left = ends - time.perf_counter()
        if left <= 0:
            break
        dtype = str(
            next(
                (
                    t.dtype
                    for t in pytree.tree_leaves((recipe.arguments, recipe.options), is_leaf=_is_shape)
                    if _is_shape(t)
                ),
                "",
            )
        )
        if flops and dtype in rates and 2 * flops / rates[dtype] > left:
            continue
        place = repr((recipe.function, recipe.arguments, recipe.options))
        if place not in kept:
            seconds = _time(recipe, device)
            if seconds is None:
                continue
            kept[place] = seconds
            if flops > 1e8:
                rates[dtype] = max(rates.get(dtype, 0.0), flops / seconds)
        timed[key] = count * kept[place]
    return timed


def _is_shape(value: Any) -> bool:
    return isinstance(value, TensorShape)


def _time(recipe: Recipe, device: torch.device) -> float | None:
    """The median seconds of an operation; None where it does not run by itself."""

    def make(value: Any) -> Any:
        if not _is_shape(value):
            return value
        tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
        if tensor.dtype.is_floating_point:
            return tensor.fill_(0.01)  # not zero: some kernels skip zeros, and not denormal
        return tensor.zero_()  # indices, masks

    try:
        arguments, options = pytree.tree_map(make, (recipe.arguments, recipe.options), is_leaf=_is_shape)
        with torch.no_grad():
            samples = [_once(recipe.function, arguments, options, device)]
            for _ in range(REPEATS if samples[0] < SLOW_S else 1):
                samples.append(_once(recipe.function, arguments, options, device))
    except (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError):
        return None  # an operation that needs real values; the rates stand in for it
    return statistics.median(samples[1:])


def _once(function: Any, arguments: Any, options: Any, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function(*arguments, **options)
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3
    started = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - started
