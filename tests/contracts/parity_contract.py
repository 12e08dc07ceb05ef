"""The parity contract: what a technique has to keep, checked in one process on a tiny workload.

A test of another technique (more ranks, another precision) calls `check_parity` too.
"""

from __future__ import annotations

import torch

from autoplan.planner.parity.compare import ParityRun, compare
from autoplan.planner.parity.records import ParityRequest
from autoplan.planner.parity.worker import Recorder, make_small, run_candidate, run_plain
from autoplan.planner.records import Parity
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.strategies.workloads.workload import Workload

_SPEC = WorkloadSpec(kind="object", reference="", name="", sequence_length=None, global_batch=1, identity="")


def _ignore_phase(name: str) -> None:
    pass


def reference(workload: Workload, config: TrainingConfig) -> ParityRun:
    """The plain fp32 run that a config is held against."""
    small, _ = make_small(workload, _request(config))
    recorder = Recorder()
    measurement = run_plain(small, torch.device("cpu"), recorder, _ignore_phase)
    return ParityRun(measurement, recorder.samples())


def candidate(workload: Workload, config: TrainingConfig, steps: int = 1) -> ParityRun:
    """What prepare() makes of a config."""
    small, small_config = make_small(workload, _request(config))
    recorder = Recorder()
    measurement = run_candidate(small, small_config, steps, torch.device("cpu"), recorder, _ignore_phase)
    return ParityRun(measurement, recorder.samples())


def check_parity(workload: Workload, config: TrainingConfig) -> Parity:
    """The verdict on a config."""
    plain = reference(workload, config)
    return compare(plain, [candidate(workload, config, plain.measurement.steps)], config)


def _request(config: TrainingConfig) -> ParityRequest:
    return ParityRequest(spec=_SPEC, config=config, plain=True, device="cpu", samples="")
