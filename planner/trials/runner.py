"""Runs trials. Runs itself in the planner's process.

In: a `TrialOrder`. Out: a `Trial` whose outcome says how the trial ended, whatever happened in it. Here too: the one
list of exception types, and of texts where no type says it, that mean an outcome; and whether the loss before any
update is the baseline's.
"""

from __future__ import annotations

import datetime
import math
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from pydantic import ValidationError

from autoplan.planner.records.trials import Attempt, Outcome, PeakMemory, Prediction, Purpose, Trial, Window
from autoplan.planner.trials.measure import ToBeat, invert
from autoplan.planner.trials.request import (
    FITS_MICRO_STEPS,
    MOST_MEASURING_S,
    TrialAnswer,
    TrialRequest,
    is_very_expensive,
)
from autoplan.planner.trials.slices import MOST_RUNS
from autoplan.processes import (
    Cause,
    Ended,
    ProcessReport,
    Progress,
    RankReport,
    Task,
    Zygote,
    cause_of,
    killed_for_memory,
    run_again,
)
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

TARGET = "autoplan.planner.trials.worker:run_trial"
ROUND_TARGET = "autoplan.planner.trials.worker:run_round"

COMPILER = ("torch._inductor.compile_fx",)
"""Imported before the first trial that compiles, once for all ranks: it takes 1 to 2.5 s. It starts no process and no
thread before the first compilation (torch 2.13, torch/_dynamo/backends/inductor.py, `inductor`), and touches no device.
"""

# Seconds that a phase may take before the trial counts as stuck. The search's budget may set an earlier deadline for
# the whole trial.
PHASE_DEADLINES_S: Mapping[str, float] = {
    "start": 60.0,
    "init": 300.0,
    "build": 600.0,
    "compile": 1800.0,
    "warmup": 1800.0,
    "measure": 1800.0,
    "done": 60.0,
}

LAST_LINES = 20

SLICES_BYTES = 1 << 30
"""Beside what all runs of a round take: the process that has them alternate; and shared pages count in each process."""

MICRO_STEPS = ("micro_step", "micro_step_sync")

MEASURED = ("items_per_step", "method", "parts_s", "samples_s", "loss", "first_losses", "warnings", "pauses")
"""Of the first good rank's answer, as they are; its times are those of the slowest rank."""

LOSS_TOLERANCES = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 2e-2, "fp16": 1e-2}
"""Relative differences that pass, by the coarser precision of two. Wide: they say which trial to look at; the parity
check decides."""

LOSS_SPREADS = 10.0
"""Standard deviations that pass beside them, where dropout makes the loss random: they come from about four values."""

OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")

# Patterns of texts of a plain RuntimeError that mean out of memory, and whose it was. cuDNN has a status for each
# memory since 9.0 (cudnn_graph.h: CUDNN_STATUS_ALLOC_FAILED is now an older name of the host's); newer NCCL writes the
# number of the error too (checks.h); Triton's text is that of its driver (backends/nvidia/driver.c).
OUT_OF_MEMORY_TEXTS = (
    (r"DefaultCPUAllocator: can't allocate memory", "host"),
    (r"DefaultCPUAllocator: not enough memory", "host"),
    (r"Cannot allocate memory", "host"),
    (r"CUBLAS_STATUS_ALLOC_FAILED", "device"),
    (r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "device"),
    (r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "host"),
    (r"CUDNN_STATUS_ALLOC_FAILED", "host"),
    (r"CUDA out of memory", "device"),
    (r"CUDA error: out of memory", "device"),
    (r"Triton Error \[CUDA\]: out of memory", "device"),
    (r"ncclUnhandledCudaError: Call to CUDA function failed. 'out of memory'", "device"),
    (r"Cuda failure (\d+ )?'out of memory'", "device"),
)

# The driver's own text, which a call says as well that takes page-locked memory of the host (cudaHostAlloc); torch's
# allocator of the device says "CUDA out of memory". Which of them it was is known by names where it was raised.
_DRIVERS_TEXT = "CUDA error: out of memory"
_PINNING = ("pin_memory", "pin memory thread", "CachingHostAllocator")

WORKLOAD = "workload"
"""The detail of a trial that crashed on a WorkloadError: the workload cannot be used under any configuration."""

# Types that mean: this build of torch, this device or this model does not support the configuration.
UNSUPPORTED_TYPES = (
    "NotImplementedError",
    "autoplan.errors.ConfigError",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._dynamo.exc.BackendCompilerFailed",
    "torch._inductor.exc.InductorError",
)

# Texts of a plain RuntimeError that mean the same: torch's, where no allowed kernel of attention takes the call.
UNSUPPORTED_TEXTS = ("No available kernel", "No viable backend for scaled_dot_product_attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOrder:
    """The search's order for one trial.

    Attributes:
        number: The trial's number in this study.
        purpose: What the trial is for.
        config: What to measure.
        prediction: The cost model's.
        deadline_s: Seconds after which the trial is ended in any case.
        deadline_of_budget: The deadline is the end of the search's budget, not the limit of this trial itself.
        to_beat: The leader's step time; None: the trial is never stopped early.
        method: Whole steps or parts, if runs must be comparable; None: the trial chooses.
        round: Of finalists and claims; such a run is a further one of its configuration (`TrialRequest.again`).
        most_s: Seconds of measuring at most; how long it takes is told by the step (request.py).
        remeasure: The most time for measuring disturbed stretches again, as a multiple of the time of measuring.
    """

    number: int
    purpose: Purpose
    config: TrainingConfig
    prediction: Prediction | None
    deadline_s: float
    deadline_of_budget: bool = False
    to_beat: ToBeat | None = None
    method: Literal["whole_steps", "parts"] | None = None
    round: int | None = None
    most_s: float = MOST_MEASURING_S
    remeasure: float = 1.0


class TrialLimits(TypedDict, total=False):
    """When a trial is ended, and how it is timed: fields of its TrialOrder."""

    deadline_s: Required[float]
    deadline_of_budget: bool
    to_beat: ToBeat | None
    method: Literal["whole_steps", "parts"] | None
    round: int | None


def load_compiler(zygote: Zygote, *configs: TrainingConfig) -> None:
    """Has the compiler imported, if one of the configurations needs it: the fused loss has a compiled part too."""
    if any(config.compile != "off" or config.loss == "fused" for config in configs):
        zygote.load(COMPILER)


@dataclass(eq=False)
class TrialRunner:
    """Runs the trials of one search, one after another.

    Attributes:
        zygote: Starts the ranks.
        spec: What is trained.
        device: "cuda" or "cpu".
        memory_limit_bytes: Limit of a trial: of host memory on CPU, of each device's memory on CUDA.
        host_limit_bytes: Limit of host memory for all processes of a trial together.
        directory: Each trial gets a folder in it for its output.
        phase_deadlines_s: Deadlines of the phases in seconds.
        seed: Of the batches' resampling in the statistics.
    """

    zygote: Zygote
    spec: WorkloadSpec
    _: KW_ONLY
    device: Literal["cuda", "cpu"]
    memory_limit_bytes: int
    host_limit_bytes: int
    directory: Path
    phase_deadlines_s: Mapping[str, float] = field(default_factory=lambda: PHASE_DEADLINES_S)
    seed: int = 0

    def elsewhere(self, zygote: Zygote, directory: Path, *, host_limit_bytes: int) -> TrialRunner:
        """The same on another zygote, with another folder and another limit of host memory."""
        return replace(self, zygote=zygote, directory=directory, host_limit_bytes=host_limit_bytes)

    def run(
        self,
        order: TrialOrder,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_attempt: Callable[[ProcessReport], None] | None = None,
        left_s: Callable[[], float] | None = None,
    ) -> Trial:
        """Runs one trial. Everything that happens in it is in the Trial; only KeyboardInterrupt passes through.

        Args:
            order: What to measure.
            on_progress: Is told how far it is.
            on_attempt: Is told of each run that something outside ended; the trial is then run again.
            left_s: Seconds left for running it again; None: as many as it takes.
        """
        load_compiler(self.zygote, order.config)
        started, began = _utc_now(), time.monotonic()
        task = Task(
            target=TARGET,
            args=(self._request(order),),
            ranks=order.config.world_size,
            directory=self._folder(order),
            deadlines_s=self.phase_deadlines_s,
            total_deadline_s=order.deadline_s,
            memory_limit_bytes=self.host_limit_bytes,
        )
        runs = run_again(self.zygote, task, on_progress=on_progress, on_attempt=on_attempt, left_s=left_s)
        trial = self._trial(order, runs.report)
        if not runs.settled:
            trial = did_not_run(trial, len(runs.lost))
        return trial.model_copy(update={"started": started, "seconds_spent": time.monotonic() - began})

    def may_slice(self, runs: Sequence[Trial]) -> bool:
        """Whether further runs of these configurations can share this machine in slices.

        Each is one process, on a CPU whose memory holds them all. What a GPU was given to do goes on while its process
        is stopped.
        """
        if self.device != "cpu" or len(runs) > MOST_RUNS or any(run.config.world_size > 1 for run in runs):
            return False
        peaks = [run.peak_memory_bytes or self.host_limit_bytes for run in runs]
        return sum(peaks) + SLICES_BYTES <= self.host_limit_bytes

    def run_round(
        self,
        orders: Sequence[TrialOrder],
        *,
        known: Sequence[Trial] = (),
        on_progress: Callable[[Progress], None] | None = None,
        on_attempt: Callable[[ProcessReport], None] | None = None,
        left_s: Callable[[], float] | None = None,
        runners: Sequence[TrialRunner] = (),
    ) -> RoundOf:
        """Runs trials of one rank on a CPU in slices of time (slices.py), so that all have the same machine.

        Args:
            orders: What to measure: configurations that ran here before. Their times are what all have together.
            known: Earlier runs of the same configurations, in the same order; none: they are not known here.
            on_progress: Is told how far the first is.
            on_attempt: Is told of each run that something outside ended; the round is then run again.
            left_s: Seconds left for running it again; None: as many as it takes.
            runners: Of each, where they train something else; none: this one.

        Returns:
            All trials; none, and how it ended, where one of them did not come to its end, which is no verdict: they
            shared the memory.
        """
        load_compiler(self.zygote, *(order.config for order in orders))
        started, began = _utc_now(), time.monotonic()
        runners = runners or [self for _ in orders]
        requests = tuple(runner._request(order) for runner, order in zip(runners, orders, strict=True))
        task = Task(
            target=ROUND_TARGET,
            args=(requests, _slice_weights(known) or (1.0,) * len(requests)),
            ranks=len(requests) + 1,
            independent=True,
            directory=self._folder(orders[0]),
            deadlines_s=self.phase_deadlines_s,
            total_deadline_s=sum(order.deadline_s for order in orders),
            memory_limit_bytes=self.host_limit_bytes,
        )
        runs = run_again(self.zygote, task, on_progress=on_progress, on_attempt=on_attempt, left_s=left_s)
        report = runs.report
        whole = report.ended is Ended.FINISHED and None not in map(_answer, report.ranks[:-1])
        if not whole:
            return RoundOf(trials=(), report=report, settled=runs.settled)
        part = {"started": started, "seconds_spent": (time.monotonic() - began) / len(orders)}
        trials = [
            runner._trial(order, report.model_copy(update=_one_of(rank))).model_copy(update=part)
            for runner, order, rank in zip(runners, orders, report.ranks[:-1], strict=True)
        ]
        return RoundOf(trials=tuple(trials), report=report)

    def _request(self, order: TrialOrder) -> TrialRequest:
        return TrialRequest(
            spec=self.spec,
            config=order.config,
            device=self.device,
            to_beat=order.to_beat,
            memory_limit_bytes=self.memory_limit_bytes,
            method=order.method,
            most_s=order.most_s,
            remeasure=order.remeasure,
            again=order.round is not None,
            seed=self.seed,
        )

    def _folder(self, order: TrialOrder) -> Path:
        directory = self.directory / f"{order.number:04d}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _trial(self, order: TrialOrder, report: ProcessReport) -> Trial:
        """Makes the record of a trial from the report of its processes.

        The outcome is decided by what the supervisor did (deadline, memory limit), else by wait statuses and
        exceptions, else by the answers of the ranks; never by log text alone.
        """
        verdict, cause = _verdict(report), cause_of(report)
        good = [answer for rank in report.ranks if (answer := _answer(rank)) is not None]
        first = good[0] if good else TrialAnswer()
        # what an allocator barely held was timed all the same
        fragile = verdict.outcome is Outcome.OUT_OF_MEMORY and bool(good)
        failed = verdict.outcome not in (Outcome.OK, Outcome.PRUNED)
        step = first.step_time_s if not failed or fragile else None
        total = report.ended is Ended.DEADLINE and report.phase_deadline_s == order.deadline_s
        reason = verdict.reason
        if report.ended is Ended.DEADLINE and (compiling_s := report.phase_seconds.get("compile", 0.0)):
            reason = f"{reason}; compiling took {compiling_s:.3g} s of it"
        shown = report.first_failure or (report.ranks[0] if report.ranks else None)
        return Trial(
            number=order.number,
            purpose=order.purpose,
            round=order.round,
            config=order.config,
            outcome=verdict.outcome,
            detail=verdict.detail,
            reason=reason,
            budget_ended=total and order.deadline_of_budget,
            phase=report.phase,
            step_time_s=step,
            tokens_per_s=invert(step, first.items_per_step) if step is not None else None,
            **{name: getattr(first, name) for name in MEASURED},
            at_least_s=first.at_least_s if good else _at_least_s(order, report, self.spec.global_batch),
            peak_memory=_peak(good, report, self.device, self.memory_limit_bytes),
            **_predicted(order.prediction),
            seconds_spent=report.seconds,
            startup_s=report.startup_s or 0.0,
            phase_seconds=report.phase_seconds,
            window=_window(good),
            last_lines=_last_lines(shown) if failed and shown is not None else "",
            exit_status=_exit_status(shown) if failed and shown is not None else None,
            cause=None if cause is None else cause.value,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOf:
    """Trials that shared the machine in slices; none: one of them did not come to its end.

    Not settled: something outside ended them each time.
    """

    trials: tuple[Trial, ...]
    report: ProcessReport
    settled: bool = True


def _slice_weights(known: Sequence[Trial]) -> tuple[float, ...]:
    """How long the slices are to each other, where all run a fixed number of micro-steps: as these are; else none."""
    micro_steps_s = [max(run.parts_s.get(part, 0.0) for part in MICRO_STEPS) for run in known]
    fixed = all(is_very_expensive(run.config, s) for s, run in zip(micro_steps_s, known, strict=True))
    return tuple(micro_steps_s) if fixed else ()


def _one_of(rank: RankReport) -> dict[str, Any]:
    """What a report of several processes is for one of them. Its peak of memory is what it read itself."""
    return {"ranks": (rank,), "phase": rank.phase, "phase_seconds": rank.phase_seconds, "peak_memory_bytes": 0}


def _utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def did_not_run(trial: Trial, runs: int) -> Trial:
    """The trial of a configuration that something outside ended each time: no verdict on it."""
    times = "once, and there was no time to run it again" if runs == 1 else f"{runs} times, the last time so"
    reason = f"it did not run: something outside ended it {times}: {trial.reason}"
    return trial.model_copy(update={"outcome": Outcome.INTERRUPTED, "cause": Cause.OUTSIDE.value, "reason": reason})


def make_attempt(
    part: str, report: ProcessReport, *, number: int | None = None, config: TrainingConfig | None = None
) -> Attempt:
    """The record of a run that does not count."""
    rank = report.first_failure
    return Attempt(
        part=part,
        number=number,
        config=config,
        reason=_verdict(report).reason or report.describe(),
        phase=report.phase,
        exit_status=None if rank is None else _exit_status(rank),
        seconds_spent=report.seconds,
        started=_utc_now(),
    )


def _at_least_s(order: TrialOrder, report: ProcessReport, global_batch: int) -> float | None:
    """How long a step takes at least, of a trial that was ended by its deadline within the short steps.

    They are at most 2 x FITS_MICRO_STEPS micro-steps, and they were not over. What is stuck says nothing of speed: a
    phase's own deadline is for that.
    """
    total = report.ended is Ended.DEADLINE and report.phase_deadline_s == order.deadline_s
    if not total or report.phase != "warmup" or order.config.pp > 1:
        return None
    if global_batch % (order.config.micro_batch * order.config.dp):
        return None  # the workload of a file has its own, which is not known yet
    accumulation = order.config.accumulation(global_batch)
    most = 2 * min(accumulation, FITS_MICRO_STEPS)
    return accumulation * report.phase_seconds.get("warmup", 0.0) / most or None


def _window(answers: list[TrialAnswer]) -> Window | None:
    """The window of the first rank that was disturbed, else of the first rank; all were timed together."""
    windows = [answer.window for answer in answers if answer.window is not None]
    return next((window for window in windows if window.disturbed), windows[0] if windows else None)


def _predicted(prediction: Prediction | None) -> dict[str, Any]:
    """The figures of the prediction, by their names in the record of a trial."""
    if prediction is None:
        return {}
    names: tuple[str, ...] = ("step_time_s", "step_time_low_s", "step_time_high_s")
    names += ("peak_memory_bytes", "peak_memory_low_bytes", "peak_memory_high_bytes")
    return {f"predicted_{name}": getattr(prediction, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """An outcome, its detail, and the reason as a sentence."""

    outcome: Outcome
    detail: str | None = None
    reason: str | None = None


def _verdict(report: ProcessReport) -> Verdict:
    if report.ended in (Ended.ZYGOTE_LOST, Ended.RANK_FAILED) and killed_for_memory(report):
        reason = f"the kernel's out-of-memory killer ended it: {_shorten(' '.join(report.describe().split()))}"
        return Verdict(outcome=Outcome.OUT_OF_MEMORY, detail="host", reason=reason)
    match report.ended:
        case Ended.MEMORY_LIMIT:
            return Verdict(outcome=Outcome.OUT_OF_MEMORY, detail="host", reason=report.describe())
        case Ended.DEADLINE:
            return Verdict(outcome=Outcome.TIMEOUT, detail=report.phase, reason=report.describe())
        case Ended.CANCELLED:
            return Verdict(outcome=Outcome.INTERRUPTED, reason="the search was interrupted")
        case Ended.ZYGOTE_LOST | Ended.NODE_LOST | Ended.NOT_STARTED:
            lost = {Ended.ZYGOTE_LOST: "zygote", Ended.NODE_LOST: "node", Ended.NOT_STARTED: "fork"}
            return Verdict(outcome=Outcome.CRASHED, detail=lost[report.ended], reason=report.describe())
        case Ended.RANK_FAILED:
            return _rank_verdict(report)
        case Ended.FINISHED:
            return _answer_verdict(report)


def _rank_verdict(report: ProcessReport) -> Verdict:
    """A rank that raised, was killed, or exited with a status of its own."""
    rank = report.first_failure
    assert rank is not None, "a failed task names the rank that failed"
    text = " ".join(report.describe().split())
    if rank.error is not None:
        outcome, detail = classify_exception(rank.error.type_names, rank.error.message, rank.error.traceback)
        return Verdict(outcome=outcome, detail=detail, reason=_shorten(text))
    if rank.signal == signal.SIGBUS:
        text += "; SIGBUS here usually means that /dev/shm is full"
    return Verdict(outcome=Outcome.CRASHED, detail=_exit_status(rank), reason=text)


def _answer_verdict(report: ProcessReport) -> Verdict:
    """Every rank exited with 0: the first answer that is not ok decides."""
    worst = Verdict(outcome=Outcome.OK)
    for rank in report.ranks:
        answer = _answer(rank)
        if answer is None:
            return Verdict(
                outcome=Outcome.CRASHED,
                detail="no result",
                reason=f"rank {rank.rank} exited with status 0 in phase {rank.phase!r} without a result",
            )
        if worst.outcome in (Outcome.OK, Outcome.PRUNED) and answer.outcome is not Outcome.OK:
            worst = Verdict(outcome=answer.outcome, detail=answer.detail, reason=answer.reason)
    return worst


def _answer(rank: RankReport) -> TrialAnswer | None:
    if not isinstance(rank.result, dict):
        return None
    try:
        return TrialAnswer.model_validate(rank.result)
    except ValidationError:
        return None


def _peak(
    answers: list[TrialAnswer], report: ProcessReport, device: Literal["cuda", "cpu"], limit_bytes: int
) -> PeakMemory:
    """The peaks of the rank with the highest peak, and one rank's share of the limit.

    On CPU the limit is for all ranks together, and the polled peak of the process tree counts too.
    """
    peaks = [answer.peak_memory for answer in answers if answer.peak_memory.peak_bytes is not None]
    highest = max(peaks, key=lambda peak: peak.peak_bytes or 0, default=PeakMemory())
    if device == "cuda":
        return highest.model_copy(update={"limit_bytes": limit_bytes})
    ranks = max(1, len(report.ranks))
    polled = report.peak_memory_bytes if ranks == 1 else report.peak_memory_bytes // ranks
    resident = max(highest.peak_bytes or 0, polled)
    return PeakMemory(resident_bytes=resident or None, limit_bytes=limit_bytes // ranks)


def _exit_status(rank: RankReport) -> str | None:
    if rank.signal is None:
        return None if rank.exit_code is None else f"exit status {rank.exit_code}"
    try:
        return signal.Signals(rank.signal).name
    except ValueError:
        return f"signal {rank.signal}"


def _last_lines(rank: RankReport) -> str:
    text = rank.error.traceback if rank.error is not None else rank.stderr_tail
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])


def _shorten(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."


# From an exception to an outcome.


def classify_exception(type_names: Iterable[str], message: str, traceback: str = "") -> tuple[Outcome, str | None]:
    """Outcome and detail of an exception, by the qualified names of its class and bases, then by known texts.

    Memory is checked first, because the compiler wraps a failed allocation into its own error.

    Args:
        type_names: Qualified names of its class and bases.
        message: Its text.
        traceback: As Python prints it; its last two calls tell page-locked memory of the host from the device's.
    """
    names = {known for name in type_names for known in (name, name.rpartition(".")[2])}
    for pattern, where in OUT_OF_MEMORY_TEXTS:
        if re.search(pattern, message):
            # two calls, since torch's functions may pass through one of its own
            last = "".join(re.split(r'^ +File "', traceback, flags=re.MULTILINE)[1:][-2:])
            pins = _DRIVERS_TEXT in message and any(name in message + last for name in _PINNING)
            return Outcome.OUT_OF_MEMORY, "host" if pins else where
    if not names.isdisjoint(OUT_OF_MEMORY_TYPES):
        return Outcome.OUT_OF_MEMORY, "host" if "MemoryError" in names else "device"
    if not names.isdisjoint(UNSUPPORTED_TYPES) or any(text in message for text in UNSUPPORTED_TEXTS):
        return Outcome.UNSUPPORTED, None
    return Outcome.CRASHED, WORKLOAD if "autoplan.errors.WorkloadError" in names else None


# The loss before any update.


def with_first_loss_compared(trial: Trial, baseline: Trial | None) -> Trial:
    """The trial, marked and with a warning where its loss of the first samples is not the baseline's."""
    if baseline is None or baseline.number == trial.number or not is_off(trial, baseline):
        return trial
    mine, its = statistics.fmean(trial.first_losses), statistics.fmean(baseline.first_losses)
    text = (
        f"the loss of the first samples before any update is {mine:.6g}, the baseline's {its:.6g}: it may train "
        "something else, which the parity check decides"
    )
    return trial.model_copy(update={"loss_differs": True, "warnings": (*trial.warnings, text)})


def is_off(trial: Trial, baseline: Trial) -> bool:
    """Whether the mean losses differ by more than rounding and the spread of both explain."""
    one, other = trial.first_losses, baseline.first_losses
    if not one or not other:
        return False
    copies, base_copies = trial.config.micro_batch, baseline.config.micro_batch
    freedom = len(one) + len(other) - 2
    if freedom == 0:  # the spread is not known
        return False
    squares = sum(n * len(losses) * statistics.pvariance(losses) for n, losses in ((copies, one), (base_copies, other)))
    deviation = math.sqrt(squares / freedom * (1 / (copies * len(one)) + 1 / (base_copies * len(other))))
    rounding = max(LOSS_TOLERANCES[run.config.precision] for run in (trial, baseline))
    allowed = rounding * abs(statistics.fmean(other)) + LOSS_SPREADS * deviation
    return abs(statistics.fmean(one) - statistics.fmean(other)) > allowed
