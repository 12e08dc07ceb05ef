"""Trainings as people have them, read into workloads: one file per kind of object.

In: an object (a Trainer, a module with its data). Out: a Workload, and sentences for the user on what was taken over.
Kinds are told apart by the names of classes and modules, so that nothing is imported that the user did not import.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TrainingSource:
    """What was read of a training as it stands.

    Attributes:
        workload: What is trained.
        notes: Sentences for the user: what was taken over, what is not, what does not run in trials.
    """

    workload: Workload
    notes: tuple[str, ...] = ()


Reader = Callable[[Any], TrainingSource]

# The full name of a class, of the object or of one of its bases, and the function that reads such an object.
READERS: Mapping[str, str] = {
    "transformers.trainer.Trainer": "autoplan.strategies.workloads.trainers.transformers:read_trainer",
    "lightning.pytorch.core.module.LightningModule": "autoplan.strategies.workloads.trainers.lightning:read_module",
    "pytorch_lightning.core.module.LightningModule": "autoplan.strategies.workloads.trainers.lightning:read_module",
}


def read_in_rank(value: object) -> Workload | None:
    """`read_source` for an object that a user's function made in a process of its own: its models leave the GPU.

    Raises:
        WorkloadError: it is a training, and cannot be taken over.
    """
    if find_source(value) is None:
        return None
    devices = importlib.import_module("autoplan.strategies.workloads.trainers.devices")
    devices.move_to_host(value)
    return read_source(value)


def read_source(value: object) -> Workload | None:
    """The workload of a training as it stands, with what is to be said of it; None: it is no such object.

    Raises:
        WorkloadError: it is one, and cannot be taken over.
    """
    reader = find_source(value)
    if reader is None:
        return None
    return with_notes(reader(value), taken_from=type(value).__name__)


def with_notes(source: TrainingSource, *, taken_from: str) -> Workload:
    """The workload with what is to be said of it, and where it comes from."""
    notes = (*source.workload.notes, *source.notes)
    return dataclasses.replace(source.workload, notes=notes, taken_from=taken_from)


def class_names(value: object) -> list[str]:
    """The full names of an object's class and of its bases, the nearest first."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__]


def find_source(value: object) -> Reader | None:
    """The function that reads an object's training into a workload; None: the object is no training that is known.

    Args:
        value: Anything. Its library is not imported: whoever made the object did that.
    """
    for name in class_names(value):
        if name in READERS:
            module, _, function = READERS[name].partition(":")
            reader: Reader = getattr(importlib.import_module(module), function)
            return reader
    return None
