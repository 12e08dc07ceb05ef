"""LightningModules read into workloads: the tests of it in an environment that has Lightning."""

from __future__ import annotations

from tests.exports.environments import ROOT, needs_environment, run_python

pytestmark = needs_environment("lightning")

TESTS = ROOT / "tests" / "frameworks" / "test_lightning_read.py"


def test_lightning_modules_train_the_same() -> None:
    done = run_python("lightning", ["-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS], timeout_s=280)
    assert " passed" in done.stdout and "skipped" not in done.stdout
