"""Step time of candidates of one variant: traced operations at the device's rates, communication, the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.planner.cost.calibrate import FACTORS
from autoplan.planner.cost.columns import STATES, Floats
from autoplan.planner.cost.communication import Links, exchange
from autoplan.planner.cost.offload import PARAMETERS, HostLink, transfer_s
from autoplan.planner.cost.step import step_seconds
from autoplan.planner.cost.traced.candidates import Candidates
from autoplan.planner.cost.traced.compute import (
    CHECKPOINT_DISPATCH_S,
    PARTS,
    SegmentTimes,
    executed_flops,
    optimizer_seconds,
    segment_times,
)
from autoplan.planner.cost.traced.fp8 import fp8_shares
from autoplan.planner.cost.traced.memory import profile_size, profile_widths, traced_offload
from autoplan.planner.cost.traced.rates import Rates
from autoplan.planner.trace.model_profile import ModelProfile, VariantKey, VariantProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A traced model on a machine: what it does, how fast the device does it, its links to other ranks and the host.

    `device` is cpu or cuda.
    """

    profile: ModelProfile
    rates: Rates
    links: Links
    device: str
    host: HostLink = HostLink()


def step_parts(
    machine: Machine, plain: VariantProfile, full: VariantProfile, c: Candidates
) -> tuple[Floats, Floats, Floats]:
    """The parts of a step of candidates of one variant, before any calibration.

    Args:
        machine: The model, the device and the links.
        plain: The variant without whole-block checkpointing.
        full: The same with every block checkpointed; the same object where no candidate checkpoints whole blocks.
        c: All of that variant.

    Returns:
        Seconds per calibration factor, of shape (factors, candidates), first touches and the bubble left out; seconds
        of the bubble; FLOPs executed by all ranks.
    """
    profile = machine.profile
    times, flops = _blended_times(machine, plain, full, c)
    stage, all_stages = _stage_seconds(machine, times, c)
    boundary = profile.boundary_bytes.fixed + profile.boundary_bytes.per_sample * c.micro_batch
    moved = exchange(c, machine.links, profile_size(profile), profile_widths(profile, c), np.asarray(boundary))
    step = step_seconds(c, moved, stage_s=stage.sum(axis=0), all_stages_s=all_stages, device=machine.device)
    parts = _factor_rows(machine, stage * c.accumulation, c)
    copies = transfer_s(
        traced_offload(plain, full, profile, c),
        machine.host,
        c,
        profile_size(profile),
        micro_step_s=stage.sum(axis=0),
        optimizer_s=parts[FACTORS.index("optimizer")],
        device=machine.device,
    )
    parts[FACTORS.index("communication")] = step.communication_s + copies
    return parts, step.bubble_s, flops * c.accumulation * c.dp


def launch_over_work(machine: Machine, plain: VariantProfile, full: VariantProfile, c: Candidates) -> Floats:
    """Seconds in which the host launches a micro-step over those in which the device works at it."""
    times, _ = _blended_times(machine, plain, full, c)
    through = times.block * machine.profile.num_blocks + times.rest
    launching = PARTS.index("dispatch")
    return np.asarray(through[launching] / np.maximum(np.delete(through, launching, axis=0).sum(axis=0), 1e-30))


def _blended_times(
    machine: Machine, plain: VariantProfile, full: VariantProfile, c: Candidates
) -> tuple[SegmentTimes, Floats]:
    """Times and FLOPs of one micro-step, between no block and every block checkpointed whole."""
    profile, share = machine.profile, c.checkpointed
    times = segment_times(plain, machine.rates, c, fp8_shares(plain, profile, c))
    flops = executed_flops(plain, profile.num_blocks, c.micro_batch)
    if plain is full:
        return times, flops
    other = segment_times(full, machine.rates, c, fp8_shares(full, profile, c))
    names = ("block", "rest")
    mixed = {name: (1 - share) * getattr(times, name) + share * getattr(other, name) for name in names}
    mixed["block"][PARTS.index("dispatch")] += share * CHECKPOINT_DISPATCH_S
    full_flops = executed_flops(full, profile.num_blocks, c.micro_batch)
    return SegmentTimes(**mixed), (1 - share) * flops + share * full_flops


def _stage_seconds(machine: Machine, times: SegmentTimes, c: Candidates) -> tuple[Floats, Floats]:
    """Seconds per part of a micro-step on the fullest stage, and seconds of a micro-batch through all stages.

    The fullest stage has as many blocks as any, and the output head. On CUDA the launches hide behind the GPU's work.
    """
    num_blocks = machine.profile.num_blocks
    stage = times.block * np.ceil(num_blocks / c.pp) + times.rest
    through = times.block * num_blocks + times.rest
    if machine.device == "cpu":
        return stage, through.sum(axis=0)
    stage[-1] = np.maximum(stage[-1] - stage[:-1].sum(axis=0), 0.0)
    return stage, np.maximum(through[:-1].sum(axis=0), through[-1])


def _factor_rows(machine: Machine, stage: Floats, c: Candidates) -> Floats:
    """Seconds per step and calibration factor, from seconds per part: products by precision, the optimizer apart."""
    part = dict(zip(PARTS, stage, strict=True))
    rows = {
        "matmul/full": np.where(c.half, 0.0, part["matmul"]),
        "matmul/half": np.where(c.half, part["matmul"], 0.0),
        "matmul/fp8": part["fp8"],
        "attention": part["attention"],
        "memory": part["memory"] + _adding_gradients_s(machine, c),
        "fused_memory": part["fused_memory"],
        "dispatch": part["dispatch"],
        "optimizer": _optimizer_s(machine, c),
    }
    return np.stack([rows.get(name, np.zeros(len(c))) for name in FACTORS])


def _optimizer_s(machine: Machine, c: Candidates) -> Floats:
    """Seconds of the optimizer's step: on the device, or where the shards lie on the host in the host's memory."""
    here = optimizer_seconds(machine.profile, machine.rates, c, 1 / (c.tp * c.pp * c.shards))
    slower = max(machine.rates.memory_bytes_per_s / machine.host.host_bytes_per_s, 1.0)
    return np.asarray(np.where(c.offload == PARAMETERS, slower * here, here))


def _adding_gradients_s(machine: Machine, c: Candidates) -> Floats:
    """Seconds per step of adding the later micro-steps' gradients to the first's: two read, one written."""
    a_number = np.where(c.states == STATES.index("fp32"), 12.0, 6.0)
    moved = a_number * machine.profile.trainable / (c.tp * c.pp) * np.maximum(c.accumulation - 1, 0.0)
    return np.asarray(moved / machine.rates.memory_bytes_per_s)


def model_flops(profile: ModelProfile, global_batch: int) -> float:
    """FLOPs of a step without recomputation, of the plainest variant."""
    keys = [VariantKey(precision=p) for p in ("fp32", "half")]
    variant = next((profile.variants[k.text()] for k in keys if k.text() in profile.variants), None)
    if variant is None:
        return 0.0
    return float(executed_flops(variant, profile.num_blocks, np.array([1.0]))[0] * global_batch)
