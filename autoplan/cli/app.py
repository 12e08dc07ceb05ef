"""The typer application: which commands there are, and how an end becomes an exit code."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from autoplan import __version__
from autoplan.cli import ends, output
from autoplan.cli.ends import ReaderGone
from autoplan.cli.estimate import estimate_command
from autoplan.cli.explain import explain_command
from autoplan.cli.export import export_command
from autoplan.cli.probe import probe_command
from autoplan.cli.report import report_command
from autoplan.cli.run import run_command
from autoplan.cli.schema import schema_command
from autoplan.cli.search import EXAMPLES, search_command
from autoplan.cli.show import show_command
from autoplan.cli.verify import verify_command
from autoplan.errors import AutoplanError, InterruptedSearchError, UsageError
from autoplan.report.screen import is_plain
from autoplan.strategies.knob_text import knob_help

HELP = (
    "Finds the fastest way to run a training job on this machine, by measuring. What is trained stays the same. "
    "The result is a plan, which a training script applies."
)
EPILOG = (
    "Exit codes: 0 done; 1 a bug of autoplan; 2 wrong usage or input; 3 nothing fits; 4 device unusable or busy; "
    "5 budget ended before a verified plan; 6 export failed its check; 130 interrupted "
    "(143 by SIGTERM, 129 by SIGHUP); 141 nobody reads the output."
)


def show_version(wanted: bool) -> None:
    """Prints the version and ends."""
    if wanted:
        print(f"autoplan {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The application; with boxes and colours in its help only on a terminal."""
    app = typer.Typer(
        name="autoplan",
        help=HELP,
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None if is_plain(sys.stdout) else "rich",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )

    @app.callback()
    def top(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        pass

    app.command("probe")(probe_command)
    app.command("estimate")(estimate_command)
    app.command("search", epilog=f"{EXAMPLES}\n\n{knob_help()}")(search_command)
    app.command("show")(show_command)
    app.command("explain")(explain_command)
    app.command("verify")(verify_command)
    app.command("run")(run_command)
    app.command("export")(export_command)
    app.command("report")(report_command)
    app.command("schema")(schema_command)
    return app


def call(app: typer.Typer) -> int:
    """Runs the application; with --json, what typer refuses becomes an error of ours, and so a document.

    Raises:
        SystemExit: the end of a command, without --json.
        UsageError: an option that is unknown, missing or of the wrong kind, with --json.
    """
    if not output.wants_json():
        app(prog_name="autoplan")
        return 0
    try:
        code = app(prog_name="autoplan", standalone_mode=False)
    except Exception as error:
        say = getattr(error, "format_message", None)  # of click's exceptions, whichever click typer uses
        if say is None:
            raise
        raise UsageError(say(), hint="autoplan COMMAND --help lists the options.") from None
    return code if isinstance(code, int) else 0


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
    except ends.OutputError:
        raise
    except AutoplanError as error:
        if ends.received() is not None:
            return _interrupted()
        output.show_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    except ReaderGone:
        raise
    except Exception as error:  # whatever is left is our bug, unless a signal came in the middle of an import
        if ends.received() is not None:
            return _interrupted()
        output.show_bug(error)
        return 1


def _interrupted() -> int:
    """The end by Ctrl-C, SIGTERM or SIGHUP: a last line, unless the command has said so, and its code."""
    if not ends.said:
        number = ends.received()
        by = "" if number is None else f" by {signal.Signals(number).name}"
        error = InterruptedSearchError(f"interrupted{by}", hint="What finished is kept; the same command goes on.")
        output.show_error(error, ends.exit_code(130))
    return ends.exit_code(130)
