"""Several planners on one study: nothing is measured twice, one claim, one plan; also where some are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.records.trials import WorkLine
from autoplan.planner.search.device_hours import HOUR_S, used_s
from tests.engines.checks import Planner, check_ended, check_record
from tests.engines.cluster import Cluster

PHASES = ("baseline", "look", "hand setting", "pair", "parity", "claim", "end")


@pytest.mark.parametrize("sampler", ["autoplan", "tpe"])
def test_two_planners_share_a_study(database: str, tmp_path: Path, sampler: str):
    planners = [Planner(database, tmp_path / str(number), "--sampler", sampler) for number in range(2)]
    found = check_ended(database, [planner.end() for planner in planners])
    assert all("look" in planner.works for planner in planners), "both have worked"
    again = Planner(database, tmp_path / "2", "--sampler", sampler)
    assert again.end()["status"] == "plan_found"
    assert not again.works, "a third is answered from the record"
    assert check_ended(database, [again.said[-1]]) == found


@pytest.mark.parametrize("phase", PHASES)
def test_what_a_killed_planner_had_is_done_by_the_other(cluster: Cluster, tmp_path: Path, phase: str):
    for seed in range(4):  # not every study has two that need a pair
        database, folder = cluster.make(f"killed_{PHASES.index(phase)}_{seed}"), tmp_path / str(seed)
        arguments = ("--lease", "3", "--run", "0.3", "--seed", str(seed))
        planners = [Planner(database, folder / str(number), *arguments) for number in range(2)]
        while not (hit := [planner for planner in planners if phase in planner.works]):
            if all(planner.process.poll() is not None for planner in planners):
                break
            time.sleep(0.02)
        if hit:
            break
    assert hit, f"none of them has come to {phase}"
    time.sleep(0.1)
    hit[0].kill()
    planners.remove(hit[0])
    before = check_record(database)
    found = check_ended(database, [planners[0].end()])
    assert found[: len(before)] == before


def test_device_hours_are_those_of_both_planners(cluster: Cluster, tmp_path: Path):
    """Two that work at once end by the sum of what they held, up to a piece that the other is in."""
    free = Planner(cluster.make("hours_free"), tmp_path / "free", "--run", "0.02").end()["plan"]
    limit_s = 0.7 * used(free)
    database = cluster.make("hours")
    arguments = ("--run", "0.3", "--hours", str(limit_s / HOUR_S))
    planners = [Planner(database, tmp_path / str(number), *arguments) for number in range(2)]
    ends = [planner.end() for planner in planners]
    check_record(database)
    assert all("look" in planner.works for planner in planners), "both have worked"
    assert [end["status"] for end in ends] == ["plan_found"] * 2 and ends[0]["plan"] == ends[1]["plan"]
    plan = ends[0]["plan"]
    longest_s = max(line["seconds"] for line in plan["ledger"])  # the other may have begun it meanwhile
    assert 0.5 * limit_s < used(plan) <= 1.05 * limit_s + longest_s, (used(plan), limit_s)
    assert any("device-hours" in note and "took" in note for note in plan["notes"]), plan["notes"]


def used(plan: dict[str, Any]) -> float:
    """Device-seconds of the pieces of work in a plan."""
    return used_s(WorkLine.model_validate(line) for line in plan["ledger"])


def test_a_search_survives_a_server_that_is_killed_and_connections_that_are_ended(
    cluster: Cluster, database: str, tmp_path: Path
):
    planners = [Planner(database, tmp_path / str(number), "--lease", "30", "--run", "0.3") for number in range(2)]
    assert planners[0].wait_for("look")
    cluster.restart("immediate")
    while any(planner.process.poll() is None for planner in planners):
        cluster.terminate()
        time.sleep(0.3)
    check_ended(database, [planner.end() for planner in planners])


def test_two_real_searches_share_a_study(database: str, tmp_path: Path):
    """`autoplan search` on two cores as two nodes of one kind: trials that train."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.fail("this machine has one core")
    model = f"{Path(__file__).parents[1]}/planner/data/faulty.py:make_sound"
    command = [sys.executable, "-m", "autoplan", "search", "--model", model, "--device", "cpu", "--budget", "240s"]
    command += ["--max-trials", "8", "--fix", "optimizer_step=fused", "--fix", "compile=off", "--storage", database]
    processes = []
    for number, core in enumerate(cores[:2]):
        own = ["--store", str(tmp_path / str(number)), "--out", str(tmp_path / f"{number}.json"), "--json"]
        pinned = ["taskset", "-c", str(core), *command, *own]
        processes.append(subprocess.Popen(pinned, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    answers = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    results = [json.loads(out) for out, _ in answers]
    assert results[0]["study"] == results[1]["study"]
    plans = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    assert plans[0] == plans[1]
    listed = subprocess.run(
        [sys.executable, "-m", "autoplan", "ls", "--storage", database, "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (study,) = json.loads(listed.stdout)["searches"]
    assert study["status"] == "plan_found" and study["name"] == results[0]["study"]
    from autoplan.planner.store.database import read_record

    trials = [line["trial"] for line in read_record(database, study["name"]) if line["kind"] == "trial"]
    looks = [json.dumps(trial["config"]) for trial in trials if trial["purpose"] in ("baseline", "search", "reference")]
    again = [trial for trial in trials if (trial["window"] or {}).get("disturbed")]
    assert len(set(looks)) == len(looks) or again, "a configuration was looked at twice, and nothing disturbed it"
