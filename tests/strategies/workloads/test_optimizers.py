"""A user's optimizer that is made anew: with what its constructor was told, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.optimizers import rebuild, rebuild_over


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
