"""The batches of a training's own DataLoader, for trials: its dataset, its collate_fn, the order of its sampler.

In: a torch DataLoader, also one that Accelerate or Lightning prepared; or its dataset, its collator and the numbers of
its samples in order. Out: a make_batch, `make_batch(num_samples, index)`: batch 1 has the largest samples where sizes
differ, the others are those of the order, in pieces of the asked size. And `resized`, the same DataLoader with another
batch size, for the run of a plan.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch, batch_size
from autoplan.strategies.workloads.digests import digest
from autoplan.strategies.workloads.fingerprint import plain
from autoplan.strategies.workloads.loading.order import is_shard, sampler_of, split_over
from autoplan.strategies.workloads.loading.settings import LoaderSetting
from autoplan.strategies.workloads.randomness import seeded
from autoplan.strategies.workloads.samples import MicroBatches, SampleBatch, sample_size
from autoplan.strategies.workloads.user_errors import failing_as, user_error

SAMPLES_OF_ORDER = 1 << 16
"""So many samples of the loader's order are kept for trials, or BATCHES_OF_ORDER global batches if that is more."""

BATCHES_OF_ORDER = 128

LOOKED_AT = 256
"""Batches of a batch sampler of the user's own that are looked at for their size."""

SIZED_SAMPLES, LOOKING_LIMIT_S = 4096, 2.0
"""Samples whose sizes are compared, spread over the dataset; and seconds after which no further one is looked at."""

WORST = 1
"""The index of the batch with the largest samples."""

OWN_BATCHES = "Or give the batches yourself: make_batch(num_samples, index) instead of dataloader=."


# Of a dataset, by its collator.


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
    for place in places[:: max(1, -(-len(places) // SIZED_SAMPLES))]:
        sizes.append((-sample_size(dataset[place]), place))
        if time.monotonic() - began > LOOKING_LIMIT_S:
            break
    return tuple(place for _, place in sorted(sizes))


# Of a DataLoader.


@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """Facts about a training, from its DataLoader.

    Attributes:
        batch_size: Samples of one of its batches.
        global_batch: Samples per optimizer step.
        samples: Of an epoch, whole batches only.
        left_over: Samples of a last, smaller batch of each epoch.
        has_workers: It loads in processes of its own, which trials don't.
    """

    batch_size: int
    global_batch: int
    samples: int
    left_over: int
    has_workers: bool


def check_loader(loader: Any, what: str = "dataloader") -> DataLoader[Any]:
    """The torch DataLoader in what was given.

    Raises:
        WorkloadError: it is none, it streams, or it has no batches.
    """
    fabric = type(loader).__name__ == "_FabricDataLoader"
    inner = getattr(loader, "_dataloader" if fabric else "base_dataloader", loader)  # what fabric, accelerator made of
    if not isinstance(inner, DataLoader):
        raise WorkloadError(
            f"{what} is {_kind_of(loader)}; it is a torch.utils.data.DataLoader",
            hint="Hand in the DataLoader itself, not iter(dataloader) and not one of its batches. " + OWN_BATCHES,
        )
    if isinstance(inner.dataset, IterableDataset):
        length = f"has {len(inner.dataset)} samples" if isinstance(inner.dataset, Sized) else "has no length"
        raise WorkloadError(
            f"the dataset of {what} streams ({type(inner.dataset).__name__}): it {length} and no sample by its number, "
            "so no trial can be given the same batches as another",
            hint="Search on some samples of it: DataLoader(list(itertools.islice(dataset, 4096)), batch_size=..., "
            "collate_fn=...). " + OWN_BATCHES,
        )
    if inner.batch_sampler is None:
        raise WorkloadError(
            f"{what} has batch_size=None, so its dataset makes the batches and it is not known how many samples are in "
            "one",
            hint="Give the DataLoader a batch_size, and a dataset whose items are single samples. " + OWN_BATCHES,
        )
    return inner


def read_loader(
    loader: DataLoader[Any], *, batches_per_step: int, global_batch: int | None, seed: int
) -> tuple[OrderedBatches, LoaderFacts]:
    """The batches of a DataLoader, and what it says.

    Args:
        loader: As `check_loader` gives it.
        batches_per_step: Batches of the loader per optimizer step.
        global_batch: Samples per optimizer step; None: those of these batches.
        seed: For a sampler that draws from torch's own generator: the order is then that of a loop which calls
            `torch.manual_seed(seed)` and goes over the loader.

    Raises:
        WorkloadError: batches of different sizes, a dataset smaller than a global batch, or a collate_fn that does not
            keep the number of samples.
    """
    size = _batch_size(loader)
    samples_per_step = global_batch or size * batches_per_step
    most = max(SAMPLES_OF_ORDER, BATCHES_OF_ORDER * samples_per_step)
    order = tuple(itertools.islice(_indices(loader, seed), most))
    epoch = _epoch_samples(loader, len(order), whole=len(order) < most)
    if epoch < samples_per_step:
        raise WorkloadError(
            f"the dataset has {epoch} samples for an epoch, and a global batch takes {samples_per_step}: no whole "
            "batch can be made of different samples",
            hint="Give a larger dataset, or the global batch that the training has: global_batch=.",
        )
    kept = order[: len(order) - len(order) % samples_per_step]
    batches = _batches(loader, kept, seed)
    facts = LoaderFacts(
        batch_size=size,
        global_batch=samples_per_step,
        samples=epoch - epoch % size,
        left_over=epoch % size,
        has_workers=loader.num_workers > 0,
    )
    return batches, facts


def resized(
    loader: Any,
    batch_size: int,
    setting: LoaderSetting | None = None,
    *,
    order: Any = None,
    micro_batch: int | None = None,
) -> DataLoader[Any]:
    """The same DataLoader with another batch size: dataset, order of samples and collate_fn stay.

    Args:
        loader: A DataLoader, also a prepared one.
        batch_size: Samples of a batch. A last, smaller batch is dropped.
        setting: Its workers, prefetch factor and pinned memory; None: as they are.
        order: The samples of this rank (`make_order`); None: those of the loader's own sampler.
        micro_batch: So many samples at a time are collated by themselves too, as a search ran them: padded to their
            own longest. None: a batch is collated as a whole alone.

    Raises:
        WorkloadError: it is no DataLoader, or streams.
    """
    inner = check_loader(loader)
    collate: Any = inner.collate_fn
    if micro_batch is not None:
        collate = functools.partial(MicroBatches, collate=collate, micro_batch=micro_batch)
    arguments: dict[str, Any] = {
        name: getattr(inner, name) for name in ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
    }
    arguments |= {"timeout": inner.timeout, "multiprocessing_context": inner.multiprocessing_context}
    if setting is not None:
        arguments |= {"prefetch_factor": None, "persistent_workers": False} | setting.arguments
        if not setting.workers:
            arguments |= {"timeout": 0, "multiprocessing_context": None}
    return DataLoader(
        inner.dataset,
        batch_size=batch_size,
        sampler=sampler_of(inner) if order is None else order,
        collate_fn=collate,
        drop_last=True,
        worker_init_fn=inner.worker_init_fn,
        generator=inner.generator,
        **arguments,
    )


class _Numbers:
    """A dataset whose samples are their own numbers: a loader over it gives the order of another dataset's samples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.length


def _indices(loader: DataLoader[Any], seed: int) -> Iterator[int]:
    """The numbers of the samples in the order of the next epoch; nothing is drawn from the user's own generators.

    A real loader is made over the numbers, with copies of the sampler and of its generator: torch draws a number for
    the loader's workers before the sampler draws, and this order is part of what the sampler gives.
    """
    memo: dict[int, Any] = {id(loader.dataset): loader.dataset}
    for holder in (loader, sampler_of(loader), loader.batch_sampler):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and id(generator) not in memo:
            memo[id(generator)] = generator.clone_state()
    hint = "Trials need its order without taking it from the training. " + OWN_BATCHES
    with failing_as(f"the sampler {type(sampler_of(loader)).__name__} cannot be copied", hint):
        batch_sampler = copy.deepcopy(loader.batch_sampler, memo)
    _refuse_shard(loader)
    numbers = DataLoader(
        cast(Any, _Numbers(len(cast(Sized, loader.dataset)))),
        batch_sampler=batch_sampler,
        collate_fn=list,
        generator=memo.get(id(loader.generator)) if loader.generator is not None else None,
    )
    with seeded(seed):
        for batch in numbers:
            yield from batch


def _refuse_shard(loader: DataLoader[Any]) -> None:
    split = split_over(loader)
    if split is not None:
        kind, processes = split
        raise WorkloadError(
            f"the DataLoader is one of {processes} processes' ({kind}): a search runs in one",
            hint="Search from a program that was started by itself (python train.py), with the DataLoader as it "
            f"is before it is split, and global_batch= of all {processes} processes together.",
        )


def _batch_size(loader: DataLoader[Any]) -> int:
    """Samples of a batch.

    Raises:
        WorkloadError: a batch sampler of the user's own makes batches of different sizes, or none at all.
    """
    own = cast(Any, loader.batch_sampler)
    if type(own) is BatchSampler or is_shard(own):
        return int(own.batch_size)
    try:
        copied = copy.deepcopy(own, {id(loader.dataset): loader.dataset})
        batches = [len(batch) for batch in itertools.islice(copied, LOOKED_AT)]
    except TypeError as error:
        raise WorkloadError(
            f"the batch sampler {type(own).__name__} gives no lists of numbers: {error}", hint=OWN_BATCHES
        ) from error
    if not batches:
        raise WorkloadError(
            f"the DataLoader gives no batch: its batch sampler {type(own).__name__} is empty or used up",
            hint="Hand in a DataLoader that can be gone over from its beginning.",
        )
    whole = batches[:-1] if 1 < len(batches) < LOOKED_AT else batches  # the last of an epoch may be smaller
    if len(set(whole)) > 1 or batches[-1] > whole[0]:
        raise WorkloadError(
            f"the batch sampler {type(own).__name__} makes batches of {min(batches)} to {max(batches)} samples; an "
            "optimizer step of a plan has the same number of samples each time",
            hint="Give a batch sampler whose batches have one size. " + OWN_BATCHES,
        )
    return whole[0]


def _epoch_samples(loader: DataLoader[Any], seen: int, *, whole: bool) -> int:
    """Samples of an epoch: as many as were seen, or, where not all were, as the sampler says."""
    if whole:
        return seen
    try:
        return max(seen, len(sampler_of(loader)))
    except (TypeError, NotImplementedError):
        return seen


def _batches(loader: DataLoader[Any], order: tuple[int, ...], seed: int) -> OrderedBatches:
    """The batches in the form that collate_fn needs.

    Raises:
        WorkloadError: the dataset or collate_fn fails, or a batch has not as many rows as it was made of samples.
    """
    try:
        batches = batches_in_form(loader.dataset, loader.collate_fn, order, seed)
    except Exception as error:
        raise user_error(error, "the DataLoader's dataset and collate_fn", OWN_BATCHES) from error
    if not batches.rows_are_samples:
        found = batch_size(loader.collate_fn(fetch(loader.dataset, order[:2])))
        raise WorkloadError(
            f"collate_fn makes {found} rows of 2 samples, so the samples of a step cannot be counted "
            "(packing, or several views of a sample)",
            hint="Pack or repeat samples in the dataset, so that a sample is one row of the batch. " + OWN_BATCHES,
        )
    return batches


def _kind_of(value: object) -> str:
    if isinstance(value, Iterator):
        return f"an iterator ({type(value).__name__}), which can be gone over once"
    return f"{type(value).__name__}"
