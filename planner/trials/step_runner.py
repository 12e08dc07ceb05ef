"""Runs and times single steps of one trial: short ones, part by part, and groups of whole ones. Runs in a rank.

In: a `TrainingRun` and a `TrialRequest`. Out: seconds on the slowest rank. `step_timer.py` says which steps are run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from autoplan.planner.trials.batches import TrialBatches
from autoplan.planner.trials.first_loss import first_samples
from autoplan.planner.trials.rank_sync import RankSync
from autoplan.planner.trials.request import EXPENSIVE_S, VERY_EXPENSIVE_S, WARM_UP_S, TrialRequest
from autoplan.strategies.run import StepResult, TrainingRun

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext

MIN_SAMPLE_S = 0.05
"""Short steps are timed in groups that take at least this long, so that reading the clock and waiting do not count."""

MOST_SKIPPED = 20
"""fp16 loss scaling skips steps until its scale has come down: from 65536, sixteen halvings reach 1."""


class NonfiniteError(Exception):
    """The loss or the gradient norm is infinite or not a number."""


@dataclass(kw_only=True)
class StepRunner:
    """Runs steps and times them.

    Attributes:
        context: Reports phases and heartbeats to the planner.
        request: What to measure.
        run: The training run.
        ranks: Takes the times of the slowest rank.
        mesh: The run's device mesh; None on one rank.
        warnings: Sentences about the measurement.
        last_loss: Of the last step.
        first_losses: Of the first samples, before any update: one for each micro-step of the first step.
        skipped: Steps that fp16 loss scaling skipped so far.
    """

    context: RankContext
    request: TrialRequest
    run: TrainingRun
    ranks: RankSync
    mesh: Any
    warnings: list[str] = field(default_factory=list)
    last_loss: float | None = None
    first_losses: list[float] = field(default_factory=list)
    skipped: int = 0
    _was_skipped: bool = False
    _began: float = 0.0
    _last_heartbeat: float = 0.0
    _whole_batches: list[Any] = field(default_factory=list)
    _steps_per_sample: int = 1

    def __post_init__(self) -> None:
        self.batches = TrialBatches(self.run, self.request.spec)

    @property
    def _has_other_ranks(self) -> bool:
        return self.ranks.world_size > 1

    # Short steps.

    def _step_not_skipped(self, micro_steps: int, *, first_batch: Any = None, **options: Any) -> dict[str, list[float]]:
        """A short step that updated the parameters: fp16 loss scaling skips some of the first."""
        for _ in range(MOST_SKIPPED):
            times = self.short_step(micro_steps, first_batch=first_batch, **options)
            if not self._was_skipped:
                return times
            first_batch = None
        raise NonfiniteError(f"fp16 loss scaling skipped {self.skipped} steps; no steady state was reached")

    def short_step(
        self,
        micro_steps: int,
        *,
        shorten_if_expensive: bool = False,
        fewest: int = 2,
        first_batch: Any = None,
        after_each: Callable[[list[float]], None] = lambda seconds: None,
    ) -> dict[str, list[float]]:
        """Times one optimizer step of a few micro-steps.

        Args:
            micro_steps: How many.
            shorten_if_expensive: Run fewer if the first shows that they are expensive.
            fewest: Then run at least so many. On several ranks it must be at least two, because only the last syncs.
            first_batch: What the very first step runs on; the loss of each of its micro-steps is kept.
            after_each: Is given the seconds of all micro-steps so far, after each but the last; it may end the look.

        Returns:
            Seconds by part (see `step_terms`), and of all micro-steps under "all".
        """
        run, times = self.run, dict[str, list[float]](all=[])
        batch = self._make_batch(micro_steps * run.config.micro_batch) if first_batch is None else first_batch
        divisor = run.loss_divisor(batch)
        total = torch.zeros((), device=run.device)
        count = torch.zeros((), device=run.device)
        last = micro_steps
        for number, micro in enumerate(run.micro_batches(batch), start=1):
            sync = number == last
            (micro_total, micro_count), seconds = self._time(
                lambda micro=micro, sync=sync: run.micro_step(micro, divisor, sync=sync)  # type: ignore[misc]
            )
            times.setdefault(self._part(number, last), []).append(seconds)
            times["all"].append(seconds)
            total += micro_total
            count += micro_count
            if first_batch is not None:
                self._keep_first_loss(float(micro_total) / max(1.0, float(micro_count)))
            if shorten_if_expensive and number == 1:
                last = min(last, fewest if seconds > VERY_EXPENSIVE_S else 2 if seconds > EXPENSIVE_S else last)
            self._heartbeat(micro_step_s=seconds)
            if number >= last:
                break
            after_each(times["all"])
        result, seconds = self._time(lambda: run.optimizer_step(total, count, divisor))
        times["optimizer_step"] = [seconds]
        self._check(result)
        self._was_skipped = result.skipped
        self.skipped += result.skipped
        return times

    def _keep_first_loss(self, loss: float) -> None:
        if math.isfinite(loss):  # else the trial ends as nonfinite
            self.first_losses.append(loss)

    def _part(self, number: int, last: int) -> str:
        """The part of a step that a micro-step is (see `step_terms`). On one rank the last one reduces nothing."""
        if number == last and (self._has_other_ranks or last == 1):
            return "micro_step_sync"
        return {1: "first_micro_step", 2: "second_micro_step"}.get(number, "micro_step")

    # Whole steps.

    def warm_up(self) -> None:
        """Runs whole steps until the configuration is warm (WARM_UP_S), and groups them to last MIN_SAMPLE_S."""
        pipeline = self.request.config.pp > 1
        if pipeline:  # no short step was made
            self.context.phase("compile" if self.request.config.compile != "off" else "warmup")
            same = first_samples(self.run.workload, self.run.config.micro_batch, self.run.accumulation)
            self._keep_first_loss(float(self.run.step(same).loss))
        self._whole_batches = [self._make_batch(self.run.local_batch) for _ in range(2)]
        step_s = self._whole_step_not_skipped()
        if pipeline:
            self.context.phase("warmup")
            self._began = time.monotonic()
            step_s = self._whole_step_not_skipped()
        while self._elapsed() < WARM_UP_S:
            step_s = self._whole_step_not_skipped()
        self._steps_per_sample = max(1, math.ceil(MIN_SAMPLE_S / step_s))
        if self.batches.sizes is not None:  # both typical batches as often as the other: the items of a step are a mean
            self._steps_per_sample += self._steps_per_sample % 2

    def _whole_step_not_skipped(self) -> float:
        """Seconds per whole step, over the first group of steps of which fp16 loss scaling skips none."""
        for _ in range(MOST_SKIPPED):
            sample = self._whole_step_sample()
            if not math.isnan(sample):
                return sample
        raise NonfiniteError(f"fp16 loss scaling skipped {self.skipped} steps; no steady state was reached")

    def _whole_step_sample(self) -> float:
        """Seconds per whole step, over a group of steps; NaN if fp16 loss scaling skipped one of them."""
        results: list[StepResult] = []

        def steps() -> None:
            for number in range(self._steps_per_sample):
                results.append(self.run.step(self._whole_batches[number % 2]))

        _, seconds = self._time(steps)
        self._check(results[-1])
        skipped = sum(result.skipped for result in results)
        self.skipped += skipped
        if skipped:
            return math.nan
        return seconds / self._steps_per_sample

    # Helpers.

    def _elapsed(self) -> float:
        return self.ranks.largest([time.monotonic() - self._began])[0]

    def _time(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The result of a call, and the seconds it took on the slowest rank."""
        self._synchronize()
        began = time.perf_counter()
        result = call()
        self._while_kernels_run()
        self._synchronize()
        return result, self.ranks.largest([time.perf_counter() - began])[0]

    def _while_kernels_run(self) -> None:
        """What is done once a timed call has returned: on CUDA most of its kernels are still to run then."""

    def _synchronize(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)

    def _check(self, result: StepResult) -> None:
        """Raises NonfiniteError if the loss (or, without loss scaling, the gradient norm) is not finite."""
        self.last_loss = float(result.loss)
        norm = None if result.grad_norm is None or self.run.scaler is not None else float(result.grad_norm)
        if not math.isfinite(self.last_loss):
            raise NonfiniteError(f"the loss is {self.last_loss} at step {self.run.steps}")
        if norm is not None and not math.isfinite(norm):
            raise NonfiniteError(f"the gradient norm is {norm} at step {self.run.steps} (loss {self.last_loss:.4g})")

    def _make_batch(self, samples: int) -> Any:
        """The next batch for this rank."""
        return self.batches.next(samples)

    def _heartbeat(self, **facts: float) -> None:
        """Reports to the planner, at most five times a second."""
        now = time.monotonic()
        if now - self._last_heartbeat > 0.2:
            self._last_heartbeat = now
            self.context.heartbeat(**facts)
