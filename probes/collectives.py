"""What the links between ranks can do: collectives over NCCL or gloo, timed over message and group sizes.

Payloads and bandwidths follow nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that the figures
compare: the payload is the larger of a rank's buffers (all-reduce: its buffer; all-gather: its output;
reduce-scatter: its input; all-to-all: its input; send-receive: the message); algbw = payload / time; busbw = algbw x
the factor in `bus_factor`, which makes figures of different group sizes comparable with the link's own speed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from autoplan.probes.profile import CollectiveReading, Link
from autoplan.record import Reading

if TYPE_CHECKING:
    import torch

    from autoplan.processes import RankContext, Zygote

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
# Payload sizes: powers of four from 4 KiB; latency shows at the small end, bandwidth at the large one.
CPU_SIZES_BYTES = tuple(4096 * 4**power for power in range(7))  # to 16 MiB
CUDA_SIZES_BYTES = tuple(4096 * 4**power for power in range(9))  # to 256 MiB
INIT_TIMEOUT_S = 300.0
# From the fastest link to the slowest: a group is as fast as the slowest link that it crosses.
TIERS = ("cpu", "nvlink", "pcie", "numa", "network")


def bus_factor(operation: str, group_size: int) -> float:
    """busbw over algbw, as nccl-tests defines it."""
    if operation == "send_recv":
        return 1.0
    share = (group_size - 1) / group_size
    return 2 * share if operation == "all_reduce" else share


# The curve.


def fit_line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits seconds = latency + bytes / bandwidth, by least squares of the relative error, neither below zero.

    Args:
        samples: (payload bytes, seconds) pairs, at least one.

    Returns:
        latency_s and bandwidth_bytes_per_s (infinite where time does not grow with size).
    """
    # Dividing each row by its seconds makes the residuals relative: else the large messages alone would decide.
    weights = [1 / seconds**2 for _, seconds in samples]
    total = sum(weights)
    mean_bytes = sum(w * b for w, (b, _) in zip(weights, samples, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, samples, strict=True)) / total
    variance = sum(w * (b - mean_bytes) ** 2 for w, (b, _) in zip(weights, samples, strict=True))
    covariance = sum(w * (b - mean_bytes) * (s - mean_s) for w, (b, s) in zip(weights, samples, strict=True))
    slope = covariance / variance if variance else 0.0
    latency = mean_s - slope * mean_bytes
    if latency < 0:  # through the origin
        slope = sum(w * b * s for w, (b, s) in zip(weights, samples, strict=True)) / sum(
            w * b * b for w, (b, _) in zip(weights, samples, strict=True)
        )
        latency = 0.0
    if slope <= 0:
        return mean_s, math.inf
    return latency, 1 / slope


def estimate_collective_s(reading: CollectiveReading, payload_bytes: float) -> float:
    """Seconds of a collective: between measured sizes on the measured curve (straight in log-log), outside on the line.

    Gloo and NCCL change algorithm with size, which no single line follows.

    Raises:
        ValueError: the reading has no value.
    """
    latency, bandwidth = reading.latency_s.value, reading.algbw_bytes_per_s.value
    if latency is None or bandwidth is None:
        raise ValueError(f"{reading.operation} over {reading.group_size} ranks was not measured")
    points = sorted(reading.samples)
    if len(points) > 1 and points[0][0] <= payload_bytes <= points[-1][0]:
        for (low_bytes, low_s), (high_bytes, high_s) in pairwise(points):
            if payload_bytes <= high_bytes:
                share = math.log(payload_bytes / low_bytes) / math.log(high_bytes / low_bytes)
                return math.exp(math.log(low_s) + share * math.log(high_s / low_s))
    if points and payload_bytes < points[0][0]:
        return min(points[0][1], latency + payload_bytes / bandwidth)
    if points:  # from the last measured point on, at the fitted bandwidth
        return points[-1][1] + (payload_bytes - points[-1][0]) / bandwidth
    return latency + payload_bytes / bandwidth


# The parent's side.


def probe_collectives(
    zygote: Zygote,
    *,
    device: str,
    ranks: int,
    budget_s: float = 20.0,
    links: Sequence[Link] = (),
    sizes_bytes: Sequence[int] | None = None,
    memory_limit_bytes: int | None = None,
) -> tuple[tuple[CollectiveReading, ...], tuple[str, ...]]:
    """Measures every collective over groups of 2, 4, ... `ranks` ranks, in ranks of their own.

    Args:
        zygote: Starts the ranks.
        device: cuda (NCCL, one rank per GPU) or cpu (gloo).
        ranks: The largest group; below 2 there is nothing to measure.
        budget_s: Seconds for all of it; the largest sizes are left out where they would take longer.
        links: What joins the GPUs, for naming the tier that a group crosses.
        sizes_bytes: Payloads; None: the module's own sweep.
        memory_limit_bytes: Host memory of all ranks together; None: no limit.

    Returns:
        The readings, and notes on what could not be measured and why.
    """
    if ranks < 2:
        return (), ("collectives need two ranks; there is one",)
    from autoplan.processes import Task, run_again

    sizes = tuple(sizes_bytes or (CUDA_SIZES_BYTES if device == "cuda" else CPU_SIZES_BYTES))
    task = Task(
        target="autoplan.probes.collectives:measure_collectives",
        args=(device, sizes, group_sizes(ranks), budget_s),
        ranks=ranks,
        deadlines_s={"*": 3 * budget_s + 30},  # as for the other probes
        total_deadline_s=3 * budget_s + 90,  # a first CUDA context can take tens of seconds
        memory_limit_bytes=memory_limit_bytes,
        env={"OMP_NUM_THREADS": "1"} if device == "cpu" else {},
    )
    report = run_again(zygote, task).report
    result = report.ranks[0].result if report.ranks else None
    if not isinstance(result, dict):
        return (), (f"collectives could not be measured: {report.describe()}",)
    readings = tuple(make_reading(entry, device, links) for entry in result["entries"])
    return readings, tuple(result["notes"])


def group_sizes(ranks: int) -> tuple[int, ...]:
    """2, 4, 8, ... and the number of ranks itself."""
    sizes = [2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks]
    return tuple(sizes if sizes and sizes[-1] == ranks else [*sizes, ranks])


def make_reading(entry: Mapping[str, Any], device: str, links: Sequence[Link]) -> CollectiveReading:
    """A record of one operation over one group, with the line fitted."""
    samples = tuple((int(size), float(seconds)) for size, seconds in entry["samples"])
    latency, bandwidth = fit_line(samples)
    source = f"{entry['backend']} {entry['operation']}, {len(samples)} sizes, median of repeats, slowest rank"
    factor = bus_factor(entry["operation"], entry["group_size"])

    def reading(value: float, unit: str) -> Reading:
        if not math.isfinite(value):
            return Reading.unknown(unit, "time did not grow with size", source)
        return Reading(value=value, unit=unit, provenance="measured", spread=entry["spread"], source=source)

    slowdown = entry.get("compute_slowdown")
    return CollectiveReading(
        operation=entry["operation"],
        backend=entry["backend"],
        group_size=entry["group_size"],
        tier=group_tier(device, entry["group_size"], links),
        latency_s=reading(latency, "s"),
        algbw_bytes_per_s=reading(bandwidth, "bytes/s"),
        busbw_bytes_per_s=reading(bandwidth * factor, "bytes/s"),
        samples=samples,
        compute_slowdown=None if slowdown is None else reading(slowdown, "1"),
    )


def group_tier(device: str, group_size: int, links: Sequence[Link]) -> str:
    """The slowest kind of link among the first `group_size` devices; pcie where the topology is unknown."""
    if device != "cuda":
        return "cpu"
    members = {f"cuda:{index}" for index in range(group_size)}
    kinds = [link.kind for link in links if {link.a, link.b} <= members and link.kind in TIERS]
    pairs = group_size * (group_size - 1) // 2
    if len(kinds) < pairs:
        return "pcie"
    return max(kinds, key=TIERS.index)


# The ranks' side.


def measure_collectives(
    context: RankContext, device: str, sizes_bytes: Sequence[int], groups: Sequence[int], budget_s: float
) -> dict[str, Any]:
    """Runs in every rank: times each operation over each group. All ranks take the same list in the same order.

    Returns:
        `entries` (operation, backend, group_size, samples, spread, compute_slowdown) and `notes`.
    """
    import torch
    import torch.distributed as dist

    context.phase("init")
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(context.local_rank)
    else:
        torch.set_num_threads(1)
    context.init_process_group(backend, INIT_TIMEOUT_S)
    context.phase("measure")
    entries: list[dict[str, Any]] = []
    notes: list[str] = []
    place = torch.device("cuda", context.local_rank) if device == "cuda" else torch.device("cpu")
    share = budget_s / max(1, len(groups) * len(OPERATIONS))
    for size in groups:
        group = dist.new_group(list(range(size)))
        for operation in OPERATIONS:
            member = context.rank < size
            entry = None
            if member:
                entry = _measure_operation(operation, group, size, sizes_bytes, place, share)
            dist.barrier()  # the other ranks wait, so that nothing else uses the links
            if entry is None:
                continue
            if "reason" in entry:
                notes.append(f"{backend} {operation} over {size} ranks is left out: {entry['reason']}")
            else:
                entries.append(entry | {"operation": operation, "backend": backend, "group_size": size})
    dist.destroy_process_group()
    return {"entries": entries, "notes": notes}


def _measure_operation(
    operation: str, group: Any, group_size: int, sizes_bytes: Sequence[int], place: torch.device, budget_s: float
) -> dict[str, Any]:
    samples: list[tuple[int, float]] = []
    spreads: list[float] = []
    begin = time.monotonic()
    messages = 2 if operation == "send_recv" else 1  # there and back
    for payload in sizes_bytes:
        start = time.monotonic()
        try:
            run = make_operation(operation, group, group_size, payload, place)
            seconds, spread = time_collective(run, group, place)
        except (RuntimeError, NotImplementedError, ValueError) as error:  # the backend lacks it: every rank sees that
            return {"reason": str(error).splitlines()[0]}
        samples.append((payload, seconds / messages))
        spreads.append(spread)
        # The next size costs up to four times this one; three samples at least, for the fit.
        now = time.monotonic()
        over = len(samples) >= 3 and now - begin + 4 * (now - start) > budget_s
        if _agree(float(over), group, place):
            break
    entry: dict[str, Any] = {"samples": samples, "spread": statistics.median(spreads)}
    if operation == "all_reduce":
        entry["compute_slowdown"] = measure_slowdown(group, samples[-1][0], place)
    return entry


def make_operation(
    operation: str, group: Any, group_size: int, payload_bytes: int, place: torch.device
) -> Callable[[bool], Any]:
    """A function that runs the collective once on float32 buffers of that payload; True: asynchronously.

    Raises:
        ValueError: a message to another rank, where there is none; NCCL would wait for one without end.
    """
    if operation == "send_recv" and group_size < 2:
        raise ValueError("a message needs two ranks")
    import torch
    import torch.distributed as dist

    elements = max(group_size, payload_bytes // 4 // group_size * group_size)
    whole = torch.ones(elements, device=place)
    part = torch.ones(elements // group_size, device=place)
    other = torch.empty_like(whole)
    rank = dist.get_rank(group)

    def send_recv(asynchronous: bool) -> None:
        # Ranks 0 and 1 of the group, there and back: two messages.
        if rank > 1:
            return
        for sender in (0, 1):
            if rank == sender:
                dist.send(whole, group_dst=1 - rank, group=group)
            else:
                dist.recv(other, group_src=1 - rank, group=group)

    runs: dict[str, Callable[[bool], Any]] = {
        "all_reduce": lambda asynchronous: dist.all_reduce(whole, group=group, async_op=asynchronous),
        "all_gather": lambda asynchronous: dist.all_gather_into_tensor(whole, part, group=group, async_op=asynchronous),
        "reduce_scatter": lambda asynchronous: dist.reduce_scatter_tensor(
            part, whole, group=group, async_op=asynchronous
        ),
        "all_to_all": lambda asynchronous: dist.all_to_all_single(other, whole, group=group, async_op=asynchronous),
        "send_recv": send_recv,
    }
    run = runs[operation]
    if operation == "all_reduce":
        whole.zero_()  # ones would double with every repeat, to infinity
    for _ in range(3):  # the first call makes the communicator, the next ones its buffers
        run(False)
    return run


def time_collective(run: Callable[[bool], Any], group: Any, place: torch.device) -> tuple[float, float]:
    """Median seconds of one call on the slowest rank, and the spread (interquartile range over median).

    Calls run back to back in batches long enough for the clock, as nccl-tests does.
    """
    one = _agree(_time_batch(run, 1, group, place), group, place)
    count = int(_agree(float(max(1, min(50, round(0.004 / max(one, 1e-7))))), group, place))
    batches = 7 if one * count < 0.05 else 4
    times = sorted(_agree(_time_batch(run, count, group, place), group, place) / count for _ in range(batches))
    median = statistics.median(times)
    quarter = len(times) // 4
    spread = (times[-1 - quarter] - times[quarter]) / median
    return median, spread


def _time_batch(run: Callable[[bool], Any], count: int, group: Any, place: torch.device) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier(group=group)
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    start = time.perf_counter()
    for _ in range(count):
        run(False)
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter() - start


def _agree(value: float, group: Any, place: torch.device) -> float:
    """The largest of the ranks' values, so that all ranks decide the same."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value], dtype=torch.float64 if place.type == "cpu" else torch.float32, device=place)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return float(tensor.item())


def measure_slowdown(group: Any, payload_bytes: int, place: torch.device) -> float:
    """How many times longer a matmul takes while an all-reduce of that payload runs (1: no longer)."""
    import torch
    import torch.distributed as dist

    side = 4096 if place.type == "cuda" else 384
    a, b = torch.ones(side, side, device=place), torch.ones(side, side, device=place)
    buffer = torch.zeros(max(1, payload_bytes // 4), device=place)

    def synchronize() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    def matmul_s(count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            a @ b
        synchronize()
        return (time.perf_counter() - start) / count

    matmul_s(3)
    alone_s = statistics.median(matmul_s(5) for _ in range(5))
    ratios = []
    for _ in range(5):
        dist.barrier(group=group)
        works = [dist.all_reduce(buffer, group=group, async_op=True) for _ in range(4)]
        count, start = 0, time.perf_counter()
        # Only matmuls that started while the collective was running count.
        while count < 200 and not all(work.is_completed() for work in works):
            a @ b
            if place.type == "cuda":
                torch.cuda.current_stream(place).synchronize()
            count += 1
        overlapped_s = (time.perf_counter() - start) / max(1, count)
        for work in works:
            work.wait()
        if count >= 3:
            ratios.append(overlapped_s / alone_s)
    return max(1.0, _agree(statistics.median(ratios) if ratios else 1.0, group, place))
