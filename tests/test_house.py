"""The house rules: which way imports go, what `import autoplan` loads, and which names may be imported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoplan

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "optuna", "transformers", "numpy", "typer", "rich")

# Each room may import from the rooms at its own height or below; the longest matching name counts.
HEIGHTS = {
    "autoplan.errors": 0,
    "autoplan.units": 0,
    "autoplan": 0,  # autoplan/__init__.py names its members as text and loads none of them
    "autoplan.processes": 1,
    "autoplan.probes": 2,
    "autoplan.strategies": 3,
    "autoplan.planner": 4,
    "autoplan.report": 5,
    "autoplan.api": 5,
    "autoplan.cli": 5,
    "autoplan.__main__": 5,
}


def height(module: str) -> int:
    """The height of a module's room; of a public name of autoplan, the height of its home."""
    package, _, member = module.partition(".")
    if package == "autoplan" and member in autoplan._HOME_OF:
        return height(autoplan._HOME_OF[member])
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in HEIGHTS:
            return HEIGHTS[name]
    raise AssertionError(f"{module} stands in no room that the design names: add it to HEIGHTS")


def source_files() -> Iterator[tuple[str, Path]]:
    """(module name, file) of every module of the package; the links are followed."""
    for room in ("", "processes", "cli", "report", "planner", "strategies", "probes"):
        folder = ROOT / "autoplan" / room
        files = sorted(folder.glob("*.py") if room == "" else folder.rglob("*.py"))
        for path in files:
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every `autoplan...` module that a file imports, lazily or not, but for those under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        else:
            yield from imported_names(node)


def wrong_way(module: str, tree: ast.AST) -> list[str]:
    """The imports of a module that go up."""
    return [
        f"{module}:{line} imports {name}"
        for name, line in imported_names(tree)
        if name.split(".")[0] == "autoplan" and height(name) > height(module)
    ]


def test_imports_go_one_way() -> None:
    files = list(source_files())
    assert len(files) > 20, "the walk no longer follows the links"
    wrong = [line for module, path in files for line in wrong_way(module, ast.parse(path.read_text()))]
    assert not wrong, "imports go cli|api|report -> planner -> strategies -> probes -> processes -> errors"


def test_the_direction_check_sees_a_wrong_import() -> None:
    up = "def f():\n    from autoplan.planner.plan import Plan\n"
    assert wrong_way("autoplan.probes.host", ast.parse(up)) == [
        "autoplan.probes.host:2 imports autoplan.planner.plan.Plan"
    ]
    assert not wrong_way("autoplan.cli.search", ast.parse(up))
    assert wrong_way("autoplan.probes.host", ast.parse("from autoplan import Plan"))
    assert not wrong_way("autoplan.probes.host", ast.parse("from autoplan import __version__"))


def loaded_by(code: str) -> set[str]:
    """The heavy packages that a piece of code loads in a fresh interpreter."""
    probe = f"{code}\nimport sys, json; print(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_autoplan_is_cheap() -> None:
    assert loaded_by("import autoplan") == set()


def test_the_check_of_cheapness_sees_a_heavy_import() -> None:
    assert "numpy" in loaded_by("import autoplan, numpy")


@pytest.mark.parametrize("module", ["autoplan.planner.plan", "autoplan.strategies.config", "autoplan.probes.profile"])
def test_records_load_without_torch(module: str) -> None:
    assert not loaded_by(f"import {module}") & {"torch", "optuna", "transformers"}


@pytest.mark.parametrize("room", ["planner", "probes", "strategies"])
def test_a_bare_room_is_refused_with_the_right_name(room: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError" in done.stderr and f"import autoplan.{room}" in done.stderr


@pytest.mark.parametrize("room", ["planner", "probes", "strategies"])
def test_the_rooms_are_relative_links(room: str) -> None:
    link = ROOT / "autoplan" / room
    assert link.is_symlink() and os.readlink(link) == f"../{room}"


def test_every_public_name_is_there() -> None:
    missing = [name for name in autoplan.__all__ if getattr(autoplan, name, None) is None]
    assert not missing
    with pytest.raises(AttributeError, match="it has"):
        _ = autoplan.serach


def test_each_strategy_is_registered_and_stands_in_its_room() -> None:
    from autoplan.strategies.prepare import STRATEGIES

    registered = {(type(s).__module__.removeprefix("autoplan.strategies."), type(s).__name__) for s in STRATEGIES}
    written = {
        (path.stem, node.name)
        for path in (ROOT / "strategies").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Strategy") and node.name != "Strategy"
    }
    assert registered == written, "a technique is a class in a file of strategies/, and a line in prepare.py"
    names = [strategy.name for strategy in STRATEGIES]
    assert len(set(names)) == len(names), names


def test_the_sources_parse_in_the_oldest_python() -> None:
    for _, path in source_files():
        ast.parse(path.read_text(), feature_version=(3, 11))


def test_every_file_opens_with_what_it_is() -> None:
    files = [path for _, path in source_files()]
    silent = [str(path.relative_to(ROOT)) for path in files if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, "each file says in its first line what it is for"
