"""The batches of a training's own DataLoader, for trials: its dataset, its collate_fn, the order of its sampler.

In: a torch DataLoader, also one that Accelerate or Lightning prepared. Out: a make_batch, whose batch 1 has the largest
samples where sizes differ (`batches.py`); and `resized`, the same DataLoader with another batch size, for the run
of a plan.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import batch_size
from autoplan.strategies.workloads.loading.order import is_shard, sampler_of, split_over
from autoplan.strategies.workloads.loading.settings import LoaderSetting
from autoplan.strategies.workloads.loops.batches import OrderedBatches, batches_in_form, fetch
from autoplan.strategies.workloads.randomness import seeded
from autoplan.strategies.workloads.samples import MicroBatches
from autoplan.strategies.workloads.user_errors import user_error

SAMPLES_OF_ORDER = 1 << 16
"""So many samples of the loader's order are kept for trials, or BATCHES_OF_ORDER global batches if that is more."""

BATCHES_OF_ORDER = 128

LOOKED_AT = 256
"""Batches of a batch sampler of the user's own that are looked at for their size."""

OWN_BATCHES = "Or give the batches yourself: make_batch(num_samples, index) instead of dataloader=."


@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """Facts about a training, from its DataLoader.

    Attributes:
        batch_size: Samples of one of its batches.
        samples: Of an epoch, whole batches only.
        left_over: Samples of a last, smaller batch of each epoch.
        has_workers: It loads in processes of its own, which trials don't.
    """

    batch_size: int
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
    loader: DataLoader[Any], *, global_batch: int | Callable[[int], int], seed: int
) -> tuple[OrderedBatches, LoaderFacts]:
    """The batches of a DataLoader, and what it says.

    Args:
        loader: As `check_loader` gives it.
        global_batch: Samples per optimizer step; or a function that gives them for the loader's batch size.
        seed: For a sampler that draws from torch's own generator: the order is then that of a loop which calls
            `torch.manual_seed(seed)` and goes over the loader.

    Raises:
        WorkloadError: batches of different sizes, a dataset smaller than a global batch, or a collate_fn that does not
            keep the number of samples.
    """
    size = _batch_size(loader, seed)
    samples_per_step = global_batch(size) if callable(global_batch) else global_batch
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
    try:
        batch_sampler = copy.deepcopy(loader.batch_sampler, memo)
    except Exception as error:
        raise WorkloadError(
            f"the sampler {type(sampler_of(loader)).__name__} cannot be copied: {type(error).__name__}: {error}",
            hint="Trials need its order without taking it from the training. " + OWN_BATCHES,
        ) from error
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


def _batch_size(loader: DataLoader[Any], seed: int) -> int:
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
