"""LightningWatch: a callback for Lightning's Trainer."""

from __future__ import annotations

import importlib
import sys
import time
from functools import partial
from typing import Any

from autoplan.errors import MissingExtraError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.verify.meter import SHORTFALL, WINDOW_S, Figures, Meter, Watcher, give, log_to_wandb


def _callback_class() -> Any:
    """The Callback of the package that the program uses: lightning, or pytorch_lightning; object without either."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    return object


_Callback = _callback_class()


class LightningWatch(Watcher, _Callback):  # type: ignore[misc,valid-type]
    """Watches a Lightning training beside its plan: throughput, memory, and one warning if it falls short.

        trainer = Trainer(..., callbacks=[LightningWatch(plan)])

    The figures of each window go to the Trainer's own loggers.

    Args:
        plan: The plan that the Trainer and the data are set by.
        window_s: Seconds of a window that is compared with the plan.
        shortfall: The share below the plan's throughput that is warned of.

    Raises:
        UsageError: the window or the shortfall is out of its range.
        MissingExtraError: Lightning is not installed.
    """

    def __init__(self, plan: Plan, *, window_s: float = WINDOW_S, shortfall: float = SHORTFALL) -> None:
        if _Callback is object:
            raise MissingExtraError(
                "LightningWatch needs lightning, which is not installed", hint="pip install lightning"
            )
        super().__init__(Meter(plan=plan, window_s=window_s, shortfall=shortfall, scale=float(plan.config.dp)))
        self._mark: float | None = None
        self._pause: float | None = None
        self._steps = 0
        self._saving = False
        self._unsaid: Figures | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins."""
        self._steps, self._mark = trainer.global_step, time.perf_counter()
        self._meter.on_window = self._keep if trainer.is_global_zero else None
        self._meter.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch is there: what passed since the last one was waiting for it, or for a checkpoint."""
        if self._mark is not None:
            passed = time.perf_counter() - self._mark
            (self._meter.leave_out if self._saving else self._meter.loaded)(passed)
        self._saving = False
        self._meter.count(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts a step where this micro-batch was the last of one."""
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self._meter.step()
        self._log(trainer)
        self._mark = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """A short training has its figures now."""
        self._meter.finish()
        self._log(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """An evaluation is no training."""
        self._pause = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The training goes on."""
        now = time.perf_counter()
        if self._pause is not None:
            self._meter.leave_out(now - self._pause)
        self._pause, self._mark = None, now

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Nor is a checkpoint. It is collected now and written next: what passes until the next batch is left out."""
        self._saving = True

    def _log(self, trainer: Any) -> None:
        figures, self._unsaid = self._unsaid, None
        if figures is None:
            return
        for logger in trainer.loggers:
            give(figures, partial(_log_to, logger, trainer.global_step), type(logger).__name__)
        if not trainer.loggers:
            give(figures, log_to_wandb, "the active run of W&B")

    def _keep(self, figures: Figures) -> None:
        self._unsaid = figures


def _log_to(logger: Any, step: int, figures: Figures) -> None:
    logger.log_metrics(figures.as_metrics(), step=step)
