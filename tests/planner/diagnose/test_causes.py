"""Scripts with one planted cause each: it is named first. The factors are large: other work on the machine is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.diagnose.test_diagnose import diagnose


@pytest.mark.parametrize(
    ("script", "cause", "least"),
    [
        ("prints.py", "logging", 1.5),
        ("padding.py", "padding", 1.5),
        ("evaluation.py", "evaluation", 1.3),
        ("teacher.py", "no_grad", 1.1),
        ("gc_heap.py", "freeze", 1.5),
        ("epochs.py", "persistent", 1.5),
    ],
)
def test_a_cause_that_can_be_removed_is_named_first_and_measured(script: str, cause: str, least: float) -> None:
    found = diagnose(script)
    first = found.findings[0]
    assert (first.cause, first.measured) == (cause, True), found.findings
    assert first.gain.median > least and first.gain.low > 1


@pytest.mark.parametrize(
    ("script", "cause", "line"), [("items.py", "sync", "items.py:16"), ("loop_code.py", "loop", "loop_code.py:14")]
)
def test_a_cause_that_cannot_be_removed_is_estimated_with_its_line(script: str, cause: str, line: str) -> None:
    found = diagnose(script, budget=25.0)
    first = found.findings[0]
    assert (first.cause, first.measured, first.line) == (cause, False, line), found.findings


def test_a_script_that_needs_what_was_removed_is_run_again_with_it() -> None:
    found = diagnose("fragile.py", budget=30.0)
    assert any("without saving the script failed" in note for note in found.notes)
    assert found.findings[0].cause == "saving" and not found.findings[0].measured
    assert not Path("fragile.pt").exists()


def test_a_trainer_that_saves_each_step(tmp_path: Path) -> None:
    found = diagnose("trainer.py", tmp_path, budget=60.0)
    assert found.findings[0].cause == "saving" and found.findings[0].measured
    assert not list(tmp_path.iterdir())


def test_of_two_causes_both_are_found() -> None:
    found = diagnose("two.py", budget=60.0)
    assert {"workers", "saving"} <= {one.cause for one in found.findings}
