"""Estimates of layouts: the operations of their transformers, written down, priced by the same code as traced ones.

Each row has its model, chip and links, so that sizes and rates are arrays. Layouts that differ in nothing that a
micro-step's operations depend on have theirs priced once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.cost.analytical.layouts import LOSSES, Layouts
from autoplan.planner.cost.calibrate import FACTORS
from autoplan.planner.cost.columns import Columns, Floats, first_of_each
from autoplan.planner.cost.communication import BlockExchange, datasheet_links
from autoplan.planner.cost.correction import Correction, learn
from autoplan.planner.cost.operations import (
    FUSED_BACKWARD,
    SELECTIVE_KEEPS,
    checkpointed_groups,
    kept_bytes,
    line,
    loss_bytes,
    transformer_groups,
    transformer_variant,
)
from autoplan.planner.cost.prediction import (
    ALLOCATOR_SLACK,
    BANDWIDTH_EFFICIENCY,
    CONTEXT_BYTES,
    GROUP_BYTES,
    RESERVE,
    bound_of,
    spread,
    verdicts,
)
from autoplan.planner.cost.roofline import EAGER_EFFICIENCY, FP8_EFFICIENCY, LAUNCH_S, DatasheetProducts, attention_rate
from autoplan.planner.cost.states import state_bytes
from autoplan.planner.cost.step import held_micro_batches
from autoplan.planner.cost.traced.memory import MemoryParts, micro_step_peak, peak_parts, unit_gradient_bytes
from autoplan.planner.cost.traced.rates import Rates
from autoplan.planner.cost.traced.step_time import (
    BLOCK,
    PARTS,
    Machine,
    executed_flops,
    parts_of_step,
    times_of_kinds,
)
from autoplan.planner.trace.model_profile import ModelProfile, PeakFit

# Standard deviation of the logarithm of an uncalibrated step time: of the tables' rows (docs/accuracy.md)
UNCALIBRATED_SD = 0.17
# Half-width of the memory interval, as a standard deviation of its logarithm: of the errors on LitGPT's published peaks
# (docs/accuracy.md). The search has a figure of its own, which its trials narrow (calibrate.MemoryFit.sd).
MEMORY_SD = 0.06
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "overhead")


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
    gathered_bytes: Floats
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
        return np.column_stack([getattr(self, f"{name}_s") for name in BUSY_PARTS])

    def step_interval(self, i: int) -> tuple[float, float]:
        """Seconds of a row's step at least and at most: a factor on what GPUs take; the input's rate is as given."""
        factor, busy = float(spread(self.log_sd[i])), float(self.step_time_s[i] - self.input_s[i])
        loading = float(self.loading_s[i])
        return max(busy / factor, loading), max(busy * factor, loading)


FACTORS_OF = {
    "matmul": ("matmul/full", "matmul/half", "matmul/fp8"),
    "attention": ("attention",),
    "memory": ("memory", "fused_memory", "first_touch"),
    "launch": ("dispatch",),
    "communication": ("communication",),
    "optimizer": ("optimizer",),
}
"""The parts of a step as an answer names them, and the factors of the calibration that they are made of."""
BUSY_PARTS = ("matmul", "attention", "memory", "launch", "communication", "bubble", "optimizer")
TIME_PARTS = (*BUSY_PARTS, "input")


def node_share(columns: Columns, gpus_per_node: float | Floats) -> Floats:
    """The share of a step's samples that the fullest node has to load.

    Ranks of one tensor or pipeline group train on the same samples, so a node loads for each different data-parallel
    rank that it holds 1 / dp of the global batch. Tensor ranks are neighbours and pipeline stages outermost
    (strategies/techniques/mesh.py): floor(GPUs per node / t) such ranks, but no more than there are, and at least one.
    """
    ranks = np.minimum(columns.dp, np.maximum(np.floor(gpus_per_node / columns.tp), 1.0))
    return np.asarray(ranks / columns.dp)


def parts_by_name(parts: Floats) -> dict[str, Floats]:
    """Seconds by part as an answer names them, from rows per calibration factor."""
    nothing = np.zeros(parts.shape[1])
    return {
        f"{name}_s": sum((parts[FACTORS.index(factor)] for factor in factors), nothing)
        for name, factors in FACTORS_OF.items()
    }


def estimate_layouts(rows: Layouts, correction: Correction | None = None) -> EstimateTable:
    """Step time and peak memory of every row.

    Args:
        rows: The layouts.
        correction: What measured step times have taught; None: nothing.
    """
    first, kind = first_of_each(rows.micro_step)
    few = rows if len(first) == len(rows) else rows.take(first)
    machine = _machine(few)
    groups = transformer_groups(few.shape)
    plain, full = (transformer_variant(found, ()) for found in (groups, checkpointed_groups(groups)))
    times, executed = times_of_kinds(machine, plain, full, few)
    forward = plain.model_copy(update={"groups": tuple(g for g in plain.groups if g.phase == "forward")})
    model = 3 * executed_flops(forward, few.layers, few.samples)
    if few is not rows:
        times, executed, model = times[..., kind], executed[kind], model[kind]
        machine = _machine(rows)
    if np.any((rows.ep > 1) | (rows.cp > 1)):
        machine = replace(machine, block_exchange=_shared(rows, times))
    all_parts, bubble, flops = parts_of_step(machine, times, executed, rows, None)
    parts = parts_by_name(all_parts) | {"bubble_s": bubble}
    log_sd = np.full(len(rows), UNCALIBRATED_SD)
    if correction is not None:
        factor, log_sd = correction.predict(np.column_stack([parts[f"{name}_s"] for name in BUSY_PARTS]), _kinds(rows))
        parts = {name: factor * seconds for name, seconds in parts.items()}
    if rows.experts.any():  # the busiest expert's rank sets the pace of all that share experts
        busy = sum(parts.values(), np.zeros(len(rows)))
        log_sd = np.hypot(log_sd, np.where(rows.ep > 1, rows.imbalance_sd * parts["matmul_s"] / busy, 0.0))
    return _as_table(rows, parts, log_sd, model * rows.accumulation * rows.dp * rows.cp, flops)


def _shared(rows: Layouts, times: Floats) -> BlockExchange:
    """What ranks that share experts or sequences exchange in a block; latent attention sends what keys and values are
    made of."""
    tokens = rows.compute_width * rows.samples * rows.seq_len / rows.tp
    keys = np.where(rows.kv_rank > 0, rows.kv_rank + rows.rope_dim, 2 * rows.kv_width)
    return BlockExchange(
        sent_bytes=tokens * rows.hidden * rows.active * rows.capacity * (1 - rows.dense),
        keys_bytes=tokens * keys,
        attention_s=times[BLOCK, PARTS.index("attention")] / (1 + FUSED_BACKWARD + rows.checkpointed),
        ring=rows.ring,
    )


def _as_table(
    rows: Layouts, parts: dict[str, Floats], log_sd: Floats, model_flops: Floats, hardware_flops: Floats
) -> EstimateTable:
    """The table of what the GPUs take, with what the input adds, and memory."""
    busy = sum(parts.values(), np.zeros(len(rows)))
    # loaders prefetch: a batch is made while the step before it runs
    tokens = rows.global_batch * rows.seq_len
    loading = node_share(rows, rows.gpus_per_node) * tokens / rows.input_tokens_per_s
    waited = np.maximum(loading - busy, 0.0)
    step = busy + waited
    available = rows.peak_flops_per_s * rows.num_ranks * step
    memory = memory_of(rows)
    overhead = _overhead(rows, memory)
    return EstimateTable(
        step_time_s=step,
        input_s=waited,
        loading_s=loading,
        log_sd=log_sd,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        mfu=model_flops / available,
        hfu=hardware_flops / available,
        overhead_bytes=overhead,
        peak_memory_bytes=memory.live + overhead,
        **parts,
        **{f"{name}_bytes": getattr(memory, name) for name in MEMORY_PARTS if name != "overhead"},
    )


def _overhead(rows: Layouts, memory: MemoryParts) -> Floats:
    return np.asarray(CONTEXT_BYTES + group_bytes(rows) + ALLOCATOR_SLACK * memory.live)


def peak_bytes(rows: Layouts) -> Floats:
    """Bytes of the fullest GPU."""
    memory = memory_of(rows)
    return memory.live + _overhead(rows, memory)


def group_bytes(columns: Columns) -> Floats:
    """Bytes of NCCL's buffers: each parallel degree has process groups of its own."""
    degrees = (columns.tp, columns.pp, columns.dp, columns.cp, columns.ep)
    return np.asarray(GROUP_BYTES * sum((degree > 1.0) * 1.0 for degree in degrees))


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


def _machine(rows: Layouts) -> Machine:
    """Each row's model on its chip and links, by datasheets."""
    wide = rows.peak_flops_per_s * np.where(rows.fp8 > 0, 0.5, 1.0) * rows.matmul_efficiency
    head_dim = rows.attention_width / rows.heads
    of_chip: dict[str, Any] = {"memory_bytes_per_s": rows.memory_bytes_per_s, "processors": rows.processors}
    products = DatasheetProducts(flops_per_s=wide, width=rows.compute_width, **of_chip)
    narrow = DatasheetProducts(flops_per_s=2 * FP8_EFFICIENCY * wide, width=rows.compute_width, **of_chip)
    rates = Rates(
        device="cuda",
        matmul=dict.fromkeys(("float32", "tf32", "bfloat16", "float16"), products) | {"float8": narrow},
        attention_flops_per_s={
            "float32": attention_rate(wide, head_dim),
            "plain": EAGER_EFFICIENCY * head_dim / (head_dim + 24) * wide,
        },
        memory_bytes_per_s=BANDWIDTH_EFFICIENCY * rows.memory_bytes_per_s,
        dispatch_s=LAUNCH_S,
        casts_apart=False,
    )
    profile = ModelProfile.model_construct(
        method="closed_form",
        device="cuda",
        parameters=rows.parameters,
        trainable=rows.trainable,
        num_blocks=rows.layers,
        optimizer_state_bytes_per_parameter=rows.optimizer_bytes,
        parameter_tensors=12 * rows.layers,
        clips_gradients=True,
        linear_weights=(),
        boundary_bytes=line(per_sample=4.0 * rows.seq_len * rows.hidden),
    )
    return Machine(
        profile=profile,
        rates=rates,
        links=datasheet_links(rows.intra_bytes_per_s, rows.inter_bytes_per_s, rows.gpus_per_node),
        size=rows.size,
        widths=rows.widths,
    )


def memory_of(rows: Layouts) -> MemoryParts:
    """Bytes of live tensors on the fullest GPU, the first pipeline stage, by part."""
    size, widths, shape = rows.size, rows.widths, rows.shape
    states = state_bytes(rows, size, widths)
    blocks = np.ceil(rows.layers / rows.pp)
    one, kept, inputs = kept_by_policy(rows)
    loss = loss_bytes(shape, rows.tp, rows.samples, *(rows.loss == LOSSES.index(name) for name in ("fused", "chunked")))
    loss = np.where(rows.pp > 1, 0.0, loss)
    unit, outside = unit_gradient_bytes(size)
    made = widths.gradient * size.gradient_share / rows.tp * size.alone(rows)
    whole = made * (blocks * size.block_parameters + size.outside_parameters)

    def peaks(saved: Floats, ends: Floats) -> tuple[PeakFit, ...]:
        parts = (("head", saved + loss, 0.0), ("backward", saved + ends, made * size.block_parameters))
        parts += (("tail", one, whole),)  # type: ignore[assignment]
        return tuple(
            PeakFit.model_construct(part=part, first=line(later + more), later=line(later))
            for part, later, more in parts
        )

    plain, full = (
        transformer_variant([], peaks(saved, ends))
        for saved, ends in ((blocks * kept, 0.0 * one), (blocks * inputs, one))
    )
    first, later = micro_step_peak(plain, full, rows, (unit / rows.tp, outside / rows.tp))
    share = rows.checkpointed
    waiting = np.maximum(held_micro_batches(rows, rows.accumulation / rows.passes) - 1, 0.0)
    waiting = waiting * blocks * ((1 - share) * kept + share * inputs)
    return peak_parts(rows, size, states, first + waiting, later + waiting)


def kept_by_policy(rows: Layouts) -> tuple[Floats, Floats, Floats]:
    """Bytes that a block keeps of a micro-batch: all, by the row's policy where it is not checkpointed whole, and its
    input where it is."""
    apart = np.where(rows.sequence_parallel, rows.tp, 1.0)
    one = rows.samples * kept_bytes(rows.shape, rows.tp, apart)
    kept = np.where(rows.selective & ~rows.eager_attention, SELECTIVE_KEEPS * one, one)
    inputs = rows.compute_width * rows.samples * rows.seq_len * rows.hidden / apart
    return one, np.asarray(kept), np.asarray(inputs)


def activation_bytes(rows: Layouts) -> Floats:
    """Bytes that all blocks of the first stage keep for their backward, of all micro-batches that wait for it."""
    one, kept, inputs = kept_by_policy(rows)
    share, blocks = rows.checkpointed, np.ceil(rows.layers / rows.pp)
    held = held_micro_batches(rows, rows.accumulation / rows.passes) * blocks
    return np.asarray(((1 - share) * kept + share * inputs) * held + share * one)


def learn_correction(rows: Layouts, seconds: Floats) -> Correction:
    """The correction that measured step times teach; rows of one model on as many GPUs are one group of it."""
    groups = list(zip(rows.parameters, rows.num_ranks, strict=True))
    return learn(estimate_layouts(rows).busy_parts(), _kinds(rows), groups, seconds)


def _kinds(rows: Layouts) -> Floats:
    """Device and precision, as the rates that the datasheet has for them."""
    return np.column_stack([rows.peak_flops_per_s, rows.memory_bytes_per_s])
