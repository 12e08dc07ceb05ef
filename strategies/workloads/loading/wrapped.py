"""Datasets around the user's own: one whose failures say the index of the sample, one that begins later in a stream.

What fails is caught where it happens and travels as a batch (`Failure`), since what a worker process raises arrives as
a text alone, without the index.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autoplan.strategies.workloads.batch import know_containers
from autoplan.strategies.workloads.loading.order import check_place
from autoplan.strategies.workloads.user_errors import user_error

SHOWN_INDICES = 8

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Failure:
    """The placeholder for a batch that could not be made.

    Attributes:
        text: What was raised, on which sample, where.
    """

    text: str


class Wrapped(Dataset[Any]):
    """A dataset around the user's own, whose attributes are read and set there: a worker_init_fn does both."""

    def __init__(self, dataset: Any, **own: Any) -> None:
        vars(self).update(_wrapped=dataset, **own)

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_wrapped" not in vars(self):
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)


class NamedSamples(Wrapped):
    """A map-style dataset whose samples come with their index."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        try:
            return index, self._wrapped[index]
        except Exception as error:
            early = isinstance(error, IndexError) and hasattr(self._wrapped, "__len__")
            said = f"; the dataset ends early: its len() is {len(self)}" if early else ""
            return index, Failure(_describe(error, f"dataset[{index}]{said}"))

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        together = getattr(self._wrapped, "__getitems__", None)
        if callable(together):
            try:
                return list(zip(indices, together(indices), strict=True))
            except Exception:  # which of them is found one by one
                pass
        return [self[index] for index in indices]


class NamedStream(Wrapped, IterableDataset[Any]):
    """A streaming dataset whose samples come with their number, as each worker counts them."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        number = 0
        try:
            for sample in self._wrapped:
                yield number, sample
                number += 1
        except Exception as error:
            info = get_worker_info()
            of = "" if info is None else f" of worker {info.id}"
            yield number, Failure(_describe(error, f"the dataset's sample {number}{of}"))


class Stream(Wrapped, IterableDataset[Any]):
    """Any iterable as a streaming dataset, in its first pass without the batches that a training has seen.

    torchdata's StatefulDataLoader does not take its place (see order.py): a stream without states of its own it reads
    again, as this does, and it needs a state that each rank has saved. Here the number of steps is enough.

    Batches come from the workers in turn, and a worker leaves out those that it gave itself. So each sample is seen
    once with the same number of workers and, after a first pass, where they have equally many batches. The turns begin
    with the first worker again.

    Args:
        dataset: The stream.
        start: Samples, of all ranks together, that the training has seen.
        batch_size: Samples of a batch of a rank.
        ranks: How many there are.

    Raises:
        WorkloadError: a start below zero.
    """

    def __init__(self, dataset: Any, *, start: int, batch_size: int, ranks: int = 1) -> None:
        check_place(0, ranks, start)
        super().__init__(dataset, _batches_seen=start // (batch_size * ranks), _batch_size=batch_size)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        size = self._batch_size
        left = (self._batches_seen + workers - 1 - worker) // workers * size
        vars(self)["_batches_seen"] = 0
        samples, first = iter(self._wrapped), []
        while left:
            passed = sum(1 for _ in itertools.islice(samples, left))
            left -= passed - passed % size  # the last, smaller batch of a pass is dropped
            first = list(itertools.islice(samples, size))
            if len(first) == size:
                break
            samples, first = iter(self._wrapped), []
            if passed < size:
                break
        yield from first
        yield from samples


@dataclass(frozen=True)
class NamedCollate:
    """A collate_fn for samples that come with their index; gives the batch, or the `Failure` to make it."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, named: list[tuple[Any, Any]]) -> Any | Failure:
        for _, sample in named:
            if isinstance(sample, Failure):
                return sample
        try:
            return self.collate([sample for _, sample in named])
        except Exception as error:
            indices = [index.item() if isinstance(index, torch.Tensor) else index for index, _ in named]
            shown = ", ".join(map(str, indices[:SHOWN_INDICES])) + (", ..." if len(indices) > SHOWN_INDICES else "")
            return Failure(_describe(error, f"collate_fn of samples {shown}{_odd_sample(named)}"))


def _describe(error: Exception, call: str) -> str:
    return user_error(error, call, "").flag_message.replace("\n", " ").strip()


def _odd_sample(named: Sequence[tuple[Any, Any]]) -> str:
    """Which sample is not shaped as the first one is."""
    first = shapes_of(named[0][1])
    for index, sample in named[1:]:
        shapes = shapes_of(sample)
        if shapes != first:
            return f"; sample {index} has {describe_shapes(shapes)}, sample {named[0][0]} {describe_shapes(first)}"
    return ""


def shapes_of(batch: Any) -> Shapes:
    """The shapes of the tensors (and arrays) in a batch or a sample, by where they are in it."""
    return {
        pytree.keystr(path).strip("[]'\"") or "it": tuple(int(size) for size in leaf.shape)
        for path, leaf in _leaves(batch)
        if getattr(leaf, "shape", None) is not None
    }


def kinds_of(batch: Any) -> dict[str, tuple[Any, int]]:
    """The dtype and the number of dims of each tensor in a batch, by where it is in it."""
    return {
        pytree.keystr(path): (leaf.dtype, leaf.dim())
        for path, leaf in _leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }


def _leaves(batch: Any) -> list[tuple[Any, Any]]:
    know_containers(batch)
    return pytree.tree_flatten_with_path(batch)[0]


def describe_shapes(shapes: Shapes) -> str:
    """`input_ids (8, 128), labels (8, 128)`."""
    return ", ".join(f"{name} {size}" for name, size in list(shapes.items())[:4]) or "no tensor"
