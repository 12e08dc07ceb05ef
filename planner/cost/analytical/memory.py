"""What an estimate of memory means on a chip that is not here: its parts, NCCL's buffers, whether it fits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.cost.columns import Columns, Floats
from autoplan.planner.cost.prediction import GROUP_BYTES, RESERVE, spread, verdicts

# Half-width of the memory interval, as a standard deviation of its logarithm: of the errors on LitGPT's published peaks
# (docs/accuracy.md). The search has a figure of its own, which its trials narrow (calibrate.MemoryFit.sd).
MEMORY_SD = 0.06
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "overhead")


def group_bytes(columns: Columns) -> Floats:
    """Bytes of NCCL's buffers: each parallel degree has process groups of its own."""
    degrees = (columns.tp, columns.pp, columns.dp, columns.cp, columns.ep)
    return np.asarray(GROUP_BYTES * sum((degree > 1.0) * 1.0 for degree in degrees))


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
