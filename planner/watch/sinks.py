"""Where the figures of a training go: loggers that are there already. None is started, and none is imported."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from autoplan.planner.watch.meter import Figures


def give(figures: Figures, logger: Callable[[Figures], object], name: str) -> None:
    """Gives figures to a logger. One that raises is warned of, and the training goes on without its figures.

    Args:
        figures: Of a window.
        logger: Takes them.
        name: What it is called in the warning.
    """
    try:
        logger(figures)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"autoplan: {name} did not take the figures of a window: {type(error).__name__}: {said}. The training "
            "goes on",
            stacklevel=2,
        )


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
