"""The optimizer_step knob: torch's for-loop, foreach or fused form of the workload's optimizer.

The optimizer itself, its groups and its hyper-parameters belong to the workload; only how its step runs changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autoplan.errors import ConfigError, WorkloadError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.base import Build, Choices, LeftOut
from autoplan.strategies.structure import Structure
from autoplan.strategies.workload import Workload

_FLAGS = {
    "for_loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


class OptimizerStrategy:
    """own: as the workload made it; else the same optimizer with the flag of one of torch's forms."""

    name = "optimizer_step"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """The forms that the optimizer's class takes and the device has."""
        optimizer = workload.build_optimizer(trainable(structure.model))
        values: list[str] = ["own"]
        dropped: list[LeftOut] = []
        for value in _FLAGS:
            reason = reason_against(type(optimizer), value, device)
            if reason is None:
                values.append(value)
            else:
                dropped.append(LeftOut(value=value, reason=reason))
        return Choices(knob=self.name, values=tuple(values), left_out=tuple(dropped))

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
            optimizer = rebuild(optimizer, _FLAGS[value])
        build.optimizer = optimizer


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are not frozen, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


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


def rebuild_over(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """A function that makes the same optimizer over other parameters: those at the same places.

    Args:
        optimizer: The optimizer to follow; its groups and hyper-parameters are kept, its state is not.
        parameters: The trainable parameters of the model it was made for, in the model's order.

    Raises:
        WorkloadError: it holds parameters that are not among them.
    """
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    groups = []
    for group in optimizer.param_groups:
        held = [parameter for parameter in group["params"] if parameter.requires_grad]
        strange = [parameter for parameter in held if id(parameter) not in place]
        if strange:
            raise WorkloadError(
                f"the optimizer holds {len(strange)} parameter(s) that are not the model's",
                hint="Make the optimizer over the parameters of the model that you hand in, or give a function.",
            )
        options = {key: value for key, value in group.items() if key != "params" and key not in _FLAGS}
        groups.append((options, [place[id(parameter)] for parameter in held]))
    return functools.partial(_make_over, type(optimizer), groups, dict(optimizer.defaults), len(parameters))


def _make_over(
    kind: Any,
    groups: list[tuple[dict[str, Any], list[int]]],
    defaults: dict[str, Any],
    expected: int,
    parameters: Iterable[Any],
) -> torch.optim.Optimizer:
    given = list(parameters)
    if len(given) != expected:
        raise WorkloadError(
            f"an optimizer over {expected} parameters cannot be made over {len(given)}",
            hint="Hand in a function that makes the optimizer from parameters, not an instance.",
        )
    taken = inspect.signature(kind).parameters
    options = {name: value for name, value in defaults.items() if name in taken}
    return kind([{**rest, "params": [given[index] for index in places]} for rest, places in groups], **options)


def rebuild(optimizer: torch.optim.Optimizer, flags: dict[str, bool]) -> torch.optim.Optimizer:
    """The same optimizer, not stepped yet, with other flags: same class, groups and hyper-parameters."""
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    flags = {name: value for name, value in flags.items() if name in taken}
    groups = [{key: value for key, value in group.items() if key not in _FLAGS} for group in optimizer.param_groups]
    options: dict[str, Any] = {name: value for name, value in optimizer.defaults.items() if name in taken}
    make: Any = kind
    return make(groups, **(options | flags))
