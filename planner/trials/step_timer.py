"""Times the steps of one trial, as whole steps or in parts. Runs in a rank.

In: a `TrainingRun` and a `TrialRequest`. Out: an `Interval` of the step time, and why measuring stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from autoplan.planner.records import Interval
from autoplan.planner.trials.first_loss import first_samples
from autoplan.planner.trials.load import LoadMonitor
from autoplan.planner.trials.measure import (
    Stop,
    StopRule,
    drop_warmup,
    is_settled,
    median_interval,
    step_terms,
    sum_interval,
)
from autoplan.planner.trials.request import FITS_MICRO_STEPS, WHOLE_STEP_SHARE
from autoplan.planner.trials.step_runner import MOST_SKIPPED, NonfiniteError, StepRunner
from autoplan.planner.trials.stretches import Stretches

MIN_PART_SAMPLES = 3
"""A trial in parts goes on until it has this many warm samples of the most expensive part, unless it cannot win."""

PART_MICRO_STEPS = 6
"""Micro-steps of a short step that is timed, unless they are expensive; the first two take longer than the rest."""

MIN_CLEAN_SAMPLES = 3
"""So many samples of undisturbed stretches are enough; with fewer the others count too, and the trial says so."""

STEP = "step"
"""The one part of a whole step."""

COLD_FACTOR, WARM_FACTOR = 2.0, 1.1
"""A configuration is stopped before it is measured only if its micro-steps alone take this many times as long as the
best whole step. COLD_FACTOR is for micro-steps that run for the first time and for short ones, whose first times say
little; WARM_FACTOR is for expensive micro-steps that ran before."""


class CannotWinError(Exception):
    """The configuration is slower than the best one; `interval` is what is known of its step time."""

    def __init__(self, interval: Interval) -> None:
        super().__init__("the configuration is slower than the best one")
        self.interval = interval


@dataclass(kw_only=True)
class StepTimer(StepRunner):
    """Runs and times the steps of one trial.

    Attributes:
        load: Watches what else uses the device while steps are timed.
        method: How the step time was found; None: not chosen yet.
        parts: Seconds of each part of a step, see `step_terms`.
        samples: Seconds of whole steps, or of the most expensive part.
        disturbed: Why the step time does not count as this configuration's; None if nothing else used the device.
    """

    load: LoadMonitor
    method: Literal["whole_steps", "parts"] | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    disturbed: str | None = None
    _stretches: Stretches = field(init=False)
    _min_part_samples: int = MIN_PART_SAMPLES

    def __post_init__(self) -> None:
        StepRunner.__post_init__(self)
        extra_s = self.request.remeasure * self.request.time_box_s
        self._stretches = Stretches(load=self.load, ranks=self.ranks, most_extra_s=extra_s)

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
        self._stretches.begin()
        first = self._step_not_skipped(micro_steps, shorten_if_expensive=True, fewest=fewest, first_batch=same)
        if compiles:
            self.context.phase("warmup")
            self._began = time.monotonic()
            self._stretches.begin()
        expensive = self._is_expensive(first["all"], micro_steps)
        if expensive and len(first["all"]) > 1 and not (compiles or self.batches.sizes):
            self._stop_if_slower(first["all"][1:], 0.75 * COLD_FACTOR)
        if self.batches.sizes is not None:  # the largest batch shows that it fits; it is not timed
            self._step_not_skipped(micro_steps, shorten_if_expensive=not self._has_other_ranks)
            first["all"] = first["all"][:1]
            self._stretches.begin()
        second = self._step_not_skipped(micro_steps, shorten_if_expensive=not self._has_other_ranks)
        expensive = self._is_expensive(second["all"], micro_steps)
        samples = {part: seconds for part, seconds in second.items() if part != "all"}
        if expensive and not self._has_other_ranks and micro_steps > 1:
            samples.pop("first_micro_step", None)
            samples.pop("second_micro_step", None)
            samples["micro_step"] = [*first["all"][1:], *second["all"]]
            if len(first["all"]) == 1:
                self._min_part_samples = 2
        self.parts = dict(samples)
        self._stretches.add(samples)
        warm = expensive and len(second["all"]) > 1
        self._stop_if_slower(second["all"], WARM_FACTOR if warm else COLD_FACTOR)

    def _is_expensive(self, micro_steps_s: list[float], micro_steps: int) -> bool:
        """Whether a short step takes over a quarter of the time box, by its fastest micro-step."""
        return min(micro_steps_s) * micro_steps > 0.25 * self.request.time_box_s

    def _stop_if_slower(self, micro_steps_s: list[float], factor: float) -> None:
        """Stops the trial if its micro-steps alone take more than `factor` times the best whole step."""
        best = self.request.best_high_s
        accumulation = self.run.accumulation
        if best is not None and min(micro_steps_s) * accumulation > factor * best:
            if self._stretches.is_long_enough() and not self._stretches.close():
                return  # other work made it slow
            interval = sum_interval([(float(accumulation), micro_steps_s)], seed=self.request.seed)
            self.method = "parts"
            raise CannotWinError(interval)

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
            samples.append(self._whole_step_not_skipped())
            if self._elapsed() > self.request.time_box_s / 3 and len(samples) >= 2:
                if len(samples) >= 6:
                    self.warnings.append("step times had not settled when the warm-up ended")
                break

    def measure_whole_steps(self) -> tuple[Interval, Stop]:
        """Times whole steps until the stop rule ends it."""
        rule, stretches, before = self._stop_rule(), self._stretches, self.skipped
        stretches.clean, stretches.aside = {}, {}  # those of the short steps
        self.load.restart()
        stretches.begin()
        while True:
            sample = self._whole_step_sample()
            if math.isnan(sample):
                if self.skipped - before > 10 + len(stretches.everything().get(STEP, ())):
                    raise NonfiniteError(f"fp16 loss scaling skipped {self.skipped} steps; no steady state was reached")
                continue
            stretches.add({STEP: [sample]})
            over = self._time_is_over()
            samples = stretches.so_far().get(STEP, [])
            if not samples and not over:
                continue
            interval = median_interval(samples or stretches.everything()[STEP], seed=self.request.seed)
            self._heartbeat(step_time_s=interval.median, samples=len(samples))
            stop = "time_box" if over else rule.decide(interval, 0.0)
            if stop is not None and len(stretches.everything()[STEP]) >= 2 and self._may_end(over):
                break
        self.samples = self._samples_that_count({STEP: MIN_CLEAN_SAMPLES})[STEP]
        interval = median_interval(self.samples, seed=self.request.seed)
        return interval, "time_box" if self.disturbed else stop

    # Parts.

    def measure_parts(self) -> tuple[Interval, Stop]:
        """Times short steps, and calculates the step time from their parts, until the stop rule ends it."""
        rule, stretches = self._stop_rule(), self._stretches
        while True:
            over = self._time_is_over()
            samples = stretches.so_far()
            if over or not self._has_all_parts(samples):
                samples = stretches.everything()
            interval, _ = self._interval_of(samples)
            self._heartbeat(step_time_s=interval.median, samples=interval.samples)
            stop = "time_box" if over else rule.decide(interval, 0.0)
            enough = interval.samples >= self._min_part_samples or stop == "slower"
            if stop is not None and enough and self._may_end(over):
                break
            times = self.short_step(min(self.run.accumulation, self._part_micro_steps()))
            if self._was_skipped:
                if self.skipped > MOST_SKIPPED + interval.samples:
                    raise NonfiniteError(f"fp16 loss scaling skipped {self.skipped} steps; no steady state was reached")
                continue
            times.pop("all")
            stretches.add(times)
            self.parts = stretches.everything()
        part = self._most_expensive_part()
        counted = self._samples_that_count(dict.fromkeys(self.parts, 1) | {part: self._min_part_samples})
        interval, self.parts = self._interval_of(counted)
        self.samples = list(self.parts[self._most_expensive_part()])
        return interval, "time_box" if self.disturbed else stop

    def _interval_of(self, samples: dict[str, list[float]]) -> tuple[Interval, dict[str, list[float]]]:
        """The step time from its parts, and the samples that count: slow ones at the start are left out."""
        self.parts = samples
        part = self._most_expensive_part()
        warm = dict(samples)
        warm[part] = drop_warmup(samples[part], keep=min(MIN_PART_SAMPLES, len(samples[part])))
        interval = sum_interval(step_terms(warm, self.run.accumulation), seed=self.request.seed)
        return interval.model_copy(update={"samples": len(warm[part])}), warm

    def _has_all_parts(self, samples: Mapping[str, list[float]]) -> bool:
        return all(samples.get(part) for part in self._stretches.everything())

    # What both ways share.

    def _time_is_over(self) -> bool:
        """Whether the time box is used up; what disturbed stretches took is added to it, within limits."""
        return self._elapsed() >= self.request.time_box_s + self._stretches.extra_s

    def _may_end(self, over: bool) -> bool:
        """Whether all samples are judged: a stretch that is too short for it goes on, a disturbed one is repeated."""
        if not self._stretches.current:
            return bool(self._stretches.clean) or over
        return self._stretches.is_long_enough() and (self._stretches.close() or over)

    def _samples_that_count(self, least: Mapping[str, int]) -> dict[str, list[float]]:
        """The clean samples where there are enough of each part; else all, and the trial is disturbed."""
        clean = self._stretches.clean
        if all(len(clean.get(part, ())) >= count for part, count in least.items()):
            return clean
        if self._stretches.problem is not None:
            self.disturbed = self._stretches.problem
        return self._stretches.everything()

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

    def _while_kernels_run(self) -> None:
        self.load.gpu.sample()

    def _stop_rule(self) -> StopRule:
        return StopRule(
            time_box_s=self.request.time_box_s, best_high_s=self.request.best_high_s, narrow=self.request.narrow
        )
