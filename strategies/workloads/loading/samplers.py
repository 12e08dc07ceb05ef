"""What gives the samples of a DataLoader one by one, whatever it was made with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What gives the samples one by one; not `loader.sampler` where the loader was made with a batch sampler."""
    own = cast(Any, loader.batch_sampler)
    own = own.batch_sampler if is_shard(own) else own
    return own.sampler if type(own) is BatchSampler else _Flat(own)


class _Flat(Sampler[int]):
    """The samples of a batch sampler of the user's own, one by one."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches:
            yield from batch

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)


def is_shard(batch_sampler: Any) -> bool:
    """Whether accelerate split the batches over processes."""
    return type(batch_sampler).__name__ == "BatchSamplerShard" and hasattr(batch_sampler, "batch_sampler")


def split_over(loader: DataLoader[Any]) -> tuple[str, int] | None:
    """What splits the samples of a loader over processes already, and over how many; None: nothing."""
    for holder, name in ((sampler_of(loader), "num_replicas"), (loader.batch_sampler, "num_processes")):
        processes = getattr(holder, name, 1)
        if isinstance(processes, int) and processes > 1:
            return type(holder).__name__, processes
    return None


def is_plain_order(sampler: Any, dataset: Any) -> bool:
    """Whether a sampler is torch's own that gives each sample of the dataset once, shuffled or not."""
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return False
    if sampler.data_source is not dataset and not hasattr(dataset, "__len__"):
        return False  # the sampler alone knows the indices
    try:
        lengths = {len(dataset), len(sampler.data_source), len(sampler)}
    except TypeError:  # no length: what needs it says so
        return True
    return len(lengths) == 1 and not getattr(sampler, "replacement", False)


def generators_of(sampler: Any) -> list[torch.Generator]:
    """The generators of torch that a sampler, or a sampler in it, has."""
    found: dict[int, torch.Generator] = {}
    looked_at, left = set(), [sampler]
    while left:
        holder = left.pop()
        if id(holder) in looked_at:
            continue
        looked_at.add(id(holder))
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, torch.Generator):
                found[id(value)] = value
            elif isinstance(value, Sampler) or name in ("sampler", "batches"):
                left.append(value)
    return list(found.values())
