"""Tells the parts apart that `autoplan.search` takes: of a loop, of a LightningModule; and has them read.

In: what the caller gave, by position or by name. Out: a Workload, or None where it is no training as it stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.trainers import class_names, with_notes
from autoplan.strategies.workloads.trainers.accelerate import read_loop
from autoplan.strategies.workloads.trainers.lightning import read_module
from autoplan.strategies.workloads.trainers.mean_loss import LossMean
from autoplan.strategies.workloads.trainers.schedules import ScheduleInterval
from autoplan.strategies.workloads.trainers.step import read_step
from autoplan.strategies.workloads.workload import Workload

LIGHTNING_MODULES = ("lightning.pytorch.core.module.LightningModule", "pytorch_lightning.core.module.LightningModule")
LIGHTNING_DATA = (
    "lightning.pytorch.core.datamodule.LightningDataModule",
    "pytorch_lightning.core.datamodule.LightningDataModule",
)
STEP_FUNCTION = "step function"
"""What a workload of a step is taken from."""

LOADERS = ("torch.utils.data.dataloader.DataLoader", "accelerate.data_loader.DataLoaderAdapter")


def is_one_of(value: object, names: tuple[str, ...]) -> bool:
    """Whether a class of one of these full names is that of an object, or a base of it."""
    return not set(names).isdisjoint(class_names(value))


def read_parts(
    model: Any,
    *,
    optimizer: Any = None,
    dataloader: Any = None,
    loss: Any = None,
    make_batch: Any = None,
    trainer: Any = None,
    accelerator: Any = None,
    loss_mean: LossMean | None = None,
    schedule_interval: ScheduleInterval | None = None,
    step: Any = None,
    precisions: Sequence[str] = (),
    **settings: Any,
) -> Workload | None:
    """The workload of a loop's or a LightningModule's parts, or of a step, with what is to be said of it.

    Args:
        model: The first thing that was given, or `model=`.
        optimizer: The second; for a LightningModule this place is its data's.
        dataloader, loss, make_batch, trainer, accelerator, loss_mean, schedule_interval, step: See `autoplan.search`.
        precisions: That are allowed around a step.
        settings: schedule, max_grad_norm, global_batch, sequence_length, name, seed.

    Returns:
        None where no DataLoader, no LightningModule and no step was given.

    Raises:
        WorkloadError: a part is missing or of the wrong kind, or no plan can keep what is trained.
    """
    parts = {"model": model, "optimizer": optimizer, "dataloader": dataloader, "loss": loss, "make_batch": make_batch}
    interval = None if schedule_interval == "step" else schedule_interval
    others = {"trainer": trainer, "accelerator": accelerator, "loss_mean": loss_mean, "schedule_interval": interval}
    if step is not None:
        outside = {name: settings.pop(name, None) for name in ("schedule", "max_grad_norm", "sequence_length")}
        _refuse(parts | others | outside, "a step has them itself")
        settings["global_batch"] = settings.get("global_batch") or 1
        return dataclasses.replace(read_step(step, precisions=precisions, **settings), taken_from=STEP_FUNCTION)
    if is_one_of(model, LIGHTNING_MODULES):
        data, optimizer = (dataloader, optimizer) if dataloader is not None else (optimizer, None)
        given = {"optimizer": optimizer, "loss": loss, "accelerator": accelerator, "make_batch": make_batch}
        given |= {"schedule_interval": interval}
        _refuse(given, "a LightningModule says these itself")
        module = read_module(model, data, trainer=trainer, loss_mean=loss_mean, **settings)
        return with_notes(module, taken_from="LightningModule")
    if is_one_of(optimizer, LOADERS + LIGHTNING_DATA):
        raise WorkloadError(
            f"the second argument is {type(optimizer).__name__}; after a model comes its optimizer",
            hint="autoplan.search(model, optimizer, dataloader, loss). Only a LightningModule has an optimizer itself.",
        )
    if dataloader is None:
        _refuse(others, "they go with a dataloader or a LightningModule")
        return None
    _refuse({"trainer": trainer}, "it goes with a LightningModule")
    _refuse({"make_batch": make_batch}, "the batches are the dataloader's")
    settings |= {"schedule_interval": schedule_interval or "step", "loss_mean": loss_mean}
    source = read_loop(model, optimizer, dataloader, loss, accelerator=accelerator, **settings)
    return with_notes(source, taken_from="training loop")


def _refuse(given: dict[str, Any], why: str) -> None:
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise WorkloadError(f"{', '.join(named)} was given too, and {why}", hint="Leave it out.")
