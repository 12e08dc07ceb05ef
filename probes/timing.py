"""How an operation is timed: warm-up, samples long enough for the clock, a typical value and its spread.

Everything here runs in a rank. Training runs hot, so nothing is flushed or cooled between samples.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from autoplan.probes.profile import OperationReading
from autoplan.record import Reading

# a sample of a short operation is many calls, so long that the clock's resolution and Python's own time do not count
MIN_SAMPLE_S = 0.002
MAX_SAMPLES = 25
# On CUDA a sample is no longer than that: the launch queue holds about a thousand kernels, and all of a sample's are
# queued before the first of them runs.
MOST_CUDA_CALLS = 100

LEAD_BYTES = 256 << 20
"""Of the buffer that is cleared before a sample: at 1 to 5 TB/s that takes 50 to 250 us, where its launch takes 5. It
is larger than the caches, so that the operands of the first call after it come from memory."""

LEAD_SHARE = 1 / 16
"""Of the free memory of the GPU, what that buffer takes at the most."""

MOST_LEAD_S = 0.02
"""However long the host took: the first call of a kernel loads it, which says nothing about the next."""

HOST_FACTOR = 1.5
"""The work before a sample takes the GPU so many times as long as the host needed for the last sample."""

LAUNCHES = 200
"""Of small operations in a sample of their host time: below the depth of CUDA's launch queue (about 1000), where
launching would wait for the GPU."""

TORCH_DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "uint8": torch.uint8,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call: the lower quartile of the samples (the fastest of fewer than three).

    Other processes only ever add time, up to tenfold where they stop one of two threads that wait for each other.
    The lower quartile stays right while they disturb up to three samples out of four; on an idle machine it is within
    a few percent of the median. `spread` is the interquartile range over the median (None: < 3 samples).
    """

    seconds: float
    fastest_s: float
    spread: float | None
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Something to time.

    `build` makes the tensors and returns the call. `work` is what one call does, in flop or bytes; `unit` is
    that of the rate. `memory_bytes` is the peak of its tensors: an operation that does not fit is left out.
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
class Rates:
    """The best rates seen so far, to predict the time of an operation before it runs.

    A dtype that the processor has no units for is slow in every kind, and its largest sizes are then not worth
    their time. One kind may have been slow by accident (another process had the core), so the best of the
    dtype decides, and the kind's own rate only where it is below a quarter of that.
    """

    best: dict[tuple[str, str], float] = field(default_factory=dict)  # by unit, and by kind, each with the dtype

    def learn(self, operation: Operation, timing: Timing) -> None:
        """Record the fastest sample of an operation."""
        for name in (operation.unit, operation.kind):
            key = name, operation.dtype
            self.best[key] = max(operation.work / timing.fastest_s, self.best.get(key, 0.0))

    def expected_s(self, operation: Operation) -> float:
        """Seconds of one call; 0 where nothing like it was measured."""
        of_dtype = self.best.get((operation.unit, operation.dtype))
        of_kind = self.best.get((operation.kind, operation.dtype), of_dtype)
        if of_dtype is None or of_kind is None:
            return 0.0
        return max(operation.work / of_dtype, operation.work / of_kind / 4)


class Sampler:
    """Takes the samples of one operation, one at a time, so that several can take turns.

    On CUDA each sample lies between two events on the current stream, behind other work (`CudaClock`); on CPU between
    two readings of the clock.

    Args:
        call: The operation; run at least twice (the first call sets up kernels, workspaces and pages, and
            counts only on a CPU, where it takes over a second and ten times the limit).
        device: Where it runs.
        limit_s: When to stop taking samples. One slow call may outlast it.
    """

    def __init__(self, call: Callable[[], object], *, device: torch.device, limit_s: float) -> None:
        self._call = call
        self._clock = CudaClock(device).sample if device.type == "cuda" else _cpu_sample
        self._limit_s = limit_s
        self._samples: list[float] = []
        self._spent_s = 0.0  # what the samples took by the wall clock, work that was queued before them included
        first_s = self._timed(1)
        self._calls = 1
        # so slow that setting up cannot be most of it; on CUDA it can: a library loads its kernels, or searches for one
        if device.type == "cpu" and first_s > max(1.0, 10 * limit_s):
            self._samples.append(first_s)
            return
        self._spent_s = 0.0
        second_s = self._timed(1)
        self._calls = max(1, round(MIN_SAMPLE_S / max(second_s, 1e-9)))
        if device.type == "cuda":
            self._calls = min(self._calls, MOST_CUDA_CALLS)
            while self._spent_s < 0.2 * limit_s:  # clocks rise under load
                self._timed(self._calls)
        elif self._calls == 1:
            self._samples.append(second_s)

    def _timed(self, calls: int) -> float:
        """Seconds that so many calls take together."""
        started = time.perf_counter()
        seconds = self._clock(self._call, calls)
        self._spent_s += time.perf_counter() - started
        return seconds

    @property
    def wants_more(self) -> bool:
        """Whether there is a sample to take: one at least, then until the limit."""
        return not self._samples or (len(self._samples) < MAX_SAMPLES and self._spent_s < self._limit_s)

    def sample(self) -> None:
        """Take one sample."""
        self._samples.append(self._timed(self._calls) / self._calls)

    def timing(self) -> Timing:
        """The timing that the samples so far give."""
        return summarise(self._samples)


def summarise(samples: Sequence[float]) -> Timing:
    """Lower quartile and spread of samples in seconds."""
    if len(samples) < 3:
        return Timing(seconds=min(samples), fastest_s=min(samples), spread=None, samples=len(samples))
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    spread = (high - low) / median if median > 0 else None
    return Timing(seconds=low, fastest_s=min(samples), spread=spread, samples=len(samples))


def _cpu_sample(call: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - started


def probe_launch(device: torch.device, *, repeats: int = 15) -> Reading:
    """Seconds of host time to start one small operation: the lower bound of a step that launches many kernels.

    In-place additions through torch's eager path (no autograd). On CUDA the launches are timed without waiting for the
    kernels; on CPU it is the whole call.
    """
    add = functools.partial(torch.zeros(1, device=device).add_, 1.0)
    samples = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(_cpu_sample(add, LAUNCHES) / LAUNCHES)
    timing = summarise(samples[2:])
    source = f"{repeats} x {LAUNCHES} in-place additions of one element"
    return Reading(value=timing.seconds, unit="s", provenance="measured", spread=timing.spread, source=source)


def measure_operations(
    operations: Iterable[Operation],
    *,
    device: torch.device,
    limit_s: float,
    cap_s: float,
    memory_limit_bytes: float,
    rates: Rates | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[list[OperationReading], list[str]]:
    """Measure each operation in its share of the time that is left.

    Neighbours of the same shape (several dtypes, fused and eager attention) take turns, sample by sample: a
    disturbance then slows all of them, and their ratios stay right.

    Args:
        operations: Smallest first within one (kind, dtype), where some dtype may be slow: after a slow one the larger
            ones are left out.
        device: Where they run.
        limit_s: For all of them; after it no further one is begun.
        cap_s: The most that one operation gets.
        memory_limit_bytes: Larger operations are left out.
        rates: Of earlier series, by dtype; None: there was none.
        on_progress: Called with the label of each operation before it runs.

    Returns:
        The readings, and a sentence for each operation left out.

    Raises:
        RuntimeError: of the operation after which the device runs nothing more in this process.
    """
    pending = list(operations)
    readings: list[OperationReading] = []
    notes: list[str] = []
    too_late: list[str] = []
    rates = rates or Rates()
    ends = time.perf_counter() + limit_s
    while pending:
        group = _next_group(pending, memory_limit_bytes)
        left_s = ends - time.perf_counter()
        share_s = min(cap_s, left_s / len(pending))
        del pending[: len(group)]
        if left_s <= 0:
            too_late += [operation.label for operation in group]
            continue
        running: list[tuple[Operation, Sampler]] = []
        for operation in group:  # all of a group that has begun: they are compared with each other
            why = _why_left_out(operation, rates, share_s, memory_limit_bytes)
            started = _start(operation, device, share_s, on_progress) if why is None else why
            if isinstance(started, str):
                notes.append(f"{operation.label} on {device} was left out: {started}")
            else:
                running.append((operation, started))
        _take_turns(running)
        for operation, sampler in running:
            timing = sampler.timing()
            readings.append(_reading(operation, timing, device))
            rates.learn(operation, timing)
    if too_late:
        notes.append(f"the time for the probes was over before, on {device}: {', '.join(too_late)}")
    return readings, notes


def _next_group(pending: Sequence[Operation], memory_limit_bytes: float) -> list[Operation]:
    """The operations at the front that have one shape and fit together."""
    group = [pending[0]]
    group_bytes = pending[0].memory_bytes
    for operation in pending[1:]:
        group_bytes += operation.memory_bytes
        if operation.shape != group[0].shape or group_bytes > memory_limit_bytes:
            break
        group.append(operation)
    return group


def _start(
    operation: Operation, device: torch.device, limit_s: float, on_progress: Callable[[str], None] | None
) -> Sampler | str:
    """Build an operation and warm it up; or the reason why it does not run here."""
    if on_progress is not None:
        on_progress(operation.label)
    try:
        with _settings(operation):
            return Sampler(operation.build(), device=device, limit_s=limit_s)
    except (RuntimeError, NotImplementedError) as error:  # no kernel for this dtype here, out of memory
        if not device_answers(device):
            raise  # every operation after it would be left out too, with a reason that is not its own
        if device.type == "cuda":
            torch.cuda.empty_cache()
        text = str(error).splitlines()[0] if str(error) else "no message"
        return f"{type(error).__name__}: {text}"


def device_answers(device: torch.device) -> bool:
    """Whether a device still runs what this process asks of it.

    After an assertion in a kernel or an illegal address every CUDA call of the process fails (CUDA Runtime API,
    cudaErrorAssert, cudaErrorIllegalAddress: "the process must be terminated and relaunched"); after other errors,
    such as no memory or no kernel for the device, the next one runs.
    """
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _take_turns(running: Sequence[tuple[Operation, Sampler]]) -> None:
    while any(sampler.wants_more for _, sampler in running):
        for operation, sampler in running:
            if sampler.wants_more:
                with _settings(operation):
                    sampler.sample()


def _why_left_out(operation: Operation, rates: Rates, share_s: float, memory_limit_bytes: float) -> str | None:
    if operation.memory_bytes > memory_limit_bytes:
        return f"it needs {operation.memory_bytes / 2**30:.1f} GiB, {memory_limit_bytes / 2**30:.1f} may be used"
    expected_s = rates.expected_s(operation)
    if 2 * expected_s > max(4 * share_s, 0.5):
        return f"two calls would take {2 * expected_s:.2f} s at the rate of what was measured before"
    return None


@contextmanager
def _settings(operation: Operation) -> Iterator[None]:
    """The float32 mode and the threads that an operation asks for; put back afterwards."""
    threads = torch.get_num_threads()
    torch.set_float32_matmul_precision("high" if operation.dtype == "tf32" else "highest")
    try:
        if operation.threads is not None:
            torch.set_num_threads(operation.threads)
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        if operation.threads is not None:
            torch.set_num_threads(threads)


def _reading(operation: Operation, timing: Timing, device: torch.device) -> OperationReading:
    source = f"{timing.samples} samples on {device}"
    seconds = Reading(value=timing.seconds, unit="s", provenance="measured", spread=timing.spread, source=source)
    return OperationReading(
        kind=operation.kind,
        dtype=operation.dtype,
        shape=operation.shape,
        seconds=seconds,
        rate=seconds.model_copy(update={"value": operation.work / timing.seconds, "unit": operation.unit}),
    )


def filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ordinary numbers, made quickly.

    On a GPU they are random throughout: power, and with it the clock, depends on the data. On a CPU a random
    block is repeated, since drawing millions of numbers would take longer than the measurement.
    """
    if device.type == "cuda":
        return torch.randn(*shape, device=device).to(dtype)
    count = math.prod(shape)
    block = torch.randn(min(count, 65536)).to(dtype)
    return block.repeat(-(-count // block.numel()))[:count].view(*shape)


# The clock of a GPU.


class CudaClock:
    """Times calls on a GPU: from the start of the first kernel to the end of the last one.

    Between two events on an idle stream lies also the time until the host has launched the first kernel, and from one
    kernel to the next: two to three times the kernel's own, for small ones. So other work is queued first, which takes
    the GPU longer than the host needs to launch all that is timed; the kernels then run back to back. (Triton's
    `do_bench` clears a buffer before each call, which does the same.) A call that waits for the GPU is timed with the
    host's part.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host_s = 0.0  # of one call, in the last sample

    def sample(self, call: Callable[[], object], calls: int = 1) -> float:
        """Seconds that so many calls take together."""
        lead, lead_s = _lead_work(self.device)
        host_s = min(HOST_FACTOR * self._host_s * calls, MOST_LEAD_S)
        for _ in range(1 + math.ceil(host_s / lead_s)):  # a little more than the host needs
            lead.zero_()
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        self._host_s = (time.perf_counter() - started) / calls
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000.0  # elapsed_time is in milliseconds


@functools.cache
def _lead_work(device: torch.device) -> tuple[torch.Tensor, float]:
    """A buffer on the GPU, and the seconds that clearing it takes there."""
    size = min(LEAD_BYTES, int(LEAD_SHARE * torch.cuda.mem_get_info(device)[0]))
    lead = torch.zeros(size, dtype=torch.uint8, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):  # the first one loads the kernel
        lead.zero_()
    begin.record()
    for _ in range(10):
        lead.zero_()
    end.record()
    end.synchronize()
    return lead, max(begin.elapsed_time(end) / 1000.0 / 10, 1e-6)
