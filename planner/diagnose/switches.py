"""How each cause is removed while the script runs, and put back; and whether its removal reached the steps.

A switch changes nothing that the user keeps: the process is ended afterwards, and nothing of it is saved.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from autoplan.planner.diagnose.hooks import Hooks
from autoplan.planner.diagnose.ranks import wrapped_models
from autoplan.planner.diagnose.records import Suspect
from autoplan.planner.diagnose.roofline import fp32_is_exact
from autoplan.planner.trials.device_monitor import compiled_graphs

Undo = Callable[[], object]


def remove(hooks: Hooks, suspect: Suspect) -> Undo:
    """Removes a cause; returns what puts it back."""
    hooks.clock.acted = 0
    return SWITCHES[suspect.switch](hooks, suspect.setting)


def has_acted(hooks: Hooks, suspect: Suspect) -> bool:
    """Whether the steps since `remove` went without the cause; asked before it is put back."""
    still = STILL_AWAY.get(suspect.switch)
    return hooks.clock.acted > 0 if still is None else still(hooks, suspect.setting)


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
    """None by itself, and none that the script asks for with gc.collect()."""
    undo = ExitStack()
    if gc.isenabled():
        gc.disable()
        undo.callback(gc.enable)
    undo.callback(_set(gc, "collect", lambda *args, **kwargs: 0))
    hooks.collections = 0
    return undo.close


def _freeze(hooks: Hooks, setting: int) -> Undo:
    gc.collect()
    gc.freeze()
    return gc.unfreeze


def _fused(hooks: Hooks, setting: int) -> Undo:
    """The fused step of the optimizer that marks the steps; its counts of steps go to the device of the parameters."""
    optimizer: Any = hooks.anchor
    put_back = _foreach(hooks, 0)
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    counts = {id(state): state["step"].dtype for state in _counting(optimizer)}
    for parameter, state in optimizer.state.items():
        if id(state) in counts:
            state["step"] = state["step"].to(parameter.device, torch.float32)

    def undo() -> None:
        put_back()
        for state in _counting(optimizer):
            state["step"] = state["step"].to("cpu", counts.get(id(state)))

    return undo


def _counting(optimizer: Any) -> list[dict[str, Any]]:
    """The states whose count of steps is a tensor."""
    return [state for state in optimizer.state.values() if isinstance(state.get("step"), torch.Tensor)]


def _foreach(hooks: Hooks, setting: int) -> Undo:
    """The step of the optimizer that marks the steps over lists of parameters, not one after another."""
    optimizer: Any = hooks.anchor
    undo = ExitStack()
    for group in optimizer.param_groups:
        undo.callback(group.update, {name: group[name] for name in ("fused", "foreach") if name in group})
        group["foreach"] = True
    return undo.close


def _every_group(hooks: Hooks, name: str) -> bool:
    return hooks.anchor is not None and all(group.get(name) for group in hooks.anchor.param_groups)


def _tf32(hooks: Hooks, setting: int) -> Undo:
    """Products of fp32 in TF32: inputs of 10 bits of mantissa, sums in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    return lambda: torch.set_float32_matmul_precision(before)


def _together(hooks: Hooks, setting: int) -> Undo:
    """TF32, and the fused step or the one over lists."""
    undo = ExitStack()
    undo.callback(_tf32(hooks, 0))
    undo.callback((_fused if can_fuse(hooks.anchor) else _foreach)(hooks, 0))
    return undo.close


def _needless(hooks: Hooks, setting: int) -> Undo:
    parameters, undo = [one for group in hooks.needless().values() for one in group], ExitStack()
    for one in parameters:
        undo.callback(_set(one, "requires_grad", False))
    hooks.clock.acted = len(parameters)
    return undo.close


def _anomaly(hooks: Hooks, setting: int) -> Undo:
    """Off, also where the script turns it on in each step."""
    hooks.modules.anomaly, undo = False, ExitStack()
    undo.callback(torch.set_anomaly_enabled, torch.is_anomaly_enabled())
    torch.set_anomaly_enabled(False)
    undo.callback(_set(torch, "set_anomaly_enabled", lambda *args, **kwargs: None))
    return undo.close


def _profiler(hooks: Hooks, setting: int) -> Undo:
    """torch.profiler records nothing, and its steps do nothing."""
    before = dict(hooks.profilers)
    for profiler, state in before.items():
        if state == "prepared":
            profiler.start_trace()
        if state != "off":
            profiler.stop_trace()
        profiler.step = lambda: None

    def undo() -> None:
        for profiler, state in before.items():
            del profiler.step
            if state != "off":
                profiler.prepare_trace()
            if state == "recording":
                profiler.start_trace()

    return undo


def _communication(hooks: Hooks, setting: int) -> Undo:
    """No exchange: each rank goes on with its own gradients, as in `no_sync()`, and with its own tensors."""
    wrapped, undo = wrapped_models(list(hooks.modules.called)), ExitStack()
    hooks.clock.acted = len(wrapped)
    undo.callback(_skip("communication")(hooks, setting))
    for one in wrapped:
        undo.callback(_set(one, "require_backward_grad_sync", False))
    return undo.close


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


def _compile(hooks: Hooks, setting: int) -> Undo:
    """The outermost modules, compiled the first time; what cannot be compiled runs as before."""
    from torch._dynamo import config

    known, undo = hooks.compiled, ExitStack()
    for module in list(hooks.modules.called):
        if module not in known:
            module.compile()
            known[module], module._compiled_call_impl = module._compiled_call_impl, None
        undo.callback(_set(module, "_compiled_call_impl", known[module]))
    undo.callback(_set(config, "suppress_errors", True))
    return undo.close


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
    "foreach": _foreach,
    "tf32": _tf32,
    "together": _together,
    "padding": lambda hooks, _: _set(hooks.loaders, "crop", True),
    "needless_gradients": _needless,
    "compile": _compile,
    "anomaly": _anomaly,
    "profiler": _profiler,
    "float64": _single,
    "two_backwards": lambda hooks, _: _set(hooks, "leaves_out_again", True),
    "unused_rows": lambda hooks, _: _set(hooks, "left_out", [table for table, _ in hooks.unused_rows().values()]),
    "checkpointing": lambda hooks, _: _set(hooks, "keeps_activations", True),
    "communication": _communication,
    "graphs": lambda hooks, _: _set(hooks, "cut", {}),
    "bf16": lambda hooks, _: _set(hooks.modules, "autocast", True),
}
"""By name: what removes a cause, given the setting of the suspect."""


STILL_AWAY: dict[str, Callable[[Hooks, int], bool]] = {
    # workers that stay between epochs: of the loader that takes the script's place, or of its own
    "persistent": lambda hooks, _: (
        hooks.clock.acted > 0 or getattr(hooks.loaders.loader, "_iterator", None) is not None
    ),
    "gc": lambda hooks, _: hooks.collections == 0,
    "freeze": lambda hooks, _: gc.get_freeze_count() > 0,
    "threads": lambda hooks, setting: torch.get_num_threads() == setting,
    "fused": lambda hooks, _: _every_group(hooks, "fused"),
    "foreach": lambda hooks, _: _every_group(hooks, "foreach"),
    "tf32": lambda hooks, _: not fp32_is_exact(),
    "together": lambda hooks, _: not fp32_is_exact() and any(_every_group(hooks, one) for one in ("fused", "foreach")),
    "needless_gradients": lambda hooks, _: hooks.clock.acted > 0 and not hooks.needless(),
    "anomaly": lambda hooks, _: not hooks.modules.anomaly,
    "profiler": lambda hooks, _: not torch._C._autograd._profiler_enabled(),
    "float64": lambda hooks, _: hooks.modules.single and not any(map(_is_double, hooks.trained())),
    "unused_rows": lambda hooks, _: bool(hooks.left_out),
    "compile": lambda hooks, _: bool(hooks.compiled) and compiled_graphs() > 0,
    "graphs": lambda hooks, _: bool(hooks.kept),
}
"""By name: whether a cause is still away, where that is a state. Of the others `Clock.acted` counts what was left out.
"""


def can_fuse(optimizer: Any) -> bool:
    """Whether the optimizer has a fused step here, and does not use it. Adagrad's is for the CPU alone."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    if type(optimizer) not in kinds or any(group.get("fused") for group in optimizer.param_groups):
        return False
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    devices = ("cpu",) if type(optimizer) is torch.optim.Adagrad else ("cpu", "cuda")
    plain = all(one.is_floating_point() and one.device.type in devices for one in parameters)
    return plain and _is_ordinary(optimizer, parameters)


def can_foreach(optimizer: Any) -> bool:
    """Whether the optimizer steps one parameter after another, and could go over lists of them.

    It does so by itself on CUDA, unless it was made with foreach=False; on a CPU lists gain nothing.
    """
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    parameters = [one for group in groups for one in group["params"]]
    if not type(optimizer).__module__.startswith("torch.optim.") or any(group.get("fused") for group in groups):
        return False
    loops = any(group.get("foreach", True) is False for group in groups)
    numbers = not any(isinstance(group.get("lr"), torch.Tensor) for group in groups)
    return loops and numbers and _is_ordinary(optimizer, parameters)


def _is_ordinary(optimizer: Any, parameters: list[torch.Tensor]) -> bool:
    """Whether nothing about it rules a fused step, or one over lists, out."""
    flags = ("differentiable", "capturable")
    sparse = any(one.grad is not None and one.grad.is_sparse for one in parameters)
    return not sparse and not any(group.get(flag) for group in optimizer.param_groups for flag in flags)
