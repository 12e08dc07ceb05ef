"""What parameters in bf16 and rounded optimizer states go with. Loads no torch."""

from __future__ import annotations

from autoplan.strategies.config import TrainingConfig

READS = (
    "micro_batch",
    "precision",
    "parameters",
    "optimizer_state",
    "dp_replicate",
    "dp_shard",
    "gradient_sync",
    "tp",
    "pp",
)
"""The knobs that `incompatible` reads."""

MOST_ADDITIONS = 32
"""Gradients in bf16 that are added up in a row, over micro-batches and DDP's replicas: sqrt(32) 2^-9 is 1.1 %."""


def incompatible(config: TrainingConfig, global_batch: int | None = None) -> str | None:
    """Why the knobs of what is kept rounded do not go with the rest of a configuration; None if they do.

    Args:
        config: The configuration.
        global_batch: With it, the length of the accumulation is checked too.
    """
    rounded = [f"{k}={v}" for k in ("parameters", "optimizer_state") if (v := getattr(config, k)) != "own"]
    if not rounded:
        return None
    for knob, ranks in (("tp", config.tp), ("pp", config.pp)):
        if ranks > 1:
            return f"{rounded[0]} does not go with {knob}={ranks}: what ranks share of a parameter was not compared"
    return _reason_against_bf16(config, global_batch) if config.parameters != "own" else None


def _reason_against_bf16(config: TrainingConfig, global_batch: int | None) -> str | None:
    if config.precision != "bf16":
        return f"parameters={config.parameters} needs precision=bf16: products of bf16 parameters are in bf16"
    if global_batch is None or config.dp_shard > 1 and config.gradient_sync == "last":
        return None  # FSDP2 adds micro-batches up in fp32, which it reduces in
    additions = global_batch // (config.micro_batch * config.dp_replicate * config.dp_shard) + config.dp_replicate - 1
    if additions <= MOST_ADDITIONS:
        return None
    return (
        f"parameters={config.parameters} adds {additions} gradients up in bf16 here, over micro-batches and replicas; "
        f"more than {MOST_ADDITIONS} in a row lose over 1 %: use a larger micro_batch"
    )
