"""Copies definitions from autoplan's own source files, so that an exported script runs the code that was measured.

In: a file of strategies/ or probes/, and names. Out: their source text.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import autoplan

_FOLDER = Path(autoplan.__file__).parent


def take(file: str, *names: str) -> str:
    """The source of top-level definitions of one of autoplan's files, in the given order, two blank lines apart.

    Args:
        file: Its path within strategies/, like `techniques/loss_kernels.py`; or one of probes/, like `probes/host.py`.
        names: Functions, classes or constants.
    """
    found = _definitions(file)
    missing = [name for name in names if name not in found]
    assert not missing, f"{file} no longer defines {', '.join(missing)}: change the exporter too"
    return "\n\n\n".join(found[name] for name in names)


@functools.cache
def _definitions(file: str) -> dict[str, str]:
    """Every top-level definition of a file by name: its source with decorators and the comments above it."""
    text = (_FOLDER / file if file.startswith("probes/") else _FOLDER / "strategies" / file).read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        for name in defined_names(node):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
            while first and lines[first - 1].startswith("#"):
                first -= 1
            body = "\n".join(lines[first : node.end_lineno])
            found[name] = re.sub(r"  # type: ignore\S*(  # .*)?$", "", body, flags=re.MULTILINE)
    return found


def defined_names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
