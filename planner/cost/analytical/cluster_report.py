"""What `autoplan estimate` answers for a cluster, as one document."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from autoplan.errors import NoFeasiblePlanError
from autoplan.planner.cost.analytical.back_of_envelope import back_of_envelope
from autoplan.planner.cost.analytical.explain import MEMORY_SD, RESERVE
from autoplan.planner.cost.analytical.layout_answer import scaling, show_layout, smallest_cluster, why_others_lose
from autoplan.planner.cost.analytical.layout_search import DEFAULT_OPTIMIZER, Answer, Question, search_layouts
from autoplan.planner.cost.analytical.step_time import CALIBRATED_SD, UNCALIBRATED_SD
from autoplan.planner.cost.prediction import spread


def estimate_cluster(
    question: Question, *, model_name: str, tokens: float | None, assumed: tuple[str, ...], top: int
) -> dict[str, Any]:
    """Best layouts, time to train, cost, smallest cluster, scaling, why others lose, a back-of-the-envelope.

    Raises:
        NoFeasiblePlanError: no layout fits, and by how much.
        ConfigError: no layout is legal.
    """
    started = time.perf_counter()
    answer = search_layouts(question)
    estimated_s = time.perf_counter() - started
    sd = UNCALIBRATED_SD if question.factors is None else CALIBRATED_SD
    smallest = smallest_cluster(question)
    if answer.best is None:
        raise _fits_nowhere(question, answer, smallest, model_name)
    best = show_layout(answer, answer.best, sd=sd)
    document: dict[str, Any] = {
        "status": "ok",
        "model": {"name": model_name, "parameters": question.model.parameters, **question.model.model_dump()},
        "cluster": question.cluster.model_dump() | {"num_gpus": question.cluster.num_gpus},
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
        "optimizer": answer.settings.other.get("optimizer", DEFAULT_OPTIMIZER),
        "fixed": dict(question.fixed),
        "assumed": [*assumed, *answer.notes],
        "configurations_estimated": len(answer.layouts),
        "configurations_that_fit": len(answer.order),
        "estimating_s": estimated_s,
        "best": [show_layout(answer, int(i), sd=sd) for i in answer.order[:top]],
        "training": _training(question, best, tokens),
        "smallest_cluster": smallest,
        "scaling": scaling(question),
        "why_others_lose": why_others_lose(answer),
        "back_of_envelope": back_of_envelope(
            question.model,
            question.cluster,
            seq_len=question.seq_len,
            global_batch=question.global_batch,
            tokens=tokens,
        ),
    }
    document["total_s"] = time.perf_counter() - started
    return document


def _fits_nowhere(
    question: Question, answer: Answer, smallest: dict[str, Any] | None, model_name: str
) -> NoFeasiblePlanError:
    """The error for a cluster that is too small, or on which no layout is sure to fit."""
    i = int(np.argmin(answer.table.peak_memory_bytes))
    need, have = answer.table.peak_memory_bytes[i] / 2**30, answer.layouts.memory_bytes[i] / 2**30
    high = need * float(spread(MEMORY_SD))
    fixed = " ".join(f"{knob}={value}" for knob, value in question.fixed.items())
    more = f"{smallest['num_gpus']} of these GPUs would do. " if smallest else ""
    return NoFeasiblePlanError(
        f"{model_name} {'is not sure to fit any' if answer.verdicts[i] == 'too_close' else 'fits no'} layout of "
        f"{question.cluster.num_gpus} x {question.cluster.chip}{f' with {fixed}' if fixed else ''}: the smallest takes "
        f"{need:.1f} GiB (up to {high:.1f}) on a GPU that has {have:.1f}, {RESERVE:.0%} of it left free",
        hint=more + "More GPUs, larger ones, a lighter optimizer (--fix optimizer=adamw_8bit) or shorter sequences.",
    )


def _training(question: Question, best: dict[str, Any], tokens: float | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    seconds = tokens / best["tokens_per_s"]
    steps = tokens / (question.global_batch * question.seq_len)
    low, high = steps * best["step_time_low_s"], steps * best["step_time_high_s"]
    price = question.cluster.price_per_gpu_hour
    hourly = None if price is None else price * question.cluster.num_gpus
    return {
        "tokens": tokens,
        "steps": math.ceil(steps),
        "days": seconds / 86400,
        "days_low": low / 86400,
        "days_high": high / 86400,
        "gpu_hours": seconds / 3600 * question.cluster.num_gpus,
        "cost": None if hourly is None else seconds / 3600 * hourly,
        "cost_low": None if hourly is None else low / 3600 * hourly,
        "cost_high": None if hourly is None else high / 3600 * hourly,
    }
