"""What the knobs of DDP and FSDP2 go with, and the values that a search is asked to try. Loads no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

DDP_BUCKET_MB = 25
"""torch's default bucket size, and the knob's."""

DATA_PARALLEL_KNOBS = ("fsdp_prefetch", "gradient_sync", "ddp_bucket_mb", "ddp_static_graph")
"""All but gradient_sync are varied only where the user fixes or bounds them: the cost model cannot tell their values
apart."""


def reason_against_data_parallel(values: Mapping[str, Any], global_batch: int | None = None) -> str | None:
    """Why the knobs of DDP and FSDP2 do not go with the rest of a configuration; None if they do.

    Args:
        values: Knobs; what is not named stands at its default.
        global_batch: With it, rules on accumulation are checked too.
    """
    prefetch, pp = values.get("fsdp_prefetch", 0), values.get("pp", 1)
    if prefetch > 0 and values.get("dp_shard", 1) == 1:
        return f"fsdp_prefetch={prefetch} needs FSDP2 (dp_shard of at least 2): nothing else gathers parameters"
    if prefetch > 0 and pp > 1:
        return f"fsdp_prefetch={prefetch} does not go with a pipeline: a stage's parameters stay gathered"
    if values.get("gradient_sync", "last") == "every":
        reason = _reason_against_every(values, global_batch)
        if reason is not None:
            return reason
    bucket, static = values.get("ddp_bucket_mb", DDP_BUCKET_MB), values.get("ddp_static_graph", False)
    asked = f"ddp_bucket_mb={bucket}" if bucket != DDP_BUCKET_MB else "ddp_static_graph=True" if static else None
    if asked is None:
        return None
    if values.get("dp_replicate", 1) == 1:
        return f"{asked} needs DDP (dp_replicate of at least 2)"
    for knob in ("dp_shard", "tp"):
        if values.get(knob, 1) > 1:
            return f"{asked} needs DDP: with {knob}={values[knob]} FSDP2 keeps the replicas' gradients together"
    return _reason_against_static_graph(values, global_batch) if static else None


def with_data_parallel_knobs(
    ways: Sequence[Mapping[str, Any]], asked: Mapping[str, Sequence[Any]]
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Each way to share the work once per combination of values that go with it: those asked for, all of gradient_sync.

    Args:
        ways: Legal degrees, as `legal_degrees` gives them.
        asked: Values per knob; a knob that is not named stays at its default, but for gradient_sync.

    Returns:
        The ways, and why what was asked for does not go with some of them.
    """
    made: list[Mapping[str, Any]] = []
    reasons: dict[str, None] = {}
    unasked: list[dict[str, Any]] = [{}] if "gradient_sync" in asked else [{}, {"gradient_sync": "every"}]
    for way in ways:
        for row in itertools.product(*asked.values()):
            full = dict(way) | dict(zip(asked, row, strict=True))
            reason = reason_against_data_parallel(full)
            if reason is None:
                made += [full | more for more in unasked if reason_against_data_parallel(full | more) is None]
            elif reason_against_data_parallel(way) is None:
                reasons[reason] = None
    return made, list(reasons)


def _reason_against_every(values: Mapping[str, Any], global_batch: int | None) -> str | None:
    if values.get("dp_shard", 1) == 1:
        return "gradient_sync=every needs FSDP2 (dp_shard of at least 2): else every rank keeps whole gradients anyway"
    if values.get("pp", 1) > 1:
        # torch 2.13: PipelineStage.backward_maybe_with_nosync turns FSDP2's reduction off before every backward.
        return "gradient_sync=every does not go with a pipeline: torch's stages reduce gradients once per pass"
    if global_batch is None or "micro_batch" not in values:
        return None
    micro_batch, ranks = values["micro_batch"], values.get("dp_replicate", 1) * values["dp_shard"]
    if global_batch // (micro_batch * ranks) > 1:
        return None
    return (
        f"gradient_sync=every needs several micro-batches per step, and micro_batch={micro_batch} on {ranks} ranks "
        "makes one: it would be the same as gradient_sync=last"
    )


def _reason_against_static_graph(values: Mapping[str, Any], global_batch: int | None) -> str | None:
    if values.get("pp", 1) > 1:
        return "ddp_static_graph=True does not go with a pipeline: a stage has several forwards before a backward"
    if global_batch is None or "micro_batch" not in values:
        return None
    micro_batch, ranks = values["micro_batch"], values["dp_replicate"]
    accumulation = global_batch // (micro_batch * ranks)
    if accumulation > 1:
        # Seen with torch 2.13: `expect_autograd_hooks_ INTERNAL ASSERT FAILED` in reducer.cpp.
        return (
            f"ddp_static_graph=True takes one micro-batch per step, and micro_batch={micro_batch} on {ranks} ranks "
            f"makes {accumulation}: torch learns the graph in the first backward, which must reduce gradients"
        )
    return None
