"""Speeds of the links between ranks: collectives over NCCL or gloo, timed over message and group sizes.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from autoplan.probes.profile import CollectiveReading
from autoplan.record import Reading

if TYPE_CHECKING:
    import torch

    from autoplan.processes import RankContext, Zygote

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
# Payload sizes: powers of four from 4 KiB; latency shows at the small end, bandwidth at the large one.
CPU_SIZES_BYTES = tuple(4096 * 4**power for power in range(7))  # to 16 MiB
CUDA_SIZES_BYTES = tuple(4096 * 4**power for power in range(9))  # to 256 MiB
INIT_TIMEOUT_S = 300.0


def bus_factor(operation: str, group_size: int) -> float:
    """busbw over algbw, as nccl-tests defines it."""
    if operation == "send_recv":
        return 1.0
    share = (group_size - 1) / group_size
    return 2 * share if operation == "all_reduce" else share


def fit_line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits seconds = latency + bytes / bandwidth, by least squares of the relative error, neither below zero.

    Args:
        samples: (payload bytes, seconds) pairs, at least one.

    Returns:
        latency_s and bandwidth_bytes_per_s (infinite where time does not grow with size).
    """
    # Dividing each row by its seconds makes the residuals relative: else the large messages alone would decide.
    sizes, seconds = np.array(samples, dtype=np.float64).T
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    latency, slope = np.linalg.lstsq(rows, np.ones(len(samples)))[0] if len(samples) > 1 else (seconds[0], 0.0)
    if latency < 0:  # through the origin
        latency, slope = 0.0, rows[:, 1].sum() / np.square(rows[:, 1]).sum()
    if slope * sizes.max() <= 1e-9 * seconds.max():  # a constant, by the same weights
        return float((1 / seconds).sum() / np.square(1 / seconds).sum()), math.inf
    return float(latency), float(1 / slope)


# The parent's side.


def probe_collectives(
    zygote: Zygote,
    *,
    device: str,
    ranks: int,
    budget_s: float = 20.0,
    sizes_bytes: Sequence[int] | None = None,
    memory_limit_bytes: int | None = None,
) -> tuple[tuple[CollectiveReading, ...], tuple[str, ...]]:
    """Measures every collective over groups of 2, 4, ... `ranks` ranks, in ranks of their own.

    Args:
        zygote: Starts the ranks.
        device: cuda (NCCL, one rank per GPU) or cpu (gloo).
        ranks: The largest group; below 2 there is nothing to measure.
        budget_s: Seconds for all of it; the largest sizes are left out where they would take longer.
        sizes_bytes: Payloads; None: the module's own sweep.
        memory_limit_bytes: Host memory of all ranks together; None: no limit.

    Returns:
        The readings, and notes on what could not be measured and why.
    """
    if ranks < 2:
        return (), ("collectives need two ranks; there is one",)
    from autoplan.processes import Task, run_again

    sizes = tuple(sizes_bytes or (CUDA_SIZES_BYTES if device == "cuda" else CPU_SIZES_BYTES))
    asked = [(list(range(size)), OPERATIONS) for size in group_sizes(ranks)]
    task = Task(
        target="autoplan.probes.collectives:measure_groups",
        args=(device, sizes, asked, budget_s),
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
    readings = tuple(map(make_reading, result["entries"]))
    return readings, tuple(result["notes"])


def group_sizes(ranks: int) -> tuple[int, ...]:
    """2, 4, 8, ... and the number of ranks itself."""
    sizes = [2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks]
    return tuple(sizes if sizes and sizes[-1] == ranks else [*sizes, ranks])


def make_reading(entry: Mapping[str, Any]) -> CollectiveReading:
    """A record of one operation over one group, with the line fitted."""
    samples = tuple((int(size), float(seconds)) for size, seconds in entry["samples"])
    latency, bandwidth = fit_line(samples)
    source = f"{entry['backend']} {entry['operation']}, {len(samples)} sizes, median of repeats, slowest rank"
    factor = bus_factor(entry["operation"], entry["group_size"])

    def reading(value: float, unit: str) -> Reading:
        if not math.isfinite(value):
            return Reading.unknown(unit, "time did not grow with size", source)
        return Reading(value=value, unit=unit, provenance="measured", spread=entry["spread"], source=source)

    return CollectiveReading(
        operation=entry["operation"],
        backend=entry["backend"],
        group_size=entry["group_size"],
        latency_s=reading(latency, "s"),
        algbw_bytes_per_s=reading(bandwidth, "bytes/s"),
        busbw_bytes_per_s=reading(bandwidth * factor, "bytes/s"),
        samples=samples,
    )


# The ranks' side.


def measure_groups(
    context: RankContext,
    device: str,
    sizes_bytes: Sequence[int],
    asked: Sequence[tuple[Sequence[int], Sequence[str]]],
    budget_s: float,
) -> dict[str, Any]:
    """Runs in every rank: times operations over groups. All ranks take the same list in the same order.

    Args:
        context: This rank.
        device: cuda (NCCL) or cpu (gloo).
        sizes_bytes: Payloads.
        asked: The ranks of each group, and its operations.
        budget_s: Seconds for all of it.

    Returns:
        Of the groups that this rank is in: `entries` (operation, backend, group_size, ranks, samples, spread); `notes`.
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
    share = budget_s / max(1, sum(len(operations) for _, operations in asked))
    for ranks, operations in asked:
        group, size = dist.new_group(list(ranks)), len(ranks)
        for operation in operations:
            entry = None
            if context.rank in ranks:
                entry = _measure_operation(operation, group, size, sizes_bytes, place, share)
            dist.barrier()  # the other ranks wait, so that nothing else uses the links
            if entry is None:
                continue
            if "reason" in entry:
                notes.append(f"{backend} {operation} over {size} ranks is left out: {entry['reason']}")
            else:
                named = {"operation": operation, "backend": backend, "group_size": size, "ranks": list(ranks)}
                entries.append(entry | named)
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
    return {"samples": samples, "spread": statistics.median(spreads)}


def make_operation(
    operation: str, group: Any, group_size: int, payload_bytes: int, place: torch.device
) -> Callable[[], object]:
    """A function that runs the collective once on float32 buffers of that payload.

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

    def send_recv() -> None:
        # Ranks 0 and 1 of the group, there and back: two messages.
        if rank > 1:
            return
        for sender in (0, 1):
            if rank == sender:
                dist.send(whole, group_dst=1 - rank, group=group)
            else:
                dist.recv(other, group_src=1 - rank, group=group)

    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": send_recv,
    }
    run = runs[operation]
    if operation == "all_reduce":
        whole.zero_()  # ones would double with every repeat, to infinity
    for _ in range(3):  # the first call makes the communicator, the next ones its buffers
        run()
    return run


def time_collective(run: Callable[[], object], group: Any, place: torch.device) -> tuple[float, float]:
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


def _time_batch(run: Callable[[], object], count: int, group: Any, place: torch.device) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier(group=group)
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    start = time.perf_counter()
    for _ in range(count):
        run()
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
