"""Training settings as numbers: optimizer groups, clipping, schedule, seed and dropout rates of a workload.

In: a workload and its model (the meta device will do). Out: a `TrainingFacts`, which the plan keeps, so that an export
writes the workload's own values and `plan.prepare` can compare. The records load no torch.
"""

from __future__ import annotations

import collections
import functools
import inspect
import math
import re
import warnings
from typing import TYPE_CHECKING, Any

from pydantic import Field

from autoplan.record import Record

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoplan.strategies.workloads.workload import Workload

SCHEDULE_STEPS = 16
"""How many of the first learning rates of a schedule are kept."""

STEP_FLAGS = ("foreach", "fused")
"""Options of torch's optimizers that say how a step is computed, not what it computes: the knob optimizer_step."""

_NO_OPTIONS = ("initial_lr", "param_names", *STEP_FLAGS)


class GroupFacts(Record):
    """One parameter group of the workload's optimizer."""

    tensors: int
    elements: int = Field(description="numbers in all its parameters")
    options: dict[str, Any] = Field(description="lr, weight_decay, betas, momentum, ... as plain values")
    unread: tuple[str, ...] = Field(default=(), description="options that are no plain values")
    names: tuple[str, ...] = Field(
        default=(),
        description="its parameters, with * for the numbers of a name where all that match are in this group; empty "
        "where it is the only group and has all that train",
    )


class ScheduleFacts(Record):
    """The learning-rate schedule of a workload."""

    kind: str = Field(description="its class: torch.optim.lr_scheduler.StepLR")
    options: dict[str, Any] | None = Field(description="the arguments that make it again; None: see `reason`")
    function: str | None = Field(
        default=None, description="of a LambdaLR: the function of transformers that it calls; the options are its own"
    )
    reason: str | None = Field(default=None, description="why it cannot be made again from data")
    learning_rates: tuple[tuple[float, ...], ...] = Field(
        description="of the first steps, each with one rate per parameter group"
    )


class TrainingFacts(Record):
    """The settings that a workload trains with."""

    optimizer: str = Field(description="the class of the optimizer: torch.optim.adamw.AdamW")
    step_form: str | None = Field(
        default=None, description="the value of the knob optimizer_step that its flags ask for; None: torch chooses"
    )
    groups: tuple[GroupFacts, ...]
    unheld: tuple[str, ...] = Field(
        default=(), description="parameters that could train and are in no group, named as those of a group"
    )
    max_grad_norm: float | None = Field(description="clip the norm of all gradients to this; None: no clipping")
    schedule: ScheduleFacts | None
    seed: int
    dropout: dict[str, int] = Field(default_factory=dict, description="dropout modules by rate, rates above 0 only")
    own_checkpointing: bool = Field(
        default=False, description="the model has activation checkpointing of its own switched on"
    )

    @property
    def main_group(self) -> GroupFacts:
        """The group with the most parameters."""
        return max(self.groups, key=lambda group: group.elements)


def read_training_facts(workload: Workload, model: nn.Module) -> TrainingFacts:
    """The settings that a workload trains with, read from the optimizer and the schedule that it makes.

    Args:
        workload: The workload.
        model: Its model, on any device.
    """
    from autoplan.strategies.workloads.optimizers import step_form, trainable
    from autoplan.strategies.workloads.training_mode import own_checkpointing

    optimizer = workload.build_optimizer(trainable(model))
    names = _group_names(optimizer, model)
    return TrainingFacts(
        optimizer=class_name(type(optimizer)),
        step_form=step_form(optimizer),
        groups=read_groups(optimizer, model),
        unheld=_shortened(names, len(names) - 1),
        max_grad_norm=workload.max_grad_norm,
        schedule=read_schedule(workload, optimizer),
        seed=workload.seed,
        dropout=dropout_rates(model),
        own_checkpointing=bool(own_checkpointing(model)),
    )


def own_checkpointing_text(checkpointing: str) -> str:
    """A sentence that says what a value of the knob does with the model's own checkpointing."""
    return (
        "the model has activation checkpointing of its own switched on (gradient_checkpointing_enable); it is off "
        f"during the steps, where checkpointing={checkpointing} decides what is recomputed, and on again after each"
    )


def class_name(kind: type) -> str:
    """Where a class is: module and qualified name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def read_groups(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> tuple[GroupFacts, ...]:
    """The parameter groups of an optimizer, with their learning rates before a schedule changed them.

    Args:
        optimizer: The optimizer.
        model: The model that has its parameters, for their names; None: groups without names.
    """
    names = [] if model is None else _group_names(optimizer, model)
    named = bool(names) and (len(optimizer.param_groups) > 1 or bool(names[-1]))
    found = []
    for index, group in enumerate(optimizer.param_groups):
        plain = {key: _plain(value) for key, value in group.items() if key not in ("params", *_NO_OPTIONS)}
        if "initial_lr" in group:
            plain["lr"] = _plain(group["initial_lr"])
        found.append(
            GroupFacts(
                tensors=len(group["params"]),
                elements=sum(parameter.numel() for parameter in group["params"]),
                options={key: value for key, value in plain.items() if value is not _NOT_PLAIN},
                unread=tuple(key for key, value in plain.items() if value is _NOT_PLAIN),
                names=_shortened(names, index) if named else (),
            )
        )
    return tuple(found)


def _group_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The parameter names of each group, and last of those that could train and are in no group."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    names = [[name_of.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    held = {name for group in names for name in group}
    return [*names, [name for name, p in model.named_parameters() if p.requires_grad and name not in held]]


def optimizer_differences(searched: TrainingFacts, optimizer: torch.optim.Optimizer) -> list[str]:
    """How an optimizer differs from that of the search, in words; empty: it trains the same.

    Learning rates are those before a schedule changed them. How many tensors a group has counts only where both
    optimizers have the same number of them in all: over ranks, each has a part.
    """
    kind, groups = class_name(type(optimizer)), read_groups(optimizer, None)
    found = [] if kind == searched.optimizer else [f"it is {kind}, not {searched.optimizer}"]
    if len(groups) != len(searched.groups):
        return [*found, f"it has {len(groups)} parameter group(s), not {len(searched.groups)}"]
    same_total = sum(group.tensors for group in groups) == sum(group.tensors for group in searched.groups)
    for number, (here, then) in enumerate(zip(groups, searched.groups, strict=True)):
        where = f" in group {number}" if len(groups) > 1 else ""
        found += [
            f"{key}{where} is {here.options[key]}, not {then.options[key]}"
            for key in then.options
            if key in here.options and not _same_value(here.options[key], then.options[key])
        ]
        if same_total and here.tensors != then.tensors:
            found.append(f"group {number} has {here.tensors} parameters, not {then.tensors}")
    return found


def schedule_difference(then: ScheduleFacts | None, here: ScheduleFacts | None) -> list[str]:
    """How a schedule differs from that of the search, in a sentence; empty: it gives the same rates.

    Compared are the class, the arguments that can be read from it, and the learning rates of the first steps.
    """

    def words(facts: ScheduleFacts | None) -> str:
        if facts is None:
            return "none"
        rates = ", ".join(f"{max(step):.4g}" for step in facts.learning_rates[:4])
        options = ", ".join(f"{name}={value}" for name, value in (facts.options or {}).items())
        return f"{facts.function or facts.kind.rpartition('.')[2]}({options}) with the rates {rates}, ..."

    if then is None or here is None:
        same = then is here
    else:
        one, other = ([facts.kind, facts.function, *sorted((facts.options or {}).items())] for facts in (then, here))
        rates = [[list(step) for step in facts.learning_rates] for facts in (then, here)]
        same = _same_value(one, other) and _same_value(*rates)
    return [] if same else [f"the schedule is {words(here)}, and the search had {words(then)}"]


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same_value, one, other))
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-6) if numbers else one == other  # a tensor's rate is rounded to fp32


def without_numbers(name: str) -> str:
    """A parameter's name with * for each number in it."""
    return re.sub(r"\d+", "*", name)


def _shortened(names: list[list[str]], index: int) -> tuple[str, ...]:
    """The names of one group, with * for numbers where no other group has a name of the same pattern."""
    others = {without_numbers(name) for number, group in enumerate(names) if number != index for name in group}
    patterns = {name: without_numbers(name) for name in names[index]}
    return tuple(dict.fromkeys(name if pattern in others else pattern for name, pattern in patterns.items()))


_NOT_PLAIN: Any = object()


def _plain(value: Any) -> Any:
    """A value as JSON has it; _NOT_PLAIN where that cannot be."""
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return _NOT_PLAIN if any(part is _NOT_PLAIN for part in parts) else parts
    return _NOT_PLAIN


def read_schedule(workload: Workload, optimizer: torch.optim.Optimizer) -> ScheduleFacts | None:
    """The schedule that a workload makes; None: it has none.

    Args:
        workload: The workload.
        optimizer: Of that workload; its learning rates are changed.
    """
    if workload.build_schedule is None:
        return None
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    schedule = workload.build_schedule(optimizer)
    if schedule is None:
        return None
    function, options = _of_transformers(schedule)
    reason = None
    if function is None:
        options = _arguments(schedule)
        if options is None:
            reason = "its arguments cannot be read from it (a function of your own, or other schedules inside it)"
    learning_rates = _first_rates(schedule)
    if function is None and options is not None:
        made_again = _rates_when_made_again(type(schedule), options, rates)
        if made_again != learning_rates:
            options, reason = None, "the schedule that its arguments make has other learning rates"
    return ScheduleFacts(
        kind=class_name(type(schedule)),
        options=options,
        function=function,
        reason=reason,
        learning_rates=learning_rates,
    )


def _of_transformers(schedule: Any) -> tuple[str | None, dict[str, Any] | None]:
    """The function of transformers that a LambdaLR calls, and its keyword arguments."""
    functions = getattr(schedule, "lr_lambdas", None) or [None]
    first = functions[0]
    if any(function is not first for function in functions):
        return None, None
    inner = first.func if isinstance(first, functools.partial) else first
    if getattr(inner, "__module__", "") != "transformers.optimization" or "<locals>" in inner.__qualname__:
        return None, None
    keywords = dict(first.keywords) if isinstance(first, functools.partial) else {}
    if any(_plain(value) is _NOT_PLAIN for value in keywords.values()) or getattr(first, "args", None):
        return None, None
    return inner.__qualname__, keywords


def _arguments(schedule: Any) -> dict[str, Any] | None:
    """The arguments of a schedule of torch, from its attributes of the same names; None if one cannot be read."""
    if not type(schedule).__module__.startswith("torch.optim."):
        return None
    found = {}
    for name in list(inspect.signature(type(schedule)).parameters)[1:]:
        if name in ("last_epoch", "verbose"):
            continue
        value = getattr(schedule, name, _NOT_PLAIN)
        value = _plain(sorted(value.elements()) if isinstance(value, collections.Counter) else value)  # MultiStepLR
        if value is _NOT_PLAIN:
            return None
        found[name] = value
    return found


def _first_rates(schedule: Any) -> tuple[tuple[float, ...], ...]:
    """The learning rates of the first steps; fewer where the schedule ends or cannot be stepped by itself."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped
        for _ in range(SCHEDULE_STEPS):
            found.append(tuple(float(group["lr"]) for group in schedule.optimizer.param_groups))
            try:
                schedule.step()
            except Exception:  # its last step (OneCycleLR), or one that wants a metric (ReduceLROnPlateau)
                break
    return tuple(found)


def _rates_when_made_again(
    kind: Any, options: dict[str, Any], rates: list[float]
) -> tuple[tuple[float, ...], ...] | None:
    """The first learning rates of the schedule that these arguments make over an optimizer with these rates."""
    import torch

    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    try:
        return _first_rates(kind(torch.optim.SGD(groups), **options))
    except Exception:
        return None


def dropout_rates(model: nn.Module) -> dict[str, int]:
    """How many dropout modules a model has, by rate; rates above 0 only."""
    from torch import nn

    rates = [module.p for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    return dict(collections.Counter(str(rate) for rate in rates if rate > 0))
