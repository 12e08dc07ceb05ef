"""Batches from a user's own dataset: any object with `len()` and `[]` (a torch map-style dataset, a list)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.data import default_collate

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.samples import sample_size


class SizedDataset(Protocol):
    """The methods that a dataset needs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def batches_from_dataset(
    dataset: SizedDataset,
    collate: Callable[[list[Any]], Batch] | None = None,
    *,
    longest_of: int = 4096,
) -> Callable[[int, int], Batch]:
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
    order = order_by_size(dataset, longest_of)
    return functools.partial(_make_batch, dataset, collate or default_collate, order)


def order_by_size(dataset: SizedDataset, longest_of: int) -> list[int]:
    """Indices of the samples looked at, largest first; samples of equal size stay in the dataset's order."""
    stride = max(1, -(-len(dataset) // longest_of))
    looked_at = range(0, len(dataset), stride)
    return sorted(looked_at, key=lambda index: -sample_size(dataset[index]))


def _make_batch(
    dataset: SizedDataset, collate: Callable[[list[Any]], Batch], order: list[int], num_samples: int, index: int
) -> Batch:
    in_turn = order if index == 0 else sorted(order)
    start = index * num_samples
    samples = [dataset[in_turn[(start + offset) % len(in_turn)]] for offset in range(num_samples)]
    return collate(samples)
