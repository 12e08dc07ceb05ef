"""What throughput counts, and how the size of batches is seen."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.planner.trials.load import LoadMonitor
from autoplan.strategies.workloads.counting import count_items, find_counted, look_at_sizes
from autoplan.strategies.workloads.samples import batches_from_dataset
from autoplan.strategies.workloads.workload import Workload
from tests.strategies.tiny import BERT, T5, classifier, language


def counted_in(workload: Workload, batch: Any = None) -> tuple[str, int]:
    with torch.device("meta"):
        model = workload.build_model()
    batch = workload.make_batch(2, 0) if batch is None else batch
    found = find_counted(workload, batch, model)
    return found.unit, count_items(workload, found, batch)


def ids(*lengths: int, width: int | None = None) -> dict[str, torch.Tensor]:
    """Padded on the right, with the mask."""
    width = max(lengths) if width is None else width
    mask = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    return {"input_ids": mask * 7, "attention_mask": mask}


def test_an_encoder_decoder_counts_source_and_target() -> None:
    workload = language(T5, length=32)
    width = workload.make_batch(2, 0)["labels"].shape[1]
    assert counted_in(workload) == ("tokens", 2 * (32 + width))
    labels = torch.tensor([[5, 6, 7], [5, -100, -100]])
    assert counted_in(workload, ids(9, 4) | {"labels": labels}) == ("tokens", 13 + 4)
    decoder = {
        "decoder_input_ids": torch.ones(2, 3).long(),
        "decoder_attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    assert counted_in(workload, ids(9, 4) | {"labels": labels} | decoder) == ("tokens", 13 + 5)


def test_padding_does_not_count_and_packed_sequences_are_whole() -> None:
    workload = language(BERT, length=32)
    batch = ids(32, 5, 1, width=32)
    assert counted_in(workload, batch | {"labels": batch["input_ids"]}) == ("tokens", 38), "labels are no input of BERT"
    packed = {"input_ids": torch.ones(1, 64).long(), "position_ids": torch.arange(64)[None] % 16}
    assert counted_in(workload, packed) == ("tokens", 64)
    documents = {"input_ids": torch.ones(1, 6).long(), "attention_mask": torch.tensor([[1, 1, 2, 2, 3, 0]])}
    assert counted_in(workload, documents) == ("tokens", 5)
    blocks = {"input_ids": torch.ones(1, 6).long(), "attention_mask": torch.ones(1, 1, 6, 6).tril()}
    assert counted_in(workload, blocks) == ("tokens", 6), "a mask of who sees whom is no padding mask"


def test_images_are_samples_and_a_function_of_the_user_wins() -> None:
    assert counted_in(classifier()) == ("samples", 2)
    assert counted_in(classifier(tokens=lambda batch: batch["image"].shape[0] * 64)) == ("tokens", 128)
    pairs = ids(3, 4) | {"pixel_values": torch.zeros(2, 3, 4, 4)}
    assert counted_in(classifier(), pairs) == ("samples", 2)
    assert counted_in(classifier(), ids(3, 4)) == ("tokens", 7), "text, though no sequence length is said"


def test_a_batch_without_names_counts_what_it_has() -> None:
    workload = dataclasses.replace(language(), sequence_length=400)
    assert counted_in(workload, (torch.ones(2, 13).long(), torch.ones(2).long())) == ("tokens", 26)
    assert counted_in(workload, torch.rand(2, 400)) == ("tokens", 800)


def ragged(lengths: list[int], global_batch: int = 2) -> Workload:
    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return ids(*(len(sample) for sample in samples))

    texts = [torch.ones(length).long() for length in lengths]
    workload = language(length=400, global_batch=global_batch)
    return dataclasses.replace(workload, make_batch=batches_from_dataset(texts, collate))


def test_the_sizes_of_a_ragged_dataset() -> None:
    lengths = [4, 8, 6, 6, 90, 80, 5, 400, 7, 7]
    workload = ragged(lengths)
    counted = find_counted(workload, workload.make_batch(2, 0), None)
    sizes = look_at_sizes(workload, counted)
    assert sizes is not None and sizes.vary and sizes.largest == 0, "batch 0 of a dataset has its largest samples"
    assert (sizes.positions.min, sizes.positions.max) == (12, 800) and sizes.items.max == 490
    assert workload.make_batch(2, 1)["input_ids"].shape == (2, 6), "the others are in the dataset's order"
    text = sizes.describe(counted)
    assert "6 to 400 tokens a sample" in text and "64 batches of 2 samples" in text


def test_batches_of_one_size_and_a_dataset_that_ends() -> None:
    counted = find_counted(classifier(), classifier().make_batch(2, 0), None)
    sizes = look_at_sizes(classifier(), counted)
    assert sizes is not None and not sizes.vary and sizes.items.mean == 8

    def ends(count: int, index: int) -> Any:
        if index == 3:
            raise StopIteration
        return classifier().make_batch(count, index)

    short = look_at_sizes(dataclasses.replace(classifier(), make_batch=ends), counted)
    assert short is not None and short.batches == 3
    assert look_at_sizes(dataclasses.replace(classifier(), make_batch=lambda count, index: 1 / 0), counted) is None


class Reader(nn.Module):
    """Takes as much memory as its batch is long."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def mostly_short(count: int, index: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.full((count, 4000 if index == 5 else 10), 3)}


def summed(model: nn.Module, batch: Any) -> Any:
    from autoplan import LossSum

    found = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten(), reduction="sum")
    return LossSum(found, batch["tokens"].numel())


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_trial_runs_the_largest_batch_and_times_typical_ones(micro_batch: int) -> None:
    """The real steps of a trial, in this process: what each micro-step ran on."""
    from autoplan.planner.trials.ranks import RankSync
    from autoplan.planner.trials.request import TrialRequest
    from autoplan.planner.trials.step_timer import StepTimer
    from autoplan.strategies.config import TrainingConfig
    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.sources import make_spec

    workload = Workload(
        name="mostly short",
        build_model=Reader,
        make_batch=mostly_short,
        loss=summed,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
        sequence_length=4000,
    )
    counted = find_counted(workload, workload.make_batch(2, 0), None)
    spec = make_spec(model="gpt2", global_batch=8).model_copy(
        update={"counted": counted, "batch_sizes": look_at_sizes(workload, counted)}
    )
    config = TrainingConfig(micro_batch=micro_batch)

    class Silent:
        def phase(self, name: str) -> None: ...

        def heartbeat(self, **facts: float) -> None: ...

        def sample(self) -> None: ...

    silent: Any = Silent()
    timer = StepTimer(
        context=silent,
        request=TrialRequest(spec=spec, config=config, device="cpu"),
        run=prepare(workload, config),
        ranks=RankSync(1, torch.device("cpu")),
        load=LoadMonitor(device=torch.device("cpu"), root_pid=os.getpid()),
    )
    widths: list[int] = []
    real = timer.run.micro_step

    def noted(micro: Any, *arguments: Any, **options: Any) -> Any:
        widths.append(micro["tokens"].shape[1])
        return real(micro, *arguments, **options)

    timer.run.micro_step = noted  # type: ignore[method-assign]
    timer.short_steps()
    micro_steps = min(8 // micro_batch, 3)
    assert widths == [10] * micro_steps + [4000] * micro_steps + [10] * micro_steps
    assert timer.batches.items_per_step(timer.ranks) == 8 * 10, "before: 8 x 4000"
