"""The optimizer_step knob: torch's for-loop, foreach or fused form of the workload's optimizer.

The optimizer itself, its groups and its hyper-parameters belong to the workload; only how its step runs changes.
"""

from __future__ import annotations

import inspect

import torch

from autoplan.errors import ConfigError, WorkloadError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.config import OPTIMIZER_FLAGS
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.workloads.optimizers import rebuild, trainable
from autoplan.strategies.workloads.workload import Workload


class OptimizerStrategy:
    """own: as the workload made it; else the same optimizer with the flag of one of torch's forms."""

    name = "optimizer_step"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """The forms that the optimizer's class takes and the device has."""
        optimizer = workload.build_optimizer(trainable(structure.model))
        reasons = {value: reason_against(type(optimizer), value, device) for value in OPTIMIZER_FLAGS}
        return offer(self.name, ("own",), reasons)

    def apply(self, build: Build) -> None:
        """Makes the optimizer over the parameters that train, in the chosen form.

        Raises:
            ConfigError: the optimizer's class has no such form.
            WorkloadError: nothing trains, or the optimizer holds parameters of another model.
        """
        parameters = trainable(build.model)
        if not parameters:
            raise WorkloadError(
                f"all {sum(1 for _ in build.model.parameters())} parameters of {build.workload.name} are frozen",
                hint="Leave requires_grad True on the parameters that are to be trained.",
            )
        optimizer = build.workload.build_optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WorkloadError(
                f"build_optimizer returned {type(optimizer).__name__}; it returns a torch.optim.Optimizer",
                hint="For example: build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
            )
        value = build.config.optimizer_step
        if value != "own":
            reason = reason_against(type(optimizer), value, build.device.type)
            if reason is not None:
                raise ConfigError(f"optimizer_step={value} does not apply: {reason}", hint="Use optimizer_step=own.")
            optimizer = rebuild(optimizer, OPTIMIZER_FLAGS[value])
        build.optimizer = optimizer


def reason_against(kind: type[torch.optim.Optimizer], value: str, device: str) -> str | None:
    """Why an optimizer class has no such form on a device type; None if it has."""
    taken = inspect.signature(kind).parameters
    flag = "foreach" if value == "for_loop" else value
    if flag not in taken:
        return f"{kind.__module__}.{kind.__qualname__} takes no {flag} flag"
    if value == "fused" and device not in fused_devices():
        return f"torch has no fused optimizer kernels on {device}"
    return None


def fused_devices() -> list[str]:
    """The device types for which torch has fused optimizer kernels."""
    try:
        from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
    except ImportError:
        return ["cuda"]
    return list(_get_fused_kernels_supported_devices())
