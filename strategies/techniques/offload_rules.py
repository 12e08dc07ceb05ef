"""What the offload knob goes with, and the sizes that the cost model reads too. Loads no torch."""

from __future__ import annotations

from autoplan.strategies.config import CUDAGRAPH_MODES, TrainingConfig

PIECE_BYTES = 128 * 2**20
"""Of parameters that an optimizer with its states on the host steps at once; a larger one is a piece by itself."""

PIECES_AT_ONCE = 3
"""Whose states are on the device: one comes, one is stepped, one goes."""

IN_FLIGHT_BYTES = 2**30
"""Of activations on their way: the host, which launches ahead, waits beyond it."""

READS = (
    "checkpointing",
    "precision",
    "parameters",
    "optimizer_state",
    "compile_mode",
    "offload",
    "dp_shard",
    "tp",
    "pp",
)
"""The knobs that `incompatible` reads."""


def incompatible(config: TrainingConfig, global_batch: int | None = None) -> str | None:
    """Why what is kept on the host does not go with the rest of a configuration; None if it does."""
    if config.offload == "none":
        return None
    asked = f"offload={config.offload}"
    if config.tp * config.pp > 1:
        return f"{asked} does not go with tensor parallelism or a pipeline"
    rounded = next((f"{k}={v}" for k in ("parameters", "optimizer_state") if (v := getattr(config, k)) != "own"), None)
    if rounded is not None and config.offload != "activations":
        return f"{asked} does not go with {rounded}, whose states step on the device"
    if config.offload == "parameters":
        return _reason_against_parameters(config)
    if config.offload == "optimizer":
        return None
    if config.compile_mode in CUDAGRAPH_MODES:
        return f"{asked} does not go with compile_mode={config.compile_mode}: CUDA graphs record no copies to the host"
    if config.checkpointing == "selective":
        return f"{asked} does not go with checkpointing=selective, which keeps results where autograd does not see them"
    return None


def _reason_against_parameters(config: TrainingConfig) -> str | None:
    asked = "offload=parameters"
    if config.dp_shard == 1:
        return f"{asked} needs FSDP2 (dp_shard of at least 2), which keeps the shards on the host"
    if config.compile_mode in CUDAGRAPH_MODES:
        return f"{asked} does not go with compile_mode={config.compile_mode}: CUDA graphs record no copies of the host"
    if config.precision == "fp16":
        return f"{asked} does not go with precision=fp16: the loss scaler looks at gradients on the device"
    return None
