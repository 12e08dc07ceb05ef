"""Measures how fast the workload makes its batches, and describes what that means for a step of training.

In: a `Workload`. Out: seconds per sample, and a sentence. Imports torch only to measure.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

from autoplan.errors import WorkloadError
from autoplan.units import format_number, format_seconds

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload

TIME_LIMIT_S = 1.0
MAX_BATCHES = 5

MAX_SAMPLES = 64
"""Samples per measured batch. More would cost memory and not make the seconds per sample more accurate."""

MIN_SHARE = 0.05
"""Data that takes less than this share of a step is not mentioned: step times are not known more accurately."""


def measure_input(workload: Workload, *, time_limit_s: float = TIME_LIMIT_S) -> tuple[float | None, str | None]:
    """Times the workload's own make_batch on one thread, as one worker of a DataLoader runs it.

    The first batch is small: it opens files, and its time decides how large the other batches may be. The indices are
    the first ones, as in trials; `batches_from_dataset` puts the largest samples there.

    Args:
        workload: What is trained.
        time_limit_s: After so many seconds no further batch is begun. A call that has begun is not interrupted.

    Returns:
        Seconds per sample (the median over the batches) and None, or None and the reason.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _seconds_per_sample(workload, time_limit_s), None
    except WorkloadError as error:  # make_batch raised it; the search continues without this figure
        return None, f"data loading is not estimated: {', '.join(error.flag_message.splitlines()[:2])}"
    except Exception as error:
        return None, f"data loading is not estimated: make_batch raised {type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(threads)


def _seconds_per_sample(workload: Workload, time_limit_s: float) -> float:
    started = time.perf_counter()
    first = _time_batch(workload, min(2, workload.global_batch), 1)
    within_limit = int(time_limit_s / (MAX_BATCHES + 1) / max(first, 1e-9))
    count = max(1, min(workload.global_batch, MAX_SAMPLES, within_limit))
    later: list[float] = []
    while len(later) < MAX_BATCHES and time.perf_counter() - started < time_limit_s:
        later.append(_time_batch(workload, count, 2 + len(later)))
    return statistics.median(later or [first])


def _time_batch(workload: Workload, count: int, index: int) -> float:
    """Seconds per sample of one batch."""
    started = time.perf_counter()
    workload.make_batch(count, index)
    return (time.perf_counter() - started) / count


def workers_needed(load_s: float, step_s: float) -> int:
    """Loader workers that together make batches as fast as the steps use them: ceil(load_s / step_s), at least one."""
    return max(1, math.ceil(load_s / step_s))


def describe_input(load_s: float, step_s: float, samples: int, ranks: int = 1) -> str | None:
    """A sentence on how the time of making batches compares with a step; None if it is below MIN_SHARE.

    Args:
        load_s: Seconds that one process takes to make the batch of a step, for one data-parallel rank.
        step_s: Seconds of the step without its data.
        samples: Samples of that batch.
        ranks: Data-parallel ranks; each makes its own batch.
    """
    if load_s < MIN_SHARE * step_s:
        return None
    each = f" on each of {ranks} data-parallel ranks" if ranks > 1 else ""
    text = (
        f"data: make_batch takes {format_seconds(load_s)} on one thread for the {samples} samples of a step{each}, the "
        f"step itself {format_seconds(step_s)}; if batches are made between steps, a step takes "
        f"{format_seconds(load_s + step_s)}"
    )
    if load_s <= step_s:
        return f"{text}; one loader worker beside the training is fast enough"
    each = " per rank" if ranks > 1 else ""
    rate, used = (format_number(ranks * samples / seconds) for seconds in (load_s, step_s))
    return (
        f"{text}. Data loading is the bottleneck: one loader worker{each} makes {rate} samples/s, the steps use "
        f"{used}; {workers_needed(load_s, step_s)} workers{each}, each on its own core, are fast enough"
    )
