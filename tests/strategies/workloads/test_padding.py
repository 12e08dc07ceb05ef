"""Whether the padding of a micro-batch changes what is trained, on recurrent layers with and without packing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from autoplan.errors import WorkloadError
from autoplan.strategies.analysis.additivity import measure_additivity
from autoplan.strategies.workloads.loops.loop import read_loop
from autoplan.strategies.workloads.workload import LossSum

CPU = torch.device("cpu")


class Tagger(nn.Module):
    """Reads sequences from both ends; packed, it does not see the padding."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.gru = nn.GRU(6, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return self.head(self.gru(x)[0][:, 0])
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0][:, 0])


def collate(rows: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    return {
        "x": pad_sequence([x for x, _ in rows], batch_first=True),
        "lengths": torch.tensor([len(x) for x, _ in rows]),
        "y": torch.tensor([y for _, y in rows]),
    }


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"], batch["lengths"]), batch["y"])


def loop(packed: bool, *, lengths: tuple[int, int] = (4, 20)) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Tagger(packed)
    rows = [(torch.randn(int(torch.randint(*lengths, ())), 6), i % 3) for i in range(48)]
    return model, torch.optim.AdamW(model.parameters()), DataLoader(rows, batch_size=4, collate_fn=collate), loss


def test_a_loop_whose_padding_is_read_keeps_its_batches() -> None:
    workload = read_loop(*loop(False), global_batch=8)
    assert workload.fixed_micro_batch == 4
    assert any("stays at the DataLoader's 4: padding changes the gradient" in note for note in workload.notes)
    assert not measure_additivity(workload, workload.build_model(), CPU).additive
    with pytest.raises(WorkloadError, match="no whole number of the loop's batches of 4"):
        read_loop(*loop(False), global_batch=6)


def test_what_the_loss_alone_hardly_shows_is_seen_in_the_gradient() -> None:
    workload = read_loop(*loop(False), global_batch=8)

    def near_constant(model: nn.Module, batch: Any) -> LossSum:
        result = workload.loss(model, batch)
        return LossSum(result.total + 100.0 * len(batch["y"]), result.count)

    found = measure_additivity(dataclasses.replace(workload, loss=near_constant), workload.build_model(), CPU)
    assert sum(found.alone) == pytest.approx(found.both, rel=1e-3), "the losses add up"
    assert not found.additive and found.padding is not None and found.padding > 0.01
    assert "padding changes the gradient" in found.describe()


@pytest.mark.parametrize(("packed", "lengths"), [(True, (4, 20)), (False, (9, 10))], ids=["packed", "one length"])
def test_a_loop_whose_padding_is_not_read_is_free(packed: bool, lengths: tuple[int, int]) -> None:
    workload = read_loop(*loop(packed, lengths=lengths), global_batch=8)
    assert workload.fixed_micro_batch is None
    assert measure_additivity(workload, workload.build_model(), CPU).additive
