"""The parity contract: what a technique has to keep, checked in one process on a tiny workload.

A test of another technique (more ranks, another precision) calls `check_parity` too.
"""

from __future__ import annotations

import torch

from autoplan.planner.parity.candidate import run_candidate
from autoplan.planner.parity.compare import Samples, compare
from autoplan.planner.parity.recorder import Recorder
from autoplan.planner.parity.reference import run_reference
from autoplan.planner.parity.time_limit import TimeLimit
from autoplan.planner.records import Parity
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.workload import Workload


def _ignore_phase(name: str) -> None:
    pass


def reference(workload: Workload, config: TrainingConfig, *, own_shapes: bool = False) -> Samples:
    """The plain run that a config is compared with."""
    recorder = Recorder()
    measurement = run_reference(
        workload, config, torch.device("cpu"), recorder, _ignore_phase, TimeLimit(), own_shapes=own_shapes
    )
    return Samples(measurement, recorder.samples())


def candidate(workload: Workload, config: TrainingConfig, plain: Samples, *, own_shapes: bool = False) -> Samples:
    """What prepare() makes of a config, beside a reference."""
    recorder = Recorder()
    measurement = run_candidate(
        workload,
        config,
        plain.measurement,
        torch.device("cpu"),
        recorder,
        _ignore_phase,
        TimeLimit(),
        own_shapes=own_shapes,
    )
    return Samples(measurement, recorder.samples())


def check_parity(workload: Workload, config: TrainingConfig, *, own_shapes: bool = False) -> Parity:
    """The verdict on a config."""
    plain = reference(workload, config, own_shapes=own_shapes)
    return compare(plain, [candidate(workload, config, plain, own_shapes=own_shapes)], config)
