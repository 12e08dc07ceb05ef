"""autoplan doctor on scripts with a planted cause: it is named first, and what it gives is measured by removing it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import autoplan
from autoplan.errors import BudgetEndedError, UsageError, WorkloadError
from autoplan.planner.diagnose.records import Answer, Diagnosis, Request
from autoplan.planner.diagnose.run import _keep, _Runs
from autoplan.planner.diagnose.worker import _is_offline
from autoplan.processes import Ended, ProcessReport, RankReport
from tests.cases import some
from tests.planner.diagnose.test_findings import observation, trial

SCRIPTS = Path(__file__).parent / "scripts"
CORES = str(len(os.sched_getaffinity(0)))


def diagnose(name: str, *arguments: object, budget: float = 40.0, threads: str = "1") -> Diagnosis:
    """A diagnosis of one of the scripts; with one thread other work on the machine stalls a step least."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", threads)
        return autoplan.diagnose(SCRIPTS / name, list(map(str, arguments)), budget=budget)


@pytest.mark.timing
def test_a_slow_loader_is_found_and_workers_mend_it() -> None:
    found = diagnose("loader.py")
    first = found.findings[0]
    assert first.cause == "workers" and first.measured and "num_workers=" in first.mend
    assert first.gain.low > 1.3 and found.parts[0].part == "data" and found.parts[0].share > 0.7
    batches = next(one for one in found.tested if one.suspect.switch == "batches")
    assert len(batches.pairs) >= 3 and all(as_is > 4 * without for as_is, without in batches.pairs)


@pytest.mark.timing
def test_a_healthy_script_has_no_finding_and_a_table() -> None:
    found = diagnose("healthy.py", budget=25.0, threads=CORES)
    assert found.healthy, found.findings
    shares = {one.part: one.share for one in found.parts}
    assert shares["forward"] + shares["backward"] + shares["optimizer"] > 0.7
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.02)


def test_a_script_for_torchrun_is_run_as_the_only_rank_and_that_is_said() -> None:
    found = diagnose("ranks.py", budget=30.0)
    assert found.findings[0].cause == "logging"
    assert found.notes[0].startswith("run as the only rank")


ENDS = {
    "input": "asked for input at ends.py:6",
    "raises": "ends.py:8",
    "status": "the data is not here",
    "nothing": "ended without an optimizer step",
    "one": "ended after 1 optimizer step, too few",
    "late": "asked for input at ends.py:24",
}


@pytest.mark.parametrize("how", some(ENDS, ("raises", "status", "one", "late")))
def test_a_script_without_a_step_gets_one_sentence(how: str) -> None:
    with pytest.raises(WorkloadError, match=ENDS[how]):
        diagnose("ends.py", how, budget=30.0)


def test_which_errors_are_those_of_the_hub_that_is_offline() -> None:
    of_hub = "We couldn't connect to 'https://huggingface.co' to load the files"
    assert _is_offline(OSError(of_hub)) and _is_offline(ConnectionError("offline mode is enabled"))
    assert not _is_offline(FileNotFoundError("data/offline_rl.npz")) and not _is_offline(None)


def test_a_script_that_fails_since_the_hub_is_offline_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="LocalEntryNotFoundError") as caught:
        diagnose("ends.py", "hub", tmp_path, budget=30.0)
    assert "Hub offline" in str(caught.value.hint)


def test_a_script_that_never_steps_is_ended_though_it_catches_everything() -> None:
    with pytest.raises(BudgetEndedError, match=r"no optimizer step in 1.00 s \(it was in ends.py, line 2\d\)"):
        diagnose("ends.py", "loops", budget=1.0)


def test_a_script_that_takes_all_memory_is_ended() -> None:
    with pytest.raises(WorkloadError, match="host memory"):
        autoplan.diagnose(SCRIPTS / "ends.py", ["memory"], budget=30.0, memory_limit="1GiB")


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no script"):
        autoplan.diagnose(tmp_path / "none.py")
    with pytest.raises(UsageError, match="no function"):
        autoplan.diagnose(3)


def test_a_trace_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        autoplan.diagnose(__file__, trace=tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        autoplan.diagnose(__file__, trace=tmp_path / "trace.json")


def test_a_trace_that_was_not_kept_is_a_note(tmp_path: Path) -> None:
    (trace := tmp_path / "trace.json").write_text("{}")
    (note,) = _keep(trace, tmp_path / "gone" / "trace.json")
    assert "the trace was not kept" in note and "No such file" in note
    assert _keep(trace, tmp_path / "kept.json") == [] and (tmp_path / "kept.json").read_text() == "{}"


class Recorded:
    """In the place of a zygote: gives reports of runs, each of which has written a file."""

    def __init__(self, folder: Path, *ends: tuple[Ended, Answer | None]) -> None:
        self.written, self.ends = folder / "files" / "last.pt", [*ends]

    def run(self, task: object, on_progress: object) -> ProcessReport:
        assert not self.written.exists(), "a run begins without the files of the one before it"
        self.written.parent.mkdir(exist_ok=True)
        self.written.touch()
        ended, answer = self.ends.pop(0)
        rank = dict.fromkeys(RankReport.model_fields) | {"rank": 0, "phase": "script", "started": True}
        rank |= {"facts": {}, "stderr_tail": "", "stdout_tail": "", "phase_seconds": {}}
        rank["result"] = None if answer is None else answer.model_dump(mode="json")
        counts = ("peak_memory_bytes", "kernel_oom_kills", "swept", "left_behind")
        report = dict.fromkeys(ProcessReport.model_fields) | dict.fromkeys(counts, 0)
        report |= {"ended": ended, "phase": "script", "phase_deadline_s": 30.0, "seconds": 30.0, "ranks": (rank,)}
        return ProcessReport.model_validate(report | {"phase_seconds": {}, "trouble": ""})


def recorded(folder: Path, *ends: tuple[Ended, Answer | None]) -> tuple[Answer, list[str]]:
    """The answer of a script whose runs ended so, and what is said of them."""
    request = Request(script="train.py", budget_s=60.0, sandbox=str(folder))
    runs = _Runs(Recorded(folder, *ends), request, lambda: None, "train.py", 1 << 30, lambda text: None)  # type: ignore[arg-type]
    return runs.go(), runs.notes


MEASURED = Answer(steps=40, observation=observation(), trials=(trial("saving", 0.04),))


def test_what_was_measured_stays_where_the_next_run_ends_before_its_first_steps(tmp_path: Path) -> None:
    failed = MEASURED.model_copy(update={"how": "raised", "error": "OSError: old", "active": "workers=2"})
    answer, notes = recorded(tmp_path, (Ended.RANK_FAILED, failed), (Ended.DEADLINE, None))
    assert answer.observation == MEASURED.observation and answer.trials == MEASURED.trials
    assert notes[0] == "with 2 workers the script failed, so it was not measured: OSError: old"
    assert notes[1].startswith("run again, the script did not come to its steps: over its deadline of 30 s")


def test_a_disk_that_the_script_has_filled_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "autoplan-doctor"
    folder.mkdir()
    full = Answer(how="raised", error="OSError: [Errno 28] No space left on device")
    with pytest.raises(WorkloadError, match=f"the disk of {tmp_path} is full") as caught:
        recorded(folder, (Ended.RANK_FAILED, full))
    assert "TMPDIR" in str(caught.value.hint)
    other = Answer(how="raised", error="ValueError: no such model")
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1 << 20))
    with pytest.raises(WorkloadError, match="no such model"):
        recorded(folder, (Ended.RANK_FAILED, other))
    with pytest.raises(WorkloadError, match="is full"):
        recorded(folder, (Ended.RANK_FAILED, Answer()))


def test_a_script_that_was_ended_with_nothing_removed_is_said_to_be(tmp_path: Path) -> None:
    done = MEASURED.model_copy(update={"how": "done"})
    _, notes = recorded(tmp_path, (Ended.MEMORY_LIMIT, MEASURED), (Ended.FINISHED, done))
    assert len(notes) == 1 and notes[0].startswith("the script was ended after 40 steps: used 0.00 GiB")


def test_saving_is_found_and_nothing_is_written_but_one_document_and_a_trace(tmp_path: Path) -> None:
    out, trace = tmp_path / "out", tmp_path / "trace.json"
    out.mkdir()
    (out / "old").write_text("kept")
    command = [sys.executable, "-m", "autoplan", "doctor", str(SCRIPTS / "saving.py"), "--budget", "40s", "--json"]
    command += ["--trace", str(trace), "--", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["status"] == "ok" and document["headline"].startswith("saving.py: ")
    assert " finding" in document["headline"]
    first = document["findings"][0]
    assert (first["cause"], first["measured"], first["line"]) == ("saving", True, "saving.py:22")
    assert first["gain"]["low"] > 1.5
    assert [path.name for path in out.iterdir()] == ["old"] and (out / "old").read_text() == "kept"
    assert any("backward" in event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"])
