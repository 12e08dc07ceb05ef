"""Best layouts: every legal layout of a transformer on a cluster, estimated at once."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoplan.errors import ConfigError
from autoplan.planner.cost.analytical.cluster import Cluster, find_chip
from autoplan.planner.cost.analytical.inputs import (
    Settings,
    check_names,
    flag,
    read_inputs,
    read_settings,
    read_sharding,
    whole,
)
from autoplan.planner.cost.analytical.layouts import Layout, contradiction, make_layouts
from autoplan.planner.cost.analytical.step_time import EstimateTable, estimate_layouts, memory_verdicts
from autoplan.planner.cost.analytical.transformer import Transformer
from autoplan.planner.cost.columns import CHECKPOINTING, Columns
from autoplan.planner.cost.correction import Correction
from autoplan.strategies.config import INTERLEAVED_SCHEDULES, PLAIN, TrainingConfig
from autoplan.strategies.knob_text import check_knob
from autoplan.strategies.techniques.degrees import VIRTUAL_STAGES

LARGEST_MICRO_BATCH = 16
DEFAULT_OPTIMIZER = "adamw"


@dataclass(frozen=True, kw_only=True)
class Asked(ABC):
    """What is asked of a cluster: the work, and what the user fixed, as text by name."""

    cluster: Cluster
    seq_len: int
    global_batch: int
    fixed: Mapping[str, str]
    correction: Correction | None = None

    @abstractmethod
    def solve(self) -> Answer:
        """Every legal layout with its estimate; ConfigError where none is legal."""

    @abstractmethod
    def show_model(self) -> dict[str, Any]:
        """The model as the answer has it."""


@dataclass(frozen=True, kw_only=True)
class Question(Asked):
    """The question of an estimate in closed form."""

    model: Transformer

    def solve(self) -> Answer:
        """Estimates every legal layout.

        Raises:
            ConfigError: nothing is legal, and why.
        """
        inputs = read_inputs(self.fixed)
        check_names(inputs.values)
        chip = find_chip(self.cluster.chip)
        # of knobs that a search varies by itself the values that are never slower, nor larger, in the closed form
        precision = next((p for p in ("bf16", "fp16") if chip.peak(p) is not None), "fp32")
        settings = read_settings(inputs.values, self.model, chip, {"precision": precision, "compile": "block"})
        _check_fixed(self, inputs.values)
        found = [
            replace(layout, config=layout.config.model_copy(update=settings.knobs | {"checkpointing": policy}))
            for layout in _legal_degrees(self, inputs.values, settings)
            for policy in _wanted(inputs.values, "checkpointing", CHECKPOINTING)
        ]
        if not found:
            raise _nothing_legal(self)
        intra, inter = self.cluster.intra_gbytes_per_s, self.cluster.inter_gbits_per_s_per_gpu
        columns = settings.columns | {
            "seq_len": float(self.seq_len),
            "gpus_per_node": float(self.cluster.gpus_per_node),
            "intra_bytes_per_s": 1e9 * intra if intra else chip.intra_bytes_per_s,
            "inter_bytes_per_s": (inter or 8.0) * 1e9 / 8,  # on one node nothing passes between nodes
            "input_tokens_per_s": self.cluster.input_tokens_per_s or np.inf,
        }
        layouts = make_layouts(found, [columns])
        table = estimate_layouts(layouts, self.correction)
        verdicts = memory_verdicts(table.peak_memory_bytes, layouts.memory_bytes)
        return Answer(
            configs=[layout.config for layout in found],
            layouts=layouts,
            table=table,
            order=in_order(table, verdicts),
            verdicts=verdicts,
            knobs=settings.knobs,
            other=settings.other,
            optimizer=settings.other.get("optimizer", DEFAULT_OPTIMIZER),
            memory_bytes=float(layouts.memory_bytes[0]),
            notes=inputs.notes,
        )

    def show_model(self) -> dict[str, Any]:
        """The dimensions."""
        return {"parameters": self.model.parameters, **self.model.model_dump()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Every legal layout with its estimate.

    Attributes:
        configs: The knobs of each layout.
        order: Those that fit, sorted by step time, and equal ones by what the GPUs take.
        verdicts: Of each layout.
        knobs, other: What all layouts have in common; `other` are inputs that no knob says.
        optimizer: Its name.
        memory_bytes: Of one GPU.
        notes: What of the fixed inputs was read as something else, or changes nothing; and what was assumed.
    """

    configs: Sequence[TrainingConfig]
    layouts: Columns
    table: EstimateTable
    order: np.ndarray[Any, np.dtype[np.int64]]
    verdicts: np.ndarray[Any, np.dtype[np.str_]]
    knobs: Mapping[str, Any]
    other: Mapping[str, Any]
    optimizer: str
    memory_bytes: float
    notes: tuple[str, ...]

    @property
    def best(self) -> int | None:
        """The fastest that fits."""
        return int(self.order[0]) if len(self.order) else None


def in_order(table: EstimateTable, verdicts: np.ndarray[Any, np.dtype[np.str_]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The places of layouts that fit: the fastest first, and of equal ones those that the GPUs are done with first."""
    fitting = np.flatnonzero(verdicts == "fits")
    busy = table.step_time_s - table.input_s
    return fitting[np.lexsort((busy[fitting], table.step_time_s[fitting]))]


def _nothing_legal(question: Question) -> ConfigError:
    text = " ".join(f"{k}={v}" for k, v in question.fixed.items()) or "no fixed knobs"
    gpus, model = question.cluster.num_gpus, question.model
    return ConfigError(
        f"no layout of {gpus} GPUs is legal with {text} at a global batch of {question.global_batch}",
        hint=f"tp divides {model.heads} heads, {model.kv_heads} key-value heads and the "
        f"{question.cluster.gpus_per_node} GPUs of a node; pp divides {model.layers} layers; tp x pp x cp "
        f"divides {gpus}; ep divides the data-parallel ranks x cp; a pipeline takes at least pp "
        "micro-batches; the data-parallel ranks times the micro-batch divide the global batch.",
    )


def _check_fixed(question: Question, values: Mapping[str, str]) -> None:
    """Raises where what is fixed contradicts itself, whatever the rest.

    Raises:
        ConfigError: what contradicts what.
    """
    shard, virtual = whole(values, "dp_shard", 0), whole(values, "virtual_stages", 0)
    every = values.get("gradient_sync") == "every"
    # what is not fixed is taken as it goes with the rest
    sharding = read_sharding(values) or ("zero3" if shard > 1 or (every and shard == 0) else "ddp")
    interleaves = virtual > 1 or values.get("pp_schedule") in INTERLEAVED_SCHEDULES
    degrees = {
        "tp": whole(values, "tp", 1),
        "pp": whole(values, "pp", 2 if interleaves else 1),
        "dp_replicate": whole(values, "ep", 1),
        "virtual_stages": virtual or (2 if interleaves else 1),
        "pp_schedule": values.get("pp_schedule", "interleaved_1f1b" if interleaves else "1f1b"),
        "dp_shard": shard or (1 if sharding == "ddp" else 2),
        "gradient_sync": "every" if every else "last",
    }
    layout = Layout(
        config=PLAIN.model_copy(update=degrees),
        sharding=sharding,
        accumulation=2,
        sequence_parallel=flag(values, "sequence_parallel", False) if "tp" in values else None,
        flat_parameters=flag(values, "flat_parameters", False) and "sharding" in values,
        cp=whole(values, "cp", 1),
        ep=whole(values, "ep", 1),
    )
    reason = contradiction(layout, question.model, question.seq_len)
    if reason is not None:
        raise ConfigError(reason[0], hint=reason[1])


def _legal_degrees(question: Question, values: Mapping[str, str], settings: Settings) -> Iterator[Layout]:
    """Every legal combination of degrees with its micro-batch, other knobs plain.

    As a search offers them: tp within a node, at least pp micro-batches a pass. Micro-batches are powers of two.
    """
    model, cluster = question.model, question.cluster
    tps = [t for t in powers(cluster.gpus_per_node) if model.heads % t == 0 and model.kv_heads % t == 0]
    pps = [p for p in range(1, model.layers + 1) if model.layers % p == 0]
    experts_shared = [whole(values, "ep", 1)] if "ep" in values or not model.experts else powers(model.experts)
    if settings.knobs["compile"] == "model":
        pps = [1]  # a stage leaves the model's forward where its blocks end
    cp = whole(values, "cp", 1)
    for tp, pp in itertools.product(_wanted(values, "tp", tps), _wanted(values, "pp", pps)):
        ranks = cluster.num_gpus // (tp * pp * cp)
        if cluster.num_gpus % (tp * pp * cp) or question.global_batch % ranks or whole(values, "dp", ranks) != ranks:
            continue
        share = question.global_batch // ranks
        local = max(1, cluster.gpus_per_node // tp)
        for shard, sharding in _shardings(ranks, local, pp, values):
            for micro in _wanted(values, "micro_batch", powers(min(LARGEST_MICRO_BATCH, share))):
                if share % micro or whole(values, "accumulation", share // micro) != share // micro:
                    continue
                base = {"micro_batch": micro, "tp": tp, "pp": pp, "dp_replicate": ranks // shard, "dp_shard": shard}
                base["reshard_after_forward"] = sharding != "shard_grad_op"
                for more in _schedules(question, values, pp, share // micro):
                    for sync in _wanted(values, "gradient_sync", ("last", "every")):
                        config = PLAIN.model_copy(update={**base, **more, "gradient_sync": sync})
                        for ep in experts_shared:
                            layout = Layout(
                                config=config,
                                sharding=sharding,
                                accumulation=share // micro,
                                sequence_parallel=flag(values, "sequence_parallel", True) if tp > 1 else None,
                                cp=cp,
                                ep=ep,
                            )
                            if contradiction(layout, model, question.seq_len) is None:
                                yield layout


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to a limit."""
    return [2**i for i in range(max(1, limit).bit_length()) if 2**i <= limit]


def _wanted(values: Mapping[str, str], knob: str, offered: Sequence[Any]) -> Sequence[Any]:
    return [check_knob(knob, values[knob])] if knob in values else offered


def _schedules(question: Question, values: Mapping[str, str], pp: int, micro_batches: int) -> Iterator[dict[str, Any]]:
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
        schedule = check_knob("pp_schedule", schedule)
        yield {"virtual_stages": virtual, "pp_schedule": schedule, "pp_microbatches": micro_batches}


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
