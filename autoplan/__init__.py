"""autoplan: finds, by measurement, the fastest way to run a training job, and keeps the training the same.

    plan = autoplan.search(workload)            # or: autoplan search --model gpt2
    run = plan.prepare(model, optimizer, loss)  # then: run.step(batch)

Importing this package loads neither torch nor optuna nor transformers: each name below is loaded when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autoplan import errors

__version__ = "0.1.0"

_MEMBERS = {
    "autoplan.api": ("search", "probe", "load_plan", "export"),
    "autoplan.trainings": ("from_trainer", "from_loop", "from_step"),
    "autoplan.estimates": ("estimate",),
    "autoplan.planner.plan.plan": ("Plan",),
    "autoplan.planner.plan.current": ("current_plan",),
    "autoplan.planner.verify.measure": ("verify",),
    "autoplan.planner.verify.climb": ("staircase",),
    "autoplan.planner.verify.stairs": ("Staircase",),
    "autoplan.planner.verify.steps": ("run_plan",),
    "autoplan.planner.verify.verdict": ("Verification",),
    "autoplan.planner.verify.meter": ("watch",),
    "autoplan.planner.diagnose.run": ("diagnose",),
    "autoplan.planner.diagnose.records": ("Diagnosis", "Finding"),
    "autoplan.frameworks.transformers.watch": ("TransformersWatch",),
    "autoplan.frameworks.lightning.watch": ("LightningWatch",),
    "autoplan.planner.space.bounds": ("Bound",),
    "autoplan.planner.search.options": ("SearchObserver", "SearchOptions", "SearchResult"),
    "autoplan.planner.search.run": ("run_search",),
    "autoplan.planner.store.optuna_study": ("load_study",),
    "autoplan.strategies.workloads.workload": ("LossSum", "OutputHead", "Workload"),
    "autoplan.strategies.workloads.samples": ("SampleBatch", "batches_from_dataset"),
    "autoplan.strategies.workloads.sources": ("make_spec", "spec_from_objects"),
    "autoplan.strategies.config": ("TrainingConfig",),
    "autoplan.strategies.run": ("TrainingRun",),
    "autoplan.probes.nodes": ("probe_nodes",),
    "autoplan.probes.profile": ("HardwareProfile",),
    "autoplan.errors": tuple(sorted(name for name in vars(errors) if name.endswith("Error"))),
}
_HOME_OF = {name: module for module, names in _MEMBERS.items() for name in names}

__all__ = ["__version__", *_HOME_OF]

if TYPE_CHECKING:
    from autoplan.api import export, load_plan, probe, search
    from autoplan.errors import (
        AutoplanError,
        BudgetEndedError,
        ConfigError,
        DeviceBusyError,
        DeviceError,
        DidNotRunError,
        ExportError,
        InterruptedSearchError,
        MissingExtraError,
        NoFeasiblePlanError,
        PlanError,
        StoreBusyError,
        StoreError,
        UsageError,
        WorkloadError,
    )
    from autoplan.estimates import estimate
    from autoplan.frameworks.lightning.watch import LightningWatch
    from autoplan.frameworks.transformers.watch import TransformersWatch
    from autoplan.planner.diagnose.records import Diagnosis, Finding
    from autoplan.planner.diagnose.run import diagnose
    from autoplan.planner.plan.current import current_plan
    from autoplan.planner.plan.plan import Plan
    from autoplan.planner.search.options import SearchObserver, SearchOptions, SearchResult
    from autoplan.planner.search.run import run_search
    from autoplan.planner.space.bounds import Bound
    from autoplan.planner.store.optuna_study import load_study
    from autoplan.planner.verify.climb import staircase
    from autoplan.planner.verify.measure import verify
    from autoplan.planner.verify.meter import watch
    from autoplan.planner.verify.stairs import Staircase
    from autoplan.planner.verify.steps import run_plan
    from autoplan.planner.verify.verdict import Verification
    from autoplan.probes.nodes import probe_nodes
    from autoplan.probes.profile import HardwareProfile
    from autoplan.strategies.config import TrainingConfig
    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.samples import SampleBatch, batches_from_dataset
    from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
    from autoplan.strategies.workloads.workload import LossSum, OutputHead, Workload
    from autoplan.trainings import from_loop, from_step, from_trainer


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
