"""A training beside its plan: live throughput and memory, why it falls short, and where the figures go.

    meter = Meter(plan=plan)
    meter.begin()
    meter.step(items=4096)            # after each optimizer step of this rank
    meter.figures                     # of the last window; None before the first

The loggers are those that are there already. `watch(plan)` is for a training loop of one's own.

A window is at least `window_s` seconds and LEAST_STEPS steps. The clock is the host's: over a window the host cannot
run ahead of the device by more than a few steps, and nothing here waits for it.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from autoplan.errors import AutoplanError, UsageError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.surroundings import Difference, find_differences
from autoplan.planner.records.trials import RECOMPILED, Window
from autoplan.planner.trials.device_monitor import resident_peak_bytes
from autoplan.planner.trials.load import LoadMonitor
from autoplan.planner.verify.verdict import find_causes
from autoplan.probes.run import read_host_profile
from autoplan.record import Record
from autoplan.strategies.workloads.counting import count_on_host
from autoplan.units import format_number

WINDOW_S = 30.0
SHORTFALL = 0.1
"""A window that is slower than the plan by more than this share is warned of."""

WARM_UP_STEPS = 3
"""Steps at the beginning that count for nothing: they compile, allocate and fill caches."""

LEAST_STEPS = 5

DATA_SHARE = 0.05
"""Waiting for batches for more of the time than this is a cause: a plan's trials do not load data."""

LARGER = 1.1
"""Batches with so many times the plan's positions are a cause."""


class Figures(Record):
    """One window of a training, beside its plan. Memory is that of this process or its GPU."""

    step: int
    steps: int
    seconds: float
    items_per_s: float
    plan_items_per_s: float
    unit: str
    step_time_s: float
    peak_memory_bytes: int | None
    plan_peak_memory_bytes: int | None
    data_share: float | None
    causes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Of the plan's throughput."""
        return self.items_per_s / self.plan_items_per_s

    def as_metrics(self) -> dict[str, float]:
        """The figures for a logger, by name; memory in GiB."""
        found = {f"autoplan/{self.unit}_per_s": self.items_per_s, "autoplan/share_of_plan": self.share}
        if self.peak_memory_bytes is not None:
            found["autoplan/peak_memory_gib"] = self.peak_memory_bytes / 2**30
        if self.data_share is not None:
            found["autoplan/data_share"] = self.data_share
        return found

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"{format_number(self.items_per_s)} {self.unit}/s, {self.share:.0%} of the plan's "
            f"{format_number(self.plan_items_per_s)}"
        )


@dataclass(kw_only=True)
class Meter:
    """Counts the steps of one rank, and compares each window with the plan.

    Attributes:
        plan: The plan that the training runs with.
        window_s: Seconds of a window.
        shortfall: The share below the plan's throughput that is warned of, once.
        on_window: Is called with the figures of each window.
        scale: From this rank's items to those of a step over all ranks.
        figures: Of the last window.
        warned: The text of the warning; None while there was none.

    Raises:
        UsageError: the window or the shortfall is out of its range.
    """

    plan: Plan
    window_s: float = WINDOW_S
    shortfall: float = SHORTFALL
    on_window: Callable[[Figures], None] | None = None
    scale: float = 1.0
    figures: Figures | None = None
    warned: str | None = None
    _load: LoadMonitor = field(init=False)
    _steps: int = 0
    _counted: tuple[float, float] | None = None
    _window: _Window | None = None
    _differences: list[Difference] | None = None

    def __post_init__(self) -> None:
        if self.window_s <= 0:
            raise UsageError(f"window_s is {self.window_s}", hint="Give seconds above zero, like 30.")
        if not 0 < self.shortfall < 1:
            raise UsageError(f"shortfall is {self.shortfall}", hint="Give a share between 0 and 1, like 0.1.")
        device, ranks = torch.device("cpu"), int(os.environ.get("WORLD_SIZE", "1"))
        if self.plan.device == "cuda" and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
        # The training is below this process, or below the launcher of several ranks.
        self._load = LoadMonitor(device=device, root_pid=os.getppid() if ranks > 1 else os.getpid())
        rate, step = self.plan.measurement.tokens_per_s.median, self.plan.measurement.step_time_s.median
        self.plan_items = rate * step
        """Items of a step over all ranks, as the plan counted them."""

    def begin(self) -> None:
        """Begins at the first step; what came before counts for nothing."""
        self._steps, self._window = 0, None

    def count(self, batch: Any) -> None:
        """Adds what this rank trains on in a micro-batch to the step, where the plan says what of it counts."""
        found = count_on_host(self.plan.workload, batch)
        if found is not None:
            items, positions = self._counted or (0.0, 0.0)
            self._counted = items + found[0], positions + found[1]

    def step(self, items: float | None = None) -> None:
        """Notes the end of an optimizer step.

        Args:
            items: What this rank trained on: tokens without padding, or samples, as the plan counts. None: what
                `count` was given; without it, as many as in the plan.
        """
        counted, self._counted = self._counted, None
        positions = None
        if items is None and counted is not None:
            items, positions = counted
        self._steps += 1
        window = self._window
        if window is None:
            if self._steps >= WARM_UP_STEPS:
                self._open()
            return
        window.steps += 1
        window.items += self.plan_items if items is None else items * self.scale
        if positions is not None:
            window.positions += positions * self.scale
        now = time.perf_counter()
        if now - window.began - window.paused_s >= self.window_s and window.steps >= LEAST_STEPS:
            self._close(window, now)
            self._open()

    def loaded(self, seconds: float) -> None:
        """Notes that the training waited so long for a batch."""
        if self._window is not None:
            self._window.data_s = (self._window.data_s or 0.0) + seconds

    def leave_out(self, seconds: float) -> None:
        """Leaves seconds out that were no training: an evaluation, a checkpoint."""
        if self._window is not None:
            self._window.paused_s += seconds

    def finish(self) -> None:
        """Ends a training that was shorter than a window: its figures, without a warning."""
        window = self._window
        if self.figures is None and window is not None and window.steps >= LEAST_STEPS:
            self._close(window, time.perf_counter(), warn=False)
        self._window = None

    def _open(self) -> None:
        self._load.restart()
        self._load.begin()
        self._window = _Window(began=time.perf_counter())

    def _close(self, window: _Window, now: float, *, warn: bool = True) -> None:
        """Compares a window with the plan; warns, once, where it falls short."""
        seconds = now - window.began - window.paused_s
        problem = self._load.end()
        measured = self.plan.measurement
        figures = Figures(
            step=self._steps,
            steps=window.steps,
            seconds=seconds,
            items_per_s=window.items / seconds,
            plan_items_per_s=measured.tokens_per_s.median,
            unit=self.plan.workload.unit,
            step_time_s=seconds / window.steps,
            peak_memory_bytes=peak_memory_bytes(self._load.device),
            plan_peak_memory_bytes=plan_peak_bytes(self.plan),
            data_share=None if window.data_s is None else min(1.0, window.data_s / seconds),
        )
        if figures.share < 1.0 - self.shortfall and warn:
            if self._differences is None:
                self._differences = differences_here(self.plan)
            causes = describe_causes(
                self.plan,
                self._load.window(problem),
                self._differences,
                data_share=figures.data_share,
                positions=window.positions / window.steps if window.positions else None,
            )
            figures = figures.model_copy(update={"causes": tuple(causes)})
            self._warn(figures, saw=problem is not None)
        self.figures = figures
        if self.on_window is not None:
            self.on_window(figures)

    def _warn(self, figures: Figures, *, saw: bool) -> None:
        """The first rank speaks for all; another one where it saw something on its own device or cores."""
        if self.warned is not None or not (saw or is_first_rank()):
            return
        who = "autoplan" if is_first_rank() else f"autoplan, rank {os.environ['RANK']}"
        first, *others = figures.causes
        also = f"; also: {'; '.join(others)}" if others else ""
        self.warned = f"{who}: {figures.describe()}, over {figures.seconds:.0f} s. Likely cause: {first}{also}"
        warnings.warn(self.warned, stacklevel=4)


class Watcher:
    """The common part of every kind of watcher: a meter, and what it shows of it.

    Args:
        meter: Of this rank.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    @property
    def figures(self) -> Figures | None:
        """Throughput and memory of the last window beside the plan's; None before the first."""
        return self._meter.figures

    @property
    def warning(self) -> str | None:
        """The text of the warning that was given; None while there was none."""
        return self._meter.warned


@dataclass(kw_only=True, slots=True)
class _Window:
    """The counts between two comparisons."""

    began: float
    steps: int = 0
    items: float = 0.0
    positions: float = 0.0
    data_s: float | None = None
    paused_s: float = 0.0


def is_first_rank() -> bool:
    """Whether this rank speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def peak_memory_bytes(device: torch.device) -> int | None:
    """The peak of this process so far: reserved by torch on CUDA, resident on CPU. Resets nothing."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else resident_peak_bytes()


def plan_peak_bytes(plan: Plan) -> int | None:
    """The same figure of the plan's own trials."""
    peaks = [trial.peak_memory for trial in plan.evidence if trial.number in plan.measurement.trials]
    found = [peak.reserved_bytes if plan.device == "cuda" else peak.resident_bytes for peak in peaks]
    return max((value for value in found if value is not None), default=plan.measurement.peak_memory_bytes)


def give(figures: Figures, logger: Callable[[Figures], object], name: str) -> None:
    """Gives figures to a logger. One that raises is warned of, and the training goes on without its figures.

    Args:
        figures: Of a window.
        logger: Takes them.
        name: What it is called in the warning.
    """
    try:
        logger(figures)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"autoplan: {name} did not take the figures of a window: {type(error).__name__}: {said}. The training "
            "goes on",
            stacklevel=2,
        )


def log_to_wandb(figures: Figures) -> bool:
    """Adds the figures to the active run of W&B, at its current step; False where there is none."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None:
        return False
    run.log(figures.as_metrics(), commit=False)
    return True


def log_to_writer(writer: Any, figures: Figures) -> None:
    """Adds the figures to a SummaryWriter of TensorBoard, or to anything that has its `add_scalar`."""
    for name, value in figures.as_metrics().items():
        writer.add_scalar(name, value, figures.step)


# Why a window fell short.


def describe_causes(
    plan: Plan,
    window: Window | None,
    differences: Sequence[Difference],
    *,
    data_share: float | None,
    positions: float | None,
) -> list[str]:
    """The causes of a slow window, in sentences, the likeliest first; never empty.

    Args:
        plan: The plan.
        window: The figures of the monitor of the load; None: there are none.
        differences: Between where the plan was found and here.
        data_share: Of the time, waiting for batches; None: not known.
        positions: Tokens with padding, of a step over all ranks; None: not known.
    """
    texts = []
    if window is not None and window.disturbed is not None and window.disturbed.startswith(RECOMPILED):
        window = window.model_copy(update={"disturbed": None})
        texts.append(f"{RECOMPILED}: shapes or modes change between steps")
    if data_share is not None and data_share > DATA_SHARE:
        texts.append(
            f"the training waited {data_share:.0%} of the time for batches, and the plan's trials load none: more "
            "loader workers, or batches that are prepared before"
        )
    sizes = plan.workload.batch_sizes
    if sizes is not None and positions is not None and positions > LARGER * sizes.positions.mean:
        texts.append(
            f"batches are larger than measured: {positions:,.0f} {plan.workload.unit} with padding a step, "
            f"{sizes.positions.mean:,.0f} then"
        )
    causes = find_causes(plan, window, differences)
    if not texts or any(cause.kind != "unknown" for cause in causes):
        texts += [cause.text for cause in causes]
    return texts


def differences_here(plan: Plan) -> list[Difference]:
    """The differences between where a plan was found and here; none if this machine cannot be read."""
    try:
        return find_differences(plan, read_host_profile())
    except (AutoplanError, OSError):
        return []


# A loop of one's own.

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
