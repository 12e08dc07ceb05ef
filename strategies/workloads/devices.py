"""Where a model is: moved to the meta device, to host memory for a while, or copied to the CPU."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake

from autoplan.strategies.workloads.pickling import dumps


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU where it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def is_elsewhere(device: str) -> bool:
    """Whether a device type is that of a machine which is planned for, and not here: code of a workload runs on the CPU
    then, and what is installed there is not known."""
    return device == "cuda" and not torch.cuda.is_available()


def on_cpu(model: nn.Module) -> nn.Module:
    """The model, or a copy of it on the CPU where it is on a GPU: what travels to trials must not hold its memory."""
    if all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return model
    return copy.deepcopy(model).to("cpu")


def has_closed_hooks(model: nn.Module) -> bool:
    """Whether a hook of a model is a function that holds objects from where it was written.

    copy.deepcopy copies no function: the copy's hook would read and write what belongs to the original.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = (hook for module in model.modules() for kind in kinds for hook in getattr(module, kind, {}).values())
    return any(getattr(hook, "__closure__", None) for hook in hooks)


def copy_model(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model."""
    return pickle.loads(dumps(model)) if has_closed_hooks(model) else copy.deepcopy(model)


@contextlib.contextmanager
def on_the_host(holder: Any) -> Iterator[None]:
    """Keeps every model in an object's attributes on the CPU; afterwards each is on its device again.

    The parameters stay the same objects, so an optimizer over them stays valid.

    Args:
        holder: A Trainer, a Lightning module, any object.
    """
    moved = move_to_host(holder)
    try:
        yield
    finally:
        for model, device in moved:
            model.to(device)


def move_to_host(holder: Any) -> list[tuple[nn.Module, torch.device]]:
    """Moves every model in an object's attributes from a GPU to the CPU; returns them, each with its device."""
    moved: list[tuple[nn.Module, torch.device]] = []
    models = {id(value): value for value in vars(holder).values() if isinstance(value, nn.Module)}
    for model in models.values():
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        if len(devices) == 1 and (device := devices.pop()).type == "cuda":
            model.to("cpu")
            moved.append((model, device))
    if moved:
        torch.cuda.empty_cache()
    return moved


def build_fake(build_model: Callable[[], nn.Module], mode: FakeTensorMode, device: str | torch.device) -> nn.Module:
    """A model whose tensors are fake ones on a device.

    A function makes it there. A model that exists (a loop's, a Trainer's) is where its owner has it: fake copies of its
    tensors are moved.
    """
    try:
        with mode, torch.device(device):
            model = build_model()
    except RuntimeError:  # torch 2.13 copies no buffer of a model that exists (aten.set_ of a real storage)
        with torch.device(device):
            model = build_model()
    tensors = (*model.parameters(), *model.buffers())
    kind = torch.device(device).type
    if all(is_fake(tensor) and tensor.device.type == kind for tensor in tensors):
        return model
    with mode:
        moved = {id(tensor): _fake_on(tensor, mode, device) for tensor in tensors}
    return copy.deepcopy(model, moved)


def _fake_on(tensor: torch.Tensor, mode: FakeTensorMode, device: str | torch.device) -> torch.Tensor:
    fake = tensor if is_fake(tensor) else mode.from_tensor(tensor)
    if fake.device.type == torch.device(device).type:
        return fake
    moved = fake.detach().to(device)
    return nn.Parameter(moved, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def move_to_meta(model: nn.Module) -> None:
    """Moves a model to the meta device, in place; torch alone would make a parameter for each place of a tied one."""
    first: dict[int, tuple[nn.Module, str]] = {}
    tied: list[tuple[nn.Module, str, nn.Module, str]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in first:
                tied.append((module, name, *first[id(parameter)]))
            else:
                first[id(parameter)] = (module, name)
    model.to("meta")
    for module, name, other, other_name in tied:
        module._parameters[name] = other._parameters[other_name]
