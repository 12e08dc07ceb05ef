"""Pipeline: seconds of a pass over stages that need not be equal, and what a stage keeps while it waits."""

from __future__ import annotations

import numpy as np

from autoplan.planner.cost.columns import SCHEDULES, Columns, Floats


def pass_seconds(columns: Columns, slowest_s: Floats, all_stages_s: Floats, micro_batches: Floats) -> Floats:
    """Seconds of one pipeline pass.

    With equal stages (m + (p - 1)/v) (tf + tb) for GPipe, 1F1B and their interleaved form, bubble fraction
    (p - 1)/(v m) (Narayanan et al. 2021, section 2.2); with unequal ones the slowest sets the pace and the first
    micro-batch still passes through all: sum of stages + (m - 1) x slowest, the sum's excess over the slowest divided
    by v. Zero-bubble (ZB-H1) fills two thirds of the bubble with weight gradients (Qi et al. 2023, section 2.1).

    Args:
        columns: Degrees and schedule.
        slowest_s: Forward and backward of one micro-batch on the slowest stage, sends included.
        all_stages_s: The same, summed over the stages.
        micro_batches: In one pass.
    """
    fill = (all_stages_s - slowest_s) / columns.virtual_stages
    fill = np.where(columns.schedule == SCHEDULES.index("zero_bubble"), fill / 3, fill)
    return np.asarray(micro_batches * slowest_s + np.where(columns.pp > 1, fill, 0.0))


def held_micro_batches(columns: Columns, micro_batches: Floats) -> Floats:
    """How many micro-batches' activations the first stage holds at once.

    1F1B: min(p, m); interleaved: p (1 + (p - 1)/(p v)) (Korthikanti et al. 2022, section 4.2.3); GPipe: m.
    Zero-bubble H1 holds as many as 1F1B.
    """
    p = columns.pp
    one = np.minimum(p, micro_batches)
    interleaved = one * (1 + (p - 1) / (p * np.maximum(columns.virtual_stages, 1)))
    held = np.where(columns.schedule == SCHEDULES.index("gpipe"), micro_batches, one)
    held = np.where(columns.schedule == SCHEDULES.index("interleaved_1f1b"), interleaved, held)
    return np.asarray(np.where(p > 1, held, 1.0))
