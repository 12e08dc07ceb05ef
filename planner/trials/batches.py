"""The batches that a trial runs on, and how many tokens it counts in them. Runs in a rank.

Where a workload's batches differ in size (`WorkloadSpec.batch_sizes`), every trial takes the same whole global batches,
each rank its share of them: the largest shows what fits, those nearest to the mean size are timed. Which samples a
micro-batch has, and so how it is padded, is the workload's own matter.

The micro-steps of the first short step run on the first samples (`first_samples`): their loss before any update costs
nothing, and it has to be the baseline's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autoplan.planner.trials.ranks import RankSync
from autoplan.strategies.techniques.mesh import data_position
from autoplan.strategies.workloads.batch import repeat_samples, slice_batch
from autoplan.strategies.workloads.counting import batch_elements, count_items, find_counted
from autoplan.strategies.workloads.randomness import with_seeded_batches
from autoplan.strategies.workloads.samples import SampleBatch

if TYPE_CHECKING:
    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.batch import Batch
    from autoplan.strategies.workloads.spec import BatchSizes, Counted, WorkloadSpec
    from autoplan.strategies.workloads.workload import Workload


class TrialBatches:
    """Makes the batches of one trial.

    Args:
        run: The training run.
        spec: The workload's spec, with what inspection found of its batches.

    Attributes:
        sizes: How the batches differ in size; None where they do not.
    """

    def __init__(self, run: TrainingRun, spec: WorkloadSpec) -> None:
        self.run = run
        self.sizes: BatchSizes | None = spec.batch_sizes if spec.batch_sizes and spec.batch_sizes.vary else None
        self._fixed: BatchSizes | None = None if self.sizes else spec.batch_sizes
        self._counted: Counted | None = spec.counted
        self._made = 0
        self._items = self._samples = 0
        self._typical: list[Batch] = []  # this rank's shares of them

    def next(self, samples: int) -> Batch:
        """The next batch of this rank.

        Where sizes are the same, no two data-parallel ranks and no two calls get the same one. Where they differ, the
        first is of the largest batch that was seen, and is not to be timed.
        """
        if self.sizes is not None and not self._typical:
            for index in self.sizes.typical:
                batch = next(self._from(index, 1))
                self._count(batch, self.run.workload.global_batch)
                self._typical.append(self.run.local_share(batch))
            return slice_batch(self.run.local_share(self._largest()), 0, samples)
        if self.sizes is not None:
            self._made += 1
            return slice_batch(self._typical[(self._made - 1) % len(self._typical)], 0, samples)
        position, count = data_position(self.run.mesh)
        index = self._made * count + position
        self._made += 1
        batch = self.run.workload.make_batch(samples, index)
        self._count(batch, samples)
        return batch

    def _largest(self) -> Batch:
        """The largest batch that was seen; of one that knows its samples, the largest of them first.

        A make_batch that goes on by itself gives another batch each time: then the largest of as many batches as were
        looked at, or the first one that is as large.
        """
        assert self.sizes is not None, "only where sizes differ"
        found, elements = None, -1
        for batch in self._from(self.sizes.largest, self.sizes.batches):
            if batch_elements(batch) > elements:
                found, elements = batch, batch_elements(batch)
            if elements >= self.sizes.elements.max:
                break
        return found.largest_first() if isinstance(found, SampleBatch) else found

    def items_per_step(self, ranks: RankSync) -> int:
        """Tokens, or samples, of a whole step over all ranks: the mean over the batches that stand for the others."""
        if self._fixed is not None:  # more batches than a trial makes, and the same number in every trial
            return round(self._fixed.items.mean)
        if not self._samples:  # all of it was on the first samples, which are alike
            self.next(self.run.config.micro_batch)
        mean = self._items / self._samples if self._samples else 0.0
        return round(ranks.mean(mean) * self.run.workload.global_batch)

    def _from(self, index: int, number: int) -> Iterator[Batch]:
        make_batch = with_seeded_batches(self.run.workload).make_batch
        return (make_batch(self.run.workload.global_batch, index + offset) for offset in range(number))

    def _count(self, batch: Batch, samples: int) -> None:
        if self._counted is None:
            self._counted = find_counted(self.run.workload, batch, self.run.model)
        self._items += count_items(self.run.workload, self._counted, batch)
        self._samples += samples


def first_samples(workload: Workload, micro_batch: int, micro_steps: int) -> Any:
    """A batch of a few micro-batches, each of the same first samples.

    A micro-batch repeats the first sample, so that the mean loss is the same at every micro-batch (and its shape is the
    one that is measured, which matters to torch.compile); where the user fixed the micro-batch, it is the first
    micro-batch as it is.
    """
    fixed = workload.fixed_micro_batch
    batch = with_seeded_batches(workload).make_batch(fixed or 1, 0)
    return repeat_samples(batch, micro_batch * micro_steps // (fixed or 1))
