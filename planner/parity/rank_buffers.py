"""The buffers of each data-parallel rank, in the one process of the reference.

A rank keeps the running statistics of its own micro-batches. The reference runs the micro-batches of all ranks one
after another, each rank's with that rank's buffers in place.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


class RankBuffers:
    """One set of buffers per data-parallel rank.

    Args:
        model: Whose buffers they are.
        ranks: Data-parallel ranks.
        accumulation: Micro-batches of a step on one of them; the first ones are rank 0's.
    """

    def __init__(self, model: nn.Module, ranks: int, accumulation: int) -> None:
        self._buffers = list(model.buffers())
        self._kept = [[buffer.detach().clone() for buffer in self._buffers] for _ in range(ranks)]
        self._accumulation = accumulation
        self._rank = 0

    def before(self, micro_batch: int) -> None:
        """Puts the buffers in place that see this micro-batch, counted within the step."""
        self._switch(micro_batch // self._accumulation)

    def each(self) -> Iterator[int]:
        """Each rank, with its buffers in place; rank 0's are there afterwards."""
        for rank in range(len(self._kept)):
            self._switch(rank)
            yield rank
        self._switch(0)

    def _switch(self, rank: int) -> None:
        if rank == self._rank:
            return
        with torch.no_grad():
            for buffer, kept, wanted in zip(self._buffers, self._kept[self._rank], self._kept[rank], strict=True):
                kept.copy_(buffer)
                buffer.copy_(wanted)
        self._rank = rank
