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
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from autoplan.strategies.workloads.digests import (
    bytecode,
    code_functions,
    digest,
    filled_cells,
    global_names,
    is_own_class,
    is_own_code,
    module_files,
    qualified_name,
    sampled,
    stored_tensors,
    tensor_digest,
)
from autoplan.strategies.workloads.function_file import files_imported_in, local_sources
from autoplan.strategies.workloads.plain_values import is_plain, plain

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload

TRAINING_PARTS = ("model", "loss", "optimizer", "schedule")
"""Parts without which another thing is trained; the others are `data` and `weights`."""

COPIES = ("deepcopy", "copy_model")
"""The functions with which a build_model copies a model that the user handed in."""

_NOT_TRAINING = ("training", "gradient_checkpointing", "config", "generation_config", "forward")


def fingerprints_of(workload: Workload) -> dict[str, dict[str, str]]:
    """The fingerprint of each part of a workload.

    The model is that which `build_model` copies, or the function itself: nothing is built or run.
    """
    model = workload.build_model
    if isinstance(model, functools.partial) and getattr(model.func, "__name__", "") in COPIES:
        model = model.args[0]
    return fingerprints(
        model=model,
        loss=workload.loss,
        optimizer=workload.build_optimizer,
        schedule=workload.build_schedule,
        make_batch=workload.make_batch,
    )


def fingerprints(
    *, model: Any = None, loss: Any = None, optimizer: Any = None, schedule: Any = None, make_batch: Any = None
) -> dict[str, dict[str, str]]:
    """The fingerprint of each part that is given (not None)."""
    found: dict[str, dict[str, str]] = {}
    if model is not None:
        collector = Collector("the model")
        collector.add(model)
        found["model"] = collector.result()
        if isinstance(model, nn.Module):
            weights = {name: tensor_digest(tensor) for name, tensor in stored_tensors(model).items()}
            found["weights"] = {"the weights": f"value:{digest(weights)}"}
    for part, value, words in (("loss", loss, "the loss"), ("schedule", schedule, "the schedule")):
        if value is not None:
            collector = Collector(words)
            collector.add(value)
            found[part] = collector.result()
    if optimizer is not None:  # its class, groups and values are compared as numbers; here, code of the user's own
        collector = Collector("the optimizer")
        collector.add(type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer)
        found["optimizer"] = {name: value for name, value in collector.result().items() if name in collector.methods}
    if make_batch is not None:
        collector = Collector(getattr(make_batch, "called", "make_batch"))
        collector.add(make_batch)
        found["data"] = collector.result()
    return found


def changed_names(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names that both have with other hashes; hashes of two kinds (`tree:`, `code3.11:`) are not compared."""
    changed = [
        name
        for name, value in now.items()
        if name in then and then[name] != value and then[name].partition(":")[0] == value.partition(":")[0]
    ]
    return sorted(changed, key=lambda name: (name.startswith("attributes of"), name))  # code says more


class Collector:
    """Walks over what a part of a training reaches, and keeps a hash for each piece by name.

    Args:
        role: The name of what is walked over first: `the loss`. Its own name does not count.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.methods: set[str] = set()
        self._found: dict[str, set[str]] = {}
        self._seen: dict[int, Any] = {}
        self._read: set[Path] = set()
        self._root = True

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
        """What a piece of code names: code is walked over, a value is hashed under its label."""
        if isinstance(value, types.ModuleType | functools.partial | nn.Module | torch.optim.Optimizer):
            self.add(value)
        elif inspect.ismethod(value) or isinstance(value, types.FunctionType | type):
            if _is_own(value):
                self.add(value)
            else:
                self._keep(label, f"name:{value.__module__}.{value.__qualname__}")
                for cell in filled_cells(value) if isinstance(value, types.FunctionType) else ():
                    self._reach(cell.cell_contents, label)
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
        values = {}
        generated = dataclasses.is_dataclass(kind)
        for key, member in sorted(vars(kind).items()):
            function = next(iter(code_functions(member)), None)
            if function is not None:
                if is_own_code(function.__code__) and not (generated and function.__code__.co_filename == "<string>"):
                    self.methods.add(qualified_name(function))
                    self.add(function)
            elif isinstance(member, type):
                self.add(member)
            elif not key.startswith("__") and is_plain(member):
                values[key] = plain(member)
        self._keep(f"attributes of the class {name}", f"value:{digest(values)}")
        for base in kind.__bases__:
            self.add(base)

    def _module_tree(self, model: nn.Module) -> None:
        """The classes and attributes of a module and of all inside it, and the shapes of its tensors."""
        attributes: dict[str, list[Any]] = {}
        for path, part in model.named_modules():
            self.add(type(part))
            values = {}
            for key, value in sorted(vars(part).items()):
                if key.startswith("_") or key in _NOT_TRAINING or (key == "p" and isinstance(part, _DropoutNd)):
                    continue  # other dropout rates are a warning: planner/plan/prepare.py
                if is_plain(value):
                    values[key] = plain(value)
                if _is_own(value) or _is_own(type(value)):
                    self.add(value)
            attributes.setdefault(qualified_name(type(part)), []).append([path, values])
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
        resting = [name for name, part in model.named_modules() if not part.training] if model.training else []
        self._keep("what is in eval mode", f"value:{digest(resting)}")

    def _object(self, value: Any, name: str) -> None:
        """Another object: its class, and what it has."""
        kind = type(value)
        own = _is_own(kind)
        if own:
            self.add(kind)
        where = name or qualified_name(kind)
        if isinstance(value, Mapping):
            for key, part in sampled(value.items()):
                self._reach(part, f"{key} of {where}")
        elif isinstance(value, list | tuple):
            for part in sampled(value):
                self._reach(part, f"items of {where}")
        elif own or name:
            for key, part in sorted(getattr(value, "__dict__", {}).items()):
                self._reach(part, f"{key} of {where}")


def code_hash(function: Any, *, named: bool) -> str:
    """The hash of a function's code; without its own name unless `named`."""
    node = _syntax_tree(function)
    if node is None:
        return f"code{sys.version_info.major}.{sys.version_info.minor}:{digest(bytecode(function.__code__))}"
    return f"tree:{digest(_dump(node, named=named))}"


def _dump(node: ast.AST, *, named: bool) -> str:
    text = ast.dump(node, annotate_fields=False)
    if not named and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return text.replace(repr(node.name), "''", 1)
    return text


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
    ends = list(code.co_positions())[-1]  # of the return: the whole body
    return next((node for node in lambdas if _span(node.body) == ends), None)


def _span(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


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


def _is_own(value: Any) -> bool:
    """Whether a function's or class's code is the user's own."""
    if inspect.ismethod(value):
        return _is_own(value.__func__)
    if isinstance(value, types.FunctionType):
        return is_own_code(value.__code__)
    return isinstance(value, type) and is_own_class(value)
