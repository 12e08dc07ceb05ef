"""The order in which a training takes the samples of a dataset: shuffled by a seed, split over ranks, resumable."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from autoplan.errors import WorkloadError


class SampleOrder(Sampler[int]):
    """The samples of one rank, an epoch each time it is gone over; each epoch has another order.

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
        if not 0 <= rank < ranks:
            raise WorkloadError(f"rank {rank} of {ranks} ranks: there is no such rank", hint="Ranks count from 0.")
        if start < 0:
            raise WorkloadError(f"start is {start}", hint="It is the number of samples seen: steps x global batch.")
        whole = max(multiple_of, 1) if multiple_of % ranks == 0 else multiple_of * ranks
        self.per_epoch = samples - samples % whole
        if self.per_epoch < whole:
            raise WorkloadError(
                f"the dataset has {samples} samples, and a step takes {whole}: no whole batch can be made",
                hint="Give a larger dataset, or a smaller global batch.",
            )
        self.samples, self.shuffle, self.seed = samples, shuffle, seed
        self.rank, self.ranks, self.start = rank, ranks, start

    @property
    def epoch(self) -> int:
        """The epoch that the next pass is of, from 0."""
        return self.start // self.per_epoch

    def __len__(self) -> int:
        """Samples of this rank in the rest of the epoch."""
        return (self.per_epoch - self.start % self.per_epoch) // self.ranks

    def __iter__(self) -> Iterator[int]:
        epoch, offset = divmod(self.start, self.per_epoch)
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
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
        self.seed, self.start = int(state["seed"]), int(state["start"])
