"""Layouts: transformers on clusters as columns, one row per way to train one model on one cluster."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.cost.analytical.chips import Chip
from autoplan.planner.cost.analytical.transformer import Transformer
from autoplan.planner.cost.candidates import Floats, Ints

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
CHECKPOINTING = ("none", "selective", "full")
ATTENTION = ("flash", "eager")
STATES = ("fp32", "16bit", "master")
OPTIMIZER_STATE_BYTES = {
    "adamw": 8.0,
    "adam": 8.0,
    "adamw_fused": 8.0,
    "adamw_8bit": 2.0,
    "sgd_momentum": 4.0,
    "sgd": 0.0,
    "lion": 4.0,
}
# torch steps Adam through foreach unless told otherwise (torch.optim, "Algorithms"): one temporary the size of what is
# stepped, the square root of the second moment
STEP_TEMPORARY_BYTES = {"adamw": 4.0, "adam": 4.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layouts:
    """Columns of one length; codes index SHARDINGS, SCHEDULES, COMPILES, PRECISIONS, CHECKPOINTING, ATTENTION.

    Attributes:
        attention_width, kv_width: Width of queries; of keys.
        peak_flops_per_s: Dense, in the row's precision; memory_*: of the chip; processors: multiprocessors (SMs).
        intra_bytes_per_s, inter_bytes_per_s: Per GPU, one direction.
        input_tokens_per_s: What all loader workers of one node deliver together; infinite where it is not known.
        matmul_efficiency: What large matrix products reach of the peak before any calibration.
        trainable: Parameters that are trained; the others are frozen (LoRA).
        step_bytes: Per trained parameter, what the optimizer step allocates and frees.
        half_states: Weights, gradients and optimizer states in 16 bits too, no fp32 copies.
        master_states: 16-bit weights and gradients, under ZeRO-3 too; the optimizer keeps fp32 masters and makes fp32
            gradients for its step.
        whole_gradients: Sharded gradients are reduced at the last micro-step only, and kept whole until then.
        flat_parameters: Frozen weights have gradients too, as in a FlatParameter of FSDP1.
        chunked_loss: The loss casts its logits to fp32 a chunk at a time.
    """

    layers: Floats
    hidden: Floats
    heads: Floats
    attention_width: Floats
    kv_width: Floats
    ffn: Floats
    vocab: Floats
    gated_mlp: NDArray[np.bool_]
    tied: NDArray[np.bool_]
    parameters: Floats
    block_parameters: Floats
    trainable: Floats
    seq_len: Floats
    peak_flops_per_s: Floats
    memory_bytes_per_s: Floats
    memory_bytes: Floats
    processors: Floats
    matmul_efficiency: Floats
    gpus_per_node: Floats
    intra_bytes_per_s: Floats
    inter_bytes_per_s: Floats
    input_tokens_per_s: Floats
    tp: Floats
    sequence_parallel: NDArray[np.bool_]
    pp: Floats
    virtual_stages: Floats
    schedule: Ints
    dp_replicate: Floats
    dp_shard: Floats
    sharding: Ints
    micro_batch: Floats
    global_batch: Floats
    precision: Ints
    checkpointing: Ints
    compiled: Ints
    attention: Ints
    optimizer_bytes: Floats
    step_bytes: Floats
    half_states: NDArray[np.bool_]
    master_states: NDArray[np.bool_]
    whole_gradients: NDArray[np.bool_]
    flat_parameters: NDArray[np.bool_]
    chunked_loss: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def dp(self) -> Floats:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_gpus(self) -> Floats:
        """All ranks."""
        return self.dp * self.tp * self.pp

    @property
    def accumulation(self) -> Floats:
        """Micro-batches per optimizer step on a rank."""
        return self.global_batch / (self.micro_batch * self.dp)

    @property
    def passes(self) -> Floats:
        """Pipeline passes per step: all micro-batches go in one."""
        return np.ones(len(self))

    @property
    def trained_share(self) -> Floats:
        """Share of the parameters that is trained: 1 but for LoRA and the like."""
        return self.trainable / self.parameters

    def take(self, index: Any) -> Layouts:
        """The rows at an index (mask or positions)."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


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
        "tied": model.tied_embeddings,
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
