"""The session for a GPU: its archive goes on where it was, its parts ask for what may run, its figures add up."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from autoplan.strategies.config import TrainingConfig
from benchmarks import gpu_session
from benchmarks.gpu import parts, summary, wheels
from benchmarks.gpu.trials import legal


def open_session(archive: Path, **options: Any) -> gpu_session.Session:
    return gpu_session.Session(archive, 60.0, "cpu", small=True, wheels=None, **options)


def test_an_archive_goes_on_where_it_was(tmp_path: Path):
    archive = tmp_path / "try.tar.gz"
    session = open_session(archive)
    assert session.run("says", ["printf", "hello"], limit_s=20.0) == "hello"
    assert session.run("fails", ["false"], limit_s=20.0) is None
    assert session.run("is cut off", ["sleep", "20"], limit_s=0.6, least_s=0.1) is None
    session.path("stores/x/trials").mkdir(parents=True)
    session.path("stores/x/trials/output").write_text("much")
    session.close()
    again = open_session(archive)
    steps = [json.loads(line) for line in again.path("steps.jsonl").read_text().splitlines()]
    assert [step["status"] for step in steps] == [0, 1, "ended after 1 s"]
    assert again.path("says.out").read_text() == "hello"
    again.keep("more.json", {"x": 1})
    again.pack()
    again.close()
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    assert "session/says.out" in names and "session/more.json" in names
    assert not any("trials" in name for name in names)
    assert not again.folder.exists()


@pytest.mark.slow
def test_what_the_wheels_hold_is_there_for_the_session_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The parts import autoplan in the session's own process, on a machine that has no pydantic of its own."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(gpu_session.NEEDED, "only_in_a_wheel", "only-in-a-wheel")
    wheels, name = tmp_path / "wheels", "only_in_a_wheel-1.0"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("only_in_a_wheel.py", "FIGURE = 7\n")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: only-in-a-wheel\nVersion: 1.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    session = gpu_session.Session(tmp_path / "wheels.tar.gz", 60.0, "cpu", small=True, wheels=wheels)
    assert importlib.import_module("only_in_a_wheel").FIGURE == 7
    code = "import only_in_a_wheel; print(only_in_a_wheel.FIGURE)"
    assert session.run("child", [sys.executable, "-c", code], limit_s=30.0) == "7\n"
    session.close()


def test_a_step_without_time_is_not_begun(tmp_path: Path):
    session = open_session(tmp_path / "try.tar.gz")
    assert session.run("late", ["touch", str(tmp_path / "made")], limit_s=20.0, least_s=100.0) is None
    assert not (tmp_path / "made").exists()
    session.close()


class Noted:
    """A session that notes what a part asks for."""

    def __init__(self, folder: Path, device: str, small: bool) -> None:
        self.results, self.device, self.small = folder, device, small
        self.asked: list[tuple[str, tuple[str, ...], float]] = []

    @property
    def left_s(self) -> float:
        """Of nine minutes, where each step takes six tenths of its limit."""
        return 530.0 - 0.6 * sum(limit_s for _, _, limit_s in self.asked)

    path = gpu_session.Session.path
    keep = gpu_session.Session.keep

    def run(self, name: str, command: list[str], *, limit_s: float, **options: Any) -> str | None:
        beside = "folder" in options  # a step of a lane, of which each has what is left
        self.asked.append((name, tuple(command), 0.0 if beside else limit_s))
        return None

    def python(self, name: str, module: str, *arguments: str, limit_s: float, **options: Any) -> str | None:
        self.asked.append((name, (module, *arguments), limit_s))
        return '{"micro_batch": 8}' if name == "by_hand.find" else None


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("part", parts.PARTS)
def test_each_part_fits_its_call_and_asks_for_configurations_that_any_run_may_have(
    part: str, device: str, small: bool, tmp_path: Path
):
    session: Any = Noted(tmp_path, device, small)
    parts.PARTS[part](session)
    assert session.asked
    assert session.left_s > 0
    for path in tmp_path.glob("*.task.json"):
        task = json.loads(path.read_text())
        configs = legal(task["configs"], task["global_batch"])
        assert configs, path.name
        assert all(isinstance(config, TrainingConfig) for config in configs)
        assert json.loads(Path(task["model"]).read_text())["model_type"]


def test_part_a_runs_every_test_that_is_marked_cuda():
    root, line = gpu_session.ROOT, "\n@pytest.mark.cuda\n"
    marked = {str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py") if line in path.read_text()}
    assert marked == set(parts.CUDA_TESTS)


def test_the_wheels_are_those_of_the_other_machine_and_the_first_parts_are_parts(tmp_path: Path):
    command = wheels.download_command(tmp_path, "3.12")
    assert {"numpy", "pydantic", "transformers>=5.0"} <= set(command) and "torch" not in command
    assert command[command.index("--python-version") + 1] == "3.12" and "--only-binary=:all:" in command
    assert set(wheels.FIRST_PARTS) <= set(parts.PARTS)


def test_ratios_are_those_of_complete_rounds(tmp_path: Path):
    speeds = {"round0": (100.0, 90.0, 20.0), "round1": (110.0, 100.0, 20.0), "round2": (120.0, None, None)}
    for number, figures in speeds.items():
        for name, tokens in zip(("plan", "hand", "baseline"), figures, strict=True):
            text = "" if tokens is None else json.dumps({"tokens_per_s": tokens})
            (tmp_path / f"{number}.{name}.out").write_text(f"a warning\n{text}\n" if text else "")
    found = summary.rounds(tmp_path)
    assert found["plan_over_hand"]["by_round"] == [100 / 90, 1.1]
    assert found["plan_over_baseline"]["median"] == pytest.approx((5.0 * 5.5) ** 0.5)


def test_a_search_that_said_nothing_is_no_figure(tmp_path: Path):
    (tmp_path / "gpt2.search.out").write_text("")
    (tmp_path / "llama.search.out").write_text(json.dumps({"status": "plan_found", "plan": {"config": {"tp": 1}}}))
    found = summary.summarise(tmp_path)["searches"]
    assert set(found) == {"llama"} and found["llama"]["config"] == {"tp": 1}
