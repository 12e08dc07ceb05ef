"""watch(plan): a training loop of one's own, beside its plan."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from autoplan.errors import UsageError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.verify.meter import (
    SHORTFALL,
    WINDOW_S,
    Figures,
    Meter,
    Watcher,
    give,
    is_first_rank,
    log_to_wandb,
    log_to_writer,
)

Item = TypeVar("Item")


class Watch(Watcher):
    """Compares a loop with its plan; `autoplan.watch` makes one."""

    def __init__(self, meter: Meter, writer: Any) -> None:
        super().__init__(meter)
        self._writer = writer
        meter.on_window = self._log if is_first_rank() else None

    def step(self, batch: Any = None, *, items: float | None = None) -> None:
        """Call it after each optimizer step.

        Args:
            batch: What this rank trained on in the step: all its micro-batches in one, or the last of them where
                `batches` handed out the others. Not needed where `batches` handed out all.
            items: Or how many tokens (without padding) or samples that were, as the plan counts them. With neither, as
                many as the plan has.

        Raises:
            UsageError: both were given.
        """
        if batch is not None and items is not None:
            raise UsageError("watch.step() got a batch and items", hint="Give one of them.")
        if batch is not None:
            self._meter.count(batch)
        self._meter.step(items)

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """The batches of a loader; counts them, and times how long the training waits for each."""
        iterator = iter(loader)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._meter.loaded(time.perf_counter() - asked)
            self._meter.count(batch)
            yield batch

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is no training: an evaluation, a checkpoint. Its time counts for nothing."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._meter.leave_out(time.perf_counter() - began)

    def _log(self, figures: Figures) -> None:
        give(figures, log_to_wandb, "the active run of W&B")
        if self._writer is not None:
            give(figures, partial(log_to_writer, self._writer), "writer")


@contextmanager
def watch(
    plan: Plan, *, writer: Any = None, window_s: float = WINDOW_S, shortfall: float = SHORTFALL
) -> Iterator[Watch]:
    """Watches a training loop beside its plan: throughput, memory, and one warning if it falls short.

        with autoplan.watch(plan) as watch:
            for batch in watch.batches(loader):
                run.step(batch)
                watch.step()

    Each window of `window_s` seconds is compared with the plan. Where its throughput is more than `shortfall` below the
    plan's, a Python warning says so, once, with the likely cause: throttling, other processes on the CPU or the GPU,
    waiting for data, recompilation, larger batches, other versions or hardware. The figures go to the active W&B run,
    if there is one, and to `writer`.

    Args:
        plan: The plan that the loop runs with.
        writer: A SummaryWriter of TensorBoard.
        window_s: Seconds of a window; it has at least 5 steps.
        shortfall: The share below the plan's throughput that is warned of.

    Raises:
        UsageError: the window or the shortfall is out of its range.
    """
    meter = Meter(plan=plan, window_s=window_s, shortfall=shortfall, scale=float(plan.config.dp))
    meter.begin()
    yield Watch(meter, writer)
    meter.finish()
