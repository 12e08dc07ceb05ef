"""The workload of the soak (benchmarks/soak.py): tiny, with a loader process, so that each rank has a child to kill."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autoplan.strategies.workloads.workload import LossSum, Workload

GLOBAL_BATCH = 8


class Rows(Dataset[torch.Tensor]):
    """Random rows, by index."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(16, generator=torch.Generator().manual_seed(index))


class Loader:
    """Makes batches with one loader process, started in the rank that asks for the first batch."""

    def __init__(self) -> None:
        self._rows: Iterator[torch.Tensor] | None = None

    def __call__(self, count: int, index: int) -> dict[str, torch.Tensor]:
        if self._rows is None:
            self._rows = iter(DataLoader(Rows(), batch_size=None, num_workers=1, prefetch_factor=2))
        try:
            next(self._rows)
        except BaseException:  # the loader process was killed: the next batch starts another
            self._rows = None
            raise
        return {"x": torch.rand(count, 16, generator=torch.Generator().manual_seed(index))}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
    """The summed squares of the outputs."""
    return LossSum(model(batch["x"]).square().sum(), len(batch["x"]))


def workload() -> Workload:
    """A linear layer on rows of 16."""
    return Workload(
        name="soak",
        build_model=lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        make_batch=Loader(),
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        global_batch=GLOBAL_BATCH,
    )
