"""autoplan: finds, by measurement, the fastest way to run a training job, and keeps the training the same.

    plan = autoplan.search(workload)            # or: autoplan search --model gpt2
    run = plan.prepare(model, optimizer, loss)  # then: run.step(batch)

Importing this package loads neither torch nor optuna nor transformers: each name below is loaded when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME_OF = {
    "search": "autoplan.api",
    "probe": "autoplan.api",
    "load_plan": "autoplan.api",
    "export": "autoplan.api",
    "estimate": "autoplan.planner.cost.analytical.api",
    "Plan": "autoplan.planner.plan",
    "Workload": "autoplan.strategies.workloads.workload",
    "LossSum": "autoplan.strategies.workloads.workload",
    "TrainingConfig": "autoplan.strategies.config",
    "TrainingRun": "autoplan.strategies.run",
    "HardwareProfile": "autoplan.probes.profile",
    "AutoplanError": "autoplan.errors",
}

__all__ = ["__version__", *_HOME_OF]

if TYPE_CHECKING:
    from autoplan.api import export, load_plan, probe, search
    from autoplan.errors import AutoplanError
    from autoplan.planner.cost.analytical.api import estimate
    from autoplan.planner.plan import Plan
    from autoplan.probes.profile import HardwareProfile
    from autoplan.strategies.config import TrainingConfig
    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.workload import LossSum, Workload


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
