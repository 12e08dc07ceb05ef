"""Best layouts: every legal layout of a transformer on a cluster, estimated at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autoplan.errors import ConfigError
from autoplan.planner.cost.analytical.chips import find_chip
from autoplan.planner.cost.analytical.cluster import Cluster
from autoplan.planner.cost.analytical.explain import memory_verdicts
from autoplan.planner.cost.analytical.inputs import (
    IGNORED_KNOBS,
    Settings,
    check_names,
    flag,
    read_inputs,
    read_settings,
    read_sharding,
    whole,
)
from autoplan.planner.cost.analytical.layouts import Layouts
from autoplan.planner.cost.analytical.legality import Degrees, contradiction
from autoplan.planner.cost.analytical.step_time import EstimateTable, Factors, estimate_layouts
from autoplan.planner.cost.analytical.transformer import Transformer
from autoplan.planner.cost.columns import CHECKPOINTING, SCHEDULES, SHARDINGS, checkpointed_share
from autoplan.strategies.knob_input import check_knob
from autoplan.strategies.techniques.degrees import VIRTUAL_STAGES

LARGEST_MICRO_BATCH = 16
DEFAULT_OPTIMIZER = "adamw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked: a model, a cluster, the work, and what the user fixed, as text by name."""

    model: Transformer
    cluster: Cluster
    seq_len: int
    global_batch: int
    fixed: Mapping[str, str]
    factors: Factors | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Every legal layout with its estimate.

    Attributes:
        order: Those that fit, sorted by step time, and equal ones by what the GPUs take.
        verdicts: Of each layout.
        settings: What all layouts have in common.
        notes: What of the fixed inputs was read as something else, or changes nothing.
    """

    layouts: Layouts
    table: EstimateTable
    order: np.ndarray[Any, np.dtype[np.int64]]
    verdicts: np.ndarray[Any, np.dtype[np.str_]]
    settings: Settings
    notes: tuple[str, ...]

    @property
    def best(self) -> int | None:
        """The fastest that fits."""
        return int(self.order[0]) if len(self.order) else None


def search_layouts(question: Question) -> Answer:
    """Estimates every legal layout.

    Raises:
        ConfigError: nothing is legal, and why.
    """
    layouts, settings, notes = _enumerate(question)
    table = estimate_layouts(layouts, question.factors)
    verdicts = memory_verdicts(table.peak_memory_bytes, layouts.memory_bytes)
    order = np.flatnonzero(verdicts == "fits")
    busy = table.step_time_s - table.input_s
    order = order[np.lexsort((busy[order], table.step_time_s[order]))]
    return Answer(layouts=layouts, table=table, order=order, verdicts=verdicts, settings=settings, notes=notes)


def enumerate_layouts(question: Question) -> Layouts:
    """Every legal layout as columns.

    Raises:
        ConfigError: nothing is legal, and why.
    """
    return _enumerate(question)[0]


def without(fixed: Mapping[str, str], *knobs: str) -> dict[str, str]:
    """What is fixed, but for some knobs, under whatever name they were given."""
    return {name: value for name, value in read_inputs(fixed).values.items() if name not in knobs}


def defaults(question: Question) -> dict[str, str]:
    """Of knobs that a search varies by itself the values that are never slower, nor larger, in the closed form.

    Precision in 16 bits and compiled blocks: a search of this machine would try the others too.
    """
    chip = find_chip(question.cluster.chip)
    precision = next((p for p in ("bf16", "fp16") if chip.peak(p) is not None), "fp32")
    return {"precision": precision, "compile": "block"}


def _enumerate(question: Question) -> tuple[Layouts, Settings, tuple[str, ...]]:
    inputs = read_inputs(question.fixed)
    values = inputs.values
    check_names(values)
    settings = read_settings(values, question.model, find_chip(question.cluster.chip), defaults(question))
    _check_fixed(question, values)
    rows = list(_legal_degrees(question, values, settings))
    if not rows:
        text = " ".join(f"{k}={v}" for k, v in question.fixed.items()) or "no fixed knobs"
        gpus, model = question.cluster.num_gpus, question.model
        raise ConfigError(
            f"no layout of {gpus} GPUs is legal with {text} at a global batch of {question.global_batch}",
            hint=f"tp divides {model.heads} heads, {model.kv_heads} key-value heads and the "
            f"{question.cluster.gpus_per_node} GPUs of a node; pp divides {model.layers} layers; tp x pp divides "
            f"{gpus}; a pipeline takes at least pp micro-batches; the data-parallel ranks times the micro-batch divide "
            "the global batch.",
        )
    ignored = [f"{knob} changes nothing here ({why})" for knob, why in IGNORED_KNOBS.items() if knob in values]
    return _columns(question, values, settings, rows), settings, (*inputs.notes, *ignored)


def _check_fixed(question: Question, values: Mapping[str, str]) -> None:
    """Raises where what is fixed contradicts itself, whatever the rest.

    Raises:
        ConfigError: what contradicts what.
    """
    shard, virtual = whole(values, "dp_shard", 0), whole(values, "virtual_stages", 0)
    every = values.get("gradient_sync") == "every"
    # what is not fixed is taken as it goes with the rest
    sharding = read_sharding(values) or ("zero3" if shard > 1 or (every and shard == 0) else "ddp")
    interleaves = virtual > 1 or values.get("pp_schedule") in ("interleaved_1f1b", "zero_bubble")
    degrees = Degrees(
        tp=whole(values, "tp", 1),
        pp=whole(values, "pp", 2 if interleaves else 1),
        virtual_stages=virtual or (2 if interleaves else 1),
        pp_schedule=values.get("pp_schedule", "interleaved_1f1b" if interleaves else "1f1b"),
        dp_shard=shard or (1 if sharding == "ddp" else 2),
        sharding=sharding,
        gradient_sync="every" if every else "last",
        accumulation=2,
        sequence_parallel=flag(values, "sequence_parallel", False) if "tp" in values else None,
        flat_parameters=flag(values, "flat_parameters", False) and "sharding" in values,
    )
    reason = contradiction(degrees, question.model, question.seq_len)
    if reason is not None:
        raise ConfigError(reason[0], hint=reason[1])


def _legal_degrees(question: Question, values: Mapping[str, str], settings: Settings) -> Iterator[tuple[Degrees, int]]:
    """Every legal combination of degrees with its micro-batch, as (degrees, micro_batch).

    As a search offers them: tp within a node, at least pp micro-batches a pass. Micro-batches are powers of two.
    """
    model, cluster = question.model, question.cluster
    tps = [t for t in powers(cluster.gpus_per_node) if model.heads % t == 0 and model.kv_heads % t == 0]
    pps = [p for p in range(1, model.layers + 1) if model.layers % p == 0]
    if settings.knobs["compile"] == "model":
        pps = [1]  # a stage leaves the model's forward where its blocks end
    for tp, pp in itertools.product(_wanted(values, "tp", tps), _wanted(values, "pp", pps)):
        ranks = cluster.num_gpus // (tp * pp)
        if cluster.num_gpus % (tp * pp) or question.global_batch % ranks or whole(values, "dp", ranks) != ranks:
            continue
        share = question.global_batch // ranks
        local = max(1, cluster.gpus_per_node // tp)
        for shard, sharding in _shardings(ranks, local, pp, values):
            for micro in _wanted(values, "micro_batch", powers(min(LARGEST_MICRO_BATCH, share))):
                if share % micro or whole(values, "accumulation", share // micro) != share // micro:
                    continue
                base: dict[str, Any] = {
                    "tp": tp,
                    "pp": pp,
                    "dp_replicate": ranks // shard,
                    "dp_shard": shard,
                    "sharding": sharding,
                }
                for more in _schedules(question, values, pp, share // micro, ranks):
                    for sync in _gradient_syncs(values, pp, sharding, share // micro):
                        degrees = Degrees(**base, **more, gradient_sync=sync, accumulation=share // micro)
                        if contradiction(degrees, model, question.seq_len) is None:
                            yield degrees, micro


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to a limit."""
    return [2**i for i in range(max(1, limit).bit_length()) if 2**i <= limit]


def _wanted(values: Mapping[str, str], knob: str, offered: list[int]) -> list[int]:
    return [check_knob(knob, values[knob])] if knob in values else offered


def _schedules(
    question: Question, values: Mapping[str, str], pp: int, micro_batches: int, dp: int
) -> Iterator[dict[str, Any]]:
    """Schedules and stages per rank: one, or divisors of the layers of a rank where micro-batches come in multiples of
    the stages. With fewer micro-batches than stages some would never work."""
    per_pass = whole(values, "pp_microbatches", micro_batches)
    if pp == 1:
        if whole(values, "virtual_stages", 1) == 1 and values.get("pp_schedule", "1f1b") == "1f1b":
            yield {}
        return
    if micro_batches < pp or per_pass != micro_batches:
        return
    for virtual in _wanted(values, "virtual_stages", [1, *VIRTUAL_STAGES]):
        if virtual > 1 and (micro_batches % pp or (question.model.layers // pp) % virtual):
            continue
        schedule = values.get("pp_schedule", "interleaved_1f1b" if virtual > 1 else "1f1b")
        yield {"virtual_stages": virtual, "pp_schedule": check_knob("pp_schedule", schedule)}


def _gradient_syncs(values: Mapping[str, str], pp: int, sharding: str, accumulation: int) -> list[str]:
    legal = ["last"]
    if sharding in ("zero2", "shard_grad_op", "zero3") and pp == 1 and accumulation > 1:
        legal.append("every")
    if "gradient_sync" not in values:
        return legal
    wanted = check_knob("gradient_sync", values["gradient_sync"])
    return [wanted] if wanted in legal else []


def _shardings(dp: int, local: int, pp: int, values: Mapping[str, str]) -> list[tuple[int, str]]:
    """(dp_shard, sharding): replicas, FSDP over all ranks, and within a node (HSDP).

    FSDP with a pipeline keeps gathered parameters, as a search has it (techniques/degrees.py). ZeRO-1 and ZeRO-2 of
    other trainers where they are asked for.
    """
    said = read_sharding(values)
    sharded = ("shard_grad_op",) if pp > 1 else ("zero3", "shard_grad_op")
    if said in ("zero1", "zero2"):
        sharded = (said,)
    degrees = [1] + ([dp] if dp > 1 else []) + ([local] if 1 < local < dp and dp % local == 0 else [])
    if "dp_shard" in values or "dp_replicate" in values:
        shard = whole(values, "dp_shard", max(1, dp // whole(values, "dp_replicate", 1)))
        degrees = [shard] if shard * whole(values, "dp_replicate", dp // shard) == dp else []
    options = [(shard, kind) for shard in degrees for kind in (sharded if shard > 1 else ("ddp",))]
    if said is None and "reshard_after_forward" in values:
        return [option for option in options if option[1] != "shard_grad_op"]
    return [option for option in options if said in (None, option[1])]


def _columns(
    question: Question, values: Mapping[str, str], settings: Settings, rows: list[tuple[Degrees, int]]
) -> Layouts:
    """Each combination of degrees with each checkpointing policy, as columns."""
    wanted = [check_knob("checkpointing", values["checkpointing"])] if "checkpointing" in values else CHECKPOINTING
    policies = [policy for policy in CHECKPOINTING if policy in wanted]
    size = len(rows) * len(policies)
    columns: dict[str, Any] = {name: np.full(size, value) for name, value in settings.columns.items()}
    columns |= {name: np.full(size, value) for name, value in _cluster_columns(question).items()}
    columns |= {name: np.repeat(column, len(policies)) for name, column in _degree_columns(values, rows).items()}
    columns |= {
        "checkpointing": np.tile([CHECKPOINTING.index(policy) for policy in policies], len(rows)),
        "checkpointed": np.tile([checkpointed_share(p, question.model.layers) for p in policies], len(rows)),
    }
    return Layouts(**{f.name: columns[f.name] for f in fields(Layouts)})


def _cluster_columns(question: Question) -> dict[str, float]:
    cluster, chip = question.cluster, find_chip(question.cluster.chip)
    intra = cluster.intra_gbytes_per_s
    return {
        "seq_len": float(question.seq_len),
        "global_batch": float(question.global_batch),
        "gpus_per_node": float(cluster.gpus_per_node),
        "intra_bytes_per_s": 1e9 * intra if intra else chip.intra_bytes_per_s,
        # on one node nothing passes between nodes
        "inter_bytes_per_s": (cluster.inter_gbits_per_s_per_gpu or 8.0) * 1e9 / 8,
        "input_tokens_per_s": cluster.input_tokens_per_s or np.inf,
        "passes": 1.0,
    }


def _degree_columns(values: Mapping[str, str], rows: list[tuple[Degrees, int]]) -> dict[str, Any]:
    degrees = [row[0] for row in rows]
    sequence = flag(values, "sequence_parallel", True)

    def numbers(name: str) -> Any:
        return np.array([getattr(d, name) for d in degrees], dtype=np.float64)

    tp = numbers("tp")
    return {
        **{name: numbers(name) for name in ("pp", "virtual_stages", "dp_replicate", "dp_shard", "accumulation")},
        "tp": tp,
        "micro_batch": np.array([row[1] for row in rows], dtype=np.float64),
        "sharding": np.array([SHARDINGS.index(d.sharding) for d in degrees]),
        "schedule": np.array([SCHEDULES.index(d.pp_schedule) for d in degrees]),
        "scatters_each": np.array([d.gradient_sync == "every" for d in degrees]),
        "sequence_parallel": (tp > 1) & sequence,
    }
