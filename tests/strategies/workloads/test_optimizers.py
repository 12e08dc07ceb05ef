"""A user's optimizer that is made anew: with what its constructor was told, or not at all."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.optimizers import (
    KeptStates,
    check_optimizer,
    follow,
    kept_states,
    rebuild,
    rebuild_over,
    with_lasting_schedule,
)
from autoplan.strategies.workloads.workload import Workload
from tests.strategies.tiny import language


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]


class KeepsBits(torch.optim.AdamW):
    """As bitsandbytes' AdamW: the groups do not have its bits; they are in `args`, and paging in an attribute."""

    def __init__(self, params: Any, lr: float = 1e-3, optim_bits: int = 32, is_paged: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.defaults = {"lr": lr}
        self.args, self.is_paged = SimpleNamespace(optim_bits=optim_bits), is_paged


class KeepsRounding(torch.optim.SGD):
    """Its constructor's argument has another name than what it keeps."""

    def __init__(self, params: Any, lr: float = 1e-3, *, stochastic: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.defaults, self.rounds_by_chance = {"lr": lr}, stochastic


def test_arguments_that_no_group_has_are_kept() -> None:
    own, over = parameters(), parameters()
    optimizer = KeepsBits(own, lr=0.5, optim_bits=8, is_paged=True)
    made: Any = rebuild_over(optimizer, own)(over)
    assert (made.args.optim_bits, made.is_paged, made.param_groups[0]["lr"]) == (8, True, 0.5)
    assert made.param_groups[0]["params"] == over
    again: Any = rebuild(optimizer, {})
    assert (again.args.optim_bits, again.is_paged) == (8, True)


def test_what_cannot_be_told_again_is_refused() -> None:
    own = parameters()
    rebuild_over(KeepsRounding(own, lr=0.5), own)
    with pytest.raises(WorkloadError, match="rounds_by_chance=True, and made anew .* it has False"):
        rebuild_over(KeepsRounding(own, lr=0.5, stochastic=True), own)


class CountsSteps(torch.optim.SGD):
    """Counts its steps in an attribute."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        self.steps_taken = 0

    def step(self, closure: Any = None) -> Any:
        self.steps_taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = True
        return super().step(closure)


def test_an_optimizer_that_has_stepped_is_made_anew_without_its_counts() -> None:
    own = parameters()
    optimizer = CountsSteps(own, lr=0.5)
    optimizer.step()
    made: Any = rebuild_over(optimizer, own)(parameters())
    assert (optimizer.steps_taken, made.steps_taken) == (1, 0)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta"])
def test_torchs_own_are_made_anew(name: str) -> None:
    own = parameters()
    optimizer = getattr(torch.optim, name)(own, lr=0.25, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)  # it counts the optimizer's steps
    own[0].grad = torch.ones(3)
    optimizer.step()
    schedule.step()
    made = rebuild_over(optimizer, own)(parameters())
    assert type(made) is type(optimizer) and made.param_groups[0]["weight_decay"] == 0.5


def test_a_learning_rate_that_is_a_tensor_is_read_by_the_optimizer_that_trains() -> None:
    own, rate = parameters(), torch.tensor(0.5)
    optimizer = torch.optim.SGD(own, lr=rate)
    live = rebuild_over(optimizer, own)(own)
    live.param_groups[0]["lr"].fill_(0.25)
    assert float(rate) == 0.5, "until then it has one of its own"
    follow(optimizer, live, "run.step(batch)")
    assert float(rate) == 0.25
    rate.fill_(0.125)
    own[0].grad = torch.ones(3)
    live.step()
    assert own[0].tolist() == [0.875] * 3


def muon_by_shape(given: Any) -> torch.optim.Optimizer:
    """Refuses a parameter of other than two dims, as a Muon for all that is a matrix does."""
    assert all(parameter.dim() == 2 for parameter in given)
    return torch.optim.Muon(list(given), lr=0.1)


def test_what_an_optimizer_keeps_is_seen_on_stand_ins_of_the_same_dims() -> None:
    matrices = [torch.empty(500, 8, device="meta"), torch.empty(4, 3, device="meta")]
    assert kept_states(muon_by_shape, matrices) == KeptStates("Muon", 1, 4.0)
    both = [*matrices, torch.empty(500, device="meta")]
    assert kept_states(torch.optim.AdamW, both) == KeptStates("AdamW", 2, 8.0)
    assumed = kept_states(muon_by_shape, both)
    assert (assumed.kind, assumed.tensors, assumed.bytes_per_element) == ("unknown", 2, 8.0)
    assert "assumed as Adam's 8 bytes" in str(assumed.why_assumed)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ([torch.optim.SGD(parameters()), torch.optim.SGD(parameters())], "is a list of 2 optimizers"),
        (torch.optim.LBFGS(parameters()), "LBFGS, whose step.closure. runs the loss"),
    ],
)
def test_what_no_plan_can_step_is_refused_with_the_way_that_is_left(optimizer: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=said) as caught:
        check_optimizer(optimizer, "the optimizer")
    assert "from_step" in str(caught.value.hint)


def test_a_schedule_that_ends_before_a_trial_stays_at_its_last_rate() -> None:
    def build_schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)

    def rates(workload: Workload) -> list[float]:
        optimizer = torch.optim.SGD(parameters(), lr=0.01)
        assert workload.build_schedule is not None
        schedule, found = workload.build_schedule(optimizer), []
        for _ in range(8):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    short = dataclasses.replace(language(), build_schedule=build_schedule)
    with pytest.raises(ValueError, match="total steps"):
        rates(short)
    found = rates(with_lasting_schedule(short))
    assert found[2:] == found[2:3] * 6 and len(set(found[:3])) == 3
    assert with_lasting_schedule(language()).build_schedule is None
