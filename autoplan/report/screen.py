"""The stream that output goes to: a terminal, or a file, a pipe, a log. Loads rich only if a console is made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def is_plain(stream: Any) -> bool:
    """True where bars and colours have no place: not a terminal, NO_COLOR set, or a dumb terminal."""
    return not _is_terminal(stream) or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; one that a program put there may not say, or may be closed."""
    isatty = getattr(stream, "isatty", None)
    try:
        return isatty is not None and bool(isatty())
    except ValueError:
        return False


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
