"""What a pipeline goes with: its schedule, its micro-batches, and the knobs of what a stage runs. Loads no torch."""

from __future__ import annotations

from autoplan.strategies.config import INTERLEAVED_SCHEDULES, TrainingConfig

READS = (
    *("pp", "pp_schedule", "pp_microbatches", "virtual_stages", "micro_batch", "dp_replicate", "dp_shard"),
    *("compile", "loss", "checkpointing"),
)
"""The knobs that `incompatible` reads."""


def incompatible(config: TrainingConfig, global_batch: int | None = None) -> str | None:
    """Why other knobs do not go with the pipeline; None if they do, or if there is no pipeline.

    Args:
        config: The configuration.
        global_batch: With it, rules on the micro-batches of a step are checked too.
    """
    if config.pp == 1:
        return None
    return (
        _reason_against_schedule(config)
        or (_reason_against_microbatches(config, global_batch) if global_batch is not None else None)
        or _reason_against_stage(config)
    )


def _reason_against_schedule(config: TrainingConfig) -> str | None:
    if (config.pp_schedule in INTERLEAVED_SCHEDULES) == (config.virtual_stages > 1):
        return None
    least = "2 or more" if config.pp_schedule in INTERLEAVED_SCHEDULES else "1"
    return f"pp_schedule={config.pp_schedule} does not go with virtual_stages={config.virtual_stages}: it takes {least}"


def _reason_against_microbatches(config: TrainingConfig, global_batch: int) -> str | None:
    stages, per_pass = config.pp, config.pp_microbatches
    accumulation = global_batch // (config.micro_batch * config.dp_replicate * config.dp_shard)
    if accumulation % per_pass:
        return f"pp_microbatches={per_pass} does not divide the {accumulation} micro-batches of a step"
    if per_pass < stages:
        return f"pp_microbatches={per_pass} is less than pp={stages}: some stages would be idle throughout"
    if config.virtual_stages > 1 and per_pass % max(1, per_pass // stages):
        # torch's interleaved schedules go in rounds of as many micro-batches, about one per stage
        return f"pp_schedule={config.pp_schedule} goes in rounds of about {stages}: pp_microbatches={per_pass} is none"
    return None


def _reason_against_stage(config: TrainingConfig) -> str | None:
    if config.compile == "model":
        return "compile=model does not go with a pipeline: a stage would leave the graph of the whole model early"
    if config.pp_schedule != "zero_bubble":
        return None
    if config.dp_replicate * config.dp_shard > 1:
        return "zero_bubble computes gradients past the hooks that DDP and FSDP2 reduce them in"
    if config.compile != "off" or config.loss != "full" or config.checkpointing != "none":
        return "zero_bubble goes through a graph twice; compiled, fused and checkpointed graphs allow it once"
    return None
