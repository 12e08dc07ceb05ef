"""The optimizer and the schedule that a loop or a LightningModule has, made anew over other parameters."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.optimizers import cloned, unpatched

ScheduleInterval = Literal["step", "epoch"]
"""When a loop steps its schedule: at each optimizer step, or once at the end of an epoch."""

MOST_STEPS = 20_000
"""For a note on its rates, a schedule is stepped so often at most."""


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Torch's optimizer, without what Accelerate and Fabric put around it.

    Raises:
        WorkloadError: it is none.
    """
    inner = optimizer
    if hasattr(optimizer, "accelerator_state"):
        inner = optimizer.optimizer
    elif type(optimizer).__name__.startswith("Fabric"):  # then the name of the user's class
        inner = getattr(optimizer, "_optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise WorkloadError(
            f"the optimizer is {type(optimizer).__name__}; with a dataloader it is a torch.optim.Optimizer over the "
            "model's parameters",
            hint="Hand in the optimizer that the loop steps. A function that makes one goes with make_batch=.",
        )
    return inner


def plain_schedule(schedule: Any) -> Any:
    """The schedule, or the function that makes it, without what Accelerate puts around it."""
    return getattr(schedule, "scheduler", schedule) if hasattr(schedule, "split_batches") else schedule


def read_schedule(schedule: Any, optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any] | None:
    """A function that makes the schedule from an optimizer.

    Args:
        schedule: Such a function; a schedule over `optimizer`, also one that Accelerate wrapped; None.
        optimizer: The loop's.

    Raises:
        WorkloadError: the optimizer has a schedule, and none was given; or it is over another optimizer.
    """
    if schedule is None:
        if any("initial_lr" in group for group in optimizer.param_groups):
            now = ", ".join(f"{group['lr']:.4g}" for group in optimizer.param_groups[:4])
            raise WorkloadError(
                f"the optimizer has a learning-rate schedule (its rate is {now} now), and none was given",
                hint="Hand it in too: schedule=scheduler, or the function that makes it from an optimizer.",
            )
        return None
    inner = plain_schedule(schedule)
    owner = getattr(inner, "optimizer", None)
    if owner is None:
        if not callable(inner):
            raise WorkloadError(
                f"the schedule is {type(schedule).__name__}", hint="Give a torch schedule, or a function that makes it."
            )
        found: Callable[[torch.optim.Optimizer], Any] = inner
        return found
    if plain_optimizer(owner) is not optimizer:
        raise WorkloadError(
            "the schedule belongs to another optimizer than the one that was given",
            hint="Hand in the schedule of this optimizer, or a function that makes it from an optimizer.",
        )
    if type(inner).__name__ == "ReduceLROnPlateau":
        raise WorkloadError(
            "the schedule is ReduceLROnPlateau, which takes a metric at each step; trials have none",
            hint="Search without it: hand in an optimizer that has no schedule, and step it yourself in training.",
        )
    return same_schedule(inner)


def by_interval(
    make: Callable[[torch.optim.Optimizer], Any] | None, interval: ScheduleInterval, steps_per_epoch: int
) -> Callable[[torch.optim.Optimizer], Any] | None:
    """A schedule of a loop, as it goes on by optimizer steps.

    Args:
        make: Makes the loop's schedule; None: it has none.
        interval: When the loop steps it.
        steps_per_epoch: Optimizer steps.

    Raises:
        WorkloadError: it is no interval, or there is no schedule.
    """
    if interval not in ("step", "epoch"):
        raise WorkloadError(
            f"schedule_interval is {interval!r}",
            hint='Give "step" for a schedule that is stepped at each optimizer step, "epoch" for one an epoch.',
        )
    if interval == "step":
        return make
    if make is None:
        raise WorkloadError('schedule_interval="epoch" was given, and no schedule', hint="Give schedule= too.")
    return make if steps_per_epoch == 1 else Stepped(make, steps_per_epoch)


def interval_note(
    make: Callable[[torch.optim.Optimizer], Any],
    optimizer: torch.optim.Optimizer,
    interval: ScheduleInterval,
    steps_per_epoch: int,
) -> str:
    """A sentence on when a schedule of a loop is stepped, and what its rate is after an epoch.

    Args:
        make: Makes the schedule, as the workload has it.
        optimizer: Over the same groups; its rates are changed.
        interval: When the loop steps it.
        steps_per_epoch: Optimizer steps.
    """
    if interval == "epoch":
        return f"the schedule is stepped once an epoch, after each {steps_per_epoch} optimizer steps"
    after = ""
    if steps_per_epoch <= MOST_STEPS:
        with contextlib.suppress(Exception), warnings.catch_warnings():  # one that ends before: without rates
            warnings.simplefilter("ignore")  # torch's: that the optimizer took no step
            schedule = make(optimizer)
            first = float(optimizer.param_groups[0]["lr"])
            for _ in range(steps_per_epoch):
                schedule.step()
            after = f", so its rate goes from {first:.4g} to {float(optimizer.param_groups[0]['lr']):.4g} in an epoch"
    return (
        f"the schedule is stepped at each optimizer step, {steps_per_epoch} an epoch{after}. A loop that steps it once "
        'an epoch gives schedule_interval="epoch"'
    )


def same_schedule(schedule: Any) -> Callable[[torch.optim.Optimizer], Any]:
    """A function that makes a schedule like this one, as far as it has come, over another optimizer.

    Args:
        schedule: One of torch, also one that is made of several.
    """
    optimizer = plain_optimizer(schedule.optimizer)
    without = {id(schedule.optimizer): None, id(optimizer): None}  # it holds the model, and is made anew
    rates = [(cloned(group.get("initial_lr", group["lr"])), cloned(group["lr"])) for group in optimizer.param_groups]
    return functools.partial(schedule_over, copy.deepcopy(schedule, without), rates)


def at_the_start(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with the learning rates that it had before a schedule was made over it; its state is the same."""
    plain = unpatched(optimizer)
    plain.param_groups = [dict(group) for group in optimizer.param_groups]
    for group in plain.param_groups:
        if "initial_lr" in group:
            group["lr"] = group.pop("initial_lr")
    return plain


def schedule_over(detached: Any, rates: list[tuple[Any, Any]], optimizer: torch.optim.Optimizer) -> Any:
    """A schedule like another one, as far as that one has come, over an optimizer.

    Args:
        detached: The other one, without its optimizer.
        rates: By group, the learning rate before the schedule, and the one that it has set.
        optimizer: With as many groups.
    """
    made = copy.deepcopy(detached)
    for one in _with_parts(made):
        one.optimizer = optimizer
        if hasattr(one, "_step_count"):
            one._step_count += 1  # torch warns at a first step whose optimizer it has not patched itself
    for group, (initial, rate) in zip(optimizer.param_groups, rates, strict=True):
        group["initial_lr"], group["lr"] = cloned(initial), cloned(rate)
    return made


def _with_parts(schedule: Any) -> list[Any]:
    """A schedule and those that it is made of, at any depth."""
    return [schedule, *(one for part in vars(schedule).get("_schedulers", ()) for one in _with_parts(part))]


@dataclasses.dataclass(frozen=True)
class Stepped:
    """Makes a schedule that is stepped once in so many optimizer steps: at the end of an epoch, or by a frequency.

    Attributes:
        make: Makes the schedule from an optimizer.
        every: Optimizer steps.
    """

    make: Callable[[torch.optim.Optimizer], Any]
    every: int

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        """The schedule; its state is that of the inner one and a count."""
        return _EverySteps(self.make(optimizer), self.every)


class _EverySteps:
    def __init__(self, schedule: Any, every: int) -> None:
        self.schedule = schedule
        self.every = every
        self.last_epoch = 0  # optimizer steps, as schedules call it

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """That of the schedule."""
        found: torch.optim.Optimizer = self.schedule.optimizer
        return found

    def step(self) -> None:
        self.last_epoch += 1
        if self.last_epoch % self.every == 0:
            self.schedule.step()

    def get_last_lr(self) -> list[float]:
        rates: list[float] = self.schedule.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": copy.copy(self.schedule.state_dict()), "steps": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.last_epoch = state["steps"]
