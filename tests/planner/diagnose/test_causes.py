"""Scripts with one planted cause each: it is named first. The factors are large: other work on the machine is not.

A finding rests on measured times all the same, so that most of these are marked `timing`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import autoplan
from autoplan.planner.diagnose.clock import LineCounter
from tests.planner.diagnose.test_diagnose import SCRIPTS, diagnose


@pytest.mark.parametrize(
    ("script", "cause", "least"),
    [
        ("prints.py", "logging", 1.5),
        ("padding.py", "padding", 1.5),
        ("evaluation.py", "evaluation", 1.3),
        ("teacher.py", "needless_gradients", 1.1),
        ("backbone.py", "needless_gradients", 1.2),
        ("anomaly.py", "anomaly", 1.2),
        ("again.py", "two_backwards", 1.2),
        ("gc_heap.py", "freeze", 1.5),
        ("epochs.py", "persistent", 1.5),
    ],
)
@pytest.mark.timing
def test_a_cause_that_can_be_removed_is_named_first_and_measured(script: str, cause: str, least: float) -> None:
    found = diagnose(script)
    first = found.findings[0]
    assert (first.cause, first.measured) == (cause, True), found.findings
    assert first.gain.median > least and first.gain.low > 1


@pytest.mark.parametrize(
    ("script", "cause", "line", "budget"),
    [
        ("items.py", "sync", "items.py:16", 15.0),
        ("by_hand.py", "attention", "by_hand.py:22", 25.0),
        pytest.param("loop_code.py", "loop", "loop_code.py:15", 25.0, marks=pytest.mark.timing),
    ],
)
def test_a_cause_that_cannot_be_removed_is_estimated_with_its_line(
    script: str, cause: str, line: str, budget: float
) -> None:
    found = diagnose(script, budget=budget)
    depends = ("threads", "bf16")  # the tests give a script one thread, and some processors have fast bf16
    first = next(one for one in found.findings if one.cause not in depends)
    assert (first.cause, first.measured, first.line) == (cause, False, line), found.findings


def test_a_loop_over_small_operations_is_named_with_its_line() -> None:
    found = diagnose("cell.py", budget=12.0)
    first = found.findings[0]
    assert (first.cause, first.measured) == ("small_operations", False), found.findings
    assert first.line in ("cell.py:13", "cell.py:14", "cell.py:15") and "it runs 120 times in a step" in first.evidence
    assert 1.0 < first.gain.low < first.gain.median < first.gain.high


def test_layers_that_run_the_same_lines_once_each_are_no_loop() -> None:
    def forward(layers: list[Layer]) -> None:
        for layer in layers:
            layer.forward()

    class Layer:
        def forward(self) -> None:
            self.called = True

    def most(layers: list[Layer]) -> int:
        counter = LineCounter()
        counter.start()
        forward(layers)
        counter.stop()
        first = Layer.forward.__code__.co_firstlineno
        return counter.counts[f"{Path(__file__).name}:{first + 1}"]

    if sys.gettrace() is None:
        assert most([Layer() for _ in range(30)]) == 1
        assert most([Layer()] * 30) == 30
        assert sys.gettrace() is None


def test_counting_ends_where_no_frame_is_of_a_file() -> None:
    """Of a function that a notebook or exec() made: nothing is counted, and nothing goes on being counted."""
    seen: dict[str, Any] = {"LineCounter": LineCounter, "sys": sys}
    exec("def run():\n c = LineCounter()\n c.start()\n c.stop()\n global left\n left = sys.gettrace()\n", seen)
    thread = threading.Thread(target=seen["run"])
    thread.start()
    thread.join()
    assert seen["left"] is None


def test_a_function_is_run_as_a_script_is() -> None:
    def train() -> None:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            torch.save(torch.zeros(10 << 18), "function.pt")

    found = autoplan.diagnose(train, budget=25.0)
    assert found.findings[0].cause == "saving" and not Path("function.pt").exists()


def test_ctrl_c_ends_the_command_and_leaves_nothing_running() -> None:
    command = [sys.executable, "-m", "autoplan", "doctor", str(SCRIPTS / "loader.py"), "--budget", "100s"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "as they are" in line:
                break
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert started and not psutil.wait_procs(started, timeout=10)[1]


@pytest.mark.timing
def test_a_script_that_needs_what_was_removed_is_run_again_with_it() -> None:
    found = diagnose("fragile.py", budget=30.0)
    assert any("with no saving the script failed" in note for note in found.notes)
    assert [one.measured for one in found.findings if one.cause == "saving"] == [False]
    assert not Path("fragile.pt").exists()


def test_a_removal_that_kills_the_process_is_said_and_is_not_made_again() -> None:
    found = diagnose("fragile.py", "dies", budget=20.0)
    (said,) = [note for note in found.notes if note.startswith("with no saving the script failed")]
    assert "killed by signal 9" in said


def test_a_script_that_steps_by_hand_has_a_step_for_each_backward() -> None:
    found = diagnose("by_itself.py", budget=15.0)
    first = found.findings[0]
    assert (first.cause, first.line) == ("loop", "by_itself.py:12") and found.steps > 20
    assert "it has no optimizer of torch: a step is a backward here" in found.notes
    assert not any(one.cause == "needless_gradients" for one in found.findings)


def test_what_a_script_takes_back_is_said_and_is_no_measurement() -> None:
    found = diagnose("takes_back.py", budget=15.0)
    assert "could not be tried: a fused optimizer step (it did not reach the steps)" in found.notes, found.notes
    assert not any("fused" in note and "times as fast" in note for note in found.notes)
    assert not any(one.cause == "fused" for one in found.findings)


@pytest.mark.timing
def test_collections_that_the_script_asks_for_can_be_removed() -> None:
    found = diagnose("collects.py", budget=25.0)
    first = found.findings[0]
    assert first.cause in ("gc", "freeze") and first.measured and first.line == "collects.py:16"
    assert all(
        as_is > 3 * without for one in found.tested if one.suspect.switch == "gc" for as_is, without in one.pairs
    )


def test_no_net_of_two_optimizers_is_taken_for_one_that_nobody_trains() -> None:
    found = diagnose("gan.py", budget=20.0)
    assert not any("needless" in text for text in (*(one.cause for one in found.findings), *found.notes)), found


@pytest.mark.timing
def test_graphs_that_are_kept_are_named_with_their_line_and_the_memory_without_them() -> None:
    found = diagnose("keeps_graphs.py")
    (one,) = [one for one in found.findings if one.cause == "graphs"]
    assert (
        one.what.startswith("history keeps")
        and one.line == "keeps_graphs.py:16"
        and "without the graphs" in one.evidence
    )


@pytest.mark.timing
def test_an_evaluation_that_takes_the_most_memory_and_outputs_that_are_kept_are_said() -> None:
    found = diagnose("memory.py")
    notes = " ".join(found.notes)
    assert "at the most, in evaluation (memory.py:20)" in notes and "evaluation takes" in notes
    assert "outputs keeps tensors of each step (memory.py:16)" in notes
    assert found.findings[0].cause == "evaluation" and not any(one.cause == "graphs" for one in found.findings)


@pytest.mark.timing
def test_a_trainer_that_saves_each_step(tmp_path: Path) -> None:
    found = diagnose("trainer.py", tmp_path, budget=60.0)
    assert found.findings[0].cause == "saving" and found.findings[0].measured
    assert not list(tmp_path.iterdir())


@pytest.mark.timing
def test_a_shape_that_compiles_again_is_named_with_its_guard_and_dynamic_shapes_are_measured() -> None:
    found = diagnose("recompiles.py")
    first = found.findings[0]
    assert (first.cause, first.measured) == ("recompilation", True), found
    assert "size mismatch at index 0" in first.evidence and (first.line or "").startswith("recompiles.py:")
    assert first.gain.low > 1.5 and "dynamic=True" in first.mend
    assert "loop" not in {one.cause for one in found.findings}


@pytest.mark.timing
def test_of_two_causes_both_are_found() -> None:
    found = diagnose("two.py", budget=60.0)
    assert {"workers", "saving"} <= {one.cause for one in found.findings}
