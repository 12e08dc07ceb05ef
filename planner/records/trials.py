"""How a trial ended, and what it measured: the closed list of outcomes and the record of one trial."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

from pydantic import Field

from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig


class Outcome(StrEnum):
    """How a trial ended. Closed: whatever happens in a trial is one of these."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    NONFINITE = "nonfinite"
    UNSUPPORTED = "unsupported"
    PRUNED = "pruned"
    INTERRUPTED = "interrupted"


PHASES = ("init", "build", "compile", "warmup", "measure", "done")


class Interval(Record):
    """A median, its 95 % bootstrap interval (`low` to `high`), and `samples`, the number of measurements."""

    median: float
    low: float
    high: float
    samples: int

    def times(self, factor: float) -> Interval:
        """The interval of so many times the value."""
        return Interval(
            median=factor * self.median, low=factor * self.low, high=factor * self.high, samples=self.samples
        )


class PeakMemory(Record):
    """Peak memory of the fullest rank, over two optimizer steps and the measured window.

    On CUDA: `allocated` and `reserved` from torch's allocator, `driver` the device's used memory as NVML says it.
    On CPU: `resident`, the peak resident set since the build began. `limit_bytes` is what a trial may take.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    driver_bytes: int | None = None
    resident_bytes: int | None = None
    limit_bytes: int | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The figure that is compared with the limit: driver, else reserved, else resident."""
        found = (self.driver_bytes, self.reserved_bytes, self.resident_bytes)
        return next((value for value in found if value is not None), None)


RECOMPILED = "torch.compile compiled again"
"""Why the times of a stretch of a window do not count: that one reason is counted apart from other work."""


class Window(Record):
    """The other activity on the device while a trial's steps were timed.

    Shares of the CPU are of all the cores that the trial may run on. If a stretch of the window was disturbed, it was
    measured again if there was time; the figures are over all stretches.
    """

    seconds: float
    others_cpu_share: float | None = Field(
        default=None, description="CPU time that went to others; None: /proc/stat is not there, or says nothing"
    )
    steal_share: float = Field(default=0.0, description="of it, what the hypervisor gave to other machines")
    waited_share: float | None = Field(
        default=None, description="longest time that a thread of the trial waited for a core, of the window's seconds"
    )
    pressure_share: float | None = Field(
        default=None, description="time in which some task of this machine waited for a core (PSI); None: no PSI here"
    )
    throttled_periods: int = Field(default=0, description="periods in which the cgroup's CPU quota was used up")
    throttled_s: float = Field(default=0.0, description="time that the cgroup's tasks stood still for it")
    gpu_others_share: float | None = Field(
        default=None, description="highest utilisation of this GPU by other processes; None: the driver does not say"
    )
    core_s: float | None = Field(
        default=None,
        description="seconds of a fixed calculation on the rank's core, the geometric mean of readings in the "
        "window: how fast the core was; None: on a GPU it is not read",
    )
    core_readings: int = Field(default=0, description="how many readings that is the mean of")
    sm_clock_hz: float | None = Field(default=None, description="median clock of the GPU's multiprocessors")
    clock_events: tuple[str, ...] = Field(default=(), description="why the driver limited that clock")
    discarded: dict[str, int] = Field(
        default_factory=dict, description="why stretches were measured again: how many for each reason"
    )
    disturbed: str | None = Field(
        default=None, description="a sentence, where the step time was measured while others used the device"
    )


Purpose = Literal["baseline", "reference", "search", "repeat", "finalist", "claim"]

DISTURBED_SD = 0.2
"""Standard deviation of the logarithm of a step time that was disturbed. Assumed: one configuration has run 362 and
then 303 samples/s in two processes, 18 % apart."""

REPEATS = ("repeat", "finalist", "claim")
"""Purposes of trials that measure a configuration again."""


class Trial(Record):
    """The record of one finished trial, as the store keeps it."""

    number: int
    purpose: Purpose = Field(
        description="reference: the careful hand setting; repeat: of a configuration, for the spread between runs; "
        "finalist: a run that the choice is made by; claim: a run that the speed-up is calculated from"
    )
    round: int | None = Field(default=None, description="of finalists and claims: runs of one round were side by side")
    config: TrainingConfig
    outcome: Outcome
    detail: str | None = Field(
        default=None, description="out_of_memory: device, host or fragile; crashed: the signal or the exit status"
    )
    reason: str | None = Field(default=None, description="a sentence for people; None when ok")
    budget_ended: bool = Field(default=False, description="timeout: by the budget's end, which is no verdict on it")
    phase: str
    step_time_s: Interval | None = Field(default=None, description="one optimizer step at the full global batch")
    at_least_s: float | None = Field(
        default=None, description="a step takes at least so long: of a look that was dropped, or that had no more time"
    )
    tokens_per_s: Interval | None = Field(default=None, description="or samples/s, where samples are no sequences")
    items_per_step: int = Field(default=0, description="tokens, or samples, of the global batch as it was counted")
    method: Literal["whole_steps", "parts"] | None = Field(
        default=None, description="timed as whole steps, or put together from micro-steps and the optimizer step"
    )
    parts_s: dict[str, float] = Field(
        default_factory=dict,
        description="medians: first_micro_step, second_micro_step, micro_step, micro_step_sync, optimizer_step",
    )
    samples_s: dict[str, tuple[float, ...]] = Field(
        default_factory=dict,
        description="seconds of each sample that counts, in order, by the names of parts_s; `step`: a whole step, the "
        "mean of as many as last 50 ms",
    )
    peak_memory: PeakMemory = PeakMemory()
    loss: float | None = None
    first_losses: tuple[float, ...] = Field(
        default=(), description="of the same first samples before any update, one for each micro-step on them"
    )
    loss_differs: bool = Field(
        default=False, description="that loss is not the baseline's: parity decides whether it trains the same"
    )
    predicted_step_time_s: float | None = Field(
        default=None, description="before the trial ran, with what earlier trials had taught; low, high: 90 %"
    )
    predicted_step_time_low_s: float | None = None
    predicted_step_time_high_s: float | None = None
    predicted_peak_memory_bytes: float | None = None
    predicted_peak_memory_low_bytes: float | None = None
    predicted_peak_memory_high_bytes: float | None = None
    seconds_spent: float
    startup_s: float = Field(default=0.0, description="from the request to the first line of the trial's own code")
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    warnings: tuple[str, ...] = Field(default=(), description="throttling, recompiles, skipped steps, compile cache")
    window: Window | None = Field(default=None, description="what others did to the device while steps were timed")
    last_lines: str = Field(default="", description="the end of the trial's stderr, where it failed")
    exit_status: str | None = None
    cause: Literal["program", "limit", "fatal_signal", "outside"] | None = Field(
        default=None, description="what ended a trial that did not end by itself; outside: it says nothing of the trial"
    )
    beside: int = Field(
        default=0, description="so many other parts of the machine were kept busy meanwhile, with --side-by-side"
    )
    pauses: int = Field(
        default=0,
        description="how often it was stopped while the others of its round had the machine: all were measured over "
        "the same time, in slices; 0: it ran alone",
    )
    resumed: bool = Field(default=False, description="taken from the record of an earlier run of the same search")
    started: str = Field(default="", description="UTC, ISO 8601")

    @property
    def disturbed(self) -> str | None:
        """Why its step time does not count as this configuration's; None if nothing else used the device."""
        return None if self.window is None else self.window.disturbed

    @property
    def disturbed_sd(self) -> float:
        """By how much its step time may be off for what disturbed it, as a standard deviation of the logarithm.

        At least as much as the share of the cores, or of the GPU, that others took explains: a step gets the rest.
        """
        window = self.window
        if window is None or window.disturbed is None:
            return 0.0
        on_gpu = window.gpu_others_share is not None or window.sm_clock_hz is not None
        share = window.gpu_others_share if on_gpu else window.others_cpu_share
        return max(DISTURBED_SD, -math.log(1 - min(share or 0.0, 0.9)))

    def at_pace(self, pace: float) -> Trial:
        """The trial as if its steps took so many times as long."""
        step, rate, least_s = self.step_time_s, self.tokens_per_s, self.at_least_s
        return self.model_copy(
            update={
                "step_time_s": None if step is None else step.times(pace),
                "tokens_per_s": None if rate is None else rate.times(1 / pace),
                "at_least_s": None if least_s is None else pace * least_s,
                "parts_s": {part: pace * seconds for part, seconds in self.parts_s.items()},
                "samples_s": {part: tuple(pace * s for s in samples) for part, samples in self.samples_s.items()},
            }
        )

    @property
    def is_repeat(self) -> bool:
        """Whether it measured a configuration again that an earlier trial had measured."""
        return self.purpose in REPEATS

    @property
    def peak_memory_bytes(self) -> int | None:
        """The peak that is compared with the limit."""
        return self.peak_memory.peak_bytes

    @property
    def did_not_run(self) -> bool:
        """Whether something outside ended every run of it: nothing is known of the configuration."""
        return self.outcome is Outcome.INTERRUPTED


class Attempt(Record):
    """A run of a trial, or of another part of the search, that does not count: something outside ended it."""

    part: str = Field(description="probe, inspect, trace, baseline, reference, search, finalist, parity, loader")
    number: int | None = Field(default=None, description="of the trial, where it was one")
    config: TrainingConfig | None = None
    reason: str = Field(description="how it ended, a sentence for people")
    phase: str
    exit_status: str | None = None
    seconds_spent: float
    started: str = Field(default="", description="UTC, ISO 8601")

    def describe(self) -> str:
        """A sentence that says what was ended, and how."""
        what = self.part if self.number is None else f"trial {self.number} ({self.part})"
        whose = f" of {self.config.describe()}" if self.config is not None and self.number is None else ""
        return f"{what}{whose}: {self.reason}"


class WorkLine(Record):
    """A line of the ledger: a piece of work of a search, and where its seconds went."""

    kind: str = Field(
        description="imports, setup, baseline, probe, trace, look, hand setting, pair, parity, claim, loader"
    )
    config: TrainingConfig | None = None
    began_s: float = Field(description="of the budget, spent before it")
    seconds: float
    devices: int = Field(default=1, description="GPUs, on CPU machines, that its planner held meanwhile")
    predicted_s: float = 0.0
    gain: float = Field(default=0.0, description="expected, in the natural logarithm of the plan's speed")
    why: str = Field(default="", description="a clause for people")
    over: str = Field(default="", description="what it was preferred to")
    part: int | None = Field(
        default=None, description="of the machine, where it ran beside others (--side-by-side): these pieces overlap"
    )
    with_claim: bool = Field(default=False, description="of a look: there was time for the claim of what it looked at")


def seconds_of(ledger: Iterable[WorkLine]) -> list[tuple[WorkLine, float]]:
    """The lines with their seconds; what pieces on several parts share counts once, for the first of them."""
    lines = list(ledger)
    if all(line.part is None for line in lines):
        return [(line, line.seconds) for line in lines]
    found, ended_s = [], 0.0
    for line in sorted(lines, key=lambda line: line.began_s):
        end_s = line.began_s + line.seconds
        shared_s = 0.0 if line.part is None else max(0.0, ended_s - line.began_s)
        found.append((line, max(0.0, line.seconds - shared_s)))
        ended_s = max(ended_s, end_s)
    return found


class ClaimRounds(Record):
    """The rounds that a claim rests on, as they were fixed before the first."""

    number: int = Field(description="1 for the first claim of a search; a search that goes on may make another")
    config: TrainingConfig
    reference: TrainingConfig = Field(description="the baseline")
    first_round: int
    rounds: int
    budget_s: float = Field(description="of the search when it began: with more, a new claim is made")
    max_trials: int | None = Field(default=None, description="the same; None: no limit, or of an earlier version")


class Claim(Record):
    """The claim that may be made about a plan's speed-up, and what it rests on."""

    claimed: bool = Field(description="the interval of the speed-up is above 1, and nothing disturbed its runs")
    why_not: str | None = Field(default=None, description="a sentence, where no win is claimed")
    rounds: int = Field(description="rounds of runs side by side behind the speed-up; 0: single trials")
    chosen_from: int = Field(
        default=1,
        description="the level of the interval is divided by it: 1, 3, 6 and so on for the first, second and third "
        "claim; without rounds, how many configurations the plan was the best of",
    )
    spread: float = Field(description="standard deviation between runs of one configuration, as a share")
    spread_repeats: int = Field(description="repeats that it was measured by; 0: assumed")
    trials: tuple[int, ...] = Field(default=(), description="numbers of the plan's and the baseline's runs")


class Prediction(Record):
    """The cost model's prediction of a configuration before it ran; low and high: the ends of an interval of 90 %."""

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    peak_memory_bytes: float
    peak_memory_low_bytes: float
    peak_memory_high_bytes: float
    verdict: Literal["fits", "too_close", "does_not_fit"]
    bound: str = Field(description="what binds: compute, memory_bandwidth, launch, communication, input, bubble")
    memory_parts_bytes: dict[str, float] = Field(default_factory=dict)
    host_memory_bytes: float = Field(default=0.0, description="what a rank keeps in the host's memory by offload")
    time_parts_s: dict[str, float] = Field(
        default_factory=dict,
        description="seconds of a step by kind of work; input comes beside the step: one process making its batch",
    )
    model_flops: float | None = Field(default=None, description="FLOPs of the model per optimizer step, no recompute")
    hardware_flops: float | None = Field(default=None, description="FLOPs executed per optimizer step")


IN_FP32 = ", in fp32"
"""Ends the name of a comparison of the same knobs in fp32, which a check of other precisions makes too."""


class ParityCheck(Record):
    """One comparison of the parity check: the largest difference of its kind, and what passes."""

    name: str
    difference: float
    allowed: float
    where: str = Field(default="", description="the parameter, step or module with the largest difference")


class Parity(Record):
    """Does the configuration still train the same thing? Compared with one plain process in the model's precision."""

    passed: bool
    tolerance: float = Field(description="largest relative difference that passes, for this precision")
    worst_gradient_difference: float
    worst_update_difference: float
    worst_group: str
    loss_difference: float
    worst_gradient_error: float | None = Field(
        default=None, description="largest relative distance of a module's gradient vector, not only of its norm"
    )
    gradient_error_tolerance: float | None = None
    global_batch: int = Field(description="samples of the check")
    sequence_length: int | None
    own_shapes: bool = Field(default=False, description="in the configuration's own micro-batches and whole sequences")
    changes_numerics: bool
    note: str = ""
    checks: tuple[ParityCheck, ...] = Field(default=(), description="every comparison that was made")
    failures: tuple[str, ...] = Field(default=(), description="what failed, in sentences")
    not_checked: tuple[str, ...] = Field(default=(), description="what was not compared this time, and why")
    finished: bool = Field(default=True, description="False: a limit ended the check, or it failed; the note says why")


DEFAULT_FLOOR = 0.9
"""Where little memory is looked for: the share of the best throughput that a plan must reach, unless one is given."""


class Objective(Record):
    """The objective of a search."""

    name: Literal["throughput", "memory", "cost"] = "throughput"
    min_throughput: float | None = Field(
        default=None, gt=0, le=1, description="memory: the share of the best throughput that a plan must reach"
    )
    price_per_hour: float | None = Field(default=None, gt=0, description="of one device, in any currency")

    @property
    def floor(self) -> float:
        """The share of the best throughput that a plan must reach."""
        return self.min_throughput or DEFAULT_FLOOR

    def describe(self) -> str:
        """The objective in words."""
        return {
            "throughput": "the highest throughput",
            "memory": f"the least memory at {self.floor:.0%} of the best throughput",
            "cost": "the least cost: the time of all ranks together",
        }[self.name]

    def cost_per_million(self, items_per_s: float, ranks: int) -> float | None:
        """The cost of a million tokens (or samples); None: no price is given."""
        return None if self.price_per_hour is None else 1e6 / items_per_s / 3600 * ranks * self.price_per_hour


class LeftOutFamily(Record):
    """A family of configurations that was never tried: which, which limit it broke, by how much."""

    family: str
    limit: str
    by: str
    configurations: int
