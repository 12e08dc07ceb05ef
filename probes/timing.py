"""How an operation is timed: warm-up, samples long enough for the clock, median and spread, within a budget.

Everything here runs in a rank. Training runs hot, so nothing is flushed or cooled between samples.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from autoplan.probes.profile import OperationReading, Reading

# one sample of a short operation is many calls: long enough for the clock and the interpreter not to show
MIN_SAMPLE_S = 0.002
MAX_SAMPLES = 25
TORCH_DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call: the median over the samples, and their interquartile range over it (None: < 3)."""

    median_s: float
    spread: float | None
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Something to time.

    `build` makes the tensors and returns the call. `work` is what one call does, in flop or bytes; `unit` is
    that of the rate. `memory_bytes` is what it holds at its peak, so that it is left out where it cannot fit.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    work: float
    unit: str
    memory_bytes: int
    build: Callable[[], Callable[[], object]]
    threads: int | None = None

    @property
    def label(self) -> str:
        """For a person: "matmul bfloat16 1024x1024x1024"."""
        return f"{self.kind} {self.dtype} {'x'.join(map(str, self.shape))}"


@dataclass(kw_only=True, slots=True)
class Budget:
    """Seconds that a series of measurements may take; starts when made."""

    seconds: float
    started: float = field(default_factory=time.perf_counter)

    @property
    def remaining_s(self) -> float:
        """What is left; never below 0."""
        return max(0.0, self.seconds - (time.perf_counter() - self.started))


def time_operation(call: Callable[[], object], *, device: torch.device, limit_s: float) -> Timing:
    """Time one operation on a device.

    On CUDA each sample lies between two events on the current stream; on CPU between two readings of the clock.

    Args:
        call: The operation; run at least twice (the first call sets up kernels, workspaces and pages, and
            counts only where it takes over a second and ten times the limit).
        device: Where it runs.
        limit_s: When to stop taking samples. One slow call may outlast it.
    """
    clock = _cuda_sample if device.type == "cuda" else _cpu_sample
    started = time.perf_counter()
    first_s = clock(call, 1)
    if first_s > max(1.0, 10 * limit_s):  # so slow that setting up cannot be most of it
        return Timing(median_s=first_s, spread=None, samples=1)
    second_s = clock(call, 1)
    calls = max(1, round(MIN_SAMPLE_S / max(second_s, 1e-9)))
    while device.type == "cuda" and time.perf_counter() - started < 0.2 * limit_s:
        clock(call, calls)  # clocks rise under load
    samples = [second_s] if calls == 1 and device.type == "cpu" else []
    while len(samples) < MAX_SAMPLES and (not samples or time.perf_counter() - started < limit_s):
        samples.append(clock(call, calls) / calls)
    return summarise(samples)


def summarise(samples: Sequence[float]) -> Timing:
    """Median and spread of samples in seconds."""
    median = statistics.median(samples)
    spread = None
    if len(samples) >= 3 and median > 0:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        spread = (high - low) / median
    return Timing(median_s=median, spread=spread, samples=len(samples))


def _cpu_sample(call: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - started


def _cuda_sample(call: Callable[[], object], calls: int) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0  # elapsed_time is in milliseconds


def measure_operations(
    operations: Iterable[Operation],
    *,
    device: torch.device,
    budget: Budget,
    cap_s: float,
    memory_limit_bytes: float,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[list[OperationReading], list[str]]:
    """Measure each operation in its share of what is left of the budget.

    Args:
        operations: In order of size within one (kind, dtype): a slow one spares the larger ones.
        device: Where they run.
        budget: Shared with other series.
        cap_s: The most that one operation gets.
        memory_limit_bytes: Larger operations are left out.
        on_progress: Called with the label of each operation before it runs.

    Returns:
        The readings, and a sentence for each operation left out.
    """
    pending = list(operations)
    readings: list[OperationReading] = []
    notes: list[str] = []
    rates: dict[tuple[str, str], float] = {}
    for position, operation in enumerate(pending):
        share_s = min(cap_s, budget.remaining_s / (len(pending) - position))
        rate = rates.get((operation.kind, operation.dtype))
        why = _why_left_out(operation, rate, share_s, budget, memory_limit_bytes)
        if why is None:
            if on_progress is not None:
                on_progress(operation.label)
            try:
                reading = measure_operation(operation, device=device, limit_s=share_s)
            except (RuntimeError, NotImplementedError) as error:  # no kernel for this dtype here, out of memory
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        if why is not None:
            notes.append(f"{operation.label} on {device} was left out: {why}")
            continue
        readings.append(reading)
        if reading.rate.value:
            rates[operation.kind, operation.dtype] = reading.rate.value
    return readings, notes


def _why_left_out(
    operation: Operation, rate: float | None, share_s: float, budget: Budget, memory_limit_bytes: float
) -> str | None:
    if budget.remaining_s <= 0:
        return "the time for the probes was over"
    if operation.memory_bytes > memory_limit_bytes:
        return f"it needs {operation.memory_bytes / 2**30:.1f} GiB, {memory_limit_bytes / 2**30:.1f} may be used"
    if rate is not None and 2 * operation.work / rate > max(4 * share_s, 0.5):
        return f"two calls would take {2 * operation.work / rate:.2f} s at the rate of the smaller one"
    return None


def measure_operation(operation: Operation, *, device: torch.device, limit_s: float) -> OperationReading:
    """Build and time one operation, with the float32 mode and the threads that it asks for."""
    threads = torch.get_num_threads()
    torch.set_float32_matmul_precision("high" if operation.dtype == "tf32" else "highest")
    try:
        if operation.threads is not None:
            torch.set_num_threads(operation.threads)
        timing = time_operation(operation.build(), device=device, limit_s=limit_s)
    finally:
        torch.set_float32_matmul_precision("highest")
        if operation.threads is not None:
            torch.set_num_threads(threads)
    source = f"{timing.samples} samples on {device}"
    return OperationReading(
        kind=operation.kind,
        dtype=operation.dtype,
        shape=operation.shape,
        seconds=Reading(value=timing.median_s, unit="s", provenance="measured", spread=timing.spread, source=source),
        rate=Reading(
            value=operation.work / timing.median_s,
            unit=operation.unit,
            provenance="measured",
            spread=timing.spread,
            source=source,
        ),
    )


def filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ordinary numbers, made quickly.

    On a GPU they are random throughout: power, and with it the clock, depends on the data. On a CPU a random
    block is repeated, since drawing millions of numbers would take longer than the measurement.
    """
    if device.type == "cuda":
        return torch.randn(*shape, device=device).to(dtype)
    count = 1
    for size in shape:
        count *= size
    block = torch.randn(min(count, 65536)).to(dtype)
    return block.repeat(-(-count // block.numel()))[:count].view(*shape)
