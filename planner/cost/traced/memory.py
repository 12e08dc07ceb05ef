"""Memory: the peak of the fullest rank, part by part.

    peak = parameters + optimizer states + gradients + activations (+ gathered units + buckets) + context + slack

Activations come from the traced peaks: the largest bytes alive in each part of a micro-step. On one rank the trace is
the truth and this file only puts the parts together; with degrees each part is divided as the degree divides it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoplan.planner.cost.candidates import OPTIMIZERS, SHARDINGS, Candidates, Floats
from autoplan.planner.cost.pipeline import held_micro_batches
from autoplan.planner.trace.model_profile import LinearFit, ModelProfile, VariantProfile

# DDP's buckets are views of the gradients (gradient_as_bucket_view); one bucket of 25 MiB is in flight besides
DDP_BUCKET_BYTES = 25 * 2**20


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


def _at(law: LinearFit, samples: Floats) -> Floats:
    return np.asarray(law.fixed + law.per_sample * samples)


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
    mine = 1 / (c.tp * c.pp)
    shards = np.where(c.sharding > 0, c.dp_shard, 1.0)
    zero3 = c.sharding == SHARDINGS.index("zero3")
    scattered = np.isin(c.sharding, (2, 3))
    parameters = profile.parameter_bytes * mine / np.where(scattered, shards, 1.0)
    # FSDP2 keeps whole gradients between micro-steps of which only the last scatters (techniques/data_parallel.py)
    kept_whole = ~scattered | (~c.scatters_each & (c.accumulation > 1))
    gradients = 4.0 * profile.trainable * mine / np.where(kept_whole, 1.0, shards)
    optimizer = profile.optimizer_state_bytes_per_parameter * profile.trainable * mine / shards
    gathered = np.where(
        zero3,
        2 * 4.0 * profile.largest_unit_parameters * mine,
        np.where(c.sharding == SHARDINGS.index("zero2"), 4.0 * profile.parameters * mine, 0.0),
    )
    gathered = np.where(shards > 1, gathered, 0.0)
    gathered = gathered + np.where((c.dp_replicate > 1) & (c.sharding == 0), DDP_BUCKET_BYTES, 0.0)

    block, outside = _unit_gradient_bytes(profile)
    first, later = _micro_step_peak(
        variant,
        full,
        c,
        profile.fewest_samples,
        kept=1 / np.where(kept_whole, 1.0, shards),
        # of those kept whole the last micro-step copies one block's at a time
        unscattered=np.where(kept_whole, np.where(scattered, block, 0.0), outside + 2 * block),
    )
    held = held_micro_batches(c, c.accumulation / c.passes)
    saved = profile.num_blocks * _blend(variant.block_saved_bytes, full.block_saved_bytes, c)
    # of a pipeline's first stage: L/p blocks for each of the micro-batches it holds, beyond the one that runs
    scale = np.where(c.pp > 1, 1 / c.pp, 1.0) / np.where(c.sequence_parallel, c.tp, 1.0)
    waiting = np.maximum(held - 1, 0.0) * saved * scale
    first, later = first * scale + waiting, later * scale + waiting
    batch = _at(profile.batch_bytes, c.micro_batch * c.accumulation)

    # a micro-step with all gradients held, one without, or the optimizer step with its temporaries
    temporaries = np.where(
        c.optimizer == OPTIMIZERS.index("foreach"),
        4.0 * profile.trainable * mine / shards,
        np.where(c.optimizer == OPTIMIZERS.index("for_loop"), 8.0 * profile.largest_parameter * mine / shards, 0.0),
    )
    if profile.optimizer_state_bytes_per_parameter < 4:
        temporaries = np.zeros(len(c))
    micro = np.where(c.accumulation > 1, np.maximum(first, later + gradients), first)
    # what lies outside the blocks is scattered at the very end, when nothing else of the micro-step is left
    at_end = np.where(kept_whole, 0.0, 2 * outside * mine)
    peak = np.maximum(micro, gradients + np.maximum(temporaries, at_end))
    shown_gradients = np.minimum(gradients, peak)
    return MemoryParts(
        parameters=np.asarray(parameters),
        optimizer=np.asarray(optimizer),
        gradients=np.asarray(shown_gradients),
        activations=np.asarray(peak - shown_gradients + batch),
        gathered=np.asarray(gathered),
    )


def _blend(none: LinearFit, full: LinearFit, candidates: Candidates) -> Floats:
    """Between no block and every block checkpointed whole."""
    share = candidates.checkpointed
    samples = candidates.micro_batch
    return np.asarray((1 - share) * _at(none, samples) + share * _at(full, samples))


def _unit_gradient_bytes(profile: ModelProfile) -> tuple[float, float]:
    """Bytes of the gradients of one block, and of all that lies outside the blocks: what FSDP2 scatters at once.

    A unit's gradients are whole until its backward ends, and copied in one piece to be scattered. The outermost unit's
    backward ends last, and that of the output head is among its first gradients.
    """
    trained = 4.0 * profile.trainable / max(profile.parameters, 1)
    outside = profile.parameters - profile.num_blocks * profile.block_parameters
    outside = outside if profile.num_blocks else profile.largest_unit_parameters
    return trained * profile.block_parameters, trained * outside


def _micro_step_peak(
    variant: VariantProfile,
    full: VariantProfile,
    candidates: Candidates,
    fewest_samples: float,
    *,
    kept: Floats,
    unscattered: Floats,
) -> tuple[Floats, Floats]:
    """Largest bytes alive in a micro-step: with the gradients it makes, and without those that are kept.

    Args:
        variant, full, candidates: As `traced_memory` has them.
        fewest_samples: The smallest micro-batch that was traced.
        kept: The share of the gradients made that this rank keeps; the rest is scattered as the backward goes on.
        unscattered: Bytes of gradients on their way that the backward holds besides.
    """
    of_full = {peak.part: peak for peak in full.peaks}
    first = np.zeros(len(candidates))
    later = np.zeros(len(candidates))
    for peak in variant.peaks:
        other = of_full.get(peak.part, peak)
        here = _blend(peak.first, other.first, candidates), _blend(peak.later, other.later, candidates)
        if variant.key.loss == "fused" and peak.part == "head":
            # the fused loss works in chunks: below the fewest samples traced there is one, and it shrinks with them
            fewest = np.full(len(candidates), max(fewest_samples, 1.0))
            few = replace(candidates, micro_batch=np.minimum(candidates.micro_batch, fewest))
            at_fewest = replace(candidates, micro_batch=fewest)
            shrunk = few.micro_batch / fewest
            here = (
                np.minimum(here[0], np.where(shrunk < 1, shrunk * _blend(peak.first, other.first, at_fewest), here[0])),
                np.minimum(here[1], np.where(shrunk < 1, shrunk * _blend(peak.later, other.later, at_fewest), here[1])),
            )
        more = unscattered if peak.part in ("backward", "tail") else 0.0
        first = np.maximum(first, here[1] + kept * (here[0] - here[1]) + more)
        later = np.maximum(later, here[1] + more)
    return first, later
