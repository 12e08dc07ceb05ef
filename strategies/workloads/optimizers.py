"""A user's optimizer, made again over other parameters, with its groups and hyper-parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autoplan.errors import WorkloadError
from autoplan.strategies.config import OPTIMIZER_FLAGS


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are not frozen, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def rebuild_over(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """A function that makes the same optimizer over other parameters: those at the same places.

    Args:
        optimizer: The optimizer to follow; its groups and hyper-parameters are kept, its state is not.
        parameters: The trainable parameters of the model it was made for, in the model's order.

    Raises:
        WorkloadError: it has parameters that are not among them.
    """
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    groups = []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        foreign = [parameter for parameter in trained if id(parameter) not in place]
        if foreign:
            raise WorkloadError(
                f"the optimizer has {len(foreign)} parameter(s) that are not the model's",
                hint="Make the optimizer over the parameters of the model that you hand in, or give a function.",
            )
        options = {key: value for key, value in group.items() if key != "params" and key not in OPTIMIZER_FLAGS}
        groups.append((options, [place[id(parameter)] for parameter in trained]))
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
    groups = [
        {key: value for key, value in group.items() if key not in OPTIMIZER_FLAGS} for group in optimizer.param_groups
    ]
    options: dict[str, Any] = {name: value for name, value in optimizer.defaults.items() if name in taken}
    make: Any = kind
    return make(groups, **(options | flags))
