"""Digests of what is trained: sources, values and versions, the same in every process that runs the same program.

In: the functions, modules and values of a workload. Out: 16 hex digits for each part of it, and the names of what
cannot be hashed. An address in memory is never hashed. Large tensors are sampled: shape, dtype, size, strided bytes.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from autoplan.strategies.workloads.function_file import codes_in, files_imported_in, is_own_file, local_sources

VERSIONED = ("torch", "transformers", "peft", "autoplan")
"""The packages whose versions are part of what is trained."""

SAMPLED_BYTES = 1 << 16
"""Bytes that are hashed of one tensor or array; a larger one is read at regular distances."""

MAX_ITEMS = 1000
"""Of a longer list or mapping, its length and items at regular distances are described."""

SAMPLED_ROWS = 50
"""Of a dataset of Hugging Face, so many rows to twice as many are described, at regular distances."""

MAX_DEPTH = 150


def digest(document: Any) -> str:
    """16 hex digits over a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]


def installed_versions() -> dict[str, str]:
    """The versions of the packages that change what is trained; those that are installed. Loads none of them."""
    found = {}
    for package in VERSIONED:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


class Describer:
    """Describes values as JSON; each function and class of the user's own once, with all that it names.

    Args:
        stamps: Texts that name a file count with its size and time.

    Attributes:
        unhashed: What could only be described by its type.
        weights: Digests of the tensors of modules, kept apart from the code, by order of appearance.
    """

    def __init__(self, *, stamps: bool = False) -> None:
        self._stamps = stamps
        self._sources_of = functools.cache(local_sources)
        self.unhashed: set[str] = set()
        self.weights: list[Any] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def describe(self, value: Any, depth: int = MAX_DEPTH) -> Any:
        """The description of all that makes a value what it is, as JSON."""
        if isinstance(value, str) and self._stamps and names_file(value):
            return _file_stamp(Path(value))
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float | complex | bytes):
            return repr(value)
        if isinstance(value, tuple):  # may be one object here and two elsewhere, so it never counts as seen
            return self._items(value, depth - 1)
        if id(value) in self._seen:
            return ["again", self._seen[id(value)]]
        if depth <= 0:
            self.unhashed.add(type(value).__qualname__)
            return type(value).__qualname__
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._describe_new(value, depth - 1)

    def _describe_new(self, value: Any, depth: int) -> Any:
        if isinstance(value, functools.partial):
            return ["partial", *(self.describe(part, depth) for part in (value.func, value.args, value.keywords))]
        if isinstance(value, Mapping):
            pairs = [[self.describe(key, depth), self.describe(item, depth)] for key, item in sampled(value.items())]
            return ["mapping", len(value), *sorted(pairs, key=json.dumps)]
        if isinstance(value, set | frozenset):
            described = [Describer(stamps=self._stamps).describe(item, depth) for item in value]
            return ["set", *sorted(described, key=json.dumps)]  # without order
        if isinstance(value, list):
            return self._items(value, depth)
        if isinstance(value, Path):
            return _file_stamp(value)
        if isinstance(value, types.ModuleType):  # of the user's own: the sources of its files and of what those import
            if sources := self._sources(module_files(value)):
                return ["module", sources]
            return ["module", value.__name__, str(getattr(value, "__version__", ""))]
        if inspect.ismethod(value):
            return ["method", self.describe(value.__func__, depth), self.describe(value.__self__, depth)]
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, type):
            return self._class(value, depth)
        return self._instance(value, depth)

    def _items(self, value: Any, depth: int) -> Any:
        if depth <= 0:
            return type(value).__qualname__
        return [length_of(value), *(self.describe(item, depth) for item in sampled(value))]

    def _sources(self, files: list[Path]) -> dict[str, str]:
        return {name: found for file in files for name, found in self._sources_of(file).items()}

    def _function(self, function: Any, depth: int) -> Any:
        cells = [self.describe(cell.cell_contents, depth) for cell in filled_cells(function)]
        if not is_own_code(function.__code__):  # of an installed package: its version counts
            return ["function", f"{function.__module__}.{function.__qualname__}", cells]
        defaults = [self.describe(function.__defaults__, depth), self.describe(function.__kwdefaults__, depth)]
        home = function.__globals__
        named = {key: self.describe(home[key], depth) for key in sorted(global_names(function.__code__)) if key in home}
        inside = self._sources(files_imported_in(function))
        described = ["function", function.__qualname__, source_of(function), cells, defaults, named]
        files = [_file_stamp(Path(text)) for text in texts_in(function.__code__) if self._stamps and names_file(text)]
        variables = variables_read(function.__code__)
        return [*described, *([inside] if inside else []), *([variables] if variables else []), *files]

    def _class(self, kind: type, depth: int) -> Any:
        if not is_own_class(kind):
            return ["class", f"{kind.__module__}.{kind.__qualname__}"]
        members = {
            name: [self.describe(part, depth) for part in code_functions(member) or [member]]
            for name, member in sorted(vars(kind).items())
            if not (name.startswith("__") and name not in _MEANINGFUL) and name not in ("_abc_impl",)
        }
        bases = [self.describe(base, depth) for base in kind.__bases__ if base is not object]
        return ["class", kind.__qualname__, bases, members]

    def _instance(self, value: Any, depth: int) -> Any:
        import torch
        from torch import nn

        if isinstance(value, torch.Tensor):
            return tensor_digest(value)
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return array_digest(value)
        if isinstance(value, nn.Module):
            return self._torch_module(value, depth)
        if isinstance(value, torch.device | torch.dtype | torch.Size):
            return str(value)
        if type(value).__module__ == "datasets.arrow_dataset":  # its own fingerprint is another in each process
            rows = [self.describe(value[index], depth) for index in sampled(range(len(value)), SAMPLED_ROWS)]
            return ["dataset", len(value), list(value.column_names), rows]
        kind = self.describe(type(value), depth)
        to_dict = getattr(value, "to_dict", None)  # configurations of transformers
        if callable(to_dict) and hasattr(value, "model_type"):
            return ["instance", kind, self.describe(to_dict(), depth)]
        state = getattr(value, "__dict__", None)
        if state is None:
            slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
            if not slots:
                self.unhashed.add(f"{type(value).__module__}.{type(value).__qualname__}")
                return ["instance", kind]
            state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        return ["instance", kind, self.describe(dict(state), depth)]

    def _torch_module(self, model: Any, depth: int) -> Any:
        """The classes and plain attributes of a module and all inside it; the values of its tensors go to `weights`."""
        tensors = {**stored_tensors(model), **dict(model.named_buffers())}  # those that no checkpoint has too
        self.weights.append({name: tensor_digest(tensor) for name, tensor in tensors.items()})
        parts = []
        for name, part in model.named_modules():
            plain = {key: value for key, value in vars(part).items() if key not in _MODULE_STATE}
            plain = {key: list(value.values()) if key in MODULE_HOOKS else value for key, value in plain.items()}
            attributes = {
                key: self.describe(plain[key], depth)
                for key in sorted(plain)
                if key in MODULE_HOOKS or "hooks" not in key  # others have hooks by numbers, which count on
            }
            parts.append([name, self.describe(type(part), depth), part.training, attributes])
        shapes = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in stored_tensors(model).items()}
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        hooks = [
            [name, self.describe(list(found.values()), depth)]
            for name, parameter in model.named_parameters()
            for kind in GRADIENT_HOOKS
            if (found := getattr(parameter, kind, None))
        ]
        return ["module", parts, shapes, frozen, *([hooks] if hooks else [])]


_MEANINGFUL = ("__init__", "__call__", "__post_init__", "__getitem__", "__len__", "__iter__", "__next__")
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MODULE_STATE = ("_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set")


def qualified_name(value: Any) -> str:
    """The qualified name of a class or function, without the functions that it is defined in."""
    name = str(getattr(value, "__qualname__", type(value).__qualname__))
    return name.rpartition("<locals>.")[2]


def is_own_code(code: types.CodeType) -> bool:
    """Whether code is the user's own: of a file of theirs, or typed in (a notebook, a prompt, exec: `<...>`)."""
    return is_own_file(code.co_filename) or code.co_filename.startswith("<")


def is_own_class(kind: type) -> bool:
    """Whether a class is the user's own. One from exec may name any module, which then does not have it."""
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "__main__" or is_own_file(getattr(module, "__file__", None)):
        return True
    if "<locals>" in kind.__qualname__ or hasattr(module, kind.__qualname__.partition(".")[0]):
        return False
    return any(is_own_code(function.__code__) for member in vars(kind).values() for function in code_functions(member))


def code_functions(member: Any) -> list[Any]:
    """The functions in a member of a class: itself, or that of a method or a property; and those that they wrap."""
    inner = next((found for name in ("__func__", "fget", "func") if (found := getattr(member, name, None))), member)
    found = []
    while isinstance(inner, types.FunctionType) and inner not in found:
        found.append(inner)
        inner = getattr(inner, "__wrapped__", None)
    return found


_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{2,}")


def variables_read(code: types.CodeType) -> dict[str, str | None]:
    """The environment variables that a function reads by name, each with its value here; None: it is not set."""
    if all({"environ", "getenv"}.isdisjoint(part.co_names) for part in codes_in(code)):
        return {}
    return {text: os.environ.get(text) for text in sorted(set(texts_in(code))) if _VARIABLE.fullmatch(text)}


def module_files(module: types.ModuleType) -> list[Path]:
    """The files of a module of the user's own: its file, or all files of a package. Empty for installed ones."""
    file = getattr(module, "__file__", None)
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    if file is None:
        return sorted(path for folder in folders if is_own_file(folder) for path in folder.rglob("*.py"))
    if not is_own_file(file) or not file.endswith(".py"):
        return []
    return [Path(file), *sorted(path for folder in folders for path in folder.rglob("*.py"))]


def filled_cells(function: Any) -> list[Any]:
    """The cells of a closure that have a value."""
    found = []
    for cell in function.__closure__ or ():
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:  # not assigned yet
            continue
        found.append(cell)
    return found


def global_names(code: types.CodeType) -> set[str]:
    """The global names that a function and the functions inside it read."""
    steps = (step for part in codes_in(code) for step in dis.get_instructions(part))
    return {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def sampled(items: Any, most: int = MAX_ITEMS) -> Iterator[Any]:
    """All items of a short collection; of a long one, `most` to twice as many at regular distances."""
    return itertools.islice(items, 0, None, max(1, length_of(items) // most))


def length_of(items: Any) -> int:
    """How many items a collection has; some tuples refuse len() (e3nn's irreps)."""
    try:
        return len(items)
    except NotImplementedError:
        return sum(1 for _ in items)


def source_of(function: Any) -> Any:
    """The source text of a function; its code and constants where there is none."""
    try:
        return inspect.getsource(function.__code__)  # of a function itself: getsource gives what it wraps
    except (OSError, TypeError):
        return bytecode(function.__code__)


def bytecode(code: types.CodeType) -> list[Any]:
    """The instructions, names and constants of code, as JSON without addresses."""
    constants = [bytecode(part) if isinstance(part, types.CodeType) else _constant(part) for part in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def _constant(value: Any) -> str:
    """A constant as text; a frozenset in a fixed order, and no address."""
    text = repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def names_file(text: str) -> bool:
    """Whether a text is the path of a file here: with a folder or a suffix, and not of code."""
    if not 1 < len(text) < 1024 or "\n" in text or "\0" in text or not ("/" in text or "." in text):
        return False
    return not text.endswith(".py") and Path(text).is_file()


def texts_in(code: types.CodeType) -> list[str]:
    """The texts that a function and the functions inside it contain."""
    return [constant for part in codes_in(code) for constant in part.co_consts if isinstance(constant, str)]


def _file_stamp(path: Path) -> list[Any]:
    try:
        status = path.stat()
    except OSError:
        return ["path", str(path)]
    return ["path", str(path), status.st_size, status.st_mtime_ns]


def stored_tensors(model: Any) -> dict[str, Any]:
    """The tensors of a model's state_dict, which may hold other things too (get_extra_state, a _metadata)."""
    import torch

    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def tensor_digest(tensor: Any) -> list[Any]:
    """Shape, dtype and a hash of the bytes, of at most SAMPLED_BYTES at regular distances."""
    import torch

    head = ["tensor", list(tensor.shape), str(tensor.dtype)]
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout != torch.strided:
        return head
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // SAMPLED_BYTES)
    data = flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return [*head, hashlib.sha256(data).hexdigest()[:16]]


def array_digest(array: Any) -> list[Any]:
    """As tensor_digest, for an array or a number of NumPy."""
    head = ["array", list(array.shape), str(array.dtype)]
    if array.dtype.hasobject:
        return head
    flat = array.reshape(-1)
    step = max(1, flat.size * flat.itemsize // SAMPLED_BYTES)
    return [*head, hashlib.sha256(flat[::step].tobytes()).hexdigest()[:16]]
