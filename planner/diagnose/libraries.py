"""What the sandbox does to libraries as the script imports them: their C code is given other paths, loggers are off.

A library that was imported before gets it at once. What a module has bound by name is replaced there too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

Function = Callable[..., Any]

_WRITES = "wax+"

NO_TENSORFLOW = "tensorboard.compat.notf"
"""Where this module is there, TensorBoard writes in Python, also beside TensorFlow, which opens files in C."""

IN_C = (
    ("_imp", "create_dynamic", 0, "spec"),
    ("ctypes", "_dlopen", 0, "library"),
    ("_sqlite3", "connect", 0, "database"),
    ("dbm", "open", 0, "dbm"),
    ("lmdb", "open", 0, "lmdb"),
    ("numpy", "memmap", 0, "memmap"),
    ("torch.serialization", "_open_zipfile_writer", 0, "write"),
    ("torch.serialization", "load", 0, "read"),
    ("torch.jit._serialization", "save", 1, "write"),
    ("torch.jit._serialization", "load", 0, "read"),
    ("torch.autograd.profiler", "profile.export_chrome_trace", 1, "write"),
    ("safetensors", "serialize_file", 1, "write"),
    ("safetensors", "safe_open", 0, "read"),
    ("tokenizers", "Tokenizer.save", 1, "write"),
    ("tokenizers", "Tokenizer.from_file", 0, "read"),
    ("tokenizers", "Tokenizer.train", 1, "read"),
    ("tokenizers.models", "Model.save", 1, "folder"),
    ("tokenizers.models", "BPE.from_file", 0, "read"),
    ("tokenizers.models", "BPE.from_file", 1, "read"),
    ("tokenizers.models", "WordPiece.from_file", 0, "read"),
    ("tokenizers.models", "WordLevel.from_file", 0, "read"),
    ("pyarrow", "memory_map", 0, "mode"),
    ("pyarrow", "OSFile", 0, "mode"),
    ("pyarrow.parquet", "write_table", 1, "write"),
    ("pyarrow.parquet", "read_table", 0, "read"),
    ("h5py", "File.__init__", 1, "mode"),
    ("cv2", "imwrite", 0, "write"),
    ("cv2", "imread", 0, "read"),
)
"""(module, function, place of its path among the arguments, what it does with it) of what opens files in C."""

FORCED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wandb", "init", {"mode": "disabled"}),
    ("mlflow.tracking._tracking_service.utils", "set_tracking_uri", {"uri": "file:{root}/mlruns"}),
    ("mlflow.tracking._tracking_service.utils", "_resolve_tracking_uri", {"tracking_uri": "file:{root}/mlruns"}),
    *(("comet_ml", name, {"disabled": True}) for name in ("Experiment", "ExistingExperiment", "OfflineExperiment")),
    *(("neptune", name, {"mode": "debug"}) for name in ("Run", "Model", "ModelVersion", "Project", "init_run")),
    ("clearml", "Task.set_offline", {"offline_mode": True}),
)
"""(module, function or class, arguments) of loggers: what they are given whatever the script says."""

_PATH_NAMES = (
    "f", "filename", "path", "file", "files", "folder", "database", "source", "vocab", "merges", "where", "name",
)  # fmt: skip
"""Names of arguments that are paths, in the calls of above."""

_OF_DBM = ("", ".db", ".dat", ".dir", ".pag", ".bak")


class Libraries:
    """The changes to libraries.

    Args:
        paths: The sandbox, which knows where files of the script are.
    """

    def __init__(self, paths: Any) -> None:
        self.paths = paths
        self._names = {*(one[0] for one in IN_C), *(one[0] for one in FORCED)}

    def install(self) -> None:
        """Changes the libraries that are there, and those that are imported later."""
        sys.modules.setdefault(NO_TENSORFLOW, types.ModuleType(NO_TENSORFLOW))
        sys.meta_path.insert(0, self)
        for name in self._names & set(sys.modules):
            self._change(name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """As a finder of modules: what the others find, whose loader changes it after it has run."""
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                with contextlib.suppress(AttributeError):  # a loader that cannot be changed
                    self._watch(name, spec.loader)
                return spec
        return None

    def _watch(self, name: str, loader: Any) -> None:
        if isinstance(loader, type):  # one for all modules that are built in
            return
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._change(name)

        loader.exec_module = exec_module

    def _change(self, name: str) -> None:
        """Never fails: a library of another version stays as it is, and the kernel is behind it."""
        for module, function, place, kind in IN_C:
            if module == name:
                with contextlib.suppress(Exception):
                    _wrap(module, function, functools.partial(self._given, place=place, kind=kind))
        for module, function, given in FORCED:
            if module == name:
                root = self.paths.root
                filled = {key: one.format(root=root) if isinstance(one, str) else one for key, one in given.items()}
                with contextlib.suppress(Exception):
                    _wrap(module, function, functools.partial(_forced, given=filled))

    def _given(self, function: Function, place: int, kind: str) -> Function:
        if kind == "memmap":
            return self._mapped(function)
        change = getattr(self, f"_{kind}")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                path = change(args[place], args[place + 1 :], kwargs)
                args = (*args[:place], path, *args[place + 1 :])
            else:
                for name in _PATH_NAMES:
                    if name in kwargs:
                        kwargs[name] = change(kwargs[name], (), kwargs)
            return function(*args, **kwargs)

        return call

    # What becomes of a path: each gets it, the arguments after it, and those by name.

    def _read(self, path: Any, *_: Any) -> Any:
        return [self.paths.seen(one) for one in path] if isinstance(path, list) else self.paths.seen(path)

    def _write(self, path: Any, *_: Any) -> Any:
        return self.paths.moved(path)

    def _folder(self, path: Any, *_: Any) -> Any:
        return self.paths.moved_folder(path)

    def _mode(self, path: Any, after: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        mode = named.get("mode", after[0] if after else None) or "r"
        writes = set(_WRITES) & set(mode)
        return self.paths.moved(path, copy="w" not in mode) if writes else self.paths.seen(path)

    def _spec(self, spec: Any, *_: Any) -> Any:
        """Of a module in C that the script has built."""
        origin = self.paths.seen(spec.origin)
        if origin != spec.origin:
            spec = copy.copy(spec)
            spec.origin = origin
        return spec

    def _library(self, path: Any, *_: Any) -> Any:
        return self.paths.seen(path) if isinstance(path, (str, bytes)) and os.sep in os.fsdecode(path) else path

    def _database(self, path: Any, after: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Of SQLite: a copy; one that is too large is only read."""
        if isinstance(path, str) and (named.get("uri") or len(after) > 6 and after[6]):
            return path  # the kernel refuses what such a name would write
        if path in (":memory:", b":memory:", "", b""):
            return path
        with contextlib.suppress(OSError):
            for more in ("-wal", "-journal"):
                if os.path.exists(os.fsdecode(path) + more):
                    self.paths.moved(os.fsdecode(path) + more, copy=True)
            return self.paths.moved(path, copy=True)
        named["uri"] = True
        return f"file:{os.path.abspath(os.fsdecode(path))}?mode=ro"

    def _dbm(self, path: Any, after: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        name = os.fsdecode(path)
        for more in _OF_DBM:  # which of them there are depends on the library
            if os.path.exists(name + more):
                self.paths.moved(name + more, copy=True)
        return self.paths.moved(name)

    def _lmdb(self, path: Any, after: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Read as it is, without its file of locks, which is written; else a copy."""
        if named.get("readonly"):
            named["lock"] = False
            return self.paths.seen(path)
        if not named.get("subdir", True):
            return self.paths.moved(path, copy=True)
        self.paths.moved(os.path.join(os.fsdecode(path), "data.mdb"), copy=True)
        return self.paths.moved_folder(path)

    def _mapped(self, kind: Any) -> Any:
        """numpy.memmap: what is the user's is mapped so that changes stay in memory."""
        make = kind.__new__

        def new(cls: Any, filename: Any, dtype: Any = None, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
            dtype = sys.modules["numpy"].uint8 if dtype is None else dtype
            if mode in ("r+", "readwrite") and self.paths.is_users(filename):
                with contextlib.suppress(ValueError):  # it is to become longer: a copy does
                    return make(cls, filename, dtype, "c", *args, **kwargs)
            return make(cls, filename, dtype, mode, *args, **kwargs)

        kind.__new__ = staticmethod(new)
        return kind


def _forced(function: Any, given: Mapping[str, Any]) -> Any:
    """A function, or a class, that gets these arguments whatever it is given."""
    import inspect

    if isinstance(function, type):
        function.__init__ = _forced(function.__init__, given)  # type: ignore[misc]
        return function
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        placed = dict(zip(parameters, args, strict=False))
        args = (*(given.get(name, value) for name, value in placed.items()), *args[len(placed) :])
        return function(*args, **kwargs | {name: value for name, value in given.items() if name not in placed})

    return call


def _wrap(module: str, name: str, wrap: Callable[[Any], Any]) -> None:
    """Puts another function in the place of one of a module, or of a class of it; passes over what is not there."""
    owner: Any = sys.modules[module]
    *outer, last = name.split(".")
    for step in outer:
        owner = getattr(owner, step, None)
    found = getattr(owner, last, None)
    if found is None:
        return
    changed = wrap(found)
    if outer:
        is_method = not isinstance(vars(owner).get(last), (staticmethod, classmethod))
        setattr(owner, last, changed if is_method else staticmethod(changed))
    elif changed is not found:
        replace_everywhere({found: changed})


def around(function: Function, method: Function) -> Function:
    """A function in whose place a method is called: with it, and with its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(function, *args, **kwargs)

    return call


def replace_everywhere(changed: Mapping[Any, Any]) -> None:
    """Puts functions in the place of others, in each module that has bound them: `from builtins import open as ...`."""
    by_id = {id(before): after for before, after in changed.items()}
    for module in list(sys.modules.values()):
        names: Any = getattr(module, "__dict__", None)
        for name, value in list(names.items()) if type(names) is dict else ():
            if id(value) in by_id:
                names[name] = by_id[id(value)]
