"""Loops as strangers write them are read so that a TrainingRun trains what they train."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from autoplan.errors import WorkloadError
from autoplan.strategies.analysis.training_facts import read_schedule
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.workloads.batch import batch_size, split_batch
from autoplan.strategies.workloads.loops.loader import resized
from autoplan.strategies.workloads.loops.loop import read_loop
from autoplan.strategies.workloads.loops.mean_loss import CountLabels, MeanLoss
from autoplan.strategies.workloads.optimizers import trainable
from autoplan.strategies.workloads.workload import LossSum
from tests.strategies.loops import (
    Points,
    Regressor,
    Sentences,
    groups,
    loader_of,
    pad,
    parameters_of,
    tiny_gpt2,
    worst_difference,
)

STEPS = 4
CLIP = 0.05
FP32 = 2e-5


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def run_plan(workload: Any, micro_batch: int, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Some steps of a TrainingRun, on the workload's own batches: parameters and losses."""
    run = prepare(workload, TrainingConfig(micro_batch=micro_batch))
    size = workload.global_batch
    order = [0, *range(2, steps + 1)] if workload.make_batch.largest else range(steps)  # batch 1 is the largest
    results = [run.step(workload.make_batch(size, index)) for index in order]
    assert all(float(result.grad_norm) > CLIP for result in results if result.grad_norm is not None)
    return parameters_of(run.model), [float(result.loss) for result in results]


def accelerate_loop(model: nn.Module, loss: Any, loader: DataLoader[Any], accumulation: int) -> Any:
    """A stranger's loop: accelerator.accumulate, clipping, a schedule. Gives the parts, its parameters and losses."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
    schedule = warm_up(optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    return accelerator, model, optimizer, loader, schedule


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any, loss: Any) -> list[float]:
    losses: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            value = loss(model, batch)
            accelerator.backward(value)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                assert float(norm) > CLIP
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(value.detach()))
        if len(losses) == STEPS * accelerator.gradient_accumulation_steps:
            break
    return losses


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_an_accelerate_loop_with_accumulation_trains_the_same() -> None:
    torch.manual_seed(0)
    accumulation = 2
    parts = accelerate_loop(Regressor(), cross_entropy, loader_of(Points(), 8), accumulation)
    accelerator, model, optimizer, loader, schedule = parts
    workload = read_loop(model, optimizer, loader, cross_entropy, schedule=schedule, max_grad_norm=CLIP)
    assert workload.global_batch == 16
    assert any("8 x 2 of accumulation" in note for note in workload.notes)
    built = workload.build_optimizer(workload.build_model().parameters())
    assert [group["lr"] for group in built.param_groups] == [3e-3, 3e-3], "before the schedule"
    workload.build_schedule(built)
    assert [group["lr"] for group in built.param_groups] == [group["lr"] for group in optimizer.param_groups]
    got = {micro: run_plan(workload, micro) for micro in (16, 8, 4)}
    losses = train(accelerator, model, optimizer, loader, schedule, cross_entropy)
    wanted = parameters_of(accelerator.unwrap_model(model))
    for micro, (parameters, own) in got.items():
        assert worst_difference(parameters, wanted) < FP32, micro
        assert own == pytest.approx([(losses[i] + losses[i + 1]) / 2 for i in range(0, len(losses), 2)], rel=1e-5)


def test_a_mean_over_tokens_of_padded_batches_is_found_and_trains_the_same() -> None:
    model = tiny_gpt2()
    parts = accelerate_loop(model, None, loader_of(Sentences(), 8, collate_fn=pad), 1)
    accelerator, prepared, optimizer, loader, schedule = parts
    workload = read_loop(prepared, optimizer, loader, schedule=schedule, max_grad_norm=CLIP)
    assert workload.global_batch == 8
    assert workload.head is not None, "the model's own loss is the causal one"
    assert any("labels that are not -100, without the first" in note for note in workload.notes)
    got = {micro: run_plan(workload, micro)[0] for micro in (8, 2)}
    train(accelerator, prepared, optimizer, loader, schedule, lambda net, batch: net(**batch).loss)
    wanted = parameters_of(accelerator.unwrap_model(prepared))
    for micro, parameters in got.items():
        assert worst_difference(parameters, wanted) < 5e-4, micro  # Adam's first steps are nearly signs


def test_a_micro_batch_without_a_label_adds_nothing() -> None:
    """Its mean is NaN, which a batch of many samples never had."""
    head = nn.Linear(4, 3)
    count = CountLabels(path=("labels",), shifted=False, ignored=-100, name="labels")
    loss = MeanLoss(lambda net, batch: F.cross_entropy(net(batch["x"]), batch["labels"]), count)
    total, counted = loss(head, {"x": torch.ones(2, 4), "labels": torch.full((2,), -100)})
    total.backward()
    assert (total.item(), int(counted)) == (0.0, 0)
    assert head.weight.grad is not None and not head.weight.grad.any()


def test_a_mean_over_class_weights_is_refused_whatever_the_first_samples_are() -> None:
    """The first samples are of one class, of which the weights cancel."""

    class OneClass(Points):
        def __getitem__(self, index: int) -> Any:
            return torch.full((1,), float(index)), torch.tensor(0)

    model = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read_loop(model, optimizer, DataLoader(OneClass(), batch_size=8), nn.CrossEntropyLoss())
    with pytest.raises(WorkloadError, match="over the weights of the classes in a batch"):
        read_loop(model, optimizer, DataLoader(OneClass(), batch_size=8), nn.CrossEntropyLoss(torch.tensor([1.0, 50])))


def test_batches_of_equal_weight_are_what_accumulation_of_means_trains() -> None:
    """accelerator.backward divides by the accumulation, so batches with few tokens weigh as much as others."""
    own = lambda net, batch: net(**batch).loss  # noqa: E731
    accelerator, model, optimizer, loader, schedule = accelerate_loop(
        tiny_gpt2(), None, loader_of(Sentences(), 4, collate_fn=pad), 2
    )
    tokens = read_loop(model, optimizer, loader, own, schedule=schedule, max_grad_norm=CLIP)
    assert any('loss_mean="batches"' in note for note in tokens.notes)
    exact = read_loop(model, optimizer, loader, own, schedule=schedule, max_grad_norm=CLIP, loss_mean="batches")
    assert exact.fixed_micro_batch == 4
    got = run_plan(exact, 4)[0]
    other = run_plan(tokens, 4)[0]
    train(accelerator, model, optimizer, loader, schedule, own)
    wanted = parameters_of(accelerator.unwrap_model(model))
    assert worst_difference(got, wanted) < 5e-4
    assert worst_difference(other, wanted) > 10 * worst_difference(got, wanted)


@pytest.mark.parametrize(("resting", "fixed"), [("all", 8), ("the norm", None)])
def test_batch_norm_in_a_model_that_comes_in_evaluation_mode_trains(resting: str, fixed: int | None) -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    (model if resting == "all" else model[1]).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert read_loop(model, optimizer, loader_of(Points(), 8), cross_entropy).fixed_micro_batch == fixed


def test_batch_norm_keeps_the_loops_own_batches() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    parts = accelerate_loop(model, None, loader_of(Points(), 8), 2)
    accelerator, prepared, optimizer, loader, schedule = parts
    workload = read_loop(prepared, optimizer, loader, cross_entropy, schedule=schedule, max_grad_norm=CLIP)
    assert workload.global_batch == 16 and workload.fixed_micro_batch == 8
    run = prepare(workload, TrainingConfig(micro_batch=8))
    for index in range(STEPS):
        run.step(workload.make_batch(16, index))
    train(*parts[:2], optimizer, loader, schedule, cross_entropy)
    own = accelerator.unwrap_model(prepared)
    assert worst_difference(parameters_of(run.model), parameters_of(own)) < FP32
    buffers = [dict(net.named_buffers()) for net in (run.model, own)]
    assert all(torch.allclose(buffers[0][name].float(), value.float()) for name, value in buffers[1].items())
    assert int(buffers[1]["1.num_batches_tracked"]) == 2 * STEPS


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_of_an_applied_loader_are_padded_by_themselves(workers: int) -> None:
    """As the search ran them: sliced from the whole batch they would carry the padding of its longest sample."""
    loader = DataLoader(Sentences(), batch_size=8, collate_fn=pad, num_workers=workers)
    own = Sentences()
    for number, batch in enumerate(resized(loader, 8, micro_batch=2)):
        samples = [own[index] for index in range(8 * number, 8 * number + 8)]
        whole = pad(samples)
        assert batch_size(batch) == 8 and all(torch.equal(batch[name], whole[name]) for name in whole)
        for at, part in zip(range(0, 8, 2), split_batch(batch, 2), strict=True):
            wanted = pad(samples[at : at + 2])
            assert set(part) == set(wanted) and all(torch.equal(part[name], wanted[name]) for name in wanted)
        assert [len(part["labels"]) for part in split_batch(batch, 4)] == [4, 4]


def test_the_order_is_that_of_the_loaders_own_sampler() -> None:
    class Numbers(Points):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor([float(index)]), torch.tensor(0)

    def numbers(loader: DataLoader[Any]) -> list[int]:
        return [int(x) for batch in loader for x in batch[0]]

    model = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loader in (
        loader_of(Numbers(), 8),
        DataLoader(Numbers(), batch_size=8),
        DataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(96)), 8, drop_last=False)),
    ):
        workload = read_loop(model, optimizer, loader, cross_entropy)
        got = [int(x) for index in range(12) for x in workload.make_batch(8, index)[0]]
        again = [int(x) for index in range(6) for x in workload.make_batch(16, index)[0]]
        larger = resized(loader, 16)
        state = None if loader.generator is None else loader.generator.get_state()
        assert got == again == numbers(loader)
        if state is not None:
            loader.generator.set_state(state)
        assert numbers(larger) == got
    torch.manual_seed(3)  # a sampler without a generator: the order of a loop that sets the seed before it begins
    shuffled = DataLoader(Numbers(), batch_size=8, shuffle=True)
    workload = read_loop(model, optimizer, shuffled, cross_entropy, seed=3)
    got = [int(x) for index in range(12) for x in workload.make_batch(8, index)[0]]
    torch.manual_seed(3)
    assert numbers(shuffled) == got


def per_epoch(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)


def test_a_schedule_that_is_stepped_once_an_epoch_trains_the_same() -> None:
    model = Regressor()
    wanted = copy.deepcopy(model)
    loader = DataLoader(Points(16), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = per_epoch(optimizer)
    loss = nn.CrossEntropyLoss()
    workload = read_loop(model, optimizer, loader, loss, schedule=schedule, schedule_interval="epoch")
    assert "the schedule is stepped once an epoch, after each 2 optimizer steps" in workload.notes
    by_step = read_loop(model, optimizer, loader, loss, schedule=schedule)
    note = "the schedule is stepped at each optimizer step, 2 an epoch, so its rate goes from 0.5 to 0.005 in an epoch"
    assert any(said.startswith(note) for said in by_step.notes)
    assert optimizer.param_groups[0]["lr"] == 0.5 and schedule.last_epoch == 0, "the loop's own are left as they are"
    got, _ = run_plan(workload, 4)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.5)
    schedule = per_epoch(optimizer)
    for _ in range(STEPS // 2):
        for x, y in loader:
            optimizer.zero_grad()
            loss(wanted(x), y).backward()
            optimizer.step()
        schedule.step()
    assert worst_difference(got, parameters_of(wanted)) < FP32
    assert worst_difference(run_plan(by_step, 4)[0], parameters_of(wanted)) > 1e-3


def test_a_schedule_that_ends_within_an_epoch_is_said_without_rates() -> None:
    model = Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=3)
    loader = DataLoader(Points(64), batch_size=8)
    notes = read_loop(model, optimizer, loader, nn.CrossEntropyLoss(), schedule=schedule).notes
    assert any(said.startswith("the schedule is stepped at each optimizer step, 8 an epoch. ") for said in notes)


@pytest.mark.parametrize("as_function", [False, True])
def test_a_learning_rate_that_is_a_tensor_stays_the_loops_own(as_function: bool) -> None:
    """The note on the schedule steps one, and torch writes into the tensor of a rate."""
    model, rate = Regressor(), torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    schedule = per_epoch if as_function else per_epoch(optimizer)
    loader = DataLoader(Points(16), batch_size=8)
    notes = read_loop(model, optimizer, loader, nn.CrossEntropyLoss(), schedule=schedule).notes
    assert any("its rate goes from 0.5 to 0.005" in said for said in notes)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule_interval": "epoch"}, "and no schedule"),
        ({"schedule_interval": "month"}, "interval is 'month"),
    ],
)
def test_an_interval_without_a_schedule_or_of_another_name_is_refused(settings: dict[str, Any], words: str) -> None:
    model = Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(WorkloadError, match=words):
        read_loop(model, optimizer, DataLoader(Points(16), batch_size=8), nn.CrossEntropyLoss(), **settings)


def test_what_a_mean_is_over_is_measured() -> None:
    points, model = Points(), Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def read(loss: Any, **options: Any) -> Any:
        return read_loop(model, optimizer, loader_of(points, 8), loss, **options)

    for loss in (nn.CrossEntropyLoss(), F.cross_entropy):
        assert float(read(loss).loss(model, points[:4]).count) == 4
    own = read(lambda net, batch: LossSum(F.cross_entropy(net(batch[0]), batch[1], reduction="sum"), len(batch[1])))
    assert own.count is None
    summed = read(lambda net, batch: F.cross_entropy(net(batch[0]), batch[1], reduction="sum"))
    parts = [summed.loss(model, points[start : start + 4]) for start in (0, 4)]
    whole = F.cross_entropy(model(points[:8][0]), points[:8][1], reduction="sum")
    assert float(sum(part.total for part in parts)) / sum(part.count for part in parts) == pytest.approx(float(whole))
    assert any("a sum over samples" in note for note in summed.notes)
    for options in ({"accelerator": SimpleNamespace(gradient_accumulation_steps=2)}, {"global_batch": 16}):
        with pytest.raises(WorkloadError, match="sum over samples, and .* divide") as caught:  # the loop's own number
            read(summed.loss.summed, **options)
        assert "Return the mean" in str(caught.value.hint)
        assert read(summed.loss.summed, loss_mean="batches", **options).fixed_micro_batch == 8
    with pytest.raises(WorkloadError, match="depends on the micro-batch"):
        read(lambda net, batch: net(batch[0]).std())
    with pytest.raises(WorkloadError, match="another one with each random seed"):
        read(lambda net, batch: cross_entropy(net, batch) * torch.rand(()))
    noisy = read(lambda net, batch: cross_entropy(net, batch) * torch.rand(()), loss_mean="samples")
    assert float(noisy.loss(model, points[:4]).count) == 4 and noisy.fixed_micro_batch is None
    drawn = read(lambda net, batch: summed.loss.summed(net, batch) * (0.9 + torch.rand(()) / 5), loss_mean="samples")
    assert type(drawn.loss) is type(summed.loss), "a VAE's: a sum stays one"
    with pytest.raises(WorkloadError, match="tensor of shape"):
        read(lambda net, batch: net(batch[0]))
    with pytest.raises(WorkloadError, match=r"ZeroDivisionError.*\n.*loss\(model, batch\)"):
        read(lambda net, batch: 1 / 0)
    fixed = read(lambda net, batch: net(batch[0]).std(), loss_mean="batches")
    assert fixed.fixed_micro_batch == 8
    before = copy.deepcopy(model.state_dict())
    assert model.training and all(bool((before[name] == value).all()) for name, value in model.state_dict().items())


@pytest.mark.parametrize("ignored", [0, 255])
def test_labels_that_a_loss_ignores_by_another_index_are_not_counted(ignored: int) -> None:
    labels = torch.randint(1, 5, (16, 8), generator=torch.Generator().manual_seed(0))
    for row in range(16):
        labels[row, 2 + row % 6 :] = ignored
    samples = [{"rows": torch.randn(8, 12), "labels": row} for row in labels]
    model = nn.Linear(12, 6)

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(net(batch["rows"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=ignored)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read = read_loop(model, optimizer, DataLoader(samples, batch_size=8), loss)
    batch = read.make_batch(4, 0)
    assert read.count is not None and read.count(batch) == int((batch["labels"] != ignored).sum()) < 32


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.randn(12), 0)] * 8)


class Uneven:
    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3, 4], [5], [6, 7, 8, 9]])

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        (DataLoader(Stream(), batch_size=4), {}, "streams"),
        (DataLoader(Points(), batch_size=None), {}, "batch_size=None"),
        (DataLoader(Points(10), batch_size=4), {"global_batch": 32}, "10 samples.*global batch takes 32"),
        (DataLoader(Points(), batch_sampler=Uneven()), {}, "batches of 1 to 4 samples"),
        (iter(DataLoader(Points(), batch_size=4)), {}, "an iterator"),
        ([1, 2], {}, "it is a torch.utils.data.DataLoader"),
        (DataLoader(Points(), batch_size=4, collate_fn=lambda samples: torch.randn(7, 12)), {}, "makes 7 rows of 2"),
        (DataLoader(Points(), batch_size=4, collate_fn=lambda samples: 1 / 0), {}, "ZeroDivisionError"),
        (DataLoader(Points(), batch_sampler=[]), {}, "gives no batch"),
    ],
)
def test_loaders_that_no_plan_can_keep_are_refused(loader: Any, options: dict[str, Any], words: str) -> None:
    model = Regressor()
    with pytest.raises(WorkloadError, match=f"(?s){words}"):
        read_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, cross_entropy, **options)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    model, other = Regressor(), Regressor()
    loader = loader_of(Points(), 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(WorkloadError, match="not the model's"):
        read_loop(other, optimizer, loader, cross_entropy)
    with pytest.raises(WorkloadError, match="the loop lacks optimizer"):
        read_loop(model, None, loader, cross_entropy)
    schedule = warm_up(optimizer)
    with pytest.raises(WorkloadError, match="has a learning-rate schedule"):
        read_loop(model, optimizer, loader, cross_entropy)
    with pytest.raises(WorkloadError, match="another optimizer"):
        read_loop(other, torch.optim.SGD(other.parameters(), lr=0.1), loader, cross_entropy, schedule=schedule)


def test_an_inspection_reads_the_rates_of_a_schedule_that_goes_by_epochs() -> None:
    """Each search reads them; it ended with an AttributeError."""
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(Points(8), batch_size=4)
    workload = read_loop(model, optimizer, loader, cross_entropy, schedule=schedule, schedule_interval="epoch")
    facts = read_schedule(workload, workload.build_optimizer(trainable(model)))
    assert facts is not None
    assert [rates[0] for rates in facts.learning_rates[:5]] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])
