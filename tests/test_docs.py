"""The documentation: links resolve, commands exist, what is made from code is current, lines and pages are short."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml

import autoplan
from autoplan.cli.app import build_app

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
MAX_COLUMNS = 120
MAX_WORDS = 36_450
"""Of all pages under docs/, with those made from the code: a page that grows makes another one shrink."""


@functools.cache
def load(name: str) -> ModuleType:
    """A file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page: Path) -> str:
    """The path of a page inside the repository."""
    return page.relative_to(ROOT).as_posix()


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of what is in no code block, no row of a table and no comment."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "|", "<!--")):
            yield number, line


def anchor_of(heading: str) -> str:
    """The anchor that a code host gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower())
    return kept.replace(" ", "-")


def anchors(text: str) -> set[str]:
    """The anchors of a page."""
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def links(text: str) -> list[str]:
    """The targets of the links to files of this repository."""
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken_links(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere: no such file, or no such heading in it."""
    broken = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    assert not broken_links(page, page.read_text())


def test_the_check_of_links_sees_a_broken_one() -> None:
    page = DOCS / "README.md"
    assert broken_links(page, "[a](nowhere.md) [b](cli.md) [c](cli.md#no-such-heading) [d](https://example.org)") == [
        "nowhere.md",
        "cli.md#no-such-heading",
    ]
    assert not broken_links(page, "[e](errors.md#exit-codes)")


def test_every_page_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        found = ((page.parent / target.partition("#")[0]).resolve() for target in links(page.read_text()))
        waiting += [file for file in found if file.suffix == ".md" and file.exists()]
    assert not [name_of(page) for page in PAGES if page not in seen], "link each page from docs/README.md"


def test_every_page_has_its_place_in_the_built_documentation() -> None:
    def pages(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        elif isinstance(node, list):
            for one in node:
                yield from pages(one)
        elif isinstance(node, dict):
            yield from pages(list(node.values()))

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(map(name_of, PAGES))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_link_only_what_is_built_with_them(page: Path) -> None:
    """`make docs` copies these folders and files; what else a page names is in code, not a link."""
    built = ("docs", "examples", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
    outside = [
        target
        for target in links(page.read_text())
        if target.partition("#")[0]
        and (page.parent / target.partition("#")[0]).resolve().relative_to(ROOT).parts[0] not in built
    ]
    assert not outside


def test_the_check_of_the_built_pages_sees_a_dead_link(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "outside.html").write_text("")
    (site / "index.html").write_text(
        '<a href="other.html">1</a> <a href="other.html#here">2</a> <a href="https://example.org">3</a>'
        '<a href="none.html">4</a> <a href="other.html#there">5</a> <a href="../outside.html">6</a>'
    )
    (site / "other.html").write_text('<h2 id="here">x</h2>')
    assert load("check_site").dead_links(site) == [
        "index.html: ../outside.html",
        "index.html: none.html",
        "index.html: other.html#there",
    ]


@pytest.mark.parametrize("name", load("make_pages").FILES)
def test_what_is_made_from_the_code_is_current(name: str) -> None:
    assert (ROOT / name).read_text() == load("make_pages").FILES[name](), "run `python docs/make_pages.py`"


def test_the_pages_are_short() -> None:
    words = {name_of(page): len(re.findall(r"\S*\w\S*", page.read_text())) for page in DOCS.rglob("*.md")}
    assert sum(words.values()) <= MAX_WORDS, dict(sorted(words.items(), key=lambda item: -item[1]))


def commands(text: str) -> set[str]:
    """The words that stand where a command of autoplan stands: after `autoplan` at the start of a code line or span."""
    spans = re.findall(r"`autoplan ([a-z]+)\b", text)
    lines = re.findall(r"^(?:    |\$ )(?:python -m )?autoplan ([a-z]+)\b", text, re.MULTILINE)
    return {*spans, *lines}


def test_the_commands_that_pages_name_exist() -> None:
    known = {command.name for command in build_app().registered_commands}
    assert known >= {"search", "show"}
    unknown = {name_of(page): commands(page.read_text()) - known for page in PAGES}
    assert not {page: names for page, names in unknown.items() if names}


def flags(text: str) -> set[tuple[str, str]]:
    """(command, option) of each command line of autoplan in a page's code lines and spans, up to `--` or a comment."""
    lines = re.findall(r"`(autoplan [a-z]+ [^`]+)`", text)
    lines += re.findall(r"^(?:    |\$ )(?:python -m )?(autoplan [a-z]+ .*)$", text, re.MULTILINE)
    kept = (re.split(r"\s--(?:\s|$)|\s#", line)[0] for line in lines)
    return {(line.split()[1], flag) for line in kept for flag in re.findall(r"(?<=\s)--[a-z][\w-]*", line)}


@functools.cache
def known_options() -> dict[str, set[str]]:
    """The options of each command."""
    commands = typer.main.get_command(build_app()).commands
    return {name: {flag for one in command.params for flag in one.opts} for name, command in commands.items()}


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) != "CHANGELOG.md"], ids=name_of)
def test_the_options_that_pages_give_to_a_command_exist(page: Path) -> None:
    known = known_options()
    assert "--budget" in known["search"]
    assert not {(name, flag) for name, flag in flags(page.read_text()) if flag not in known[name] | {"--help"}}


def test_the_check_of_options_sees_a_wrong_one() -> None:
    text = "`autoplan search --modle x -- --its own`\n    autoplan show --trials   # --no\n"
    assert flags(text) == {("search", "--modle"), ("show", "--trials")}


def test_every_public_name_has_a_docstring() -> None:
    silent = [name for name in autoplan.__all__ if name != "__version__" and not getattr(autoplan, name).__doc__]
    assert not silent


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) != "CHANGELOG.md"], ids=name_of)
def test_the_source_files_that_pages_name_exist(page: Path) -> None:
    folders = "planner|probes|strategies|autoplan|tests|benchmarks|examples"
    named = re.findall(rf"`((?:{folders})/[\w/.]+)`", page.read_text())
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_short(page: Path) -> None:
    long = [f"{name_of(page)}:{number}" for number, line in prose(page.read_text()) if len(line) > MAX_COLUMNS]
    assert not long, f"text lines have at most {MAX_COLUMNS} columns; tables and code blocks may be wider"


def test_the_check_of_lines_sees_a_long_one() -> None:
    text = "x" * 121 + "\n```\n" + "y" * 121 + "\n```\n| " + "z" * 121 + " |\n"
    assert [number for number, line in prose(text) if len(line) > MAX_COLUMNS] == [1]


def broken_tables(text: str) -> list[int]:
    """The numbers of lines that begin a table, and are shown as text: the next line is not its |---|."""
    code = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    lines = ["", *code.sub(lambda block: "\n" * block[0].count("\n"), text).splitlines(), ""]
    first = [n for n in range(1, len(lines)) if lines[n].startswith("|") and not lines[n - 1].startswith("|")]
    return [n for n in first if not re.fullmatch(r"[|:\- ]*-[|:\- ]*", lines[n + 1])]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_looks_like_a_table_is_one(page: Path) -> None:
    assert not broken_tables(page.read_text())


def test_the_check_of_tables_sees_one_that_a_blank_line_ends() -> None:
    assert broken_tables("| a | b |\n| --- | --- |\n| 1 | 2 |\n\n| 3 | 4 |\n| 5 | 6 |\n") == [5]
    assert broken_tables("```\n| a |\n```\n|a|\n|---|\n") == []


def test_a_program_that_searches_and_applies_a_plan_keeps_it() -> None:
    """A plan for several ranks is applied by another program, which loads it."""
    programs = [
        (name_of(page), block)
        for page in PAGES
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        if "autoplan.search(" in block and "plan.apply_to(" in block
    ]
    assert len(programs) >= 3
    assert not [name for name, block in programs if "out=" not in block]


def test_the_tutorial_shows_the_example_as_it_is() -> None:
    example = (ROOT / "examples" / "tutorial.py").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", (DOCS / "tutorial.md").read_text(), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            code = line.partition("  # ")[0].rstrip()
            assert code.strip() == "..." or code in example.splitlines(), f"not in examples/tutorial.py: {code}"


def test_the_design_names_every_package() -> None:
    text = (DOCS / "design.md").read_text()
    listed = text.partition("### Which way imports go")[2].partition("### What is in each package")[0]
    packages = sorted(file.parent for name in ("planner", "strategies") for file in (ROOT / name).glob("*/__init__.py"))
    missing = [name for name in map(name_of, packages) if name not in listed]
    assert packages and not missing


def test_the_commit_hooks_have_the_tested_version_of_ruff() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (version,) = (repo["rev"] for repo in hooks if repo["repo"].endswith("/ruff-pre-commit"))
    assert f"ruff=={version.removeprefix('v')}" in (ROOT / "constraints.txt").read_text().splitlines()
