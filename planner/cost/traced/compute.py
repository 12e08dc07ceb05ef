"""Compute: seconds of one micro-step and of the optimizer step, part by part: the model's operations at the rates.

    t_micro = t_matmul + t_attention + t_memory + t_dispatch          (CPU: one after another)
    t_micro = max(t_matmul + t_attention + t_memory, t_dispatch)      (CUDA: the host launches while the GPU works)

where each group of operations takes what was measured for it on this device, scaled by its FLOPs or bytes, or else
what the rates say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoplan.planner.cost.columns import COMPILES, DTYPES, STATES, Floats
from autoplan.planner.cost.traced.candidates import Candidates
from autoplan.planner.cost.traced.fp8 import Fp8Shares, fp8_dispatch_s, fp8_seconds
from autoplan.planner.cost.traced.rates import Rates
from autoplan.planner.trace.model_profile import ModelProfile, OperationGroup, VariantProfile

# The compiler fuses element-wise operations: what is left of their memory traffic and of their launches, per block or
# over the whole model. Assumed to begin with (fusing gelu, dropout, residual and norm of a GPT-2 block leaves about a
# third of the tensors read and written); the calibration corrects the time. On a CPU, where such an operation was
# measured, its work on the elements stays and takes most of its time.
FUSED_BYTES = np.array([1.0, 0.45, 0.42])
FUSED_WORK = np.array([1.0, 0.8, 0.75])
FUSED_LAUNCHES = np.array([1.0, 0.35, 0.25])

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
# The pages of a step fault from several threads into memory that was given back in pieces; the probe's, from one
# buffer, cost half as much (two models, measured)
FAULTS_APART = 1.0
# torch.utils.checkpoint per block and micro-step, twice through Python: hooks, the random state kept and set again
# (assumed from 0.3 to 0.5 ms on small blocks)
CHECKPOINT_DISPATCH_S = 3e-4

# Timed matrix products that take so much longer than the probe's fit are left out; only large ones are compared,
# for small ones are mostly the host's time
SLOWER_THAN_PROBED = 3.0
COMPARED_FLOPS = 1e8

PARTS = ("matmul", "fp8", "attention", "memory", "fused_memory", "dispatch")


@dataclass(kw_only=True, slots=True)
class SegmentTimes:
    """Seconds per micro-step, split by what it is: parts (rows as PARTS) of one block and of the rest."""

    block: Floats
    rest: Floats


def segment_times(
    variant: VariantProfile, rates: Rates, candidates: Candidates, fp8: Fp8Shares | None = None
) -> SegmentTimes:
    """Times of one micro-step for candidates of one variant.

    Args:
        variant: The traced variant.
        rates: Of the device.
        candidates: All of that variant.
        fp8: By product of the variant, its share that runs in 8 bits for each candidate; None: nothing does.

    Returns:
        Arrays of shape (parts, candidates).
    """
    size = len(candidates)
    times = SegmentTimes(
        block=np.zeros((len(PARTS), size)),
        rest=np.zeros((len(PARTS), size)),
    )
    slow = rates.thread_slowdown(candidates.threads)
    whole = candidates.compiled == COMPILES.index("model")
    for place, group in enumerate(variant.groups):
        one_s = _group_seconds(group, rates, candidates)
        seconds = one_s * group.count
        # what lies outside the blocks stays eager where blocks are compiled
        fused = whole | ((group.segment == "block") & (candidates.compiled > 0))
        if group.kind == "memory":
            row = np.where(fused, PARTS.index("fused_memory"), PARTS.index("memory"))
            if rates.device == "cpu" and group.measured_s is not None:
                left = seconds * FUSED_WORK[candidates.compiled]
            else:
                left = _moved_seconds(group, rates, candidates) * group.count * FUSED_BYTES[candidates.compiled]
            seconds = np.where(fused, left, seconds)
            if group.segment == "block":
                seconds = np.where(candidates.liger, LIGER_LEAVES * seconds, seconds)
        else:
            row = np.full(size, PARTS.index("attention" if group.kind == "attention" else "matmul"))
            seconds = seconds * slow
        target = times.block if group.segment == "block" else times.rest
        in_8_bits = np.zeros(size)
        if fp8 is not None and place in fp8:
            in_8_bits = fp8[place] * group.count
            seconds = seconds * (1 - fp8[place])
            target[PARTS.index("fp8")] += in_8_bits * fp8_seconds(group, one_s, rates, candidates)
        np.add.at(target, (row, np.arange(size)), seconds)
        asked = SELECTIVE_DISPATCH_S if variant.key.checkpointing == "selective" and group.segment == "block" else 0.0
        dispatch = group.count * (rates.dispatch_s + np.where(fused, 0.0, asked))
        dispatch = dispatch + in_8_bits * fp8_dispatch_s(rates, candidates)
        if group.kind == "memory":
            eager = np.where(candidates.liger & (group.segment == "block"), LIGER_LEAVES, 1.0)
            dispatch = dispatch * np.where(fused, FUSED_LAUNCHES[candidates.compiled], eager)
        target[PARTS.index("dispatch")] += np.where(candidates.graphs & fused, 0.0, dispatch)
    return times


def _moved_seconds(group: OperationGroup, rates: Rates, candidates: Candidates) -> Floats:
    """Seconds to move the bytes of one operation of a group."""
    moved = group.bytes_moved.fixed + group.bytes_moved.per_sample * candidates.micro_batch
    share = np.where(candidates.sequence_parallel, candidates.tp, 1.0)
    split = share if group.tensor_split == "all" else 1.0
    return np.asarray(moved / split / rates.memory_bytes_per_s)


def _group_seconds(group: OperationGroup, rates: Rates, candidates: Candidates) -> Floats:
    """Seconds of one operation of a group."""
    samples = candidates.micro_batch
    tp = candidates.tp
    share = np.where(candidates.sequence_parallel, tp, 1.0) if group.tensor_split == "all" else tp
    split = np.ones_like(tp) if group.tensor_split == "none" else share
    if group.measured_s is not None:
        return measured_seconds(group, samples) / split * _tf32_share(group, rates, candidates)
    if group.kind == "memory":
        return _moved_seconds(group, rates, candidates)
    flops = (group.flops.fixed + group.flops.per_sample * samples) / split
    if group.kind == "attention" or group.m.at(1) == 0:
        rate = rates.attention_rate(group.dtype) if group.kind == "attention" else None
        if rate is None:
            rate = 1 / rates.matmul_fit(group.dtype).coefficients[0]
        return np.asarray(flops / rate)
    sizes = {}
    for name in ("m", "n", "k", "batch"):
        fit = getattr(group, name)
        sizes[name] = fit.fixed + fit.per_sample * samples
        if group.tensor_split == name:
            sizes[name] = sizes[name] / tp
    count = np.maximum(sizes["batch"], 1.0)
    out = np.zeros_like(samples)
    for code in np.unique(candidates.precision):
        here = candidates.precision == code
        dtype = _product_dtype(group.dtype, DTYPES[int(code)])
        fit = rates.matmul_fit(dtype)
        batch = count[here] if isinstance(count, np.ndarray) else count
        one = fit.coefficients.copy()
        one[4] = 0.0  # a batch is one launch
        m, n, k = (np.broadcast_to(sizes[name], samples.shape)[here] for name in ("m", "n", "k"))
        out[here] = (
            batch * (one[0] * 2 * m * n * k + one[1] * m * n + one[2] * n * k + one[3] * m * k) + fit.coefficients[4]
        )
    return out


def _tf32_share(group: OperationGroup, rates: Rates, candidates: Candidates) -> Floats:
    """What a product that was timed in fp32 takes in TF32, of that time, by the rates at its sizes; 1 for the others.

    Both precisions have one traced variant, whose tensors are fp32.
    """
    in_tf32 = np.array([DTYPES[int(code)] == "tf32" for code in candidates.precision])
    if group.kind != "matmul" or group.dtype != "float32" or not in_tf32.any():
        return np.ones_like(candidates.micro_batch)
    fast, plain = rates.matmul_fit("tf32"), rates.matmul_fit("float32")
    ratio: Any = fast.coefficients[0] / plain.coefficients[0]
    if group.m.at(1) > 0:
        m, n, k = (fit.fixed + fit.per_sample * candidates.micro_batch for fit in (group.m, group.n, group.k))
        ratio = fast.seconds(m, n, k) / plain.seconds(m, n, k)
    return np.asarray(np.where(in_tf32, ratio, 1.0))


def measured_seconds(group: OperationGroup, samples: Floats) -> Floats:
    """What was timed, in proportion to its work; between two sizes that were timed, on the line between them."""
    assert group.measured_s is not None
    work = group.flops if group.flops.at(1) > 0 else group.bytes_moved
    here = work.fixed + work.per_sample * samples
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
        size = group.output_bytes.fixed + group.output_bytes.per_sample * candidates.micro_batch
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
    states = profile.optimizer_state_bytes_per_parameter / 4
    passes = (
        OPTIMIZER_PASSES[candidates.optimizer_step] if states >= 1.5 else np.full(len(candidates), 3.0 + 2 * states)
    )
    c = candidates
    in_bf16 = c.states != STATES.index("fp32")
    clip = np.where(in_bf16, 0.5, 1.0) * (CLIP_PASSES if profile.clips_gradients else 0.0)
    rounding = (
        np.where(in_bf16, np.where(c.by_chance, CHANCE_PASSES[rates.device], MASTER_PASSES[rates.device]), 0.0)
        + MOMENT_PASSES[rates.device][c.moments]
    )
    moved = 4.0 * profile.trainable * share * (passes + clip + rounding)
    launches = OPTIMIZER_LAUNCHES[c.optimizer_step] + MOMENT_LAUNCHES[c.moments]
    launches = (launches + np.where(in_bf16, np.where(c.by_chance, CHANCE_LAUNCHES, MASTER_LAUNCHES), 0.0)) * (
        profile.parameter_tensors
    )
    work = moved / rates.memory_bytes_per_s
    dispatch = launches * rates.dispatch_s
    if rates.device == "cuda":
        return np.maximum(work, dispatch)
    return work + dispatch


def executed_flops(variant: VariantProfile, num_blocks: int, samples: Floats) -> Floats:
    """FLOPs that a micro-step executes, recomputation included."""
    out = np.zeros_like(samples)
    for group in variant.groups:
        count = group.count * (num_blocks if group.segment == "block" else 1)
        out += count * (group.flops.fixed + group.flops.per_sample * samples)
    return out
