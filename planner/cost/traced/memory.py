"""Memory: the peak of the fullest rank, part by part.

    peak = parameters + optimizer states + gradients + activations (+ gathered units + buckets) + context + slack

States are those of `planner.cost.states`. Activations come from the traced peaks: the largest bytes alive in each part
of a micro-step. On one rank the trace is the truth and this file only puts the parts together; with degrees each part
is divided as the degree divides it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoplan.planner.cost.columns import STATES, Floats
from autoplan.planner.cost.offload import Offloaded, device_states, offloaded
from autoplan.planner.cost.states import ModelSize, StateBytes, StateWidths, state_bytes, state_widths
from autoplan.planner.cost.step import held_micro_batches
from autoplan.planner.cost.traced.candidates import MOMENT_SHARES, Candidates
from autoplan.planner.trace.model_profile import LinearFit, ModelProfile, VariantProfile

# Elements that a step over rounded parameters or moments has in fp32 at once: techniques/rounded_steps.py, which loads
# torch; a test compares the two.
PIECE_ELEMENTS = float(1 << 25)


@dataclass(kw_only=True, slots=True)
class MemoryParts:
    """Bytes of each part at the peak, one array each; they add up to `live`."""

    parameters: Floats
    optimizer: Floats
    gradients: Floats
    activations: Floats
    gathered: Floats

    @property
    def live(self) -> Floats:
        """Bytes of live tensors at the peak."""
        return self.parameters + self.optimizer + self.gradients + self.activations + self.gathered


def profile_size(profile: ModelProfile) -> ModelSize:
    """A traced model's elements, as the shared equations take them."""
    return ModelSize(
        parameters=float(profile.parameters),
        trainable=float(profile.trainable),
        num_blocks=float(profile.num_blocks),
        block_parameters=float(profile.block_parameters),
        largest_parameter=float(profile.largest_parameter),
    )


def profile_widths(profile: ModelProfile, candidates: Candidates) -> StateWidths:
    """Bytes per parameter under the workload's own optimizer, on the device that the model was traced for.

    What is kept rounded is stepped in fp32, a piece at a time (techniques/rounded_steps.py): gradients in bf16 get fp32
    copies, so do parameters without a master copy, and the moments. FSDP2 reduces bf16 gradients in fp32, and keeps
    whole ones so until the last micro-step.
    """
    c, optimizer = candidates, profile.optimizer_state_bytes_per_parameter
    in_bf16, rounded = c.states != STATES.index("fp32"), c.moments > 0
    widths = state_widths(
        c,
        device=profile.device,
        optimizer_bytes=optimizer * MOMENT_SHARES[c.moments],
        temporary_bytes=4.0 if optimizer >= 4 else 0.0,
        parameter_bytes=profile.parameter_bytes / max(profile.parameters, 1),
    )
    if not np.any(in_bf16 | rounded):
        return widths
    waits = c.keeps_whole_gradients & (c.accumulation > 1)
    return replace(
        widths,
        gradient=np.where(in_bf16 & c.shards_gradients & waits, 4.0, widths.gradient),
        reduced=np.where(c.shards_gradients, 4.0, widths.reduced),
        piece=np.where(in_bf16 | rounded, PIECE_ELEMENTS, np.inf),
        widened=4.0 * in_bf16 + 4.0 * c.by_chance + optimizer * rounded,
    )


def traced_memory(
    variant: VariantProfile, full: VariantProfile, profile: ModelProfile, candidates: Candidates
) -> MemoryParts:
    """Peaks of candidates of one variant.

    Args:
        variant: The variant without whole-block checkpointing (none or selective).
        full: The same with every block checkpointed; candidates blend the two by their share of such blocks.
        profile: The model.
        candidates: All of that variant.
    """
    c = candidates
    size, widths = profile_size(profile), profile_widths(profile, c)
    moved = traced_offload(variant, full, profile, c)
    states = device_states(state_bytes(c, size, widths), moved, c, size)
    first, later = _stage_peaks(variant, full, profile, size, c)
    # offloaded, all that blocks save is away but two blocks'
    left = np.maximum(moved.activations - 2 * _blend(variant.block_saved_bytes, full.block_saved_bytes, c), 0.0)
    first, later = (np.maximum(peak - left, 0.0) for peak in (first, later))
    batch = profile.batch_bytes.at(c.samples * c.accumulation)
    return peak_parts(c, size, states, first, later, batch)


def peak_parts(
    c: Candidates, size: ModelSize, states: StateBytes, first: Floats, later: Floats, batch: Floats | float = 0.0
) -> MemoryParts:
    """The peak of a step from its states and from its micro-steps.

    Args:
        c: The configurations.
        size: The model.
        states: Bytes of its states.
        first, later: Largest bytes alive in a micro-step on the first pipeline stage: with the gradients that it makes,
            and without them.
        batch: Of the batch.
    """
    # one micro-step with the gradients that it makes; of several the later ones, beside all gradients. DDP's and
    # ZeRO-1's buckets, and Megatron's gradients, are there from the start
    buckets = (~c.shards_gradients & (c.dp > 1)) | (c.states == STATES.index("megatron"))
    held = (c.accumulation > 1) | buckets
    micro_steps = np.where(held, np.maximum(first, later + states.gradients), first)
    # at the very end of a backward that scatters as it goes nothing of the micro-step is left but the gradients of what
    # lies outside the blocks, twice
    outside = 4.0 * size.trained_share * size.outside_parameters
    scattered_last = np.where(c.keeps_whole_gradients, 0.0, 2 * outside / (c.tp * c.pp))
    # what is gathered for the micro-steps is freed by the optimizer's step
    step = states.gradients + np.maximum(states.temporaries, scattered_last)
    peak = np.maximum(micro_steps + states.gathered, step)
    gathered = np.minimum(states.gathered, peak - states.gradients)
    return MemoryParts(
        parameters=states.parameters,
        optimizer=states.optimizer,
        gradients=states.gradients,
        activations=peak - states.gradients - gathered + batch,
        gathered=gathered,
    )


def traced_offload(
    variant: VariantProfile, full: VariantProfile, profile: ModelProfile, candidates: Candidates
) -> Offloaded:
    """The data that candidates of one variant keep on the host; the arguments are those of `traced_memory`."""
    c = candidates
    saved = profile.num_blocks * _blend(variant.block_saved_bytes, full.block_saved_bytes, c)
    return offloaded(c.offload, c, profile_size(profile), profile_widths(profile, c), saved)


def _stage_peaks(
    variant: VariantProfile, full: VariantProfile, profile: ModelProfile, size: ModelSize, c: Candidates
) -> tuple[Floats, Floats]:
    """Largest bytes alive in a micro-step on the first pipeline stage: with the gradients it makes, and without them.

    The stage has L/p blocks, and the activations of every micro-batch that waits for its backward.
    """
    block, outside = unit_gradient_bytes(size)
    if not profile.num_blocks:  # blocks that differ are units all the same
        outside = 4.0 * size.trained_share * profile.largest_unit_parameters
    first, later = micro_step_peak(variant, full, c, (block, outside), profile.fewest_samples)
    saved = profile.num_blocks * _blend(variant.block_saved_bytes, full.block_saved_bytes, c)
    scale = np.where(c.pp > 1, 1 / c.pp, 1.0) / np.where(c.sequence_parallel, c.tp, 1.0)
    held = held_micro_batches(c, c.accumulation / c.passes)
    waiting = np.maximum(held - 1, 0.0) * saved * scale
    return first * scale + waiting, later * scale + waiting


def unit_gradient_bytes(size: ModelSize) -> tuple[Floats, Floats]:
    """Bytes of the gradients of one block, and of all that lies outside the blocks: what FSDP2 scatters at once.

    A unit's gradients are whole until its backward ends, and copied in one piece to be scattered. The outermost unit's
    backward ends last, and that of the output head is among its first gradients.
    """
    trained = 4.0 * size.trained_share
    return np.asarray(trained * size.block_parameters), np.asarray(trained * size.outside_parameters)


def micro_step_peak(
    variant: VariantProfile,
    full: VariantProfile,
    c: Candidates,
    units: tuple[Floats, Floats],
    fewest_samples: float = 1.0,
) -> tuple[Floats, Floats]:
    """Largest bytes alive in a micro-step of a whole model: with the gradients it makes, and without them."""
    block, outside = units
    whole = c.keeps_whole_gradients
    # of the gradients made, the share that the rank keeps; the rest is scattered as the backward goes on
    kept = 1 / np.where(whole, 1.0, c.shards)
    # on their way: of whole ones the last micro-step copies a block's at a time; else those of two blocks (one whose
    # backward runs, one that is copied) and of all outside the blocks are not scattered yet
    unscattered = np.where(whole, np.where(c.shards_gradients, block, 0.0), outside + 2 * block)
    of_full = {peak.part: peak for peak in full.peaks}
    first, later = np.zeros(len(c)), np.zeros(len(c))
    for peak in variant.peaks:
        other = of_full.get(peak.part, peak)
        made = _blend(peak.first, other.first, c), _blend(peak.later, other.later, c)
        if variant.key.loss == "fused" and peak.part == "head":
            least = max(fewest_samples, 1.0)
            made = (
                _chunked(made[0], peak.first, other.first, c, least),
                _chunked(made[1], peak.later, other.later, c, least),
            )
        more = unscattered if peak.part in ("backward", "tail") else 0.0
        first = np.maximum(first, made[1] + kept * (made[0] - made[1]) + more)
        later = np.maximum(later, made[1] + more)
    return first, later


def _chunked(peak: Floats, plain: LinearFit, full: LinearFit, c: Candidates, fewest_samples: float) -> Floats:
    """The peak of a loss that works in chunks: below the fewest samples traced there is one, and it shrinks with them.

    Args:
        peak: As the linear fits have it.
        plain, full: The fits without and with full checkpointing.
        c: The candidates.
        fewest_samples: The smallest micro-batch that was traced.
    """
    shrunk = np.minimum(c.samples, fewest_samples) / fewest_samples
    at_fewest = _blend(plain, full, replace(c, micro_batch=np.full(len(c), fewest_samples), cp=np.ones(len(c))))
    return np.minimum(peak, np.where(shrunk < 1, shrunk * at_fewest, peak))


def _blend(none: LinearFit, full: LinearFit, candidates: Candidates) -> Floats:
    """Between no block and every block checkpointed whole."""
    share = candidates.checkpointed
    samples = candidates.samples
    return np.asarray((1 - share) * none.at(samples) + share * full.at(samples))
