"""Where the figures of a training go: loggers that are there already. None is started, and none is imported."""

from __future__ import annotations

import sys
from typing import Any

from autoplan.planner.watch.meter import Figures


def log_to_wandb(figures: Figures) -> bool:
    """Adds the figures to the active run of W&B, at its current step; False where there is none."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None:
        return False
    run.log(figures.as_metrics(), commit=False)
    return True


def log_to_writer(writer: Any, figures: Figures) -> None:
    """Adds the figures to a SummaryWriter of TensorBoard, or to anything that has its `add_scalar`."""
    for name, value in figures.as_metrics().items():
        writer.add_scalar(name, value, figures.step)
