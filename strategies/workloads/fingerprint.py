"""Hashes of each piece of code and of each value that a training reaches, by name, so that what changed can be named.

In: the parts of a workload (model, loss, optimizer, schedule, batches), as a search had them or as `plan.prepare` gets
them. Out: for each part, a hash by name: `Block.forward`, `SCALE in the loss`, `attributes of Block`, `helper.py`.
Compared are the names that both have, so a model that was a function in the search may be an instance here.

`Describer` (digests.py) goes over the same objects and stays another walk: a study's identity needs the order of items,
which object is met again, and all that a foreign object holds (two transforms in the other order are another training).
Names that a function and an instance both have can have none of that.

Code is hashed as its syntax tree, so comments, docstrings and line numbers do not count; code without a source text
(exec) as its bytecode, which is compared within one version of Python only.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import linecache
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from autoplan.strategies.workloads.digests import (
    GRADIENT_HOOKS,
    MODULE_HOOKS,
    array_digest,
    bytecode,
    code_functions,
    digest,
    filled_cells,
    global_names,
    is_own_class,
    is_own_code,
    length_of,
    module_files,
    qualified_name,
    sampled,
    stored_tensors,
    tensor_digest,
    variables_read,
)
from autoplan.strategies.workloads.function_file import files_imported_in, local_sources

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload

TRAINING_PARTS = ("model", "loss", "optimizer", "schedule")
"""Parts without which another thing is trained; the others are `data` and `weights`."""

COPIES = ("deepcopy", "copy_model")
"""The functions with which a build_model copies a model that the user handed in."""

_NOT_TRAINING = ("gradient_checkpointing", "config", "generation_config", *vars(nn.Module()))
"""Attributes of a module that say nothing by themselves, or that the walk looks at in another way."""

_PROGRESS = ("_step_count", "last_epoch", "_last_lr", "optimizer")
"""Of a schedule, how far it has come and what it is over."""

_WALKED = ("autoplan.strategies.workloads.loops.", "torch.optim.lr_scheduler")
"""Modules whose objects are looked into as the user's own are: what holds a loss, a count; schedules."""

NUMERICS = (
    "MKL_CBWR",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Environment variables by which libraries compute other numbers."""


def fingerprints_of(workload: Workload) -> dict[str, dict[str, str]]:
    """The fingerprint of each part of a workload; nothing is built or run."""
    return fingerprints(
        model=workload.build_model,
        loss=workload.loss,
        optimizer=workload.build_optimizer,
        schedule=workload.build_schedule,
        make_batch=workload.make_batch,
    )


def fingerprints(
    *, model: Any = None, loss: Any = None, optimizer: Any = None, schedule: Any = None, make_batch: Any = None
) -> dict[str, dict[str, str]]:
    """The fingerprint of each part that is given (not None); of a function that copies a model, that model's."""
    found: dict[str, dict[str, str]] = {}
    if isinstance(model, functools.partial) and getattr(model.func, "__name__", "") in COPIES:
        model = model.args[0]
    if model is not None:
        found["model"] = Collector("the model", model).result()
        if isinstance(model, nn.Module):
            weights = {name: tensor_digest(tensor) for name, tensor in stored_tensors(model).items()}
            unsaved = {name: tensor_digest(one) for name, one in model.named_buffers() if name not in weights}
            found["weights"] = {
                "the weights": f"value:{digest(weights)}",
                "the buffers that no checkpoint has": f"value:{digest(unsaved)}",
            }
        found["environment"] = {
            "the default dtype": f"value:{torch.get_default_dtype()}",
            **{f"${name}": f"value:{os.environ.get(name)}" for name in NUMERICS},
        }
    for part, value, words in (("loss", loss, "the loss"), ("schedule", schedule, "the schedule")):
        if value is not None:
            found[part] = Collector(words, value).result()
    if optimizer is not None:  # its class, groups and values are compared as numbers; here, code of the user's own
        given = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        collector = Collector("the optimizer", given)
        found["optimizer"] = {name: value for name, value in collector.result().items() if name in collector.methods}
    if make_batch is not None:
        found["data"] = Collector(getattr(make_batch, "called", "make_batch"), make_batch).result()
    return found


def changed_names(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names that both have with other hashes; bytecode (`code3.11:`) is compared with that of its version alone."""

    def differ(one: str, other: str) -> bool:
        kinds = one.partition(":")[0], other.partition(":")[0]
        return one != other and (kinds[0] == kinds[1] or not any(kind.startswith("code") for kind in kinds))

    changed = [name for name, value in now.items() if name in then and differ(then[name], value)]
    return sorted(changed, key=lambda name: (name.startswith("attributes of"), name))  # code says more


class Collector:
    """Walks over what a part of a training reaches, and keeps a hash for each piece by name.

    Args:
        role: The name of what is walked over first: `the loss`. Its own name does not count.
        value: What that is.
    """

    def __init__(self, role: str, value: Any) -> None:
        self.role = role
        self.methods: set[str] = set()
        self._found: dict[str, set[str]] = {}
        self._seen: dict[int, Any] = {}
        self._read: set[Path] = set()
        self._root = True
        self.add(value)

    def result(self) -> dict[str, str]:
        """The hashes by name; of pieces of one name, one hash over all."""
        return {
            name: next(iter(found)) if len(found) == 1 else f"several:{digest(sorted(found))}"
            for name, found in sorted(self._found.items())
        }

    def add(self, value: Any) -> None:
        """Walks over a function, a class, a module, or another object."""
        name, self._root = (self.role if self._root else ""), False
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, functools.partial):
            self._partial(value, name)
        elif inspect.ismethod(value):
            self.add(value.__func__)
            self.add(value.__self__)
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, nn.Module):
            self._module_tree(value)
        elif isinstance(value, types.ModuleType):
            self._files(module_files(value))
        elif isinstance(value, torch.optim.Optimizer):
            self.add(type(value))
        else:
            self._object(value, name)

    def _files(self, files: list[Path]) -> None:
        for file in files:
            if file not in self._read:
                self._read.add(file)
                for name, found in local_sources(file).items():
                    self._keep(name, f"file:{found}")

    def _keep(self, name: str, hashed: str) -> None:
        self._found.setdefault(name, set()).add(hashed)

    def _reach(self, value: Any, label: str) -> None:
        """Takes in what a piece of code names: code is walked over, a value is hashed under its label."""
        if isinstance(value, functools.partial):
            given = [len(value.args), *sorted(value.keywords)]
            self._keep(label, f"name:{qualified_name(value.func)}{given}")
            self.add(value)
        elif isinstance(value, types.ModuleType | nn.Module | torch.optim.Optimizer):
            self.add(value)
        elif inspect.ismethod(value) or isinstance(value, types.FunctionType | type):
            self._keep(label, f"name:{value.__module__ if not _is_own(value) else ''}.{qualified_name(value)}")
            if _is_own(value):
                self.add(value)
            else:
                for cell in filled_cells(value) if isinstance(value, types.FunctionType) else ():
                    self._reach(cell.cell_contents, label)
        elif isinstance(value, types.BuiltinFunctionType):  # torch's activations are
            self._keep(label, f"name:{value.__module__}.{value.__qualname__}")
        elif is_plain(value):
            self._keep(label, f"value:{digest(plain(value))}")
            if dataclasses.is_dataclass(value):
                self.add(type(value))
        else:
            self.add(value)

    def _partial(self, value: Any, name: str) -> None:
        self._root = bool(name)
        if _is_own(value.func) or isinstance(value.func, functools.partial):
            self.add(value.func)
        self._root = False
        where = name or qualified_name(value.func)
        for number, part in enumerate(value.args):
            self._reach(part, f"argument {number + 1} of {where}")
        for key, part in value.keywords.items():
            self._reach(part, f"{key} of {where}")

    def _function(self, function: Any, name: str) -> None:
        where = name or qualified_name(function)
        if is_own_code(function.__code__):
            self._keep(where, code_hash(function, named=not name))
            for key, part in variables_read(function.__code__).items():
                self._keep(f"${key} in {where}", f"value:{part}")
            home = function.__globals__
            for key in sorted(global_names(function.__code__)):
                if key in home:
                    self._reach(home[key], f"{key} in {where}")
            self._files(files_imported_in(function))
            for number, part in enumerate(function.__defaults__ or ()):
                self._reach(part, f"default {number + 1} of {where}")
            for key, part in (function.__kwdefaults__ or {}).items():
                self._reach(part, f"default {key} of {where}")
        kept = {id(cell) for cell in filled_cells(function)}
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) in kept and key != "__class__":
                self._reach(cell.cell_contents, f"{key} in {where}")

    def _class(self, kind: type) -> None:
        if not _is_own(kind):
            return
        name = qualified_name(kind)
        values, overrides = {}, []
        generated = dataclasses.is_dataclass(kind)
        for key, member in sorted(vars(kind).items()):
            functions = code_functions(member)
            for function in functions:
                if is_own_code(function.__code__) and not (generated and function.__code__.co_filename == "<string>"):
                    if any(hasattr(base, key) for base in kind.__bases__):
                        overrides.append(key)
                    self.methods.add(qualified_name(function))
                    self.add(function)
            if functions:
                continue
            member = getattr(member, "__func__", member)
            if isinstance(member, type):
                self.add(member)
            elif key.startswith("__"):
                continue
            elif is_plain(member):
                values[key] = plain(member)
            elif isinstance(member, types.BuiltinFunctionType) or _is_own(type(member)):
                self._reach(member, f"{key} of {name}")
        self._keep(f"attributes of the class {name}", f"value:{digest([values, overrides])}")
        for base in kind.__bases__:
            self.add(base)

    def _module_tree(self, model: nn.Module) -> None:
        """The classes and attributes of a module and of all inside it, and the shapes of its tensors."""
        attributes: dict[str, list[Any]] = {}
        for path, part in model.named_modules():
            self.add(type(part))
            values = {}
            kind = qualified_name(type(part))
            for key, value in sorted(vars(part).items()):
                if key in _NOT_TRAINING or (key == "p" and isinstance(part, _DropoutNd)):
                    continue  # other dropout rates are a warning: planner/plan/prepare.py
                hidden = key.startswith("_")
                if hidden and not _is_own(type(part)):
                    continue
                if isinstance(value, str | bool | float) if hidden else is_plain(value):  # else it may be a cache
                    values[key] = plain(value)
                theirs = key == "forward" and not _is_own(value)  # Accelerate's, TRL's
                if not theirs and (_is_own(value) or _is_own(type(value)) or isinstance(value, _CALLED)):
                    values.setdefault(key, "called")
                    self._attribute(value, f"{key} of {kind}")
            attributes.setdefault(kind, []).append([path, values])
            config = getattr(part, "config", None)
            if config is not None and id(config) not in self._seen:
                self._seen[id(config)] = config
                self._keep("the configuration", f"value:{digest(plain(config))}")
        for name, found in attributes.items():
            self._keep(f"attributes of {name}", f"value:{digest(found)}")
        self._keep(
            "the modules", f"value:{digest([[path, qualified_name(type(p))] for path, p in model.named_modules()])}"
        )
        shapes = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in stored_tensors(model).items()]
        self._keep("the shapes of its tensors", f"value:{digest(shapes)}")
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        self._keep("what is frozen", f"value:{digest(frozen)}")
        self._hooks(model)
        resting = [name for name, part in model.named_modules() if not part.training] if model.training else []
        self._keep("what is in eval mode", f"value:{digest(resting)}")

    def _attribute(self, value: Any, label: str) -> None:
        """A function or an object of the user's own that a module has: an activation, a forward of one instance."""
        self._reach(value.__func__ if inspect.ismethod(value) else value, label)

    def _hooks(self, model: nn.Module) -> None:
        """The user's own hooks on modules and on gradients: which there are, and their code."""
        found = []
        holders: list[Any] = [(path, part, MODULE_HOOKS) for path, part in model.named_modules()]
        holders += [(path, parameter, GRADIENT_HOOKS) for path, parameter in model.named_parameters()]
        for path, holder, names in holders:
            for name in names:
                for hook in (getattr(holder, name, None) or {}).values():
                    inner = hook.func if isinstance(hook, functools.partial) else hook
                    if _is_own(inner) or _is_own(type(inner)):
                        found.append([path, name, qualified_name(inner)])
                        self._attribute(hook, f"a hook of {path or 'the model'}")
        self._keep("the hooks", f"value:{digest(found)}")

    def _object(self, value: Any, name: str) -> None:
        """Another object: its class, and what it has."""
        kind = type(value)
        own = _is_own(kind)
        if own:
            self.add(kind)
        where = name or qualified_name(kind)
        compared = getattr(value, "compared", None) if kind.__module__.startswith("autoplan.") else None
        if compared is not None:
            for key, part in compared().items():
                self._reach(part, key)
        elif isinstance(value, Mapping):
            for key, part in sampled(value.items()):
                self._reach(part, f"{key} of {where}")
        elif isinstance(value, list | tuple):
            for part in sampled(value):
                self._reach(part, f"items of {where}")
        elif own or name or kind.__module__.startswith(_WALKED):
            for key, part in sorted(getattr(value, "__dict__", {}).items()):
                if key not in _PROGRESS:
                    self._reach(part, f"{key} of {where}")


def code_hash(function: Any, *, named: bool) -> str:
    """The hash of a function's code; without its own name unless `named`."""
    node = _syntax_tree(function)
    if node is None:
        return f"code{sys.version_info.major}.{sys.version_info.minor}:{digest(bytecode(function.__code__))}"
    text = ast.dump(node, annotate_fields=False)
    if not named and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        text = text.replace(repr(node.name), "''", 1)
    return f"tree:{digest(text)}"


def _syntax_tree(function: Any) -> ast.AST | None:
    """The part of its file's syntax tree that a function was made of; None where there is no source."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        return None
    nodes = _functions_by_line("".join(lines)).get(code.co_firstlineno, ())
    if code.co_name != "<lambda>":
        return next((node for node in nodes if getattr(node, "name", "") == code.co_name), None)
    lambdas = [node for node in nodes if isinstance(node, ast.Lambda)]
    if len(lambdas) == 1:
        return lambdas[0]
    # The instructions of a lambda span its body; some have no columns (Python 3.11 gives its return 0 to 0).
    places = [(line, column, last, end) for line, last, column, end in code.co_positions() if line and end]
    if not places:
        return None
    spans = min(place[:2] for place in places), max(place[2:] for place in places)
    return next((node for node in lambdas if _span(node.body) == spans), None)


def _span(node: ast.expr) -> tuple[tuple[int, int], tuple[int | None, int | None]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


@functools.lru_cache(maxsize=64)
def _functions_by_line(text: str) -> dict[int, list[ast.AST]]:
    """The functions and lambdas of a source, by the line that their code begins in: that of the first decorator."""
    found: dict[int, list[ast.AST]] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            found.setdefault(first, []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def _is_own(value: Any) -> bool:
    """Whether a function's or class's code is the user's own."""
    if inspect.ismethod(value):
        return _is_own(value.__func__)
    if isinstance(value, types.FunctionType):
        return is_own_code(value.__code__)
    return isinstance(value, type) and is_own_class(value)


# Plain values: data without code, described as JSON that is the same in every process.


MAX_DEPTH = 12

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONFIG_NOTES = ("use_cache", "transformers_version", "torch_dtype", "dtype", "name_or_path", "architectures")


def is_plain(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a value is data alone: numbers, texts, tensors, collections of them, dataclasses, configurations."""
    if isinstance(value, (*_PLAIN, torch.Tensor, torch.dtype, torch.device, enum.Enum, Path)):
        return True
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return True
    if depth <= 0 or isinstance(value, type):
        return False
    if isinstance(value, Mapping):
        return all(is_plain(key, depth - 1) and is_plain(item, depth - 1) for key, item in sampled(value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(
            is_plain(item, depth - 1) for item in (value if isinstance(value, set | frozenset) else sampled(value))
        )
    if dataclasses.is_dataclass(value):
        return all(is_plain(getattr(value, field.name, None), depth - 1) for field in dataclasses.fields(value))
    return _is_configuration(value)


def _is_configuration(value: Any) -> bool:
    return hasattr(value, "model_type") and callable(getattr(value, "to_dict", None))


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Data as JSON; what is no data by its type."""
    if isinstance(value, float | complex | bytes) or value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, torch.dtype | torch.device | enum.Enum | Path):
        return str(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return array_digest(value)
    if depth <= 0 or isinstance(value, type):
        return qualified_name(value)
    if isinstance(value, Mapping):
        pairs = [[str(key), plain(item, depth - 1)] for key, item in sampled(value.items())]
        return sorted(pairs, key=lambda pair: str(pair[0]))
    if isinstance(value, set | frozenset):
        return sorted(str(plain(item, depth - 1)) for item in value)
    if isinstance(value, list | tuple):
        return [length_of(value), *(plain(item, depth - 1) for item in sampled(value))]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return [qualified_name(type(value)), plain(fields, depth - 1)]
    if _is_configuration(value):
        fields = value.to_dict().items()
        kept = {k: v for k, v in fields if not k.startswith("_") and "drop" not in k and k not in _CONFIG_NOTES}
        return [qualified_name(type(value)), plain(kept, depth - 1)]
    return qualified_name(value)
