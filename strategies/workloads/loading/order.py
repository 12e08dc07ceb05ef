"""The order in which a training takes the samples of a dataset: shuffled by a seed, split over ranks, resumable.

Below it: what a DataLoader has of an order. torchdata's StatefulDataLoader does not take the place of `SampleOrder`:
its state is of as many workers as saved it (0, 1 or 4 in place of 2 raise AssertionError in torchdata 0.11), and of as
many ranks. What is needed here is one order that is split over any number of ranks and known from the number of steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.randomness import RandomNumbers

AT_ONCE = 1 << 16
"""Numbers of samples that are made Python's at a time."""


class SampleOrder(Sampler[int]):
    """The samples of one rank, an epoch each time it is gone over; each epoch has another order.

    A pass that is left before its end (a `break`) is over too: the next one is of the next epoch.

    Position k of the global order belongs to rank k % ranks. So an optimizer step has the same samples on any number of
    ranks. What a sampler of the user's own draws comes from the seed and the epoch, so that all ranks, which are seeded
    apart, share one order; the process's own random numbers stay as they are.

    It has no state_dict: a loader's workers are ahead of the training, so where an order is says nothing of what was
    trained. torchdata's StatefulDataLoader took one that it had for the place, and gave 64 samples where 52 were left.

    Args:
        samples: Of the dataset; or a sampler of the user's own, which gives their numbers.
        shuffle: Each epoch in an order of its own, drawn from the seed and the epoch; else as the dataset has them. A
            sampler has an order of its own.
        seed: Any whole number.
        rank, ranks: Which share of the samples, of how many.
        start: Samples, of all ranks together, that the training has seen: steps x global batch. The order goes on from
            there, in the epoch to which that leads.
        multiple_of: An epoch has a multiple of so many samples, over all ranks: the global batch. The rest of an epoch
            is dropped.

    Raises:
        WorkloadError: fewer samples than one global batch (of a sampler, when it is gone over), or a rank that there
            is not.
    """

    def __init__(
        self,
        samples: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        start: int = 0,
        multiple_of: int = 1,
    ) -> None:
        check_place(rank, ranks, start)
        self.samples, self.shuffle, self.rank, self.ranks = samples, shuffle, rank, ranks
        self.whole = max(multiple_of, 1) if multiple_of % ranks == 0 else multiple_of * ranks
        if isinstance(samples, int) and samples < self.whole:
            raise _too_few(f"the dataset has {samples}", self.whole, "a larger dataset")
        self.seed = seed
        try:
            per_epoch = self.per_epoch if start else 0
        except (TypeError, NotImplementedError):  # epochs are gone over one by one
            per_epoch = 0
        # The epoch of the next pass, and how many of its samples were seen; the same where the last pass began.
        self._place = divmod(start, per_epoch) if per_epoch else (0, start)
        self._begun: tuple[int, int] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next pass is of, from 0."""
        return self._place[0]

    @property
    def per_epoch(self) -> int:
        """Samples of a whole epoch, of all ranks together.

        Raises:
            TypeError, NotImplementedError: the sampler does not say how many it gives.
        """
        samples = self.samples if isinstance(self.samples, int) else len(self.samples)
        return samples - samples % self.whole

    def __len__(self) -> int:
        """Samples of this rank in the rest of the epoch."""
        return (self.per_epoch - self._place[1]) // self.ranks

    def __iter__(self) -> Iterator[int]:
        if self._begun == self._place:  # that pass was left before its end
            self._place = self.epoch + 1, 0
        order = self._rest_of_plain() if isinstance(self.samples, int) else self._rest_of_sampler()
        self._begun = self._place
        while len(step := list(itertools.islice(order, self.whole))) == self.whole:
            yield from step[self.rank :: self.ranks]
        self._place = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Tells the sampler of the user's own, where it has such a method."""
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(epoch)

    def _rest_of_plain(self) -> Iterator[int]:
        epoch, offset = self._place
        if not self.shuffle:
            return iter(range(offset, self.per_epoch))
        generator = torch.Generator().manual_seed(_epoch_seed(self.seed, epoch))
        order = torch.randperm(self.samples, generator=generator)[offset : self.per_epoch]
        return itertools.chain.from_iterable(part.tolist() for part in order.split(AT_ONCE))

    def _rest_of_sampler(self) -> Iterator[int]:
        """The rest of the epoch to which the place leads; it has a step at least."""
        while True:
            epoch, offset = self._place
            order = self._drawn()
            passed = sum(1 for _ in itertools.islice(order, offset))
            step = list(itertools.islice(order, self.whole))
            if len(step) == self.whole:
                return itertools.chain(step, order)
            samples = passed + len(step)
            if samples < self.whole:
                gives = f"the sampler {type(self.samples).__name__} gives {samples}"
                raise _too_few(gives, self.whole, "a sampler of more samples")
            over = passed == offset
            self._place = epoch + 1, 0 if over else offset - (samples - samples % self.whole)

    def _drawn(self) -> Iterator[int]:
        """The whole order of an epoch. A step at a time, so that a sampler without an end can be used."""
        numbers = RandomNumbers(_epoch_seed(self.seed, self.epoch), generators_of(self.samples))
        with numbers:
            order = iter(self.samples)
        while True:
            with numbers:
                drawn = list(itertools.islice(order, self.whole))
            if not drawn:
                return
            yield from drawn


def _too_few(who: str, whole: int, more: str) -> WorkloadError:
    return WorkloadError(
        f"{who} samples, and a step takes {whole}: no whole batch can be made",
        hint=f"Give {more}, or a smaller global batch.",
    )


def check_place(rank: int, ranks: int, start: int) -> None:
    """Raises WorkloadError for a rank that there is not, or a start below zero."""
    if not 0 <= rank < ranks:
        raise WorkloadError(f"rank {rank} of {ranks} ranks: there is no such rank", hint="Ranks count from 0.")
    if start < 0:
        raise WorkloadError(f"start is {start}", hint="It is the number of samples seen: steps x global batch.")


def _epoch_seed(seed: int, epoch: int) -> int:
    return (seed * 1_000_003 + epoch) % 2**63


# What a DataLoader has of an order.


def sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler that gives single samples; not `loader.sampler` if the loader was made with a batch sampler."""
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
    """The class that already splits a loader's samples over processes, and how many processes; None: there is none."""
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
