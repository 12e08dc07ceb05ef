"""`file.py:function` workloads: checked by reading the source in the planner, imported in a rank. What files are whose.

A function returns an `autoplan.Workload`. Parameters named sequence_length, global_batch, or like an option of the
command are passed to it. An example, an image classifier (examples/image_classifier.py is a whole one):

    def workload(global_batch: int = 64) -> autoplan.Workload:
        return autoplan.Workload(
            name="classifier",
            build_model=lambda: torchvision_like_model(),
            make_batch=lambda count, index: {"image": torch.randn(count, 3, 64, 64), "label": torch.arange(count)},
            loss=lambda model, batch: LossSum(
                F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum"), len(batch["label"])
            ),
            build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            global_batch=global_batch,
        )
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import dis
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from autoplan.errors import WorkloadError

NAMED = re.compile(r"(?P<file>.+?\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<function>[^\W\d]\w*)", re.DOTALL)
"""How a function is named: `file.py:function` or `package.module:function`."""


def file_of(text: str) -> Path:
    """The absolute path of a file, named by its path or as a module of the user's own; nothing is imported.

    Raises:
        WorkloadError: it is a notebook; or there is no such module in the current folder, nor in a folder of the
            user's own on sys.path.
    """
    if text.endswith(".ipynb"):
        raise WorkloadError(
            f"{text} is a notebook, and a function is named in a file of Python",
            hint="Move it into a .py file, or call autoplan.search in the notebook.",
        )
    if text.endswith(".py") or not all(part.isidentifier() for part in text.split(".")):
        return Path(text).expanduser().resolve()
    for folder in _own_folders(Path.cwd()):
        place = folder.joinpath(*text.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file.resolve()
    raise WorkloadError(
        f"there is no module {text} of your own in this folder or on Python's path",
        hint="Name its file: --model package/module.py:workload.",
    )


def check_function(text: str) -> tuple[Path, str]:
    """The absolute path and the function name of `file.py:function`, checked without running anything.

    A module of the user's own may be named instead of its file: `package.module:function`.

    Raises:
        WorkloadError: no such file, not Python, or no such function in it; or what it names is somebody else's code:
            a function that the file imports from an installed package, or a file of autoplan's own.
    """
    file, _, function = text.rpartition(":")
    path = file_of(file)
    if is_autoplan_file(path):
        raise WorkloadError(
            f"{path} is a file of autoplan's own, which is nobody's workload",
            hint="Name a function of your own file: --model train.py:workload.",
        )
    tree = _parse(path)
    names = {name for node in ast.walk(tree) for name in _bound_by(node)}
    source = _imported_from(tree, function, path)
    if source is not None:
        raise _not_defined_here(path, function, f"is imported from {source}")
    if function not in names and "*" not in names:
        own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        near = difflib.get_close_matches(function, names, n=3) or own[:8] or sorted(names)[:8]
        raise WorkloadError(
            f"{path} has no function {function!r}",
            hint=f"It has {', '.join(near)}." if near else "The file defines nothing.",
        )
    return path, function


def local_sources(path: Path) -> dict[str, str]:
    """Hashes of a file's source and of all files of the user's own that it reaches by imports, by name.

    Followed are imports of neighbours, within packages (relative ones too) and from the folders of the user's own on
    sys.path. Of a package beside the file all files count, since some are imported by names made at run time.
    """
    folders = _own_folders(path.parent)
    found: dict[str, str] = {}
    waiting = [path.resolve()]
    seen: set[Path] = set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        data = current.read_bytes()
        found[_name_under(current, folders)] = hashlib.sha256(data).hexdigest()[:16]
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError):
            continue  # its import will fail, and say so
        for level, parts in _imports(tree):
            waiting += _files_of(parts, [current.parents[level - 1]] if level else folders)
    packages = {parts[0] for level, parts in _imports(_parse(path)) if not level or len(parts) > 1}
    for name in packages:
        for file in sorted((path.parent / name).rglob("*.py")):
            found.setdefault(_name_under(file.resolve(), folders), hashlib.sha256(file.read_bytes()).hexdigest()[:16])
    return found


def files_imported_in(function: Any) -> list[Path]:
    """The files of the user's own that a function imports when it is called."""
    file = Path(function.__code__.co_filename)
    here = file.resolve() if file.is_file() else Path("script.py").resolve()
    found: list[Path] = []
    for code in codes_in(function.__code__):
        steps = list(dis.get_instructions(code))
        for number, step in enumerate(steps):
            if step.opname != "IMPORT_NAME":
                continue
            level, names = steps[number - 2].argval, steps[number - 1].argval
            parts = step.argval.split(".") if step.argval else []
            starts = _own_folders(here.parent) if not level else [here.parents[level - 1]]
            for name in names or ("",):
                found += _files_of([*parts, name] if name else parts, starts)
    return sorted(set(found))


def _own_folders(first: Path) -> list[Path]:
    """Where the user's own modules are found: beside the file, and on sys.path."""
    folders = [first.resolve()]
    for entry in sys.path:
        folder = Path(entry or ".").resolve()
        if folder not in folders and folder.is_dir() and is_own_file(folder):
            folders.append(folder)
    return folders


def _name_under(file: Path, folders: list[Path]) -> str:
    """A file's name: its path within the first of the folders that has it."""
    return next((str(file.relative_to(folder)) for folder in folders if file.is_relative_to(folder)), str(file))


def _imports(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """The dotted names that a file imports, each with its level: the dots before a relative one, 0 for others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            yield from ((node.level, [*parts, alias.name]) for alias in node.names)


def _files_of(parts: list[str], starts: list[Path]) -> Iterator[Path]:
    """The module files along a dotted name, from the first folder that has its beginning."""
    for start in starts:
        places = [start.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
        files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
        files = [file for file in files if file.is_file()]
        if files:
            yield from (file.resolve() for file in files if is_own_file(file))
            return


def package_of(path: Path) -> tuple[Path, list[str]]:
    """The folder that a file is imported from, and its packages: it may import its neighbours by `from . import`."""
    root, packages = path.parent, list[str]()
    while (root / "__init__.py").is_file():
        root, packages = root.parent, [root.name, *packages]
    return root, packages


def import_function(reference: str) -> Callable[..., Any]:
    """Imports the file, with its own folder importable, and gives the function. A file that changed is imported anew.

    Raises:
        WorkloadError: the import fails, or the name is not a function.
    """
    path, function = check_function(reference)
    what = str(path).encode() + path.read_bytes()
    root, packages = package_of(path)
    module_name = ".".join([*packages, f"autoplan_workload_{hashlib.sha256(what).hexdigest()[:8]}"])
    module = sys.modules.get(module_name)
    if module is None:
        sys.path[:0] = [folder for folder in dict.fromkeys((str(path.parent), str(root))) if folder not in sys.path]
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        assert module_spec is not None and module_spec.loader is not None, "a .py file has a loader"
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module
        try:
            module_spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[module_name]
            if not isinstance(error, Exception | SystemExit):
                raise
            raise WorkloadError(
                f"{path} cannot be imported: {type(error).__name__}: {error}",
                hint=f"Try: python {path.name}",
            ) from error
    value = getattr(module, function, None)
    if not callable(value):
        raise WorkloadError(
            f"{function} in {path} is {type(value).__name__}, not a function",
            hint="It is called without arguments (or with those it declares) and returns an autoplan.Workload.",
        )
    if not (_only_defined(_parse(path), function) or _is_own(value)):
        raise _not_defined_here(path, function, f"is {getattr(value, '__module__', None) or 'a builtin'}'s")
    return value


def _not_defined_here(path: Path, function: str, what: str) -> WorkloadError:
    return WorkloadError(
        f"{function} in {path} {what}: only a function that the file itself or a file of your own defines is called",
        hint=f"Define one in {path.name} that calls it, and name that: --model {path.name}:workload.",
    )


def _imported_from(tree: ast.Module, name: str, path: Path) -> str | None:
    """The installed module that a name is imported from; None where it is defined, or comes from a file of one's own.

    What a star brings in, or an assignment, is known once the file is imported.
    """
    if any(name in _bound_by(node) for node in ast.walk(tree) if not isinstance(node, ast.ImportFrom)):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and name in _bound_by(node):
            module = node.module or ""
            beside = any(_files_of(module.split("."), _own_folders(path.parent)))
            return None if beside or _is_own_package(module.partition(".")[0]) else module
    return None


def _is_own_package(name: str) -> bool:
    """Whether a package is the user's own, installed or not, or cannot be found now; nothing is imported for it."""
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # __main__
        return False
    if found is None:
        return True
    places = [found.origin] if found.has_location else [*(found.submodule_search_locations or ())]
    return any(is_own_file(place) for place in places)


def _only_defined(tree: ast.Module, name: str) -> bool:
    """Whether nothing but `def` and `class` gives the name: what a decorator makes of one's own function counts."""
    binding = [node for node in ast.walk(tree) if name in _bound_by(node) or "*" in _bound_by(node)]
    return bool(binding) and all(isinstance(node, _DEFINES) for node in binding)


def _is_own(value: Any) -> bool:
    """Whether a function, class or object is of the user's own files, under wrappers of any module."""
    while isinstance(value, functools.partial):
        value = value.func
    value = inspect.unwrap(value)
    if isinstance(value, functools.partial):
        return _is_own(value)
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if isinstance(code, types.CodeType):  # `<frozen os>` is no file
        return not code.co_filename.startswith("<") and is_own_file(code.co_filename)
    kind = value if isinstance(value, type) else type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_own_file(file)


@contextlib.contextmanager
def command_line(reference: str, arguments: Sequence[str]) -> Iterator[None]:
    """Sets sys.argv to the file and its arguments while a user's function runs, and puts it back.

    Where there are none it is left alone, as it always was.
    """
    before = sys.argv
    if arguments:
        sys.argv = [reference.rpartition(":")[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(), filename=str(path))
    except FileNotFoundError:
        raise WorkloadError(f"there is no file {path}", hint="Give file.py:function with a file that exists.") from None
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}", hint="Check its permissions.") from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise WorkloadError(f"{path}{where} is not Python: {error}", hint="Fix the file.") from error


_DEFINES = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef


def _bound_by(node: ast.AST) -> set[str]:
    """The names that a statement gives a value."""
    if isinstance(node, _DEFINES):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return set()


# Whose code a file is.


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (*(Path(sysconfig.get_paths()[name]).resolve() for name in names), *_autoplan_folders())


@functools.cache
def _autoplan_folders() -> tuple[Path, ...]:
    import autoplan

    root = Path(autoplan.__file__).resolve().parent
    return (root, *((root / name).resolve() for name in ("planner", "probes", "strategies")))


def is_own_file(path: str | Path | None) -> bool:
    """Whether a source file is the user's own: not Python's, not an installed package's, not autoplan's."""
    if path is None:
        return False
    resolved = Path(path).resolve()
    if not {"site-packages", "dist-packages"}.isdisjoint(resolved.parts):
        return False
    if any(resolved.is_relative_to(folder) for folder in _library_folders()):
        return False
    folders = (one for one in _resolved(tuple(sys.path)) if one in resolved.parents)
    return not any(resolved.relative_to(one).parts[0].removesuffix(".py") in _installed_in(one) for one in folders)


@functools.lru_cache(maxsize=8)
def _resolved(folders: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(Path(one).resolve() for one in folders if one)


@functools.cache
def _installed_in(folder: Path) -> frozenset[str]:
    """The modules that pip has installed into a folder of sys.path, as `pip install --target` and module systems do."""
    found: set[str] = set()
    for one in metadata.distributions(path=[str(folder)]):
        if one.read_text("RECORD") is not None:  # an egg-info is of a project's own sources
            found |= {file.parts[0].removesuffix(".py") for file in one.files or ()}
    return frozenset(found)


def is_autoplan_file(path: Path) -> bool:
    """Whether a source file is one of autoplan's own packages."""
    return any(path.resolve().is_relative_to(folder) for folder in _autoplan_folders())


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)
