"""Batches of a dataset, in the order of a training, by its collator.

In: a map-style dataset, a collator, the numbers of its samples in order. Out: `make_batch(num_samples, index)`. Batch 1
has the largest samples of the dataset; the others are those of the order, in pieces of the asked size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.digests import digest
from autoplan.strategies.workloads.fingerprint import plain
from autoplan.strategies.workloads.randomness import seeded
from autoplan.strategies.workloads.samples import SampleBatch, sample_size

LOOKED_AT, LOOKING_LIMIT_S = 4096, 2.0
"""Samples whose sizes are compared, spread over the dataset; and seconds after which no further one is looked at."""

WORST = 1
"""The index of the batch with the largest samples."""


@dataclass(frozen=True)
class OrderedBatches:
    """Makes batches of a training's data.

    Attributes:
        dataset: Map-style.
        collate: The training's collator.
        order: Samples in the order in which the training's sampler gives them.
        largest: The largest samples, the largest first; empty where all have one size.
        rows_are_samples: Whether the first dim of each tensor of a batch counts samples.
        collated_by_parts: The batch is a `SampleBatch`, because its micro-batches are padded, packed or paired by
            themselves; else it is a dict of tensors, and micro-batches are rows of it.
        seed: For collators that draw (masked language models).
        samples: A digest of some samples, collated; empty where the dataset gives another sample each time.
    """

    called = "the DataLoader"  # where a change of it is named

    dataset: Any
    collate: Any
    order: tuple[int, ...]
    largest: tuple[int, ...]
    rows_are_samples: bool
    collated_by_parts: bool
    seed: int
    samples: str = ""

    def __call__(self, num_samples: int, index: int) -> Batch:
        """A batch on the host; the same for the same arguments."""
        places = self.order
        if self.largest and index == WORST:
            places, index = self.largest, 0
        elif self.largest and index > WORST:
            index -= 1
        start = index * num_samples
        numbers = [places[(start + k) % len(places)] for k in range(num_samples)]
        samples = _fetch_seeded(self.dataset, numbers, self.seed + index)
        if self.collated_by_parts:
            batch: Any = SampleBatch(samples, self.collate, rows_are_samples=self.rows_are_samples)
        else:
            with seeded(self.seed + index):
                batch = self.collate(samples)
            batch = dict(batch) if isinstance(batch, Mapping) else batch
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(batch)):
            raise RuntimeError("a collator reads values, so its batches are made for real")
        return batch


def fetch(dataset: Any, places: Sequence[int]) -> list[Any]:
    """Samples of a dataset, as torch's loader takes them."""
    several = getattr(dataset, "__getitems__", None)
    return list(several(list(places))) if callable(several) else [dataset[place] for place in places]


def batches_in_form(dataset: Any, collate: Any, order: tuple[int, ...], seed: int) -> OrderedBatches:
    """The batches, in the form that the collator needs: found by collating a few samples.

    Args:
        dataset: Map-style.
        collate: Makes a batch of samples: a mapping, or for a loop of the user's own a tensor or a tuple of them.
        order: Samples in the order of training.
        seed: For collators that draw.
    """
    places = sorted(set(order[:: max(1, len(order) // 12)][:12]))
    samples = _fetch_seeded(dataset, places, seed)
    alone = [collated(collate, [sample], seed) for sample in samples]
    pair = collated(collate, samples[:2], seed)
    rows_are_samples = all(_rows(fields) == {1} for fields in alone) and _rows(pair) == {min(2, len(samples))}
    draws = _differ(alone[0], collated(collate, samples[:1], seed + 1))
    one_size = len({_sizes(fields) for fields in alone}) == 1
    by_parts = isinstance(pair, Mapping) and (not rows_are_samples or not (one_size or draws))
    largest = () if one_size and rows_are_samples else _largest(dataset, order)
    again = collated(collate, _fetch_seeded(dataset, places[:1], seed), seed)
    repeats = digest(plain(again)) == digest(plain(alone[0]))
    seen = digest([plain(fields) for fields in (*alone, pair)]) if repeats else ""
    return OrderedBatches(dataset, collate, order, largest, rows_are_samples, by_parts, seed, seen)


def _fetch_seeded(dataset: Any, places: Sequence[int], seed: int) -> list[Any]:
    """Samples; a dataset that draws from the global generators gives the same for the same seed."""
    with seeded(seed):
        return fetch(dataset, places)


def collated(collate: Any, samples: list[Any], seed: int) -> Any:
    """A batch of samples; a collator that draws gives the same for the same seed."""
    with seeded(seed):
        return collate(samples)


def _tensors(fields: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(dict(fields) if isinstance(fields, Mapping) else fields)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]


def _rows(fields: Any) -> set[int]:
    return {tensor.shape[0] for tensor in _tensors(fields)}


def _sizes(fields: Any) -> tuple[Any, ...]:
    return tuple(tuple(tensor.shape[1:]) for tensor in _tensors(fields))


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(_tensors(one), _tensors(other), strict=False)
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


def _largest(dataset: Any, order: tuple[int, ...]) -> tuple[int, ...]:
    """The samples looked at, the largest first."""
    places = sorted(set(order))
    began, sizes = time.monotonic(), []
    for place in places[:: max(1, -(-len(places) // LOOKED_AT))]:
        sizes.append((-sample_size(dataset[place]), place))
        if time.monotonic() - began > LOOKING_LIMIT_S:
            break
    return tuple(place for _, place in sorted(sizes))
