"""A dataset and a collate_fn whose failures say the index of the sample, also out of a worker process.

In: the user's own. Out: the same with errors caught where they happen: they travel as a batch, since what a worker
raises arrives as a text alone. A batch that could be made travels with the indices of its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autoplan.strategies.workloads.containers import know_containers
from autoplan.strategies.workloads.user_errors import user_error

SHOWN_INDICES = 8


@dataclass(frozen=True)
class Failure:
    """What stands for a batch that could not be made.

    Attributes:
        text: What was raised, on which sample, where.
    """

    text: str


class NamedBatch(NamedTuple):
    """A batch, and the indices of its samples. A tuple, so that what pins memory goes into it."""

    indices: Sequence[Any]
    batch: Any


class NamedSamples(Dataset[Any]):
    """A map-style dataset whose samples come with their index."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        try:
            return index, self.dataset[index]
        except Exception as error:
            return index, Failure(_describe(error, f"dataset[{index}]{self._length_said(error)}"))

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        together = getattr(self.dataset, "__getitems__", None)
        if callable(together):
            try:
                return list(zip(indices, together(indices), strict=True))
            except Exception:  # which of them is found one by one
                pass
        return [self[index] for index in indices]

    def __getattr__(self, name: str) -> Any:  # a worker_init_fn reads worker_info.dataset
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _length_said(self, error: Exception) -> str:
        if not isinstance(error, IndexError) or not hasattr(self.dataset, "__len__"):
            return ""
        return f"; the dataset ends early: its len() is {len(self)}"


class Stream(IterableDataset[Any]):
    """Any iterable as a streaming dataset; torch takes one without this class for a map-style dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


class NamedStream(IterableDataset[Any]):
    """A streaming dataset whose samples come with their number, as each worker counts them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        number = 0
        try:
            for sample in self.dataset:
                yield number, sample
                number += 1
        except GeneratorExit:
            raise
        except Exception as error:
            info = get_worker_info()
            of = "" if info is None else f" of worker {info.id}"
            yield number, Failure(_describe(error, f"the dataset's sample {number}{of}"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


@dataclass(frozen=True)
class NamedCollate:
    """A collate_fn for samples that come with their index; gives a `NamedBatch`, or the `Failure` to make it."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, named: list[tuple[Any, Any]]) -> NamedBatch | Failure:
        for _, sample in named:
            if isinstance(sample, Failure):
                return sample
        indices = [index for index, _ in named]
        try:
            return NamedBatch(indices, self.collate([sample for _, sample in named]))
        except Exception as error:
            return Failure(_describe(error, f"collate_fn of {describe_samples(indices)}{_odd_sample(named)}"))


def describe_samples(indices: Sequence[Any]) -> str:
    """`samples 4, 5, 6, 7`: the first of them, where they are many."""
    shown = [index.item() if isinstance(index, torch.Tensor) else index for index in indices[:SHOWN_INDICES]]
    return "samples " + ", ".join(map(str, shown)) + (", ..." if len(indices) > SHOWN_INDICES else "")


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


Shapes = dict[str, tuple[int, ...]]


def shapes_of(batch: Any) -> Shapes:
    """The shapes of the tensors (and arrays) in a batch or a sample, by where they are in it."""
    know_containers(batch)
    leaves, _ = pytree.tree_flatten_with_path(batch)
    found = {}
    for path, leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if shape is not None:
            found[pytree.keystr(path).strip("[]'\"") or "it"] = tuple(int(size) for size in shape)
    return found


def kinds_of(batch: Any) -> dict[str, tuple[Any, int]]:
    """The dtype and the number of dims of each tensor in a batch, by where it is in it."""
    know_containers(batch)
    leaves, _ = pytree.tree_flatten_with_path(batch)
    return {
        pytree.keystr(path): (leaf.dtype, leaf.dim())
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }


def describe_shapes(shapes: Shapes) -> str:
    """`input_ids (8, 128), labels (8, 128)`."""
    return ", ".join(f"{name} {size}" for name, size in list(shapes.items())[:4]) or "no tensor"
