"""Settings of the command line in a file: `autoplan.toml`, or `[tool.autoplan]` of `pyproject.toml`, in this folder.

    [search]                     # [tool.autoplan.search] in pyproject.toml
    model = "gpt2"
    budget = "30m"
    fix = {precision = "bf16"}   # or ["precision=bf16"]

A table for each command, with its options; that of the command that is called is read. What the command line itself
gives goes first, also where two options exclude each other: `--model` there leaves out `trainer` of the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoplan.cli.help import usual_name
from autoplan.errors import UsageError
from autoplan.text import right_name

NOT_SET = ("help", "help_all", "json", "json_output", "yes", "force", "changed_ok", "unverified_ok")
"""Options of a single call, and those that say what a person was asked (docs/threat_model.md)."""

RIVALS = (("model", "trainer"), ("quiet", "verbose"), ("store", "storage"))
"""Options of which a call has one at most."""


def read_settings(command: str, commands: Mapping[str, Any], words: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """The file's name, and the values of one command's parameters, as click's `default_map` has them.

    Args:
        command: The name of the one that is called.
        commands: Of click, by their names.
        words: What the command line gives the command.

    Raises:
        UsageError: the file is not TOML, or has a command that there is not, or in the table of this one an option that
            there is not or that no file may give.
    """
    for name in ("autoplan.toml", "pyproject.toml"):
        if not os.path.isfile(name):
            continue
        try:
            document = tomllib.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            if name == "pyproject.toml":
                continue  # of other tools; they say what is wrong
            raise UsageError(f"{name} cannot be read: {error}", hint="It is a file of TOML.") from None
        tables: Any = document
        if name == "pyproject.toml":
            tools = document.get("tool")
            if not isinstance(tools, dict) or "autoplan" not in tools:
                continue
            tables = tools["autoplan"]
        if not isinstance(tables, dict):
            raise UsageError(
                f"{name} has {tables!r} for tool.autoplan, which is no table",
                hint="Write a table for each command, such as [tool.autoplan.search].",
            )
        for table in (table for table in tables if table not in commands):
            near = right_name(table, commands)
            raise UsageError(
                f"{name} has {table!r}, which is no table of a command",
                hint=f"Did you mean [{_heading(name, near)}]?"
                if near
                else f"An option stands in its command's table, such as [{_heading(name, 'search')}].",
            )
        values = _values(name, command, tables[command], commands[command]) if command in tables else {}
        excluded = _excluded(words)
        return name, {option: value for option, value in values.items() if option not in excluded}
    return "", {}


def _excluded(words: Sequence[str]) -> set[str]:
    """The options of a file that do not go with those of the command line."""
    own = words[: words.index("--")] if "--" in words else words
    given = {_key(word.partition("=")[0]) for word in own if word.startswith("--")}
    excluded = {other for pair in RIVALS for one, other in (pair, pair[::-1]) if one in given}
    is_local = "--launcher=local" in own or ("--launcher", "local") in zip(own, own[1:], strict=False)
    return excluded | {"nodes"} if is_local else excluded


def _values(file: str, name: str, table: Any, command: Any) -> dict[str, Any]:
    """The values of one command's table."""
    if not isinstance(table, dict):
        raise UsageError(
            f"{file} has {table!r} for {name}, which is a command and takes a table of its options",
            hint=f"Write its options as OPTION = VALUE, one a line, below [{_heading(file, name)}].",
        )
    flags = {_key(flag): one for one in command.params for flag in one.opts if flag.startswith("--")}
    values: dict[str, Any] = {}
    for given, value in table.items():
        key = usual_name(given.replace("_", "-")).replace("-", "_")
        option = flags.get(key)
        names = {key} if option is None else {option.name, *map(_key, option.opts)}
        if names & set(NOT_SET) or (key == "model" and "changed_ok" in flags):
            raise UsageError(
                f"{file} has {given!r} for {name}, which is said on the command line alone", hint="Leave it out there."
            )
        if option is None:
            near = right_name(key, flags.keys() - set(NOT_SET))
            raise UsageError(
                f"{file} has {given!r} for {name}, which has no such option",
                hint=f"Did you mean {near}?" if near else f"autoplan {name} --help lists its options.",
            )
        if isinstance(value, dict):
            texts = [
                f"{knob}={','.join(map(str, one)) if isinstance(one, list) else one}" for knob, one in value.items()
            ]
            value = texts if option.multiple else ",".join(texts)
        elif option.multiple and not isinstance(value, list):
            value = [value]
        values[str(option.name)] = value
    return values


def _key(flag: str) -> str:
    """An option's name as a file has it: `max_trials` for `--max-trials`."""
    return flag.lstrip("-").replace("-", "_")


def _heading(file: str, command: str) -> str:
    return command if file == "autoplan.toml" else f"tool.autoplan.{command}"
