"""The answer of `autoplan estimate` for a cluster, as one document: the best layouts, why the others lose, how the best
scales, the fewest GPUs, the time to train and its cost."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from autoplan.errors import ConfigError, NoFeasiblePlanError
from autoplan.planner.cost.analytical.inputs import read_inputs
from autoplan.planner.cost.analytical.layout_search import Answer, Asked, powers
from autoplan.planner.cost.analytical.step_time import MEMORY_SD, TIME_PARTS, node_share
from autoplan.planner.cost.columns import CHECKPOINTING, SHARDINGS
from autoplan.planner.cost.prediction import RESERVE, spread


def estimate_cluster(
    question: Asked, *, model_name: str, tokens: float | None, assumed: tuple[str, ...], top: int
) -> dict[str, Any]:
    """Best layouts, time to train, cost, smallest cluster, scaling, why others lose.

    Raises:
        NoFeasiblePlanError: no layout fits, and by how much.
        ConfigError: no layout is legal.
    """
    started = time.perf_counter()
    answer = question.solve()
    estimated_s = time.perf_counter() - started
    smallest = smallest_cluster(question)
    if answer.best is None:
        raise _fits_nowhere(question, answer, smallest, model_name)
    best = show_layout(question, answer, answer.best)
    document: dict[str, Any] = {
        "status": "ok",
        "model": {"name": model_name, **question.show_model()},
        "cluster": question.cluster.model_dump() | {"num_gpus": question.cluster.num_gpus},
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
        "optimizer": answer.optimizer,
        "fixed": dict(question.fixed),
        "assumed": [*assumed, *answer.notes],
        "calibration": None if question.correction is None else question.correction.describe(),
        "configurations_estimated": len(answer.layouts),
        "configurations_that_fit": len(answer.order),
        "estimating_s": estimated_s,
        "best": [show_layout(question, answer, int(i)) for i in answer.order[:top]],
        "training": _training(question, best, tokens),
        "smallest_cluster": smallest,
        "scaling": scaling(question),
        "why_others_lose": why_others_lose(answer),
    }
    document["total_s"] = time.perf_counter() - started
    return document


def _fits_nowhere(
    question: Asked, answer: Answer, smallest: dict[str, Any] | None, model_name: str
) -> NoFeasiblePlanError:
    """The error for a cluster that is too small, or on which no layout is sure to fit."""
    i = int(np.argmin(answer.table.peak_memory_bytes))
    need, have = answer.table.peak_memory_bytes[i] / 2**30, answer.memory_bytes / 2**30
    high = need * float(spread(MEMORY_SD))
    fixed = " ".join(f"{knob}={value}" for knob, value in question.fixed.items())
    more = f"{smallest['num_gpus']} of these GPUs would do. " if smallest else ""
    return NoFeasiblePlanError(
        f"{model_name} {'is not sure to fit any' if answer.verdicts[i] == 'too_close' else 'fits no'} layout of "
        f"{question.cluster.num_gpus} x {question.cluster.chip}{f' with {fixed}' if fixed else ''}: the smallest takes "
        f"{need:.1f} GiB (up to {high:.1f}) on a GPU that has {have:.1f}, {RESERVE:.0%} of it left free",
        hint=more + "More GPUs, larger ones, a lighter optimizer or shorter sequences.",
    )


def _training(question: Asked, best: dict[str, Any], tokens: float | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    seconds = tokens / best["tokens_per_s"]
    steps = tokens / (question.global_batch * question.seq_len)
    low, high = steps * best["step_time_low_s"], steps * best["step_time_high_s"]
    return {
        "tokens": tokens,
        "steps": math.ceil(steps),
        "days": seconds / 86400,
        "days_low": low / 86400,
        "days_high": high / 86400,
        "gpu_hours": seconds / 3600 * question.cluster.num_gpus,
    }


FAMILIES: dict[str, tuple[str, ...] | None] = {
    "tp": None,
    "pp": None,
    "sharding": SHARDINGS,
    "checkpointing": CHECKPOINTING,
    "micro_batch": None,
    "virtual_stages": None,
    "gradient_sync": ("last", "every"),
}
"""The properties by which layouts are compared, with the names of codes."""


LAYOUT_KNOBS = (
    *("micro_batch", "dp_replicate", "dp_shard", "reshard_after_forward", "gradient_sync", "tp", "pp", "pp_schedule"),
    *("pp_microbatches", "virtual_stages", "checkpointing"),
)
"""The knobs that a layout is described by, whatever else was asked."""


def describe(answer: Answer, i: int) -> dict[str, Any]:
    """The knobs of one layout, under TrainingConfig's names and in its values: what `autoplan search --fix` takes."""
    return {name: getattr(answer.configs[i], name) for name in (*LAYOUT_KNOBS, *answer.knobs)}


def other_inputs(answer: Answer, i: int) -> dict[str, Any]:
    """The inputs of one layout for which TrainingConfig has no knob, so autoplan cannot run it: other trainers do."""
    sharding = SHARDINGS[int(answer.layouts.sharding[i])]
    shared = {"ep": int(answer.layouts.ep[i])} if answer.layouts.ep[i] > 1 else {}
    return {**answer.other} | shared | ({"sharding": sharding} if sharding in ("zero1", "zero2") else {})


def show_layout(question: Asked, answer: Answer, i: int) -> dict[str, Any]:
    """One estimated layout as a document: knobs, time by part, memory by part, MFU, HFU, verdict.

    `input_tokens_per_s_needed`: what the loaders of a node have to deliver so that nothing waits for them.
    """
    table, layouts = answer.table, answer.layouts
    step, tokens = float(table.step_time_s[i]), question.global_batch * question.seq_len
    low, high = table.step_interval(i)
    share = node_share(layouts.take(slice(i, i + 1)), question.cluster.gpus_per_node)[0]
    needed = share * tokens / (step - table.input_s[i])
    return {
        "layout": describe(answer, i),
        "other_inputs": other_inputs(answer, i),
        "accumulation": int(layouts.accumulation[i]),
        "sharding": SHARDINGS[int(layouts.sharding[i])],
        "step_time_s": step,
        "step_time_low_s": low,
        "step_time_high_s": high,
        "tokens_per_s": tokens / step,
        "mfu": float(table.mfu[i]),
        "hfu": float(table.hfu[i]),
        "peak_memory_bytes": float(table.peak_memory_bytes[i]),
        "verdict": str(answer.verdicts[i]),
        "bound": table.bound(i),
        "input_tokens_per_s_needed": float(needed),
        "time_parts_s": table.time_parts_s(i),
        "memory_parts_bytes": table.memory_parts_bytes(i),
    }


_KNOB_OF = {
    "sharding=ddp": "dp_shard=1",
    "sharding=shard_grad_op": "reshard_after_forward=False",
    "sharding=zero3": "reshard_after_forward=True",
}
"""The knob that a search takes in place of an input of the estimate."""


def why_others_lose(answer: Answer) -> list[dict[str, Any]]:
    """The best of each family that the best layout does not belong to: what it loses by, or why it does not fit."""
    best = answer.best
    if best is None:
        return []
    out = []
    for knob, names in FAMILIES.items():
        column = getattr(answer.layouts, "scatters_each" if knob == "gradient_sync" else knob)
        for value in np.unique(column):
            if value == column[best]:
                continue
            label = names[int(value)] if names else int(value)
            inside = answer.order[column[answer.order] == value]
            if len(inside):
                i = int(inside[0])
                why = _slower(answer, i, best)
            else:
                family = np.flatnonzero(column == value)
                i = int(family[np.argmin(answer.table.peak_memory_bytes[family])])
                need, have = answer.table.peak_memory_bytes[i] / 2**30, answer.memory_bytes / 2**30
                why = "too close to call" if answer.verdicts[i] == "too_close" else "does not fit"
                why += f": at least {need:.1f} of {have:.1f} GiB on a GPU"
            out.append(
                {
                    "family": _KNOB_OF.get(f"{knob}={label}", f"{knob}={label}"),
                    "why": why,
                    "best_of_family": describe(answer, i),
                }
            )
    return out


def _slower(answer: Answer, i: int, best: int) -> str:
    """The extra time of a layout over the best one, and the part of the step that takes most of it."""
    table = answer.table
    ratio = float(table.step_time_s[i] / table.step_time_s[best]) - 1
    if ratio < 5e-4:
        return "as fast: both wait for the input" if table.input_s[i] > 0 else "as fast, to a thousandth"
    here, there = table.time_parts_s(i), table.time_parts_s(best)
    part = max(TIME_PARTS, key=lambda name: here[name] - there[name])
    return f"{ratio:+.1%} step time, most of it {part}"


def scaling(question: Asked) -> list[dict[str, Any]]:
    """The best step time on an eighth of the GPUs up to four times as many, the global batch kept."""
    out: list[dict[str, Any]] = []
    gpus = question.cluster.num_gpus
    shares = ((1, 8), (1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
    for count in sorted({question.cluster.of(max(1, gpus * top // bottom)).num_gpus for top, bottom in shares}):
        answer = best_on(question, count)
        if answer is None or answer.best is None:
            apart = count > question.cluster.gpus_per_node and question.cluster.inter_gbits_per_s_per_gpu is None
            why = "no link between nodes is given" if apart else "no legal layout" if answer is None else "nothing fits"
            out.append({"num_gpus": count, "step_time_s": None, "why": why})
            continue
        i = answer.best
        step = float(answer.table.step_time_s[i])
        out.append(
            {
                "num_gpus": count,
                "step_time_s": step,
                "tokens_per_s": question.global_batch * question.seq_len / step,
                "mfu": float(answer.table.mfu[i]),
                "bound": answer.table.bound(i),
                "layout": describe(answer, i),
                "other_inputs": other_inputs(answer, i),
            }
        )
    return out


def smallest_cluster(question: Asked) -> dict[str, Any] | None:
    """The fewest GPUs (parts of a node by powers of two, then whole nodes, the cluster itself) on which some layout
    fits."""
    per_node = question.cluster.gpus_per_node
    counts = powers(per_node) + [per_node * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)]
    for count in sorted({*counts, question.cluster.num_gpus}):
        answer = best_on(question, count)
        if answer is not None and answer.best is not None:
            return {
                "num_gpus": count,
                "layout": describe(answer, answer.best),
                "other_inputs": other_inputs(answer, answer.best),
                "step_time_s": float(answer.table.step_time_s[answer.best]),
                "peak_memory_bytes": float(answer.table.peak_memory_bytes[answer.best]),
            }
    return None


def best_on(question: Asked, num_gpus: int) -> Answer | None:
    """The answer for so many of the cluster's GPUs; None: no link between nodes is known, or no layout is legal."""
    cluster = question.cluster.of(num_gpus)
    if cluster.nodes > 1 and cluster.inter_gbits_per_s_per_gpu is None:
        return None
    fixed = question.fixed
    if num_gpus != question.cluster.num_gpus:  # degrees for all GPUs are none for more or fewer
        degrees = ("dp_shard", "dp_replicate", "dp", "accumulation", "pp_microbatches")
        fixed = {name: value for name, value in read_inputs(fixed).values.items() if name not in degrees}
    try:
        return replace(question, cluster=cluster, fixed=fixed).solve()
    except ConfigError:
        return None
