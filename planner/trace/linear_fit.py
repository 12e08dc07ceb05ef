"""The laws of a traced model: recordings at two micro-batches and two depths made into groups and straight lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from autoplan.planner.trace.model_profile import (
    LinearFit,
    OperationGroup,
    PeakFit,
    VariantKey,
    VariantProfile,
)
from autoplan.planner.trace.op_benchmark import Timing
from autoplan.planner.trace.op_recorder import Operation, Recording

GroupKey = tuple[Any, ...]


@dataclass(kw_only=True, slots=True)
class VariantFits:
    groups: Counter[GroupKey]
    peaks: dict[str, tuple[LinearFit, LinearFit]]
    saved: LinearFit
    block_saved: LinearFit


def total_flops(recording: Recording) -> float:
    return sum(operation.flops for operation in recording.operations)


def total_moved(recording: Recording) -> float:
    return sum(operation.bytes_moved for operation in recording.operations)


def line(few: float, many: float, samples: tuple[int, int]) -> LinearFit:
    slope = (many - few) / (samples[1] - samples[0])
    return LinearFit(fixed=few - slope * samples[0], per_sample=slope)


def scale(law: LinearFit, factor: float) -> LinearFit:
    return LinearFit(fixed=law.fixed * factor, per_sample=law.per_sample * factor)


def add(law: LinearFit, block: LinearFit, more: int) -> LinearFit:
    return LinearFit(fixed=law.fixed + more * block.fixed, per_sample=law.per_sample + more * block.per_sample)


def blocks_apart(two: Counter[GroupKey], three: Counter[GroupKey]) -> tuple[Counter[GroupKey], Counter[GroupKey]]:
    """What one block does and what the rest does, from models of two and of three blocks."""
    block = minus(three, two, 1)
    return block, minus(two, block, 2)


def minus(a: Counter[GroupKey], b: Counter[GroupKey], times: int) -> Counter[GroupKey]:
    """a - times x b, negative counts kept, zeros left out."""
    out = Counter(a)
    for group, count in b.items():
        out[group] -= times * count
    return Counter({group: count for group, count in out.items() if count})


def group_key(group: OperationGroup) -> GroupKey:
    """The key that a group was made from."""
    laws = (group.flops, group.bytes_moved, group.output_bytes, group.m, group.n, group.k, group.batch)
    return (group.name, group.kind, group.phase, group.dtype, *((law.fixed, law.per_sample) for law in laws))


def fit_variant(
    few: Recording,
    many: Recording,
    samples: tuple[int, int],
    recipes: dict[GroupKey, Timing],
) -> VariantFits:
    groups: Counter[GroupKey] = Counter()
    start, end = _common_ends(few.operations, many.operations)
    pairs = list(zip(few.operations[:start], many.operations[:start], strict=True))
    if end:
        pairs += zip(few.operations[-end:], many.operations[-end:], strict=True)
    for a, b in pairs:
        key = _group_key(a, b, samples)
        groups[key] += 1
        if key not in recipes and a.recipe is not None:
            recipes[key] = Timing(few=a.recipe, many=b.recipe, count=1, flops=a.flops)
    between = few.operations[start : len(few.operations) - end], many.operations[start : len(many.operations) - end]
    groups.update(_grown_keys(*between, samples, recipes))
    peaks = {
        part: (
            line(few.peaks[part][0], many.peaks[part][0], samples),
            line(few.peaks[part][1], many.peaks[part][1], samples),
        )
        for part in few.peaks
        if part in many.peaks
    }
    return VariantFits(
        groups=groups,
        peaks=peaks,
        saved=line(few.saved_after_forward, many.saved_after_forward, samples),
        block_saved=line(sum(few.block_saved), sum(many.block_saved), samples),
    )


def _common_ends(few: list[Operation], many: list[Operation]) -> tuple[int, int]:
    """How many operations two recordings have in common at their start and at their end."""
    length = min(len(few), len(many))
    start = next((i for i in range(length) if few[i].name != many[i].name), length)
    end = next((i for i in range(length - start) if few[-1 - i].name != many[-1 - i].name), length - start)
    return start, end


def _grown_keys(
    few: list[Operation],
    many: list[Operation],
    samples: tuple[int, int],
    recipes: dict[GroupKey, Timing],
) -> Counter[GroupKey]:
    """Groups for a stretch that grows by repetition (chunks of rows): alike operations as one batch of them."""
    totals: dict[tuple[str, str, str, str], list[list[Operation]]] = {}
    for side, operations in enumerate((few, many)):
        for o in operations:
            totals.setdefault((o.name, o.kind, o.phase, o.dtype), [[], []])[side].append(o)
    groups: Counter[GroupKey] = Counter()
    for (name, kind, phase, dtype), (a, b) in totals.items():
        laws = [
            line(sum(o.flops for o in a), sum(o.flops for o in b), samples),
            line(sum(o.bytes_moved for o in a), sum(o.bytes_moved for o in b), samples),
            line(sum(o.output_bytes for o in a), sum(o.output_bytes for o in b), samples),
            *(LinearFit(fixed=size) for size in (b or a)[0].sizes[:3]),
            line(len(a), len(b), samples),
        ]
        key = (name, kind, phase, dtype, *((law.fixed, law.per_sample) for law in laws))
        groups[key] += 1
        recipe = a[0].recipe if a and key not in recipes else None
        if recipe is not None:
            recipes[key] = Timing(few=recipe, many=None, count=len(a), flops=a[0].flops)
    return groups


def _group_key(few: Operation, many: Operation, samples: tuple[int, int]) -> GroupKey:
    pairs = [(few.flops, many.flops), (few.bytes_moved, many.bytes_moved), (few.output_bytes, many.output_bytes)]
    pairs += list(zip(few.sizes, many.sizes, strict=True))
    laws = [line(a, b, samples) for a, b in pairs]
    return (few.name, few.kind, few.phase, few.dtype, *((law.fixed, law.per_sample) for law in laws))


def to_profile(
    key: VariantKey,
    block: Counter[GroupKey],
    rest: Counter[GroupKey],
    peaks: dict[str, tuple[LinearFit, LinearFit]],
    block_saved: LinearFit,
    saved: LinearFit,
    num_blocks: int,
) -> VariantProfile:
    segments: tuple[tuple[Literal["block", "rest"], Counter[GroupKey]], ...] = (("block", block), ("rest", rest))
    groups = [_group(g, count, segment) for segment, counts in segments for g, count in counts.items() if count]
    kernels = sum(g.count * (num_blocks if g.segment == "block" else 1) for g in groups)
    rest_saved = LinearFit(
        fixed=saved.fixed - num_blocks * block_saved.fixed,
        per_sample=saved.per_sample - num_blocks * block_saved.per_sample,
    )
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
        rest_saved_bytes=rest_saved,
    )


def _group(key: GroupKey, count: float, segment: Literal["block", "rest"]) -> OperationGroup:
    name, kind, phase, dtype, *laws = key
    flops, moved, made, m, n, k, batch = (LinearFit(fixed=fixed, per_sample=slope) for fixed, slope in laws)
    split = "none"
    if segment == "block":
        split = {"matmul": "n", "attention": "batch"}.get(kind, "all")
        if kind == "matmul" and batch.per_sample:
            split = "batch"
    return OperationGroup.model_validate(
        {
            "name": name,
            "kind": kind,
            "segment": segment,
            "phase": phase,
            "dtype": dtype,
            "count": count,
            "flops": flops,
            "bytes_moved": moved,
            "output_bytes": made,
            "m": m,
            "n": n,
            "k": k,
            "batch": batch,
            "tensor_split": split,
        }
    )


def swap_loss(
    key: VariantKey, plain: VariantProfile, bare: VariantProfile, bare_fused: VariantProfile
) -> VariantProfile | None:
    """A variant with the fused loss, from the same with the full loss and what the fused loss changes in another.

    Args:
        key: The variant.
        plain: The same with the full loss.
        bare, bare_fused: Without checkpointing and with the model's own attention, under either loss.

    Returns:
        None where the loss is not all that differs.
    """

    def exchange(a: LinearFit, b: LinearFit, c: LinearFit) -> LinearFit:
        return LinearFit(fixed=a.fixed - b.fixed + c.fixed, per_sample=a.per_sample - b.per_sample + c.per_sample)

    rest: Counter[GroupKey] = Counter()
    known: dict[GroupKey, OperationGroup] = {}
    for variant, sign in ((plain, 1), (bare, -1), (bare_fused, 1)):
        for group in variant.groups:
            if group.segment == "rest":
                rest[group_key(group)] += sign * group.count  # type: ignore[assignment]
                known[group_key(group)] = group
    if any(count < 0 for count in rest.values()):
        return None
    by_part = {p.part: p for p in bare.peaks}, {p.part: p for p in bare_fused.peaks}
    peaks = tuple(
        PeakFit(
            part=p.part,
            first=exchange(p.first, by_part[0][p.part].first, by_part[1][p.part].first),
            later=exchange(p.later, by_part[0][p.part].later, by_part[1][p.part].later),
        )
        for p in plain.peaks
        if p.part in by_part[0] and p.part in by_part[1]
    )
    return VariantProfile(
        key=key,
        groups=(
            *(group for group in plain.groups if group.segment == "block"),
            *(known[group].model_copy(update={"count": float(count)}) for group, count in rest.items() if count),
        ),
        kernels=plain.kernels - bare.kernels + bare_fused.kernels,
        peaks=peaks,
        block_saved_bytes=plain.block_saved_bytes,
        rest_saved_bytes=exchange(plain.rest_saved_bytes, bare.rest_saved_bytes, bare_fused.rest_saved_bytes),
    )
