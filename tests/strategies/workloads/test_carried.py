"""What a forward leaves in a model for the next one is named, and the micro-batch is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autoplan.strategies.inspect import inspect_workload
from autoplan.strategies.workloads.carried import buffers_kept, carried_state
from autoplan.strategies.workloads.loops.loop import read_loop
from autoplan.strategies.workloads.objects import spec_from_objects
from autoplan.strategies.workloads.workload import LossSum, Workload
from tests.recorded import make_hardware

CPU = torch.device("cpu")


class Queue(nn.Module):
    """Keeps the last rows that it saw, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(6, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs)
        self.rows = torch.cat([self.rows[1:], outputs.detach().mean(0, keepdim=True)])
        return outputs


class Hidden(nn.Module):
    """Keeps its last state in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = torch.zeros(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs) + self.state
        self.state = outputs.detach().mean(0)
        return outputs


class Remembers(nn.Linear):
    """Keeps its last output, which nothing reads."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(inputs)
        return self.last


class Masks(nn.Linear):
    """Makes a mask and a table of the batch's size anew in each forward, as buffers."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", None)
        self.register_buffer("table", torch.zeros(1, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mask = torch.ones(len(inputs), 4, 4, dtype=torch.bool).tril()
        self.table = torch.arange(len(inputs) * 4.0).view(-1, 4)
        return super().forward(inputs) + self.mask[:, -1] * 0.5


class States(nn.Linear):
    """Keeps the state of each sample of the batch in a buffer, which the next forward of as many samples reads."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("state", torch.zeros(0, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        if self.state.shape == outputs.shape:
            outputs = outputs + self.state
        self.state = outputs.detach()
        return outputs


class Bank(nn.Linear):
    """Adds a row for each forward to a buffer that grows."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("bank", torch.zeros(0, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        self.bank = torch.cat([self.bank, outputs.detach().mean(0, keepdim=True)])
        return outputs


class Drifts(nn.Linear):
    """Its second output is a part in 1000 from the first: what rounding in bfloat16 explains, and in fp32 does not."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.factor = getattr(self, "factor", torch.tensor(1.0, dtype=torch.float64)) * 1.001
        return super().forward(inputs).double() * self.factor


class Grows(nn.Module):
    """A table that is as long as the longest batch so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(self.table) < len(inputs):
            self.table = torch.ones(len(inputs))
        return self.linear(inputs) * self.table[: len(inputs), None]


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


def workload(build_model: Any) -> Workload:
    return Workload(
        name="carries",
        build_model=build_model,
        make_batch=lambda count, index: torch.randn(count, 4, generator=torch.Generator().manual_seed(index)),
        loss=lambda model, batch: LossSum(model(batch).square().sum(), len(batch)),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
    )


@pytest.mark.parametrize(
    ("build_model", "name", "why"),
    [
        (Queue, "rows", "is a buffer that each forward changes"),
        (spectral, "parametrizations.weight.0._u", "is a buffer that each forward changes"),
        (Hidden, "state", "the same two samples gave"),
        (States, "state", "is a buffer that each forward changes"),
        (Bank, "bank", "is a buffer that each forward changes"),
    ],
)
def test_what_is_carried_is_named_and_the_micro_batch_asked_for(build_model: Any, name: str, why: str) -> None:
    facts = inspect_workload(spec_from_objects(workload(build_model)), make_hardware(), "cpu")
    assert facts.knob("micro_batch").values == ()
    assert facts.micro_batch_dependent[0].module == name and why in facts.micro_batch_dependent[0].why


@pytest.mark.parametrize("build_model", [lambda: nn.Linear(4, 4), lambda: Remembers(4, 4), Masks, Grows])
def test_what_nothing_reads_leaves_the_micro_batch_free(build_model: Any) -> None:
    facts = inspect_workload(spec_from_objects(workload(build_model)), make_hardware(), "cpu")
    assert facts.knob("micro_batch").values == (1, 2, 4, 8)


@pytest.mark.parametrize(("dtype", "is_carried"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_loss_is_compared_by_the_tolerance_of_its_dtype(dtype: torch.dtype, is_carried: bool) -> None:
    given, model = workload(lambda: nn.Linear(4, 4)), Drifts(4, 4).to(dtype)
    found = carried_state(lambda net, batch: given.loss(net, batch.to(dtype)), model, given.make_batch, CPU, seed=0)
    assert (found is not None) == is_carried


def test_a_loss_that_differentiates_by_its_inputs_is_looked_at() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        inputs = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).tanh().sum(), inputs, create_graph=True)
        return LossSum(slope.square().sum(), len(batch))

    given = dataclasses.replace(workload(lambda: nn.Linear(4, 4)), loss=loss)
    facts = inspect_workload(spec_from_objects(given), make_hardware(), "cpu")
    assert facts.knob("micro_batch").values == (1, 2, 4, 8)


def test_the_model_is_left_as_it_was() -> None:
    for build_model in (Queue, Hidden, Grows):
        given = workload(build_model)
        model = given.build_model()
        before = [tensor.clone() for tensor in (*model.buffers(), getattr(model, "state", torch.zeros(1)))]
        carried_state(given.loss, model, given.make_batch, CPU, seed=0)
        after = (*model.buffers(), getattr(model, "state", torch.zeros(1)))
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_buffer_that_changes_its_shape_is_put_back() -> None:
    model = Grows()
    with buffers_kept(model):
        model(torch.ones(3, 4))
        assert model.table.shape == (3,)
    assert model.table.shape == (0,)
    resized = Grows()
    with buffers_kept(resized):
        resized.table.resize_(5)
    assert resized.table.shape == (0,)


def test_a_buffer_that_is_expanded_stays() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.ones(1).expand(4))
    model.register_buffer("count", torch.zeros(1))
    with buffers_kept(model):
        model.count += 1
    assert model.count == 0 and torch.equal(model.scale, torch.ones(4))


def test_a_loop_keeps_the_batch_size_that_it_has() -> None:
    model = Queue()
    rows = [(row, row) for row in torch.randn(16, 4, generator=torch.Generator().manual_seed(0))]
    given = read_loop(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, batch_size=4), nn.MSELoss(), global_batch=8
    )
    assert given.fixed_micro_batch == 4
    assert any("stays at the DataLoader's 4: rows is a buffer" in note for note in given.notes)


def test_what_a_forward_sets_is_no_part_of_what_is_trained() -> None:
    """Else a plan, which was searched on the model after a forward, refuses the model before one."""
    model = Remembers(4, 4)
    before = set(vars(model))
    rows = [(row, row) for row in torch.randn(16, 4)]
    read_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, batch_size=4), nn.MSELoss())
    assert set(vars(model)) == before
