"""The batches of a Trainer: its dataset, in the order of its sampler, by its collator.

In: a Trainer. Out: `make_batch(num_samples, index)`. Batch 1 has the largest samples of the dataset; the others are
those that the Trainer's loader gives, in its order, in pieces of the global batch.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.randomness import seeded
from autoplan.strategies.workloads.samples import SampleBatch, sample_size

KEPT_STEPS = 512
"""Of the order of a longer epoch, so many global batches are kept; then it begins again."""

LOOKED_AT, LOOKING_LIMIT_S = 4096, 2.0
"""Samples whose sizes are compared, spread over the dataset; and seconds after which no further one is looked at."""

WORST = 1
"""The index of the batch with the largest samples."""


@dataclass(frozen=True)
class TrainerBatches:
    """Makes batches of a Trainer's data.

    Attributes:
        dataset: Map-style.
        collate: The Trainer's collator, after it has dropped the columns that the model does not take.
        order: Samples in the order in which the Trainer's sampler gives them.
        largest: The largest samples, the largest first; empty where all have one size.
        rows_are_samples: Whether the first dim of each tensor of a batch counts samples.
        collated_by_parts: The batch is a `SampleBatch`, because its micro-batches are padded, packed or paired by
            themselves; else it is a dict of tensors, and micro-batches are rows of it.
        seed: For collators that draw (masked language models).
    """

    dataset: Any
    collate: Any
    order: tuple[int, ...]
    largest: tuple[int, ...]
    rows_are_samples: bool
    collated_by_parts: bool
    seed: int

    def __call__(self, num_samples: int, index: int) -> Batch:
        """A batch on the host; the same for the same arguments."""
        places = self.order
        if self.largest and index == WORST:
            places, index = self.largest, 0
        elif self.largest and index > WORST:
            index -= 1
        start = index * num_samples
        samples = fetch(self.dataset, [places[(start + k) % len(places)] for k in range(num_samples)])
        if self.collated_by_parts:
            batch: Any = SampleBatch(samples, self.collate, rows_are_samples=self.rows_are_samples)
        else:
            with seeded(self.seed + index):
                batch = self.collate(samples)
            batch = dict(batch) if isinstance(batch, Mapping) else batch
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(batch)):
            raise RuntimeError("a collator reads values, so its batches are made for real")
        return batch


def read_batches(trainer: Any, global_batch: int, seed: int) -> tuple[TrainerBatches, list[str]]:
    """The batches of a Trainer, and sentences for the user.

    Args:
        trainer: Is left as it was.
        global_batch: Samples per optimizer step.
        seed: For collators that draw.

    Raises:
        WorkloadError: there is no dataset, it has no length, it is smaller than a global batch, or the loader's
            batches are not those of the arguments.
    """
    with _random_state_kept():
        loader = _loader_of(trainer)
        sampler = getattr(loader, "batch_sampler", None)
        dataset = getattr(loader, "dataset", trainer.train_dataset)
        if sampler is None or isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise WorkloadError(
                f"the train_dataset of the {type(trainer).__name__} is a {type(dataset).__name__}, a stream without a "
                "length; trials read the same samples several times",
                hint="Search with a part of it as a map-style dataset: "
                "datasets.Dataset.from_list(list(itertools.islice(stream, 4096))); train with the stream.",
            )
        if len(dataset) < global_batch:
            raise WorkloadError(
                f"the train_dataset has {len(dataset)} samples, and a global batch {global_batch} "
                "(per_device_train_batch_size x gradient_accumulation_steps x processes): no step of the Trainer is "
                "whole",
                hint="Give more samples, or a smaller batch.",
            )
        lists = iter(sampler)
        first: list[int] = next(lists, [])
        _refuse_batch_size(trainer, len(first))
        flat = itertools.chain(first, itertools.chain.from_iterable(lists))
        order = tuple(int(place) for place in itertools.islice(flat, KEPT_STEPS * global_batch))
        collate = _without_logger(loader.collate_fn)
        _check_mapping(_collated(collate, fetch(dataset, order[:1]), seed))
        return with_form(dataset, collate, order, seed), _notes(trainer, dataset, order, global_batch)


def refuse_other_batch_size(trainer: Any) -> None:
    """Refuses a Trainer whose loader's batches are not those of its arguments. It is left as it was.

    Raises:
        WorkloadError: they are not.
    """
    with _random_state_kept():
        _refuse_batch_size(trainer, len(next(iter(_loader_of(trainer).batch_sampler), [])))


def _refuse_batch_size(trainer: Any, found: int) -> None:
    wanted = int(trainer._train_batch_size)
    if found != wanted:
        raise WorkloadError(
            f"get_train_dataloader() of the {type(trainer).__name__} gives batches of {found} samples where the "
            f"arguments ask for {wanted}; a plan sets the batch size by per_device_train_batch_size",
            hint="Have get_train_dataloader() make batches of self._train_batch_size samples, which follows that "
            "argument.",
        )


def _without_logger(collate: Any) -> Any:
    """A collator of transformers that drops columns, without the logger that it says so to: that cannot be hashed."""
    if type(collate).__name__ != "RemoveColumnsCollator":
        return collate
    quiet = copy.copy(collate)
    quiet.logger = None
    return quiet


def steps_of_training(trainer: Any) -> int:
    """Optimizer steps of the whole training."""
    with _random_state_kept():
        return max(1, int(trainer.set_initial_training_values(trainer.args, _loader_of(trainer))[-1]))


def fetch(dataset: Any, places: Sequence[int]) -> list[Any]:
    """Samples of a dataset, as torch's loader takes them."""
    several = getattr(dataset, "__getitems__", None)
    return list(several(list(places))) if callable(several) else [dataset[place] for place in places]


def _loader_of(trainer: Any) -> Any:
    """The Trainer's own loader; the accelerator forgets that it made one."""
    if trainer.train_dataset is None:
        raise WorkloadError(
            f"the {type(trainer).__name__} has no train_dataset", hint="Give it one: Trainer(train_dataset=...)."
        )
    prepared = getattr(trainer.accelerator, "_dataloaders", [])
    before = len(prepared)
    columns = trainer._signature_columns
    try:
        return trainer.get_train_dataloader()
    finally:
        del prepared[before:]
        trainer._signature_columns = columns


def with_form(dataset: Any, collate: Any, order: tuple[int, ...], seed: int) -> TrainerBatches:
    """The batches, in the form that the collator needs: found by collating a few samples.

    Args:
        dataset: Map-style.
        collate: Makes a batch of samples: a mapping, or for a loop of the user's own a tensor or a tuple of them.
        order: Samples in the order of training.
        seed: For collators that draw.
    """
    places = sorted(set(order[:: max(1, len(order) // 12)][:12]))
    samples = fetch(dataset, places)
    alone = [_collated(collate, [sample], seed) for sample in samples]
    pair = _collated(collate, samples[:2], seed)
    rows_are_samples = all(_rows(fields) == {1} for fields in alone) and _rows(pair) == {min(2, len(samples))}
    draws = _differ(alone[0], _collated(collate, samples[:1], seed + 1))
    one_size = len({_sizes(fields) for fields in alone}) == 1
    by_parts = isinstance(pair, Mapping) and (not rows_are_samples or not (one_size or draws))
    largest = () if one_size and rows_are_samples else _largest(dataset, order)
    return TrainerBatches(dataset, collate, order, largest, rows_are_samples, by_parts, seed)


def _collated(collate: Any, samples: list[Any], seed: int) -> Any:
    with seeded(seed):
        return collate(samples)


def _check_mapping(fields: Any) -> None:
    if not isinstance(fields, Mapping):
        raise WorkloadError(
            f"the collator made a {type(fields).__name__}; a Trainer's batches are dicts of tensors",
            hint="Return a dict from data_collator.",
        )


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


def _notes(trainer: Any, dataset: Any, order: tuple[int, ...], global_batch: int) -> list[str]:
    if len(dataset) % global_batch == 0 or trainer.args.dataloader_drop_last:
        return []
    return [
        f"the last step of an epoch has only {len(dataset) % global_batch} of {global_batch} samples "
        "(dataloader_drop_last is off); it is not measured"
    ]


class _random_state_kept:  # a context manager
    """Puts the random generators back: making a loader and a sampler's order draws from them."""

    def __enter__(self) -> None:
        self.before = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def __exit__(self, *error: object) -> None:
        torch.set_rng_state(self.before[0])
        random.setstate(self.before[1])
        np.random.set_state(self.before[2])
