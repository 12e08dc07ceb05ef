"""Traces variants of a workload with as few recordings as possible.

In: a workload and a `VariantKey`. Out: a `VariantProfile`. Three methods save recordings:

- one run at a prime micro-batch gives the recordings of both micro-batches (`try_prime_batch`);
- models with two and three blocks per stack give the profile of the whole model (`depth_fit_is_accurate`);
- a variant that shares its blocks or its rest with one that is known takes that part from it (`_split_by_known_part`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autoplan.planner.trace.linear_fit import (
    GroupKey,
    Split,
    VariantFits,
    fit_variant,
    group_key,
    make_variant_profile,
    split_by_block,
    split_by_depth,
    split_by_rest,
    total_bytes_moved,
    total_flops,
    with_fused_loss,
)
from autoplan.planner.trace.model_profile import LinearFit, OperationGroup, VariantKey, VariantProfile
from autoplan.planner.trace.op_benchmark import OpTiming, TimingRequest
from autoplan.planner.trace.op_recorder import MicroBatches, Recording
from autoplan.planner.trace.record_step import make_batch, record_step
from autoplan.planner.trace.truncated_models import TruncatedModels
from autoplan.strategies.workloads.workload import Workload

DEPTHS = (2, 3)
"""Blocks per stack of the truncated models."""

DEPTH_TOLERANCE = 0.01
"""The largest relative difference between the whole model and what the truncated models predict of it."""

PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
"""Micro-batches for `try_prime_batch`: the first is used that divides no size of the model or batch, nor one next to
it."""


class VariantTracer:
    """Records variants and keeps the recordings.

    Args:
        workload: What is traced.
        device: cpu or cuda.
        mode: FakeTensorMode, or a null context for real tensors.

    Attributes:
        samples: The small and the large micro-batch; straight lines go through their figures.
        num_blocks: Blocks per stack, where truncated models may be used. None: every variant is traced as a whole.
        block_gradient_bytes: Of one block of each stack.
        requests: How to time an operation of each group.
        timings: Measured seconds of groups of operations.
    """

    def __init__(self, workload: Workload, device: str, mode: Any) -> None:
        self.workload = workload
        self.device = device
        self.mode = mode
        self.models = TruncatedModels(workload, device, mode)
        smallest = workload.fixed_micro_batch or 2
        self.samples = (smallest, 2 * smallest)
        self.num_blocks: int | None = None
        self.block_gradient_bytes = 0.0
        self.timings: Mapping[GroupKey, OpTiming] = {}
        self._prime: int | None = None
        self.requests: dict[GroupKey, TimingRequest] = {}
        self._recordings: dict[tuple[str, int | None, int], Recording] = {}
        self._fits: dict[tuple[VariantKey, int | None], VariantFits] = {}
        self._splits: dict[VariantKey, Split] = {}
        self._profiles: dict[VariantKey, VariantProfile] = {}

    # Recordings.

    def record(self, key: VariantKey, depth: int | None, which: int) -> Recording:
        """One micro-step of a variant, at the small (which=0) or the large (which=1) micro-batch."""
        name = key.text()
        if (name, depth, which) not in self._recordings:
            # With more samples the fused loss has more chunks, not larger ones: each micro-batch needs its own run.
            if self._prime is not None and key.loss == "full":
                both = self._run(key, depth, MicroBatches(self._prime, self.samples))
                self._recordings |= {(name, depth, index): recording for index, recording in enumerate(both)}
            else:
                self._recordings[name, depth, which] = self._run_exactly(key, depth, self.samples[which])
        return self._recordings[name, depth, which]

    def _run(self, key: VariantKey, depth: int | None, micro_batches: MicroBatches) -> tuple[Recording, ...]:
        return record_step(self.workload, self.device, key, self.models.copy(depth), micro_batches, self.mode)

    def _run_exactly(self, key: VariantKey, depth: int | None, samples: int) -> Recording:
        (recording,) = self._run(key, depth, MicroBatches(samples, (samples,)))
        return recording

    @property
    def uses_prime_batch(self) -> bool:
        """Whether one run gives the recordings of both micro-batches."""
        return self._prime is not None

    def try_prime_batch(self, depth: int | None) -> None:
        """Uses one run for both micro-batches from now on, if that gives the right recording of the plain variant.

        Args:
            depth: Of the model on which it is tried.
        """
        if not isinstance(self.mode, FakeTensorMode) or self.workload.fixed_micro_batch is not None:
            return
        plain = VariantKey()
        self._prime = next((prime for prime in PRIMES if not self._divides_a_size(prime)), None)
        if self._prime is None:
            return
        try:
            scaled: Recording | None = self.record(plain, depth, 1)
            exact = self._run_exactly(plain, depth, self.samples[1])
        except Exception:  # a prime micro-batch, or a truncated model, may be wrong for this program in any way
            scaled, exact = None, Recording()
        if scaled is None or not scaled.same_as(exact):
            self._prime = None
            self._recordings.clear()

    def _divides_a_size(self, prime: int) -> bool:
        """Whether a prime divides a size of the model or of a batch, or a size that is one smaller or larger.

        The latter because models often make a sequence one token shorter or longer.
        """
        model = self.models.built()
        batch = make_batch(self.workload, self.samples[0], self.mode)
        sizes = [size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape]
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if hasattr(leaf, "shape")]
        sizes += [size for leaf in leaves for size in leaf.shape]
        return any((size + change) % prime == 0 for size in sizes for change in (-1, 0, 1) if size + change > 0)

    def depth_fit_is_accurate(self, depth: int) -> bool:
        """Whether the truncated models predict the figures of the whole model, for the plain variant.

        Args:
            depth: Blocks per stack of the whole model.
        """
        key = VariantKey()
        try:
            shallow, deep = (self.record(key, truncated, 0) for truncated in DEPTHS)
        except Exception:  # a truncated model may be wrong for this program in any way
            return False
        whole = self.record(key, None, 0)
        for figure in (total_flops, total_bytes_moved, lambda recording: recording.saved_after_forward_bytes):
            a, b, actual = figure(shallow), figure(deep), figure(whole)
            predicted = b + (b - a) * (depth - DEPTHS[1])
            if abs(predicted - actual) > DEPTH_TOLERANCE * actual:
                return False
        return True

    # Profiles.

    def profile_variant(self, key: VariantKey) -> VariantProfile:
        """The profile of a variant. With the fused loss it is calculated from other variants where that is possible.

        Raises:
            ConfigError: the variant does not apply to the workload.
        """
        plain = VariantKey(precision=key.precision, parameters=key.parameters)
        if key.loss == "fused" and (key.attention, key.checkpointing) != (plain.attention, plain.checkpointing):
            full_loss = key.model_copy(update={"loss": "full"})
            plain_fused = plain.model_copy(update={"loss": "fused"})
            found = with_fused_loss(key, *(self.profile_variant(one) for one in (full_loss, plain, plain_fused)))
            if found is not None:
                return found
        if key not in self._profiles:
            self._profiles[key] = self._trace_variant(key)
        return self._profiles[key]

    def same_with_own_attention(self, key: VariantKey) -> VariantKey | None:
        """The variant with the model's own attention, if that is the attention that `key` asks for; else None."""
        if key.attention == "own":
            return None
        depth = DEPTHS[0] if self._is_truncated else None
        try:
            own, other = (self.record(VariantKey(attention=a), depth, 0) for a in ("own", key.attention))
        except Exception:  # the other attention does not run: profile_variant() says why
            return None
        same = [o.name for o in own.operations] == [o.name for o in other.operations]
        return key.model_copy(update={"attention": "own"}) if same else None

    @property
    def _is_truncated(self) -> bool:
        return self.num_blocks is not None and self.num_blocks > DEPTHS[1]

    def _trace_variant(self, key: VariantKey) -> VariantProfile:
        depth = self.num_blocks or 0
        if not self._is_truncated:
            whole = self._fit(key, None)
            block_saved = (1 / max(depth, 1)) * whole.block_saved_bytes
            no_blocks: Split = (Counter(), whole.groups)
            return make_variant_profile(key, no_blocks, whole.peaks, block_saved, whole.saved_bytes, depth)
        shallow = self._fit(key, DEPTHS[0])
        split = self._split(key)
        block_saved = (1 / DEPTHS[0]) * shallow.block_saved_bytes
        more_blocks = depth - DEPTHS[0]
        # Under autocast a checkpointed block keeps its cast weights up to the end of the forward, and no longer.
        kept_later = block_saved if key.checkpointing == "none" else LinearFit(per_sample=block_saved.per_sample)
        peaks = {
            part: self._deepen_peak(key, part, peak, block_saved if part == "forward" else kept_later, more_blocks)
            for part, peak in shallow.peaks.items()
        }
        saved = shallow.saved_bytes + more_blocks * block_saved
        return make_variant_profile(key, split, peaks, block_saved, saved, depth)

    def _split(self, key: VariantKey) -> Split:
        """The operations of one block and of the rest."""
        if key not in self._splits:
            self._splits[key] = self._split_by_known_part(key) or split_by_depth(
                *(self._fit(key, depth).groups for depth in DEPTHS)
            )
        return self._splits[key]

    def _split_by_known_part(self, key: VariantKey) -> Split | None:
        """The split, if the variant shares its block or its rest with another one; saves the recording at depth three.

        - The fused loss changes only the rest.
        - Checkpointing changes only the blocks.
        - Another attention mostly changes only the blocks; it may also change how masks are made, outside of them.

        Returns:
            None if the variant shares neither part, or the recording at depth two shows that it does not.
        """
        whole = self._fit(key, DEPTHS[0]).groups
        plain = VariantKey(precision=key.precision, attention=key.attention, parameters=key.parameters)
        if key.loss == "fused":
            block, _ = self._split(plain)
            return split_by_block(whole, block, DEPTHS[0])
        if key != plain:
            _, rest = self._split(plain)
            return split_by_rest(whole, rest, DEPTHS[0])
        if key.attention != "own":
            _, rest = self._split(plain.model_copy(update={"attention": "own"}))
            return split_by_rest(whole, rest, DEPTHS[0])
        return None

    def _deepen_peak(
        self,
        key: VariantKey,
        part: str,
        peak: tuple[LinearFit, LinearFit],
        kept_by_block: LinearFit,
        more_blocks: int,
    ) -> tuple[LinearFit, LinearFit]:
        """The peak of a model with more blocks: each adds what it keeps, or its gradients in the last part."""
        first, later = peak
        if part == "tail":
            gradients = more_blocks * self.block_gradient_bytes * (1.0 if key.parameters == "own" else 0.5)
            return first + LinearFit(fixed=gradients), later
        return first + more_blocks * kept_by_block, later + more_blocks * kept_by_block

    def _fit(self, key: VariantKey, depth: int | None) -> VariantFits:
        """The fits of a variant at a depth; None: of the whole model."""
        if (key, depth) not in self._fits:
            small, large = (self.record(key, depth, which) for which in range(2))
            self._fits[key, depth] = fit_variant(small, large, self.samples, self.requests)
        return self._fits[key, depth]

    # Times.

    def with_timing(self, group: OperationGroup) -> OperationGroup:
        """The group with its measured seconds, if it was timed."""
        timing = self.timings.get(group_key(group))
        if timing is None:
            return group
        found = {"measured_s": timing.seconds, "measured_samples": float(self.samples[0])}
        if timing.larger_s is not None:
            found |= {
                "measured_more_s": timing.larger_s,
                "measured_more_samples": float(self.samples[0] * timing.larger_factor),
            }
        return group.model_copy(update=found)
