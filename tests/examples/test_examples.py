"""The examples run as a person would run them, small."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import autoplan
from autoplan.strategies.techniques.degrees import factorings
from tests.recorded import make_plan
from tests.test_docs import load

ROOT = Path(__file__).resolve().parents[2]


EXAMPLES = ROOT / "examples"


def run(folder: Path, *command: str) -> str:
    """What a command prints, started in a folder of its own."""
    home = {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **home}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses(text: str) -> dict[int, float]:
    """Step number to loss."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_train_gpt2_searches_trains_and_resumes(tmp_path: Path) -> None:
    small = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq-len", "32", "--global-batch", "8"]
    small += ["--budget", "60s", "--max-trials", "2", "--fix", "compile=off", "--device", "cpu"]
    small += ["--data", str(tmp_path), "--learning-rate", "0.01", "--total-steps", "40"]
    script = str(ROOT / "examples" / "train_gpt2.py")
    whole = run(tmp_path, script, *small, "--steps", "12", "--checkpoint", "whole.pt")
    assert losses(whole)[1] == pytest.approx(5.6, abs=0.3), "a random model over 256 bytes starts near ln 256"
    assert losses(whole)[12] < losses(whole)[1] - 0.5, "it learns"
    run(tmp_path, script, *small, "--steps", "7", "--checkpoint", "parts.pt")
    resumed = run(tmp_path, script, *small, "--steps", "5", "--checkpoint", "parts.pt")
    assert "made before" in resumed and "resumed at step 7" in resumed
    for step, loss in losses(resumed).items():
        assert loss == pytest.approx(losses(whole)[step], abs=2e-4), f"step {step} differs after resuming"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_image_classifier_is_planned(tmp_path: Path) -> None:
    workload = str(ROOT / "examples" / "image_classifier.py") + ":tiny_classifier"
    command = ["-m", "autoplan", "search", "--model", workload, "--budget", "60s", "--max-trials", "2", "--json"]
    document = json.loads(run(tmp_path, *command, "--fix", "compile=off", "--device", "cpu"))
    assert document["status"] == "plan_found" and document["plan"]["workload"]["unit"] == "samples"
    assert document["plan"]["parity"]["passed"] and document["plan"]["workload"]["global_batch"] == 16
    run(tmp_path, "-m", "autoplan", "run", "--steps", "2")
    train = ["-m", "autoplan", "run", "plan.json", str(EXAMPLES / "apply_plan.py"), "--", "--size", "16"]
    said = run(tmp_path, *train, "--epochs", "4", "--samples", "512")
    right = [int(share) for share in re.findall(r"(\d+)% right", said)]
    assert len(right) == 4 and right[-1] > 40, "a quarter would be right by chance"
    assert "resumed at step 128" in run(tmp_path, *train, "--epochs", "1", "--samples", "512")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_the_tutorial_goes_as_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of the page runs, with a smaller search, and its output has the lines that the page shows."""
    page = load("run_tutorial")
    shutil.copy(EXAMPLES / "tutorial.py", tmp_path)
    (tmp_path / ".cache_home").symlink_to(os.environ["XDG_CACHE_HOME"])  # where the machine is probed already
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said: dict[str, str] = {}
    for block in page.BLOCK.finditer(page.PAGE.read_text()):
        for command in page.commands(block["body"]):
            smaller = re.sub(r"--budget \w+", SMALLER, re.sub(r" \| head -\d+$", "", command))
            said[command] = page.run(smaller.replace("autoplan search", "python -m tests.time_box search"), tmp_path)
            missing = missing_lines(page.forms(block["body"], command), said[command])
            assert not missing, f"{command}: the page shows {missing}\n{said[command]}"
    first, resumed = (text for command, text in said.items() if command.startswith("python tutorial.py"))
    assert losses(first)[20] < 5.0, "it begins near ln 256 = 5.5, and learns"
    assert "resumed at step 20" in resumed and losses(resumed)[40] < losses(first)[20]
    assert {"autoplan --version", "autoplan show", "autoplan verify"} <= {re.sub(r" \|.*", "", one) for one in said}


@pytest.mark.parametrize("command", ["autoplan show | head -24", "autoplan explain --knob precision"])
def test_what_the_tutorial_shows_of_a_plan_is_what_is_printed(command: str, tmp_path: Path, cli: Any) -> None:
    """The same of a plan from records: these commands read its file alone."""
    page = load("run_tutorial")
    (body,) = [block["body"] for block in page.BLOCK.finditer(page.PAGE.read_text()) if f"$ {command}" in block["body"]]
    words = command.partition(" | ")[0].split()[1:]
    ended = cli(words[0], make_plan().save(tmp_path / "plan.json"), *words[1:])
    assert ended.code == 0
    assert missing_lines(page.forms(body, command), ended.out) <= {"batches"}, "which it has not seen"


SMALLER = "--budget 60s --max-trials 2 --fix compile=off --global-batch 8"
BY_CHANCE = {"disturbed", "likely cause", "error", "by name", "time", "warning", "note"}
"""Beginnings of lines that depend on the state of the machine."""
WITH_A_GAIN = {"speed-up", "parity"}
WITHOUT_A_GAIN = {"no gain found in", "not tried", "measured"}
"""Beginnings of lines of a search with a gain, and of one without."""


def missing_lines(forms: list[str], text: str) -> set[str]:
    """The beginnings of lines that a page shows and an output lacks, without those that another plan does not have."""
    flat = " ".join(text.split())
    knobs = set(autoplan.TrainingConfig.model_fields) | {"accumulation", "next"}
    missing = {form for form in forms if " ".join(form.split()) not in flat} - BY_CHANCE - knobs
    return missing - (WITH_A_GAIN if "no gain found" in flat else WITHOUT_A_GAIN)


def test_the_form_of_an_output_is_how_its_lines_begin() -> None:
    body = "$ a\n...\nspeed-up: 1.58 (1.48)\n  tokens/s     9,181\n  optimizer_step  fused\n$ b\n$ c\nother: x\n"
    tutorial = load("run_tutorial")
    forms = tutorial.forms(body, "a")
    assert forms == ["speed-up", "tokens/s", "optimizer_step"] and tutorial.commands(body) == ["a", "b", "c"]
    assert tutorial.forms(body, "b") == [] and tutorial.forms(body, "c") == ["other"]
    assert missing_lines(forms, "speed-up: 2\ntokens per s  3") == {"tokens/s"}
    assert missing_lines(forms, "no gain found in 9 s\n  tokens/s   3") == set()
    assert missing_lines(forms, "tokens/s   3") == {"speed-up"}


LONG = {"train_gpt2.py", "gpt2_walk.py"}


def test_no_example_is_long() -> None:
    """But for the one that searches, trains on real text, saves and resumes, and the one that compares techniques."""
    long = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert [name for name, lines in long.items() if lines > 100 and name not in LONG] == []


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_the_walk_measures_a_technique_beside_the_step_before_it(tmp_path: Path) -> None:
    small = ["--size", "tiny", "--rounds", "1", "--steps", "1", "--techniques", "copies", "larger batch"]
    said = run(tmp_path, str(EXAMPLES / "gpt2_walk.py"), *small)
    gain = re.search(r"larger batch +([\d.]+) \(", said)
    assert gain is not None and float(gain[1]) > 0 and "the whole walk: " in said
    assert torch.cuda.is_available() or "copies           not tried: there is no GPU to copy to" in said


def load_example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_walk_goes_on_where_a_technique_does_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the walk says of runs that are given: no run is made."""
    example = load_example("gpt2_walk")

    def given(size: str, steps: int, techniques: dict[str, object]) -> dict[str, float]:
        if techniques.get("compile"):
            raise RuntimeError("Traceback ...\nValueError: no compiler here\n\nset TORCH_LOGS for more\n")
        return {"step_s": 4.0 / float(str(techniques["micro_batch"])), "peak": 2.0**20}

    monkeypatch.setattr(example, "run", given)
    example.walk("tiny", 1, 2, ["compile", "larger batch"])
    said = capsys.readouterr().out
    assert "compile          does not run: ValueError: no compiler here\n" in said
    assert "larger batch     4.00 (4.00 to 4.00) times as fast" in said and "the whole walk: 4.00" in said
    assert example.last_error("Killed\n") == "Killed" and example.last_error("") == "it wrote nothing"


def test_two_ranks_are_a_search_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the example asks for has one layout, and that is sharded."""
    example, asked = load_example("two_ranks"), {}

    def search(**given: Any) -> Any:
        asked.update(given)
        return make_plan()

    monkeypatch.setattr(autoplan, "search", search)
    example.search("1s", "cpu")
    degrees = ("pp", "tp", "dp_replicate", "dp_shard")
    layouts = [dict(zip(degrees, layout, strict=True)) for layout in factorings(asked["nproc"])]
    fixed = {knob: value for knob, value in asked["fix"].items() if knob in degrees}
    assert [layout for layout in layouts if layout | fixed == layout] == [dict.fromkeys(degrees, 1) | {"dp_shard": 2}]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_nanogpt_searches_trains_and_is_run_with_its_plan(tmp_path: Path) -> None:
    script = str(EXAMPLES / "nanogpt.py")
    whole = run(tmp_path, script, "--width", "32", "--budget", "60s", "--steps", "20")
    assert losses(whole)[20] < losses(whole)[10] < 6.0
    again = run(tmp_path, "-m", "autoplan", "run", "plan.json", script, "--", "--width", "32", "--steps", "10")
    assert losses(again)[10] == pytest.approx(losses(whole)[10], abs=1e-2)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_two_ranks_search_train_and_resume(tmp_path: Path) -> None:
    script = str(EXAMPLES / "two_ranks.py")
    found = run(tmp_path, script, "--search", "--budget", "60s", "--device", "cpu")
    assert "2 ranks" in found and "dp_shard=2" in found
    command = ["-m", "autoplan", "run", "plan.json", script, "--"]
    first = losses(run(tmp_path, *command, "--steps", "20"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    second = losses(run(tmp_path, *torchrun, "--steps", "40"))
    assert sorted(first) == [10, 20] and sorted(second) == [30, 40], "the second goes on where the first ended"
    assert second[40] < first[10]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    for cell in notebook.cells:
        cell.source = cell.source.replace('BUDGET = "10m"', 'BUDGET = "40s"')
        cell.source = cell.source.replace("budget=BUDGET,", 'budget=BUDGET, fix={"compile": "off"},')
    NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    found = re.search(r"loss ([\d.]+) -> ([\d.]+)", said)
    assert found is not None and float(found[2]) < float(found[1])
    assert "times the plain run" in said and "micro_batch = " in said


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("transformers_trainer", "accelerate"),
        ("trl_sft_lora", "trl"),
        ("accelerate_loop", "accelerate"),
        ("lightning_module", "lightning"),
    ],
)
def test_trainers_and_loops_are_searched_and_trained(tmp_path: Path, name: str, needs: str) -> None:
    pytest.importorskip(needs)
    length = ["--steps", "12"] if name.startswith("tr") else ["--epochs", "1"]
    said = run(tmp_path, str(EXAMPLES / f"{name}.py"), "--width", "32", "--budget", "60s", *length)
    assert "times the baseline" in said and (tmp_path / "plan.json").is_file()
    assert "trained: 12 steps" in said or "trained: 64 steps" in said or "epoch 1: loss" in said
