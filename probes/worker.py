"""The half of the probes that measures, in a rank; `autoplan.probes.run` is the half that starts it.

In: a `ProbeRequest` per device. Out: `Measured` records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from autoplan.probes.cpu import cpu_shares, read_cpu_times
from autoplan.probes.profile import OperationReading
from autoplan.record import Reading, Record

if TYPE_CHECKING:
    from autoplan.processes import RankContext

BRIEF_CAP_S, BRIEF_LIMIT_S = 0.05, 5.0
"""Of the first rates, the most seconds for the samples of one operation, and after which no further one is begun."""


class ProbeRequest(Record):
    """The measurements that one rank is asked for."""

    type: Literal["cuda", "cpu"]
    index: int
    budget_s: float
    threads: int
    memory_limit_bytes: float | None = Field(default=None, description="None: half of what is free on the GPU")
    cache_bytes: int | None = None
    brief: bool = Field(default=False, description="the first rates alone, in a second or two")


class Measured(Record):
    """The measurements of a rank on one device: all of them, or those that it had made when it ended."""

    type: Literal["cuda", "cpu"]
    index: int
    operations: tuple[OperationReading, ...] = ()
    kernel_launch_s: Reading | None = None
    context_bytes: Reading | None = Field(default=None, description="CUDA: what a process takes before any tensor")
    others_cpu_share: float = Field(
        default=0.0, description="share of the usable cores that other processes kept busy during the measurement"
    )
    notes: tuple[str, ...] = ()
    complete: bool = False


def probe_devices(context: RankContext, requests: Sequence[ProbeRequest]) -> list[Measured]:
    """Measure devices one after the other; after each series the result so far is written.

    Args:
        context: The rank's.
        requests: For each device.

    Returns:
        In the order of the requests.
    """
    done: list[Measured] = []
    for request in requests:
        context.phase(f"{request.type}:{request.index}")
        measured = Measured(type=request.type, index=request.index)
        for measured in _series(context, request):
            context.report([*done, measured])
        done.append(measured)
    return done


def _open_device(kind: str, index: int, threads: int) -> Any:
    """The torch device, ready to be timed."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device = torch.device("cpu")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
        device = torch.device(kind, index)
        torch.cuda.set_device(device)
    # the first backward starts autograd's threads, the first CUDA call a context: neither belongs to a sample
    x = torch.ones(8, 8, device=device, requires_grad=True)
    torch.autograd.grad((x @ x).sum(), x)
    return device


def _free_bytes(request: ProbeRequest) -> float | None:
    """Free bytes of a GPU, from the driver, before this process has a context there; None: a CPU, or not known."""
    if request.type == "cpu":
        return None
    from autoplan.probes.gpu import read_gpus

    found = [gpu for gpu in read_gpus().devices if gpu.index == request.index]
    return found[0].memory_available_bytes.value if found else None


def _context_bytes(device: Any, free_before: float | None) -> Reading | None:
    """Bytes that this process took on the GPU to open it: CUDA's context, kernels, and the libraries of products."""
    import torch

    if free_before is None:
        return None
    taken = max(0.0, free_before - torch.cuda.mem_get_info(device)[0])
    return Reading(value=taken, unit="bytes", provenance="measured", source="free before and after the first product")


def _memory_limit_bytes(device: Any, given: float | None) -> float:
    import torch

    if given is not None:
        return given
    return 0.5 * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30


def _series(rank: RankContext, request: ProbeRequest) -> Any:
    """Yield what is measured so far after each series of measurements; the series that are needed most come first."""
    from autoplan.probes.timing import Rates, measure_operations, probe_launch

    started = time.perf_counter()
    cores = os.sched_getaffinity(0)
    before = read_cpu_times(cores, os.getpid())
    free_before = _free_bytes(request)
    device = _open_device(request.type, request.index, request.threads)
    context = _context_bytes(device, free_before)
    launch = probe_launch(device)
    operations: list[OperationReading] = []
    notes: list[str] = []
    rates = Rates()
    if request.brief:
        series, cap_s = _brief_series(device), BRIEF_CAP_S
    else:
        series, cap_s = _all_series(device, request, operations), 0.4 if device.type == "cpu" else 0.25
    left = sum(share for share, _ in series)  # 1, up to rounding
    for position, (share, make) in enumerate(series):
        spent = time.perf_counter() - started
        # time that a series did not use goes to the later ones; a series that overran leaves them a quarter
        seconds = max(max(0.0, request.budget_s - spent) / left, 0.25 * request.budget_s) * share
        if request.brief:  # the start of this process does not count
            seconds = BRIEF_LIMIT_S
        left -= share
        readings, left_out = measure_operations(
            make(),
            device=device,
            limit_s=seconds,
            cap_s=cap_s,
            memory_limit_bytes=_memory_limit_bytes(device, request.memory_limit_bytes),
            rates=rates,
            on_progress=lambda label: rank.heartbeat(doing=label),
        )
        operations += readings
        notes += left_out
        if device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        yield Measured(
            type=request.type,
            index=request.index,
            operations=tuple(operations),
            kernel_launch_s=launch,
            context_bytes=context,
            others_cpu_share=cpu_shares(before, read_cpu_times(cores, os.getpid()), len(cores))[1] or 0.0,
            notes=tuple(notes),
            complete=position + 1 == len(series),
        )


Series = list[tuple[float, Callable[[], list[Any]]]]
"""(share of the time, the operations), in the order in which they are measured."""


def _brief_series(device: Any) -> Series:
    """A few of each kind, small ones: enough to tell which of two configurations is far faster."""
    from autoplan.probes import operations as ops

    on_cpu = device.type == "cpu"
    dtypes = ops.dtypes_of(device)
    products = tuple(dtype for dtype in dtypes if dtype != "float16")
    shapes = ops.CPU_BRIEF_SHAPES if on_cpu else ops.CUDA_BRIEF_SHAPES
    train_shapes = (ops.CPU_BRIEF_TRAIN_SHAPE,) if on_cpu else ops.CUDA_TRAIN_SHAPES[:1]
    attention_shapes = (ops.CPU_ATTENTION_SHAPES if on_cpu else ops.CUDA_ATTENTION_SHAPES)[:1]
    return [
        (0.25, lambda: list(ops.linear_train_operations(device, dtypes, train_shapes))),
        (0.25, lambda: list(ops.matmul_operations(device, products, shapes))),
        (0.3, lambda: list(ops.bandwidth_operations(device, cache_bytes=None))[1::-1]),
        (0.2, lambda: list(ops.attention_operations(device, ("float32", "bfloat16"), attention_shapes))[::2]),
    ]


def _all_series(device: Any, request: ProbeRequest, done: Sequence[OperationReading]) -> Series:
    """Every kind; `done` is filled as they are measured, and tells which dtypes are not worth more time."""
    from autoplan.probes import operations as ops

    dtypes = ops.dtypes_of(device)
    bandwidth = (0.17, lambda: list(ops.bandwidth_operations(device, cache_bytes=request.cache_bytes)))
    if device.type != "cpu":
        mixed = tuple(dtype for dtype in dtypes if dtype != "tf32")
        return [
            (0.40, lambda: list(ops.matmul_operations(device, dtypes, ops.CUDA_SHAPES))),
            (0.15, lambda: list(ops.linear_train_operations(device, dtypes, ops.CUDA_TRAIN_SHAPES))),
            (0.05, lambda: list(ops.float8_operations(device, ops.CUDA_SHAPES))),
            bandwidth,
            (0.17, lambda: list(ops.attention_operations(device, mixed, ops.CUDA_ATTENTION_SHAPES))),
            (0.06, lambda: list(ops.transfer_operations(device))),
        ]

    def first() -> list[Any]:
        """Small ones in every dtype, which show what a dtype is worth."""
        trained = ops.linear_train_operations(device, dtypes, (ops.CPU_BRIEF_TRAIN_SHAPE,))
        return [*ops.matmul_operations(device, dtypes, ops.CPU_SHAPES[:2]), *trained]

    def worth() -> tuple[str, ...]:
        """Without the dtypes that a CPU computes in by other means: they would take half of the time."""
        rates = {reading.dtype: reading.rate.value or 0.0 for reading in done if reading.kind == "linear_train"}
        least = ops.LOSING_SHARE * rates.get("float32", 0.0)
        return tuple(dtype for dtype in dtypes if rates.get(dtype, least) >= least)

    trained_with = ("float32", "bfloat16")  # nobody trains attention in float16 on a CPU
    counts = sorted({1, max(1, request.threads // 2), request.threads})
    return [
        (0.15, first),
        (0.25, lambda: list(ops.matmul_operations(device, worth(), ops.CPU_SHAPES[2:]))),
        (0.20, lambda: list(ops.linear_train_operations(device, worth(), ops.CPU_TRAIN_SHAPES))),
        bandwidth,
        (0.17, lambda: list(ops.attention_operations(device, trained_with, ops.CPU_ATTENTION_SHAPES))),
        (0.06, lambda: list(ops.thread_operations(device, counts))),
    ]
