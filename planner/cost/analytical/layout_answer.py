"""What a search of layouts says: one layout whole, why the others lose, how the best scales, the fewest GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from autoplan.errors import ConfigError
from autoplan.planner.cost.analytical.layout_search import Answer, Question, powers, search_layouts
from autoplan.planner.cost.analytical.layouts import ATTENTION, CHECKPOINTING, PRECISIONS, Layouts
from autoplan.planner.cost.analytical.memory import MEMORY_PARTS
from autoplan.planner.cost.analytical.step_time import TIME_PARTS, node_tokens
from autoplan.planner.cost.analytical.verdicts import bound_of, step_interval
from autoplan.planner.cost.candidates import COMPILES, SCHEDULES, SHARDINGS


def describe(layouts: Layouts, i: int) -> dict[str, Any]:
    """The knobs of one layout; `gradient_sync`: reduced at every micro-step or once, at the last one of a step."""
    every = layouts.sharding[i] >= SHARDINGS.index("zero2") and layouts.accumulation[i] > 1
    return {
        "tp": int(layouts.tp[i]),
        "pp": int(layouts.pp[i]),
        "dp_replicate": int(layouts.dp_replicate[i]),
        "dp_shard": int(layouts.dp_shard[i]),
        "sharding": SHARDINGS[int(layouts.sharding[i])],
        "virtual_stages": int(layouts.virtual_stages[i]),
        "schedule": SCHEDULES[int(layouts.schedule[i])],
        "micro_batch": int(layouts.micro_batch[i]),
        "accumulation": int(layouts.accumulation[i]),
        "gradient_sync": "every" if every and not layouts.whole_gradients[i] else "last",
        "checkpointing": CHECKPOINTING[int(layouts.checkpointing[i])],
        "precision": PRECISIONS[int(layouts.precision[i])],
        "compile": COMPILES[int(layouts.compiled[i])],
        "attention": ATTENTION[int(layouts.attention[i])],
        "sequence_parallel": bool(layouts.sequence_parallel[i]),
    }


def show_layout(answer: Answer, i: int, *, spread: float) -> dict[str, Any]:
    """One priced layout as a document: knobs, time by part, memory by part, MFU, HFU, verdict.

    `input_tokens_per_s_needed`: what the loaders of a node have to deliver so that nothing waits for them.
    """
    table, layouts = answer.table, answer.layouts
    step = float(table.step_time_s[i])
    low, high = step_interval(table, layouts, i, spread=spread)
    needed = node_tokens(layouts.take(slice(i, i + 1)))[0] / (step - table.input_s[i])
    return {
        "layout": describe(layouts, i),
        "step_time_s": step,
        "step_time_low_s": low,
        "step_time_high_s": high,
        "tokens_per_s": float(layouts.global_batch[i] * layouts.seq_len[i] / step),
        "mfu": float(table.mfu[i]),
        "hfu": float(table.hfu[i]),
        "peak_memory_bytes": float(table.peak_memory_bytes[i]),
        "verdict": answer.verdicts[i],
        "bound": bound_of(table, i),
        "input_tokens_per_s_needed": float(needed),
        "time_parts_s": {name.removesuffix("_s"): float(getattr(table, name)[i]) for name in TIME_PARTS},
        "memory_parts_bytes": {name.removesuffix("_bytes"): float(getattr(table, name)[i]) for name in MEMORY_PARTS},
    }


def why_others_lose(answer: Answer) -> list[dict[str, Any]]:
    """The best of each family that the best layout does not belong to: what it loses by, or why it does not fit."""
    best = answer.best
    if best is None:
        return []
    out = []
    columns: tuple[tuple[str, Any, tuple[str, ...] | None], ...] = (
        ("tp", answer.layouts.tp, None),
        ("pp", answer.layouts.pp, None),
        ("sharding", answer.layouts.sharding, SHARDINGS),
        ("checkpointing", answer.layouts.checkpointing, CHECKPOINTING),
        ("micro_batch", answer.layouts.micro_batch, None),
        ("virtual_stages", answer.layouts.virtual_stages, None),
    )
    for knob, column, names in columns:
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
                why = _too_large(answer, i)
            out.append({"family": f"{knob}={label}", "why": why, "best_of_family": describe(answer.layouts, i)})
    return out


def _slower(answer: Answer, i: int, best: int) -> str:
    """What a layout takes more time for than the best one."""
    table = answer.table
    ratio = float(table.step_time_s[i] / table.step_time_s[best]) - 1
    if ratio < 5e-4:
        return "as fast: both wait for the input" if table.input_s[i] > 0 else "as fast, to a thousandth"
    grown = {name: float(getattr(table, name)[i] - getattr(table, name)[best]) for name in TIME_PARTS}
    part = max(grown, key=lambda name: grown[name])
    return f"{ratio:+.1%} step time, most of it {part.removesuffix('_s')}"


def _too_large(answer: Answer, i: int) -> str:
    """How much memory the leanest layout of a family takes."""
    need, have = answer.table.peak_memory_bytes[i] / 2**30, answer.layouts.memory_bytes[i] / 2**30
    text = f"at least {need:.1f} of {have:.1f} GiB on a GPU"
    return f"too close to call: {text}" if answer.verdicts[i] == "too_close" else f"does not fit: {text}"


def scaling(question: Question) -> list[dict[str, Any]]:
    """The best step time on an eighth of the GPUs up to four times as many, the global batch kept."""
    out: list[dict[str, Any]] = []
    gpus = question.cluster.num_gpus
    shares = ((1, 8), (1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
    for count in sorted({question.cluster.of(max(1, gpus * top // bottom)).num_gpus for top, bottom in shares}):
        answer = _try(question, count)
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
                "bound": bound_of(answer.table, i),
                "layout": describe(answer.layouts, i),
            }
        )
    return out


def smallest_cluster(question: Question) -> dict[str, Any] | None:
    """The fewest GPUs (parts of a node by powers of two, then whole nodes, the cluster itself) on which some layout
    fits."""
    per_node = question.cluster.gpus_per_node
    counts = powers(per_node) + [per_node * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)]
    for count in sorted({*counts, question.cluster.num_gpus}):
        answer = _try(question, count)
        if answer is not None and answer.best is not None:
            return {
                "num_gpus": count,
                "layout": describe(answer.layouts, answer.best),
                "step_time_s": float(answer.table.step_time_s[answer.best]),
                "peak_memory_bytes": float(answer.table.peak_memory_bytes[answer.best]),
            }
    return None


def _try(question: Question, num_gpus: int) -> Answer | None:
    cluster = question.cluster.of(num_gpus)
    if cluster.nodes > 1 and cluster.inter_gbits_per_s_per_gpu is None:
        return None
    # a dp_shard for all GPUs is none for more or fewer
    other = num_gpus != question.cluster.num_gpus
    fixed = {knob: value for knob, value in question.fixed.items() if not (other and knob == "dp_shard")}
    try:
        return search_layouts(replace(question, cluster=cluster, fixed=fixed))
    except ConfigError:
        return None
