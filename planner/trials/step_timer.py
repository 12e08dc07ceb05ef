"""Times the steps of one trial, as whole steps or in parts. Runs in a rank.

In: a `TrainingRun` and a `TrialRequest`. Out: an `Interval` of the step time, and why measuring stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from autoplan.planner.records import Interval
from autoplan.planner.trials.batches import TrialBatches
from autoplan.planner.trials.device_monitor import CompileMonitor, ThrottleMonitor
from autoplan.planner.trials.first_loss import first_samples
from autoplan.planner.trials.measure import (
    Stop,
    StopRule,
    drop_warmup,
    is_settled,
    median_interval,
    step_terms,
    sum_interval,
)
from autoplan.planner.trials.rank_sync import RankSync
from autoplan.planner.trials.request import EXPENSIVE, FITS_MICRO_STEPS, VERY_EXPENSIVE, WHOLE_STEP_SHARE, TrialRequest
from autoplan.strategies.run import StepResult, TrainingRun
from autoplan.strategies.workloads.batch import split_batch

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext

MIN_PART_SAMPLES = 3
"""A trial in parts goes on until it has this many warm samples of the most expensive part, unless it cannot win."""

MIN_SAMPLE_S = 0.05
"""Short steps are timed in groups that take at least this long, so that reading the clock and waiting do not count."""

PART_MICRO_STEPS = 6
"""Micro-steps of a short step that is timed, unless they are expensive; the first two take longer than the rest."""

COLD_FACTOR, WARM_FACTOR = 2.0, 1.1
"""A configuration is stopped before it is measured only if its micro-steps alone take this many times as long as the
best whole step. COLD_FACTOR is for micro-steps that run for the first time and for short ones, whose first times say
little; WARM_FACTOR is for expensive micro-steps that ran before."""


class NonfiniteError(Exception):
    """The loss or the gradient norm is infinite or not a number."""


class CannotWinError(Exception):
    """The configuration is slower than the best one; `interval` is what is known of its step time."""

    def __init__(self, interval: Interval) -> None:
        super().__init__("the configuration is slower than the best one")
        self.interval = interval


@dataclass(kw_only=True)
class StepTimer:
    """Runs and times the steps of one trial.

    Attributes:
        context: Reports phases and heartbeats to the planner.
        request: What to measure.
        run: The training run.
        ranks: Takes the times of the slowest rank.
        mesh: The run's device mesh; None on one rank.
        throttle: Is asked for throttling while steps are timed.
        method: How the step time was found; None: not chosen yet.
        parts: Seconds of each part of a step, see `step_terms`.
        samples: Seconds of whole steps, or of the most expensive part.
        warnings: Sentences about the measurement.
        last_loss: Of the last step.
        first_losses: Of the first samples, before any update: one for each micro-step of the first step.
    """

    context: RankContext
    request: TrialRequest
    run: TrainingRun
    ranks: RankSync
    mesh: Any
    throttle: ThrottleMonitor
    method: Literal["whole_steps", "parts"] | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    last_loss: float | None = None
    first_losses: list[float] = field(default_factory=list)
    _began: float = 0.0
    _last_heartbeat: float = 0.0
    _min_part_samples: int = MIN_PART_SAMPLES
    _whole_batches: list[Any] = field(default_factory=list)
    _steps_per_sample: int = 1

    def __post_init__(self) -> None:
        self.batches = TrialBatches(self.run, self.request.spec)

    # The two short steps.

    def short_steps(self) -> None:
        """Runs two optimizer steps of a few micro-steps: they show that the configuration fits, and warm up.

        The micro-steps of the second step are the first samples. If a micro-step is expensive, each step has only two:
        gradients accumulate from the second micro-step on, and a third would show nothing new about memory. On one rank
        all micro-steps except the very first then count as samples. If a micro-step is very expensive, the first step
        has only one: it makes the optimizer's state, and the second step accumulates gradients beside that state.

        Raises:
            CannotWinError: the micro-steps alone are slower than the best whole step.
            NonfiniteError: the loss or the gradient norm is not finite.
        """
        micro_steps = min(self.run.accumulation, FITS_MICRO_STEPS)
        compiles = self.request.config.compile != "off"
        self.context.phase("compile" if compiles else "warmup")
        self._began = time.monotonic()
        fewest = 2 if compiles or self._has_other_ranks else 1
        same = first_samples(self.run.workload, self.run.config.micro_batch, micro_steps)
        first = self.short_step(micro_steps, shorten_if_expensive=True, fewest=fewest, first_batch=same)
        if compiles:
            self.context.phase("warmup")
            self._began = time.monotonic()
        if (
            self._is_expensive(first["all"], micro_steps)
            and len(first["all"]) > 1
            and not (compiles or self.batches.sizes)
        ):
            self._stop_if_slower(first["all"][1:], 0.75 * COLD_FACTOR)
        if self.batches.sizes is not None:  # the largest batch shows that it fits; it is not timed
            self.short_step(micro_steps, shorten_if_expensive=not self._has_other_ranks)
            first["all"] = first["all"][:1]
        second = self.short_step(micro_steps, shorten_if_expensive=not self._has_other_ranks)
        self._add_samples(second)
        expensive = self._is_expensive(second["all"], micro_steps)
        if expensive and not self._has_other_ranks and micro_steps > 1:
            self.parts.pop("first_micro_step", None)
            self.parts.pop("second_micro_step", None)
            self.parts["micro_step"] = [*first["all"][1:], *second["all"]]
            if len(first["all"]) == 1:
                self._min_part_samples = 2
        warm = expensive and len(second["all"]) > 1
        self._stop_if_slower(second["all"], WARM_FACTOR if warm else COLD_FACTOR)

    @property
    def _has_other_ranks(self) -> bool:
        return self.ranks.world_size > 1

    def _is_expensive(self, micro_steps_s: list[float], micro_steps: int) -> bool:
        """Whether a short step takes over a quarter of the time box, by its fastest micro-step."""
        return min(micro_steps_s) * micro_steps > 0.25 * self.request.time_box_s

    def _stop_if_slower(self, micro_steps_s: list[float], factor: float) -> None:
        """Stops the trial if its micro-steps alone take more than `factor` times the best whole step."""
        best = self.request.best_high_s
        accumulation = self.run.accumulation
        if best is not None and min(micro_steps_s) * accumulation > factor * best:
            interval = sum_interval([(float(accumulation), micro_steps_s)], seed=self.request.seed)
            self.method = "parts"
            raise CannotWinError(interval)

    def short_step(
        self, micro_steps: int, *, shorten_if_expensive: bool = False, fewest: int = 2, first_batch: Any = None
    ) -> dict[str, list[float]]:
        """Times one optimizer step of a few micro-steps.

        Args:
            micro_steps: How many.
            shorten_if_expensive: Run fewer if the first shows that they are expensive.
            fewest: Then run at least so many. On several ranks it must be at least two, because only the last syncs.
            first_batch: What the very first step runs on; the loss of each of its micro-steps is kept.

        Returns:
            Seconds by part (see `step_terms`), and of all micro-steps under "all".
        """
        run, times = self.run, dict[str, list[float]](all=[])
        batch = self._make_batch(micro_steps * run.config.micro_batch) if first_batch is None else first_batch
        divisor = run.loss_divisor(batch)
        total = torch.zeros((), device=run.device)
        count = torch.zeros((), device=run.device)
        last = micro_steps
        for number, micro in enumerate(split_batch(batch, run.config.micro_batch), start=1):
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
                share = seconds / self.request.time_box_s
                last = min(last, fewest if share > VERY_EXPENSIVE else 2 if share > EXPENSIVE else last)
            self._heartbeat(micro_step_s=seconds)
            if number >= last:
                break
        result, seconds = self._time(lambda: run.optimizer_step(total, count, divisor))
        times["optimizer_step"] = [seconds]
        self._check(result)
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

    def choose_method(self) -> Literal["whole_steps", "parts"]:
        """Whole steps if one takes less than WHOLE_STEP_SHARE of the time box. Pipelines have no parts."""
        if self.request.config.pp > 1:
            self.method = "whole_steps"
        elif self.request.method is not None:
            self.method = self.request.method
        else:
            step_s = sum_interval(step_terms(self.parts, self.run.accumulation)).median
            short = step_s < WHOLE_STEP_SHARE * self.request.time_box_s
            self.method = "whole_steps" if short else "parts"
        return self.method

    def warm_up(self) -> None:
        """Runs whole steps until two successive windows agree, or a third of the time box is used."""
        self._prepare_whole_steps()
        samples: list[float] = []
        while not is_settled(samples):
            samples.append(self._whole_step_sample())
            if self._elapsed() > self.request.time_box_s / 3 and len(samples) >= 2:
                if len(samples) >= 6:
                    self.warnings.append("step times had not settled when the warm-up ended")
                break

    def _prepare_whole_steps(self) -> None:
        """Makes batches, and finds how many steps a sample needs to last MIN_SAMPLE_S."""
        if not self._began:
            self.context.phase("compile" if self.request.config.compile != "off" else "warmup")
            self._began = time.monotonic()
        self._whole_batches = [self._make_batch(self.run.local_batch) for _ in range(2)]
        self._steps_per_sample = 1
        if self.request.config.pp > 1:  # no short step was made
            same = first_samples(self.run.workload, self.run.config.micro_batch, self.run.accumulation)
            self._keep_first_loss(float(self.run.step(same).loss))
            step_s = self._whole_step_sample()
        else:
            step_s = [self._whole_step_sample() for _ in range(2)][-1]
        if self.request.config.pp > 1:
            self.context.phase("warmup")
            self._began = time.monotonic()
        self._steps_per_sample = max(1, math.ceil(MIN_SAMPLE_S / step_s))

    def _whole_step_sample(self) -> float:
        """Seconds per whole step, over a group of steps; NaN if fp16 loss scaling skipped one of them."""
        results: list[StepResult] = []

        def steps() -> None:
            for number in range(self._steps_per_sample):
                results.append(self.run.step(self._whole_batches[number % 2]))

        _, seconds = self._time(steps)
        self._check(results[-1])
        if any(result.skipped for result in results):
            return math.nan
        return seconds / self._steps_per_sample

    def measure_whole_steps(self) -> tuple[Interval, Stop]:
        """Times whole steps until the stop rule ends it.

        Samples from before a compilation are discarded, at most twice.
        """
        rule, compiler, discarded, skipped = self._stop_rule(), CompileMonitor(), 0, 0
        compiler.start()
        while True:
            sample = self._whole_step_sample()
            self.throttle.sample()
            if self.ranks.any(compiler.recompiled()) and discarded < 2:
                self.samples.clear()
                discarded += 1
                compiler.start()
                continue
            if math.isnan(sample):
                skipped += 1
                if skipped > 10 + len(self.samples):
                    raise NonfiniteError(f"fp16 loss scaling skipped {skipped} steps; no steady state was reached")
                continue
            self.samples.append(sample)
            interval = median_interval(self.samples, seed=self.request.seed)
            self._heartbeat(step_time_s=interval.median, samples=len(self.samples))
            stop = rule.decide(interval, self._elapsed())
            if stop is not None and len(self.samples) >= 2:
                break
        if discarded:
            self.warnings.append(f"torch.compile compiled again while measuring; {discarded} window(s) discarded")
        if skipped:
            self.warnings.append(f"fp16 loss scaling skipped {skipped} step(s) while measuring; they do not count")
        return interval, stop

    # Parts.

    def measure_parts(self) -> tuple[Interval, Stop]:
        """Times short steps, and calculates the step time from their parts, until the stop rule ends it."""
        rule, accumulation = self._stop_rule(), self.run.accumulation
        while True:
            part = self._most_expensive_part()
            warm = dict(self.parts)
            warm[part] = drop_warmup(self.parts[part], keep=min(MIN_PART_SAMPLES, len(self.parts[part])))
            interval = sum_interval(step_terms(warm, accumulation), seed=self.request.seed)
            interval = interval.model_copy(update={"samples": len(warm[part])})
            self._heartbeat(step_time_s=interval.median, samples=interval.samples)
            stop = rule.decide(interval, self._elapsed())
            enough = interval.samples >= self._min_part_samples or stop == "slower"
            if stop is not None and enough:
                self.parts = warm
                self.samples = list(warm[part])
                return interval, stop
            times = self.short_step(min(accumulation, self._part_micro_steps()))
            self.throttle.sample()
            self._add_samples(times)

    def _add_samples(self, times: Mapping[str, list[float]]) -> None:
        """Adds what `short_step` returned to the samples of the parts."""
        for part, seconds in times.items():
            if part != "all":
                self.parts.setdefault(part, []).extend(seconds)

    def _part_micro_steps(self) -> int:
        """Micro-steps of one more short step: fewer if they would take too much of the time box."""
        fastest_s = min(min(seconds) for part, seconds in self.parts.items() if "micro_step" in part)
        return FITS_MICRO_STEPS if self._is_expensive([fastest_s], PART_MICRO_STEPS) else PART_MICRO_STEPS

    def _most_expensive_part(self) -> str:
        """The part that most of a step's time is spent in."""
        seconds_by_part: dict[str, float] = {}
        for weight, samples in step_terms(self.parts, self.run.accumulation):
            part = next(part for part, values in self.parts.items() if values is samples)
            seconds_by_part[part] = seconds_by_part.get(part, 0.0) + weight * float(np.median(samples))
        return max(seconds_by_part, key=lambda part: seconds_by_part[part])

    def part_medians(self) -> dict[str, float]:
        """The medians of the parts that were timed."""
        return {part: float(np.median(seconds)) for part, seconds in self.parts.items() if seconds}

    # Helpers.

    def _stop_rule(self) -> StopRule:
        return StopRule(
            time_box_s=self.request.time_box_s, best_high_s=self.request.best_high_s, narrow=self.request.narrow
        )

    def _elapsed(self) -> float:
        return self.ranks.largest([time.monotonic() - self._began])[0]

    def _time(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The result of a call, and the seconds it took on the slowest rank."""
        self._synchronize()
        began = time.perf_counter()
        result = call()
        self._synchronize()
        return result, self.ranks.largest([time.perf_counter() - began])[0]

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
