"""The state of model and optimizer in a form that loads under any combination of degrees.

Names are the plain model's. Tensors are whole, or DTensors whose shards are contiguous pieces, which is what
torch.distributed.checkpoint can write; a fused query-key-value weight is put into such pieces on the way out and back
into this rank's columns on the way in. The optimizer's state is flat (`state.NAME.exp_avg`, `param_groups.NAME.lr`),
so that each pipeline stage writes and reads its own part.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from autoplan.strategies.analysis.structure import clean_name
from autoplan.strategies.techniques.mesh import is_fused, local_tensor, whole_tensor
from autoplan.strategies.techniques.rounded_steps import MASTER, held_by, rounding_of

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
# How an optimizer's step runs: the plan decides it, not the state.
_STEP_FLAGS = ("foreach", "fused", "capturable", "differentiable")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def collect_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, has_stepped: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's state and the optimizer's, to be written; all ranks call it.

    Before its first step an optimizer has no state, and a loader of checkpoints needs to know what there will be. torch
    makes a step without gradients for that, which leaves moments and a count of steps. Here they are taken out of the
    optimizer again, and the state has zeros for all of them, which `restore_state` reads as no step.

    An optimizer that keeps its state elsewhere than in `state` gets no such step, which would go into that state.

    Args:
        model: Whose state it is.
        optimizer: Over its parameters.
        has_stepped: The optimizer took a step.
    """
    has_state = bool(optimizer.state)
    elsewhere = has_stepped or bool(inner_optimizers(optimizer))
    unseen = without_steps(optimizer) if elsewhere else _first_step_unseen(optimizer)
    with contextlib.nullcontext() if has_state else unseen:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    if not has_state:
        optimizer.state.clear()
        optimizer_state = {
            key: _zero(value) if key.startswith("state.") else value for key, value in optimizer_state.items()
        }
    optimizer_state = {key: value for key, value in optimizer_state.items() if not key.endswith(f".{MASTER}")}
    model_state = model_state | _masters(model, optimizer)
    tied = _tied_names(model)
    named = {_with_names(key, tied): _to_contiguous(value) for key, value in optimizer_state.items()}
    return {name: _to_contiguous(value) for name, value in model_state.items()}, named


def restore_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
    *,
    at_once: bool = False,
) -> None:
    """Puts a state back that collect_state gave, under the same or another config; all ranks call it.

    Args:
        model, optimizer: Those of the run.
        model_state, optimizer_state: What collect_state gave.
        at_once: The optimizer had a state when it was made, as Adagrad, and not from its first step on.
    """
    layouts = {name: value.placements for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    plain_layouts = {clean_name(name): placements for name, placements in layouts.items()}
    held = {clean_name(name) for name, _ in model.named_parameters()}
    back = {early: late for late, early in _tied_names(model).items() if early not in held}
    flags = [{flag: group[flag] for flag in _STEP_FLAGS if flag in group} for group in optimizer.param_groups]
    keys = [set(group) for group in optimizer.param_groups]
    own = {_with_names(key, back): value for key, value in optimizer_state.items()}
    for parameter in held_by(optimizer):
        parameter.grad = None  # it was made with other weights
    with _room_for(own, model, optimizer):
        set_state_dict(
            model,
            optimizer,
            model_state_dict={name: _to_layout(value, plain_layouts.get(name)) for name, value in model_state.items()},
            optim_state_dict={key: _to_layout(value, plain_layouts.get(_parameter(key))) for key, value in own.items()},
            options=_OPTIONS,
        )
    _set_masters(model, optimizer, model_state, plain_layouts)
    for group, kept in zip(optimizer.param_groups, flags, strict=True):
        group.update(kept)
    if _is_of_no_step(optimizer_state) and not at_once:
        optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, keys, strict=True):
            for key in group.keys() - before:
                del group[key]  # its first step makes it
    place_steps(optimizer)


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that an optimizer holds in its attributes, and whose state is not its own."""
    found: list[Any] = []
    for value in vars(optimizer).values():
        found += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [one for one in found if isinstance(one, torch.optim.Optimizer) and one.state is not optimizer.state]


@contextlib.contextmanager
def without_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer does not step meanwhile."""
    before = vars(optimizer).get("step")
    optimizer.__dict__["step"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del optimizer.__dict__["step"]
        if before is not None:
            optimizer.__dict__["step"] = before


@contextlib.contextmanager
def _first_step_unseen(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, torch makes the first step of an optimizer, to see its state. The hooks on a step do not run.

    Values of the groups are put back before they are read. One that the step has added is zero there, as the state is,
    and is taken out afterwards.
    """
    hooks = {name: vars(optimizer)[name] for name in _STEP_HOOKS if name in vars(optimizer)}
    kept = [dict(group) for group in optimizer.param_groups]
    tensors = [(value, value.clone()) for group in kept for value in group.values() if isinstance(value, torch.Tensor)]

    @torch.no_grad()
    def put_back(*_: Any) -> None:
        for tensor, before in tensors:
            tensor.copy_(before)
        for group, own in zip(optimizer.param_groups, kept, strict=True):
            group.update({key: own.get(key, _zero(value)) for key, value in group.items()})

    handle = optimizer.register_state_dict_pre_hook(put_back, prepend=True)
    vars(optimizer).update({name: {} for name in hooks})
    try:
        yield
    finally:
        vars(optimizer).update(hooks)
        handle.remove()
        put_back()
        for group, own in zip(optimizer.param_groups, kept, strict=True):
            for key in group.keys() - own.keys():
                del group[key]


@contextlib.contextmanager
def _room_for(saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, an optimizer has the keys of a saved state, since torch loads no others.

    torch would get them from a step. That runs hooks, and gives a state to a parameter that no backward had reached, of
    which none was saved. A group without parameters is taken out: torch finds the values of a group by a parameter.
    """
    names = collections.defaultdict(list)
    for name, parameter in _parameters(model):
        names[id(parameter)].append(name)
    found = _keys_by_parameter(saved, {name for some in names.values() for name in some})
    states, groups = dict(optimizer.state), optimizer.param_groups
    for parameter in held_by(optimizer):
        of_it = [key for name in names[id(parameter)] for key in found["state", name]]
        optimizer.state[parameter] = dict.fromkeys(of_it)
    full = [group for group in groups if group["params"]]
    for group in full:
        for name in names[id(group["params"][0])]:
            for key in found["param_groups", name]:
                group.setdefault(key, saved[f"param_groups.{name}.{key}"])
    if len(full) < len(groups):
        optimizer.param_groups = full
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(states)
        raise
    finally:
        if len(full) < len(groups):
            loaded = iter(optimizer.param_groups)
            optimizer.param_groups = [next(loaded) if group["params"] else group for group in groups]
    for empty in [one for one, state in optimizer.state.items() if state == {}]:
        del optimizer.state[empty]


def _keys_by_parameter(saved: Iterable[str], names: Collection[str]) -> dict[tuple[str, str], list[str]]:
    """What is saved of parameters: by `state` or `param_groups` and a name, the keys there."""
    found = collections.defaultdict(list)
    for key in saved:
        kind, *parts = key.split(".")
        for end in range(1, len(parts)):
            if (name := ".".join(parts[:end])) in names:
                found[kind, name].append(parts[end])
    return found


def _zero(value: Any) -> Any:
    """A part of an optimizer's state in which nothing was counted or summed; what is no number as it is."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return type(value)(0) if isinstance(value, bool | int | float) else value


def _is_of_no_step(optimizer_state: Mapping[str, Any]) -> bool:
    """Whether the state is that of an optimizer before its first step: all numbers in it are zero."""
    numbers = [value for key, value in optimizer_state.items() if key.startswith("state.")]
    tensors = (local_tensor(value) for value in numbers if isinstance(value, torch.Tensor))
    others = (value for value in numbers if isinstance(value, bool | int | float))
    return bool(numbers) and not any(others) and not any(bool(tensor.any()) for tensor in tensors)


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Moves every count of steps (the state `step`) to where the flags of its group want it.

    That is the parameter's device, in fp32, for a fused or capturable step, whose kernels read it there, and the host
    for any other form, which reads it as a number and would wait for the device ("special device hosting for step" in
    torch/optim/adam.py). An optimizer without those flags keeps it where it is. `load_state_dict` goes by the flags
    that were saved, not by those of the plan.
    """
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        if not on_device and "fused" not in group and "capturable" not in group:
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            step = state.get("step")
            if isinstance(step, torch.Tensor):
                state["step"] = step.to(parameter.device, torch.float32) if on_device else step.to("cpu")


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the plain model's names, each tied one by all of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield clean_name(name), parameter


def _masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The fp32 master copies of parameters that are kept in bf16: what is saved of the model."""
    rounding = rounding_of(optimizer)
    if rounding is None:
        return {}
    found = ((name, rounding.master(parameter)) for name, parameter in _parameters(model))
    return {name: master for name, master in found if master is not None}


def _set_masters(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_state: Mapping[str, Any],
    layouts: Mapping[str, tuple[Placement, ...]],
) -> None:
    """Puts the fp32 master copies back, and rounds the parameters from them."""
    rounding = rounding_of(optimizer)
    if rounding is not None:
        for name, parameter in _parameters(model):
            if name in model_state:
                rounding.set_master(parameter, _to_layout(model_state[name], layouts.get(name)))


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Of a pipeline: the last stage's name of a tied parameter, to the first stage's."""
    return dict(getattr(model, "tied_over_stages", {}))


def _with_names(key: str, names: Mapping[str, str]) -> str:
    """An optimizer key with the parameter in it called otherwise."""
    parameter = _parameter(key)
    if parameter in names:
        start = key.index(parameter)
        return key[:start] + names[parameter] + key[start + len(parameter) :]
    return key


def _parameter(key: str) -> str:
    """The parameter's name in `state.NAME.exp_avg` or `param_groups.NAME.lr`."""
    return key.partition(".")[2].rpartition(".")[0]


def _to_contiguous(value: Any) -> Any:
    """A tensor whose shards on the tp axis are contiguous."""
    if not isinstance(value, DTensor):
        return value
    axes = value.device_mesh.mesh_dim_names or (None,) * value.device_mesh.ndim
    wanted = [
        Shard(placement.dim) if is_fused(placement, axis) else placement  # type: ignore[attr-defined]
        for placement, axis in zip(value.placements, axes, strict=True)
    ]
    return _relaid(value, wanted)


def _to_layout(value: Any, placements: tuple[Placement, ...] | None) -> Any:
    """A tensor in the layout that the model holds it in."""
    if not isinstance(value, DTensor) or placements is None:
        return value
    return _relaid(value, placements)


def _relaid(value: DTensor, placements: Any) -> DTensor:
    if tuple(value.placements) == tuple(placements):
        return value
    # Through the whole tensor: torch does not document how it redistributes strided shards.
    return distribute_tensor(whole_tensor(value), value.device_mesh, list(placements), src_data_rank=None)
