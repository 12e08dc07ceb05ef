"""The frameworks whose trainings are known: by the class of an object, the package that reads, applies and watches it.

The packages are in autoplan/frameworks/, above the planner. What stands below them (a rank that loads a workload,
`plan.apply_to`) finds them here by name, so that imports go one way. Objects are told apart by the names of their
classes: nothing is imported that the user did not import.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload

MODULES = ("torch.nn.modules.module.Module",)
LIGHTNING_MODULES = ("lightning.pytorch.core.module.LightningModule", "pytorch_lightning.core.module.LightningModule")

FRAMEWORKS: Mapping[str, str] = {
    "transformers.trainer.Trainer": "autoplan.frameworks.transformers",
    **dict.fromkeys(LIGHTNING_MODULES, "autoplan.frameworks.lightning"),
}
"""By the full name of a class, of the object or of one of its bases: the package that knows it. Such a package has

    read.py     read_training(training): its Workload
    apply.py    apply_plan(plan, training, *parts, ...): what `plan.apply_to` returns
"""


def class_names(value: object) -> list[str]:
    """The full names of an object's class and of its bases, the nearest first."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__]


def is_one_of(value: object, names: tuple[str, ...]) -> bool:
    """Whether a class of one of these full names is that of an object, or a base of it."""
    return not set(names).isdisjoint(class_names(value))


def framework_of(value: object) -> str | None:
    """The package that knows an object's training; None: the object is no training of a framework."""
    return next((FRAMEWORKS[name] for name in class_names(value) if name in FRAMEWORKS), None)


def module_of(framework: str, name: str) -> Any:
    """A module of a framework's package: `read` or `apply`."""
    return importlib.import_module(f"{framework}.{name}")


def read_in_rank(value: object) -> Workload | None:
    """The workload of a training that a user's function made in a process of its own: its models leave the GPU.

    Returns:
        None: the object is no training of a framework.

    Raises:
        WorkloadError: it is one, and cannot be taken over.
    """
    framework = framework_of(value)
    if framework is None:
        return None
    from autoplan.strategies.workloads.devices import move_to_host

    move_to_host(value)
    workload: Workload = module_of(framework, "read").read_training(value)
    return workload
