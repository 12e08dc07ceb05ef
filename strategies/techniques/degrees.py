"""The legal combinations of degrees for a workload, and why others are not legal. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoplan.strategies.analysis.facts import LeftOut, ParallelFacts, WorkloadFacts
from autoplan.strategies.config import PLAIN, RANK_COUNTS, knob_values, micro_batches
from autoplan.strategies.techniques.rules import incompatible

VIRTUAL_STAGES = (2,)
"""Stages per rank that the interleaved schedules are tried with; more of them means more, smaller messages."""

DegreeCombination = dict[str, Any]
"""Values of the knobs that say how ranks share the work; what is 1 or off is not named."""


def legal_degrees(
    facts: WorkloadFacts, nproc: int, *, device: str = "cpu", ranks_per_node: int | None = None
) -> tuple[list[DegreeCombination], list[LeftOut]]:
    """The legal combinations of degrees for a workload over up to `nproc` ranks.

    Args:
        facts: The workload's facts.
        nproc: Ranks.
        device: On CUDA every rank is a GPU, and all are used; where they do not divide the global batch, on one node
            the most that do as well. On CPU 2, 4, 8, ... too: fewer ranks with more threads each can win.
        ranks_per_node: tp stays within a node; None: one node.

    Returns:
        The combinations without gradient_sync (`with_gradient_sync` adds it), and what was left out.
    """
    combinations: list[DegreeCombination] = []
    left_out: dict[str, LeftOut] = {}
    worlds: Sequence[int] = sorted({2**power for power in range(1, nproc.bit_length())} | {nproc})
    if device == "cuda":
        fewer = (world for world in range(nproc, 1, -1) if facts.spec.global_batch % world == 0)
        worlds = sorted({nproc, next(fewer, nproc)}) if ranks_per_node in (None, nproc) else (nproc,)
    for world in worlds:
        for pp, tp, replicate, shard in factorings(world):
            found = reason_against(facts, pp=pp, tp=tp, dp=replicate * shard, ranks_per_node=ranks_per_node or nproc)
            if found is None:
                combinations += _expand(facts, pp, tp, replicate, shard)
                continue
            first = left_out.get(found.family, found)
            left_out[found.family] = first.model_copy(update={"configurations": first.configurations + 1})
    return combinations, list(left_out.values())


def with_gradient_sync(
    combinations: Sequence[Mapping[str, Any]], asked: Sequence[Any] | None
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Each combination of degrees once per value of gradient_sync that goes with it.

    Args:
        combinations: Legal degrees, as `legal_degrees` gives them.
        asked: The values that the user allows; None: all.

    Returns:
        The combinations, and why what was asked for does not go with some of them.
    """
    made: list[Mapping[str, Any]] = []
    reasons: dict[str, None] = {}
    for combination in combinations:
        for value in knob_values("gradient_sync") or () if asked is None else asked:
            full = dict(combination) | ({} if value == PLAIN.gradient_sync else {"gradient_sync": value})
            reason = incompatible(PLAIN.model_copy(update=full))
            if reason is None:
                made.append(full)
            elif asked is not None:
                reasons[reason] = None
    return made, list(reasons)


def factorings(world: int) -> Iterator[tuple[int, int, int, int]]:
    """Every (pp, tp, dp_replicate, dp_shard) with that product."""
    for pp in _divisors(world):
        for tp in _divisors(world // pp):
            for replicate in _divisors(world // pp // tp):
                yield pp, tp, replicate, world // pp // tp // replicate


def reason_against(facts: WorkloadFacts, *, pp: int, tp: int, dp: int, ranks_per_node: int) -> LeftOut | None:
    """Why degrees are not legal for a workload; None if they are."""
    parallel = facts.parallel
    batch = facts.spec.global_batch
    if batch % dp:
        reason, by = "data-parallel ranks divide the global batch", f"{batch} over {dp} leaves {batch % dp}"
        return LeftOut(knob="dp", value=dp, reason=reason, by=by)
    if tp * pp > 1 and parallel is not None and parallel.noisy:
        reason, by = "ranks that share a model see the same data", "the loss draws random numbers, and each rank others"
        return LeftOut(knob="tp" if tp > 1 else "pp", value=">1", reason=reason, by=by)
    if tp > 1 and (found := reason_against_tp(facts, tp, ranks_per_node)) is not None:
        return found
    if pp > 1:
        if parallel is None or parallel.pp_reason is not None:
            reason = "pipeline parallelism cuts one row of blocks"
            return LeftOut(knob="pp", value=">1", reason=reason, by=_why(parallel, "pp_reason"))
        if parallel.num_blocks < pp:
            reason, by = "a stage holds at least one block", f"{parallel.num_blocks} blocks"
            return LeftOut(knob="pp", value=pp, reason=reason, by=by)
    return None


def reason_against_tp(facts: WorkloadFacts, tp: int, ranks_per_node: int) -> LeftOut | None:
    """Why a tensor-parallel degree is not legal for a workload; None if it is."""
    parallel, length = facts.parallel, facts.spec.sequence_length
    if parallel is None or parallel.tp_unit is None:
        reason, by = "tensor parallelism needs a plan of the model's projections", _why(parallel, "tp_reason")
    elif parallel.tp_unit % tp:
        legal = ", ".join(str(d) for d in _divisors(parallel.tp_unit))
        reason, by = "tp divides what it splits", f"{parallel.tp_unit_of}: tp can be {legal}"
    elif length is not None and length % tp:
        reason, by = "sequence parallelism splits the sequence evenly", f"{length} over {tp} leaves {length % tp}"
    elif tp > ranks_per_node:
        reason, by = "tp stays within a node", f"{tp} ranks, {ranks_per_node} per node"
    else:
        return None
    return LeftOut(knob="tp", value=tp, reason=reason, by=by)


def _why(parallel: ParallelFacts | None, field: str) -> str:
    return "the model was not looked at" if parallel is None else str(getattr(parallel, field) or "")


def _expand(facts: WorkloadFacts, pp: int, tp: int, replicate: int, shard: int) -> Iterator[DegreeCombination]:
    """One combination of degrees with what goes with it: resharding, and the pipeline's schedules."""
    named = {"pp": pp, "tp": tp, "dp_replicate": replicate, "dp_shard": shard}
    base: DegreeCombination = {knob: value for knob, value in named.items() if value > 1}
    shardings: list[DegreeCombination] = [{}]
    if shard > 1:
        # A pipeline stage's backward follows its forward at once in the steady state: gathering again gains nothing.
        shardings = [{"reshard_after_forward": value} for value in ((True, False) if pp == 1 else (False,))]
    for sharding in shardings:
        for schedule in _schedules(facts, pp, replicate * shard):
            yield base | sharding | schedule


def _schedules(facts: WorkloadFacts, pp: int, dp: int) -> Iterator[DegreeCombination]:
    if pp == 1:
        yield {}
        return
    assert facts.parallel is not None
    for size in micro_batches(facts.spec.global_batch, dp):
        count = facts.spec.global_batch // dp // size
        for schedule, virtual in pipeline_schedules(facts.parallel.num_blocks, pp, count, dp):
            combination: DegreeCombination = {"pp_schedule": schedule, "pp_microbatches": count}
            yield combination | ({"virtual_stages": virtual} if virtual > 1 else {})


def pipeline_schedules(num_blocks: int, pp: int, num_microbatches: int, dp: int = 1) -> list[tuple[str, int]]:
    """The (schedule, stages per rank) that torch's schedules take with that many micro-batches per pass.

    zero_bubble needs dp = 1: it computes the gradients of weights apart from those of inputs, past the hooks that
    DDP and FSDP2 reduce gradients in (seen with torch 2.13: the gradients are wrong, without an error). Where it is
    legal it can be the fastest of all: so it was among the 128 recorded trials of a ViT on two CPU ranks, 0.196 s a
    step, where interleaved_1f1b's best was 0.247 s (vision-2 of benchmarks/search_tables.py, an earlier drawing).
    """
    legal: list[tuple[str, int]] = []
    if num_microbatches >= pp:  # fewer would leave ranks idle for the whole pass
        legal += [("gpipe", 1), ("1f1b", 1)]
        rounds = max(1, num_microbatches // pp)
        for virtual in VIRTUAL_STAGES:
            if num_blocks >= pp * virtual and num_microbatches % rounds == 0:
                legal += [("interleaved_1f1b", virtual)] + ([("zero_bubble", virtual)] if dp == 1 else [])
    return legal


def explain_degree(
    facts: WorkloadFacts, knob: str, value: Any, nproc: int, *, ranks_per_node: int | None = None
) -> str | None:
    """Why a fixed degree leaves nothing, in a sentence; None where it is legal for some number of ranks."""
    if not isinstance(value, int) or knob not in RANK_COUNTS:
        return None
    config = PLAIN.model_copy(update={knob: value})
    per_node = ranks_per_node or max(nproc, value)
    found = reason_against(facts, pp=config.pp, tp=config.tp, dp=config.dp, ranks_per_node=per_node)
    if found is not None:
        return f"{knob}={value}: {found.reason} ({found.by})"
    if value > nproc:
        return f"{knob}={value} needs {value} ranks; --nproc is {nproc}"
    return None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
