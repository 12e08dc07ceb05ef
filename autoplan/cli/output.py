"""Where output goes: data to stdout, narration to stderr; plain lines where no person is looking."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli.ends import OutputError
from autoplan.errors import AutoplanError
from autoplan.files import replace_file
from autoplan.report.screen import is_plain, make_console
from autoplan.text import printable

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1  # of the documents that --json prints

JSON_HELP = "Print one JSON document on stdout, and nothing else."
JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


def console(*, stderr: bool = True) -> Console:
    """A rich console on stderr (narration) or stdout (data)."""
    return make_console(sys.stderr if stderr else sys.stdout)


def say(text: str, *, stderr: bool = True) -> None:
    """A line on stderr (narration) or stdout (data), which is neither read as markup nor wrapped."""
    console(stderr=stderr).print(text, markup=False, soft_wrap=True)


@contextmanager
def progress(text: str, *, once: bool = False, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows on stderr what is being done: a line with a clock on a terminal, a line for each change elsewhere.

    Args:
        text: What is done first; empty: it is not said before the first call.
        once: Off a terminal, show this first line alone: the changes are many.
        quiet: Show nothing.
    """
    if quiet:
        yield lambda doing: None
        return
    if is_plain(sys.stderr):
        said = [""]

        def tell(doing: str) -> None:
            if doing != said[0] and not (once and said[0]):
                say(text if once else doing)
                said[0] = doing

        if not once:
            tell(text)
        yield tell
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task(text, visible=bool(text))
        yield lambda doing: bar.update(task, description=doing, visible=True)


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on stdout, `schema_version` first."""
    sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION} | document, indent=2) + "\n")
    sys.stdout.flush()


def tell(text: str, hint: str | None = None) -> None:
    """A text on stderr, and under it what to do; on a terminal both are wrapped between words."""
    wrap = functools.partial(
        textwrap.fill,
        width=shutil.get_terminal_size().columns - 1,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in printable(text if not hint else f"{text}\n  {hint}").splitlines():
        sys.stderr.write((line if is_plain(sys.stderr) else wrap(line)) + "\n")


def wants_json() -> bool:
    """True where this command was called with --json; what follows -- is a script's."""
    given = sys.argv[1:]
    return "--json" in (given[: given.index("--")] if "--" in given else given)


def show_error(error: AutoplanError, exit_code: int | None = None) -> None:
    """The error for a person on stderr, and with --json as a document on stdout too, with its code or the one given."""
    tell(f"error: {error.flag_message}", error.flag_hint)
    if wants_json() and not isinstance(error, OutputError):
        facts = {"code": error.code, "message": error.flag_message, "hint": error.flag_hint}
        print_json({"status": "error", "error": facts | {"exit_code": exit_code or error.exit_code}})


def show_bug(error: BaseException) -> None:
    """A bug of ours: a short text, and where its traceback is."""
    text = printable("".join(traceback.format_exception(error)))
    place = _write_traceback(text)
    sys.stderr.write(printable(f"error: this is a bug in autoplan: {type(error).__name__}: {error}\n"))
    sys.stderr.write(f"  The traceback is in {place}; please report it.\n" if place else text)
    if wants_json():
        facts = {"code": "internal", "message": f"{type(error).__name__}: {error}", "hint": None, "exit_code": 1}
        print_json({"status": "error", "error": facts | {"traceback": text}})


def _write_traceback(text: str) -> Path | None:
    import platformdirs

    try:
        folder = platformdirs.user_log_path("autoplan", ensure_exists=True)
        path = folder / f"traceback-{os.getpid()}.txt"
        replace_file(path, text, private=True)
    except OSError:
        return None
    return path
