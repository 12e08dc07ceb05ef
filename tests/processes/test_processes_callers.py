"""Calls from where a user's code really lives: an unguarded script, a notebook, a script that changed things."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

SCRIPT = """
print("entered")
from autoplan.processes import Task, Zygote

WEIGHT = 20

class Thing:
    def __init__(self, value):
        self.value = value

def double(thing):
    return 2 * thing.value

def work(context, thing):
    import helper_of_the_script
    return [double(thing) + WEIGHT, helper_of_the_script.NAME]

with Zygote(preload=()) as zygote:
    print(zygote.run(Task(target=work, args=(Thing(11),))).check().results)
"""


def test_an_unguarded_script_is_entered_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper_of_the_script.py").write_text("NAME = 'helper'\n")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["entered", "([42, 'helper'],)"]


def test_a_notebook(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\nfrom autoplan.processes import Task, Zygote",
        "scale = 3\ndef work(context, x):\n    return x * scale",
        "zygote = Zygote(preload=())\nprint(zygote.run(Task(target=work, args=(14,))).check().results)",
        "scale = 5\nprint(zygote.run(Task(target=lambda context: work(context, 2))).check().results)\nzygote.close()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output["text"] for cell in notebook.cells for output in cell.outputs)
    assert printed == "(42,)\n(10,)\n"  # a line may come in two outputs


def test_importing_processes_loads_neither_torch_nor_the_pickler() -> None:
    code = (
        "import sys, autoplan.processes;"
        "print([name for name in ('torch', 'transformers', 'optuna', 'cloudpickle') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_zygote_that_cannot_start_says_why() -> None:
    code = """
import sys
from autoplan.processes import Zygote, ZygoteError
sys.path[:] = [entry for entry in sys.path if "keep-nothing" in entry]
try:
    Zygote().start()
except ZygoteError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert "ended with status" in done.stdout and "ModuleNotFoundError" in done.stdout, done.stdout + done.stderr
