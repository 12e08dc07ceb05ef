"""Straight lines in the samples, from recordings of the same variant at two micro-batches.

In: recordings (`fit_variant`), or the fits of models with two and with three blocks (`split_by_depth`). Out: operations
grouped by what they do, with a `LinearFit` for each figure, and at the end a `VariantProfile`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from autoplan.planner.trace.model_profile import (
    LinearFit,
    ModelProfile,
    OperationGroup,
    PeakFit,
    TensorSplit,
    VariantKey,
    VariantProfile,
)
from autoplan.planner.trace.op_benchmark import OpTiming, TimingRequest
from autoplan.planner.trace.op_recorder import Operation, Recording

GroupKey = tuple[Any, ...]
"""The properties that make operations alike: name, kind, phase, dtype, then (fixed, per_sample) of FLOPs, bytes moved,
output bytes and the sizes m, n, k, batch."""

FIGURES, SIZES = ("flops", "bytes_moved", "output_bytes"), ("m", "n", "k", "batch")
"""Of an operation, that are fitted."""

GroupCounts = Counter[GroupKey]
"""How many operations there are of each group."""

Split = tuple[GroupCounts, GroupCounts]
"""The operations of one block (of each stack), and the operations outside the blocks."""


@dataclass(kw_only=True, slots=True)
class VariantFits:
    """The fits of one variant at one depth.

    Attributes:
        groups: All operations of the micro-step.
        peaks: For each part the live bytes, with and without gradients.
        saved_bytes: Alive at the end of the forward.
        block_saved_bytes: Of that, what the forward of all blocks left.
    """

    groups: GroupCounts
    peaks: dict[str, tuple[LinearFit, LinearFit]]
    saved_bytes: LinearFit
    block_saved_bytes: LinearFit


def fit_line(small: float, large: float, samples: tuple[int, int]) -> LinearFit:
    """The straight line through a figure at the small and at the large micro-batch.

    Where samples differ in length, that line may go below zero: then the one through the origin and the larger of the
    two, or, where a figure falls with the samples, the flat one through that.
    """
    slope = (large - small) / (samples[1] - samples[0])
    fixed = small - slope * samples[0]
    if slope < 0:
        return LinearFit(fixed=large)
    return LinearFit(per_sample=large / samples[1]) if fixed < 0 else LinearFit(fixed=fixed, per_sample=slope)


def split_by_depth(two_blocks: GroupCounts, three_blocks: GroupCounts) -> Split:
    """The split of a variant, from models with two and with three blocks per stack: one block is the difference."""
    block = Counter(three_blocks)
    block.subtract(two_blocks)
    rest = Counter(two_blocks)
    for group, count in block.items():
        rest[group] -= 2 * count
    return block, rest


# Fitting.


def fit_variant(
    small_batch: Recording,
    large_batch: Recording,
    samples: tuple[int, int],
    requests: dict[GroupKey, TimingRequest],
) -> VariantFits:
    """Fits straight lines through two recordings of a variant.

    Operations are paired in order. Where one recording has more of them in the middle (chunks whose number grows with
    the samples), that stretch is fitted by its totals.

    Args:
        small_batch, large_batch: The recordings.
        samples: Their micro-batches.
        requests: How to time an operation of each group; new groups are added to it.
    """
    small, large = small_batch.operations, large_batch.operations
    groups: GroupCounts = Counter()
    start, end = _common_start_and_end(small, large)
    pairs = list(zip(small[:start], large[:start], strict=True))
    if end:
        pairs += zip(small[-end:], large[-end:], strict=True)
    for a, b in pairs:
        key = _fit_operation(a, b, samples)
        groups[key] += 1
        if key not in requests and a.call is not None:
            requests[key] = TimingRequest(
                small_batch=a.call, large_batch=b.call, count=1, flops=a.flops, output_bytes=a.output_bytes
            )
    middle = small[start : len(small) - end], large[start : len(large) - end]
    groups.update(_fit_repeated_operations(*middle, samples, requests))
    peaks = {
        part: (
            fit_line(first, large_batch.peaks[part][0], samples),
            fit_line(later, large_batch.peaks[part][1], samples),
        )
        for part, (first, later) in small_batch.peaks.items()
        if part in large_batch.peaks
    }
    saved = small_batch.saved_after_forward_bytes, large_batch.saved_after_forward_bytes
    return VariantFits(
        groups=groups,
        peaks=peaks,
        saved_bytes=fit_line(*saved, samples),
        block_saved_bytes=fit_line(small_batch.block_saved_bytes, large_batch.block_saved_bytes, samples),
    )


def _common_start_and_end(small: list[Operation], large: list[Operation]) -> tuple[int, int]:
    """How many operations two recordings have in common at their start and at their end."""
    length = min(len(small), len(large))
    start = next((i for i in range(length) if small[i].name != large[i].name), length)
    end = next((i for i in range(length - start) if small[-1 - i].name != large[-1 - i].name), length - start)
    return start, end


def _fit_operation(small: Operation, large: Operation, samples: tuple[int, int]) -> GroupKey:
    """The group of an operation that both recordings have."""
    pairs = [(getattr(small, figure), getattr(large, figure)) for figure in FIGURES]
    pairs += zip(small.sizes, large.sizes, strict=True)
    fits = [fit_line(a, b, samples) for a, b in pairs]
    return (small.name, small.kind, small.phase, small.dtype, *((fit.fixed, fit.per_sample) for fit in fits))


def _fit_repeated_operations(
    small: list[Operation],
    large: list[Operation],
    samples: tuple[int, int],
    requests: dict[GroupKey, TimingRequest],
) -> GroupCounts:
    """The groups of a stretch that repeats more often with more samples, such as chunks of rows.

    All operations of one name count as one batch of operations, whose size is a fit of how many there are.
    """
    by_name: dict[tuple[str, str, str, str], tuple[list[Operation], list[Operation]]] = {}
    for side, operations in enumerate((small, large)):
        for operation in operations:
            alike = (operation.name, operation.kind, operation.phase, operation.dtype)
            by_name.setdefault(alike, ([], []))[side].append(operation)
    groups: GroupCounts = Counter()
    for name, (a, b) in by_name.items():
        fits = [
            *(fit_line(_total(a, figure), _total(b, figure), samples) for figure in FIGURES),
            *(LinearFit(fixed=size) for size in (b or a)[0].sizes[:3]),
            fit_line(len(a), len(b), samples),
        ]
        key = (*name, *((fit.fixed, fit.per_sample) for fit in fits))
        groups[key] += 1
        one = a[0] if a else None
        if one is not None and one.call is not None and key not in requests:
            requests[key] = TimingRequest(
                small_batch=one.call, large_batch=None, count=len(a), flops=one.flops, output_bytes=one.output_bytes
            )
    return groups


def _total(operations: list[Operation], figure: str) -> float:
    return sum(getattr(operation, figure) for operation in operations)


# Profiles.


def group_key(group: OperationGroup) -> GroupKey:
    """The key that a group of a profile was made from."""
    fits = [getattr(group, figure) for figure in (*FIGURES, *SIZES)]
    return (group.name, group.kind, group.phase, group.dtype, *((fit.fixed, fit.per_sample) for fit in fits))


def timings_of(profile: ModelProfile, wanted: Iterable[GroupKey]) -> dict[GroupKey, OpTiming]:
    """The wanted timings that a profile has: an operation takes as long in any phase. A measured one goes first."""
    groups = [group for variant in profile.variants.values() for group in variant.groups]
    known = {
        _in_any_phase(group_key(group)): OpTiming(
            seconds=group.measured_s,
            larger_s=group.measured_more_s,
            larger_factor=max(1, round(group.measured_more_samples / group.measured_samples)),
            scaled=group.scaled,
        )
        for group in sorted(groups, key=lambda group: not group.scaled)
        if group.measured_s is not None
    }
    return {key: known[alike] for key in wanted if (alike := _in_any_phase(key)) in known}


def _in_any_phase(key: GroupKey) -> GroupKey:
    name, kind, _phase, *rest = key
    return name, kind, *rest


def make_variant_profile(
    key: VariantKey,
    split: Split,
    peaks: dict[str, tuple[LinearFit, LinearFit]],
    block_saved: LinearFit,
    saved: LinearFit,
    num_blocks: int,
) -> VariantProfile:
    """The profile of a variant.

    Args:
        key: The variant.
        split: Its operations.
        peaks: Of the model at its whole depth, for each part.
        block_saved, saved: Bytes saved for the backward by one block, and by the whole model.
        num_blocks: Blocks per stack; 0 where all operations are in the rest.
    """
    segments: tuple[tuple[Literal["block", "rest"], GroupCounts], ...] = (("block", split[0]), ("rest", split[1]))
    groups = [_make_group(g, count, segment) for segment, counts in segments for g, count in counts.items() if count]
    kernels = sum(g.count * (num_blocks if g.segment == "block" else 1) for g in groups)
    return VariantProfile(
        key=key,
        groups=tuple(groups),
        kernels=kernels,
        peaks=tuple(
            PeakFit(part=part, first=first, later=later)  # type: ignore[arg-type]
            for part, (first, later) in peaks.items()
            if part != "middle"
        ),
        block_saved_bytes=block_saved,
        rest_saved_bytes=saved - num_blocks * block_saved,
    )


def _make_group(key: GroupKey, count: float, segment: Literal["block", "rest"]) -> OperationGroup:
    name, kind, phase, dtype, *pairs = key
    fits = (LinearFit(fixed=a, per_sample=b) for a, b in pairs)
    found: dict[str, Any] = dict(zip((*FIGURES, *SIZES), fits, strict=True))
    split: TensorSplit = "none"
    if segment == "block" and kind == "matmul":
        split = "batch" if found["batch"].per_sample else "n"
    elif segment == "block":
        split = "batch" if kind == "attention" else "all"
    return OperationGroup(
        name=name, kind=kind, segment=segment, phase=phase, dtype=dtype, count=count, tensor_split=split, **found
    )
