"""Times the steps of a TrainingRun, whole or by parts. Runs in a rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from autoplan.planner.records import Interval
from autoplan.planner.trials.device_watch import CompilerWatch, ThrottleWatch
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
from autoplan.planner.trials.request import EXPENSIVE, FITS_MICRO_STEPS, VERY_EXPENSIVE, WHOLE_STEP_SHARE, TrialRequest
from autoplan.planner.trials.team import Team
from autoplan.strategies.run import StepResult, TrainingRun
from autoplan.strategies.workloads.batch import split_batch

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext

MIN_PART_SAMPLES = 3
"""Warm samples of the costliest part without which a trial by parts does not end, unless it is losing."""

MIN_SAMPLE_S = 0.05
"""Quick steps are timed in groups that last at least this long, so that the clock and the wait do not show."""

PART_MICRO_STEPS = 6
"""Micro-steps of a short step that is run to be timed, where they are not dear: the first two differ from the rest."""

COLD_FACTOR, WARM_FACTOR = 2.0, 1.1
"""Before it is measured, a configuration is given up only if its micro-steps alone are this much slower than the best
whole step: cold ones, and quick ones, whose first times say little; and dear ones that ran before."""


class NonfiniteLoss(Exception):
    """The loss or the gradient norm is not a number."""


class Losing(Exception):
    """This configuration cannot win any more; `interval` is what is known of its step time."""

    def __init__(self, interval: Interval) -> None:
        super().__init__("losing")
        self.interval = interval


@dataclass(kw_only=True)
class StepTimer:
    """Runs and times the steps of one trial."""

    context: RankContext
    request: TrialRequest
    run: TrainingRun
    team: Team
    mesh: Any
    throttle: ThrottleWatch
    method: Literal["whole_steps", "parts"] | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    last_loss: float | None = None
    first_losses: list[float] = field(default_factory=list)
    _began: float = 0.0
    _last_beat: float = 0.0
    _batches_made: int = 0
    _few_samples: bool = False
    _whole_batches: list[Any] = field(default_factory=list)
    _group: int = 1

    # The two short steps.

    def short_steps(self) -> None:
        """Two optimizer steps of a few micro-steps: shows that it fits, and warms up; the second gives first times.

        Where a micro-step is dear they take two micro-steps each: gradients accumulate from the second on, and a
        third would only add a sample. On one rank all but the very first then count as samples. Where it is very dear
        the first step takes one only: it makes the optimizer's state, and the second step accumulates beside that.
        """
        micro_steps = min(self.run.accumulation, FITS_MICRO_STEPS)
        compiles = self.request.config.compile != "off"
        self.context.phase("compile" if compiles else "warmup")
        self._began = time.monotonic()
        same = first_samples(self.run.workload, self.run.config.micro_batch, micro_steps)
        first = self.short_step(
            micro_steps, shrink_if_dear=True, least=2 if compiles or self._is_team else 1, first_batch=same
        )
        if compiles:
            self.context.phase("warmup")
            self._began = time.monotonic()
        if self._is_dear(first["all"], micro_steps) and len(first["all"]) > 1 and not compiles:
            self._give_up_if_losing(first["all"][1:], 0.75 * COLD_FACTOR)
        second = self.short_step(micro_steps, shrink_if_dear=not self._is_team)
        for kind, values in second.items():
            if kind != "all":
                self.parts.setdefault(kind, []).extend(values)
        dear = self._is_dear(second["all"], micro_steps)
        if dear and not self._is_team and micro_steps > 1:
            self.parts.pop("first_micro_step", None)
            self.parts.pop("second_micro_step", None)
            self.parts["micro_step"] = [*first["all"][1:], *second["all"]]
            self._few_samples = len(first["all"]) == 1
        known = dear and len(second["all"]) > 1
        self._give_up_if_losing(second["all"], WARM_FACTOR if known else COLD_FACTOR)

    @property
    def _is_team(self) -> bool:
        return self.team.world_size > 1

    def _is_dear(self, micro_steps_s: list[float], micro_steps: int) -> bool:
        """Whether a short step takes a good part of the time box, going by its quickest micro-step."""
        return min(micro_steps_s) * micro_steps > 0.25 * self.request.time_box_s

    def _give_up_if_losing(self, micro_steps_s: list[float], factor: float) -> None:
        best = self.request.best_high_s
        accumulation = self.run.accumulation
        if best is not None and min(micro_steps_s) * accumulation > factor * best:
            interval = sum_interval([(float(accumulation), micro_steps_s)], seed=self.request.seed)
            self.method = "parts"
            raise Losing(interval)

    def short_step(
        self, micro_steps: int, *, shrink_if_dear: bool = False, least: int = 2, first_batch: Any = None
    ) -> dict[str, list[float]]:
        """One optimizer step of a few micro-steps; the samples by kind, and all micro-steps under "all".

        Args:
            micro_steps: How many.
            shrink_if_dear: Take fewer where the first shows that they are dear.
            least: The fewest then. On more than one rank it must be at least two: the last one alone syncs.
            first_batch: What the very first step runs on; the loss of each of its micro-steps is kept.
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
            times.setdefault(self._kind(number, last), []).append(seconds)
            times["all"].append(seconds)
            total += micro_total
            count += micro_count
            if first_batch is not None:
                self._keep_first_loss(float(micro_total) / max(1.0, float(micro_count)))
            if shrink_if_dear and number == 1:
                share = seconds / self.request.time_box_s
                last = min(last, least if share > VERY_EXPENSIVE else 2 if share > EXPENSIVE else last)
            self._beat(micro_step_s=seconds)
            if number >= last:
                break
        result, seconds = self._time(lambda: run.optimizer_step(total, count, divisor))
        times["optimizer_step"] = [seconds]
        self._check(result)
        return times

    def _keep_first_loss(self, loss: float) -> None:
        if math.isfinite(loss):  # else the trial ends as nonfinite
            self.first_losses.append(loss)

    def _kind(self, number: int, last: int) -> str:
        """What a micro-step's sample stands for: `step_terms`. On one rank the last of several reduces nothing."""
        if number == last and (self._is_team or last == 1):
            return "micro_step_sync"
        return {1: "first_micro_step", 2: "second_micro_step"}.get(number, "micro_step")

    # Whole steps.

    def choose_method(self) -> Literal["whole_steps", "parts"]:
        """Whole steps where one costs less than a fifth of the time box, or parts do not exist (pipelines)."""
        if self.request.config.pp > 1:
            self.method = "whole_steps"
        elif self.request.method is not None:
            self.method = self.request.method
        else:
            step_s = sum_interval(step_terms(self.parts, self.run.accumulation)).median
            cheap = step_s < WHOLE_STEP_SHARE * self.request.time_box_s
            self.method = "whole_steps" if cheap else "parts"
        return self.method

    def warm_up(self) -> None:
        """Whole steps until two successive windows agree, or a third of the time box is gone."""
        self._prepare_whole()
        samples: list[float] = []
        while not is_settled(samples):
            samples.append(self._whole_step_sample())
            if self._elapsed() > self.request.time_box_s / 3 and len(samples) >= 2:
                if len(samples) >= 6:
                    self.warnings.append("step times had not settled when the warm-up ended")
                break

    def _prepare_whole(self) -> None:
        if not self._began:
            self.context.phase("compile" if self.request.config.compile != "off" else "warmup")
            self._began = time.monotonic()
        self._whole_batches = [self._make_batch(self.run.local_batch) for _ in range(2)]
        self._group = 1
        if self.request.config.pp > 1:  # no short step was made
            same = first_samples(self.run.workload, self.run.config.micro_batch, self.run.accumulation)
            self._keep_first_loss(float(self.run.step(same).loss))
            once = self._whole_step_sample()
        else:
            once = [self._whole_step_sample() for _ in range(2)][-1]
        if self.request.config.pp > 1:
            self.context.phase("warmup")
            self._began = time.monotonic()
        self._group = max(1, math.ceil(MIN_SAMPLE_S / once))

    def _whole_step_sample(self) -> float:
        """Seconds per whole step, over a group of steps; times of steps that fp16 skipped are not used."""
        results: list[StepResult] = []

        def steps() -> None:
            for number in range(self._group):
                results.append(self.run.step(self._whole_batches[number % 2]))

        _, seconds = self._time(steps)
        self._check(results[-1])
        if any(result.skipped for result in results):
            return math.nan
        return seconds / self._group

    def measure_whole_steps(self) -> tuple[Interval, Stop]:
        """Times whole steps until the stop rule speaks; a window in which something was compiled is thrown away."""
        rule, compiler, thrown_away, invalid = self._rule(), CompilerWatch(), 0, 0
        compiler.start()
        while True:
            sample = self._whole_step_sample()
            self.throttle.sample()
            if self.team.any(compiler.recompiled()) and thrown_away < 2:
                self.samples.clear()
                thrown_away += 1
                compiler.start()
                continue
            if math.isnan(sample):
                invalid += 1
                if invalid > 10 + len(self.samples):
                    raise NonfiniteLoss(f"fp16 loss scaling skipped {invalid} steps; no steady state was reached")
                continue
            self.samples.append(sample)
            interval = median_interval(self.samples, seed=self.request.seed)
            self._beat(step_time_s=interval.median, samples=len(self.samples))
            stop = rule.decide(interval, self._elapsed())
            if stop is not None and len(self.samples) >= 2:
                break
        if thrown_away:
            self.warnings.append(f"torch.compile compiled again while measuring; {thrown_away} window(s) thrown away")
        if invalid:
            self.warnings.append(f"fp16 loss scaling skipped {invalid} step(s) while measuring; they do not count")
        return interval, stop

    # Parts.

    def measure_parts(self) -> tuple[Interval, Stop]:
        """Times short steps and puts a step together from their parts until the stop rule speaks."""
        rule, accumulation = self._rule(), self.run.accumulation
        while True:
            costly = self._costliest_part()
            warm = dict(self.parts)
            warm[costly] = drop_warmup(self.parts[costly], keep=min(MIN_PART_SAMPLES, len(self.parts[costly])))
            interval = sum_interval(step_terms(warm, accumulation), seed=self.request.seed)
            interval = interval.model_copy(update={"samples": len(warm[costly])})
            self._beat(step_time_s=interval.median, samples=interval.samples)
            stop = rule.decide(interval, self._elapsed())
            least = 2 if self._few_samples else MIN_PART_SAMPLES
            enough = interval.samples >= least or stop == "losing"
            if stop is not None and enough:
                self.parts = warm
                self.samples = list(warm[costly])
                return interval, stop
            cycle = self.short_step(min(accumulation, self._part_micro_steps()))
            self.throttle.sample()
            for kind, values in cycle.items():
                if kind != "all":
                    self.parts[kind] = self.parts.get(kind, []) + values

    def _part_micro_steps(self) -> int:
        """Micro-steps of one more short step: more where they cost little of the time box."""
        quickest = min(min(values) for kind, values in self.parts.items() if "micro_step" in kind)
        return FITS_MICRO_STEPS if self._is_dear([quickest], PART_MICRO_STEPS) else PART_MICRO_STEPS

    def _costliest_part(self) -> str:
        terms = step_terms(self.parts, self.run.accumulation)
        costs: dict[str, float] = {}
        for weight, samples in terms:
            name = next(name for name, values in self.parts.items() if values is samples)
            costs[name] = costs.get(name, 0.0) + weight * float(np.median(samples))
        return max(costs, key=lambda name: costs[name])

    def part_medians(self) -> dict[str, float]:
        """The medians of the parts that were timed."""
        return {kind: float(np.median(values)) for kind, values in self.parts.items() if values}

    # What all of them use.

    def _rule(self) -> StopRule:
        return StopRule(
            time_box_s=self.request.time_box_s, best_high_s=self.request.best_high_s, narrow=self.request.narrow
        )

    def _elapsed(self) -> float:
        return self.team.slowest([time.monotonic() - self._began])[0]

    def _time(self, call: Callable[[], Any]) -> tuple[Any, float]:
        self._wait()
        began = time.perf_counter()
        result = call()
        self._wait()
        return result, self.team.slowest([time.perf_counter() - began])[0]

    def _wait(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)

    def _check(self, result: StepResult) -> None:
        """Raises NonfiniteLoss for a loss (or, without loss scaling, a gradient norm) that is not finite."""
        self.last_loss = float(result.loss)
        norm = None if result.grad_norm is None or self.run.scaler is not None else float(result.grad_norm)
        if not math.isfinite(self.last_loss):
            raise NonfiniteLoss(f"the loss is {self.last_loss} at step {self.run.steps}")
        if norm is not None and not math.isfinite(norm):
            raise NonfiniteLoss(f"the gradient norm is {norm} at step {self.run.steps} (loss {self.last_loss:.4g})")

    def _make_batch(self, samples: int) -> Any:
        """A batch of this rank's own; no two ranks and no two calls get the same."""
        position, count = 0, 1
        if self.mesh is not None:
            from autoplan.strategies.techniques.mesh import data_position

            position, count = data_position(self.mesh)
        index = self._batches_made * count + position
        self._batches_made += 1
        return self.run.workload.make_batch(samples, index)

    def _beat(self, **facts: float) -> None:
        now = time.monotonic()
        if now - self._last_beat > 0.2:
            self._last_beat = now
            self.context.heartbeat(**facts)
