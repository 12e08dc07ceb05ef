from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator

import pytest

from autoplan.processes import Zygote, cause, linux
from tests.processes.helpers import survivors


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a task is run again."""
    monkeypatch.setattr(cause, "PAUSE_S", 0.05)


@pytest.fixture(scope="session")
def warm_zygote() -> Iterator[Zygote]:
    """One zygote for all tests that do not harm it."""
    with Zygote(preload=("torch",)) as zygote:
        assert not zygote.preload_errors
        yield zygote


@pytest.fixture
def planners() -> Iterator[list[subprocess.Popen[str]]]:
    """Where a test puts the planners that it starts, so that none outlives a failed assertion."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for planner in started:
        planner.kill()
        planner.communicate()


@pytest.fixture
def token() -> Iterator[str]:
    """A mark for the environment of a zygote, by which a test finds all that came of it."""
    value = uuid.uuid4().hex
    yield value
    for pid in survivors(value):
        linux.signal_quietly(pid, 9)
