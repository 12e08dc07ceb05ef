"""The command line: one file per command. `main` is the entry point; nothing here loads torch or optuna."""

from __future__ import annotations


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    from autoplan.cli.app import run

    raise SystemExit(run())
