"""Moves the models that an object holds to host memory for a while, so that trials have the GPU to themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


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
