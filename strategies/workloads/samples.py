"""Batches that keep their samples, so that a part of one is collated by itself, as a loader would have collated it.

In: samples and a collator. Out: a dict of tensors. Slicing one takes samples, not rows: a micro-batch is padded to its
own longest sample, pairs stay together (a preference collator makes two rows of a sample), and packed samples are
packed anew. Once moved to a device it is a plain dict. `batches_from_dataset` makes batches of a user's own dataset.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from autoplan.errors import WorkloadError

SAMPLES = "num_samples_of_batch"
"""The field with the number of samples, in batches whose rows are not the samples."""

Collate = Callable[[list[Any]], Mapping[str, Any]]


Kind = TypeVar("Kind", bound=type)


def plain_in_trees(kind: Kind) -> Kind:
    """Tells torch's trees that a class is a dict, and becomes a plain one where its leaves are changed."""
    pytree.register_pytree_node(
        kind,
        lambda batch: (list(batch.values()), tuple(batch)),
        lambda parts, names: dict(zip(names, parts, strict=True)),
    )
    return kind


@plain_in_trees
class SampleBatch(dict[str, Any]):
    """A collated batch that knows its samples.

    Args:
        samples: As the dataset gives them.
        collate: Makes the fields of a batch from samples; the same samples give the same fields.
        rows_are_samples: Whether the first dim of each tensor counts samples.
    """

    def __init__(self, samples: Sequence[Any], collate: Collate, *, rows_are_samples: bool) -> None:
        super().__init__(collate(list(samples)))
        self.samples = list(samples)
        self._collate = collate
        self._rows_are_samples = rows_are_samples
        self._parts: dict[tuple[int, int], SampleBatch] = {}
        if not rows_are_samples:
            self[SAMPLES] = len(self.samples)

    @property
    def num_samples(self) -> int:
        """How many samples it has."""
        return len(self.samples)

    def slice_samples(self, start: int, stop: int) -> SampleBatch:
        """The samples start to stop, collated by themselves; each part is collated once."""
        if (start, stop) not in self._parts:
            self._parts[start, stop] = self._of(self.samples[start:stop])
        return self._parts[start, stop]

    def repeat_samples(self, times: int) -> SampleBatch:
        """All samples, so many times."""
        return self._of(self.samples * times)

    def pick_samples(self, order: Iterable[int]) -> SampleBatch:
        """The samples in another order."""
        return self._of([self.samples[index] for index in order])

    def largest_first(self) -> SampleBatch:
        """The samples by size, so that the first micro-batch is the largest that these samples can make."""
        return self._of(sorted(self.samples, key=sample_size, reverse=True))

    def _of(self, samples: Sequence[Any]) -> SampleBatch:
        return SampleBatch(samples, self._collate, rows_are_samples=self._rows_are_samples)


@plain_in_trees
class MicroBatches(dict[str, Any]):
    """A collated batch whose micro-batches were collated by themselves, in the process that loaded it.

    Unlike a `SampleBatch` it keeps neither samples nor collator, so that it is cheap to send from a worker.

    Args:
        samples: As the dataset gives them.
        collate: Makes the fields of a batch from samples.
        micro_batch: Samples of a micro-batch.
    """

    def __init__(self, samples: Sequence[Any], collate: Collate, micro_batch: int) -> None:
        super().__init__(collate(list(samples)))
        starts = range(0, len(samples), micro_batch)
        self._parts = {(at, at + micro_batch): dict(collate(list(samples[at : at + micro_batch]))) for at in starts}

    def slice_samples(self, start: int, stop: int) -> Mapping[str, Any]:
        """A micro-batch as it was collated; other samples as they lie in the whole batch."""
        found = self._parts.get((start, stop))
        if found is not None:
            return found
        rows = {name for name, field in self.items() if isinstance(field, torch.Tensor) and field.dim() > 0}
        return {name: field[start:stop] if name in rows else field for name, field in self.items()}


def sample_size(sample: Any) -> int:
    """Elements in a sample: of its tensors and arrays, and of sequences of numbers."""
    if isinstance(sample, Sequence) and not isinstance(sample, str) and sample and isinstance(sample[0], int | float):
        return len(sample)
    total = 0
    for leaf in pytree.tree_leaves(sample):
        size = leaf.numel() if isinstance(leaf, torch.Tensor) else getattr(leaf, "size", None)
        total += size if isinstance(size, int) else len(leaf) if isinstance(leaf, str | bytes) else 1
    return total


class SizedDataset(Protocol):
    """The methods that a dataset needs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def batches_from_dataset(
    dataset: SizedDataset,
    collate: Callable[[list[Any]], Any] | None = None,
    *,
    longest_of: int = 4096,
) -> Callable[[int, int], Any]:
    """A make_batch function over a dataset, whose batch 0 is the worst that training meets.

    Batch 0 has the largest samples among those looked at, so a configuration that fits there fits in training too. The
    other batches go on in the dataset's order, so their sizes are those of training without bucketing.

    Args:
        dataset: Has `len()` and `[]`.
        collate: Makes a batch of a list of samples; None: torch's default_collate.
        longest_of: How many samples are compared to find the largest; they are spread evenly over the dataset.

    Returns:
        `make_batch(num_samples, index)`.

    Raises:
        WorkloadError: the dataset is empty.
    """
    if len(dataset) == 0:
        raise WorkloadError("the dataset is empty", hint="Give a dataset with at least one sample.")
    looked_at = range(0, len(dataset), max(1, -(-len(dataset) // longest_of)))
    order = sorted(looked_at, key=lambda index: -sample_size(dataset[index]))  # of equal size: as the dataset has them
    return functools.partial(_make_batch, dataset, collate or default_collate, order)


def _make_batch(
    dataset: SizedDataset, collate: Callable[[list[Any]], Any], order: list[int], num_samples: int, index: int
) -> Any:
    in_turn = order if index == 0 else sorted(order)
    start = index * num_samples
    samples = [dataset[in_turn[(start + offset) % len(in_turn)]] for offset in range(num_samples)]
    return collate(samples)
