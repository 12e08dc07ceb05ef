"""The soak's own checks see what they are for: a lost line, a repeated trial, a process and a folder that are left."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autoplan.processes import linux
from benchmarks import soak as module
from benchmarks.soak import MARK, VICTIMS, Soak, check_end, check_record, pairs, run_once, take_result


@pytest.fixture
def soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Soak:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Soak(tmp_path / "counts.json", seed=0)


def write_record(soak: Soak, *documents: dict[str, object]) -> None:
    folder = soak.store / "study"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))


def trial(number: int, purpose: str = "search", micro_batch: int = 1) -> dict[str, object]:
    return {"kind": "trial", "trial": {"number": number, "purpose": purpose, "config": {"micro_batch": micro_batch}}}


def test_a_lost_line_and_a_changed_line_are_found(soak: Soak) -> None:
    write_record(soak, trial(0), trial(1, micro_batch=2))
    check_record(soak)
    assert soak.findings == []
    write_record(soak, trial(0))
    check_record(soak)
    assert soak.figures["lost"] == 1


@pytest.mark.parametrize(
    "second", [trial(0, micro_batch=2), trial(1), {"kind": "parity", "config": {"micro_batch": 1}, "parity": {}}]
)
def test_what_was_done_twice_is_found(soak: Soak, second: dict[str, object]) -> None:
    first = second if second["kind"] == "parity" else trial(0)
    write_record(soak, first, trial(9, purpose="finalist"), trial(10, purpose="finalist"), second)
    check_record(soak)
    assert soak.figures["repeated"] == 1


def test_a_process_that_is_left_is_found_and_ended(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEFT_S", 0.2)
    left = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: "here"}, start_new_session=True)
    while left.pid not in linux.environments(MARK):  # a process has begun before its environment can be read
        time.sleep(0.01)
    check_end(soak, "elsewhere", [])
    assert soak.findings == []
    check_end(soak, "here", [])
    assert soak.figures["processes"] == 1
    assert left.wait(10) == -9


def test_a_folder_that_is_left_and_a_wrong_verdict_are_found(soak: Soak, tmp_path: Path) -> None:
    take_result(soak, {"status": "plan_found", "reason": None, "trials": 3}, tmp_path, [])
    assert soak.findings == [] and soak.figures["searches"] == 1
    (tmp_path / "autoplan-task-1").mkdir()
    take_result(soak, {"status": "plan_found", "reason": None, "trials": 3}, tmp_path, [])
    take_result(soak, {"status": "no_feasible_plan", "reason": "killed", "trials": 0}, tmp_path, ["baseline/rank"])
    assert (soak.figures["folders"], soak.figures["no_plan"]) == (1, 1)


def test_every_victim_is_hit_in_every_phase_and_the_counts_go_on_from_their_file(soak: Soak, tmp_path: Path) -> None:
    assert len(pairs()) == 7 * len(VICTIMS) + 3
    for _ in range(module.LEAST * len(VICTIMS)):
        victim = soak.next_victim("parity")
        assert victim is not None
        soak.kills[f"parity/{victim}"] += 1
    assert {soak.kills[f"parity/{victim}"] for victim in VICTIMS} == {module.LEAST}
    soak.save()
    assert Soak(tmp_path / "counts.json", seed=0).kills == soak.kills


@pytest.mark.exhaustive
@pytest.mark.alone
def test_kills_in_pairs_and_parity_lose_nothing(
    probed_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner and a rank once in each of the two phases; the searches come to their plans all the same."""
    monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(module, "VICTIMS", ("planner", "rank"))
    monkeypatch.setattr(module, "SPAN_S", {"pair": 0.5, "parity": 0.2})  # so that few are too late
    with tempfile.TemporaryDirectory(prefix="soak") as short:  # a loader's sockets lie in it: 108 bytes are the most
        monkeypatch.setattr(tempfile, "tempdir", short)
        soak = Soak(tmp_path / "counts.json", seed=0, phases=("pair", "parity"))
        soak.cache = Path(os.environ["XDG_CACHE_HOME"])
        give_up_at = time.monotonic() + 600
        while min(soak.kills.values()) < 1 or not soak.figures["searches"]:
            assert time.monotonic() < give_up_at, soak.line()
            run_once(soak)
            assert soak.findings == [], soak.line()
    assert set(soak.kills) == {"pair/planner", "pair/rank", "parity/planner", "parity/rank"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "1", "--counts", str(tmp_path / "counts.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "soak: " in done.stdout
