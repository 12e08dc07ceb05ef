"""Memory of transformers on clusters in closed form: bytes of the fullest GPU, part by part, as arrays over rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.cost.analytical.layouts import LOSSES, Layouts
from autoplan.planner.cost.columns import STATES, Columns, Floats
from autoplan.planner.cost.prediction import ALLOCATOR_SLACK, CONTEXT_BYTES, GROUP_BYTES, RESERVE, spread, verdicts
from autoplan.planner.cost.states import StateBytes, state_bytes
from autoplan.planner.cost.step import held_micro_batches

# A selective per-operation policy beside fused attention keeps the products' results alone. Assumed from the listing of
# arXiv 2205.05198, section 4 (what is kept but is no product's result: about a quarter).
SELECTIVE_KEEPS = 0.75
# Logits that the fused loss holds at once (strategies/techniques/loss_kernels.py, _CHUNK_ELEMENTS).
FUSED_LOSS_ELEMENTS = 2.0**27
# Half-width of the memory interval, as a standard deviation of its logarithm: of the errors on LitGPT's published peaks
# (docs/accuracy.md). The search has a figure of its own, which its trials narrow (calibrate.MemoryFit.sd).
MEMORY_SD = 0.06
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "loss", "gathered", "temporaries", "overhead")


def memory_parts(rows: Layouts) -> dict[str, Floats]:
    """Bytes of the fullest GPU, the first pipeline stage, by MEMORY_PARTS, and their sum as `peak`.

    States are those of `planner.cost.states`. The peak is in the micro-steps, with activations, or in the optimizer
    step, with its temporaries.
    """
    states = state_bytes(rows, rows.size, rows.widths)
    activations, loss = activation_bytes(rows)
    gradients = _gradients_at_the_peak(rows, states, activations + loss)
    micro_steps = gradients + activations + loss + states.gathered
    # by the optimizer step the gradients of sharded parameters are shards
    step = np.maximum(states.stepped_gradients + states.temporaries - micro_steps, 0.0)
    live = states.parameters + states.optimizer + micro_steps + step
    overhead = CONTEXT_BYTES + group_bytes(rows) + ALLOCATOR_SLACK * live
    return {
        "parameters": states.parameters,
        "gradients": gradients,
        "optimizer": states.optimizer,
        "activations": activations,
        "loss": loss,
        "gathered": states.gathered,
        "temporaries": step,
        "overhead": overhead,
        "peak": live + overhead,
    }


def group_bytes(columns: Columns) -> Floats:
    """Bytes of NCCL's buffers: each parallel degree has process groups of its own."""
    return np.asarray(GROUP_BYTES * ((columns.tp > 1.0) + (columns.pp > 1.0) + (columns.dp > 1.0)))


def _gradients_at_the_peak(rows: Layouts, states: StateBytes, activations: Floats) -> Floats:
    """Gradients that are made and freed within the step grow as activations go: the start of the backward or its end
    is the peak, not both. Accumulation, buckets and fp32 main gradients keep them; a shard was whole first."""
    main_gradients = (rows.states == STATES.index("megatron")) & rows.half
    passing = (rows.accumulation == 1) & (rows.pp == 1) & (rows.dp == 1) & ~main_gradients
    end = states.gradients + block_activation_bytes(rows)
    return np.asarray(np.where(passing, np.maximum(end - activations, 0.0), states.gradients))


def activation_bytes(rows: Layouts) -> tuple[Floats, Floats]:
    """Bytes kept for the backward, by policy, on the first stage; and of the loss head.

    A block that is checkpointed whole keeps its input, and while it is computed again all that a block keeps.
    """
    apart = np.where(rows.sequence_parallel, rows.tp, 1.0)
    tokens = rows.micro_batch * rows.seq_len
    one = block_activation_bytes(rows)
    inputs = rows.compute_width * tokens * rows.hidden / apart
    kept = np.where(rows.selective & ~rows.eager_attention, SELECTIVE_KEEPS * one, one)
    share = rows.checkpointed
    held = held_micro_batches(rows, rows.accumulation / rows.passes) * np.ceil(rows.layers / rows.pp)
    blocks = ((1 - share) * kept + share * inputs) * held + share * one
    return np.asarray(blocks), np.where(rows.pp > 1, 0.0, _loss_bytes(rows, tokens))


def _loss_bytes(rows: Layouts, tokens: Floats) -> Floats:
    """Bytes of the loss head: full, logits in the width of products and in fp32, and their gradient; chunked, logits
    and their gradient in the width of products; fused, the logits of a chunk in all forms, and the gradient of the
    hidden states. On the last stage where there is a pipeline."""
    width = rows.compute_width
    logits = tokens * rows.vocab / rows.tp
    chunk = np.minimum(logits, FUSED_LOSS_ELEMENTS / rows.tp)
    fused = (8.0 + width) * chunk + width * tokens * rows.hidden
    plain = np.where(rows.loss == LOSSES.index("chunked"), 2 * width, 8.0 + width) * logits
    return np.asarray(np.where(rows.loss == LOSSES.index("fused"), np.minimum(fused, plain), plain))


def block_activation_bytes(rows: Layouts) -> Floats:
    """Bytes that one block keeps for its backward, for one micro-batch.

    A plain block in 16 bits keeps sbh (34 + 5 a s / h) (arXiv 2205.05198, equations 1 to 6): norms 4, attention 11,
    feed-forward 19 (8 h + 4 f in general, here 3 h + 4 f), scores 5 a s. Fused attention and selective recomputation
    drop the scores. A gated feed-forward keeps gate, up, their product and the activation: 8 f in place of 4 f.
    Tensor parallelism divides all but the norms, residuals and dropout masks (10 h); sequence parallelism those too.
    """
    t, h = rows.tp, rows.hidden
    tokens = rows.micro_batch * rows.seq_len
    scale = rows.compute_width / 2
    kv = rows.kv_width / rows.attention_width
    f = np.where(rows.gated_mlp, 8.0, 4.0) * rows.ffn
    inner = (2 * rows.attention_width * (1 + 2 * kv) + 2 * rows.attention_width + f) * scale
    outer = 10.0 * h * scale
    scores = np.where(rows.eager_attention & ~rows.selective, 5.0 * rows.heads * rows.seq_len * scale, 0.0)
    apart = np.where(rows.sequence_parallel, t, 1.0)
    return np.asarray(tokens * (outer / apart + (inner + scores) / t))


def memory_verdicts(
    peak_bytes: Floats, memory_bytes: Floats, *, lowest_bytes: Floats | None = None, highest_bytes: Floats | None = None
) -> NDArray[np.str_]:
    """Whether peaks fit their chips' memory, the reserve left free.

    Args:
        peak_bytes: Estimated.
        memory_bytes: Of the chips.
        lowest_bytes, highest_bytes: Peaks if what is not said is as it costs least, and most; None: the same.
    """
    factor = spread(MEMORY_SD)
    low = (peak_bytes if lowest_bytes is None else lowest_bytes) / factor
    high = (peak_bytes if highest_bytes is None else highest_bytes) * factor
    return verdicts(low, high, memory_bytes, reserve=RESERVE)
