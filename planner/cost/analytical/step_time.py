"""Step time of transformers on clusters in closed form: every quantity is an array over rows, no loop over layers.

Notation as in the field: b micro-batch, s sequence, h hidden, f ffn width, a heads, L layers, V vocabulary, t tensor,
p pipeline, d data degrees, m micro-batches of a step on a rank. One micro-batch of one block is, forward,

    QKV (bs x (h + 2 h_kv)/t x h), projection (bs x h x h/t), up (bs x g f/t x h), down (bs x h x f/t)   matrix products
    4 b s^2 h / t                                                                        attention (half, causal flash)
    norms, residuals, activation                                                         passes over memory

and twice that backward (Megatron-LM, arXiv 2104.04473 and 2205.05198). The time of each product follows from its shape.
States, communication and the pipeline are those of `planner.cost`; memory is in `analytical.memory`.

Constants that say "tables" were set by the step times of llm-foundry, fms-fsdp and vTrain (docs/accuracy.md); those
that say "assumed" come from what is written beside them, and nothing was fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.planner.cost.analytical.layouts import Layouts
from autoplan.planner.cost.analytical.memory import MEMORY_PARTS, memory_parts
from autoplan.planner.cost.columns import Columns, Floats
from autoplan.planner.cost.communication import Exchange, boundary_width, datasheet_links, exchange
from autoplan.planner.cost.correction import Correction, learn
from autoplan.planner.cost.prediction import BANDWIDTH_EFFICIENCY, bound_of, spread
from autoplan.planner.cost.roofline import FP8_EFFICIENCY, LAUNCH_S, attention_rate, product_seconds
from autoplan.planner.cost.step import step_seconds

# Plain attention's two products are batched ones of small k: tables (vTrain)
EAGER_EFFICIENCY = 0.85
# Operations of a block, forward: unfused eager, counted; what torch.compile leaves of them, by COMPILES: assumed
BLOCK_LAUNCHES = 26.0
COMPILED_LAUNCHES = np.array([1.0, 0.5, 0.4])
HEAD_LAUNCHES = 40.0
# Passes of 2 bytes over b s h that norms, residuals, dropout and biases make forward, and over b s f that the
# activation makes, by COMPILES: counted for a plain block; compiled: tables (fms-fsdp)
BLOCK_PASSES = np.array([18.0, 10.0, 10.0])
ACTIVATION_PASSES = np.array([5.0, 3.0, 3.0])
# Bytes read and written per logit (16 bits and fp32, log-softmax and its gradient) and per element of the hidden
# states: counted
LOGIT_BYTES = 26.0
HEAD_BYTES = 12.0
# A backward's time beside its forward's: fused attention recomputes (FlashAttention-2); passes and launches: tables
ATTENTION_BACKWARD = 2.5
MEMORY_BACKWARD = 1.6
LAUNCH_BACKWARD = 1.7
# Selective checkpointing runs attention and half of the element-wise operations again: assumed
SELECTIVE_AGAIN = {"matmul": 0.0, "attention": 1.0, "memory": 0.5, "launch": 0.5}
# Passes that scale, cast and transpose each operand of an fp8 product (Transformer Engine): tables (llm-foundry, fp8)
FP8_PASSES = 8.0
# Host seconds to launch one collective: assumed
COLLECTIVE_LAUNCH_S = 20e-6
# Host time of a pipeline stage per micro-batch: to receive, run, send, twice, and to pick the next instruction: tables
# (vTrain)
PIPELINE_TURN_S = 2e-3
# Bytes per parameter of an optimizer step: Adam reads gradient, master weight and two moments and writes three and the
# 16-bit weight, and unscaling, the norm and clipping pass over fp32 gradients four times more: counted. With
# 2 x its states' bytes on top that is Adam's 46.
STEP_BYTES = 30.0
STEP_OVERHEAD_S = 1e-3


# Standard deviation of the logarithm of an uncalibrated step time: of the tables' rows (docs/accuracy.md)
UNCALIBRATED_SD = 0.17


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateTable:
    """Estimates as columns: seconds per optimizer step, bytes of the fullest GPU.

    `input_s` is what loading (`loading_s` in all) takes beyond the rest of the step, which it runs beside. `log_sd` is
    the standard deviation of the logarithm of what the GPUs take.
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
    loading_s: Floats
    log_sd: Floats
    parameters_bytes: Floats
    gradients_bytes: Floats
    optimizer_bytes: Floats
    activations_bytes: Floats
    loss_bytes: Floats
    gathered_bytes: Floats
    temporaries_bytes: Floats
    overhead_bytes: Floats
    peak_memory_bytes: Floats
    model_flops: Floats
    hardware_flops: Floats
    mfu: Floats
    hfu: Floats

    def time_parts_s(self, i: int) -> dict[str, float]:
        """Seconds of one row's step by part; they add up to the step."""
        return {name: float(getattr(self, f"{name}_s")[i]) for name in TIME_PARTS}

    def memory_parts_bytes(self, i: int) -> dict[str, float]:
        """Bytes of one row's peak by part; they add up to it."""
        return {name: float(getattr(self, f"{name}_bytes")[i]) for name in MEMORY_PARTS}

    def bound(self, i: int) -> str:
        """The kind of work that bounds the step of a row, or input."""
        return bound_of(self.time_parts_s(i), waits_for_input=bool(self.input_s[i] > 0))

    def busy_parts(self) -> Floats:
        """Seconds by part of what the GPUs take, of shape (rows, parts): the step without what the input adds."""
        return np.column_stack([getattr(self, f"{name}_s") for name in TIME_PARTS if name != "input"])

    def step_interval(self, i: int) -> tuple[float, float]:
        """Seconds of a row's step at least and at most: a factor on what GPUs take; the input's rate is as given."""
        factor, busy = float(spread(self.log_sd[i])), float(self.step_time_s[i] - self.input_s[i])
        loading = float(self.loading_s[i])
        return max(busy / factor, loading), max(busy * factor, loading)


TIME_PARTS = ("matmul", "attention", "memory", "launch", "communication", "bubble", "optimizer", "input")
KINDS = ("matmul", "attention", "memory", "launch")


def _product_seconds(m: Floats, n: Floats, k: Floats, rows: Layouts, width: Floats) -> Floats:
    """Seconds of one matrix product of each row, see `roofline.product_seconds`."""
    reached = rows.matmul_efficiency * np.where(rows.fp8, FP8_EFFICIENCY, 1.0)
    return product_seconds(
        m,
        n,
        k,
        flops_per_s=reached * rows.peak_flops_per_s,
        memory_bytes_per_s=rows.memory_bytes_per_s,
        processors=rows.processors,
        width=width,
    )


def estimate_layouts(rows: Layouts, correction: Correction | None = None) -> EstimateTable:
    """Step time and peak memory of every row.

    Args:
        rows: The layouts.
        correction: What measured step times have taught; None: nothing.
    """
    stage, through = _compute_seconds(rows)
    moved = _exchange(rows)
    turn = np.where(rows.pp > 1, PIPELINE_TURN_S, 0.0)
    device = stage["matmul"] + stage["attention"] + stage["memory"]
    # collectives are launched by the same thread; what it cannot keep up with shows
    collectives = (rows.tp > 1) * np.ceil(rows.layers / rows.pp) * (4 + 2 * rows.checkpointed)
    launched = stage["launch"] + collectives * COLLECTIVE_LAUNCH_S
    launch = np.maximum(launched - device - moved.tensor_s - moved.send_s, 0.0) + turn
    all_stages = np.maximum(through["matmul"] + through["attention"] + through["memory"], through["launch"])
    step = step_seconds(rows, moved, stage_s=device + launch, all_stages_s=all_stages + rows.pp * turn, device="cuda")
    m = rows.accumulation
    parts = {
        "matmul_s": m * stage["matmul"],
        "attention_s": m * stage["attention"],
        "memory_s": m * stage["memory"],
        "launch_s": m * launch,
        "communication_s": step.communication_s,
        "bubble_s": step.bubble_s,
        "optimizer_s": _optimizer_seconds(rows),
    }
    log_sd = np.full(len(rows), UNCALIBRATED_SD)
    if correction is not None:
        factor, log_sd = correction.predict(np.column_stack(list(parts.values())), _kinds(rows))
        parts = {name: factor * seconds for name, seconds in parts.items()}
    return _as_table(rows, parts, log_sd)


def _as_table(rows: Layouts, parts: dict[str, Floats], log_sd: Floats) -> EstimateTable:
    """The table of what the GPUs take, with what the input adds, FLOPs and memory."""
    busy = sum(parts.values(), np.zeros(len(rows)))
    # loaders prefetch: a batch is made while the step before it runs
    tokens = rows.global_batch * rows.seq_len
    loading = node_share(rows, rows.gpus_per_node) * tokens / rows.input_tokens_per_s
    waited = np.maximum(loading - busy, 0.0)
    step = busy + waited
    model_flops, hardware_flops = flops(rows)
    available = rows.peak_flops_per_s * rows.num_ranks * step
    memory = memory_parts(rows)
    return EstimateTable(
        step_time_s=step,
        input_s=waited,
        loading_s=loading,
        log_sd=log_sd,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        mfu=model_flops / available,
        hfu=hardware_flops / available,
        peak_memory_bytes=memory.pop("peak"),
        **parts,
        **{f"{name}_bytes": value for name, value in memory.items()},
    )


def _compute_seconds(rows: Layouts) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Seconds by kind of one micro-batch on the fullest stage, and through all stages.

    A block runs forward once and backward, and forward once more as far as it is checkpointed; the last stage has the
    head on top of its blocks.
    """
    block, head = _block(rows), _head(rows)
    stage, through = {}, {}
    for kind in KINDS:
        forward, backward = block[kind]
        again = rows.checkpointed * forward + np.where(rows.selective, SELECTIVE_AGAIN[kind] * forward, 0.0)
        one = forward + backward + again
        stage[kind] = np.ceil(rows.layers / rows.pp) * one + head.get(kind, 0.0)
        through[kind] = rows.layers * one + head.get(kind, 0.0)
    return stage, through


def node_share(columns: Columns, gpus_per_node: float | Floats) -> Floats:
    """The share of a step's samples that the fullest node has to load.

    Ranks of one tensor or pipeline group train on the same samples, so a node loads for each different data-parallel
    rank that it holds 1 / dp of the global batch. Tensor ranks are neighbours and pipeline stages outermost
    (strategies/techniques/mesh.py): floor(GPUs per node / t) such ranks, but no more than there are, and at least one.
    """
    ranks = np.minimum(columns.dp, np.maximum(np.floor(gpus_per_node / columns.tp), 1.0))
    return np.asarray(ranks / columns.dp)


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
    again = rows.checkpointed * (products + attention) + np.where(rows.selective, attention, 0.0)
    return model, model + sequences * again


def _block(rows: Layouts) -> dict[str, tuple[Floats, Floats]]:
    """Seconds of one block and micro-batch, forward and backward, by kind."""
    forward, backward = _block_products(rows)
    attention = _attention_seconds(rows)
    memory = _block_memory_seconds(rows)
    launches = BLOCK_LAUNCHES * COMPILED_LAUNCHES[rows.compiled] * LAUNCH_S
    return {
        "matmul": (forward, backward),
        "attention": (attention, ATTENTION_BACKWARD * attention),
        "memory": (memory, MEMORY_BACKWARD * memory),
        "launch": (launches, LAUNCH_BACKWARD * launches),
    }


def _block_products(rows: Layouts) -> tuple[Floats, Floats]:
    """Seconds of a block's matrix products, forward and backward; a frozen weight has no gradient of its own."""
    t, h, a = rows.tp, rows.hidden, rows.attention_width
    tokens, width = rows.micro_batch * rows.seq_len, rows.compute_width
    up = np.where(rows.gated_mlp, 2.0, 1.0) * rows.ffn
    forward, backward = np.zeros(len(rows)), np.zeros(len(rows))
    for n, k in (((a + 2 * rows.kv_width) / t, h), (h, a / t), (up / t, h), (h, rows.ffn / t)):
        forward = forward + _product_seconds(tokens, n, k, rows, width)
        backward = backward + _product_seconds(tokens, k, n, rows, width)
        backward = backward + rows.trained_share * _product_seconds(n, k, tokens, rows, width)
    return forward, backward


def _attention_seconds(rows: Layouts) -> Floats:
    """Seconds of a block's attention, forward; fused attention skips what the causal mask hides, plain does not."""
    rate = rows.matmul_efficiency * rows.peak_flops_per_s * np.where(rows.fp8, 0.5, 1)
    square = 4 * rows.micro_batch * rows.seq_len**2 * rows.attention_width / rows.tp
    head_dim = rows.attention_width / rows.heads
    eager = square / (EAGER_EFFICIENCY * head_dim / (head_dim + 24) * rate)
    return np.where(rows.eager_attention, eager, square / attention_rate(rate, head_dim))


def _block_memory_seconds(rows: Layouts) -> Floats:
    """Seconds of a block's passes over memory, forward: norms, residuals, activation, and plain attention's scores."""
    tokens = rows.micro_batch * rows.seq_len
    up = np.where(rows.gated_mlp, 2.0, 1.0) * rows.ffn
    shared = np.where(rows.sequence_parallel, rows.tp, 1.0)
    outer = (BLOCK_PASSES[rows.compiled] + np.where(rows.fp8, FP8_PASSES, 0.0)) * rows.hidden / shared
    passes = 2.0 * tokens * (outer + ACTIVATION_PASSES[rows.compiled] * up / rows.tp)
    # scores written, softmax and dropout read and written, the mask, read again: 6 passes of the s x s matrix
    square = 12.0 * rows.micro_batch * rows.heads / rows.tp * rows.seq_len**2
    scores = np.where(rows.eager_attention, square, 0.0)
    return np.asarray((passes + scores) / (BANDWIDTH_EFFICIENCY * rows.memory_bytes_per_s))


def _head(rows: Layouts) -> dict[str, Floats]:
    """Seconds of embedding, output head and loss, forward and backward."""
    n, k = rows.vocab / rows.tp, rows.hidden
    tokens, width = rows.micro_batch * rows.seq_len, rows.compute_width
    seconds = _product_seconds(tokens, n, k, rows, width)
    seconds = seconds + _product_seconds(tokens, k, n, rows, width)
    seconds = seconds + rows.trained_share * _product_seconds(n, k, tokens, rows, width)
    # the head stays in 16 bits
    seconds = seconds * np.where(rows.fp8, 2 * FP8_EFFICIENCY, 1.0)
    moved = tokens * (LOGIT_BYTES * n + HEAD_BYTES * k) / (BANDWIDTH_EFFICIENCY * rows.memory_bytes_per_s)
    return {
        "matmul": seconds,
        "memory": moved,
        "launch": np.full(len(rows), HEAD_LAUNCHES * LAUNCH_S),
    }


def _exchange(rows: Layouts) -> Exchange:
    """The communication of a rank by kind, over links of which the datasheet is known."""
    links = datasheet_links(rows.intra_bytes_per_s, rows.inter_bytes_per_s, rows.gpus_per_node)
    boundary = boundary_width(rows) * rows.micro_batch * rows.seq_len * rows.hidden
    return exchange(rows, links, rows.size, rows.widths, boundary)


def _optimizer_seconds(rows: Layouts) -> Floats:
    """Seconds of the optimizer step over a rank's share of the trained parameters."""
    mine = rows.trainable / (rows.tp * rows.pp * rows.shards)
    moved = mine * (STEP_BYTES + 2 * rows.optimizer_bytes)
    return np.asarray(moved / (BANDWIDTH_EFFICIENCY * rows.memory_bytes_per_s) + STEP_OVERHEAD_S)


def learn_correction(rows: Layouts, seconds: Floats) -> Correction:
    """The correction that measured step times teach; rows of one model on as many GPUs are one group of it."""
    groups = list(zip(rows.parameters, rows.num_ranks, strict=True))
    return learn(estimate_layouts(rows).busy_parts(), _kinds(rows), groups, seconds)


def _kinds(rows: Layouts) -> Floats:
    """Device and precision, as the rates that the datasheet has for them."""
    return np.column_stack([rows.peak_flops_per_s, rows.memory_bytes_per_s])
