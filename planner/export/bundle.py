"""Takes definitions out of autoplan's own source, with all that they use, so that an export runs the measured code.

In: names of functions and classes, and what a plan says (the constants of planner/export/kit/settings.py). Out: Python
source in an order that runs. Nothing is imported for it: the files are read as text.

A definition is taken as its file has it, without `# type: ignore` marks. In the kit, an `if` that asks settings alone
is decided here, and one branch stays. Names that only annotations use are not followed: those of autoplan become Any.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import autoplan

_FOLDER = Path(autoplan.__file__).parent
KIT = "autoplan.planner.export.kit"
SETTINGS = f"{KIT}.settings"
INSTEAD = {"autoplan.errors": f"{KIT}.errors"}
"""By module of autoplan, the one whose definitions stand for its own."""

_MARKS = re.compile(r"  # (type: ignore|noqa)[^\n#]*(  # .*)?$", re.MULTILINE)


class Name(NamedTuple):
    """A definition: the module that has it, and its name there."""

    module: str
    name: str


class Import(NamedTuple):
    """`import module as local` where there is no name, else `from module import name as local`."""

    module: str
    name: str
    local: str


@dataclass(frozen=True)
class Module:
    """A source file: its lines, its definitions by name, and what it imports, by the name that it has here."""

    lines: list[str]
    definitions: dict[str, ast.stmt]
    imports: dict[str, Import]


def read_module(name: str) -> str:
    """The source of a module of autoplan."""
    place = _FOLDER.joinpath(*name.split(".")[1:])
    return (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text(encoding="utf-8")


@functools.cache
def _parsed(name: str) -> Module:
    return parse_module(read_module(name))


def parse_module(text: str) -> Module:
    """The definitions and imports at the top of a source text."""
    tree = ast.parse(text)
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, Import] = {}
    for node in tree.body:
        definitions |= {name: node for name in defined_names(node) if name not in definitions}
        for inside in node.body if isinstance(node, ast.If) else [node]:  # under TYPE_CHECKING too
            imports |= {one.local: one for one in _imports(inside)}
    return Module(text.splitlines(), definitions, imports)


def defined_names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _imports(node: ast.stmt) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, "", alias.asname or alias.name.partition(".")[0])
    elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
        for alias in node.names:
            names = _parsed(node.module).definitions if alias.name == "*" else [alias.name]
            yield from (Import(node.module, name, alias.asname or name) for name in names)


@functools.cache
def _names_in(name: str) -> frozenset[str]:
    """All names in a source file."""
    return frozenset(one.id for one in ast.walk(ast.parse(read_module(name))) if isinstance(one, ast.Name))


_FOLDED: dict[tuple[str, str], Module] = {}
"""Files of the kit as they were folded, by their name and the settings that they ask: many plans ask the same."""


def fold(text: str, settings: Mapping[str, Any]) -> str:
    """The text without the `if` statements and expressions that ask settings alone: of each, the branch that runs."""
    lines = text.splitlines()
    while asking := list(_asking(ast.parse("\n".join(lines)), lines, settings)):  # what is inside of one comes later
        for node in sorted(asking, key=lambda one: (one.lineno, one.col_offset), reverse=True):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            holds = bool(eval(ast.unparse(node.test), {"__builtins__": {}}, dict(settings)))
            if isinstance(node, ast.IfExp):
                kept = ast.get_source_segment("\n".join(lines), node.body if holds else node.orelse) or ""
                # ast counts columns in bytes of UTF-8; our sources are ASCII where settings are asked
                lines[first:last] = [lines[first][: node.col_offset] + kept + lines[last - 1][node.end_col_offset :]]
            else:
                lines[first:last] = _branch(node, lines, holds)
    return "\n".join(lines) + "\n"


def _asking(node: ast.AST, lines: list[str], settings: Mapping[str, Any]) -> Iterator[ast.If | ast.IfExp]:
    """The outermost `if` statements and expressions that ask settings alone; an `elif` is its `if`'s affair."""
    if isinstance(node, ast.If | ast.IfExp) and not lines[node.lineno - 1].lstrip().startswith("elif"):
        names = [one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)]
        if names and all(name in settings for name in names):
            yield node
            return
    for inside in ast.iter_child_nodes(node):
        yield from _asking(inside, lines, settings)


def _branch(node: ast.If, lines: list[str], holds: bool) -> list[str]:
    """The lines of the branch that runs, in the place of their `if`."""
    kept = node.body if holds else node.orelse
    branch = [] if not kept else lines[kept[0].lineno - 1 : kept[-1].end_lineno]
    if branch and branch[0].lstrip().startswith("elif"):
        branch[0] = branch[0].replace("elif", "if", 1)
    away = 0 if not kept else len(branch[0]) - len(branch[0].lstrip()) - node.col_offset
    return [line[away:] if line.strip() else line for line in branch]


class _Uses(ast.NodeVisitor):
    """The names that a statement uses: as it is defined, later in its functions, and in annotations."""

    def __init__(self, node: ast.stmt) -> None:
        self.at_once: set[str] = set()
        self.later: set[str] = set()
        self.annotated: set[str] = set()
        self._found = self.at_once
        self.visit(node)

    def _into(self, found: set[str], *nodes: ast.AST | None) -> None:
        before = self._found
        self._found = before if before is self.annotated else found
        for node in nodes:
            if node is not None:
                self.visit(node)
        self._found = before

    def visit_Name(self, node: ast.Name) -> None:
        self._found.add(node.id)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._into(self.annotated, node.annotation)
        self._into(self._found, node.target, node.value)

    def visit_arg(self, node: ast.arg) -> None:
        self._into(self.annotated, node.annotation)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._into(self._found, *node.decorator_list, node.args)
        self._into(self.annotated, node.returns)
        outer, inside = self._found, set[str]()
        self._found = inside
        for statement in node.body:
            self.visit(statement)
        self._found = outer
        (self.later if outer is self.at_once else outer).update(inside - _local_names(node))

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._into(self._found, node.args)
        self._into(self.later, node.body)


_uses_of = functools.cache(_Uses)

_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""The syntax nodes that have names of their own."""


def _local_names(node: ast.FunctionDef) -> set[str]:
    """The arguments of a function, and what it assigns itself, but for what it says is global."""
    found = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    shared: set[str] = set()
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        one = waiting.pop()
        if isinstance(one, ast.Global):
            shared |= set(one.names)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        elif not isinstance(one, _SCOPES):
            waiting += ast.iter_child_nodes(one)
    return found - shared


class Bundle:
    """Definitions and all that they use.

    Args:
        settings: What the plan says, by name of a constant of kit/settings.py.
        *names: The definitions, as `module:name`; modules of the kit by their own name.
    """

    def __init__(self, settings: Mapping[str, Any], *names: str) -> None:
        self._values = dict(settings)
        self._kit: dict[str, Module] = {}
        self._taken: dict[Name, _Uses] = {}
        self._imports: dict[str, Import] = {}
        self._any: set[str] = set()
        self.asked: set[str] = set()
        """The settings that the source still asks."""
        for name in names:
            module, _, own = name.partition(":")
            self._take(Name(module if "." in module else f"{KIT}.{module}", own))
        self._any -= {taken.name for taken in self._taken}
        twice = {one.name for one in self._taken for two in self._taken if one != two and one.name == two.name}
        assert not twice, f"two files define {', '.join(sorted(twice))}: rename one"

    def _module(self, name: str) -> Module:
        if not name.startswith(KIT):
            return _parsed(name)
        if name not in self._kit:
            asked = {one: self._values[one] for one in sorted(_names_in(name)) if one in self._values}
            key = name, repr(asked)
            if key not in _FOLDED:
                _FOLDED[key] = parse_module(fold(read_module(name), asked))
            self._kit[name] = _FOLDED[key]
        return self._kit[name]

    def _take(self, name: Name) -> None:
        if name.module == SETTINGS:
            self.asked.add(name.name)
            return
        if name in self._taken:
            return
        module = self._module(name.module)
        assert name.name in module.definitions, f"{name.module} no longer defines {name.name}: change the export too"
        uses = self._taken[name] = _uses_of(module.definitions[name.name])
        for used in sorted(uses.at_once | uses.later | uses.annotated):
            found = self._resolve(name.module, used)
            if isinstance(found, Import):
                key = used if found.name or "." not in found.module else found.module
                other = self._imports.setdefault(key, found)
                assert other == found, f"{used} is {found} and {other}: rename one"
            elif found is not None and (used in uses.at_once or used in uses.later):
                self._take(found)
            elif found is not None:
                self._any.add(used)

    def _resolve(self, module: str, name: str) -> Name | Import | None:
        """The definition or import behind a name of a module; None: a local name, or one of Python's own."""
        read = self._module(module)
        if name in read.definitions:
            return Name(INSTEAD.get(module, module), name)
        found = read.imports.get(name)
        if found is None or not found.module.startswith("autoplan"):
            return found
        return self._resolve(INSTEAD.get(found.module, found.module), found.name)

    def imports(self) -> list[str]:
        """The import lines, in two groups: Python's own, and other packages."""
        lines: set[str] = set()
        members: defaultdict[str, set[str]] = defaultdict(set)
        for one in self._imports.values():
            if one.name:
                members[one.module].add(one.name + ("" if one.local == one.name else f" as {one.local}"))
            else:
                renamed = one.local != one.module.partition(".")[0]
                lines.add(f"import {one.module}" + (f" as {one.local}" if renamed else ""))
        if self._any:
            members["typing"].add("Any")
        lines |= {f"from {module} import {', '.join(sorted(names))}" for module, names in members.items()}
        groups: tuple[list[str], list[str]] = ([], [])
        for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
            groups[line.split()[1].partition(".")[0] not in sys.stdlib_module_names].append(_wrapped(line))
        return ["\n".join(one) for one in groups if one]

    def source(self) -> str:
        """The definitions, each after those that it needs at once; two blank lines apart."""
        texts: list[str] = []
        written: set[Name] = set()
        if self._any:
            texts.append(f"{' = '.join(sorted(self._any))} = Any  # types that annotations alone name")

        def write(name: Name) -> None:
            if name in written:
                return
            written.add(name)
            for used in sorted(self._taken[name].at_once):
                found = self._resolve(name.module, used)
                if found in self._taken and isinstance(found, Name):
                    write(found)
            texts.append(self._text(name))

        modules = list(dict.fromkeys(name.module for name in self._taken))[::-1]  # what is used comes first
        for module in sorted(modules, key=lambda name: name not in INSTEAD.values()):
            own = [name for name in self._taken if name.module == module]
            for name in sorted(own, key=lambda one: self._module(module).definitions[one.name].lineno):
                write(name)
        return "\n\n\n".join(texts)

    def _text(self, name: Name) -> str:
        """The source of a definition, with its decorators and the comments above it."""
        module = self._module(name.module)
        node = module.definitions[name.name]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while first and module.lines[first - 1].startswith("#"):
            first -= 1
        return _MARKS.sub("", "\n".join(module.lines[first : node.end_lineno]))


def _wrapped(line: str) -> str:
    """An import line, over several where it is long."""
    if len(line) <= 120:
        return line
    start, _, names = line.partition(" import ")
    return f"{start} import (\n    " + ",\n    ".join(names.split(", ")) + ",\n)"
