"""The optimizer_step and optimizer_state knobs: in which form the workload's optimizer steps, and how it keeps moments.

The optimizer itself, its groups and its hyper-parameters belong to the workload. Steps over what is kept rounded
(moments, parameters) are in rounded_steps.py.
"""

from __future__ import annotations

import inspect

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from autoplan.errors import WorkloadError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.config import OPTIMIZER_FLAGS
from autoplan.strategies.techniques.base import Build, check_applies
from autoplan.strategies.techniques.rounded_steps import held_by, reason_against_8bit, with_rounding
from autoplan.strategies.workloads.optimizers import has_own_step, rebuild, step_form, trainable
from autoplan.strategies.workloads.workload import Workload


class OptimizerStrategy:
    """own: as the workload made it; else the same optimizer with the flag of one of torch's forms."""

    name = "optimizer_step"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """The forms that the optimizer's class takes and the device has, but the one that it has already.

        Where its flags leave it to torch, that is the loop on a CPU; on CUDA foreach, but for the DTensors of shards,
        which one GPU has not.
        """
        optimizer = workload.build_optimizer(trainable(structure.model))
        replaced = "its step was replaced on the instance" if has_own_step(optimizer) else None
        reasons = {value: replaced or reason_against(type(optimizer), value, device) for value in OPTIMIZER_FLAGS}
        form, flags = step_form(optimizer), [group.get("foreach") for group in optimizer.param_groups]
        if form is None and flags == [None] * len(flags):
            form = "for_loop" if device == "cpu" else "foreach" if _is_foreach(optimizer, hardware) else None
        if form is not None:
            reasons[form] = reasons[form] or f"own stands for it: this optimizer steps in the form {form} already"
        return offer(self.name, ("own",), reasons)

    def apply(self, build: Build) -> None:
        """Makes the optimizer over the parameters that train, in the chosen form.

        Raises:
            ConfigError: the optimizer's class has no such form.
            WorkloadError: nothing trains, the optimizer holds parameters of another model, or its step was replaced.
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
            check_applies(build.config, self.name, reason_against(type(optimizer), value, build.device.type))
            optimizer = rebuild(optimizer, OPTIMIZER_FLAGS[value])
        build.optimizer = optimizer


def _is_foreach(optimizer: torch.optim.Optimizer, hardware: HardwareProfile) -> bool:
    """Whether torch's own optimizer, without flags, steps in the form foreach on the only GPU: most do.

    Source: `torch.optim.optimizer._default_to_fused_or_foreach`, which Adafactor does not call, and what Adam asks
    before it.
    """
    by_torch = type(optimizer).__module__.startswith("torch.optim.") and type(optimizer).__name__ != "Adafactor"
    unsaid = all(
        group.get("fused") is None and not group.get("differentiable") and not isinstance(group["lr"], torch.Tensor)
        for group in optimizer.param_groups
    )
    return by_torch and unsaid and sum(device.type == "cuda" for device in hardware.devices) == 1


class OptimizerStateStrategy:
    """own: as the optimizer makes them; bf16; 8bit."""

    name = "optimizer_state"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """Both forms for torch's Adam and AdamW over fp32 parameters; 8bit where torchao is installed."""
        reason = reason_against_rounding(workload.build_optimizer(trainable(structure.model)))
        return offer(self.name, ("own",), {"bf16": reason, "8bit": reason or reason_against_8bit()})

    def apply(self, build: Build) -> None:
        """Has the optimizer step over what is kept rounded: its states, the parameters, or both.

        Raises:
            ConfigError: the optimizer is another, or torchao is missing.
        """
        config, optimizer = build.config, build.optimizer
        assert optimizer is not None, "the optimizer strategy comes before this"
        if config.optimizer_state != "own":
            reason = reason_against_rounding(optimizer, cast=config.parameters != "own")
            if config.optimizer_state == "8bit":
                reason = reason or reason_against_8bit()
            check_applies(config, self.name, reason)
        if config.rounds_steps:
            build.optimizer = with_rounding(
                optimizer,
                parameters=config.parameters,
                states=config.optimizer_state,
                seed=build.workload.seed,
            )


def reason_against(kind: type[torch.optim.Optimizer], value: str, device: str) -> str | None:
    """Why an optimizer class has no such form on a device type; None if it has."""
    taken = inspect.signature(kind).parameters
    flag = "foreach" if value == "for_loop" else value
    if flag not in taken:
        return f"{kind.__module__}.{kind.__qualname__} takes no {flag} flag"
    if value == "fused" and device not in _get_fused_kernels_supported_devices():
        return f"torch has no fused optimizer kernels on {device}"
    return None


def reason_against_rounding(optimizer: torch.optim.Optimizer, *, cast: bool = False) -> str | None:
    """Why an optimizer's moments are not kept rounded; None if they can be.

    Args:
        optimizer: The workload's own.
        cast: Its parameters were put into bf16 by this run.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        return f"it is for torch.optim.Adam and AdamW; this optimizer is {kind.__module__}.{kind.__qualname__}"
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return "amsgrad keeps the largest second moment, and rounding by chance would push that up"
    if not cast and any(parameter.dtype is not torch.float32 for parameter in held_by(optimizer)):
        return "the parameters are not in fp32, and the moments have their dtype already"
    return None
