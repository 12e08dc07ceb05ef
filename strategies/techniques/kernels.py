"""The kernels knob: Liger's Triton kernels for norms, rotary embeddings and gated MLPs of models of transformers.

Liger replaces methods on a model's modules, and besides names in the file of transformers that defines the model: there
its functions for rotary embeddings are found, and its classes for models to come. That would hold for all models of the
process. So those names are put back at once, and each module whose code looks one of the replaced functions up gets a
copy of its method that finds Liger's. Only this model is changed; the loss stays the workload's own.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from typing import Any

from torch import nn

from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure, language_models
from autoplan.strategies.techniques.base import Build, check_applies
from autoplan.strategies.workloads.workload import Workload

LIGER_INSTALL = 'pip install "autoplan[cuda]" (or liger-kernel)'


class KernelsStrategy:
    """own: as the model has them; liger: Liger's, where it knows the model."""

    name = "kernels"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """liger on CUDA, where liger-kernel is installed and knows a model of transformers in this one."""
        return offer(self.name, ("own",), {"liger": reason_against_liger(structure.model, device)})

    def apply(self, build: Build) -> None:
        """Has the model run on Liger's kernels, in place.

        Raises:
            ConfigError: no CUDA, no liger-kernel, or it does not know the model.
        """
        if build.config.kernels == "own":
            return
        check_applies(build.config, self.name, reason_against_liger(build.model, build.device.type))
        if not use_liger(build.model):
            check_applies(build.config, self.name, "Liger found nothing in this model to replace")


def reason_against_liger(model: nn.Module, device: str) -> str | None:
    """Why Liger's kernels cannot be used; None if they can."""
    reasons = [] if device == "cuda" else ["Liger's kernels are written in Triton, for GPUs"]
    if importlib.util.find_spec("liger_kernel") is None:
        reasons.append(f"liger-kernel is not installed: {LIGER_INSTALL}")
    if reasons:
        return "; ".join(reasons)
    kinds = [str(getattr(inner.config, "model_type", "")) for inner in language_models(model)]
    if not kinds:
        return "the model is not one of transformers and holds none"
    if not any(liger_function(kind) for kind in kinds):
        return f"liger-kernel has no kernels for models of type {', '.join(sorted(set(kinds)))}"
    return None


def liger_function(model_type: str) -> Any:
    """The function by which Liger changes models of a type of transformers; None: Liger does not know the type."""
    from liger_kernel.transformers import monkey_patch

    return monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)


def use_liger(model: nn.Module) -> int:
    """Has the models of transformers in a model run on Liger's kernels; returns how many modules were changed."""
    changed = 0
    for inner in language_models(model):
        apply = liger_function(str(getattr(inner.config, "model_type", "")))
        if apply is not None:
            changed += _apply_to_instance(apply, inner)
    return changed


def _apply_to_instance(apply: Any, model: nn.Module) -> int:
    before = {id(module): vars(module).get("forward") for module in model.modules()}
    names = sorted({type(module).__module__ for module in model.modules()})
    files: dict[str, Any] = {name: sys.modules[name] for name in names if name.startswith("transformers.models.")}
    kept = {name: dict(vars(file)) for name, file in files.items()}
    classes = {
        kind: dict(vars(kind))
        for name, own in kept.items()
        for kind in own.values()
        if isinstance(kind, type) and kind.__module__ == name
    }
    losses = dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy"), False)  # the loss is the workload's
    taken = inspect.signature(apply).parameters
    try:
        apply(model=model, **{name: value for name, value in losses.items() if name in taken})
        found = {name: _replaced_functions(file, kept[name]) for name, file in files.items()}
    finally:
        for name, file in files.items():
            vars(file).update({key: value for key, value in kept[name].items() if vars(file).get(key) is not value})
        for kind, attributes in classes.items():
            for key, value in attributes.items():
                if vars(kind).get(key) is not value:
                    setattr(kind, key, value)
    for module in model.modules():
        replaced = found.get(type(module).__module__, {})
        if "forward" not in vars(module) and (used := _uses(type(module).forward, replaced)):
            vars(module)["forward"] = types.MethodType(_with_globals(type(module).forward, used), module)
    return sum(vars(module).get("forward") is not before[id(module)] for module in model.modules())


def _replaced_functions(file: Any, before: dict[str, Any]) -> dict[str, Any]:
    """The functions that a file finds under its names now, where it found others before."""
    now = vars(file)
    return {
        name: now[name]
        for name, value in before.items()
        if isinstance(value, types.FunctionType) and now.get(name) is not value
    }


def _uses(function: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Those of some global names that a function's code looks up."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return {} if code is None else {name: value for name, value in names.items() if name in code.co_names}


def _with_globals(function: Any, names: dict[str, Any]) -> Any:
    """A copy of a function that finds other objects under some global names."""
    inner = inspect.unwrap(function)
    copy = types.FunctionType(
        inner.__code__, {**inner.__globals__, **names}, inner.__name__, inner.__defaults__, inner.__closure__
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy
