"""What configure_optimizers of a LightningModule gives: one optimizer, and its schedule with its interval."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.trainers.schedules import read_schedule
from autoplan.strategies.workloads.user_errors import user_error

SINGLE = "A plan trains with one optimizer: return it, ([optimizer], [schedule]), or a dict of both."


def read_optimizers(
    module: Any, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, Callable[[torch.optim.Optimizer], Any] | None, list[str]]:
    """The optimizer, a function that makes its schedule (None: a constant rate), and sentences for the user.

    Args:
        module: A copy of the user's, with a `trainer`.
        steps_per_epoch: Optimizer steps of an epoch, after which a schedule of the interval "epoch" is stepped.

    Raises:
        WorkloadError: it fails, or gives no optimizer or several.
    """
    try:
        given = module.configure_optimizers()
    except WorkloadError:
        raise
    except Exception as error:
        raise user_error(error, f"configure_optimizers() of {type(module).__name__}", SINGLE) from error
    optimizers, schedules = _parse(given)
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        what = f"{len(optimizers)} optimizers" if len(optimizers) != 1 else type(optimizers[0]).__name__
        raise WorkloadError(f"configure_optimizers() of {type(module).__name__} gives {what}", hint=SINGLE)
    if len(schedules) > 1:
        raise WorkloadError(
            f"configure_optimizers() gives {len(schedules)} schedules for one optimizer",
            hint="Put them into one: torch.optim.lr_scheduler.SequentialLR or ChainedScheduler.",
        )
    if not schedules:
        return optimizers[0], None, []
    options = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
    schedule = options["scheduler"]
    if type(schedule).__name__ == "ReduceLROnPlateau":
        return optimizers[0], None, ["ReduceLROnPlateau is stepped by a metric, which trials have not: a constant rate"]
    every = int(options.get("frequency", 1)) * (1 if options.get("interval", "epoch") == "step" else steps_per_epoch)
    make = read_schedule(schedule, optimizers[0])
    assert make is not None, "a schedule was given"
    return optimizers[0], make if every == 1 else Stepped(make, every), []


def _parse(given: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedules, in the forms that Lightning takes."""
    if given is None:
        raise WorkloadError("configure_optimizers() gives None, so nothing is trained", hint=SINGLE)
    if isinstance(given, torch.optim.Optimizer):
        return [given], []
    if isinstance(given, Mapping):
        return [given.get("optimizer")], [given["lr_scheduler"]] if given.get("lr_scheduler") is not None else []
    if isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], list):
        return given[0], given[1] if isinstance(given[1], list) else [given[1]]
    if isinstance(given, list | tuple):
        parsed = [_parse(one) for one in given]
        return [one for optimizers, _ in parsed for one in optimizers], [one for _, found in parsed for one in found]
    return [given], []


class Stepped:
    """Makes a schedule that is stepped once in so many optimizer steps: at the end of an epoch, or by a frequency.

    Args:
        make: Makes the schedule from an optimizer.
        every: Optimizer steps.
    """

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], every: int) -> None:
        self.make = make
        self.every = every

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        """The schedule; its state is that of the inner one and a count."""
        return _EverySteps(self.make(optimizer), self.every)


class _EverySteps:
    def __init__(self, schedule: Any, every: int) -> None:
        self.schedule = schedule
        self.every = every
        self.last_epoch = 0  # optimizer steps, as schedules call it

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
