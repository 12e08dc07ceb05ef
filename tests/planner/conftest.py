import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from autoplan.cli import app


class Ended(NamedTuple):
    """An exit code, and what a command printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs a command in this process."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["autoplan", *map(str, arguments)])
        capfd.readouterr()
        code = app.run()
        return Ended(code, *capfd.readouterr())

    return run
