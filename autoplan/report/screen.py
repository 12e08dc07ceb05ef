"""The stream that output goes to: a terminal, or a file, a pipe, a log. Loads rich only if a console is made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def is_plain(stream: Any) -> bool:
    """True where bars and colours have no place: not a terminal, NO_COLOR set, or a dumb terminal."""
    isatty = getattr(stream, "isatty", lambda: False)  # a stream that a program put there may not say
    try:
        is_terminal = bool(isatty())
    except ValueError:  # it is closed
        is_terminal = False
    return not is_terminal or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def make_console(stream: Any) -> Console:
    """A rich console on a stream; off a terminal, or under NO_COLOR, it writes plain lines and never wraps."""
    from rich.console import Console

    plain = is_plain(stream)
    return Console(
        file=stream,
        force_terminal=False if plain else None,
        force_jupyter=False,  # else rich shows a cell's output in the notebook, whatever the stream is
        no_color=plain or None,
        highlight=False,
    )
