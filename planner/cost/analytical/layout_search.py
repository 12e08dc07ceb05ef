"""Best layouts: every legal way to lay a transformer out on a cluster, priced at once; and why the others lose."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autoplan.errors import ConfigError
from autoplan.planner.cost.analytical.chips import find_chip
from autoplan.planner.cost.analytical.cluster import Cluster
from autoplan.planner.cost.analytical.layouts import (
    ATTENTION,
    CHECKPOINTING,
    OPTIMIZER_STATE_BYTES,
    PRECISIONS,
    STEP_TEMPORARY_BYTES,
    Layouts,
    chip_columns,
    dimension_columns,
)
from autoplan.planner.cost.analytical.step_time import Factors, PaperTable, price
from autoplan.planner.cost.analytical.transformer import Transformer
from autoplan.planner.cost.analytical.verdicts import MEMORY_SD, RESERVE, Z_90, memory_verdict
from autoplan.planner.cost.candidates import COMPILES, SCHEDULES, SHARDINGS, Floats

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
DEFAULT_OPTIMIZER = "adamw"


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
    """Every legal layout, priced; `order` sorts those that fit by step time, and equal ones by what the GPUs take."""

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
    busy = table.step_time_s - table.input_s
    order = order[np.lexsort((busy[order], table.step_time_s[order]))]
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
    tps = [t for t in powers(cluster.gpus_per_node) if model.heads % t == 0]
    pps = [p for p in range(1, model.layers + 1) if model.layers % p == 0]
    for tp, pp in itertools.product(_wanted(fixed, "tp", tps), _wanted(fixed, "pp", pps)):
        if gpus % (tp * pp) or model.heads % tp or model.layers < pp:
            continue
        dp = gpus // (tp * pp)
        if question.global_batch % dp:
            continue
        for shard, sharding in _shardings(dp, max(1, cluster.gpus_per_node // tp), fixed):
            for micro in _wanted(fixed, "micro_batch", powers(min(LARGEST_MICRO_BATCH, question.global_batch // dp))):
                if (question.global_batch // dp) % micro:
                    continue
                stages = _wanted(fixed, "virtual_stages", [1, 2, 4, 8])
                for virtual in _virtual(stages, model.layers, pp, question.global_batch // dp // micro):
                    rows.append((tp, pp, dp // shard, shard, sharding, micro, virtual))
    if not rows:
        text = " ".join(f"{k}={v}" for k, v in fixed.items()) or "no fixed knobs"
        raise ConfigError(
            f"no layout of {gpus} GPUs is legal with {text} at a global batch of {question.global_batch}",
            hint=f"tp divides {model.heads} heads, pp divides {model.layers} layers, tp x pp divides {gpus}, and the "
            "data-parallel ranks times the micro-batch divide the global batch; --fix and --global-batch change these.",
        )
    return _columns(question, np.array(rows, dtype=np.float64))


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to a limit."""
    return [2**i for i in range(max(1, limit).bit_length()) if 2**i <= limit]


def _wanted(fixed: Mapping[str, str], knob: str, values: list[int]) -> list[int]:
    if knob not in fixed:
        return values
    try:
        wanted = int(fixed[knob])
    except ValueError:
        raise ConfigError(f"{knob}={fixed[knob]} is no whole number", hint=f"For example: --fix {knob}=2") from None
    if wanted < 1:
        raise ConfigError(f"{knob}={wanted} is below 1", hint=f"For example: --fix {knob}=1")
    return [wanted]


def _virtual(wanted: list[int], layers: int, pp: int, micro_batches: int) -> list[int]:
    """1, or divisors of the layers per stage where micro-batches come in multiples of the stages."""
    if pp == 1 or micro_batches % pp:
        return [v for v in wanted if v == 1]
    return [v for v in wanted if v == 1 or (layers // pp) % v == 0]


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
    value = fixed.get(knob, default).lower()
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
    optimizer = _code(fixed, "optimizer", tuple(OPTIMIZER_STATE_BYTES), DEFAULT_OPTIMIZER)
    table = np.repeat(rows, len(policies), axis=0)
    size = len(table)
    checkpointing = np.tile(np.array(policies), len(rows))
    tp, pp, replicate, shard, sharding, micro, virtual = table.T
    sequence = _code(fixed, "sequence_parallel", ("true", "false"), "true") == "true"
    constants = {
        **dimension_columns(question.model),
        "seq_len": float(question.seq_len),
        **chip_columns(chip, peak),
        "gpus_per_node": float(cluster.gpus_per_node),
        "intra_bytes_per_s": 1e9 * cluster.intra_gbytes_per_s if cluster.intra_gbytes_per_s else chip.intra_bytes_per_s,
        "inter_bytes_per_s": (cluster.inter_gbits_per_s_per_gpu or 8.0) * 1e9 / 8,
        "input_tokens_per_s": cluster.input_tokens_per_s or np.inf,
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
