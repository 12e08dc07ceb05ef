"""Copies of a model that a user handed in: of its numbers, or of its shapes alone.

In: a model. Out: a copy that shares nothing with it. Where the default device is meta, or under fake tensors, nobody
wants the numbers: the copy then has tensors without them, and takes no memory.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def copy_model(model: nn.Module) -> nn.Module:
    """A copy of a model, on the current default device.

    A model whose forward was replaced (TRL puts a fused output head into it) is copied by pickling: the replacement
    holds on to the original, and copy.deepcopy does not look into functions.
    """
    device = torch.get_default_device()
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)]
    if modes or device.type == "meta":
        return copy.deepcopy(model, _without_numbers(model, device, modes[-1] if modes else None))
    if any("forward" in vars(part) for part in model.modules()):
        with torch.device("cpu"):
            copied: nn.Module = pickle.loads(cloudpickle.dumps(model))
    else:
        copied = copy.deepcopy(model)
    return copied if device.type == "cpu" else copied.to(device)


def _without_numbers(model: nn.Module, device: torch.device, mode: FakeTensorMode | None) -> dict[int, Any]:
    """By id of a parameter or buffer, a tensor of its shape and kind: what copy.deepcopy puts in its place."""

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        with unset_fake_temporarily():
            plain = tensor.detach()
        return plain.to(device="meta") if mode is None else mode.from_tensor(plain).to(device)

    memo: dict[int, Any] = {id(buffer): shape_of(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(shape_of(parameter), requires_grad=parameter.requires_grad)
    return memo
