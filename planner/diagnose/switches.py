"""How each cause is removed while the script runs, and put back: `on()` removes it, `off()` undoes that.

A switch changes nothing that the user keeps: the process is ended afterwards, and nothing of it is saved.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from autoplan.planner.diagnose.hooks import Hooks
from autoplan.planner.diagnose.ranks import wrapped_models
from autoplan.planner.diagnose.records import Suspect

Undo = Callable[[], object]


def remove(hooks: Hooks, suspect: Suspect) -> Undo:
    """Removes a cause; returns what puts it back."""
    return SWITCHES[suspect.switch](hooks, suspect.setting)


def _skip(part: str) -> Callable[[Hooks, int], Undo]:
    def switch(hooks: Hooks, setting: int) -> Undo:
        hooks.clock.skipped.add(part)
        return lambda: hooks.clock.skipped.discard(part)

    return switch


def _set(target: Any, name: str, value: Any) -> Undo:
    before = getattr(target, name)
    setattr(target, name, value)
    return lambda: setattr(target, name, before)


def _workers(hooks: Hooks, setting: int) -> Undo:
    hooks.loaders.workers = setting
    return hooks.loaders.stop_workers


def _persistent(hooks: Hooks, setting: int) -> Undo:
    loader: Any = hooks.loaders.loader
    if loader is None:
        return lambda: None  # a rank without a loader
    if hooks.loaders.remade:
        return _workers(hooks, loader.num_workers)  # of one loader for all epochs
    vars(loader)["persistent_workers"] = True  # its own __setattr__ refuses that

    def undo() -> None:
        vars(loader)["persistent_workers"] = False
        loader._iterator = None  # its workers end with the epoch that goes over them

    return undo


def _threads(hooks: Hooks, setting: int) -> Undo:
    before = torch.get_num_threads()
    torch.set_num_threads(setting)
    return lambda: torch.set_num_threads(before)


def _gc(hooks: Hooks, setting: int) -> Undo:
    gc.disable()
    return gc.enable


def _freeze(hooks: Hooks, setting: int) -> Undo:
    gc.collect()
    gc.freeze()
    return gc.unfreeze


def _fused(hooks: Hooks, setting: int) -> Undo:
    """The fused step of the optimizer that marks the steps; its counts of steps go to the device of the parameters."""
    optimizer: Any = hooks.anchor
    before = [(group.get("fused"), group.get("foreach")) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)

    def undo() -> None:
        for group, (fused, foreach) in zip(optimizer.param_groups, before, strict=True):
            group["fused"], group["foreach"] = fused, foreach
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].cpu()

    return undo


def _needless(hooks: Hooks, setting: int) -> Undo:
    parameters = [one for group in hooks.needless().values() for one in group]
    for one in parameters:
        one.requires_grad_(False)

    def undo() -> None:
        for one in parameters:
            one.requires_grad_(True)

    return undo


def _anomaly(hooks: Hooks, setting: int) -> Undo:
    """Off, also where the script turns it on in each step."""
    was, set_enabled = torch.is_anomaly_enabled(), torch.set_anomaly_enabled
    set_enabled(False)
    torch.set_anomaly_enabled = lambda *args, **kwargs: None

    def undo() -> None:
        torch.set_anomaly_enabled = set_enabled
        set_enabled(was)

    return undo


def _communication(hooks: Hooks, setting: int) -> Undo:
    """No exchange: each rank goes on with its own gradients, as in `no_sync()`, and with its own tensors."""
    wrapped = wrapped_models(list(hooks.modules.called))
    before = [one.require_backward_grad_sync for one in wrapped]
    hooks.clock.skipped.add("communication")
    for one in wrapped:
        one.require_backward_grad_sync = False

    def undo() -> None:
        hooks.clock.skipped.discard("communication")
        for one, was in zip(wrapped, before, strict=True):
            one.require_backward_grad_sync = was

    return undo


def _single(hooks: Hooks, setting: int) -> Undo:
    """Parameters, buffers and the optimizers' states in fp32, and so the forward."""
    modules, optimizers = list(hooks.modules.called), list(hooks.optimizers)
    own: list[torch.Tensor] = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    own += [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    named = [(state, name) for state in states for name, one in state.items() if _is_double(one)]
    own = [one for one in own if _is_double(one)]

    def turn(dtype: torch.dtype) -> None:
        for one in own:
            one.data, one.grad = one.data.to(dtype), None
        for state, name in named:
            state[name] = state[name].to(dtype)
        hooks.modules.single = dtype == torch.float32

    turn(torch.float32)
    return lambda: turn(torch.float64)


def _is_double(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


SWITCHES: dict[str, Callable[[Hooks, int], Undo]] = {
    "batches": lambda hooks, _: _set(hooks.loaders, "replay", True),
    "workers": _workers,
    "persistent": _persistent,
    "saving": _skip("saving"),
    "logging": _skip("logging"),
    "evaluation": _skip("evaluation"),
    "gc": _gc,
    "freeze": _freeze,
    "threads": _threads,
    "fused": _fused,
    "padding": lambda hooks, _: _set(hooks.loaders, "crop", True),
    "needless_gradients": _needless,
    "anomaly": _anomaly,
    "float64": _single,
    "unused_rows": lambda hooks, _: _set(hooks, "left_out", [table for table, _ in hooks.unused_rows().values()]),
    "checkpointing": lambda hooks, _: _set(hooks, "keeps_activations", True),
    "communication": _communication,
    "graphs": lambda hooks, _: _set(hooks, "cut", {}),
    "bf16": lambda hooks, _: _set(hooks.modules, "autocast", True),
}
"""By name: what removes a cause, given the setting of the suspect."""


def can_fuse(optimizer: Any) -> bool:
    """Whether the optimizer has a fused step here, and does not use it."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    if type(optimizer) not in kinds or any(group.get("fused") for group in optimizer.param_groups):
        return False
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    plain = all(one.is_floating_point() and one.device.type in ("cpu", "cuda") for one in parameters)
    flags = ("differentiable", "capturable")
    return plain and not any(group.get(flag) for group in optimizer.param_groups for flag in flags)
