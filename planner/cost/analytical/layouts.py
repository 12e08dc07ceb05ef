"""Layouts: transformers on clusters as columns, one row per configuration of one model on one cluster."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args

import numpy as np

from autoplan.planner.cost.analytical.chips import Chip
from autoplan.planner.cost.analytical.transformer import Transformer
from autoplan.planner.cost.columns import CHECKPOINTING, Bools, Columns, Floats, Ints
from autoplan.planner.cost.states import ModelSize, StateWidths, state_widths
from autoplan.strategies.config import Attention

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
# A foreach Adam step has one temporary of the size of what it steps, the square root of the second moment, in fp32
# (torch.optim, "Algorithms").
FOREACH_TEMPORARY_BYTES = {"adamw": 4.0, "adam": 4.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layouts(Columns):
    """Columns, and what else the closed form needs; attention and loss are codes of ATTENTION and LOSSES.

    Attributes:
        attention_width, kv_width: Width of queries; of keys.
        trainable: Parameters that are trained; the others are frozen (LoRA).
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
    gated_mlp: Bools
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
    def size(self) -> ModelSize:
        """Elements, as the shared equations take them."""
        return ModelSize(
            parameters=self.parameters,
            trainable=self.trainable,
            num_blocks=self.layers,
            block_parameters=self.block_parameters,
            largest_parameter=self.vocab * self.hidden,
            flat_parameters=self.flat_parameters,
        )

    @property
    def widths(self) -> StateWidths:
        """Bytes per parameter of each state."""
        return state_widths(
            self, device="cuda", optimizer_bytes=self.optimizer_bytes, temporary_bytes=self.foreach_bytes
        )


def make_layouts(rows: list[dict[str, Any]]) -> Layouts:
    """Layouts from one mapping per row, as `csv_rows.parse_row` gives them."""
    return Layouts(**{f.name: np.array([row[f.name] for row in rows]) for f in fields(Layouts)})


def dimension_columns(model: Transformer) -> dict[str, Any]:
    """The columns of Layouts that a model fills."""
    return {
        "layers": float(model.layers),
        "hidden": float(model.hidden),
        "heads": float(model.heads),
        "attention_width": float(model.attention_width),
        "kv_width": float(model.kv_width),
        "ffn": float(model.ffn),
        "vocab": float(model.vocab),
        "gated_mlp": model.gated_mlp,
        "parameters": float(model.parameters),
        "block_parameters": float(model.block_parameters),
        "trainable": float(model.parameters),
    }


def chip_columns(chip: Chip, peak_flops_per_s: float) -> dict[str, Any]:
    """The columns of Layouts that a chip fills, in one precision."""
    return {
        "peak_flops_per_s": peak_flops_per_s,
        "memory_bytes_per_s": chip.sheet.memory_bandwidth_bytes_per_s.value,
        "memory_bytes": chip.sheet.memory_bytes.value,
        "processors": chip.processors,
        "matmul_efficiency": chip.matmul_efficiency,
    }
