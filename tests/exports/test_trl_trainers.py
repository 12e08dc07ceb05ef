"""TRL's own Trainers against the runs that autoplan makes of them, in the environment that has TRL."""

from __future__ import annotations

import pytest

environments = pytest.importorskip("tests.exports.environments")
pytestmark = environments.needs_environment("trl")


def test_trl_trainers_are_taken_over() -> None:
    environments.run_python("trl", ["-m", "pytest", "-q", "tests/frameworks/test_trl.py"])
