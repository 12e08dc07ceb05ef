"""What the knobs of torch.compile go with. Loads no torch."""

from __future__ import annotations

from autoplan.strategies.config import CUDAGRAPH_MODES, TrainingConfig

READS = ("compile", "compile_mode")
"""The knobs that `incompatible` reads."""


def incompatible(config: TrainingConfig, global_batch: int | None = None) -> str | None:
    """Why the mode does not go with what is compiled; None if it does."""
    if config.compile_mode == "default":
        return None
    if config.compile == "off":
        return f"compile_mode={config.compile_mode} needs compile=block or compile=model: nothing is compiled"
    if config.compile == "block" and config.compile_mode in CUDAGRAPH_MODES:
        return f"compile_mode={config.compile_mode} records CUDA graphs, which needs compile=model"
    return None
