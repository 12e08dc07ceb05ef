"""Runs and times the steps of one look at a configuration, as whole steps or in parts. Runs in a rank.

In: a `TrainingRun` and a `TrialRequest`; how long a look lasts is in request.py. Out: an `Interval` of the step time on
the slowest rank; `BehindError` where the configuration is dropped before (measure.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from autoplan.planner.records.trials import Interval
from autoplan.planner.trials.batches import TrialBatches, first_samples
from autoplan.planner.trials.load import LoadMonitor, Stretches
from autoplan.planner.trials.measure import (
    COLD_SD,
    NARROW,
    STEP_SD,
    compare,
    drop_warmup,
    median_interval,
    relative_width,
    step_terms,
    sum_interval,
)
from autoplan.planner.trials.ranks import RankSync
from autoplan.planner.trials.request import (
    EXPENSIVE_S,
    FEWEST_SAMPLES,
    FITS_MICRO_STEPS,
    GRAPH_MICRO_STEPS,
    MEASURING_S,
    MOST_AGAIN_S,
    PART_MICRO_STEPS,
    SAMPLES,
    SLICED_S,
    VERY_EXPENSIVE_S,
    WARM_UP_S,
    WHOLE_STEP_S,
    TrialRequest,
    records_graphs,
    samples_wanted,
)
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.step import StepResult

if TYPE_CHECKING:
    from autoplan.planner.trials.slices import Slices
    from autoplan.processes.context import RankContext

MIN_SAMPLE_S = 0.05
"""Short steps are timed in groups that take at least this long, so that reading the clock and waiting do not count."""

MOST_SKIPPED = 20
"""fp16 loss scaling skips steps until its scale has come down: from 65536, sixteen halvings reach 1."""

STEP = "step"
"""The one part of a whole step."""

MOST_KEPT = 50
"""Samples of each part that the record of a trial keeps; a step of 1 ms has some 16 in 0.8 s, of 50 steps each."""


class NonfiniteError(Exception):
    """The loss or the gradient norm is infinite or not a number."""


class BehindError(Exception):
    """The configuration is behind the leader (`measure.compare`).

    Attributes:
        interval: What is known of its step time.
        at_least_s: Its step takes so many seconds at least.
    """

    def __init__(self, interval: Interval, at_least_s: float) -> None:
        super().__init__("the configuration is slower than the best one")
        self.interval = interval
        self.at_least_s = at_least_s


@dataclass(kw_only=True)
class StepTimer:
    """Runs and times the steps of one trial.

    Attributes:
        context: Reports phases and heartbeats to the planner.
        request: What to measure.
        run: The training run.
        ranks: Takes the times of the slowest rank.
        load: Watches what else uses the device while steps are timed.
        slices: What the process shares the machine with others by; None: it has the machine.
        last_loss: Of the last step.
        first_losses: Of the first samples, before any update: one for each micro-step of the first step.
        skipped: Steps that fp16 loss scaling skipped so far.
        method: How the step time was found; None: not chosen yet.
        parts: Seconds of each part of a step, see `step_terms`.
        samples: Seconds of whole steps, or of the most expensive part.
        disturbed: Why the step time does not count as this configuration's; None if nothing else used the device.
    """

    context: RankContext
    request: TrialRequest
    run: TrainingRun
    ranks: RankSync
    load: LoadMonitor
    slices: Slices | None = None
    last_loss: float | None = None
    first_losses: list[float] = field(default_factory=list)
    skipped: int = 0
    method: Literal["whole_steps", "parts"] | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    disturbed: str | None = None
    _stretches: Stretches = field(init=False)
    _lasts_s: float = 0.0
    _was_skipped: bool = False
    _began: float = 0.0
    _last_heartbeat: float = 0.0
    _whole_batches: list[Any] = field(default_factory=list)
    _steps_per_sample: int = 1

    def __post_init__(self) -> None:
        self.batches = TrialBatches(self.run, self.request.spec)
        self._stretches = Stretches(load=self.load, ranks=self.ranks, most_extra_s=0.0)

    @property
    def _has_other_ranks(self) -> bool:
        return self.ranks.world_size > 1

    # The two short steps.

    def short_steps(self) -> None:
        """Runs two optimizer steps of a few micro-steps: they show that the configuration fits, and warm up.

        If a micro-step is expensive, each step has only two: gradients accumulate from the second micro-step on, and a
        third would show nothing new about memory. If it is very expensive, the first step has only one: it makes the
        optimizer's state, and the second step accumulates gradients beside that state; of a further run, the second
        has only one too. On one rank expensive micro-steps are samples, all but the very first (the first two where
        they are recorded as a CUDA graph).

        Raises:
            BehindError: the micro-steps alone are slower than the leader's whole step.
            NonfiniteError: the loss or the gradient norm is not finite.
        """
        micro_steps = min(self.run.accumulation, FITS_MICRO_STEPS)
        alone, compiles = not self._has_other_ranks, self.request.config.compile != "off"
        self.context.phase("compile" if compiles else "warmup")
        self._began = self._now_s()
        graphs = records_graphs(self.request.config)
        uncounted = GRAPH_MICRO_STEPS if graphs else 1
        fewest = 1 if alone and not graphs else 2
        same = first_samples(self.run.workload, self.run.config.micro_batch, micro_steps)
        self._stretches.begin()

        def after_first(seconds: Sequence[float]) -> None:
            if len(seconds) == 1 and self.slices is not None and seconds[0] > EXPENSIVE_S:
                self._count()
            if self.slices is not None:
                self._stretches.begin()

        first = self._step_not_skipped(
            micro_steps, shorten_if_expensive=True, fewest=fewest, first_batch=same, after_each=after_first
        )["all"]
        if len(first) == 1 and (micro_steps > 1 or not compiles):  # after_each is not called after the last
            after_first(first)
        if compiles:
            self.context.phase("warmup")
            self._began = self._now_s()
            self._stretches.begin()
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
        shorter = self.request.again and len(first) == 1 and self.batches.sizes is None
        fewest = 1 if shorter and not graphs else 2
        second = self._step_not_skipped(micro_steps, shorten_if_expensive=alone, fewest=fewest, after_each=judge)
        self.parts = {part: seconds for part, seconds in second.items() if part != "all"}
        if min(second["all"]) <= EXPENSIVE_S:
            return
        if alone:
            counted = [*first, *second["all"]][uncounted:]
            self.parts = {self._expensive_part: counted or second["all"], "optimizer_step": second["optimizer_step"]}
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
        if to_beat is None or (at_least_s := compare(steps_s, to_beat, sd=sd)) is None:
            return
        stretches = self._stretches
        if (pending or stretches.current) and not (stretches.is_long_enough() and stretches.is_clean()):
            return  # its time is not judged yet, or other work made it slow
        self.method = self.method or "parts"
        self.samples = list(steps_s) if self.method == "whole_steps" else self.samples
        raise BehindError(median_interval(steps_s, seed=self.request.seed), at_least_s)

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
                    raise self._never_steady()
                continue
            self._lasts_s = self._lasts_s or max(self._least_s, SAMPLES * sample)
            stretches.add({STEP: [sample]})
            over = self._time_is_over()
            samples = stretches.so_far().get(STEP, [])
            if not samples and not over:
                continue
            interval = self._interval(samples or stretches.everything()[STEP])
            self._heartbeat(step_time_s=interval.median, samples=len(samples))
            enough = over or self._is_enough(interval, SAMPLES)
            if enough and len(stretches.everything()[STEP]) >= 2 and self._may_end():
                break
            if len(samples) >= FEWEST_SAMPLES:
                self._drop_if_behind(samples)
        self.samples = self._samples_that_count({STEP: FEWEST_SAMPLES})[STEP]
        return self._interval(self.samples)

    # Parts.

    def measure_parts(self) -> Interval:
        """Times short steps until there are enough, and calculates the step time from their parts.

        Raises:
            BehindError: it is behind the leader.
            NonfiniteError: loss scaling does not come to rest.
        """
        if not self._lasts_s or (self.slices is not None and not self.slices.counts):  # no sample counts yet
            while self._elapsed() < WARM_UP_S:
                self._timed_short_step(0)
            self._begin_measuring()
        stretches = self._stretches
        while True:
            samples = stretches.so_far()
            over = self._time_is_over()
            if over or not all(samples.get(part) for part in stretches.everything()):
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
                self._lasts_s = self._lasts_s or max(self._least_s, FEWEST_SAMPLES * sum(map(sum, times.values())))
                stretches.add(times)
                self.parts = stretches.everything()
        counted = self._samples_that_count(dict.fromkeys(self.parts, 1) | {self._most_expensive_part(): least})
        interval, self.parts = self._interval_of(counted)
        self.samples = list(self.parts[self._most_expensive_part()])
        return interval

    def _timed_short_step(self, samples: int) -> dict[str, list[float]] | None:
        """Seconds by part of one more short step; None if fp16 loss scaling skipped it. `samples`: how many there are.

        It has fewer micro-steps where these are expensive; on one rank they are all alike then, as in `short_steps`.
        """
        expensive = min(self._micro_steps_s()) > EXPENSIVE_S
        times = self.short_step(min(self.run.accumulation, 2 if expensive else PART_MICRO_STEPS))
        if self._was_skipped:
            if self.skipped > MOST_SKIPPED + samples:
                raise self._never_steady()
            return None
        every = times.pop("all")
        if expensive and not self._has_other_ranks:
            return {self._expensive_part: every, "optimizer_step": times["optimizer_step"]}
        return times

    @property
    def _expensive_part(self) -> str:
        """The one part that all expensive micro-steps of one rank are."""
        return "micro_step" if self.run.accumulation > 1 else "micro_step_sync"

    def _interval_of(self, samples: dict[str, list[float]]) -> tuple[Interval, dict[str, list[float]]]:
        """The step time from its parts, and the samples that count: slow ones at the start are left out."""
        self.parts = samples
        part, sliced = self._most_expensive_part(), self.slices is not None
        warm = dict(samples)
        if not sliced:
            warm[part] = drop_warmup(samples[part], keep=min(FEWEST_SAMPLES, len(samples[part])))
        interval = sum_interval(step_terms(warm, self.run.accumulation), seed=self.request.seed, mean=sliced)
        return interval.model_copy(update={"samples": len(warm[part])}), warm

    def _micro_steps_s(self) -> list[float]:
        """Seconds of the micro-steps that were timed, of whatever part."""
        return [s for part, seconds in self.parts.items() if "micro_step" in part for s in seconds]

    # What both ways share.

    def _count(self) -> None:
        """Begins to share the machine in slices, once the other processes are warm too."""
        if self.slices is not None:
            self.context.phase("measure")
            self.slices.count()

    def _begin_measuring(self) -> None:
        """Begins the window: what was timed before does not count."""
        self._count()
        self._stretches.clean, self._stretches.aside, self._lasts_s = {}, {}, 0.0
        self.load.restart()
        self._stretches.begin()
        self._began = self._now_s()

    def _is_enough(self, interval: Interval, wanted: int) -> bool:
        """Whether there are as many samples as are wanted, or a few that agree, and the load could be judged.

        Runs that share the machine in slices all take as long, however well their samples agree.
        """
        agree = interval.samples >= FEWEST_SAMPLES and relative_width(interval) <= NARROW
        return (interval.samples >= wanted or agree) and self._elapsed() >= self._least_s

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

    # Single steps: short ones, part by part.

    def _step_not_skipped(self, micro_steps: int, *, first_batch: Any = None, **options: Any) -> dict[str, list[float]]:
        """A short step that updated the parameters: fp16 loss scaling skips some of the first."""
        for _ in range(MOST_SKIPPED):
            times = self.short_step(micro_steps, first_batch=first_batch, **options)
            if not self._was_skipped:
                return times
            first_batch = None
        raise self._never_steady()

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
        batch = self.batches.next(micro_steps * run.config.micro_batch) if first_batch is None else first_batch
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

    # Single steps: groups of whole ones.

    def warm_up(self) -> None:
        """Runs whole steps until the configuration is warm (WARM_UP_S), and groups them to last MIN_SAMPLE_S."""
        pipeline = self.request.config.pp > 1
        if pipeline:  # no short step was made
            self.context.phase("compile" if self.request.config.compile != "off" else "warmup")
            same = first_samples(self.run.workload, self.run.config.micro_batch, self.run.accumulation)
            self._keep_first_loss(float(self.run.step(same).loss))
        self._whole_batches = [self.batches.next(self.run.local_batch) for _ in range(2)]
        step_s = self._whole_step_not_skipped()
        if pipeline:
            self.context.phase("warmup")
            self._began = self._now_s()
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
        raise self._never_steady()

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
        return self.ranks.largest([self._now_s() - self._began])[0]

    def _now_s(self) -> float:
        """Seconds of a clock of the time that this process has the machine."""
        return time.perf_counter() if self.slices is None else self.slices.now_s()

    @property
    def _least_s(self) -> float:
        return MEASURING_S if self.slices is None else SLICED_S

    def _interval(self, samples: Sequence[float]) -> Interval:
        return sum_interval([(1.0, samples)], seed=self.request.seed, mean=self.slices is not None)

    def _time(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The result of a call, and the seconds it took on the slowest rank."""
        self._synchronize()
        began = self._now_s()
        result = call()
        self.load.gpu.sample()  # on CUDA most kernels of the call are still to run
        self._synchronize()
        seconds = self._now_s() - began
        self.load.watch_core()
        return result, self.ranks.largest([seconds])[0]

    def _synchronize(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)

    def _never_steady(self) -> NonfiniteError:
        return NonfiniteError(f"fp16 loss scaling skipped {self.skipped} steps; no steady state was reached")

    def _check(self, result: StepResult) -> None:
        """Raises NonfiniteError if the loss (or, without loss scaling, the gradient norm) is not finite."""
        self.last_loss = float(result.loss)
        norm = None if result.grad_norm is None or self.run.scaler is not None else float(result.grad_norm)
        if not math.isfinite(self.last_loss):
            raise NonfiniteError(f"the loss is {self.last_loss} at step {self.run.steps}")
        if norm is not None and not math.isfinite(norm):
            raise NonfiniteError(f"the gradient norm is {norm} at step {self.run.steps} (loss {self.last_loss:.4g})")

    def _heartbeat(self, **facts: float) -> None:
        """Reports to the planner, at most five times a second."""
        now = time.monotonic()
        if now - self._last_heartbeat > 0.2:
            self._last_heartbeat = now
            self.context.heartbeat(**facts)
