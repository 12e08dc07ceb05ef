"""A model on the meta device: its structure and shapes without its numbers."""

from __future__ import annotations

from torch import nn


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
