"""How fast the workload's data comes, and what that means beside a step. Loads no torch until it measures."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

from autoplan.units import format_number, format_seconds

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload

TIME_LIMIT_S = 1.0
MOST_BATCHES = 5
# a batch as large as training's would cost memory and teach nothing more of the seconds per sample
MOST_SAMPLES = 64
# below this share of a step the data is not worth a sentence: step times are not known better
WORTH_SAYING = 0.05


def measure_input(workload: Workload, *, time_limit_s: float = TIME_LIMIT_S) -> tuple[float | None, str | None]:
    """Times the workload's own make_batch on one thread, which is what one worker of a DataLoader has.

    The first batch is small: it opens files and tells how large the others may be. The indices are the small ones
    that trials use too; batches of `batches_from_dataset` begin with the largest samples, so that they count in full.

    Args:
        workload: What is trained.
        time_limit_s: No further batch is begun after so many seconds; a call that has begun is not cut short.

    Returns:
        Seconds per sample (the median over the batches), or None and why.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _seconds_per_sample(workload, time_limit_s), None
    except Exception as error:  # a user's function may raise anything; without this figure the search goes on
        return None, f"data loading is not priced: make_batch raised {type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(threads)


def _seconds_per_sample(workload: Workload, time_limit_s: float) -> float:
    started = time.perf_counter()
    first = _time_batch(workload, min(2, workload.global_batch), 1)
    fitting = int(time_limit_s / (MOST_BATCHES + 1) / max(first, 1e-9))
    count = max(1, min(workload.global_batch, MOST_SAMPLES, fitting))
    later: list[float] = []
    while len(later) < MOST_BATCHES and time.perf_counter() - started < time_limit_s:
        later.append(_time_batch(workload, count, 2 + len(later)))
    return statistics.median(later or [first])


def _time_batch(workload: Workload, count: int, index: int) -> float:
    """Seconds per sample of one batch."""
    started = time.perf_counter()
    workload.make_batch(count, index)
    return (time.perf_counter() - started) / count


def workers_needed(load_s: float, step_s: float) -> int:
    """Loader workers that together make batches as fast as steps use them: ceil(load / step), at least one."""
    return max(1, math.ceil(load_s / step_s))


def describe_input(load_s: float, step_s: float, samples: int, ranks: int = 1) -> str | None:
    """What the data does to a step of training, in a sentence; None where it is too quick to matter.

    Args:
        load_s: Seconds that one process takes to make the batch of a step, for one data-parallel rank.
        step_s: Seconds of the step without its data.
        samples: Samples of that batch.
        ranks: Data-parallel ranks, each of which makes its own.
    """
    if load_s < WORTH_SAYING * step_s:
        return None
    each = f" on each of {ranks} data-parallel ranks" if ranks > 1 else ""
    told = (
        f"data: make_batch takes {format_seconds(load_s)} on one thread for the {samples} samples of a step{each}, the "
        f"step itself {format_seconds(step_s)}; batches made between steps make that {format_seconds(load_s + step_s)}"
    )
    if load_s <= step_s:
        return f"{told}; one loader worker beside the training keeps up"
    each = " a rank" if ranks > 1 else ""
    rate, used = (format_number(ranks * samples / seconds) for seconds in (load_s, step_s))
    return (
        f"{told}. Input binds: one loader worker{each} gives {rate} samples/s, the steps take "
        f"{used}; {workers_needed(load_s, step_s)} workers{each}, each on a core of its own, keep up"
    )
