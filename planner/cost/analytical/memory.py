"""Memory of transformers on clusters in closed form: bytes of the fullest GPU, part by part, as arrays over rows."""

from __future__ import annotations

import numpy as np

from autoplan.planner.cost.analytical.layouts import ATTENTION, Layouts
from autoplan.planner.cost.candidates import SHARDINGS, Floats
from autoplan.planner.cost.pipeline import held_micro_batches

CONTEXT_BYTES = 1.2e9
FRAGMENTATION = 0.04
MEMORY_PARTS = (
    "weights_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "loss_bytes",
    "gathered_bytes",
    "step_bytes",
    "overhead_bytes",
)


def memory_parts(rows: Layouts, width: Floats, full: Floats, selective: Floats) -> dict[str, Floats]:
    """Bytes of the fullest GPU, the first pipeline stage, part by part.

    States in bytes per parameter: 16-bit training holds 2 (weights) + 4 (fp32 gradients) + 4 (master) + 8 (Adam) = 18
    replicated; ZeRO-1 shards master and Adam, ZeRO-2 the gradients too, ZeRO-3 (FSDP, fp32 shards) all: 16/d, with
    16-bit units gathered. Source: arXiv 1910.02054 section 5; arXiv 2205.05198 section 6 for 18. With 16-bit
    states: 2 + 2 + 4 = 8. With 16-bit gradients beside fp32 masters: 2 + 2 + 4 + 8 = 16, and 4 more in the step, for
    fp32 gradients. Frozen parameters have weights only, but for a FlatParameter of FSDP1, whose gradient is one tensor
    over all it holds (torch.distributed.fsdp.FullyShardedDataParallel, note on freezing).

    The peak is in the micro-steps, with activations, or in the optimizer step, with its temporaries.
    """
    half = (width == 2) & ~rows.half_states
    share = rows.trained_share
    full_width = np.where(rows.half_states, 2.0, 4.0)
    gradient_width = np.where(rows.master_states, 2.0, full_width)
    z = rows.sharding
    block = rows.block_parameters / rows.tp
    embedding = (rows.parameters - rows.layers * rows.block_parameters) / rows.tp
    # the first stage has the input embedding alone, and as many blocks as any
    first = np.where(rows.tied, embedding, embedding - rows.vocab * rows.hidden / rows.tp)
    mine = np.where(rows.pp > 1, np.ceil(rows.layers / rows.pp) * block + first, rows.parameters / rows.tp)
    d = rows.dp_shard
    zero3, zero2, zero1 = (z == SHARDINGS.index(name) for name in ("zero3", "zero2", "zero1"))
    sharded = zero1 | zero2 | zero3
    weight_width = np.where(half & (rows.master_states | ~zero3), 2.0, full_width)
    weights = weight_width * mine / np.where(zero3, d, 1.0)
    keeps_shards = (zero3 | zero2) & ~(rows.whole_gradients & (rows.accumulation > 1))
    made = np.where(rows.flat_parameters, 1.0, share)
    gradients = gradient_width * mine * made / np.where(keeps_shards, d, 1.0)
    master = np.where(half & (rows.master_states | ~zero3), 4.0, 0.0)
    states = (master + rows.optimizer_bytes) / np.where(sharded, d, 1.0) * mine * share
    gathered = np.where(zero3 & (d > 1), width * (2 * block + embedding), 0.0)
    gathered = gathered + np.where((z < 3) & (rows.dp > 1), 1e8, 0.0)
    activations, loss = activation_bytes(rows, width, full, selective)
    # Gradients that are made and freed within the step grow as activations go: the start of the backward or its end
    # is the peak, not both. Accumulation, buckets and fp32 main gradients keep them; a shard was whole first.
    passing = (rows.accumulation == 1) & (rows.pp == 1) & (rows.dp == 1) & ~half
    end = gradients + block_activation_bytes(rows, width, selective)
    kept = np.where(passing, np.maximum(end - activations - loss, 0.0), gradients)
    micro_steps = kept + activations + loss + gathered
    temporary = (np.where(rows.master_states, 4.0, 0.0) + rows.step_bytes) / np.where(sharded, d, 1.0) * mine * share
    # by the optimizer step the gradients of sharded parameters are shards
    stepped = gradient_width * mine * made / np.where(zero2 | zero3, d, 1.0)
    step = np.maximum(stepped + temporary - micro_steps, 0.0)
    live = weights + states + micro_steps + step
    overhead = CONTEXT_BYTES + 2e8 * ((rows.tp > 1) + (rows.pp > 1.0) + (rows.dp > 1)) + FRAGMENTATION * live
    return {
        "weights_bytes": weights,
        "gradients_bytes": kept,
        "optimizer_bytes": states,
        "activations_bytes": activations,
        "loss_bytes": loss,
        "gathered_bytes": gathered,
        "step_bytes": step,
        "overhead_bytes": overhead,
        "peak_memory_bytes": live + overhead,
    }


def activation_bytes(rows: Layouts, width: Floats, full: Floats, selective: Floats) -> tuple[Floats, Floats]:
    """Bytes kept for the backward, by policy, on the first stage; and of the loss head."""
    apart = np.where(rows.sequence_parallel, rows.tp, 1.0)
    tokens = rows.micro_batch * rows.seq_len
    one = block_activation_bytes(rows, width, selective)
    kept = np.where(full, width * tokens * rows.hidden / apart, one)
    # selective per-operation policies on fused attention keep the products' results only
    pointwise = selective & (rows.attention == ATTENTION.index("flash"))
    kept = np.where(pointwise, 0.75 * kept, kept)
    held = held_micro_batches(rows, rows.accumulation)  # type: ignore[arg-type]
    stage = np.ceil(rows.layers / rows.pp)
    blocks = kept * stage * held + np.where(full, one, 0.0)
    # logits in 16 bits, in fp32 and their gradient; on the last stage where there is a pipeline
    # (chunked: the logits and their gradient in 16 bits, fp32 for a chunk at a time)
    logit = np.where(rows.chunked_loss, 2 * width, 8.0 + width)
    loss = np.where(rows.pp > 1, 0.0, tokens * rows.vocab / rows.tp * logit)
    return blocks, loss


def block_activation_bytes(rows: Layouts, width: Floats, selective: Floats) -> Floats:
    """Bytes that one block keeps for its backward, for one micro-batch.

    A plain block in 16 bits keeps sbh (34 + 5 a s / h) (arXiv 2205.05198, equations 1 to 6): norms 4, attention 11,
    feed-forward 19 (8 h + 4 f in general, here 3 h + 4 f), scores 5 a s. Flash attention and selective recomputation
    drop the scores. A gated feed-forward keeps gate, up, their product and the activation: 8 f in place of 4 f.
    Tensor parallelism divides all but the norms, residuals and dropout masks (10 h); sequence parallelism those too.
    """
    t, h = rows.tp, rows.hidden
    tokens = rows.micro_batch * rows.seq_len
    scale = width / 2
    kv = rows.kv_width / rows.attention_width
    f = np.where(rows.gated_mlp, 8.0, 4.0) * rows.ffn
    inner = (2 * rows.attention_width * (1 + 2 * kv) + 2 * rows.attention_width + f) * scale
    outer = 10.0 * h * scale
    scores = np.where(
        (rows.attention == ATTENTION.index("flash")) | selective, 0.0, 5.0 * rows.heads * rows.seq_len * scale
    )
    apart = np.where(rows.sequence_parallel, t, 1.0)
    return np.asarray(tokens * (outer / apart + (inner + scores) / t))
