"""What a price means: its intervals, whether it fits, what binds, and why."""

from __future__ import annotations

from autoplan.planner.cost.analytical.layouts import Layouts
from autoplan.planner.cost.analytical.memory import MEMORY_PARTS
from autoplan.planner.cost.analytical.step_time import TIME_PARTS, PaperTable, loading_seconds

Z_90 = 1.645
# Half-width of the memory interval, as a standard deviation of its logarithm
MEMORY_SD = 0.06
# Left free of the chip's memory: the driver keeps some, and what is not allocated in one piece is lost
RESERVE = 0.04


def step_interval(table: PaperTable, layouts: Layouts, j: int, *, spread: float) -> tuple[float, float]:
    """Seconds of a step at least and at most: a factor on what the GPUs take; the rate of the input is as given."""
    busy = float(table.step_time_s[j] - table.input_s[j])
    loading = float(loading_seconds(layouts.take(slice(j, j + 1)))[0])
    return max(busy / spread, loading), max(busy * spread, loading)


def memory_verdict(low: float, high: float, memory_bytes: float) -> str:
    """Fits, does not, or too close to call, with the reserve."""
    usable = (1 - RESERVE) * memory_bytes
    if high <= usable:
        return "fits"
    return "does_not_fit" if low > memory_bytes else "too_close"


def bound_of(table: PaperTable, j: int) -> str:
    """What takes the most of a step; input wherever the step waits for it, as nothing else makes it faster then."""
    if table.input_s[j] > 0:
        return "input"
    shares = {
        "compute": table.matmul_s[j] + table.attention_s[j],
        "memory_bandwidth": table.memory_s[j] + table.optimizer_s[j],
        "launch": table.launch_s[j],
        "communication": table.communication_s[j],
        "bubble": table.bubble_s[j],
    }
    return max(shares, key=lambda name: shares[name])


def why(table: PaperTable, layouts: Layouts, j: int, verdict: str) -> str:
    """One sentence on a price: the largest parts of time, and of memory where it does not fit."""
    step = float(table.step_time_s[j])
    parts = sorted(((float(getattr(table, name)[j]), name.removesuffix("_s")) for name in TIME_PARTS), reverse=True)
    text = ", ".join(f"{name} {seconds / step:.0%}" for seconds, name in parts[:3]) + " of the step"
    if verdict != "fits":
        held = sorted(((float(getattr(table, n)[j]), n.removesuffix("_bytes")) for n in MEMORY_PARTS), reverse=True)
        gib = float(table.peak_memory_bytes[j]) / 2**30
        text += f"; {gib:.1f} GiB against {layouts.memory_bytes[j] / 2**30:.0f}: "
        text += ", ".join(f"{name} {size / 2**30:.1f}" for size, name in held[:3])
    return text
