"""How the process of a command ends: by a signal, without a reader, without room, with a stream that is closed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoplan.planner.plan.plan import Plan
from tests.cases import some
from tests.recorded import make_plan

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = ROOT / "tests" / "planner" / "data" / "faulty.py"
AUTOPLAN = f"{sys.executable} -m autoplan"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_plan().save(tmp_path / "plan.json")
    return tmp_path


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash, in a folder; its status is that of the first command of a pipe that failed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")}
    command = ["bash", "-c", "set -o pipefail; " + line.replace("autoplan", AUTOPLAN)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


LINES = [
    ("autoplan schema | true", 141, ""),
    ("autoplan show > /dev/full", 2, "stdout cannot be written: No space left on device"),
    ("autoplan show 2> /dev/full", 0, ""),
    ("autoplan show <&- >&- 2>&-", 0, ""),
    ("autoplan show none.json > /dev/full 2>&1", 2, ""),
]
LIKE_THEM = [
    ("autoplan schema 2>&1 | true", 141, ""),
    ("autoplan show --json > /dev/full", 2, "stdout cannot be written: No space left on device"),
    ("autoplan show 2>&-", 0, ""),
    ("autoplan show >&-", 0, ""),
    ("autoplan show none.json 2> /dev/full", 2, ""),
    ("autoplan show --json none.json > /dev/full 2> /dev/full", 2, ""),
    ("autoplan search --model none.json --out plan.json/x.json", 2, "No such"),
]


@pytest.mark.parametrize(("line", "code", "words"), some(LINES + LIKE_THEM, LINES))
def test_a_stream_that_cannot_be_written_ends_quietly(folder: Path, line: str, code: int, words: str) -> None:
    ended = shell(folder, line)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr and "bug" not in ended.stderr
    assert words.lower() in ended.stderr.lower(), ended.stderr


PLACES = ["/proc/plan.json", "/dev/full", ".", "plan.json/below.json", "x" * 300 + ".json"]


@pytest.mark.parametrize("out", some(PLACES, PLACES[:1]), ids=lambda out: out[:12])
def test_a_place_for_the_plan_that_cannot_be_written_is_found_first(folder: Path, out: str) -> None:
    began = time.monotonic()
    ended = shell(folder, f"autoplan search --model {WORKLOAD}:make_sound --budget 10m --store s --out {out}")
    assert ended.returncode == 2 and "--out" in ended.stderr, ended.stderr
    assert not (folder / "s").exists() and time.monotonic() - began < 30.0


class Search:
    """A running search of a slow workload, up to a line of its narration."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        ignore: tuple[int, ...] = (),
        until: str = "trial 0",
        function: str = "make_slow",
    ) -> None:
        def before() -> None:
            for number in ignore:
                signal.signal(number, signal.SIG_IGN)

        fixed = [f"--fix={knob}" for knob in ("precision=fp32", "compile=off", "threads=1", "checkpointing=none")]
        command = [sys.executable, "-m", "autoplan", "search", "--model", f"{WORKLOAD}:{function}", *fixed, *options]
        self.process = subprocess.Popen(
            [*command, "--budget", "120s", "--store", "s", "--device", "cpu"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "LINGER_IN": "loss"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=before,
        )
        assert self.process.stderr is not None
        self.seen = ""
        for line in self.process.stderr:
            self.seen += line
            if line.startswith(until):
                return
        raise AssertionError(f"the search ended before {until!r}: {self.seen}")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.mark.slow
@pytest.mark.usefixtures("probed_machine")
def test_sigterm_ends_a_search_like_ctrl_c_and_leaves_the_best_so_far_and_an_ignored_sighup_does_not(
    folder: Path,
) -> None:
    before = (folder / "plan.json").read_text()
    search = Search(folder, "--json", ignore=(signal.SIGHUP,), function="make_sound", until="trial 2")  # as under nohup
    search.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert search.process.poll() is None
    search.process.send_signal(signal.SIGTERM)
    code, out, err = search.end()
    document = json.loads(out)
    assert code == document["exit_code"] == 143 and document["status"] == "interrupted", err
    assert "same command goes on" in document["hint"] and "Traceback" not in err
    record = next((folder / "s").glob("*/record.jsonl")).read_text()
    assert '"kind":"finished"' not in record and '"kind":"attempt"' not in record
    assert Path(document["unverified_path"]).name == "plan.unverified.json"
    plan = Plan.load(folder / "plan.unverified.json")
    assert plan.unverified is not None and plan.evidence and plan.config in {trial.config for trial in plan.evidence}
    assert (folder / "plan.json").read_text() == before, "of another search, and verified"
    assert list((folder / "s").glob("*/plan.unverified.json"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("until", ["reading the model", "trial 0", "trial 2"])
def test_each_signal_has_its_code_and_a_last_line(folder: Path, number: int, code: int, until: str) -> None:
    search = Search(folder, until=until)
    search.process.send_signal(number)
    ended, _, err = search.end()
    assert ended == code and "Traceback" not in err
    assert err.splitlines()[-1].strip() == "The same command goes on from here."
    assert ("The best so far is in plan.unverified.json" in err) is (until == "trial 2")


ASKED = """
import os, signal
from autoplan.cli import ends

ends.prepare()
try:
    exec("os.kill(os.getpid(), signal.SIGTERM); signal.pause()")
except KeyboardInterrupt:
    raise SystemExit(ends.exit_code(130))
"""


def test_a_signal_within_code_that_was_compiled_has_its_code_too(tmp_path: Path) -> None:
    """Libraries make classes with exec(); `python -m` then ended with SIGINT, once in 32 starts."""
    (tmp_path / "asked.py").write_text(ASKED)
    command = [sys.executable, "-m", "asked"]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert ended.returncode == 143


@pytest.mark.exhaustive
def test_a_signal_at_any_moment_of_the_start_is_no_bug(folder: Path) -> None:
    """Also in the middle of an import, where it may surface as any error of the library."""
    moments = random.Random(0)
    for number in [signal.SIGINT, signal.SIGTERM] * 16:
        command = [sys.executable, "-m", "autoplan", "search", "--model", f"{WORKLOAD}:make_sound", "--dry-run"]
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
        )
        time.sleep(0.15 + 3.0 * moments.random())
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (128 + number, 0, -number), err
        assert "bug" not in err and (process.returncode < 0 or "Traceback" not in err), err
