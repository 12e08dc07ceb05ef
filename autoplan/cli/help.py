"""The help of the commands: options in groups, each type as a word, the rarer options of a search under --help-all."""

from __future__ import annotations

from typing import Any

import typer
import typer.core


class Words:
    """Parameters whose type is said by a word (`N`, `TIME`); a switch has none, and neither has an argument."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        panels = [panel for one in params if (panel := getattr(one, "rich_help_panel", None))]
        for one in params:
            if one.name == "help" and panels:
                one.rich_help_panel = panels[-1]
            if one.param_type_name == "argument":
                one.display_type = lambda ctx: ""
            elif one.is_flag and one.metavar is None:
                one.metavar = ""
        return params


class Command(Words, typer.core.TyperCommand):
    """A command whose plain help has the groups of the one with boxes."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                title = "Arguments" if one.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(one, "rich_help_panel", None) or title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(Words, typer.core.TyperGroup):
    """The application; its commands are in the order in which they were added."""


def usual_name(name: str) -> str:
    """The option of the command line for a name: what a call in Python names `sequence_length` is `--seq-len`."""
    return {"sequence-length": "seq-len"}.get(name, name)


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Prints the help with every option, and ends."""
    if wanted:
        for one in ctx.command.params:
            one.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit
