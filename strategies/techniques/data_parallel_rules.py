"""What the knobs of DDP and FSDP2 go with. Loads no torch."""

from __future__ import annotations

from autoplan.strategies.config import EXCHANGE_KNOBS, PLAIN, TrainingConfig

READS = ("micro_batch", "batch_norm", "dp_replicate", "dp_shard", "tp", "pp", *EXCHANGE_KNOBS)
"""The knobs that `incompatible` reads."""


def incompatible(config: TrainingConfig, global_batch: int | None = None) -> str | None:
    """Why the knobs of DDP and FSDP2 do not go with the rest of a configuration; None if they do.

    Args:
        config: The configuration.
        global_batch: With it, rules on accumulation are checked too.
    """
    return (
        _reason_against_prefetch(config)
        or _reason_against_sync(config)
        or (_reason_against_every(config, global_batch) if config.gradient_sync == "every" else None)
        or _reason_against_ddp_knobs(config, global_batch)
    )


def _reason_against_prefetch(config: TrainingConfig) -> str | None:
    prefetch = config.fsdp_prefetch
    if prefetch > 0 and config.dp_shard == 1:
        return f"fsdp_prefetch={prefetch} needs FSDP2 (dp_shard of at least 2): nothing else gathers parameters"
    if prefetch > 0 and config.pp > 1:
        return f"fsdp_prefetch={prefetch} does not go with a pipeline: a stage's parameters stay gathered"
    return None


def _reason_against_sync(config: TrainingConfig) -> str | None:
    if config.batch_norm == "own":
        return None
    if config.dp_replicate * config.dp_shard == 1:
        return "batch_norm=sync needs several data-parallel ranks: one has nobody to share statistics with"
    if config.dp_replicate > 1 and config.dp_shard > 1:
        return "batch_norm=sync goes over one axis of ranks: dp_replicate or dp_shard"
    if config.tp * config.pp > 1:
        return "batch_norm=sync does not go with tensor parallelism or a pipeline"
    return None


def _reason_against_every(config: TrainingConfig, global_batch: int | None) -> str | None:
    if config.dp_shard == 1:
        return "gradient_sync=every needs FSDP2 (dp_shard of at least 2): else every rank keeps whole gradients anyway"
    if config.pp > 1:
        # torch 2.13: PipelineStage.backward_maybe_with_nosync turns FSDP2's reduction off before every backward.
        return "gradient_sync=every does not go with a pipeline: torch's stages reduce gradients once per pass"
    ranks = config.dp_replicate * config.dp_shard
    if global_batch is None or global_batch // (config.micro_batch * ranks) > 1:
        return None
    return (
        f"gradient_sync=every needs several micro-batches per step, and micro_batch={config.micro_batch} on {ranks} "
        "ranks makes one: it would be the same as gradient_sync=last"
    )


def _reason_against_ddp_knobs(config: TrainingConfig, global_batch: int | None) -> str | None:
    bucket, static = config.ddp_bucket_mb, config.ddp_static_graph
    if bucket != PLAIN.ddp_bucket_mb:
        asked = f"ddp_bucket_mb={bucket}"
    elif static:
        asked = "ddp_static_graph=True"
    else:
        return None
    if config.dp_replicate == 1:
        return f"{asked} needs DDP (dp_replicate of at least 2)"
    for knob, ranks in (("dp_shard", config.dp_shard), ("tp", config.tp)):
        if ranks > 1:
            return f"{asked} needs DDP: with {knob}={ranks} FSDP2 keeps the replicas' gradients together"
    return _reason_against_static_graph(config, global_batch) if static else None


def _reason_against_static_graph(config: TrainingConfig, global_batch: int | None) -> str | None:
    if config.pp > 1:
        return "ddp_static_graph=True does not go with a pipeline: a stage has several forwards before a backward"
    if global_batch is None:
        return None
    accumulation = global_batch // (config.micro_batch * config.dp_replicate)
    if accumulation > 1:
        # Seen with torch 2.13: `expect_autograd_hooks_ INTERNAL ASSERT FAILED` in reducer.cpp.
        return (
            f"ddp_static_graph=True takes one micro-batch per step, and micro_batch={config.micro_batch} on "
            f"{config.dp_replicate} ranks makes {accumulation}: torch learns the graph in the first backward, which "
            "must reduce gradients"
        )
    return None
