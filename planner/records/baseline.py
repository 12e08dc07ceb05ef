"""What a plan is compared with, as people read it: your setting, the plain run, or what stands for that."""

from __future__ import annotations

from autoplan.strategies.config import TrainingConfig

YOURS = "your setting"


def is_plain_run(config: TrainingConfig) -> bool:
    """Whether a configuration is fp32 with nothing applied, in micro-batches of some size."""
    return config.knobs_off_default().keys() <= {"micro_batch"}


def may_stand_in(config: TrainingConfig) -> bool:
    """Whether it is the plain run or what is tried where that does not fit (`search.references.rungs`)."""
    return config.knobs_off_default().keys() <= {"micro_batch", "checkpointing", "loss", "offload"}


def run_words(
    config: TrainingConfig, own: TrainingConfig | None, plain: str = "the plain run", *, whole: bool = False
) -> str:
    """`your setting`, `the plain run`, or `the run with checkpointing=full`, which stands for one that does not fit.

    Args:
        config: Of the baseline.
        own: The setting that the training has now; None: it is not known.
        plain: What the plain run is called.
        whole: Say the knobs of your setting too.
    """
    if config == own:
        return f"{YOURS} ({config.describe()})" if whole else YOURS
    if is_plain_run(config):
        return plain
    knobs = [f"{knob}={value}" for knob, value in config.knobs_off_default().items() if knob != "micro_batch"]
    return f"the run with {' '.join(knobs)}"
