"""`file.py:function` workloads: checked by reading the source in the planner, imported in a rank.

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
import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoplan.errors import WorkloadError


def check_function(text: str) -> tuple[Path, str]:
    """The absolute path and the function name of `file.py:function`, checked without running anything.

    Raises:
        WorkloadError: no such file, not Python, or no such function in it.
    """
    file, _, function = text.rpartition(":")
    path = Path(file).expanduser().resolve()
    tree = _parse(path)
    names = _top_level_names(tree)
    if function not in names and "*" not in names:
        own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        near = difflib.get_close_matches(function, names, n=3) or own[:8] or sorted(names)[:8]
        raise WorkloadError(
            f"{path} has no function {function!r}",
            hint=f"It has {', '.join(near)}." if near else "The file defines nothing.",
        )
    return path, function


def local_sources(path: Path) -> dict[str, str]:
    """Hashes of a file's source and of the files beside it that it imports, by name; for the workload's identity."""
    found: dict[str, str] = {}
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current.name in found:
            continue
        found[current.name] = hashlib.sha256(current.read_bytes()).hexdigest()[:16]
        for name in _imported(_parse(current)):
            neighbour = path.parent / f"{name}.py"
            if neighbour.is_file():
                waiting.append(neighbour)
            for file in sorted((path.parent / name).rglob("*.py")):  # a package: all of it counts
                found[str(file.relative_to(path.parent))] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return found


def import_function(reference: str) -> Callable[..., Any]:
    """Imports the file, with its own folder importable, and gives the function.

    Raises:
        WorkloadError: the import fails, or the name is not a function.
    """
    path, function = check_function(reference)
    module_name = f"autoplan_workload_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = sys.modules.get(module_name)
    if module is None:
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
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
    return value


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(), filename=str(path))
    except OSError as error:
        raise WorkloadError(
            f"{path} cannot be read: {error.strerror}", hint="Give file.py:function with a file that exists."
        ) from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise WorkloadError(f"{path}{where} is not Python: {error}", hint="Fix the file.") from error


def _top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
    return names


def _imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names
