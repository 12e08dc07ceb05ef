"""Times recorded operations on the device, one by one, on tensors of the recorded shapes.

In: a `TimingRequest` for each group of operations. Out: an `OpTiming` for each, as far as the time budget goes.

- All variants of a model together have some hundred different operations. To time them costs far less than to time the
  whole model under each variant. An operation for which no time is left takes the seconds of one of its kind, in
  proportion to its work.
- In training, other operations run between two runs of the same one, so its operands are no longer in the nearest
  caches. Therefore each run here takes other tensors than the runs before it.
- Each operation is timed at two sizes, because operands that fit the caches at few samples do not at many.
- On a CPU, freed memory is kept between the runs. The cost of new pages is estimated separately (`first_touch` of the
  probes).
- The host's own time between operations (dispatch) is not measured here. On CUDA other work is queued before each
  operation, so that the host's launch does not count either (probes/timing.py).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from autoplan.planner.trace.op_recorder import OpCall, TensorShape
from autoplan.probes.timing import CudaClock, device_answers, filled
from autoplan.strategies.techniques.allocator import keep_freed_memory

REPEATS = ((0.003, 5), (0.02, 3), (0.15, 2), (float("inf"), 1))
"""How often an operation is run again, by the seconds of its first run: (up to seconds, runs)."""

REPRESENTATIVE_BYTES = 64 << 20
REPRESENTATIVE_FLOPS = 1e10
"""Of each kind of operation, the largest one within these two limits is timed first."""

POOL_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Operands rotate through this much memory: several times the caches of one core; on a GPU, its L2 cache."""

PROBABILITIES = (0.01, 0.99)
"""Between these are the operands of operations that are no products."""

LARGER_FACTORS = (8, 4, 2)
LARGER_LIMIT_S = 0.03
LARGER_LIMIT_BYTES = 192 << 20
"""An operation is timed at the first of these factors times the samples, too, that stays within both limits."""

MEMORY_SHARE = 0.5
"""Of a limit of memory, the share that one operation may take with its operands and results. The rest is for the
process itself and for the operands that rotate."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingRequest:
    """An operation that is to be timed.

    Attributes:
        small_batch: The operation at the small micro-batch.
        large_batch: The same at twice the samples; None where the operation is one of many that repeat more often with
            more samples.
        count: How many such operations the group has; the seconds of all of them are wanted.
        flops: Of one operation at the small micro-batch.
        output_bytes: What it allocates.
    """

    small_batch: OpCall
    large_batch: OpCall | None
    count: int
    flops: float
    output_bytes: float = 0.0

    @property
    def work(self) -> float:
        """FLOPs, or the bytes of the operands for an operation without FLOPs."""
        return self.flops or float(_operand_bytes(self.small_batch))

    @property
    def needed_bytes(self) -> float:
        """Of its operands, its result, and the result of the run before."""
        return _operand_bytes(self.small_batch) + 2 * self.output_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTiming:
    """Measured seconds at the small micro-batch, and at `larger_factor` times its samples (None: not measured).

    `scaled`: not of this operation, but in proportion to one of its kind.
    """

    seconds: float
    larger_s: float | None = None
    larger_factor: int = 1
    scaled: bool = False

    def times(self, count: int) -> OpTiming:
        """The timing of `count` such operations."""
        larger_s = None if self.larger_s is None else count * self.larger_s
        return replace(self, seconds=count * self.seconds, larger_s=larger_s)


def time_operations(
    requests: Mapping[Key, TimingRequest],
    device: torch.device,
    budget_s: float,
    notes: list[str] | None = None,
    memory_limit_bytes: int | None = None,
    *,
    known: Mapping[Key, OpTiming] | None = None,
) -> dict[Key, OpTiming]:
    """Times each group of operations that is not known.

    First one operation of each kind (overload and dtypes) is timed, then the others, from small to large, as far as
    the budget goes. Each of the rest takes the seconds of the operation of its kind that is nearest in size, in
    proportion to its work. A group that does not run by itself and has no other of its kind is left out.

    Args:
        requests: What to time, by group.
        device: Where the operations run.
        budget_s: Seconds for all of them. An operation that is expected to take more than a third of what is left is
            not run.
        notes: Gets a sentence where an operation left the device unusable, which ends the timing; None: nobody asks.
        memory_limit_bytes: Host memory of this process: on a CPU, what takes a large share of it is not run. None: no
            limit.
        known: What an earlier trace found. What was measured is not timed again; what was scaled is, if there is time.
    """
    most_bytes = MEMORY_SHARE * memory_limit_bytes if memory_limit_bytes and device.type == "cpu" else math.inf
    ends = time.perf_counter() + budget_s
    if device.type == "cpu":
        keep_freed_memory()
    runner = OpRunner(device)
    known = known or {}
    timing_of_call: dict[str, OpTiming] = {}
    timings = {key: one for key, one in known.items() if not one.scaled}
    seconds_by_kind = _seconds_by_kind(requests, known)
    kinds = set[Hashable]()  # of what is timed here
    for key in _timing_order({key: one for key, one in requests.items() if key not in timings}):
        if runner.lost is not None:
            break
        request = requests[key]
        left_s = ends - time.perf_counter()
        call_text, kind = repr((request.small_batch, request.large_batch)), _kind_of(request.small_batch)
        if call_text not in timing_of_call:
            expected_s = _scale_nearest(seconds_by_kind.get(kind, {}), request.work)
            if left_s <= 0 or (expected_s is not None and 3 * expected_s > left_s) or request.needed_bytes > most_bytes:
                continue
            seconds = runner.time(request.small_batch, signed=request.flops > 0)
            if seconds is None:
                continue
            timing_of_call[call_text] = _time_larger(runner, request, seconds, left_s, most_bytes)
            seconds_by_kind.setdefault(kind, {})[request.work] = seconds
            kinds.add(kind)
        timings[key] = timing_of_call[call_text].times(request.count)
    if runner.lost is not None and notes is not None:
        notes.append(f"the timing of operations ended early, since {device} ran nothing more after {runner.lost}")
    untimed = {key: one for key, one in requests.items() if key not in timings}
    kept = {key: known[key] for key, one in untimed.items() if key in known and _kind_of(one.small_batch) not in kinds}
    return timings | _scaled_timings(untimed, seconds_by_kind) | kept


def _seconds_by_kind(
    requests: Mapping[Key, TimingRequest], known: Mapping[Key, OpTiming]
) -> dict[Hashable, dict[float, float]]:
    """For each kind of operation the seconds of one, by its work; scaled ones where none of the kind was measured."""
    measured: dict[Hashable, dict[float, float]] = {}
    scaled: dict[Hashable, dict[float, float]] = {}
    for key, timing in known.items():
        request, found = requests[key], scaled if timing.scaled else measured
        found.setdefault(_kind_of(request.small_batch), {})[request.work] = timing.seconds / request.count
    return scaled | measured


def _scaled_timings(
    requests: Mapping[Key, TimingRequest], seconds_by_kind: Mapping[Hashable, Mapping[float, float]]
) -> dict[Key, OpTiming]:
    """Of groups of operations that were not timed, those of which another of the kind was."""
    found = {
        key: _scale_nearest(seconds_by_kind.get(_kind_of(request.small_batch), {}), request.work)
        for key, request in requests.items()
    }
    return {
        key: OpTiming(seconds=seconds, scaled=True).times(requests[key].count)
        for key, seconds in found.items()
        if seconds is not None
    }


def _timing_order(requests: Mapping[Key, TimingRequest]) -> list[Key]:
    """One of each kind first: the largest within the representative limits. Then all others, from small to large."""
    by_work = sorted(requests, key=lambda key: requests[key].work)
    representatives: dict[Hashable, Key] = {}
    for key in by_work:
        request = requests[key]
        kind = _kind_of(request.small_batch)
        small = _operand_bytes(request.small_batch) <= REPRESENTATIVE_BYTES and request.flops <= REPRESENTATIVE_FLOPS
        if small or kind not in representatives:
            representatives[kind] = key
    chosen = set(representatives.values())
    return [*representatives.values(), *(key for key in by_work if key not in chosen)]


def _scale_nearest(seconds_by_work: Mapping[float, float], work: float) -> float | None:
    """The seconds of the nearest known work, in proportion to the work; None if nothing is known."""
    if not seconds_by_work:
        return None
    nearest = min(seconds_by_work, key=lambda other: abs(math.log(max(other, 1.0) / max(work, 1.0))))
    return seconds_by_work[nearest] * work / max(nearest, 1.0)


def _time_larger(
    runner: OpRunner, request: TimingRequest, seconds: float, left_s: float, most_bytes: float
) -> OpTiming:
    """Times the operation with more samples too, where it grows and the limits allow it."""
    small, large = request.small_batch, request.large_batch
    if large is not None and _operand_bytes(large) > _operand_bytes(small):
        growth = _operand_bytes(large) / _operand_bytes(small) - 1  # 1 if all operands grow with the samples
        for factor in LARGER_FACTORS:
            size_bytes = _operand_bytes(small) * (1 + growth * (factor - 1))
            expected_s = seconds * factor
            if size_bytes > LARGER_LIMIT_BYTES or expected_s > LARGER_LIMIT_S or 8 * expected_s > left_s:
                continue
            if factor * request.needed_bytes > most_bytes:
                continue
            call = extrapolate_call(small, large, factor)
            larger_s = runner.time(call, signed=request.flops > 0) if call is not None else None
            if larger_s is not None:
                return OpTiming(seconds=seconds, larger_s=max(larger_s, seconds), larger_factor=factor)
    return OpTiming(seconds=seconds)


def extrapolate_call(small: OpCall, large: OpCall, factor: int) -> OpCall | None:
    """The operation at `factor` times the samples of `small`, from what differs in `large`, which has twice as many.

    None: the two calls differ in more than sizes.
    """
    small_leaves, structure = pytree.tree_flatten((small.arguments, small.options), is_leaf=is_shape)
    large_leaves, large_structure = pytree.tree_flatten((large.arguments, large.options), is_leaf=is_shape)
    if structure != large_structure or small.function is not large.function:
        return None
    leaves: list[Any] = []
    for a, b in zip(small_leaves, large_leaves, strict=True):
        if isinstance(a, TensorShape) and isinstance(b, TensorShape) and len(a.shape) == len(b.shape):
            sizes = [_extrapolate(x, y, factor) for x, y in zip(a.shape, b.shape, strict=True)]
            strides = [_extrapolate(x, y, factor) for x, y in zip(a.stride, b.stride, strict=True)]
            leaves.append(TensorShape(tuple(sizes), tuple(strides), a.dtype))
        elif type(a) is int and type(b) is int:
            leaves.append(_extrapolate(a, b, factor))
        elif a == b:
            leaves.append(a)
        else:
            return None
    arguments, options = pytree.tree_unflatten(leaves, structure)
    return OpCall(small.function, arguments, options)


def _extrapolate(small: int, large: int, factor: int) -> int:
    return small + (large - small) * (factor - 1)


def is_shape(value: Any) -> bool:
    """Whether a leaf of a call's arguments is a tensor's shape."""
    return isinstance(value, TensorShape)


def without_dropout(call: OpCall) -> OpCall:
    """A fused attention's call with no dropout; any other call as it is.

    With dropout the backward of the memory-efficient kernel reads the seed of the forward from host memory
    (aten/src/ATen/native/transformers/cuda/attention_backward.cu), and a seed that is made up ends the process.
    """
    names = [argument.name for argument in call.function._schema.arguments]
    if "philox_seed" not in names or "dropout_p" not in names:
        return call
    place = names.index("dropout_p")
    return replace(call, arguments=(*call.arguments[:place], 0.0, *call.arguments[place + 1 :]))


def _shapes(call: OpCall) -> list[TensorShape]:
    leaves = pytree.tree_leaves((call.arguments, call.options), is_leaf=is_shape)
    return [leaf for leaf in leaves if is_shape(leaf)]


def _kind_of(call: OpCall) -> Hashable:
    """The overload and the dtypes of its tensors."""
    return (str(call.function), *(str(shape.dtype) for shape in _shapes(call)))


def _span(shape: TensorShape) -> int:
    """Elements of memory from the first to the last element of a tensor."""
    if 0 in shape.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape.shape, shape.stride, strict=True))


def _operand_bytes(call: OpCall) -> int:
    return sum(_span(shape) * shape.dtype.itemsize for shape in _shapes(call))


class OpRunner:
    """Runs operations on operands that no recent run has touched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock = CudaClock(device) if device.type == "cuda" else None
        self.pool_bytes = POOL_BYTES.get(device.type, POOL_BYTES["cuda"])
        self._pools: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        self._next_start: dict[torch.dtype, int] = {}
        self._outputs: deque[tuple[Any, int]] = deque()  # results of the last runs, and their bytes
        self._output_bytes = 0
        self.lost: str | None = None
        """The operation after which the device ran nothing more, and its error; None while it does."""

    def time(self, call: OpCall, *, signed: bool = False) -> float | None:
        """Seconds of an operation; None if it does not run by itself.

        The lower quartile of the runs, as in the probes (probes/timing.py): other work on the machine only adds time.

        Args:
            call: The operation.
            signed: Its operands may be below 0, as those of products are. Others get probabilities: some operations
                take nothing else, and on CUDA an assertion in a kernel ends the whole process.
        """
        call = without_dropout(call)
        try:
            with torch.no_grad():
                first_s = self._run_once(call, signed)
                repeats = next(count for longest_s, count in REPEATS if first_s <= longest_s)
                runs = [self._run_once(call, signed) for _ in range(repeats)]
        except Exception as error:  # a custom operator may check its operands, and raise anything
            if self.lost is None and not device_answers(self.device):
                text = (str(error).splitlines() or ["no message"])[0]
                self.lost = f"{call.function}: {type(error).__name__}: {text}"
            return None  # it needs tensors with real values; the cost model then uses the measured rates
        finally:
            if call.function._schema.is_mutable:
                self._pools.clear()  # it may have written infinities, or denormal numbers, which are slow
        return sorted(runs)[len(runs) // 4]

    def _run_once(self, call: OpCall, signed: bool) -> float:
        arguments, options = pytree.tree_map(
            lambda leaf: self._make_tensor(leaf, signed) if is_shape(leaf) else leaf,
            (call.arguments, call.options),
            is_leaf=is_shape,
        )
        out: list[Any] = []

        def run() -> None:
            out.append(call.function(*arguments, **options))

        if self._clock is not None:
            seconds = self._clock.sample(run)
        else:
            started = time.perf_counter()
            run()
            seconds = time.perf_counter() - started
        self._keep_output(out[0])
        return seconds

    def _make_tensor(self, shape: TensorShape, signed: bool) -> torch.Tensor:
        """A tensor of that shape, in a part of the pool that the last runs did not use."""
        span = max(_span(shape), 1)
        pool_elements = self.pool_bytes // shape.dtype.itemsize
        if span > pool_elements // 2:
            return self._make_filled(span, shape.dtype, signed).as_strided(shape.shape, shape.stride)
        pool = (shape.dtype, signed and shape.dtype.is_floating_point)
        if pool not in self._pools:
            self._pools[pool] = self._make_filled(pool_elements, shape.dtype, signed)
        start = self._next_start.get(shape.dtype, 0)
        if start + span > pool_elements:
            start = 0
        self._next_start[shape.dtype] = start + -(-span // 64) * 64
        return self._pools[pool].as_strided(shape.shape, shape.stride, start)

    def _make_filled(self, count: int, dtype: torch.dtype, signed: bool) -> torch.Tensor:
        """Floats are random: on a GPU power, and with it the clock, depends on how many bits change, and constant
        operands ran at 894 TFLOP/s where random ones run at 788 (an H200). Indices and masks are zero."""
        if not dtype.is_floating_point:
            return torch.zeros(count, dtype=dtype, device=self.device)
        if signed:
            return filled((count,), dtype, self.device)
        return filled((count,), torch.float32, self.device).abs_().clamp_(*PROBABILITIES).to(dtype)

    def _keep_output(self, out: Any) -> None:
        """Keeps results for a while, so that the next result does not get the same memory, which is in the caches."""
        kept = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
        size_bytes = sum(t.untyped_storage().nbytes() for t in kept)
        self._outputs.append((out, size_bytes))
        self._output_bytes += size_bytes
        while self._output_bytes > self.pool_bytes and len(self._outputs) > 1:
            self._output_bytes -= self._outputs.popleft()[1]
