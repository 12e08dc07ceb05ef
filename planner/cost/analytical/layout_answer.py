"""What a search of layouts says: one layout in full, why the others lose, how the best scales, the fewest GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from autoplan.errors import ConfigError
from autoplan.planner.cost.analytical.explain import bound, step_interval
from autoplan.planner.cost.analytical.layout_search import Answer, Question, powers, search_layouts, without
from autoplan.planner.cost.analytical.step_time import TIME_PARTS, node_tokens
from autoplan.planner.cost.columns import CHECKPOINTING, SCHEDULES, SHARDINGS

FAMILIES: dict[str, tuple[str, ...] | None] = {
    "tp": None,
    "pp": None,
    "sharding": SHARDINGS,
    "checkpointing": CHECKPOINTING,
    "micro_batch": None,
    "virtual_stages": None,
    "gradient_sync": ("last", "every"),
}
"""What layouts are compared by, with the names of codes."""


def describe(answer: Answer, i: int) -> dict[str, Any]:
    """The knobs of one layout, under TrainingConfig's names and in its values: what `autoplan search --fix` takes."""
    layouts = answer.layouts
    pp = int(layouts.pp[i])
    return {
        "micro_batch": int(layouts.micro_batch[i]),
        "dp_replicate": int(layouts.dp_replicate[i]),
        "dp_shard": int(layouts.dp_shard[i]),
        "reshard_after_forward": bool(layouts.sharding[i] != SHARDINGS.index("shard_grad_op")),
        "gradient_sync": "every" if layouts.scatters_each[i] else "last",
        "tp": int(layouts.tp[i]),
        "pp": pp,
        "pp_schedule": SCHEDULES[int(layouts.schedule[i])],
        "pp_microbatches": int(layouts.accumulation[i] / layouts.passes[i]) if pp > 1 else 1,
        "virtual_stages": int(layouts.virtual_stages[i]),
        "checkpointing": CHECKPOINTING[int(layouts.checkpointing[i])],
        **answer.settings.knobs,
    }


def other_inputs(answer: Answer, i: int) -> dict[str, Any]:
    """What of one layout TrainingConfig has no knob for, so that autoplan cannot run it: what other trainers do."""
    sharding = SHARDINGS[int(answer.layouts.sharding[i])]
    return answer.settings.other | ({"sharding": sharding} if sharding in ("zero1", "zero2") else {})


def show_layout(answer: Answer, i: int, *, sd: float) -> dict[str, Any]:
    """One estimated layout as a document: knobs, time by part, memory by part, MFU, HFU, verdict.

    `input_tokens_per_s_needed`: what the loaders of a node have to deliver so that nothing waits for them.

    Args:
        answer: The search's.
        i: The layout.
        sd: Standard deviation of the logarithm of the step time.
    """
    table, layouts = answer.table, answer.layouts
    step = float(table.step_time_s[i])
    low, high = step_interval(table, layouts, i, sd=sd)
    needed = node_tokens(layouts.take(slice(i, i + 1)))[0] / (step - table.input_s[i])
    return {
        "layout": describe(answer, i),
        "other_inputs": other_inputs(answer, i),
        "accumulation": int(layouts.accumulation[i]),
        "sharding": SHARDINGS[int(layouts.sharding[i])],
        "step_time_s": step,
        "step_time_low_s": low,
        "step_time_high_s": high,
        "tokens_per_s": float(layouts.global_batch[i] * layouts.seq_len[i] / step),
        "mfu": float(table.mfu[i]),
        "hfu": float(table.hfu[i]),
        "peak_memory_bytes": float(table.peak_memory_bytes[i]),
        "verdict": str(answer.verdicts[i]),
        "bound": bound(table, i),
        "input_tokens_per_s_needed": float(needed),
        "time_parts_s": table.time_parts_s(i),
        "memory_parts_bytes": table.memory_parts_bytes(i),
    }


_KNOB_OF = {
    "sharding=ddp": "dp_shard=1",
    "sharding=shard_grad_op": "reshard_after_forward=False",
    "sharding=zero3": "reshard_after_forward=True",
}
"""What a search takes in place of an input of the estimate."""


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
                why = _too_large(answer, i)
            out.append(
                {
                    "family": _KNOB_OF.get(f"{knob}={label}", f"{knob}={label}"),
                    "why": why,
                    "best_of_family": describe(answer, i),
                }
            )
    return out


def _slower(answer: Answer, i: int, best: int) -> str:
    """What a layout takes more time for than the best one."""
    table = answer.table
    ratio = float(table.step_time_s[i] / table.step_time_s[best]) - 1
    if ratio < 5e-4:
        return "as fast: both wait for the input" if table.input_s[i] > 0 else "as fast, to a thousandth"
    here, there = table.time_parts_s(i), table.time_parts_s(best)
    part = max(TIME_PARTS, key=lambda name: here[name] - there[name])
    return f"{ratio:+.1%} step time, most of it {part}"


def _too_large(answer: Answer, i: int) -> str:
    """How much memory the smallest layout of a family takes."""
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
                "bound": bound(answer.table, i),
                "layout": describe(answer, i),
                "other_inputs": other_inputs(answer, i),
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
                "layout": describe(answer, answer.best),
                "other_inputs": other_inputs(answer, answer.best),
                "step_time_s": float(answer.table.step_time_s[answer.best]),
                "peak_memory_bytes": float(answer.table.peak_memory_bytes[answer.best]),
            }
    return None


def _try(question: Question, num_gpus: int) -> Answer | None:
    cluster = question.cluster.of(num_gpus)
    if cluster.nodes > 1 and cluster.inter_gbits_per_s_per_gpu is None:
        return None
    fixed = question.fixed
    if num_gpus != question.cluster.num_gpus:  # degrees for all GPUs are none for more or fewer
        fixed = without(fixed, "dp_shard", "dp_replicate", "dp", "accumulation", "pp_microbatches")
    try:
        return search_layouts(replace(question, cluster=cluster, fixed=fixed))
    except ConfigError:
        return None
