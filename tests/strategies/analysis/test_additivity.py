"""Whether the loss of a batch is the sum of its samples' losses, and short batches that keep their labels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.strategies.analysis.additivity import check_additivity, shorten
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, Workload

CPU = torch.device("cpu")


def labelled(*places: tuple[int, ...], length: int = 12) -> dict[str, torch.Tensor]:
    """A batch with labels at the given places of each sample alone."""
    ids = torch.arange(len(places) * length).view(len(places), length)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, chosen in enumerate(places):
        labels[row, list(chosen)] = 1
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("places", "start", "size"),
    [
        (((1, 2), (3,)), 0, 4),
        (((9,), (11,)), 8, 4),  # an answer at the end, or padding on the left
        (((1,), (11,)), 0, 12),  # neither will do
        (((1,), ()), 0, 4),  # a sample that has none keeps none
        (((0,), (1,)), 0, 4),  # nothing is predicted for the first
    ],
)
def test_short_batches_keep_a_label_of_each_sample(places, start, size):
    batch = labelled(*places)
    short = shorten(batch, 4)
    assert torch.equal(short["input_ids"], batch["input_ids"][:, start : start + size])
    assert short["input_ids"].is_contiguous()


def workload(loss, dtype=torch.float32) -> Workload:
    def make_batch(samples: int, index: int) -> dict[str, torch.Tensor]:
        rows = torch.randn(samples, 8, generator=torch.Generator().manual_seed(index))
        return {"rows": rows.to(dtype), "labels": torch.arange(samples) % 4}

    return Workload(
        name="rows",
        build_model=lambda: nn.Linear(8, 4).to(dtype),
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
    )


def mean_times_count(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
    count = (batch["labels"] != IGNORE_INDEX).sum()
    return LossSum(F.cross_entropy(model(batch["rows"]), batch["labels"]) * count, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_times_its_count_adds_up(dtype):
    given = workload(mean_times_count, dtype)
    assert check_additivity(given, given.build_model(), CPU) == (True, True)


def test_a_sample_without_labels_adds_nothing():
    given = workload(mean_times_count)
    whole = given.make_batch
    given.make_batch = lambda samples, index: (
        whole(samples, index) | {"labels": torch.tensor([1] + [IGNORE_INDEX] * (samples - 1))}
    )
    assert check_additivity(given, given.build_model(), CPU) == (True, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_does_not(dtype):
    given = workload(lambda model, batch: LossSum(mean_times_count(model, batch).total / len(batch["rows"]), 1), dtype)
    assert check_additivity(given, given.build_model(), CPU) == (False, True)
