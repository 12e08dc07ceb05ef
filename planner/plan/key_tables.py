"""The names of a tool's settings, as data: which key says what, per version of the tool.

In: a tool's name, and its version. Out: the table that fits, from `keys/<tool>.json`. A table is for the versions from
its `since` on (and before its `before`); `verified` is the version whose own reader read every key of it back. Its
`keys` have, by the plan's term, the key; a dot leads into a section.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from importlib import resources
from typing import Any

from autoplan.errors import ExportError


def pick_table(tool: str, version: str | None) -> dict[str, Any]:
    """The newest table for a version of a tool, as it stands in the file.

    Args:
        tool: The package.
        version: Its version; None: the newest table.

    Raises:
        ExportError: no table is for that version.
    """
    tables = _tables(tool)
    fitting = [
        table
        for table in tables
        if version is None or _number(table["since"]) <= _number(version) < _number(table.get("before", "9999"))
    ]
    if not fitting:
        since = ", ".join(table["since"] for table in tables)
        before = "".join(f", and end before {table['before']}" for table in tables[:1] if "before" in table)
        raise ExportError(
            f"no key table fits {tool} {version}",
            hint=f"Tables start at {since}{before}. Install such a version, or use another target.",
        )
    return max(fitting, key=lambda table: _number(table["since"]))


@functools.cache
def _tables(tool: str) -> list[dict[str, Any]]:
    text = resources.files("autoplan.planner.plan").joinpath("keys", f"{tool}.json").read_text()
    tables: list[dict[str, Any]] = json.loads(text)["tables"]
    return tables


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def nest(keys: dict[str, str], values: dict[str, object]) -> dict[str, object]:
    """Values by the plan's term as the tool's document; what is None is left out."""
    document: dict[str, object] = {}
    for term, value in values.items():
        if value is None:
            continue
        section = document
        *parents, key = keys[term].split(".")
        for parent in parents:
            section = section.setdefault(parent, {})  # type: ignore[assignment]
        section[key] = value
    return document


def version_line(tool: str, version: str | None) -> str:
    """The line on versions in the head of a file, where this version of the tool is installed."""
    table = pick_table(tool, version)
    verified = f"verified on {table['verified']}" if table["verified"] else "not verified"
    here = f"; {version} is installed where it was written" if version not in (None, table["verified"]) else ""
    return f"Written for {tool} {table['written_for']}, {verified}{here}."


def version_notes(tool: str, version: str | None) -> tuple[str, ...]:
    """Sentences to say if the installed version is not the one that the table was verified on."""
    verified = pick_table(tool, version)["verified"]
    if version == verified:
        return ()
    return (
        f"the keys for {tool} were verified on {verified or 'no version'}; {version} is installed here and read every "
        "value back as the plan has it",
    )


def installed_version(package: str) -> str | None:
    """The installed version of a package, of Lightning under either of its names; None where it is not installed."""
    for name in (package, "pytorch-lightning") if package == "lightning" else (package,):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
