"""Settings of the command line in a file: `autoplan.toml`, or `[tool.autoplan]` of `pyproject.toml`, in this folder.

    [search]                     # [tool.autoplan.search] in pyproject.toml
    model = "gpt2"
    budget = "30m"
    fix = {precision = "bf16"}   # or ["precision=bf16"]

A table for each command, with its options. What the command line itself gives goes first.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoplan.cli.help import usual_name
from autoplan.errors import UsageError
from autoplan.text import right_name

NOT_SET = ("help", "help_all", "json", "yes", "force", "changed_ok", "unverified_ok")
"""Options of a single call, and those that say what a person was asked (docs/threat_model.md)."""


def read_settings(commands: Mapping[str, Any]) -> tuple[str, dict[str, dict[str, Any]]]:
    """The file's name, and the values of parameters for each command, as click's `default_map` has them.

    Args:
        commands: Of click, by their names.

    Raises:
        UsageError: the file is not TOML, or has a command or an option that there is not.
    """
    for name in ("autoplan.toml", "pyproject.toml"):
        path = Path(name)
        if not path.is_file():
            continue
        try:
            document = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            if name == "pyproject.toml":
                continue  # of other tools; they say what is wrong
            raise UsageError(f"{name} cannot be read: {error}", hint="It is a file of TOML.") from None
        tables = document if name == "autoplan.toml" else document.get("tool", {}).get("autoplan")
        if tables is not None:
            return name, {command: _values(name, command, table, commands) for command, table in tables.items()}
    return "", {}


def _values(file: str, command: str, table: Any, commands: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one command's table."""
    if command not in commands or not isinstance(table, dict):
        near = right_name(command, commands)
        raise UsageError(
            f"{file} has {command!r}, which is no table of a command",
            hint=f"Did you mean [{near}]?" if near else "An option stands in its command's table, such as [search].",
        )
    flags = {flag.lstrip("-").replace("-", "_"): one for one in commands[command].params for flag in one.opts}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = usual_name(key.replace("_", "-")).replace("-", "_")
        if name in NOT_SET or (name == "model" and "changed_ok" in flags):
            raise UsageError(
                f"{file} has {key!r} for {command}, which is said on the command line alone", hint="Leave it out there."
            )
        if name not in flags or flags[name].param_type_name != "option":
            near = right_name(name, flags.keys() - set(NOT_SET))
            raise UsageError(
                f"{file} has {key!r} for {command}, which has no such option",
                hint=f"Did you mean {near}?" if near else f"autoplan {command} --help lists its options.",
            )
        if isinstance(value, dict):
            value = [f"{knob}={one}" for knob, one in value.items()]
        values[str(flags[name].name)] = value
    return values
