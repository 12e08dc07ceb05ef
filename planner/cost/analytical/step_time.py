"""Prices transformers on clusters in closed form: every quantity is an array over rows, no loop over layers or steps.

Notation as in the field: b micro-batch, s sequence, h hidden, f ffn width, a heads, L layers, V vocabulary, t tensor,
p pipeline, d data degrees, m micro-batches of a step on a rank. One micro-batch of one block is, forward,

    QKV (bs x (h + 2 h_kv)/t x h), projection (bs x h x h/t), up (bs x g f/t x h), down (bs x h x f/t)   matrix products
    4 b s^2 h / t                                                                        attention (half, causal flash)
    norms, residuals, activation                                                         passes over memory

and twice that backward (Megatron-LM, arXiv 2104.04473 and 2205.05198). Each product is priced by its shape.
Memory: paper_memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from pydantic import Field

from autoplan.planner.cost.analytical.layouts import ATTENTION, CHECKPOINTING, PRECISIONS, Layouts
from autoplan.planner.cost.analytical.memory import memory_parts
from autoplan.planner.cost.candidates import COMPILES, SCHEDULES, SHARDINGS, Floats
from autoplan.planner.cost.communication import RAMP_S, Links, exchange
from autoplan.planner.cost.pipeline import pass_seconds
from autoplan.record import Record

TILE = 128.0
# What a product's inner loop costs to fill and drain, in elements of k (CUTLASS: prologue of some stages of 32)
K_FILL = 96.0
BANDWIDTH_EFFICIENCY = 0.82
LINK_EFFICIENCY = 0.8
# Fused attention's share of the rate of large products (FlashAttention-2, arXiv 2307.08691 figures 4 to 6: 50-70 % of
# what products reach, backward lower)
FLASH_EFFICIENCY = 0.5
EAGER_EFFICIENCY = 0.85
# Host seconds per operation of an eager block, Python, autograd and module hooks included (0.9 ms a block forward)
LAUNCH_S = 3.3e-5
# operations of a block, forward: unfused eager; what torch.compile leaves of them per block
BLOCK_LAUNCHES = 26.0
COMPILED_LAUNCHES = np.array([1.0, 0.5, 0.4])
# passes of 2 bytes over b s h that norms, residuals, dropout and biases make forward, unfused and compiled
BLOCK_PASSES = np.array([18.0, 10.0, 10.0])
ACTIVATION_PASSES = np.array([5.0, 3.0, 3.0])
# fp8 products reach less of their peak, and each operand is scaled, cast and transposed first (Transformer Engine)
FP8_EFFICIENCY = 0.8
FP8_PASSES = 8.0
COLLECTIVE_LAUNCH_S = 20e-6
# Host time of a pipeline stage per micro-batch: to receive, run, send, twice, and to pick the next instruction
PIPELINE_TURN_S = 2e-3
# Largest share of a micro-step behind which gathers and gradient reductions hide
OVERLAP = 0.85


class Factors(Record):
    """Calibration: natural logarithms of factors on time, each with its physical meaning; 0 is the prior."""

    matmul: float = Field(default=0.0, description="matrix products")
    attention: float = Field(default=0.0, description="attention")
    memory: float = Field(default=0.0, description="passes over memory: norms, activations, softmax, loss")
    launch: float = Field(default=0.0, description="host time per operation")
    communication: float = Field(default=0.0, description="all collectives")
    optimizer: float = Field(default=0.0, description="the optimizer step")


FACTOR_SD = {
    "matmul": 0.2,
    "attention": 0.3,
    "memory": 0.3,
    "launch": 0.5,
    "communication": 0.4,
    "optimizer": 0.3,
}
# What stays after calibration and before: standard deviation of the logarithm of the time
CALIBRATED_SD = 0.11
UNCALIBRATED_SD = 0.17


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTable:
    """Prices as columns; seconds per optimizer step, bytes of the fullest GPU.

    `input_s` is what loading takes beyond the rest of the step, which it runs beside.
    """

    step_time_s: Floats
    matmul_s: Floats
    attention_s: Floats
    memory_s: Floats
    launch_s: Floats
    communication_s: Floats
    bubble_s: Floats
    optimizer_s: Floats
    input_s: Floats
    weights_bytes: Floats
    gradients_bytes: Floats
    optimizer_bytes: Floats
    activations_bytes: Floats
    loss_bytes: Floats
    gathered_bytes: Floats
    step_bytes: Floats
    overhead_bytes: Floats
    peak_memory_bytes: Floats
    model_flops: Floats
    hardware_flops: Floats
    mfu: Floats
    hfu: Floats

    def take(self, index: Any) -> PaperTable:
        """The rows at an index."""
        return PaperTable(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


TIME_PARTS = (
    "matmul_s",
    "attention_s",
    "memory_s",
    "launch_s",
    "communication_s",
    "bubble_s",
    "optimizer_s",
    "input_s",
)


def product_seconds(m: Floats, n: Floats, k: Floats, rows: Layouts, width: Floats) -> Floats:
    """Seconds of one matrix product: the roofline, with what tiles leave idle.

    Tiles of 128 x 128 go to the multiprocessors in waves; where there are fewer tiles than those, k is split. Source:
    NVIDIA "Matrix Multiplication Background User's Guide", tile and wave quantization.
    """
    tiles = np.ceil(m / TILE) * np.ceil(n / TILE)
    used = (m * n) / (np.ceil(m / TILE) * np.ceil(n / TILE) * TILE * TILE)
    units = np.where(tiles < rows.processors, tiles * np.clip(np.floor(k / 512), 1, 8), tiles)
    waves = np.ceil(units / rows.processors)
    busy = units / (waves * rows.processors)
    filled = k / (k + K_FILL)
    reached = rows.matmul_efficiency * np.where(rows.precision == PRECISIONS.index("fp8"), FP8_EFFICIENCY, 1.0)
    work = 2 * m * n * k / (reached * rows.peak_flops_per_s * used * busy * filled)
    moved = width * (m * k + k * n + m * n) / (BANDWIDTH_EFFICIENCY * rows.memory_bytes_per_s)
    return np.asarray(np.maximum(work, moved))


def price(rows: Layouts, factors: Factors | None = None) -> PaperTable:
    """Prices every row."""
    f = factors or Factors()
    width = np.where(rows.precision <= PRECISIONS.index("tf32"), 4.0, 2.0)
    tokens = rows.micro_batch * rows.seq_len
    block, head = _block(rows, tokens, width, f), _head(rows, tokens, width, f)
    full = rows.checkpointing == CHECKPOINTING.index("full")
    selective = rows.checkpointing == CHECKPOINTING.index("selective")
    # forward once, backward as what each part adds, recomputation once more
    blocks = np.ceil(rows.layers / rows.pp)
    stage: dict[str, Floats] = {}
    for name in ("matmul", "attention", "memory", "launch"):
        forward, backward = block[name]
        again = np.where(full, forward, 0.0)
        if name in ("attention", "memory", "launch"):
            again = again + np.where(selective, (0.5 if name != "attention" else 1.0) * forward, 0.0)
        stage[name] = blocks * (forward + backward + again)
    inner = {name: stage[name] / blocks * rows.layers for name in stage}
    for name in ("matmul", "memory", "launch"):
        stage[name] = stage[name] + head[name]  # the last stage has the head on top of its blocks
        inner[name] = inner[name] + head[name]
    moved = _communication(rows, width, full)
    speed = np.exp(f.communication)
    device = stage["matmul"] + stage["attention"] + stage["memory"]
    waiting = (rows.tp > 1) * blocks * (4 + 2 * full) * COLLECTIVE_LAUNCH_S * np.exp(f.launch)
    inline = moved.tensor_s * speed + moved.send_s * speed
    # collectives are launched by the same host thread: what it cannot keep up with shows, the rest hides
    launch = np.maximum(stage["launch"] + waiting - device - inline, 0.0)
    turn = np.where(rows.pp > 1, PIPELINE_TURN_S * np.exp(f.launch), 0.0)
    launch = launch + turn
    one = device + launch + inline
    every = np.maximum(inner["matmul"] + inner["attention"] + inner["memory"], inner["launch"])
    every = np.maximum(every + rows.pp * (inline + turn), one)
    m = rows.accumulation
    whole = pass_seconds(rows, one, every, m)  # type: ignore[arg-type]
    bubble = np.maximum(whole - m * one, 0.0)
    hidden = OVERLAP * (device + launch)
    gather = m * np.maximum(moved.gather_s * speed - hidden, 0.05 * moved.gather_s * speed)
    gradient = moved.gradient_s * speed
    last = np.where((rows.sharding >= SHARDINGS.index("zero2")) & ~rows.whole_gradients, m, 1.0)
    gradient = np.maximum(gradient - 0.5 * hidden * last, 0.15 * gradient)
    communication = m * inline + gather + gradient + moved.after_s * speed
    optimizer = _optimizer_seconds(rows) * np.exp(f.optimizer)
    busy = m * (device + launch) + bubble + communication + optimizer
    # loaders prefetch: a batch is made while the step before it runs
    waited = np.maximum(loading_seconds(rows) - busy, 0.0)
    step = busy + waited
    model_flops, hardware_flops = flops(rows)
    available = rows.peak_flops_per_s * rows.num_gpus * step
    return PaperTable(
        step_time_s=step,
        matmul_s=m * stage["matmul"],
        attention_s=m * stage["attention"],
        memory_s=m * stage["memory"],
        launch_s=m * launch,
        communication_s=communication,
        bubble_s=bubble,
        optimizer_s=optimizer,
        input_s=waited,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        mfu=model_flops / available,
        hfu=hardware_flops / available,
        **memory_parts(rows, width, full, selective),
    )


def node_tokens(rows: Layouts) -> Floats:
    """Tokens of a step that the fullest node has to load.

    Ranks of one tensor or pipeline group train on the same samples, so a node loads for each different data-parallel
    rank that it holds a share of global batch / dp sequences. Tensor ranks are neighbours and pipeline stages outermost
    (strategies/techniques/mesh.py): floor(GPUs per node / t) such ranks, but no more than there are, and at least one.
    """
    ranks = np.minimum(rows.dp, np.maximum(np.floor(rows.gpus_per_node / rows.tp), 1.0))
    return np.asarray(ranks * rows.global_batch / rows.dp * rows.seq_len)


def loading_seconds(rows: Layouts) -> Floats:
    """Seconds in which the fullest node's loaders make a step's samples; 0 where their rate is not known."""
    return np.asarray(node_tokens(rows) / rows.input_tokens_per_s)


def flops(rows: Layouts) -> tuple[Floats, Floats]:
    """FLOPs of a step: the model's, and those executed with recomputation.

    72 B L s h^2 (1 + s/(6h) + V/(12 h L)) for a plain block (arXiv 2104.04473, section 5.1; the attention term is that
    of the whole square, no causal discount), written for any widths; forward is a third of it; full checkpointing runs
    the blocks' forward once more (96 in place of 72), selective the attention's.
    """
    sequences = rows.global_batch
    up = np.where(rows.gated_mlp, 3.0, 2.0)
    products = (
        2 * rows.seq_len * rows.layers * rows.hidden * (2 * rows.attention_width + 2 * rows.kv_width + up * rows.ffn)
    )
    attention = 4 * rows.seq_len**2 * rows.attention_width * rows.layers
    head = 2 * rows.seq_len * rows.hidden * rows.vocab
    model = 3 * sequences * (products + attention + head)
    full = rows.checkpointing == CHECKPOINTING.index("full")
    selective = rows.checkpointing == CHECKPOINTING.index("selective")
    again = np.where(full, products + attention, np.where(selective, attention, 0.0))
    return model, model + sequences * again


def _block(rows: Layouts, tokens: Floats, width: Floats, f: Factors) -> dict[str, tuple[Floats, Floats]]:
    """Seconds of one block and micro-batch, forward and backward, by kind."""
    t = rows.tp
    h, a = rows.hidden, rows.attention_width
    up = np.where(rows.gated_mlp, 2.0, 1.0) * rows.ffn
    forward, backward = np.zeros(len(rows)), np.zeros(len(rows))
    for n, k in (((a + 2 * rows.kv_width) / t, h), (h, a / t), (up / t, h), (h, rows.ffn / t)):
        forward = forward + product_seconds(tokens, n, k, rows, width)
        # a frozen weight has no gradient of its own
        backward = backward + product_seconds(tokens, k, n, rows, width)
        backward = backward + rows.trained_share * product_seconds(n, k, tokens, rows, width)
    rate = rows.matmul_efficiency * rows.peak_flops_per_s * np.where(rows.precision == PRECISIONS.index("fp8"), 0.5, 1)
    square = 4 * rows.micro_batch * rows.seq_len**2 * a / t
    head_dim = a / rows.heads
    shaped = head_dim / (head_dim + 24)
    flash = rows.attention == ATTENTION.index("flash")
    attention = np.where(
        flash, 0.5 * square / (FLASH_EFFICIENCY * shaped * rate), square / (EAGER_EFFICIENCY * shaped * rate)
    )
    bandwidth = BANDWIDTH_EFFICIENCY * rows.memory_bytes_per_s
    shared = np.where(rows.sequence_parallel, t, 1.0)
    casts = np.where(rows.precision == PRECISIONS.index("fp8"), FP8_PASSES, 0.0)
    passes = (
        2.0 * tokens * ((BLOCK_PASSES[rows.compiled] + casts) * h / shared + ACTIVATION_PASSES[rows.compiled] * up / t)
    )
    # scores written, softmax and dropout read and written, the mask, read again: 6 passes of the s x s matrix
    scores = np.where(flash, 0.0, 12.0 * rows.micro_batch * rows.heads / t * rows.seq_len**2)
    memory = (passes + scores) / bandwidth
    launches = BLOCK_LAUNCHES * COMPILED_LAUNCHES[rows.compiled] * LAUNCH_S + np.zeros(len(rows))
    by, at, me, la = (np.exp(x) for x in (f.matmul, f.attention, f.memory, f.launch))
    return {
        "matmul": (forward * by, backward * by),
        "attention": (attention * at, 2.5 * attention * at),
        "memory": (memory * me, 1.6 * memory * me),
        "launch": (launches * la, 1.7 * launches * la),
    }


def _head(rows: Layouts, tokens: Floats, width: Floats, f: Factors) -> dict[str, Floats]:
    """Seconds of embedding, output head and loss, forward and backward."""
    n, k = rows.vocab / rows.tp, rows.hidden
    seconds = product_seconds(tokens, n, k, rows, width)
    seconds = seconds + product_seconds(tokens, k, n, rows, width)
    seconds = seconds + rows.trained_share * product_seconds(n, k, tokens, rows, width)
    # the head stays in 16 bits
    seconds = seconds * np.where(rows.precision == PRECISIONS.index("fp8"), 2 * FP8_EFFICIENCY, 1.0)
    # logits in 16 bits and in fp32, log-softmax and its gradient: some 26 bytes read and written per logit
    moved = tokens * (26.0 * n + 12.0 * k) / (BANDWIDTH_EFFICIENCY * rows.memory_bytes_per_s)
    return {
        "matmul": seconds * np.exp(f.matmul),
        "memory": moved * np.exp(f.memory),
        "launch": np.full(len(rows), 40 * LAUNCH_S * np.exp(f.launch)),
    }


def _communication(rows: Layouts, width: Floats, full: Floats) -> Any:
    links = Links(
        intra_bytes_per_s=LINK_EFFICIENCY * rows.intra_bytes_per_s,
        inter_bytes_per_s=LINK_EFFICIENCY * rows.inter_bytes_per_s,
        ranks_per_node=rows.gpus_per_node,
        ramp_s=RAMP_S,
    )
    sharded = rows.sharding == SHARDINGS.index("zero3")
    return exchange(
        rows,  # type: ignore[arg-type]
        links,
        parameters=rows.parameters / (rows.tp * rows.pp),
        boundary_bytes=width * rows.micro_batch * rows.seq_len * rows.hidden,
        num_blocks=rows.layers,
        block_all_reduces=4.0 + 2.0 * full,
        gather_bytes=width,
        gradient_bytes=np.where(sharded | rows.half_states, width, np.where(width == 2, 4.0, width))
        * np.where(rows.flat_parameters, 1.0, rows.trained_share),
        reduce_every_micro_step=~rows.whole_gradients,
    )


def _optimizer_seconds(rows: Layouts) -> Floats:
    """Adam reads gradient, master weight and two moments and writes three and the 16-bit weight: 30 bytes; unscaling,
    the norm and clipping pass over fp32 gradients four times more: 16."""
    shards = np.where(rows.sharding > 0, rows.dp_shard, 1.0)
    mine = rows.trainable / (rows.tp * rows.pp * shards)
    return np.asarray(
        mine * (30.0 + 2 * rows.optimizer_bytes) / (BANDWIDTH_EFFICIENCY * rows.memory_bytes_per_s) + 1e-3
    )


assert COMPILES == ("off", "block", "model") and SCHEDULES[0] == "gpipe"
