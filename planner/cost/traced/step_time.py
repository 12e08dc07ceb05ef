"""Step time of candidates of one variant: the model's operations at the device's rates, communication, the pipeline.

    t_micro = t_matmul + t_attention + t_memory + t_dispatch          (CPU: one after another)
    t_micro = max(t_matmul + t_attention + t_memory, t_dispatch)      (CUDA: the host launches while the GPU works)

where each group of operations takes what was measured for it on this device, scaled by its FLOPs or bytes, or else
what the rates say.

Traced are the products of bf16. In 8 bits those of a linear layer with a weight of (n, k) and t tokens are three, each
with two operands that are cast anew (torchao.float8, matmul_with_hp_or_float8_args):

    output (t x k by k x n)        gradient of the input (t x n by n x k)        of the weight (n x t by t x k)

None of these was timed on a GPU: bytes are counted, rates are the probe's or in proportion to the datasheet's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoplan.planner.cost.calibrate import FACTORS
from autoplan.planner.cost.columns import COMPILES, DTYPES, PRECISIONS, SHARDINGS, STATES, Floats, first_of_each
from autoplan.planner.cost.communication import BlockExchange, Exchange, Links, boundary_width, exchange
from autoplan.planner.cost.offload import PARAMETERS, HostLink, Offloaded, transfer_s
from autoplan.planner.cost.roofline import LAUNCH_S
from autoplan.planner.cost.states import ModelSize, StateWidths
from autoplan.planner.cost.step import step_seconds
from autoplan.planner.cost.traced.candidates import FP8, Candidates
from autoplan.planner.cost.traced.memory import profile_size, profile_widths
from autoplan.planner.cost.traced.rates import Rates, is_aligned
from autoplan.planner.trace.model_profile import (
    IN_FUSED_LOSS,
    IN_RNN,
    ModelProfile,
    OperationGroup,
    VariantKey,
    VariantProfile,
)
from autoplan.strategies.techniques.sizes import RECIPES, reason_against_sizes

# The compiler fuses element-wise operations: what is left of their memory traffic and of their launches, per block or
# over the whole model. Bytes: tables (fms-fsdp). Launches: assumed; the calibration corrects the time. On a CPU, where
# such an operation was measured, its work on the elements stays and takes most of its time.
FUSED_BYTES = np.array([1.0, 0.57, 0.55])
FUSED_WORK = np.array([1.0, 0.8, 0.75])
FUSED_LAUNCHES = np.array([1.0, 0.35, 0.25])

# Passes of a compiled block's fused kernels over what its products and its attention read and write of the samples, at
# most (CUDA): each result is read once, each operand written once, and about as much is kept for the backward and
# in the residual stream. One H100, GPT-2 in bf16: 1.98 (benchmarks/results/h100).
FUSED_PASSES = 2.0
# What is left of the traffic between the products of the fused loss where that part is compiled (CUDA): the same run,
# 7.6 ms of 26 ms for 32,768 rows of 50,257 logits.
FUSED_LOSS_BYTES = 0.3

# What Liger's kernels leave of the memory traffic and of the launches of a block's element-wise operations: a norm of
# some eight passes and a gate of three become two each, a rotary embedding of six becomes two; residual sums and the
# casts of autocast stay. Assumed; no GPU has measured it.
LIGER_LEAVES = 0.6

# Passes over fp32 parameters that an Adam step makes in each form (by OPTIMIZERS), reads and writes, counted: the fused
# one reads parameter, gradient and two moments and writes three; the others also read and write every intermediate.
OPTIMIZER_PASSES = np.array([20.0, 20.0, 7.0])
# Operations that a step launches per parameter tensor, counted; foreach and fused forms take many tensors at once.
OPTIMIZER_LAUNCHES = np.array([14.0, 0.3, 0.1])
# What a step over rounded parameters and moments takes besides, in passes over fp32 numbers (4 bytes): with master
# copies, by chance without them, and by how moments are kept. CPU: measured, 8.4 million parameters on one core, where
# random numbers and the search of torchao's table cost more than what they move. CUDA: what is moved, counted in
# techniques/rounded_steps.py and torchao's quantize_8bit_with_qmap; not measured. And operations per tensor.
MASTER_PASSES = {"cpu": 13.0, "cuda": 6.0}
CHANCE_PASSES = {"cpu": 46.0, "cuda": 12.0}
MOMENT_PASSES = {"cpu": np.array([0.0, 118.0, 1140.0]), "cuda": np.array([0.0, 21.0, 210.0])}
MASTER_LAUNCHES, CHANCE_LAUNCHES = 5.0, 10.0
MOMENT_LAUNCHES = np.array([0.0, 18.0, 130.0])
# Clipping by the norm reads the gradients, reads them again and writes them: counted.
CLIP_PASSES = 3.0

# Selective checkpointing asks its policy in Python at every operation of a block, forward and recomputation (assumed;
# compiled blocks settle it at compile time)
SELECTIVE_DISPATCH_S = 3e-5

# glibc's allocator: DEFAULT_MMAP_THRESHOLD_MAX on 64 bits; and the share of the other activations whose memory it gave
# back since they were last held, in the backward or, checkpointed, block by block. Measured on four small models: 0 to
# 0.6, and with full checkpointing 0.4 to 0.6 of what the blocks would have kept.
LARGEST_KEPT_BYTES = 32 * 2**20
GIVEN_BACK = 0.45
# torch.utils.checkpoint per block and micro-step, twice through Python: hooks, the random state kept and set again
# (assumed from 0.3 to 0.5 ms on small blocks)
CHECKPOINT_DISPATCH_S = 3e-4

# Host seconds to launch one collective: assumed
COLLECTIVE_LAUNCH_S = 20e-6
# Host time of a pipeline stage per micro-batch: to receive, run, send, twice, and to pick the next instruction: tables
# (vTrain)
PIPELINE_TURN_S = 2e-3
# What an optimizer step takes on CUDA whatever its size: zero_grad, the norm that clipping waits for. Assumed.
STEP_OVERHEAD_S = 1e-3

# FSDP2's hooks on a CPU, per unit (a block, and the root) and micro-step, twice if it gathers again for the backward:
# copies into and out of the gathered buffer, and the threads of gloo. Measured: 5 ms in gpt-2 and 6 ms in vision-2, as
# benchmarks/search_tables.py first recorded them; the other two models were not used for it. On CUDA they hide.
FSDP_UNIT_S = 5e-3

# Timed matrix products that take so much longer than the probe's fit are left out; only large ones are compared,
# for small ones are mostly the host's time
SLOWER_THAN_PROBED = 3.0
COMPARED_FLOPS = 1e8

# A product of fewer operations takes as long on one thread as on more. Measured on two cores, torch 2.13, the time on
# one thread over that on two: 0.89 with 64 x 64 x 64 (5e5 operations), 1.27 with 96 x 96 x 96 (1.8e6), 1.56 with
# 256 x 256 x 256 (3.4e7).
SPREAD_FLOPS = 1e6

# Bytes of each number of an operand, read and written by its cast, counted. Compiled: read for the largest, read and
# written in 8 bits. Eager, each operation by itself: abs, max, to fp32, times the scale, clamp, to 8 bits (torchao
# 0.18), and the copy that puts one of two operands in the order that the kernel wants.
COMPILED_CAST = {2: 2 + 2 + 1, 4: 4 + 4 + 1}
EAGER_CAST = 34
# What is no longer done: autocast's cast of an fp32 weight to bf16, once in a forward (4 read, 2 written).
AUTOCAST_WEIGHT_BYTES = 6
# Launches of a product with its casts beyond the product's own, counted: compiled, two kernels for each operand; eager,
# some 12 (the scale is made in half a dozen operations on one number).
COMPILED_CAST_LAUNCHES, EAGER_CAST_LAUNCHES = 4.0, 25.0

PARTS = ("matmul", "fp8", "attention", "memory", "fused_memory", "dispatch")


BLOCK, REST = 0, 1
"""Segments of a model: one of its blocks, and what lies outside them."""


def segment_times(variant: VariantProfile, rates: Rates, candidates: Candidates, fp8: Mapping[int, Floats]) -> Floats:
    """Seconds of one micro-step for candidates of one variant.

    Args:
        variant: The traced variant.
        rates: Of the device.
        candidates: All of that variant.
        fp8: By product of the variant, its share that runs in 8 bits for each candidate, where it has one.

    Returns:
        An array of shape (2, parts, candidates): of one block, and of the rest; parts as in PARTS.
    """
    size = len(candidates)
    times = np.zeros((2, len(PARTS), size))
    slow = rates.thread_slowdown(candidates.threads, candidates.num_ranks)
    taking_turns = rates.turns(candidates.threads, candidates.num_ranks)
    sharing = rates.memory_slowdown(candidates.threads, candidates.num_ranks)
    whole = candidates.compiled == COMPILES.index("model")
    fused_share = _fused_share(variant, rates, candidates)
    for place, group in enumerate(variant.groups):
        one_s = _group_seconds(group, rates, candidates)
        # what lies outside the blocks stays eager where blocks are compiled
        fused = whole | ((group.segment == "block") & (candidates.compiled > 0))
        fused = fused & (not group.name.startswith(IN_RNN))
        if group.kind == "matmul":  # Inductor pads operands (torch/_inductor/fx_passes/pad_mm.py)
            one_s = np.where(fused, one_s / _misaligned(group, rates, candidates), one_s)
        seconds = one_s * group.count
        if group.kind == "memory":
            if rates.device == "cpu" and group.measured_s is not None:
                left = seconds * FUSED_WORK[candidates.compiled]
            else:
                share = fused_share if group.segment == "block" else FUSED_BYTES[candidates.compiled]
                left = _moved_seconds(group, rates, candidates) * group.count * share
            if rates.device == "cuda" and group.name.startswith(IN_FUSED_LOSS):  # in fp16 nothing of it is compiled
                seconds = np.where(candidates.precision == PRECISIONS.index("fp16"), 1.0, FUSED_LOSS_BYTES) * seconds
            seconds = np.where(fused, left, seconds)
            if group.segment == "block":
                seconds = np.where(candidates.liger, LIGER_LEAVES * seconds, seconds)
            seconds = seconds * sharing
        else:
            few = _flops(group, candidates) < SPREAD_FLOPS
            seconds = seconds * np.where(few, taking_turns, slow)
        target = times[BLOCK if group.segment == "block" else REST]
        in_8_bits = np.zeros(size)
        if place in fp8:
            in_8_bits = fp8[place] * group.count
            seconds = seconds * (1 - fp8[place])
            if rates.casts_apart:
                product_s = one_s * _time_ratio(group, rates, candidates, "float8", "bfloat16")
                product_s = product_s + cast_seconds(group, rates, candidates)
            else:
                product_s = _product_seconds(group, rates, candidates, "float8")
            target[PARTS.index("fp8")] += in_8_bits * product_s
        if group.kind == "memory":
            target[PARTS.index("fused_memory")] += np.where(fused, seconds, 0.0)
            target[PARTS.index("memory")] += np.where(fused, 0.0, seconds)
        else:
            target[PARTS.index("attention" if group.kind == "attention" else "matmul")] += seconds
        asked = SELECTIVE_DISPATCH_S if variant.key.checkpointing == "selective" and group.segment == "block" else 0.0
        dispatch = group.count * (rates.dispatch_s + np.where(fused, 0.0, asked))
        casts = np.where(candidates.compiled > 0, COMPILED_CAST_LAUNCHES, EAGER_CAST_LAUNCHES)
        if rates.casts_apart:
            dispatch = dispatch + in_8_bits * casts * rates.dispatch_s
        if group.kind == "memory":
            eager = np.where(candidates.liger & (group.segment == "block"), LIGER_LEAVES, 1.0)
            dispatch = dispatch * np.where(fused, FUSED_LAUNCHES[candidates.compiled], eager)
        target[PARTS.index("dispatch")] += np.where(candidates.graphs & fused, 0.0, dispatch)
    return times


def _fused_share(variant: VariantProfile, rates: Rates, candidates: Candidates) -> Floats:
    """What is left of the traffic of the element-wise operations of a compiled block."""
    share = FUSED_BYTES[candidates.compiled]
    blocks = [group for group in variant.groups if group.segment == "block"]
    used = sum(group.count * group.bytes_moved.per_sample for group in blocks if group.kind != "memory")
    if rates.device != "cuda" or not np.any(used):  # a closed form does not say what its products read and write
        return np.asarray(share)
    moved = [group for group in blocks if group.kind == "memory"]
    fixed = sum(group.count * group.bytes_moved.fixed for group in moved)  # casts of the weights, which stay
    grows = sum(group.count * group.bytes_moved.per_sample for group in moved) * candidates.samples
    most = FUSED_PASSES * used * candidates.samples + fixed
    return np.minimum(share, most / np.maximum(fixed + grows, 1.0))


def _moved_seconds(group: OperationGroup, rates: Rates, candidates: Candidates) -> Floats:
    """Seconds to move the bytes of one operation of a group."""
    moved = group.bytes_moved.at(candidates.samples)
    share = np.where(candidates.sequence_parallel, candidates.tp, 1.0)
    split = share if group.tensor_split == "all" else candidates.tp if group.tensor_split == "n" else 1.0
    return np.asarray(moved / split / rates.memory_bytes_per_s)


def _flops(group: OperationGroup, candidates: Candidates) -> Floats:
    """Floating-point operations of one operation of a group, on one rank."""
    return np.asarray(group.flops.at(candidates.samples) / _split(group, candidates))


def _split(group: OperationGroup, candidates: Candidates) -> Floats:
    """Over how many tensor-parallel ranks an operation of a group is split."""
    if group.tensor_split == "none":
        return np.ones_like(candidates.tp)
    return np.asarray(
        np.where(candidates.sequence_parallel, candidates.tp, 1.0) if group.tensor_split == "all" else candidates.tp
    )


def _group_seconds(group: OperationGroup, rates: Rates, candidates: Candidates) -> Floats:
    """Seconds of one operation of a group."""
    if group.measured_s is not None:
        return (
            measured_seconds(group, candidates.samples)
            / _split(group, candidates)
            * _tf32_share(group, rates, candidates)
        )
    if group.kind == "memory":
        return _moved_seconds(group, rates, candidates)
    flops = _flops(group, candidates)
    if group.kind == "attention":
        return np.asarray(flops / rates.attention_rate(group.dtype))
    if not np.any(group.m.at(1.0)):
        return np.asarray(flops / rates.matmul_fit(group.dtype).flops_per_s)
    return _product_seconds(group, rates, candidates) * _misaligned(group, rates, candidates)


def _misaligned(group: OperationGroup, rates: Rates, candidates: Candidates) -> Floats:
    """By how much a product takes longer since a size of its weight is not aligned; sizes of samples do not count.

    The rows of operands lie one after another; a size that samples make is never the length of a row.
    """
    factor = np.ones(len(candidates))
    if all(fit.misaligned == 1.0 for fit in rates.matmul.values()):
        return factor
    sizes = [fit.fixed for fit in (group.m, group.n, group.k) if fit.per_sample == 0]
    if group.kind != "matmul" or is_aligned(*sizes):
        return factor
    for code in np.unique(candidates.precision):
        dtype = _product_dtype(group.dtype, DTYPES[int(code)])
        factor[candidates.precision == code] = rates.matmul_fit(dtype).misaligned
    return factor


def _product_seconds(group: OperationGroup, rates: Rates, candidates: Candidates, dtype: str | None = None) -> Floats:
    """Seconds of one product of known sizes, in a given dtype or in each candidate's own."""
    samples, tp = candidates.samples, candidates.tp
    sizes = {}
    for name in ("m", "n", "k", "batch"):
        fit = getattr(group, name)
        sizes[name] = fit.at(samples)
        if group.tensor_split == name:
            sizes[name] = sizes[name] / tp
    if group.of_experts:  # the rank has fewer of them, and each has the tokens of all ranks that share them
        sizes["batch"] = sizes["batch"] / candidates.ep
        grows = next(name for name in ("m", "n", "k") if np.any(getattr(group, name).per_sample))
        sizes[grows] = sizes[grows] * candidates.ep
    count = np.maximum(sizes["batch"], 1.0)
    wanted = [dtype or _product_dtype(group.dtype, DTYPES[int(code)]) for code in np.unique(candidates.precision)]
    fits = [rates.matmul_fit(name) for name in wanted]
    if all(fit is fits[0] for fit in fits):
        return np.asarray(fits[0].seconds(sizes["m"], sizes["n"], sizes["k"], count))
    out = np.zeros_like(samples)
    for code, fit in zip(np.unique(candidates.precision), fits, strict=True):
        here = candidates.precision == code
        batch = np.broadcast_to(count, samples.shape)[here]
        m, n, k = (np.broadcast_to(sizes[name], samples.shape)[here] for name in ("m", "n", "k"))
        out[here] = fit.seconds(m, n, k, batch)
    return out


def _tf32_share(group: OperationGroup, rates: Rates, candidates: Candidates) -> Floats:
    """The time in TF32 of a product that was timed in fp32, as a share of that time; 1 for the others.

    Both precisions have one traced variant, whose tensors are fp32.
    """
    in_tf32 = candidates.precision == PRECISIONS.index("tf32")
    if group.kind != "matmul" or group.dtype != "float32" or not in_tf32.any():
        return np.ones_like(candidates.micro_batch)
    ratio = _time_ratio(group, rates, candidates, "tf32", "float32") * _misaligned(group, rates, candidates)
    return np.where(in_tf32, ratio, 1.0)


def _time_ratio(group: OperationGroup, rates: Rates, c: Candidates, dtype: str, plain: str) -> Floats:
    """The time of a product in one dtype over its time in another, by the rates at its sizes, if these are known."""
    fast, slow = rates.matmul_fit(dtype), rates.matmul_fit(plain)
    if group.m.at(1) == 0:
        return np.full(len(c), slow.flops_per_s / fast.flops_per_s)
    m, n, k = (fit.at(c.samples) for fit in (group.m, group.n, group.k))
    return fast.seconds(m, n, k) / slow.seconds(m, n, k)


def measured_seconds(group: OperationGroup, samples: Floats) -> Floats:
    """The timed seconds, in proportion to the work; between two sizes that were timed, on the line between them."""
    assert group.measured_s is not None
    work = group.flops if group.flops.at(1) > 0 else group.bytes_moved
    here = work.at(samples)
    small_batch = max(work.at(group.measured_samples), 1.0)
    if group.measured_more_s is None:
        return np.asarray(group.measured_s * here / small_batch)
    large_batch = work.at(group.measured_more_samples)
    between = group.measured_s + (group.measured_more_s - group.measured_s) * (here - small_batch) / max(
        large_batch - small_batch, 1.0
    )
    beyond = group.measured_more_s * here / large_batch
    below = group.measured_s * here / small_batch
    return np.where(here > large_batch, beyond, np.where(here < small_batch, below, between))


def discard_outlier_timings(profile: ModelProfile, rates: Rates) -> ModelProfile:
    """The profile with its timed operations, or without where something else ran while they were timed.

    The probes, which measured in more patience, know how long matrix products take; where the timed ones take several
    times as long at the median, all that was timed with them is as wrong (a busy core makes two threads that wait for
    each other ten to twenty times slower).
    """
    ratios = []
    for variant in profile.variants.values():
        for group in variant.groups:
            sizes = [fit.at(group.measured_samples) for fit in (group.m, group.n, group.k)]
            large = group.flops.at(group.measured_samples) >= COMPARED_FLOPS
            if group.measured_s is None or group.kind != "matmul" or not (large and all(sizes)):
                continue
            m, n, k = (np.array([size]) for size in sizes)
            batch = max(group.batch.at(group.measured_samples), 1.0)
            ratios.append(group.measured_s / float(batch * rates.matmul_fit(group.dtype).seconds(m, n, k)[0]))
    if not ratios or np.median(ratios) < SLOWER_THAN_PROBED:
        return profile
    variants = {
        name: variant.model_copy(
            update={"groups": tuple(group.model_copy(update={"measured_s": None}) for group in variant.groups)}
        )
        for name, variant in profile.variants.items()
    }
    note = "the timed operations were left out: they took several times as long as the probes' (a busy machine)"
    return profile.model_copy(update={"variants": variants, "notes": (*profile.notes, note)})


def first_touches(variant: VariantProfile, num_blocks: int, candidates: Candidates) -> Floats:
    """Bytes per micro-step in allocations so large that the C library maps each anew (glibc: past 32 MiB)."""
    out = np.zeros(len(candidates))
    for group in variant.groups:
        # a batch of alike operations allocates one after the other
        batch = max(group.batch.at(group.measured_samples or 1.0), 1.0) if group.kind == "memory" else 1.0
        size = group.output_bytes.at(candidates.samples)
        count = group.count * (num_blocks if group.segment == "block" else 1)
        out += np.where(size / batch > LARGEST_KEPT_BYTES, count * size, 0.0)
    return out


def _product_dtype(traced: str, wanted: str) -> str:
    """The dtype whose rate holds: traced in half, the candidate's own half; traced in fp32, perhaps TF32."""
    if traced in ("bfloat16", "float16"):
        return wanted if wanted in ("bfloat16", "float16", "float8") else traced
    return "tf32" if wanted == "tf32" else "float32"


def optimizer_seconds(profile: ModelProfile, rates: Rates, candidates: Candidates, share: Floats) -> Floats:
    """Seconds of clipping and stepping, over the share of the trainable parameters that a rank holds.

    An optimizer without state (SGD) makes 3 passes, one with momentum 5.
    """
    c, states = candidates, np.asarray(profile.optimizer_state_bytes_per_parameter) / 4
    passes = np.where(states >= 1.5, OPTIMIZER_PASSES[c.optimizer_step], 3.0 + 2 * states)
    in_bf16 = (c.states != STATES.index("fp32")) & (c.states != STATES.index("megatron"))
    clip = np.where(in_bf16, 0.5, 1.0) * np.where(profile.clips_gradients, CLIP_PASSES, 0.0)
    rounding = (
        np.where(in_bf16, np.where(c.by_chance, CHANCE_PASSES[rates.device], MASTER_PASSES[rates.device]), 0.0)
        + np.where(c.states == STATES.index("megatron"), 0.5, 0.0)  # the 16-bit weights are written too
        + MOMENT_PASSES[rates.device][c.moments]
    )
    moved = 4.0 * profile.trainable * share * (passes + clip + rounding)
    launches = OPTIMIZER_LAUNCHES[c.optimizer_step] + MOMENT_LAUNCHES[c.moments]
    launches = (launches + np.where(in_bf16, np.where(c.by_chance, CHANCE_LAUNCHES, MASTER_LAUNCHES), 0.0)) * (
        profile.parameter_tensors
    )
    work = moved / rates.memory_bytes_per_s * rates.memory_slowdown(c.threads, c.num_ranks)
    dispatch = launches * rates.dispatch_s
    if rates.device == "cuda":
        return np.maximum(work, dispatch) + STEP_OVERHEAD_S
    return work + dispatch


def executed_flops(variant: VariantProfile, num_blocks: int | Floats, samples: Floats) -> Floats:
    """FLOPs that a micro-step executes, recomputation included."""
    out = np.zeros_like(samples)
    for group in variant.groups:
        count = group.count * (num_blocks if group.segment == "block" else 1)
        out += count * group.flops.at(samples)
    return out


def fp8_shares(variant: VariantProfile, profile: ModelProfile, c: Candidates) -> dict[int, Floats]:
    """The shares of a variant's products; empty where no candidate has products in 8 bits.

    A product is one of a linear layer that is taken if it has that layer's sizes. Where the trace has more products of
    these sizes than layers are taken, it is that share of them.
    """
    shares: dict[int, Floats] = {}
    for recipe in RECIPES:
        here = c.fp8 == FP8.index(recipe)
        if not here.any():
            continue
        taken = {(n, k): count for n, k, count in profile.linear_weights if reason_against_sizes(n, k, recipe) is None}
        by_sizes: dict[frozenset[int], int] = {}  # a product tells the weight's sizes, not which of them is which
        for (n, k), count in taken.items():
            by_sizes[frozenset((n, k))] = by_sizes.get(frozenset((n, k)), 0) + count
        made: dict[frozenset[int], float] = {}
        for group in variant.groups:
            if group.phase == "forward" and (sizes := _sizes(group)) is not None:
                blocks = profile.num_blocks if group.segment == "block" else 1
                made[sizes] = made.get(sizes, 0.0) + group.count * blocks
        for place, group in enumerate(variant.groups):
            sizes = _sizes(group)
            if sizes is not None and sizes in by_sizes:
                share = min(1.0, by_sizes[sizes] / made[sizes]) if made.get(sizes) else 1.0
                shares[place] = np.where(here, share, shares.get(place, np.zeros(len(c))))
    return shares


def all_fp8_shares(variant: VariantProfile, profile: ModelProfile, c: Candidates) -> dict[int, Floats]:
    """The same where all products of blocks run in 8 bits, as Transformer Engine has it."""
    share = np.where(c.fp8 > 0, 1.0, 0.0)
    found = ((i, g) for i, g in enumerate(variant.groups) if g.kind == "matmul" and g.segment == "block")
    return {place: share for place, group in found if group.name != "router"} if share.any() else {}


def _sizes(group: OperationGroup) -> frozenset[int] | None:
    """The two sizes of a single product that no sample changes, beside one that samples do: a weight's."""
    if group.kind != "matmul" or group.m.at(1) == 0 or group.batch.at(2) > 1:
        return None
    fixed = [round(fit.fixed) for fit in (group.m, group.n, group.k) if fit.per_sample == 0]
    return frozenset(fixed) if len(fixed) == 2 else None


def cast_seconds(group: OperationGroup, rates: Rates, c: Candidates) -> Floats:
    """Seconds of the casts of both operands of one product.

    The layers that are taken lie in blocks, which any compiled run compiles: there the passes of a cast are fused.
    """
    m, n, k = (fit.at(c.samples) for fit in (group.m, group.n, group.k))
    moved = np.zeros(len(c))
    in_fp32 = c.states == STATES.index("fp32")
    for numbers, is_weight in (
        (m * k, group.m.per_sample == 0 and group.k.per_sample == 0),
        (k * n, group.n.per_sample == 0 and group.k.per_sample == 0),
    ):
        wide = in_fp32 & is_weight
        compiled = np.where(wide, COMPILED_CAST[4], COMPILED_CAST[2])
        saved = np.where(wide & (group.phase == "forward"), AUTOCAST_WEIGHT_BYTES, 0)
        moved += numbers * (np.where(c.compiled > 0, compiled, EAGER_CAST) - saved)
    return np.asarray(moved / rates.memory_bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A traced model on a machine: what it does, how fast the device does it, its links to other ranks and the host.

    `size`, `widths`: None: as the profile and the workload's optimizer have them.
    """

    profile: ModelProfile
    rates: Rates
    links: Links
    host: HostLink = HostLink()
    size: ModelSize | None = None
    widths: StateWidths | None = None
    block_exchange: BlockExchange | None = None


def parts_of_step(
    machine: Machine, times: Floats, flops: Floats, c: Candidates, moved_out: Offloaded | None
) -> tuple[Floats, Floats, Floats]:
    """The parts of a step, before any calibration.

    Args:
        machine: The model, the device and the links.
        times: Of a micro-step's operations, of shape (2, parts, candidates), as `blended_times` has them.
        flops: Of a micro-step.
        c: The candidates.
        moved_out: What lies on the host; None: nothing.

    Returns:
        Seconds per calibration factor, of shape (factors, candidates), first touches and the bubble left out; seconds
        of the bubble; FLOPs executed by all ranks.
    """
    profile = machine.profile
    size, widths = machine.size or profile_size(profile), machine.widths or profile_widths(profile, c)
    boundary = np.asarray(profile.boundary_bytes.at(c.samples) * boundary_width(c) / 4)
    moved = exchange(c, machine.links, size, widths, boundary, machine.block_exchange)
    stage, all_stages = _stage_seconds(machine, times, c, moved)
    stage_s = stage.sum(axis=0)
    device = machine.rates.device
    communication_s, bubble_s = step_seconds(c, moved, stage_s=stage_s, all_stages_s=all_stages, device=device)
    parts = _factor_rows(machine, stage * c.accumulation, c)
    if moved_out is not None and np.any(moved_out.offload):
        parts[FACTORS.index("communication")] = transfer_s(moved_out, machine.host, c, stage_s, device)
    parts[FACTORS.index("communication")] += communication_s
    return parts, bubble_s, flops * c.accumulation * c.dp * c.cp


def launch_over_work(machine: Machine, plain: VariantProfile, full: VariantProfile, c: Candidates) -> Floats:
    """Seconds in which the host launches a micro-step over those in which the device works at it."""
    times, _ = blended_times(machine, plain, full, c)
    through = times[BLOCK] * machine.profile.num_blocks + times[REST]
    launching = PARTS.index("dispatch")
    return np.asarray(through[launching] / np.maximum(np.delete(through, launching, axis=0).sum(axis=0), 1e-30))


def blended_times(
    machine: Machine, plain: VariantProfile, full: VariantProfile, c: Candidates
) -> tuple[Floats, Floats]:
    """Times of one micro-step as `segment_times` has them, and FLOPs; between no block and all blocks checkpointed.

    `full` is the variant with every block checkpointed: the same object where no candidate checkpoints whole blocks.
    They are worked out once for all candidates that differ in nothing that they depend on.
    """
    first, kind = first_of_each(c.micro_step)
    times, flops = times_of_kinds(machine, plain, full, c.take(first))
    return times[..., kind], flops[kind]


def times_of_kinds(
    machine: Machine, plain: VariantProfile, full: VariantProfile, c: Candidates
) -> tuple[Floats, Floats]:
    """The same for candidates of which each is worked out."""
    profile, share = machine.profile, c.checkpointed
    shares = fp8_shares if machine.rates.casts_apart else all_fp8_shares
    times = segment_times(plain, machine.rates, c, shares(plain, profile, c))
    flops = executed_flops(plain, profile.num_blocks, c.samples)
    if plain is full:
        return times, flops
    other = segment_times(full, machine.rates, c, shares(full, profile, c))
    mixed = (1 - share) * times + share * other
    if machine.rates.dispatch_s != LAUNCH_S:  # which is of checkpointed blocks, and holds it
        mixed[BLOCK, PARTS.index("dispatch")] += share * CHECKPOINT_DISPATCH_S
    full_flops = executed_flops(full, profile.num_blocks, c.samples)
    return mixed, (1 - share) * flops + share * full_flops


def _stage_seconds(machine: Machine, times: Floats, c: Candidates, moved: Exchange) -> tuple[Floats, Floats]:
    """Seconds per part of a micro-step on the fullest stage, and seconds of a micro-batch through all stages.

    The fullest stage has as many blocks as any, and the output head. On CUDA the launches hide behind the GPU's work;
    collectives are launched by the same thread.
    """
    num_blocks = np.asarray(machine.profile.num_blocks)
    stage = times[BLOCK] * np.ceil(num_blocks / c.pp) + times[REST]
    through = times[BLOCK] * num_blocks + times[REST]
    if machine.rates.device == "cpu":
        return stage, through.sum(axis=0)
    turn = np.where(c.pp > 1, PIPELINE_TURN_S, 0.0)
    collectives = (c.tp > 1) * np.ceil(num_blocks / c.pp) * (4 + 2 * c.checkpointed)
    launched = stage[-1] + collectives * COLLECTIVE_LAUNCH_S
    stage[-1] = np.maximum(launched - stage[:-1].sum(axis=0) - moved.tensor_s - moved.send_s, 0.0) + turn
    return stage, np.maximum(through[:-1].sum(axis=0), through[-1]) + c.pp * turn


def _factor_rows(machine: Machine, stage: Floats, c: Candidates) -> Floats:
    """Seconds per step and calibration factor, from seconds per part: products by precision, the optimizer apart."""
    part, profile, rates = dict(zip(PARTS, stage, strict=True)), machine.profile, machine.rates
    # later micro-steps' gradients are added to the first's: two read, one written
    a_number = np.where(c.states == STATES.index("fp32"), 12.0, 6.0)
    # Megatron's products add to its fp32 gradients themselves (gradient_accumulation_fusion)
    a_number = np.where(c.states == STATES.index("megatron"), 0.0, a_number)
    a_number = a_number / np.where(c.keeps_whole_gradients, 1.0, c.shards)
    added = a_number * profile.trainable / (c.tp * c.pp) * np.maximum(c.accumulation - 1, 0.0)
    optimizer = optimizer_seconds(profile, rates, c, 1 / (c.tp * c.pp * c.shards))
    # shards that lie on the host are stepped in the host's memory
    slower = np.maximum(rates.memory_bytes_per_s / machine.host.host_bytes_per_s, 1.0)
    # FSDP's hooks on a CPU
    again = np.where(c.sharding == SHARDINGS.index("zero3"), 2.0, 1.0)
    hooks = FSDP_UNIT_S * (np.ceil(profile.num_blocks / c.pp) + 1) * c.accumulation * again
    hooked = c.shards_parameters & (c.shards > 1) & (rates.device == "cpu")
    rows = {
        "matmul/full": np.where(c.half, 0.0, part["matmul"]),
        "matmul/half": np.where(c.half, part["matmul"], 0.0),
        "matmul/fp8": part["fp8"],
        "attention": part["attention"],
        "memory": part["memory"] + added / rates.memory_bytes_per_s,
        "fused_memory": part["fused_memory"],
        "dispatch": part["dispatch"] + np.where(hooked, hooks, 0.0),
        "optimizer": np.where(c.offload == PARAMETERS, slower * optimizer, optimizer),
    }
    return np.stack([rows.get(name, np.zeros(len(c))) for name in FACTORS])


def model_flops(profile: ModelProfile, global_batch: int) -> float:
    """FLOPs of a step without recomputation, of the plainest variant: three forward passes, or fewer where less is
    trained. Fused attention's backward, which runs its forward again, is not among them."""
    keys = [VariantKey(precision=p) for p in ("fp32", "half")]
    variant = next((profile.variants[k.text()] for k in keys if k.text() in profile.variants), None)
    if variant is None:
        return 0.0
    one = np.array([1.0])
    forward = variant.model_copy(update={"groups": tuple(g for g in variant.groups if g.phase == "forward")})
    executed, once = (executed_flops(some, profile.num_blocks, one)[0] for some in (variant, forward))
    return float(min(executed, 3 * once) * global_batch)
