"""What configure_optimizers of a LightningModule gives: one optimizer, and its schedule with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.trainers.schedules import Stepped, read_schedule
from autoplan.strategies.workloads.user_errors import user_error

SINGLE = "A plan trains with one optimizer: return it, ([optimizer], [schedule]), or a dict of both."


class ModuleOptimizer(NamedTuple):
    """What configure_optimizers gives.

    Attributes:
        optimizer: The one optimizer.
        schedule: Makes its schedule; None: a constant rate.
        notes: Sentences for the user.
        frequency: Batches after which a schedule of the interval "step" is due; 1: each, or it goes by epochs.
    """

    optimizer: torch.optim.Optimizer
    schedule: Callable[[torch.optim.Optimizer], Any] | None
    notes: list[str]
    frequency: int = 1


def read_optimizers(module: Any, batches_per_epoch: int, accumulation: int) -> ModuleOptimizer:
    """The optimizer of a module, and its schedule as it goes on by optimizer steps.

    Args:
        module: A copy of the user's, with a `trainer`.
        batches_per_epoch: Of one rank.
        accumulation: Batches of an optimizer step; a schedule of the interval "epoch" is stepped after their epoch.

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
        return ModuleOptimizer(optimizers[0], None, [])
    options = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
    schedule = options["scheduler"]
    if type(schedule).__name__ == "ReduceLROnPlateau":
        said = "ReduceLROnPlateau is stepped by a metric, which trials have not: a constant rate"
        return ModuleOptimizer(optimizers[0], None, [said])
    frequency, notes = int(options.get("frequency", 1)), []
    if options.get("interval", "epoch") == "step":
        every = steps_between(frequency, accumulation)
        if frequency > 1 and batches_per_epoch % (every * accumulation):
            notes.append(
                f"Lightning counts the {frequency} batches of the schedule's frequency anew in each epoch of "
                f"{batches_per_epoch}; a plan's steps count on"
            )
    else:
        every, frequency = frequency * (batches_per_epoch // accumulation or 1), 1
    make = read_schedule(schedule, optimizers[0])
    assert make is not None, "a schedule was given"
    return ModuleOptimizer(optimizers[0], make if every == 1 else Stepped(make, every), notes, frequency)


def steps_between(frequency: int, accumulation: int) -> int:
    """Optimizer steps from one step of a schedule to the next, under a lightning.Trainer.

    It steps a schedule of the interval "step" at batches that end an optimizer step, where their number is also a
    multiple of the frequency.
    """
    return math.lcm(frequency, accumulation) // accumulation


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
