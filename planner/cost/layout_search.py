"""Best layouts: every legal way to lay a transformer out on a cluster, priced at once; and why the others lose."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autoplan.errors import ConfigError
from autoplan.planner.cost.candidates import COMPILES, SCHEDULES, SHARDINGS, Floats
from autoplan.planner.cost.chips import find_chip
from autoplan.planner.cost.cluster import Cluster
from autoplan.planner.cost.layouts import (
    ATTENTION,
    CHECKPOINTING,
    OPTIMIZER_STATE_BYTES,
    PRECISIONS,
    STEP_TEMPORARY_BYTES,
    Layouts,
)
from autoplan.planner.cost.paper import MEMORY_PARTS, TIME_PARTS, Factors, PaperTable, price
from autoplan.planner.cost.rows import MEMORY_SD, RESERVE, Z_90, bound_of, dimension_columns, memory_verdict
from autoplan.planner.cost.transformer import Transformer

# The knobs of a layout, in the order of the search, and what they can be on the command line.
KNOBS = (
    "tp",
    "pp",
    "virtual_stages",
    "dp_shard",
    "sharding",
    "micro_batch",
    "checkpointing",
    "precision",
    "compile",
    "attention",
    "optimizer",
    "sequence_parallel",
)
LARGEST_MICRO_BATCH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked: a model, a cluster, the work, and what the user fixed."""

    model: Transformer
    cluster: Cluster
    seq_len: int
    global_batch: int
    fixed: Mapping[str, str]
    factors: Factors | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Every legal layout, priced; `order` sorts those that fit by step time."""

    layouts: Layouts
    table: PaperTable
    order: np.ndarray[Any, np.dtype[np.int64]]
    verdicts: list[str]

    @property
    def best(self) -> int | None:
        """The fastest that fits."""
        return int(self.order[0]) if len(self.order) else None


def search_layouts(question: Question) -> Answer:
    """Prices every legal layout.

    Raises:
        ConfigError: nothing is legal, and why.
    """
    layouts = enumerate_layouts(question)
    table = price(layouts, question.factors)
    room = float(np.exp(Z_90 * MEMORY_SD))
    high = table.peak_memory_bytes * room
    fits = high <= (1 - RESERVE) * layouts.memory_bytes
    order = np.flatnonzero(fits)
    order = order[np.argsort(table.step_time_s[order], kind="stable")]
    verdicts = [
        memory_verdict(peak / room, peak * room, memory)
        for peak, memory in zip(table.peak_memory_bytes, layouts.memory_bytes, strict=True)
    ]
    return Answer(layouts=layouts, table=table, order=order, verdicts=verdicts)


def enumerate_layouts(question: Question) -> Layouts:
    """Every legal layout as columns.

    Raises:
        ConfigError: nothing is legal, and why.
    """
    model, cluster, fixed = question.model, question.cluster, question.fixed
    unknown = set(fixed) - set(KNOBS)
    if unknown:
        raise ConfigError(f"{sorted(unknown)[0]!r} is no knob of a layout", hint=f"The knobs are {', '.join(KNOBS)}.")
    gpus = cluster.num_gpus
    rows: list[tuple[int, ...]] = []
    tps = [t for t in _powers(cluster.gpus_per_node) if model.heads % t == 0]
    pps = [p for p in range(1, model.layers + 1) if model.layers % p == 0]
    for tp, pp in itertools.product(_wanted(fixed, "tp", tps), _wanted(fixed, "pp", pps)):
        if gpus % (tp * pp) or model.heads % tp or model.layers < pp:
            continue
        dp = gpus // (tp * pp)
        if question.global_batch % dp:
            continue
        for shard, sharding in _shardings(dp, max(1, cluster.gpus_per_node // tp), fixed):
            for micro in _wanted(fixed, "micro_batch", _powers(min(LARGEST_MICRO_BATCH, question.global_batch // dp))):
                if (question.global_batch // dp) % micro:
                    continue
                stages = _virtual(model.layers, pp, question.global_batch // dp // micro)
                for virtual in _wanted(fixed, "virtual_stages", stages):
                    rows.append((tp, pp, dp // shard, shard, sharding, micro, virtual))
    if not rows:
        text = " ".join(f"{k}={v}" for k, v in fixed.items()) or "no fixed knobs"
        raise ConfigError(
            f"no layout of {gpus} GPUs is legal with {text} at a global batch of {question.global_batch}",
            hint=f"tp divides {model.heads} heads, pp divides {model.layers} layers, tp x pp divides {gpus}, and the "
            "data-parallel ranks times the micro-batch divide the global batch.",
        )
    return _columns(question, np.array(rows, dtype=np.float64))


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(max(1, limit).bit_length()) if 2**i <= limit]


def _wanted(fixed: Mapping[str, str], knob: str, values: list[int]) -> list[int]:
    if knob not in fixed:
        return values
    try:
        wanted = int(fixed[knob])
    except ValueError:
        raise ConfigError(f"{knob}={fixed[knob]} is no whole number", hint="") from None
    if wanted < 1:
        raise ConfigError(f"{knob}={wanted} is below 1", hint="")
    return [wanted]


def _virtual(layers: int, pp: int, micro_batches: int) -> list[int]:
    """1, or divisors of the layers per stage where micro-batches come in multiples of the stages."""
    if pp == 1 or micro_batches % pp:
        return [1]
    return [v for v in (1, 2, 4, 8) if (layers // pp) % v == 0]


def _shardings(dp: int, local: int, fixed: Mapping[str, str]) -> list[tuple[int, int]]:
    """(dp_shard, sharding): replicas, ZeRO-1 to -3 over all, ZeRO-3 within a node (HSDP)."""
    options = [(1, 0)]
    if dp > 1:
        options += [(dp, code) for code in (1, 2, 3)]
        if 1 < local < dp and dp % local == 0:
            options.append((local, 3))
    if "dp_shard" in fixed:
        shard = _wanted(fixed, "dp_shard", [])[0]
        if dp % shard:
            return []
        options = [(shard, code) for code in ((0,) if shard == 1 else (1, 2, 3))]
    if "sharding" in fixed:
        code = SHARDINGS.index(_code(fixed, "sharding", SHARDINGS, "zero3"))
        options = [option for option in options if option[1] == code]
    return options


def _code(fixed: Mapping[str, str], knob: str, allowed: tuple[str, ...], default: str) -> str:
    value = fixed.get(knob, default)
    if value not in allowed:
        raise ConfigError(f"{knob}={value} is not a value of {knob}", hint=f"It takes one of {', '.join(allowed)}.")
    return value


def _columns(question: Question, rows: Floats) -> Layouts:
    fixed, cluster = question.fixed, question.cluster
    chip = find_chip(cluster.chip)
    precision = _code(fixed, "precision", PRECISIONS, "bf16")
    peak = chip.peak(precision)
    if peak is None:
        have = ", ".join(p for p in PRECISIONS if chip.peak(p) is not None)
        raise ConfigError(f"{chip.sheet.name} has no {precision} units", hint=f"It has {have}: --fix precision=...")
    policies = (
        [CHECKPOINTING.index(_code(fixed, "checkpointing", CHECKPOINTING, "none"))]
        if "checkpointing" in fixed
        else [0, 1, 2]
    )
    optimizer = _code(fixed, "optimizer", tuple(OPTIMIZER_STATE_BYTES), "adamw")
    table = np.repeat(rows, len(policies), axis=0)
    size = len(table)
    checkpointing = np.tile(np.array(policies), len(rows))
    tp, pp, replicate, shard, sharding, micro, virtual = table.T
    sequence = fixed.get("sequence_parallel", "true").lower() in ("true", "1", "yes")
    constants = {
        **dimension_columns(question.model),
        "seq_len": float(question.seq_len),
        "peak_flops_per_s": peak,
        "memory_bytes_per_s": chip.sheet.memory_bandwidth_bytes_per_s.value,
        "memory_bytes": chip.sheet.memory_bytes.value,
        "processors": chip.processors,
        "matmul_efficiency": chip.matmul_efficiency,
        "gpus_per_node": float(cluster.gpus_per_node),
        "intra_bytes_per_s": 1e9 * cluster.intra_gbytes_per_s if cluster.intra_gbytes_per_s else chip.intra_bytes_per_s,
        "inter_bytes_per_s": (cluster.inter_gbits_per_s_per_gpu or 8.0) * 1e9 / 8,
        "global_batch": float(question.global_batch),
        "precision": PRECISIONS.index(precision),
        "compiled": COMPILES.index(_code(fixed, "compile", COMPILES, "block")),
        "attention": ATTENTION.index(_code(fixed, "attention", ATTENTION, "flash")),
        "optimizer_bytes": OPTIMIZER_STATE_BYTES[optimizer],
        "step_bytes": STEP_TEMPORARY_BYTES.get(optimizer, 0.0),
        "half_states": False,
        "master_states": False,
        "whole_gradients": False,
        "flat_parameters": False,
        "chunked_loss": False,
    }
    columns: dict[str, Any] = {name: np.full(size, value) for name, value in constants.items()}
    interleaved = SCHEDULES.index("interleaved_1f1b")
    columns |= {
        "tp": tp,
        "pp": pp,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "sharding": sharding.astype(np.int64),
        "micro_batch": micro,
        "virtual_stages": virtual,
        "schedule": np.where(virtual > 1, interleaved, SCHEDULES.index("1f1b")),
        "sequence_parallel": (tp > 1) & sequence,
        "checkpointing": checkpointing,
    }
    return Layouts(**{f.name: columns[f.name] for f in fields(Layouts)})


# What an answer says.


def describe(layouts: Layouts, i: int) -> dict[str, Any]:
    """The knobs of one layout."""
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
        "checkpointing": CHECKPOINTING[int(layouts.checkpointing[i])],
        "precision": PRECISIONS[int(layouts.precision[i])],
        "compile": COMPILES[int(layouts.compiled[i])],
        "attention": ATTENTION[int(layouts.attention[i])],
        "sequence_parallel": bool(layouts.sequence_parallel[i]),
    }


def show_layout(answer: Answer, i: int, *, spread: float) -> dict[str, Any]:
    """One priced layout as a document: knobs, time by part, memory by part, MFU, HFU, verdict."""
    table, layouts = answer.table, answer.layouts
    step = float(table.step_time_s[i])
    return {
        "layout": describe(layouts, i),
        "step_time_s": step,
        "step_time_low_s": step / spread,
        "step_time_high_s": step * spread,
        "tokens_per_s": float(layouts.global_batch[i] * layouts.seq_len[i] / step),
        "mfu": float(table.mfu[i]),
        "hfu": float(table.hfu[i]),
        "peak_memory_bytes": float(table.peak_memory_bytes[i]),
        "verdict": answer.verdicts[i],
        "bound": bound_of(table, i),
        "time_parts_s": {name.removesuffix("_s"): float(getattr(table, name)[i]) for name in TIME_PARTS},
        "memory_parts_bytes": {name.removesuffix("_bytes"): float(getattr(table, name)[i]) for name in MEMORY_PARTS},
    }


def why_others_lose(answer: Answer) -> list[dict[str, Any]]:
    """The best of each family that the best layout does not belong to: what it loses by, or why it does not fit."""
    best = answer.best
    if best is None:
        return []
    out = []
    step = answer.table.step_time_s
    fits = np.zeros(len(step), dtype=bool)
    fits[answer.order] = True
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
            family = np.flatnonzero(column == value)
            label = names[int(value)] if names else int(value)
            inside = family[fits[family]]
            if len(inside):
                i = int(inside[np.argmin(step[inside])])
                grown = {n: float(getattr(answer.table, n)[i] - getattr(answer.table, n)[best]) for n in TIME_PARTS}
                part = max(grown, key=lambda n: grown[n])
                why = f"{step[i] / step[best] - 1:+.0%} step time, most of it {part.removesuffix('_s')}"
            else:
                i = int(family[np.argmin(answer.table.peak_memory_bytes[family])])
                peak = float(answer.table.peak_memory_bytes[i])
                why = f"does not fit: at least {peak / 2**30:.0f} of {answer.layouts.memory_bytes[i] / 2**30:.0f} GiB"
            out.append({"family": f"{knob}={label}", "why": why, "best_of_family": describe(answer.layouts, i)})
    return out


def scaling(question: Question) -> list[dict[str, Any]]:
    """The best step time on an eighth of the GPUs up to four times as many, the global batch kept."""
    out: list[dict[str, Any]] = []
    gpus = question.cluster.num_gpus
    for count in sorted(
        {max(1, gpus * top // bottom) for top, bottom in ((1, 8), (1, 4), (1, 2), (1, 1), (2, 1), (4, 1))}
    ):
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
                "layout": describe(answer.layouts, i),
            }
        )
    return out


def smallest_cluster(question: Question) -> dict[str, Any] | None:
    """The fewest GPUs (parts of a node by powers of two, then whole nodes) on which some layout fits."""
    per_node = question.cluster.gpus_per_node
    counts = _powers(per_node) + [per_node * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)]
    for count in sorted(set(counts)):
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
    free = {k: v for k, v in question.fixed.items() if k not in ("dp_shard",)}
    try:
        return search_layouts(
            Question(
                model=question.model,
                cluster=cluster,
                seq_len=question.seq_len,
                global_batch=question.global_batch,
                fixed=free,
                factors=question.factors,
            )
        )
    except ConfigError:
        return None
