"""The tracer: records variants at cut depths and makes their laws, with as few recordings as tell them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autoplan.errors import ConfigError
from autoplan.planner.trace.linear_fit import (
    GroupKey,
    VariantFits,
    add,
    blocks_apart,
    fit_variant,
    group_key,
    minus,
    scale,
    swap_loss,
    to_profile,
    total_flops,
    total_moved,
)
from autoplan.planner.trace.model_profile import LinearFit, OperationGroup, VariantKey, VariantProfile
from autoplan.planner.trace.op_benchmark import Timed, Timing
from autoplan.planner.trace.op_recorder import Recording, Samples
from autoplan.planner.trace.record_step import record_step
from autoplan.planner.trace.truncated_models import TracedModels
from autoplan.strategies.workloads.workload import Workload

DEPTHS = (2, 3)
# whole-depth against the law from cut models: kept only where they agree this well
DEPTH_TOLERANCE = 0.01
# micro-batches that may stand for others: the first that divides no size of the model or the batch, or next to one
PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47)

Split = tuple[Counter[GroupKey], Counter[GroupKey]]


class Tracer:
    """Records variants and keeps what was recorded.

    Args:
        workload: What is traced.
        device: cpu or cuda.
        mode: FakeTensorMode, or a null context for running the real thing.

    Attributes:
        samples: The two micro-batches whose figures make the straight lines.
        num_blocks: Set once it is known that the blocks are alike: how many a stack has. None: all is traced whole.
        block_gradient_bytes: Of one block of each stack.
    """

    def __init__(self, workload: Workload, device: str, mode: Any) -> None:
        self.workload = workload
        self.device = device
        self.mode = mode
        self.models = TracedModels(workload, device, mode)
        fewest = workload.fixed_micro_batch or 2
        self.samples = (fewest, 2 * fewest)
        self.num_blocks: int | None = None
        self.block_gradient_bytes = 0.0
        self.timed: Mapping[GroupKey, Timed] = {}
        self._prime: int | None = None
        self._recipes: dict[GroupKey, Timing] = {}
        self._plain: dict[tuple[str, str], Split] = {}
        self._kept: dict[tuple[str, int | None, int], Recording] = {}
        self._variants: dict[VariantKey, VariantProfile] = {}

    # Recordings.

    def record(self, key: VariantKey, depth: int | None, which: int) -> Recording:
        """One micro-step of a variant at the first or the second of the two micro-batches."""
        name = key.text()
        if (name, depth, which) not in self._kept:
            # chunks of the fused loss grow in number, not in size: it takes a run for each micro-batch
            if self._prime is not None and key.loss == "full":
                found = self._run(key, depth, Samples(self._prime, self.samples))
                self._kept |= {(name, depth, place): recording for place, recording in enumerate(found)}
            else:
                samples = self.samples[which]
                (self._kept[name, depth, which],) = self._run(key, depth, Samples(samples, (samples,)))
        return self._kept[name, depth, which]

    def _run(self, key: VariantKey, depth: int | None, samples: Samples) -> tuple[Recording, ...]:
        return record_step(self.workload, self.device, key, self.models.copy(depth), samples, self.mode)

    @property
    def one_run(self) -> bool:
        """Whether one run stands for both micro-batches."""
        return self._prime is not None

    def try_one_run(self, depth: int | None) -> None:
        """Lets one run stand for both micro-batches, if the plain variant at this depth is the same either way."""
        if not isinstance(self.mode, FakeTensorMode) or self.workload.fixed_micro_batch is not None:
            return
        plain = VariantKey()
        self._prime = next((prime for prime in PRIMES if not self._divides_a_size(prime)), None)
        if self._prime is None:
            return
        try:
            guessed = self.record(plain, depth, 1)
            (real,) = self._run(plain, depth, Samples(self.samples[1], (self.samples[1],)))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError, ConfigError):
            guessed, real = None, Recording()
        if guessed is None or not guessed.same_as(real):
            self._prime = None
            self._kept.clear()

    def _divides_a_size(self, prime: int) -> bool:
        model = self.models.built()
        with self.mode:
            batch = self.workload.make_batch(2, 0)
        sizes = [size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape]
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if hasattr(leaf, "shape")]
        sizes += [size for leaf in leaves for size in leaf.shape]
        # a sequence is often made one longer or shorter on the way
        return any((size + more) % prime == 0 for size in sizes for more in (-1, 0, 1) if size + more > 0)

    def depth_law_holds(self, depth: int) -> bool:
        """Whether cut models foretell the whole one, for the plain variant."""
        key = VariantKey()
        try:
            shallow, deep = (self.record(key, d, 0) for d in DEPTHS)
        except (AttributeError, IndexError, TypeError, RuntimeError):
            return False
        whole = self.record(key, None, 0)
        for figure in (total_flops, total_moved, lambda recording: recording.saved_after_forward):
            a, b, real = figure(shallow), figure(deep), figure(whole)
            if abs(b + (b - a) * (depth - DEPTHS[1]) - real) > DEPTH_TOLERANCE * real:
                return False
        return True

    def _shallow(self) -> int | None:
        """The depth of the first trace of a variant."""
        return DEPTHS[0] if self.num_blocks is not None and self.num_blocks > DEPTHS[1] else None

    # VariantFits.

    def variant(self, key: VariantKey) -> VariantProfile:
        """The laws of a variant; the fused loss is put together from what it changes in the plain one.

        Raises:
            ConfigError: the variant does not apply to the workload.
        """
        bare = VariantKey(precision=key.precision)
        if key.loss == "fused" and (key.attention, key.checkpointing) != (bare.attention, bare.checkpointing):
            fused = bare.model_copy(update={"loss": "fused"})
            plain = key.model_copy(update={"loss": "full"})
            found = swap_loss(key, *(self.variant(one) for one in (plain, bare, fused)))
            if found is not None:
                return found
        if key not in self._variants:
            self._variants[key] = self._laws(key)
        return self._variants[key]

    def same_as_own(self, key: VariantKey) -> VariantKey | None:
        """The same variant with the model's own attention, where that is the asked one already."""
        if key.attention == "own":
            return None
        try:
            own, other = (self.record(VariantKey(attention=a), self._shallow(), 0) for a in ("own", key.attention))
        except ConfigError:
            return None
        same = [o.name for o in own.operations] == [o.name for o in other.operations]
        return key.model_copy(update={"attention": "own"}) if same else None

    def _laws(self, key: VariantKey) -> VariantProfile:
        depth = self.num_blocks
        if depth is None or depth <= DEPTHS[1]:
            laws = self._at_depth(key, None)
            block_saved = scale(laws.block_saved, 1 / max(depth or 0, 1))
            return to_profile(key, Counter(), laws.groups, laws.peaks, block_saved, laws.saved, depth or 0)
        shallow = self._at_depth(key, DEPTHS[0])
        block, rest = self._split(key, shallow)
        block_saved = scale(shallow.block_saved, 1 / DEPTHS[0])
        more = depth - DEPTHS[0]
        # under autocast a checkpointed block keeps its cast weights to the end of the forward, and no longer
        later = block_saved if key.checkpointing == "none" else LinearFit(per_sample=block_saved.per_sample)
        peaks = {
            part: self._deepen(part, pair, block_saved if part == "forward" else later, more)
            for part, pair in shallow.peaks.items()
        }
        return to_profile(key, block, rest, peaks, block_saved, add(shallow.saved, block_saved, more), depth)

    def _split(self, key: VariantKey, shallow: VariantFits) -> Split:
        """What one block does and what the rest does.

        The plain variant of each precision is recorded at two depths, which tells them apart. What is not in the blocks
        is the same under every checkpointing and mostly under every attention (where it is not, its plain variant is
        recorded at two depths too), and the blocks are the same under either loss.
        """
        plain = VariantKey(precision=key.precision, attention=key.attention)
        place = (key.precision, key.attention)
        if key == plain and place not in self._plain:
            known = self._plain_split(plain.model_copy(update={"attention": "own"})) if key.attention != "own" else None
            alike = _same_rest(shallow, known[1]) if known is not None else None
            self._plain[place] = alike or self._at_two_depths(key, shallow)
        if key == plain:
            return self._plain[place]
        block, rest = self._plain_split(plain)
        if key.loss != "full":
            rest = minus(shallow.groups, block, DEPTHS[0])
            found: Split | None = (block, rest) if all(count >= 0 for count in rest.values()) else None
        else:
            found = _same_rest(shallow, rest)
        return found or self._at_two_depths(key, shallow)

    def _plain_split(self, plain: VariantKey) -> Split:
        place = (plain.precision, plain.attention)
        return self._plain.get(place) or self._split(plain, self._at_depth(plain, DEPTHS[0]))

    def _at_two_depths(self, key: VariantKey, shallow: VariantFits) -> Split:
        return blocks_apart(shallow.groups, self._at_depth(key, DEPTHS[1]).groups)

    def _deepen(
        self, part: str, pair: tuple[LinearFit, LinearFit], block_saved: LinearFit, more: int
    ) -> tuple[LinearFit, LinearFit]:
        """The peaks with `more` blocks: what these keep; at the end of the backward their gradients instead."""
        first, later = pair
        if part == "tail":
            return LinearFit(fixed=first.fixed + more * self.block_gradient_bytes, per_sample=first.per_sample), later
        return add(first, block_saved, more), add(later, block_saved, more)

    def _at_depth(self, key: VariantKey, depth: int | None) -> VariantFits:
        few, many = (self.record(key, depth, which) for which in range(2))
        return fit_variant(few, many, self.samples, self._recipes)

    # Times.

    def recipes(self) -> dict[GroupKey, Timing]:
        """For each group of operations how to run one again."""
        return self._recipes

    def with_time(self, group: OperationGroup) -> OperationGroup:
        """A group with the seconds that were measured for it, where they were."""
        timed = self.timed.get(group_key(group))
        if timed is None:
            return group
        found = {"measured_s": timed.seconds, "measured_samples": float(self.samples[0])}
        if timed.more_s is not None:
            found |= {"measured_more_s": timed.more_s, "measured_more_samples": float(self.samples[0] * timed.times)}
        return group.model_copy(update=found)


def _same_rest(shallow: VariantFits, rest: Counter[GroupKey]) -> Split | None:
    """What one block does, where all but the blocks is as in another variant; None where that cannot be."""
    in_blocks = minus(shallow.groups, rest, 1)
    if any(count < 0 or count % DEPTHS[0] for count in in_blocks.values()):
        return None
    return Counter({group: count // DEPTHS[0] for group, count in in_blocks.items()}), rest
