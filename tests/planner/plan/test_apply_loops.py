"""plan.apply_to of a loop: each part of it is kept, refused or named."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

import autoplan
from autoplan.errors import PlanError, UsageError, WorkloadError
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.analysis.training_facts import read_training_facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import spec_from_objects
from tests.recorded import make_plan
from tests.strategies.loops import Points, Regressor, parameters_of, worst_difference

pytestmark = pytest.mark.filterwarnings("ignore:the plan was found on other hardware")

CLIP = 0.05


def parts_of(batch_size: int = 8, dropout: float = 0.0, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A model, its optimizer, a DataLoader that draws from torch's own generator, and a loss."""
    torch.manual_seed(0)
    model = Regressor(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader: Any = DataLoader(Points(32), batch_size=batch_size, **({"shuffle": True} | options))
    return model, optimizer, loader, nn.CrossEntropyLoss()


def plan_of(parts: Any, micro_batch: int = 4, **settings: Any) -> Plan:
    """A plan of a search of these parts, as another process reads it."""
    workload = autoplan.from_loop(*parts, **settings)
    facts = read_training_facts(workload, workload.build_model())
    plan = make_plan(TrainingConfig(micro_batch=micro_batch), workload=spec_from_objects(workload), training=facts)
    return Plan.model_validate_json(plan.model_dump_json())


def halving(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def test_clipping_of_the_search_is_kept_and_another_one_is_refused() -> None:
    parts = parts_of()
    plan = plan_of(parts, max_grad_norm=CLIP)
    with pytest.raises(PlanError, match="clipped to a norm of 1 .* they were clipped to a norm of 0.05"):
        plan.apply_to(*parts, max_grad_norm=1.0)
    with pytest.raises(PlanError, match="are not clipped .* they were clipped to a norm of 0.05"):
        plan.apply_to(*parts, max_grad_norm=None)
    with pytest.raises(PlanError, match="clipped to a norm of 0.05 .* they were not clipped"):
        plan_of(parts).apply_to(*parts, max_grad_norm=CLIP)
    run, _ = plan.apply_to(*parts)
    assert run.workload.max_grad_norm == CLIP
    assert plan.apply_to(*parts_of(), max_grad_norm=None, changed_ok=True).run.workload.max_grad_norm is None


@pytest.mark.parametrize("first", [nn.BatchNorm1d(12), nn.Identity()])
def test_a_micro_batch_that_was_fixed_for_the_search_is_kept(first: nn.Module) -> None:
    """The loop fixes another one, or none."""
    model = nn.Sequential(first, nn.Linear(12, 3))
    loader: Any = DataLoader(Points(32), batch_size=8)
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), loader, nn.CrossEntropyLoss()
    workload = autoplan.from_loop(*parts)
    assert workload.fixed_micro_batch == (8 if isinstance(first, nn.BatchNorm1d) else None)
    spec = spec_from_objects(workload)
    spec = spec.model_copy(update={"options": dict(spec.options) | {"fixed_micro_batch": 4}})
    run, batches = make_plan(TrainingConfig(micro_batch=4), workload=spec, training=None).apply_to(*parts)
    assert run.workload.fixed_micro_batch == 4
    assert torch.isfinite(run.step(next(iter(batches))).loss)


def test_parts_may_be_given_by_name_as_to_the_search() -> None:
    model, optimizer, loader, loss = parts_of()
    plan = plan_of((model, optimizer, loader, loss))
    for names in ({"loss": loss}, {"optimizer": optimizer, "dataloader": loader, "loss": loss}):
        given = [part for name, part in (("optimizer", optimizer), ("dataloader", loader)) if name not in names]
        run, batches = plan.apply_to(model, *given, **names)
        assert torch.isfinite(run.step(next(iter(batches))).loss)
    with pytest.raises(UsageError, match="given loss twice: by place and by name"):
        plan.apply_to(model, optimizer, loader, loss, loss=loss)


@pytest.mark.parametrize(
    "make", [None, lambda optimizer: StepLR(optimizer, 1, gamma=0.4), lambda optimizer: StepLR(optimizer, 90)]
)
def test_a_schedule_that_is_not_that_of_the_search_is_refused(make: Any) -> None:
    parts = parts_of()
    plan = plan_of(parts, schedule=lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    settings = {} if make is None else {"schedule": make(parts[1])}  # an instance: no code to compare
    with pytest.raises(PlanError, match="the schedule is (none|StepLR.*), and the search had StepLR"):
        plan.apply_to(*parts, **settings)
    later = plan_of(parts_of(), schedule=lambda optimizer: StepLR(optimizer, 80))  # nothing changes in 16 steps
    if settings:
        with pytest.raises(PlanError, match="StepLR"):
            later.apply_to(*parts, **settings)


def test_what_the_program_does_with_its_optimizer_is_done_with_the_one_that_trains() -> None:
    """ReduceLROnPlateau, a rate set by hand, a logger, a moving average by hook, a checkpoint: as in a plain loop."""
    model, optimizer, loader, loss = parts_of(shuffle=False)
    plain = copy.deepcopy(model)
    own = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    averages = [copy.deepcopy(net) for net in (model, plain)]

    def averaging(place: int, net: nn.Module) -> Any:
        def average(*given: Any) -> None:
            with torch.no_grad():
                for mean, parameter in zip(averages[place].parameters(), net.parameters(), strict=True):
                    mean.lerp_(parameter, 0.5)

        return average

    handle = optimizer.register_step_post_hook(averaging(0, model))
    removed = own.register_step_post_hook(averaging(1, plain))
    plan = plan_of((model, optimizer, loader, loss))
    assert any("averaging" not in note and "average" in note for note in plan.workload.notes)
    plateaus = [ReduceLROnPlateau(one, factor=0.5, patience=0, threshold=10.0) for one in (optimizer, own)]
    run, batches = plan.apply_to(model, optimizer, loader, loss)
    for number, (batch, (x, y)) in enumerate(zip(batches, loader, strict=True)):
        value = float(run.step(batch).loss)
        wanted = loss(plain(x), y)
        own.zero_grad()
        wanted.backward()
        own.step()
        for plateau, one in zip(plateaus, (value, float(wanted)), strict=True):
            plateau.step(one)
        if number == 2:
            optimizer.param_groups[0]["lr"] = own.param_groups[0]["lr"] = 0.3
            handle.remove()
            removed.remove()
    assert run.optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"] < 0.3
    assert worst_difference(parameters_of(model), parameters_of(plain)) < 2e-5
    assert worst_difference(parameters_of(averages[0]), parameters_of(averages[1])) < 2e-5
    assert worst_difference(parameters_of(averages[0]), parameters_of(model)) > 1e-3
    saved = optimizer.state_dict()["state"]
    assert torch.equal(saved[0]["momentum_buffer"], run.optimizer.state_dict()["state"][0]["momentum_buffer"])
    run.load_state_dict(run.state_dict())
    assert optimizer.param_groups[0] is run.optimizer.param_groups[0], "after a restore too"
    with pytest.raises(WorkloadError, match=r"step\(\) of the optimizer SGD was called; .* run.step"):
        optimizer.step()
    again = plan.apply_to(model, optimizer, loader, loss, changed_ok=True).run
    assert again.step(next(iter(batches))).loss.isfinite()


@pytest.mark.filterwarnings("error:Detected call of")
def test_a_program_that_loads_a_state_and_makes_a_new_schedule_goes_on_as_without_a_plan() -> None:
    model, optimizer, loader, loss = parts_of(shuffle=False)
    plain = copy.deepcopy(model)
    own = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    run, batches = plan_of((model, optimizer, loader, loss)).apply_to(model, optimizer, loader, loss)
    schedules: list[Any] = []
    for number, (batch, (x, y)) in enumerate(zip(batches, loader, strict=True)):
        if number == 2:
            for one in (optimizer, own):
                one.load_state_dict(copy.deepcopy(one.state_dict()))
            schedules = [halving(one) for one in (optimizer, own)]
        run.step(batch)
        own.zero_grad()
        loss(plain(x), y).backward()
        own.step()
        for schedule in schedules:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"] == 0.125
    assert worst_difference(parameters_of(model), parameters_of(plain)) < 2e-5
    with pytest.raises(WorkloadError, match=r"step\(\) of the optimizer SGD was called; .* run.step"):
        optimizer.step()


def test_the_schedule_that_was_handed_in_shows_the_rates_and_cannot_be_stepped_twice() -> None:
    parts = parts_of()
    schedule = halving(parts[1])
    run, loader = plan_of(parts, schedule=schedule).apply_to(*parts, schedule=schedule)
    run.step(next(iter(loader)))
    assert schedule.get_last_lr() == [0.25] == [group["lr"] for group in parts[1].param_groups]
    assert schedule.state_dict()["last_epoch"] == 1
    with pytest.raises(WorkloadError, match=r"step\(\) of the schedule StepLR"):
        schedule.step()
    assert isinstance(schedule, StepLR) and run.optimizer.param_groups[0]["lr"] == 0.25


def test_a_step_that_was_replaced_on_the_instance_is_refused() -> None:
    model, optimizer, loader, loss = parts_of()
    optimizer.step = lambda: None
    with pytest.raises(WorkloadError, match="step of the optimizer .SGD. was replaced"):
        autoplan.from_loop(model, optimizer, loader, loss)


def test_another_batch_of_the_loop_is_refused() -> None:
    plan = plan_of(parts_of(8))
    with pytest.raises(PlanError, match="global batch of 8, and 16 is what this loop trains"):
        plan.apply_to(*parts_of(16))
    with pytest.raises(PlanError, match="global batch of 8, and 16 was given"):
        plan.apply_to(*parts_of(8), global_batch=16)
    assert plan.apply_to(*parts_of(16), changed_ok=True).run.local_batch == 8
    accumulating = plan_of(parts_of(8), global_batch=16)
    with pytest.raises(PlanError, match="If the search was given global_batch=16, give it here too"):
        accumulating.apply_to(*parts_of(8))
    assert accumulating.apply_to(*parts_of(8), global_batch=16).run.local_batch == 16


class Scaled(Points):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] * 2, self.y[index]


def changed_points() -> Points:
    points = Points(32)
    points.x = points.x + 1
    return points


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"shuffle": False}, "order of the DataLoader"),
        ({"shuffle": None, "sampler": SubsetRandomSampler(range(16))}, "order of the DataLoader"),
        ({"shuffle": None, "sampler": RandomSampler(Points(32), replacement=True)}, "order of the DataLoader"),
        ({"dataset": Scaled(32)}, "samples of the DataLoader"),
        ({"dataset": changed_points()}, "samples of the DataLoader"),
        ({"dataset": TensorDataset(torch.ones(32, 12), torch.zeros(32).long())}, "samples of the DataLoader"),
        ({"dataset": [(torch.ones(12), 1)] * 32}, "samples of the DataLoader"),
        ({"collate_fn": lambda samples: (torch.zeros(len(samples), 12), torch.zeros(len(samples)).long())}, "samples"),
    ],
)
def test_another_sampler_and_another_dataset_are_named(options: dict[str, Any], name: str) -> None:
    model, optimizer, loader, loss = parts_of()
    plan = plan_of((model, optimizer, loader, loss))
    other: Any = DataLoader(options.pop("dataset", loader.dataset), batch_size=8, **({"shuffle": True} | options))
    with pytest.warns(UserWarning, match=f"changed since the plan was found: .*{name}"):
        plan.apply_to(model, optimizer, other, loss)


def test_the_same_data_is_not_remarked_on(recwarn: pytest.WarningsRecorder) -> None:
    plan_of(parts_of()).apply_to(*parts_of())
    assert not [str(one.message) for one in recwarn if "changed since" in str(one.message)]


def test_the_program_draws_the_orders_and_masks_that_it_drew_without_a_plan() -> None:
    """Bit for bit: the weights, the order of the loader, dropout, and what is drawn of NumPy and Python afterwards."""

    def train(with_plan: bool) -> tuple[list[float], Any]:
        model, optimizer, loader, loss = parts_of(dropout=0.5)
        plan = plan_of((model, optimizer, loader, loss), micro_batch=8)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        losses = []
        if with_plan:
            run, batches = plan.apply_to(model, optimizer, loader, loss)
            for _ in range(2):
                losses += [float(run.step(batch).loss) for batch in batches]
        else:
            for _ in range(2):
                for x, y in loader:
                    optimizer.zero_grad()
                    value = loss(model(x), y)
                    value.backward()
                    optimizer.step()
                    losses.append(float(value.detach()))
        return losses, (float(torch.rand(())), random.random(), np.random.rand())

    (got, later), (wanted, same) = train(True), train(False)
    assert got == pytest.approx(wanted, rel=1e-6) and later == same


def test_prepare_leaves_the_generators_as_they_were() -> None:
    model, optimizer, loader, loss = parts_of()
    plan = plan_of((model, optimizer, loader, loss))
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    plan.prepare(model, optimizer, autoplan.from_loop(model, optimizer, loader, loss).loss)
    assert torch.equal(torch.rand(3), wanted)


def drawing_step() -> Any:
    weights = torch.rand(4)
    return lambda index: float((weights * torch.rand(4)).sum())


class DrawingStep:
    """The same as a class: made, it is ready; called, it runs a step."""

    def __init__(self) -> None:
        self.weights = torch.rand(4)

    def __call__(self, index: int) -> float:
        return float((self.weights * torch.rand(4)).sum())


class StepMaker:
    """The same as an object that is called."""

    def __call__(self) -> Any:
        return drawing_step()


@pytest.mark.parametrize("make_step", [drawing_step, DrawingStep, StepMaker()], ids=["function", "class", "object"])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_step_function_draws_as_it_did_without_a_plan(make_step: Any, seed: int) -> None:
    spec = spec_from_objects(autoplan.from_step(make_step, seed=seed))
    plan = make_plan(TrainingConfig(micro_batch=1), workload=spec, training=None)
    torch.manual_seed(7)
    step = make_step()
    wanted = [step(index) for index in range(3)]
    torch.manual_seed(7)
    planned = plan.apply_to(make_step)
    assert [planned(index) for index in range(3)] == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(PlanError, match="make_step"):
        plan.apply_to(lambda: float)


def test_what_fabric_put_around_the_parts_is_taken_off() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    parts = parts_of()
    plan = plan_of(parts)
    model, optimizer, loader, loss = parts
    model, optimizer = fabric.setup(model, optimizer)
    wrapped = (model, optimizer, fabric.setup_dataloaders(loader), loss)
    run, own = plan.apply_to(*wrapped)
    run.step(next(iter(own)))
    assert run.model is parts[0] and type(run.optimizer) is torch.optim.SGD


def test_a_search_draws_nothing_of_the_program_for_a_dataset_that_draws() -> None:
    class Noisy(Points):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.rand(()), y

    model, optimizer, _, loss = parts_of()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    workload = autoplan.from_loop(model, optimizer, DataLoader(Noisy(32), batch_size=8), loss)
    assert torch.equal(torch.get_rng_state(), before)
    one, again = (workload.make_batch(4, 2) for _ in range(2))
    assert torch.equal(one[0], again[0]), "the same for the same arguments"
