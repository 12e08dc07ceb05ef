"""Layouts: transformers on clusters as candidates, one row per configuration of one model on one cluster.

And what contradicts itself in a layout, said in a sentence instead of being estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np

from autoplan.planner.cost.analytical.transformer import Transformer
from autoplan.planner.cost.columns import CHECKPOINTING, SHARDINGS, Bools, ConfigTable, Floats, Ints, config_columns
from autoplan.planner.cost.offload import OFFLOADS
from autoplan.planner.cost.operations import Shape
from autoplan.planner.cost.states import ModelSize, StateWidths, state_widths
from autoplan.planner.cost.traced.candidates import FP8, MICRO_STEP_KNOBS, Candidates
from autoplan.planner.trace.model_profile import PLAIN as PLAIN_VARIANT
from autoplan.strategies.config import PLAIN, Attention, TrainingConfig
from autoplan.strategies.techniques.rules import incompatible

# own: as the model has it, which for transformers' models is sdpa (fused attention on GPUs)
ATTENTION = get_args(Attention)
# fused: never holds all logits. chunked: other trainers' loss, which casts its logits to fp32 a chunk at a time
LOSSES = ("full", "fused", "chunked")
OPTIMIZER_STATE_BYTES = {
    "adamw": 8.0,
    "adam": 8.0,
    "adamw_8bit": 2.0,
    "sgd_momentum": 4.0,
    "sgd": 0.0,
    "lion": 4.0,
}
SIZES = (
    *("hidden", "heads", "attention_width", "kv_width", "value_width", "ffn", "gated", "vocab", "dense", "experts"),
    *("active", "expert_ffn", "shared_ffn", "query_rank", "kv_rank", "rope_dim", "apart"),
)
"""The columns that are fields of `operations.Shape` and follow from the model alone."""
# A foreach Adam step has one temporary of the size of what it steps, the square root of the second moment, in fp32
# (torch.optim, "Algorithms").
FOREACH_TEMPORARY_BYTES = {"adamw": 4.0, "adam": 4.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layouts(Candidates):
    """Candidates, each with its transformer and its chip; attention and loss are codes of ATTENTION and LOSSES.

    Attributes:
        attention_width, kv_width: Width of queries; of keys. The other dimensions are those of
            `operations.Shape`. block_experts: parameters of experts in the mean block.
        trainable: Parameters that are trained; the others are frozen (LoRA).
        gradient_bytes: Of a gradient; 0: as `states` has it.
        frozen_bytes: Of a frozen parameter that is quantised; 0: as the others.
        ring: Context parallelism sends keys and values round; else it gathers them.
        imbalance_sd: Standard deviation of the logarithm of what the busiest rank's experts get over an equal share.
        peak_flops_per_s: Dense, in the row's precision; memory_*: of the chip; processors: multiprocessors (SMs).
        matmul_efficiency: What large matrix products reach of the peak before any calibration.
        intra_bytes_per_s, inter_bytes_per_s: Per GPU, one direction.
        input_tokens_per_s: What all loader workers of one node deliver together; infinite where it is not known.
        optimizer_bytes: Per trained parameter, the optimizer's own states.
        foreach_bytes: Per trained parameter, what a foreach step of this optimizer allocates and frees.
        flat_parameters: Frozen weights have gradients too, as in a FlatParameter of FSDP1.
    """

    layers: Floats
    hidden: Floats
    heads: Floats
    attention_width: Floats
    kv_width: Floats
    ffn: Floats
    vocab: Floats
    gated: Bools
    value_width: Floats
    dense: Floats
    experts: Floats
    active: Floats
    expert_ffn: Floats
    shared_ffn: Floats
    query_rank: Floats
    kv_rank: Floats
    rope_dim: Floats
    apart: Bools
    block_experts: Floats
    document_len: Floats
    capacity: Floats
    imbalance_sd: Floats
    ring: Bools
    frozen_bytes: Floats
    gradient_bytes: Floats
    parameters: Floats
    block_parameters: Floats
    trainable: Floats
    seq_len: Floats
    global_batch: Floats
    peak_flops_per_s: Floats
    memory_bytes_per_s: Floats
    memory_bytes: Floats
    processors: Floats
    matmul_efficiency: Floats
    gpus_per_node: Floats
    intra_bytes_per_s: Floats
    inter_bytes_per_s: Floats
    input_tokens_per_s: Floats
    attention: Ints
    loss: Ints
    optimizer_bytes: Floats
    foreach_bytes: Floats
    flat_parameters: Bools

    @property
    def trained_share(self) -> Floats:
        """Share of the parameters that is trained: 1 but for LoRA and the like."""
        return self.trainable / self.parameters

    @property
    def selective(self) -> Bools:
        """Checkpointing per operation: products' results are kept, the rest is computed again."""
        return np.asarray(self.checkpointing == CHECKPOINTING.index("selective"))

    @property
    def eager_attention(self) -> Bools:
        """Attention that writes its scores to memory."""
        return np.asarray(self.attention == ATTENTION.index("eager"))

    @property
    def compute_width(self) -> Floats:
        """Bytes of an element that products read and write."""
        return np.where(self.half, 2.0, 4.0)

    @property
    def shape(self) -> Shape:
        """What the operations of each row follow from."""
        said = {name: getattr(self, name) for name in (*SIZES, "seq_len", "document_len", "capacity", "selective")}
        return Shape(
            width=self.compute_width,
            plain_attention=self.eager_attention,
            fp8=self.fp8 > 0,
            trained=self.trained_share,
            widened=np.where(self.frozen_bytes > 0, self.block_parameters * (self.frozen_bytes + 2.0), 0.0),
            **said,
        )

    @property
    def size(self) -> ModelSize:
        """Elements, as the shared equations take them."""
        return ModelSize(
            parameters=self.parameters,
            trainable=self.trainable,
            num_blocks=self.layers,
            block_parameters=self.block_parameters,
            largest_parameter=self.vocab * self.hidden,
            flat_parameters=self.flat_parameters,
            expert_share=self.layers * self.block_experts / self.parameters,
            frozen_bytes=self.frozen_bytes,
        )

    @property
    def widths(self) -> StateWidths:
        """Bytes per parameter of each state."""
        widths = state_widths(
            self, device="cuda", optimizer_bytes=self.optimizer_bytes, temporary_bytes=self.foreach_bytes
        )
        if not self.gradient_bytes.any():
            return widths
        return replace(widths, gradient=np.where(self.gradient_bytes > 0, self.gradient_bytes, widths.gradient))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One layout before it is a row: its knobs, and what TrainingConfig has no knob for.

    Attributes:
        sharding: One of SHARDINGS; zero1 and zero2 are other trainers'.
        accumulation: Micro-batches per optimizer step and data-parallel rank.
        sequence_parallel: None where nothing was said: with tensor parallelism.
        cp, ep: Ranks that share each sequence; of the data-parallel ranks those that share the experts.
    """

    config: TrainingConfig
    sharding: str
    accumulation: int
    sequence_parallel: bool | None = None
    flat_parameters: bool = False
    cp: int = 1
    ep: int = 1

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.config.micro_batch * self.accumulation * self.config.dp


def make_layouts(layouts: Sequence[Layout], rows: Sequence[Mapping[str, Any]]) -> Layouts:
    """Layouts as columns.

    Args:
        layouts: One per row.
        rows: For each the columns that its knobs do not fill; one mapping: the same for all.
    """
    table = ConfigTable.of([layout.config for layout in layouts])
    nothing = np.zeros(len(layouts))
    columns = config_columns(
        table,
        np.array([layout.accumulation for layout in layouts], dtype=np.float64),
        device="cuda",
        num_blocks=[int(row["layers"]) for row in rows],
    )
    split = [layout.config.tp > 1 and layout.sequence_parallel is not False for layout in layouts]
    columns |= {
        "global_batch": np.array([float(layout.global_batch) for layout in layouts]),
        "sharding": np.array([SHARDINGS.index(layout.sharding) for layout in layouts]),
        "sequence_parallel": np.array(split),
        "cp": np.array([float(layout.cp) for layout in layouts]),
        "ep": np.array([float(layout.ep) for layout in layouts]),
        "variants": (PLAIN_VARIANT,),
        "variant": nothing.astype(np.int64),
        "full_variant": nothing.astype(np.int64),
        # rows differ in more than their knobs; layouts of one model in nothing else
        "micro_step": table.alike(MICRO_STEP_KNOBS) if len(rows) == 1 else np.arange(len(layouts)),
        "fp8": table.column("fp8", FP8.index),
        "offload": nothing.astype(np.int64) + OFFLOADS.index(PLAIN.offload),
        "moments": nothing.astype(np.int64),
        "threads": nothing,
        **dict.fromkeys(("graphs", "liger", "keeps_memory", "by_chance"), nothing > 0),
    }
    for name in rows[0]:
        columns[name] = np.array([row[name] for row in rows]) if len(rows) > 1 else np.full(len(layouts), rows[0][name])
    columns["document_len"] = np.where(columns["document_len"] > 0, columns["document_len"], columns["seq_len"])
    return Layouts(**{f.name: columns[f.name] for f in fields(Layouts)})


def dimension_columns(model: Transformer) -> dict[str, Any]:
    """The columns of Layouts that a model fills."""
    shape = model.shape(1)
    return {name: getattr(shape, name) for name in SIZES} | {
        "layers": float(model.layers),
        "block_experts": float(model.expert_parameters),
        "parameters": float(model.parameters),
        "block_parameters": float(model.block_parameters),
        "trainable": float(model.parameters),
    }


LEAVE_OUT = "Give another value, or leave it out."


def contradiction(layout: Layout, model: Transformer, seq_len: int) -> tuple[str, str] | None:
    """The contradiction within a layout, or between it and the model, and what to do; None if there is none.

    The rules of a search (strategies/techniques) judge all that has a knob.

    Args:
        layout: Its knobs that are no degree are plain.
        model, seq_len: What is trained.
    """
    return (
        _of_data_parallelism(layout)
        or _of_shared_work(layout, model, seq_len)
        or _of_tensor_parallelism(layout, model, seq_len)
        or _of_pipeline(layout.config, model)
    )


def _of_data_parallelism(layout: Layout) -> tuple[str, str] | None:
    config, sharding = layout.config, layout.sharding
    if sharding == "ddp" and config.dp_shard > 1:
        return (
            f"sharding=ddp shards nothing, and dp_shard={config.dp_shard} shards over {config.dp_shard} ranks",
            "Replicas are counted by dp_replicate.",
        )
    if sharding != "ddp" and config.dp_shard == 1:
        return f"sharding={sharding} with dp_shard=1 shards nothing", "Give dp_shard of at least 2, or sharding=ddp."
    if layout.flat_parameters and sharding not in ("zero3", "shard_grad_op"):
        return f"flat_parameters=true needs FSDP, and sharding is {sharding}", "Leave flat_parameters out."
    if config.gradient_sync == "every" and sharding == "zero1":
        return "gradient_sync=every needs sharded gradients, and sharding=zero1 keeps whole ones", LEAVE_OUT
    reason = incompatible(config, layout.global_batch, techniques=("data_parallel", "batch_norm"))
    return None if reason is None else (reason, LEAVE_OUT)


def _of_shared_work(layout: Layout, model: Transformer, seq_len: int) -> tuple[str, str] | None:
    """What contradicts sharing experts or sequences."""
    cp, ep, ranks = layout.cp, layout.ep, layout.config.dp * layout.cp
    if seq_len % (2 * cp) and cp > 1:  # a causal mask leaves the ends of a sequence unequal, so each rank has two parts
        return f"cp={cp} does not divide the sequence of {seq_len} tokens into 2 x {cp} parts", LEAVE_OUT
    if cp > 1 and model.kv_heads % layout.config.tp:
        return f"cp={cp} needs whole key-value heads, and tp={layout.config.tp} splits {model.kv_heads}", LEAVE_OUT
    if ep > 1 and not model.experts:
        return f"ep={ep} shares experts, and the model has none", "Leave ep out."
    if model.experts % ep:
        return f"ep={ep} does not divide the {model.experts} experts", LEAVE_OUT
    if ranks % ep:
        return f"ep={ep} does not divide the {ranks} ranks of dp x cp", LEAVE_OUT
    return None


def _of_tensor_parallelism(layout: Layout, model: Transformer, seq_len: int) -> tuple[str, str] | None:
    tp = layout.config.tp
    if tp == 1:
        if layout.sequence_parallel:
            return "sequence_parallel=true with tp=1 splits nothing", "Leave it out, or give tp of at least 2."
        return None
    for count, name in ((model.heads, "heads"), (model.kv_heads, "key-value heads")):
        if count % tp:
            return f"tp={tp} does not divide the {count} {name}", "Give a tp that divides them."
    if layout.sequence_parallel is not False and seq_len % tp:
        return (
            f"tp={tp} does not divide the sequence of {seq_len} tokens, which sequence parallelism splits",
            "Give another tp or sequence length.",
        )
    return None


def _of_pipeline(config: TrainingConfig, model: Transformer) -> tuple[str, str] | None:
    if config.pp * config.virtual_stages > model.layers:
        return (
            f"pp={config.pp} x virtual_stages={config.virtual_stages} is more than the {model.layers} layers",
            "A stage holds at least one layer.",
        )
    if config.pp == 1 and config.virtual_stages > 1:
        return f"virtual_stages={config.virtual_stages} with pp=1: there is no pipeline", "Give pp of at least 2."
    reason = incompatible(config, techniques=("pipeline_parallel",))
    return None if reason is None else (reason, LEAVE_OUT)
