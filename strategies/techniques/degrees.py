"""The legal combinations of degrees that share a workload over ranks, and why others are not legal. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autoplan.strategies.analysis.facts import ParallelFacts
from autoplan.strategies.config import micro_batches

if TYPE_CHECKING:
    from autoplan.strategies.analysis.facts import WorkloadFacts

# Stages per rank that the interleaved schedules are tried with; more of them means more, smaller messages.
VIRTUAL_STAGES = (2,)


DegreeCombination = dict[str, Any]


def legal_degrees(
    facts: WorkloadFacts, nproc: int, *, device: str = "cpu", ranks_per_node: int | None = None
) -> tuple[list[DegreeCombination], list[dict[str, Any]]]:
    """The combinations to share a workload over up to `nproc` ranks.

    Args:
        facts: The workload's facts.
        nproc: Ranks.
        device: On CUDA every rank is a GPU, and all are used; on CPU fewer ranks with more threads each can win.
        ranks_per_node: tp stays within a node; None: one node.

    Returns:
        Ways as mappings of knobs (dp_replicate, dp_shard, reshard_after_forward, tp, pp, pp_schedule,
        pp_microbatches, virtual_stages; what is 1 or off is not named), and what was left out as family, limit, by
        and configurations.
    """
    combinations: list[DegreeCombination] = []
    left_out: dict[str, dict[str, Any]] = {}
    for world in world_sizes(nproc, device):
        for pp, tp, replicate, shard in factorings(world):
            reason = reason_against(facts, pp=pp, tp=tp, dp=replicate * shard, ranks_per_node=ranks_per_node or nproc)
            if reason is not None:
                family, limit, by = reason
                entry = left_out.setdefault(family, {"family": family, "limit": limit, "by": by, "configurations": 0})
                entry["configurations"] += 1
                continue
            combinations += _expand(facts, pp, tp, replicate, shard)
    return combinations, list(left_out.values())


def world_sizes(nproc: int, device: str) -> list[int]:
    """Rank counts to look at: all GPUs; on CPU 2, 4, 8, ... and nproc."""
    if device == "cuda":
        return [nproc]
    return sorted({2**power for power in range(1, nproc.bit_length()) if 2**power <= nproc} | {nproc})


def factorings(world: int) -> Iterator[tuple[int, int, int, int]]:
    """Every (pp, tp, dp_replicate, dp_shard) with that product."""
    for pp in _divisors(world):
        for tp in _divisors(world // pp):
            for replicate in _divisors(world // pp // tp):
                yield pp, tp, replicate, world // pp // tp // replicate


def reason_against(
    facts: WorkloadFacts, *, pp: int, tp: int, dp: int, ranks_per_node: int
) -> tuple[str, str, str] | None:
    """(family, which limit, by how much) for degrees that are not legal; None if they are."""
    parallel = facts.parallel
    if facts.spec.global_batch % dp:
        batch = facts.spec.global_batch
        return f"dp={dp}", "data-parallel ranks divide the global batch", f"{batch} over {dp} leaves {batch % dp}"
    if tp > 1 and (reason := reason_against_tp(facts, tp, ranks_per_node)) is not None:
        return f"tp={tp}", *reason
    if pp > 1:
        if parallel is None or parallel.pp_reason is not None:
            return "pp>1", "pipeline parallelism cuts one row of blocks", _why(parallel, "pp_reason")
        if parallel.num_blocks < pp:
            return f"pp={pp}", "a stage holds at least one block", f"{parallel.num_blocks} blocks"
    return None


def reason_against_tp(facts: WorkloadFacts, tp: int, ranks_per_node: int) -> tuple[str, str] | None:
    """(which limit, by how much) for a tensor-parallel degree that is not legal; None if it is."""
    parallel = facts.parallel
    if parallel is None or parallel.tp_unit is None:
        return "tensor parallelism needs a plan of the model's projections", _why(parallel, "tp_reason")
    if parallel.tp_unit % tp:
        legal = ", ".join(str(d) for d in _divisors(parallel.tp_unit))
        return "tp divides what it splits", f"{parallel.tp_unit_of}: tp can be {legal}"
    length = facts.spec.sequence_length
    if length is not None and length % tp:
        return "sequence parallelism splits the sequence evenly", f"{length} over {tp} leaves {length % tp}"
    if tp > ranks_per_node:
        return "tp stays within a node", f"{tp} ranks, {ranks_per_node} per node"
    return None


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
    DDP and FSDP2 reduce gradients in (seen with torch 2.13: the gradients are wrong, without an error).
    """
    legal: list[tuple[str, int]] = []
    if num_microbatches >= pp:  # fewer would leave ranks idle for the whole pass
        legal += [("gpipe", 1), ("1f1b", 1)]
        rounds = max(1, num_microbatches // pp)
        for virtual in VIRTUAL_STAGES:
            if num_blocks >= pp * virtual and num_microbatches % rounds == 0:
                legal += [("interleaved_1f1b", virtual)] + ([("zero_bubble", virtual)] if dp == 1 else [])
    return legal


def explain_degree(facts: WorkloadFacts, knob: str, value: Any, nproc: int) -> str | None:
    """Why a fixed degree leaves nothing, in a sentence; None where it is legal for some number of ranks."""
    if not isinstance(value, int) or knob not in ("tp", "pp", "dp_replicate", "dp_shard"):
        return None
    degrees = {"tp": 1, "pp": 1, "dp": 1} | {knob if knob in ("tp", "pp") else "dp": value}
    reason = reason_against(facts, **degrees, ranks_per_node=max(nproc, value))
    if reason is not None:
        return f"{knob}={value}: {reason[1]} ({reason[2]})"
    if value > nproc:
        return f"{knob}={value} needs {value} ranks; --nproc is {nproc}"
    return None


def coherent_with_pipeline(values: Mapping[str, Any], global_batch: int) -> bool:
    """Whether the other knobs go with the pipeline: one pass per step, and what `reason_against_knobs` says."""
    if values.get("pp", 1) == 1:
        return True
    dp = values.get("dp_replicate", 1) * values.get("dp_shard", 1)
    accumulation = global_batch // dp // values["micro_batch"]
    return accumulation == values.get("pp_microbatches", 1) and reason_against_knobs(values) is None


def reason_against_knobs(values: Mapping[str, Any]) -> str | None:
    """Why other knobs do not go with a pipeline; None if they do."""
    compiled, schedule = values.get("compile", "off"), values.get("pp_schedule", "1f1b")
    if compiled == "model":
        return "a stage leaves the model's forward where its blocks end; a graph of the whole model cannot"
    if schedule != "zero_bubble":
        return None
    if values.get("dp_replicate", 1) * values.get("dp_shard", 1) > 1:
        return "zero_bubble computes gradients past the hooks that DDP and FSDP2 reduce them in"
    graph_twice = compiled != "off" or values.get("loss", "full") != "full"
    if graph_twice or values.get("checkpointing", "none") != "none":
        return "zero_bubble goes through a graph twice; compiled, fused and checkpointed graphs allow it once"
    return None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
