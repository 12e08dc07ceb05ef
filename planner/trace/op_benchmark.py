"""Times recorded operations on the device, one by one, on tensors of the recorded shapes.

Whole-model timing would take every variant; the operations of all variants together are some hundred, and each is run
a few times, or, where time runs out, stands in proportion to one of its kind. An operation of a training step finds
its operands out of the nearest caches, since others ran in between; so each run here takes other tensors than the runs
before it. It is timed at two sizes, because what fits the caches at few samples does not at many. On a CPU the memory
is kept between runs: what new pages cost is priced apart (`first_touch` of the probes). What the sum leaves out, the
host's own time between operations, is dispatch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from autoplan.planner.trace.op_recorder import Recipe, TensorShape
from autoplan.strategies.techniques.allocator import keep_freed_memory

# how often an operation is run after its first run, by what that took
REPEATS = ((0.003, 5), (0.02, 3), (0.15, 2), (float("inf"), 1))
# of each kind of operation the largest within these is timed first
REPRESENTATIVE_BYTES = 64 << 20
REPRESENTATIVE_FLOPS = 1e10
# operands rotate through as much memory: several times what a core's own caches hold; on a GPU its L2
POOL_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
# an operation is timed at so many times the samples too, if that stays within the seconds and bytes below
TIMES = (8, 4, 2)
LONGEST_MORE_S = 0.03
LARGEST_MORE_BYTES = 192 << 20

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What is to be timed: an operation as recorded at few and at twice as many samples, and how many it stands for.

    `many` is None where the operation is one of a batch that grows by repetition; `flops` are those of `few`.
    """

    few: Recipe
    many: Recipe | None
    count: int
    flops: float

    @property
    def work(self) -> float:
        """FLOPs, or bytes of the operands where it has none."""
        return self.flops or float(_bytes_of(self.few))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Seconds at the few samples, and at `times` as many."""

    seconds: float
    more_s: float | None = None
    times: int = 1


def time_recipes(recipes: Mapping[Key, Timing], device: torch.device, budget_s: float) -> dict[Key, Timed]:
    """Seconds of each group of operations.

    First one of each kind (operation and dtypes), then the others, the small ones first, as far as the budget goes.
    What is left takes the seconds of the next in size of its kind, in proportion to its work.

    Args:
        recipes: For each group what to run.
        device: Where they run.
        budget_s: Seconds for all of them. One that is expected to take more than what is left is not run.
    """
    ends = time.perf_counter() + budget_s
    if device.type == "cpu":
        keep_freed_memory()
    stand = OpRunner(device)
    kept: dict[str, Timed] = {}
    kinds: dict[Hashable, dict[float, float]] = {}
    timed: dict[Key, Timed] = {}
    for key in _in_order(recipes):
        timing = recipes[key]
        left = ends - time.perf_counter()
        place, kind = repr((timing.few, timing.many)), _kind_of(timing.few)
        if place not in kept:
            known = _by_proportion(kinds.get(kind, {}), timing.work)
            if left <= 0 or (known is not None and 3 * known > left):
                continue
            seconds = stand.time(timing.few)
            if seconds is None:
                continue
            kept[place] = _with_more(stand, timing, seconds, left)
            kinds.setdefault(kind, {})[timing.work] = seconds
        timed[key] = _of_all(kept[place], timing.count)
    for key, timing in recipes.items():
        if key not in timed:
            seconds = _by_proportion(kinds.get(_kind_of(timing.few), {}), timing.work)
            if seconds is not None:
                timed[key] = _of_all(Timed(seconds=seconds), timing.count)
    return timed


def _in_order(recipes: Mapping[Key, Timing]) -> list[Key]:
    """One of each kind first, the largest that runs fast enough to be worth it; then all by their work."""
    order = sorted(recipes, key=lambda key: recipes[key].work)
    first: dict[Hashable, Key] = {}
    for key in order:
        timing = recipes[key]
        small = _bytes_of(timing.few) <= REPRESENTATIVE_BYTES and timing.flops <= REPRESENTATIVE_FLOPS
        if small or _kind_of(timing.few) not in first:
            first[_kind_of(timing.few)] = key
    chosen = set(first.values())
    return [*first.values(), *(key for key in order if key not in chosen)]


def _by_proportion(known: Mapping[float, float], work: float) -> float | None:
    """The seconds of the known work that is next in size, scaled; None: none is known."""
    if not known:
        return None
    nearest = min(known, key=lambda other: abs(math.log(max(other, 1.0) / max(work, 1.0))))
    return known[nearest] * work / max(nearest, 1.0)


def _of_all(one: Timed, count: int) -> Timed:
    more = None if one.more_s is None else count * one.more_s
    return Timed(seconds=count * one.seconds, more_s=more, times=one.times)


def _with_more(stand: OpRunner, timing: Timing, seconds: float, left_s: float) -> Timed:
    if timing.many is not None and _bytes_of(timing.many) > _bytes_of(timing.few):
        grows = _bytes_of(timing.many) / _bytes_of(timing.few)  # 2 if all of it does
        for times in TIMES:
            size = _bytes_of(timing.few) * (1 + (grows - 1) * (times - 1))
            expected = seconds * times
            if size > LARGEST_MORE_BYTES or expected > LONGEST_MORE_S or 8 * expected > left_s:
                continue
            recipe = grown(timing.few, timing.many, times)
            more = stand.time(recipe) if recipe is not None else None
            if more is not None:
                return Timed(seconds=seconds, more_s=max(more, seconds), times=times)
    return Timed(seconds=seconds)


def grown(few: Recipe, many: Recipe, times: int) -> Recipe | None:
    """The operation at `times` the samples of `few`, by the sizes that differ from those at twice as many.

    None: the two do not differ in sizes alone.
    """
    ours, shape = pytree.tree_flatten((few.arguments, few.options), is_leaf=is_shape)
    theirs, other = pytree.tree_flatten((many.arguments, many.options), is_leaf=is_shape)
    if shape != other or few.function is not many.function:
        return None
    leaves: list[Any] = []
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, TensorShape) and isinstance(b, TensorShape) and len(a.shape) == len(b.shape):
            sizes = [_extended(x, y, times) for x, y in zip(a.shape, b.shape, strict=True)]
            strides = [_extended(x, y, times) for x, y in zip(a.stride, b.stride, strict=True)]
            leaves.append(TensorShape(tuple(sizes), tuple(strides), a.dtype))
        elif type(a) is int and type(b) is int:
            leaves.append(_extended(a, b, times))
        elif a == b:
            leaves.append(a)
        else:
            return None
    arguments, options = pytree.tree_unflatten(leaves, shape)
    return Recipe(few.function, arguments, options)


def _extended(few: int, many: int, times: int) -> int:
    return few + (many - few) * (times - 1)


def is_shape(value: Any) -> bool:
    """Whether a leaf stands for a tensor."""
    return isinstance(value, TensorShape)


def _shapes(recipe: Recipe) -> list[TensorShape]:
    leaves = pytree.tree_leaves((recipe.arguments, recipe.options), is_leaf=is_shape)
    return [leaf for leaf in leaves if is_shape(leaf)]


def _kind_of(recipe: Recipe) -> Hashable:
    return (str(recipe.function), *(str(shape.dtype) for shape in _shapes(recipe)))


def _span(shape: TensorShape) -> int:
    """Elements between the first and the last of a tensor, both counted."""
    if 0 in shape.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape.shape, shape.stride, strict=True))


def _bytes_of(recipe: Recipe) -> int:
    return sum(_span(shape) * shape.dtype.itemsize for shape in _shapes(recipe))


class OpRunner:
    """Runs operations on operands that no recent run touched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool_bytes = POOL_BYTES.get(device.type, POOL_BYTES["cuda"])
        self._pools: dict[torch.dtype, torch.Tensor] = {}
        self._next: dict[torch.dtype, int] = {}
        self._made: deque[tuple[Any, int]] = deque()
        self._held = 0

    def time(self, recipe: Recipe) -> float | None:
        """Seconds of an operation; None where it does not run by itself.

        The lower quartile, as of the probes (probes/timing.py): what else runs on the machine only ever adds time.
        """
        try:
            with torch.no_grad():
                first = self._once(recipe)
                repeats = next(count for longest, count in REPEATS if first <= longest)
                runs = [self._once(recipe) for _ in range(repeats)]
        except (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError):
            return None  # an operation that needs real values; the rates stand in for it
        finally:
            if recipe.function._schema.is_mutable:
                self._pools.clear()  # it may have written infinities, or denormals, which are slow
        return sorted(runs)[len(runs) // 4]

    def _once(self, recipe: Recipe) -> float:
        arguments, options = pytree.tree_map(
            lambda leaf: self._tensor(leaf) if is_shape(leaf) else leaf,
            (recipe.arguments, recipe.options),
            is_leaf=is_shape,
        )
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = recipe.function(*arguments, **options)
            end.record()
            torch.cuda.synchronize(self.device)
            seconds = float(start.elapsed_time(end)) / 1e3
        else:
            started = time.perf_counter()
            out = recipe.function(*arguments, **options)
            seconds = time.perf_counter() - started
        self._hold(out)
        return seconds

    def _tensor(self, shape: TensorShape) -> torch.Tensor:
        """A tensor of that shape in a part of the pool that the last runs did not use."""
        span = max(_span(shape), 1)
        room = self.pool_bytes // shape.dtype.itemsize
        if span > room // 2:
            return self._filled(span, shape.dtype).as_strided(shape.shape, shape.stride)
        if shape.dtype not in self._pools:
            self._pools[shape.dtype] = self._filled(room, shape.dtype)
        start = self._next.get(shape.dtype, 0)
        if start + span > room:
            start = 0
        self._next[shape.dtype] = start + -(-span // 64) * 64
        return self._pools[shape.dtype].as_strided(shape.shape, shape.stride, start)

    def _filled(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(count, dtype=dtype, device=self.device)
        # floats not zero: some kernels skip zeros, and not denormal; indices and masks zero
        return tensor.fill_(0.01) if dtype.is_floating_point else tensor.zero_()

    def _hold(self, out: Any) -> None:
        """Keeps results for a while, so that the next run's does not get the same, warm memory."""
        size = sum(t.untyped_storage().nbytes() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        self._made.append((out, size))
        self._held += size
        while self._held > self.pool_bytes and len(self._made) > 1:
            self._held -= self._made.popleft()[1]
