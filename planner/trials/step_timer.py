"""Times the steps of one look at a configuration, as whole steps or in parts. Runs in a rank.

In: a `TrialRequest`; how long a look lasts is in request.py. Out: an `Interval` of the step time; `BehindError` where
the configuration is dropped before (drop.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from autoplan.planner.records import Interval
from autoplan.planner.trials.drop import COLD_SD, STEP_SD, compare
from autoplan.planner.trials.first_loss import first_samples
from autoplan.planner.trials.load import LoadMonitor
from autoplan.planner.trials.measure import (
    NARROW,
    drop_warmup,
    median_interval,
    relative_width,
    step_terms,
    sum_interval,
)
from autoplan.planner.trials.request import (
    EXPENSIVE_S,
    FEWEST_SAMPLES,
    FITS_MICRO_STEPS,
    GRAPH_MICRO_STEPS,
    MEASURING_S,
    MOST_AGAIN_S,
    PART_MICRO_STEPS,
    SAMPLES,
    WARM_UP_S,
    WHOLE_STEP_S,
    samples_wanted,
)
from autoplan.planner.trials.step_runner import MOST_SKIPPED, NonfiniteError, StepRunner
from autoplan.planner.trials.stretches import Stretches
from autoplan.strategies.config import CUDAGRAPH_MODES

STEP = "step"
"""The one part of a whole step."""

MOST_KEPT = 50
"""Samples of each part that the record of a trial keeps; a step of 1 ms has some 16 in 0.8 s, of 50 steps each."""


class BehindError(Exception):
    """The configuration is behind the leader (drop.py).

    Attributes:
        interval: What is known of its step time.
        at_least_s: Its step takes so many seconds at least.
    """

    def __init__(self, interval: Interval, at_least_s: float) -> None:
        super().__init__("the configuration is slower than the best one")
        self.interval = interval
        self.at_least_s = at_least_s


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
    _lasts_s: float = 0.0

    def __post_init__(self) -> None:
        StepRunner.__post_init__(self)
        self._stretches = Stretches(load=self.load, ranks=self.ranks, most_extra_s=0.0)

    # The two short steps.

    def short_steps(self) -> None:
        """Runs two optimizer steps of a few micro-steps: they show that the configuration fits, and warm up.

        If a micro-step is expensive, each step has only two: gradients accumulate from the second micro-step on, and a
        third would show nothing new about memory. If it is very expensive, the first step has only one: it makes the
        optimizer's state, and the second step accumulates gradients beside that state. On one rank expensive
        micro-steps are samples, all but the very first (the first two where they are recorded as a CUDA graph).

        Raises:
            BehindError: the micro-steps alone are slower than the leader's whole step.
            NonfiniteError: the loss or the gradient norm is not finite.
        """
        micro_steps = min(self.run.accumulation, FITS_MICRO_STEPS)
        config, alone = self.request.config, not self._has_other_ranks
        compiles = config.compile != "off"
        self.context.phase("compile" if compiles else "warmup")
        self._began = time.monotonic()
        fewest = 1 if alone and not compiles else 2
        same = first_samples(self.run.workload, self.run.config.micro_batch, micro_steps)
        self._stretches.begin()
        first = self._step_not_skipped(micro_steps, shorten_if_expensive=True, fewest=fewest, first_batch=same)["all"]
        if compiles:
            self.context.phase("warmup")
            self._began = time.monotonic()
            self._stretches.begin()
        uncounted = GRAPH_MICRO_STEPS if compiles and config.compile_mode in CUDAGRAPH_MODES else 1
        if self.batches.sizes is not None:  # the largest batch shows that it fits; it is not timed
            self._step_not_skipped(micro_steps, shorten_if_expensive=alone)
            first = first[:uncounted]
            self._stretches.begin()

        def judge(seconds: Sequence[float]) -> None:
            counted = [*first, *seconds][uncounted:]
            if alone and counted and min(counted) > EXPENSIVE_S:
                self.parts = {"micro_step": counted, "optimizer_step": [0.0]}
                self._drop_if_behind([self.run.accumulation * s for s in counted], sd=COLD_SD, pending=True)

        judge([])
        second = self._step_not_skipped(micro_steps, shorten_if_expensive=alone, after_each=judge)
        self.parts = {part: seconds for part, seconds in second.items() if part != "all"}
        if min(second["all"]) <= EXPENSIVE_S:
            return
        if alone:
            name = "micro_step" if micro_steps > 1 else "micro_step_sync"
            counted = [*first, *second["all"]][uncounted:]
            self.parts = {name: counted or second["all"], "optimizer_step": second["optimizer_step"]}
            if not counted:
                return
        self._stretches.add(self.parts)
        self._lasts_s = self._elapsed()

    def _drop_if_behind(self, steps_s: Sequence[float], *, sd: float = STEP_SD, pending: bool = False) -> None:
        """Ends the look if the configuration is behind the leader, and nothing else made it slow.

        Args:
            steps_s: Seconds of whole steps so far, or what they would be by the samples of a part.
            sd: Of the logarithm of a sample, as assumed before any.
            pending: Some of the samples are in no stretch yet.
        """
        to_beat = self.request.to_beat
        if to_beat is None or not (found := compare(steps_s, to_beat, sd=sd)).behind:
            return
        stretches = self._stretches
        if (pending or stretches.current) and not (stretches.is_long_enough() and stretches.is_clean()):
            return  # its time is not judged yet, or other work made it slow
        self.method = self.method or "parts"
        self.samples = list(steps_s) if self.method == "whole_steps" else self.samples
        raise BehindError(median_interval(steps_s, seed=self.request.seed), found.at_least_s)

    # Whole steps.

    def choose_method(self) -> Literal["whole_steps", "parts"]:
        """Whole steps if one takes less than WHOLE_STEP_S, and none of it is measured yet. Pipelines have no parts."""
        if self.request.config.pp > 1:
            self.method = "whole_steps"
        elif self.request.method is not None:
            self.method = self.request.method
        else:
            step_s = sum_interval(step_terms(self.parts, self.run.accumulation)).median
            self.method = "whole_steps" if step_s < WHOLE_STEP_S and not self._lasts_s else "parts"
        return self.method

    def measure_whole_steps(self) -> Interval:
        """Times whole steps of a configuration that is warm, until there are enough.

        Raises:
            BehindError: it is behind the leader.
            NonfiniteError: loss scaling does not come to rest.
        """
        stretches, before = self._stretches, self.skipped
        self._begin_measuring()
        while True:
            sample = self._whole_step_sample()
            if math.isnan(sample):
                if self.skipped - before > 10 + len(stretches.everything().get(STEP, ())):
                    raise NonfiniteError(f"fp16 loss scaling skipped {self.skipped} steps; no steady state was reached")
                continue
            self._lasts_s = self._lasts_s or max(MEASURING_S, SAMPLES * sample)
            stretches.add({STEP: [sample]})
            over = self._time_is_over()
            samples = stretches.so_far().get(STEP, [])
            if not samples and not over:
                continue
            interval = median_interval(samples or stretches.everything()[STEP], seed=self.request.seed)
            self._heartbeat(step_time_s=interval.median, samples=len(samples))
            enough = over or self._is_enough(interval, SAMPLES)
            if enough and len(stretches.everything()[STEP]) >= 2 and self._may_end():
                break
            if len(samples) >= FEWEST_SAMPLES:
                self._drop_if_behind(samples)
        self.samples = self._samples_that_count({STEP: FEWEST_SAMPLES})[STEP]
        return median_interval(self.samples, seed=self.request.seed)

    # Parts.

    def measure_parts(self) -> Interval:
        """Times short steps until there are enough, and calculates the step time from their parts.

        Raises:
            BehindError: it is behind the leader.
            NonfiniteError: loss scaling does not come to rest.
        """
        if not self._lasts_s:  # no sample counts yet
            while self._elapsed() < WARM_UP_S:
                self._timed_short_step(0)
            self._begin_measuring()
        stretches = self._stretches
        while True:
            samples = stretches.so_far()
            over = self._time_is_over()
            if over or not self._has_all_parts(samples):
                samples = stretches.everything()
            if samples:
                interval, counted = self._interval_of(samples)
                wanted = samples_wanted(min(self._micro_steps_s()))
                self._heartbeat(step_time_s=interval.median, samples=interval.samples)
                part = np.array(counted[self._most_expensive_part()])
                least = min(FEWEST_SAMPLES, wanted)
                enough = interval.samples >= least and (over or self._is_enough(interval, wanted))
                if enough and self._may_end():
                    break
                if len(part) >= least and samples == stretches.so_far():
                    self._drop_if_behind(list(interval.median * part / np.median(part)))
            times = self._timed_short_step(interval.samples if samples else 0)
            if times is not None:
                self._lasts_s = self._lasts_s or max(MEASURING_S, FEWEST_SAMPLES * sum(map(sum, times.values())))
                stretches.add(times)
                self.parts = stretches.everything()
        counted = self._samples_that_count(dict.fromkeys(self.parts, 1) | {self._most_expensive_part(): least})
        interval, self.parts = self._interval_of(counted)
        self.samples = list(self.parts[self._most_expensive_part()])
        return interval

    def _timed_short_step(self, samples: int) -> dict[str, list[float]] | None:
        """Seconds by part of one more short step; None if fp16 loss scaling skipped it. `samples`: how many there are.

        It has fewer micro-steps where these are expensive.
        """
        expensive = min(self._micro_steps_s()) > EXPENSIVE_S
        times = self.short_step(min(self.run.accumulation, 2 if expensive else PART_MICRO_STEPS))
        if self._was_skipped:
            if self.skipped > MOST_SKIPPED + samples:
                raise NonfiniteError(f"fp16 loss scaling skipped {self.skipped} steps; no steady state was reached")
            return None
        times.pop("all")
        return times

    def _interval_of(self, samples: dict[str, list[float]]) -> tuple[Interval, dict[str, list[float]]]:
        """The step time from its parts, and the samples that count: slow ones at the start are left out."""
        self.parts = samples
        part = self._most_expensive_part()
        warm = dict(samples)
        warm[part] = drop_warmup(samples[part], keep=min(FEWEST_SAMPLES, len(samples[part])))
        interval = sum_interval(step_terms(warm, self.run.accumulation), seed=self.request.seed)
        return interval.model_copy(update={"samples": len(warm[part])}), warm

    def _has_all_parts(self, samples: Mapping[str, list[float]]) -> bool:
        return all(samples.get(part) for part in self._stretches.everything())

    def _micro_steps_s(self) -> list[float]:
        """Seconds of the micro-steps that were timed, of whatever part."""
        return [s for part, seconds in self.parts.items() if "micro_step" in part for s in seconds]

    # What both ways share.

    def _begin_measuring(self) -> None:
        """Begins the window: what was timed before does not count."""
        self._stretches.clean, self._stretches.aside, self._lasts_s = {}, {}, 0.0
        self.load.restart()
        self._stretches.begin()
        self._began = time.monotonic()

    def _is_enough(self, interval: Interval, wanted: int) -> bool:
        """Whether there are as many samples as are wanted, or a few that agree, and the load could be judged."""
        agree = interval.samples >= FEWEST_SAMPLES and relative_width(interval) <= NARROW
        return (interval.samples >= wanted or agree) and self._elapsed() >= MEASURING_S

    def _time_is_over(self) -> bool:
        """Whether the look has lasted as long as it should.

        What disturbed stretches took is added, up to `remeasure` times that. A long look is not measured again: the
        search looks at it again, or has better use for the time.
        """
        again = self.request.remeasure if self._lasts_s <= MOST_AGAIN_S else 0.0
        self._stretches.most_extra_s = again * self._lasts_s
        return self._elapsed() >= min(self._lasts_s, self.request.most_s) + self._stretches.extra_s

    def _may_end(self) -> bool:
        """Whether all samples are judged: a stretch that is too short for it goes on, a disturbed one is repeated."""
        if not self._stretches.current:
            return bool(self._stretches.clean) or self._time_is_over()
        return self._stretches.is_long_enough() and (self._stretches.close() or self._time_is_over())

    def _samples_that_count(self, least: Mapping[str, int]) -> dict[str, list[float]]:
        """The clean samples where there are enough of each part; else all, and the trial is disturbed."""
        clean = self._stretches.clean
        if all(len(clean.get(part, ())) >= count for part, count in least.items()):
            return clean
        if self._stretches.problem is not None:
            self.disturbed = self._stretches.problem
        return self._stretches.everything()

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

    def kept_samples(self) -> dict[str, tuple[float, ...]]:
        """The samples that count, by part, for the record: the first MOST_KEPT, in microseconds at the finest."""
        found = {STEP: self.samples} if self.method == "whole_steps" else self.parts
        return {part: tuple(round(s, 6) for s in seconds[:MOST_KEPT]) for part, seconds in found.items()}

    # Helpers.

    def _while_kernels_run(self) -> None:
        self.load.gpu.sample()
