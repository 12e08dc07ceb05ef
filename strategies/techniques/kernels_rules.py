"""What the kernels knob goes with. Loads no torch."""

from __future__ import annotations

from autoplan.strategies.config import TrainingConfig

READS = ("compile", "kernels", "tp", "pp")
"""The knobs that `incompatible` reads."""


def incompatible(config: TrainingConfig, global_batch: int | None = None) -> str | None:
    """Why kernels of another library do not go with the rest of a configuration; None if they do."""
    if config.kernels == "own":
        return None
    if config.compile != "off":
        return f"kernels={config.kernels} is for runs that are not compiled: Inductor fuses norms and gates by itself"
    if config.tp * config.pp > 1:
        return f"kernels={config.kernels} does not go with tensor parallelism or a pipeline"
    return None
