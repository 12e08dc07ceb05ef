"""The order in which a training takes the samples of a dataset: shuffled by a seed, split over ranks, resumable.

`SampleOrder` is a plain order, `OwnOrder` that of a sampler of the user's own, `StreamFrom` that of a stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.loading.samplers import generators_of
from autoplan.strategies.workloads.randomness import RandomNumbers


class SampleOrder(Sampler[int]):
    """The samples of one rank, an epoch each time it is gone over; each epoch has another order.

    A pass that is left before its end (a `break`) is over too: the next one is of the next epoch.

    Position k of the global order belongs to rank k % ranks. So an optimizer step has the same samples on any number of
    ranks.

    Args:
        samples: Of the dataset.
        shuffle: Each epoch in an order of its own, drawn from the seed and the epoch; else as the dataset has them.
        seed: Any whole number.
        rank, ranks: Which share of the samples, of how many.
        start: Samples, of all ranks together, that the training has seen: steps x global batch. The order goes on from
            there, in the epoch to which that leads.
        multiple_of: An epoch has a multiple of so many samples, over all ranks: the global batch. The rest of an epoch
            is dropped.

    Raises:
        WorkloadError: fewer samples than one global batch, or a rank that there is not.
    """

    def __init__(
        self,
        samples: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        start: int = 0,
        multiple_of: int = 1,
    ) -> None:
        _check_place(rank, ranks, start)
        whole = max(multiple_of, 1) if multiple_of % ranks == 0 else multiple_of * ranks
        self.per_epoch = samples - samples % whole
        if self.per_epoch < whole:
            raise WorkloadError(
                f"the dataset has {samples} samples, and a step takes {whole}: no whole batch can be made",
                hint="Give a larger dataset, or a smaller global batch.",
            )
        self.samples, self.shuffle, self.seed = samples, shuffle, seed
        self.rank, self.ranks, self.start = rank, ranks, start
        self._begun: int | None = None  # where the last pass began

    @property
    def epoch(self) -> int:
        """The epoch that the next pass is of, from 0."""
        return self.start // self.per_epoch

    def __len__(self) -> int:
        """Samples of this rank in the rest of the epoch."""
        return (self.per_epoch - self.start % self.per_epoch) // self.ranks

    def __iter__(self) -> Iterator[int]:
        if self._begun == self.start:  # that pass was left before its end
            self.start = (self.epoch + 1) * self.per_epoch
        self._begun = self.start
        epoch, offset = divmod(self.start, self.per_epoch)
        if self.shuffle:
            generator = torch.Generator().manual_seed(_epoch_seed(self.seed, epoch))
            order = torch.randperm(self.samples, generator=generator)[offset + self.rank : self.per_epoch : self.ranks]
            yield from order.tolist()
        else:
            yield from range(offset + self.rank, self.per_epoch, self.ranks)
        self.start = (epoch + 1) * self.per_epoch

    def state_dict(self) -> dict[str, int]:
        """Where the order is: the seed, and the samples of whole epochs before this one or before `start`.

        A loader's workers are ahead of the training, so the position within an epoch is the training's own to know: set
        `start` to steps x global batch.
        """
        return {"seed": self.seed, "start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from a state: its `start` may have been set to steps x global batch."""
        self.seed, self.start, self._begun = int(state["seed"]), int(state["start"]), None


class OwnOrder(Sampler[int]):
    """The samples of one rank in the order of a sampler of the user's own, an epoch each time it is gone over.

    A pass that is left before its end is over too.

    Position k of the order belongs to rank k % ranks. What the sampler draws comes from the seed and the epoch, so that
    all ranks, which are seeded apart, share one order. The process's own random numbers stay as they are.

    Args:
        sampler: Gives the numbers of samples.
        seed: Any whole number.
        rank, ranks: Which share of the samples, of how many.
        start: See SampleOrder.
        multiple_of: Samples of a step, over all ranks. The rest of an epoch is dropped.

    Attributes:
        epoch: The epoch that the next pass is of, from 0.

    Raises:
        WorkloadError: there is no such rank, or, when it is gone over, the sampler gives less than one step takes.
    """

    def __init__(
        self, sampler: Any, *, seed: int = 0, rank: int = 0, ranks: int = 1, start: int = 0, multiple_of: int = 1
    ) -> None:
        _check_place(rank, ranks, start)
        self.sampler, self.seed, self.rank, self.ranks = sampler, seed, rank, ranks
        self.whole = max(multiple_of, 1) if multiple_of % ranks == 0 else multiple_of * ranks
        self.epoch, self._offset = 0, start
        self._begun: tuple[int, int] | None = None  # where the last pass began
        if start:
            try:
                per_epoch = len(self)
            except (TypeError, NotImplementedError):  # it has no length: epochs are gone over one by one
                per_epoch = 0
            if per_epoch:
                self.epoch, self._offset = divmod(start, per_epoch * ranks)

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        samples = len(self.sampler)
        return int(samples - samples % self.whole) // self.ranks

    def __iter__(self) -> Iterator[int]:
        if self._begun == (self.epoch, self._offset):  # that pass was left before its end
            self.epoch, self._offset = self.epoch + 1, 0
        order = self._after_start()
        self._begun = self.epoch, self._offset
        while len(step := list(itertools.islice(order, self.whole))) == self.whole:
            yield from step[self.rank :: self.ranks]
        self.epoch, self._offset = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Tells the sampler, where it has such a method."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _after_start(self) -> Iterator[int]:
        """The rest of the epoch to which the start leads; it has a step at least."""
        while True:
            order = self._drawn()
            passed = sum(1 for _ in itertools.islice(order, self._offset))
            step = list(itertools.islice(order, self.whole))
            if len(step) == self.whole:
                return itertools.chain(step, order)
            samples = passed + len(step)
            if samples < self.whole:
                raise WorkloadError(
                    f"the sampler {type(self.sampler).__name__} gives {samples} samples, and a step takes "
                    f"{self.whole}: no whole batch can be made",
                    hint="Give a sampler of more samples, or a smaller global batch.",
                )
            over = passed == self._offset
            self.epoch, self._offset = self.epoch + 1, 0 if over else self._offset - (samples - samples % self.whole)

    def _drawn(self) -> Iterator[int]:
        """The whole order of an epoch. A step at a time, so that a sampler without an end can be used."""
        numbers = RandomNumbers(_epoch_seed(self.seed, self.epoch), generators_of(self.sampler))
        with numbers:
            order = iter(self.sampler)
        while True:
            with numbers:
                drawn = list(itertools.islice(order, self.whole))
            if not drawn:
                return
            yield from drawn


class StreamFrom(IterableDataset[Any]):
    """A stream without the batches that a training has seen. The next pass has all of it.

    Batches come from the workers in turn, and a worker leaves out those that it gave itself. So each sample is seen
    once with the same number of workers and, after a first pass, where they have equally many batches. The turns begin
    with the first worker again.

    Args:
        stream: The dataset, the same for reading and setting attributes (a worker_init_fn does that).
        start: Samples, of all ranks together, that the training has seen.
        batch_size: Samples of a batch of a rank.
        ranks: How many there are.
    """

    def __init__(self, stream: Any, *, start: int, batch_size: int, ranks: int = 1) -> None:
        _check_place(0, ranks, start)
        vars(self).update(_stream=stream, _batches=start // (batch_size * ranks), _batch_size=batch_size)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        size = self._batch_size
        left = (self._batches + workers - 1 - worker) // workers * size
        vars(self)["_batches"] = 0
        samples, first = iter(self._stream), []
        while left:
            passed = sum(1 for _ in itertools.islice(samples, left))
            left -= passed - passed % size  # the last, smaller batch of a pass is dropped
            first = list(itertools.islice(samples, size))
            if len(first) == size:
                break
            samples, first = iter(self._stream), []
            if passed < size:
                break
        yield from first
        yield from samples

    def __len__(self) -> int:
        return len(self._stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_stream" not in vars(self):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._stream, name, value)


def _check_place(rank: int, ranks: int, start: int) -> None:
    if not 0 <= rank < ranks:
        raise WorkloadError(f"rank {rank} of {ranks} ranks: there is no such rank", hint="Ranks count from 0.")
    if start < 0:
        raise WorkloadError(f"start is {start}", hint="It is the number of samples seen: steps x global batch.")


def _epoch_seed(seed: int, epoch: int) -> int:
    return (seed * 1_000_003 + epoch) % 2**63
