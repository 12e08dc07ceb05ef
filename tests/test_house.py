"""The rules of the architecture: which way imports go, what `import autoplan` loads, which names may be imported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import autoplan

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "optuna", "transformers", "numpy", "typer", "rich")

# From the lowest package to the highest: each imports from those on its own line and on the lines before it. A module
# belongs to the longest name that it begins with.
ORDER = (
    ("autoplan", "autoplan.errors", "autoplan.files", "autoplan.units"),
    ("autoplan.record",),
    ("autoplan.processes",),
    ("autoplan.probes.catalog",),
    ("autoplan.probes",),
    ("autoplan.strategies",),  # the package itself holds no code
    ("autoplan.strategies.config",),
    ("autoplan.strategies.knob_text",),
    ("autoplan.strategies.workloads",),
    ("autoplan.strategies.analysis",),
    ("autoplan.strategies.techniques",),
    ("autoplan.strategies.state", "autoplan.strategies.step", "autoplan.strategies.run"),
    ("autoplan.strategies.prepare", "autoplan.strategies.inspect"),
    ("autoplan.planner", "autoplan.planner.records"),
    ("autoplan.planner.trace",),
    ("autoplan.planner.cost",),
    ("autoplan.planner.cost.traced", "autoplan.planner.cost.analytical"),
    ("autoplan.planner.space",),
    ("autoplan.planner.trials",),
    ("autoplan.planner.parity",),
    ("autoplan.planner.store",),
    ("autoplan.planner.plan",),
    ("autoplan.planner.search", "autoplan.planner.export"),
    ("autoplan.planner.verify", "autoplan.planner.estimate"),
    ("autoplan.planner.diagnose",),
    ("autoplan.frameworks",),  # a package for each framework; from below it is found by name
    ("autoplan.report",),
    ("autoplan.trainings",),
    ("autoplan.api",),
    ("autoplan.estimates",),
    ("autoplan.cli",),
    ("autoplan.__main__",),
)
HEIGHTS = {name: height for height, names in enumerate(ORDER) for name in names}
Imports = Mapping[str, set[str]]


def home(name: str) -> str:
    """Where a public name of autoplan really lives; any other name is returned as it is."""
    package, _, member = name.partition(".")
    return autoplan._HOME_OF[member] if package == "autoplan" and member in autoplan._HOME_OF else name


def package_of(module: str) -> str:
    """The line of ORDER that a module belongs to."""
    parts = home(module).split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        # the bare packages stand for their own __init__.py alone: what is in them has a line of its own
        if name in HEIGHTS and (length == len(parts) or name not in ("autoplan.strategies", "autoplan.planner")):
            return name
    raise AssertionError(f"{module} belongs to no package that the design names: add it to ORDER")


def source_files() -> Iterator[tuple[str, Path]]:
    """(module name, file) of every module of the package, the links followed, but for autoplan/__init__.py.

    That one names the public members, as text and for type checkers, and loads none of them.
    """
    for package in ("", "processes", "cli", "report", "frameworks", "planner", "strategies", "probes"):
        folder = ROOT / "autoplan" / package
        files = sorted(folder.glob("*.py") if package == "" else folder.rglob("*.py"))
        for path in files:
            if path == ROOT / "autoplan" / "__init__.py":
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every `autoplan...` name that a file imports: at the top, in functions, and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def wrong_way(module: str, tree: ast.AST) -> list[str]:
    """The imports of a module that go up."""
    return [
        f"{module}:{line} imports {name}"
        for name, line in imported_names(tree)
        if name.split(".")[0] == "autoplan" and HEIGHTS[package_of(name)] > HEIGHTS[package_of(module)]
    ]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Each module of the package, parsed as the oldest Python does that may run it."""
    return {module: ast.parse(path.read_text(), str(path), feature_version=(3, 11)) for module, path in source_files()}


def imports_between_files(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """For each module, the modules of autoplan that it imports."""
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        found[module] = set()
        for name, _ in imported_names(tree):
            parts = home(name).split(".")
            known = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            target = next((candidate for candidate in known if candidate in trees), None)
            if target is not None and target != module:
                found[module].add(target)
    return found


def imports_between_packages(files: Imports) -> dict[str, set[str]]:
    """The same between packages: a folder, or a file that stands directly in autoplan/, planner/ or strategies/."""
    loose = ("autoplan", "autoplan.planner", "autoplan.strategies")
    folders = {".".join(path.relative_to(ROOT).parts[:-1]) for _, path in source_files() if path.name == "__init__.py"}

    def package(module: str) -> str:
        parent = module.rpartition(".")[0]
        return module if module in folders or parent in loose else parent

    found: dict[str, set[str]] = {}
    for module, targets in files.items():
        found.setdefault(package(module), set()).update(package(target) for target in targets)
    return {name: targets - {name} for name, targets in found.items()}


def circles(imports: Imports) -> list[list[str]]:
    """The groups of modules that import each other in a circle (strongly connected components, Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in sorted(imports.get(name, ())):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(imports):
        if name not in order:
            visit(name)
    return found


def test_imports_go_one_way(trees: Mapping[str, ast.Module]) -> None:
    wrong = [line for module, tree in trees.items() for line in wrong_way(module, tree)]
    assert not wrong, "a package imports only from those before it in ORDER"


def test_the_direction_check_sees_a_wrong_import() -> None:
    up = "def f():\n    from autoplan.planner.plan.plan import Plan\n"
    assert wrong_way("autoplan.probes.host", ast.parse(up)) == [
        "autoplan.probes.host:2 imports autoplan.planner.plan.plan.Plan"
    ]
    assert not wrong_way("autoplan.cli.search", ast.parse(up))
    assert wrong_way("autoplan.probes.host", ast.parse("from autoplan import Plan"))
    assert not wrong_way("autoplan.probes.host", ast.parse("from autoplan import __version__"))
    typing_only = "if TYPE_CHECKING:\n    from autoplan.planner.search.run import run_search\n"
    assert wrong_way("autoplan.planner.trace.trace", ast.parse(typing_only))
    assert wrong_way("autoplan.strategies.workloads.spec", ast.parse("import autoplan.strategies.prepare"))


def test_no_file_and_no_package_imports_itself_in_a_circle(trees: Mapping[str, ast.Module]) -> None:
    files = imports_between_files(trees)
    assert circles(files) == []
    assert circles(imports_between_packages(files)) == []


def test_the_circle_check_sees_a_circle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    between = imports_between_packages(
        {"autoplan.probes.gpu": {"autoplan.probes.catalog"}, "autoplan.probes.catalog": {"autoplan.probes.host"}}
    )
    assert circles(between) == [["autoplan.probes", "autoplan.probes.catalog"]]


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


def test_records_load_without_torch() -> None:
    modules = "autoplan.planner.plan.plan, autoplan.strategies.config, autoplan.probes.profile"
    assert not loaded_by(f"import {modules}") & {"torch", "optuna", "transformers"}


@pytest.mark.parametrize("package", ["planner", "probes", "strategies"])
def test_a_bare_package_is_refused_with_the_right_name(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError" in done.stderr and f"import autoplan.{package}" in done.stderr


@pytest.mark.parametrize("package", ["planner", "probes", "strategies"])
def test_the_packages_are_relative_links(package: str) -> None:
    link = ROOT / "autoplan" / package
    assert link.is_symlink() and os.readlink(link) == f"../{package}"


def test_every_public_name_is_there() -> None:
    missing = [name for name in autoplan.__all__ if getattr(autoplan, name, None) is None]
    assert not missing
    with pytest.raises(AttributeError, match="it has"):
        _ = autoplan.serach


def test_each_strategy_is_registered_and_stands_in_techniques() -> None:
    from autoplan.strategies.prepare import STRATEGIES

    registered = {
        (type(s).__module__.removeprefix("autoplan.strategies.techniques."), type(s).__name__) for s in STRATEGIES
    }
    written = {
        (path.stem, node.name)
        for path in (ROOT / "strategies" / "techniques").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Strategy") and node.name != "Strategy"
    }
    assert registered == written, "a technique is a class in a file of strategies/techniques/, and a line in prepare.py"
    names = [strategy.name for strategy in STRATEGIES]
    assert len(set(names)) == len(names), names


def test_the_sources_parse_in_the_oldest_python(trees: Mapping[str, ast.Module]) -> None:
    assert len(trees) > 150, "the walk no longer follows the links"


def test_every_file_opens_with_what_it_is(trees: Mapping[str, ast.Module]) -> None:
    silent = [module for module, tree in trees.items() if not ast.get_docstring(tree)]
    assert not silent, "each file says in its first line what it is for"
