"""The command line: one file per command. `main` is the entry point; nothing here loads torch or optuna."""

from __future__ import annotations


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    from autoplan.cli import ends

    ends.prepare()
    try:
        from autoplan.cli.app import run

        code = run()
    except BaseException:  # a signal in the middle of an import, which may surface as any error
        if ends.received() is None:
            raise
        code = ends.exit_code(130)
    raise SystemExit(code)
