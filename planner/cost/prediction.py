"""The meaning of a prediction: its interval, whether it fits, what bounds the step; and what both front ends assume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.cost.columns import Floats

# 95 % of a normal distribution lie below its mean plus so many standard deviations: intervals of 90 %.
Z_90 = 1.645

# Passes over memory reach so much of a datasheet's bandwidth: BabelStream 85-92 % on A100, less the short kernels of a
# training step. Set by the step times of llm-foundry, fms-fsdp and vTrain (docs/accuracy.md).
BANDWIDTH_EFFICIENCY = 0.82
# What torch's allocator holds free on CUDA, as a share of what lives. Assumed; a search's trials correct it.
ALLOCATOR_SLACK = 0.06

# What the driver's figure of a GPU holds beside the allocator's: the CUDA context, which trials and probes of a search
# find there already; what libraries take for themselves later (cuBLAS, compiled kernels); and per kind of process group
# NCCL's buffers. Assumed for recent drivers on datacentre GPUs; nothing was fitted.
BARE_CONTEXT_BYTES = 6e8
LIBRARY_BYTES = 6e8
CONTEXT_BYTES = BARE_CONTEXT_BYTES + LIBRARY_BYTES
GROUP_BYTES = 2e8
# Left free of a chip's memory: the driver keeps some, and what is not allocated in one piece is lost. Assumed. The
# search has no such share, since its limit is given by the user or is a share of the machine already.
RESERVE = 0.04

Verdict = Literal["fits", "too_close", "does_not_fit"]
_KINDS = {
    "compute": ("matmul", "matmul/full", "matmul/half", "matmul/fp8", "attention"),
    "memory_bandwidth": ("memory", "fused_memory", "first_touch", "optimizer"),
    "launch": ("dispatch", "launch"),
    "communication": ("communication",),
    "bubble": ("bubble",),
}


def spread(sd: float | Floats) -> Floats:
    """The factor from a prediction to the upper end of its interval of 90 %, and its inverse to the lower one.

    Args:
        sd: Standard deviation of the logarithm of the prediction.
    """
    return np.asarray(np.exp(Z_90 * np.asarray(sd)))


def verdicts(low: Floats, high: Floats, limit: float | Floats | None, *, reserve: float = 0.0) -> NDArray[np.str_]:
    """Whether peaks of memory fit a limit, in bytes, all but a reserved share of it; None: everything fits.

    A peak fits if the upper end of its interval is within what is usable, does not fit if the lower end is above the
    whole limit, and is too close to say otherwise.
    """
    if limit is None:
        return np.full(np.shape(high), "fits")
    fits = np.asarray(high) <= (1 - reserve) * np.asarray(limit)
    too_large = np.asarray(low) > np.asarray(limit)
    return np.where(fits, "fits", np.where(too_large, "does_not_fit", "too_close"))


def bound_of(parts_s: Mapping[str, float], *, waits_for_input: bool) -> str:
    """The bound of a step: the kind of work that takes most of it, or input if the step is shorter than its input,
    because nothing else makes such a training faster.

    Args:
        parts_s: Seconds by part; parts that are no work of the step (input) are left out of the sums.
        waits_for_input: The input takes longer than the step.
    """
    if waits_for_input:
        return "input"
    return max(_KINDS, key=lambda kind: sum(parts_s.get(name, 0.0) for name in _KINDS[kind]))
