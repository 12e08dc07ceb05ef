"""The parity contract: what a technique has to keep, checked in one process on a tiny workload.

A test of another technique (more ranks, another precision) calls `check_parity` too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from autoplan.planner.parity.candidate import run_candidate
from autoplan.planner.parity.compare import Samples, compare
from autoplan.planner.parity.recorder import Recorder
from autoplan.planner.parity.records import Rung
from autoplan.planner.parity.reference import Check, run_reference
from autoplan.planner.records.trials import Parity
from autoplan.strategies.config import PLAIN, TrainingConfig
from autoplan.strategies.workloads.workload import Workload


def make_check(workload: Workload, config: TrainingConfig, *, own_shapes: bool = False, rung: Rung = "plain") -> Check:
    """What a rank is given: here, on the CPU, without a limit of time."""
    device = torch.device("cpu")
    shapes: dict[str, Any] = {"own_shapes": own_shapes, "rung": rung}
    return Check(workload=workload, config=config, device=device, recorder=Recorder(), **shapes)


def reference(workload: Workload, config: TrainingConfig, *, own_shapes: bool = False, rung: Rung = "plain") -> Samples:
    """The plain run that a config is compared with."""
    check = make_check(workload, config, own_shapes=own_shapes, rung=rung)
    return Samples(run_reference(check), check.recorder.samples())


def candidate(workload: Workload, config: TrainingConfig, plain: Samples, *, own_shapes: bool = False) -> Samples:
    """What prepare() makes of a config, beside a reference."""
    check = make_check(workload, config, own_shapes=own_shapes)
    return Samples(run_candidate(check, plain.measurement), check.recorder.samples())


def check_parity(workload: Workload, config: TrainingConfig, *, own_shapes: bool = False) -> Parity:
    """The verdict on a config."""
    plain = reference(workload, config, own_shapes=own_shapes)
    return compare(plain, [candidate(workload, config, plain, own_shapes=own_shapes)], config)


UNREAD = (
    *("checkpointing", "precision", "compile", "compile_mode", "attention", "loss", "optimizer_step"),
    *("threads", "allocator"),
)
"""Knobs that a reference does not read: the plain run beside a config is that of the config without them."""


@functools.cache
def plain_run(build: Callable[[], Workload], config: TrainingConfig) -> Samples:
    """`reference`, made once."""
    return reference(build(), config)


def plain_beside(build: Callable[[], Workload], config: TrainingConfig) -> Samples:
    """The plain run that a config is compared with, made once for all that differ in what it does not read."""
    return plain_run(build, config.model_copy(update={knob: getattr(PLAIN, knob) for knob in UNREAD}))


def check_parity_of(build: Callable[[], Workload], config: TrainingConfig) -> Parity:
    """As `check_parity`; tests of one workload share its plain run, which takes as long as a candidate.

    Args:
        build: Makes the workload; the same function for all of them.
        config: The candidate's.
    """
    plain = plain_beside(build, config)
    return compare(plain, [candidate(build(), config, plain)], config)
