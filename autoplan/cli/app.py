"""The typer application: which commands there are, and how an end becomes an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from autoplan import __version__
from autoplan.cli import ends, output
from autoplan.cli.doctor import doctor_command
from autoplan.cli.ends import ReaderGone
from autoplan.cli.estimate import estimate_command
from autoplan.cli.explain import explain_command
from autoplan.cli.export import export_command
from autoplan.cli.help import Command, Group, usual_name
from autoplan.cli.knobs import knobs_command
from autoplan.cli.probe import probe_command
from autoplan.cli.report import report_command
from autoplan.cli.run import run_command
from autoplan.cli.schema import schema_command
from autoplan.cli.search import EXAMPLES, search_command
from autoplan.cli.settings import read_settings
from autoplan.cli.show import show_command
from autoplan.cli.studies import clean_command, ls_command
from autoplan.cli.verify import verify_command
from autoplan.errors import AutoplanError, InterruptedSearchError, UsageError
from autoplan.planner.search.options import flag_name
from autoplan.report.screen import is_plain
from autoplan.text import printable, right_name

HELP = (
    "Finds the fastest way to run a training job on this machine, by measuring. What is trained stays the same. "
    "The result is a plan, which a training script applies."
)
EPILOG = (
    "Exit codes: 0 done; 1 a bug of autoplan; 2 wrong usage or input; 3 nothing fits; 4 device unusable or busy; "
    "5 budget ended before a verified plan; 6 export failed its check; 130 interrupted "
    "(143 by SIGTERM, 129 by SIGHUP); 141 nobody reads the output."
)

COMMANDS: Mapping[str, Callable[..., Any]] = {
    "search": search_command,
    "show": show_command,
    "explain": explain_command,
    "report": report_command,
    "verify": verify_command,
    "run": run_command,
    "export": export_command,
    "knobs": knobs_command,
    "ls": ls_command,
    "clean": clean_command,
    "doctor": doctor_command,
    "probe": probe_command,
    "estimate": estimate_command,
    "schema": schema_command,
}
"""In the order of the help: the way of a plan first."""


def show_version(wanted: bool) -> None:
    """Prints the version and ends."""
    if wanted:
        print(f"autoplan {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The application; with boxes and colours in its help only on a terminal."""
    app = typer.Typer(
        name="autoplan",
        cls=Group,
        help=HELP,
        epilog=EPILOG,
        pretty_exceptions_enable=False,
        rich_markup_mode=None if is_plain(sys.stdout) else "rich",
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 110,
            "token_normalize_func": usual_name,
        },
    )

    @app.callback()
    def top(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        pass

    for name, command in COMMANDS.items():
        app.command(name, cls=Command, epilog=EXAMPLES if name == "search" else None)(command)
    return app


def call(app: typer.Typer) -> int:
    """Runs the application and returns its exit code.

    Raises:
        UsageError: what typer refuses, as an error of ours: an option that is unknown, missing or of the wrong kind.
    """
    command: Any = typer.main.get_command(app)
    arguments = sys.argv[1:] or ["--help"]
    try:
        code = command(
            arguments, prog_name="autoplan", standalone_mode=False, default_map=_settings(command.commands, arguments)
        )
    except Exception as error:
        if not hasattr(error, "format_message"):  # of click's exceptions, whichever click typer uses
            raise
        raise _refused(error, arguments[0], command.commands) from None
    return code if isinstance(code, int) else 0


def _settings(commands: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """The settings file's values; those for this command are said, unless it is to be quiet."""
    name = arguments[0]
    if name not in commands or {"-h", "--help", "--help-all"} & set(arguments):
        return {}
    file, values = read_settings(name, commands, arguments[1:])
    if values and "--quiet" not in arguments:
        given = ", ".join(f"{key}={value}" for key, value in values.items())
        sys.stderr.write(printable(f"note: {file} gives {given}\n"))
    return {name: values}


def _refused(error: Any, name: str, commands: dict[str, Any]) -> UsageError:
    """Typer's error for a wrong option, in our words, with the option that was meant."""
    message = error.format_message().rstrip(".")
    option = getattr(error, "option_name", None)
    rest = f"autoplan {name if name in commands else 'COMMAND'} --help lists the options."
    param = getattr(error, "param", None)
    word = {"N": "a whole number", "X": "a number"}.get(getattr(param, "metavar", ""))
    if param is not None and word is not None:
        return UsageError(f"{param.opts[0]} takes {word}", hint=rest)
    if option is None or name not in commands or "requires" in message:
        return UsageError(message[0].lower() + message[1:], hint=rest)
    flags = [flag.lstrip("-") for one in commands[name].params for flag in one.opts if flag.startswith("--")]
    near = right_name(option.lstrip("-").replace("-", "_"), [flag.replace("-", "_") for flag in flags])
    hint = f"Did you mean {flag_name(near)}?" if near else rest
    if option == "--batch-size" and near:
        hint = "Give --global-batch, the samples of an optimizer step; the micro-batch is what a search finds."
    return UsageError(f"autoplan {name} has no option {option}", hint=hint)


def run() -> int:
    """Runs the command in sys.argv; returns its exit code (see autoplan.errors)."""
    try:
        return _run()
    except ReaderGone:
        return ends.BROKEN_PIPE
    except ends.OutputError as error:
        output.show_error(error)
        return error.exit_code
    except KeyboardInterrupt:  # a second signal, while the first was being said
        return ends.exit_code(130)


def _run() -> int:
    try:
        try:
            code = call(build_app())
            ends.flush()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            ends.flush()
        return _interrupted() if code == 130 else code
    except (ReaderGone, ends.OutputError):
        raise
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if ends.received() is not None:  # a signal in the middle of an import may surface as any error
            return _interrupted()
        if isinstance(error, AutoplanError):
            output.show_error(error)
            return error.exit_code
        output.show_bug(error)  # whatever is left is ours
        return 1


def _interrupted() -> int:
    """The end by Ctrl-C, SIGTERM or SIGHUP: a last line, unless the command has said so, and its code."""
    if not ends.said:
        number = ends.received()
        by = "" if number is None else f" by {signal.Signals(number).name}"
        error = InterruptedSearchError(f"interrupted{by}", hint="What finished is kept; the same command goes on.")
        output.show_error(error, ends.exit_code(130))
    return ends.exit_code(130)
