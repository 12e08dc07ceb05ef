"""What the estimate of a layout means: intervals, verdicts, what bounds it, and one sentence on why."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.cost.analytical.layouts import Layouts
from autoplan.planner.cost.analytical.step_time import EstimateTable, loading_seconds
from autoplan.planner.cost.columns import Floats
from autoplan.planner.cost.prediction import bound_of, spread, verdicts

# Half-width of the memory interval, as a standard deviation of its logarithm: of the errors on LitGPT's published peaks
# (docs/accuracy.md). The search has a figure of its own, which its trials narrow (calibrate.MemoryFit.sd).
MEMORY_SD = 0.06
# Left free of the chip's memory: the driver keeps some, and what is not allocated in one piece is lost. Assumed. The
# search has no such share, since its limit is given by the user or is a share of the machine already.
RESERVE = 0.04


def step_interval(table: EstimateTable, layouts: Layouts, j: int, *, sd: float) -> tuple[float, float]:
    """Seconds of a step at least and at most: a factor on what the GPUs take; the rate of the input is as given."""
    factor = float(spread(sd))
    busy = float(table.step_time_s[j] - table.input_s[j])
    loading = float(loading_seconds(layouts.take(slice(j, j + 1)))[0])
    return max(busy / factor, loading), max(busy * factor, loading)


def memory_verdicts(
    peak_bytes: Floats, memory_bytes: Floats, *, lowest_bytes: Floats | None = None, highest_bytes: Floats | None = None
) -> NDArray[np.str_]:
    """Whether peaks fit their chips' memory, the reserve left free.

    Args:
        peak_bytes: Estimated.
        memory_bytes: Of the chips.
        lowest_bytes, highest_bytes: Peaks if what is not said is as it costs least, and most; None: the same.
    """
    factor = spread(MEMORY_SD)
    low = (peak_bytes if lowest_bytes is None else lowest_bytes) / factor
    high = (peak_bytes if highest_bytes is None else highest_bytes) * factor
    return verdicts(low, high, memory_bytes, reserve=RESERVE)


def bound(table: EstimateTable, j: int) -> str:
    """What bounds the step of a row."""
    return bound_of(table.time_parts_s(j), waits_for_input=bool(table.input_s[j] > 0))


def why(table: EstimateTable, layouts: Layouts, j: int, verdict: str) -> str:
    """One sentence on an estimate: the largest parts of time, and of memory where it does not fit."""
    step = float(table.step_time_s[j])
    parts = sorted(((seconds, name) for name, seconds in table.time_parts_s(j).items()), reverse=True)
    text = ", ".join(f"{name} {seconds / step:.0%}" for seconds, name in parts[:3]) + " of the step"
    if verdict != "fits":
        held = sorted(((size, name) for name, size in table.memory_parts_bytes(j).items()), reverse=True)
        gib = float(table.peak_memory_bytes[j]) / 2**30
        text += f"; {gib:.1f} GiB against {layouts.memory_bytes[j] / 2**30:.0f}: "
        text += ", ".join(f"{name} {size / 2**30:.1f}" for size, name in held[:3])
    return text
