"""The documentation: links resolve, commands and files exist, lists of public names are current, lines are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import autoplan
from autoplan.cli.app import build_app

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
MAX_COLUMNS = 120

# Pages that are still to be wrapped: a page that is leaves this list, and none may be added.


def name_of(page: Path) -> str:
    """The path of a page inside the repository."""
    return page.relative_to(ROOT).as_posix()


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of what is neither in a code block nor a row of a table."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "|")):
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
    assert not broken_links(page, "[e](cli.md#exit-codes)")


def test_every_page_is_reachable_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [DOCS / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        found = ((page.parent / target.partition("#")[0]).resolve() for target in links(page.read_text()))
        waiting += [file for file in found if file.suffix == ".md" and file.exists()]
    unreached = [name_of(page) for page in PAGES if page not in seen and page != ROOT / "README.md"]
    assert not unreached, "link each page from docs/README.md"


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
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


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
    named = commands((DOCS / "cli.md").read_text()) | set(
        re.findall(r"^\| `([a-z]+)", (DOCS / "cli.md").read_text(), re.MULTILINE)
    )
    assert known <= named, "docs/cli.md names every command"


def test_the_table_of_public_names_is_current() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(autoplan.__all__), "docs/api.md has a row for each public name"


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: autoplan\.(\w+)$", (DOCS / "reference" / "autoplan.md").read_text(), re.MULTILINE)
    public = [name for name in autoplan.__all__ if name != "__version__"]
    assert sorted(named) == sorted(public), "docs/reference/autoplan.md has `::: autoplan.NAME` for each public name"


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
