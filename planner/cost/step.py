"""One optimizer step: what communication shows beside compute, and what a pipeline leaves idle and keeps waiting.

step = passes x pipeline pass of (compute + tensor parallelism + sends)
       + max(gathers - hidden, floor) per micro-step + max(gradients - hidden, floor) + gathers after the step
       + optimizer
"""

from __future__ import annotations

import numpy as np

from autoplan.planner.cost.columns import SCHEDULES, Columns, Floats
from autoplan.planner.cost.communication import Exchange, reductions

# Largest share of a micro-step's compute behind which gathers and gradient reductions hide. cuda: fitted to the step
# times of llm-foundry, fms-fsdp and vTrain; torch's papers on DDP (Li et al. 2020, section 5.2) and FSDP report
# near-complete overlap where the backward is longer. cpu: gloo shares the cores that compute, so that far less hides;
# assumed, nothing was fitted.
OVERLAP = {"cuda": 0.85, "cpu": 0.3}
# Gradients are reduced during the backward only, after its first blocks. Fitted to the same tables.
BACKWARD_SHARE = 0.5
# What always shows: the first gathering of a step, and the last gradients of a backward. Fitted to the same tables.
GATHER_FLOOR = 0.05
GRADIENT_FLOOR = 0.15


def step_seconds(
    columns: Columns, moved: Exchange, *, stage_s: Floats, all_stages_s: Floats, device: str
) -> tuple[Floats, Floats]:
    """The seconds that communication and the bubble of a pipeline add to the compute of a step on the fullest stage.

    With equal stages a pass of a pipeline takes (m + (p - 1)/v) (tf + tb) for GPipe, 1F1B and their interleaved form,
    bubble fraction (p - 1)/(v m) (Narayanan et al. 2021, section 2.2); with unequal ones the slowest sets the pace and
    the first micro-batch still passes through all: sum of stages + (m - 1) x slowest, the sum's excess over the slowest
    divided by v. Zero-bubble (ZB-H1) fills two thirds of the bubble with weight gradients (Qi et al. 2023, section
    2.1).

    Args:
        columns: The configurations.
        moved: What is exchanged.
        stage_s: Compute of one micro-step on the fullest stage, the host's time included where it shows.
        all_stages_s: The same of one micro-batch through all stages.
        device: cpu or cuda.
    """
    inline = moved.tensor_s + moved.send_s
    one = stage_s + inline
    through = np.maximum(all_stages_s + columns.pp * inline, one)
    fill = (through - one) / columns.virtual_stages
    fill = np.where(columns.schedule == SCHEDULES.index("zero_bubble"), fill / 3, fill)
    micro_batches = columns.accumulation / columns.passes
    whole = columns.passes * (micro_batches * one + np.where(columns.pp > 1, fill, 0.0))
    hidden = OVERLAP[device] * stage_s
    gather = np.maximum(moved.gather_s - hidden, GATHER_FLOOR * moved.gather_s)
    behind = BACKWARD_SHARE * hidden * reductions(columns)
    gradient = np.maximum(moved.gradient_s - behind, GRADIENT_FLOOR * moved.gradient_s)
    communication_s = columns.accumulation * (inline + gather) + gradient + moved.after_s
    return communication_s, np.maximum(whole - columns.accumulation * one, 0.0)


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
