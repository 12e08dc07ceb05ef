"""What gives the samples of a DataLoader one by one, whatever it was made with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, Sampler


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
