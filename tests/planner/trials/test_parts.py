"""Runs on parts of a machine: the division of its cores, and the threads; then with real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.errors import UsageError
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.search.preload import PRELOAD
from autoplan.planner.trials.parts import EndedRun, Part, Parts, by_place, equal_shares, on_part, split
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Progress, StopTask, Zygote, cause
from autoplan.strategies.config import TrainingConfig
from tests.planner.trials.runs import make_runner
from tests.recorded import make_hardware, make_trial

CONFIG = TrainingConfig(micro_batch=4, threads=1)
CORES = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="a part needs a core of its own")


def order(number: int = 0) -> TrialOrder:
    return TrialOrder(number=number, purpose="search", config=CONFIG, prediction=None, deadline_s=60.0)


# The division.


def test_shares_are_equal_and_neighbours_stay_together():
    assert equal_shares([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    assert equal_shares([5], 3) == [[5], [5], [5]]


def test_the_threads_of_a_core_and_the_cores_of_a_node_stand_together(tmp_path: Path):
    """Eight CPUs: two nodes with two cores each, whose second threads have the numbers 4 to 7."""
    for core in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    for node, cores in enumerate(("0,2,4,6", "1,3,5,7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    assert by_place(range(8), tmp_path) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert by_place([3, 1, 2], tmp_path / "nothing") == [1, 2, 3]


@two_cores
def test_parts_of_a_cpu_have_as_many_cores_each_and_share_none():
    parts = split(2, make_hardware(), "cpu", 1)
    assert len({len(part.cores) for part in parts}) == 1
    assert not parts[0].cores & parts[1].cores and {*parts[0].cores, *parts[1].cores} <= {*CORES}
    before = os.sched_getaffinity(0)
    with on_part(parts):
        assert os.sched_getaffinity(0) == parts[0].cores
    assert os.sched_getaffinity(0) == before


def test_one_part_is_none_and_more_than_there_are_is_refused():
    assert split(None, make_hardware(), "cpu", 1) == split(1, make_hardware(), "cpu", 1) == ()
    with pytest.raises(UsageError, match=r"core\(s\) can be used"):
        split(len(CORES) + 1, make_hardware(), "cpu", 1)
    with pytest.raises(UsageError, match="the search uses 1 GPU"):
        split(2, make_hardware(), "cuda", 1)


def test_a_gpu_is_a_part_with_its_share_of_the_cores_near_it():
    hardware: Any = SimpleNamespace(
        devices=[SimpleNamespace(type="cuda", index=i, uuid=f"GPU-{i}", numa_node=None) for i in range(4)]
    )
    parts = split(2, hardware, "cuda", 4)
    assert [part.gpu for part in parts] == ["GPU-0", "GPU-1"]
    assert all(part.cores <= {*CORES} for part in parts)
    if len(CORES) > 1:
        assert not parts[0].cores & parts[1].cores
    before = os.sched_getaffinity(0)
    with on_part(parts):
        assert os.sched_getaffinity(0) == before, "a search on GPUs keeps its cores"


# The threads.


class Steps:
    """In the place of a runner: it says each hundredth of a second that it goes on, until it is told to end."""

    def __init__(self, seconds: float = 0.1, error: BaseException | None = None) -> None:
        self.zygote = SimpleNamespace(start=lambda: None, close=lambda: None)
        self.seconds, self.error = seconds, error
        self.made: list[tuple[int, frozenset[int], str]] = []

    def run(self, order: TrialOrder, *, on_progress: Any, **hooks: Any) -> Trial:
        self.made.append((order.number, frozenset(os.sched_getaffinity(0)), threading.current_thread().name))
        trial = make_trial(order.number, order.config, 0.5)
        until = time.monotonic() + self.seconds
        try:
            while time.monotonic() < until:
                on_progress(Progress(seconds=0, phase="measure", phase_seconds=0, facts=(), memory_bytes=0))
                time.sleep(0.01)
        except StopTask:
            return trial.model_copy(update={"outcome": Outcome.INTERRUPTED})
        if self.error is not None:
            raise self.error
        return trial


def parts_of(*runners: Steps, idle: Steps | None = None) -> Parts:
    cores = equal_shares(CORES, len(runners))
    parts = [Part(number=i, cores=frozenset(share)) for i, share in enumerate(cores)]
    given: list[Any] = [*runners]
    return Parts(parts, given, [idle or Steps(60.0)] * len(runners), [])  # type: ignore[list-item]


def left_s() -> float:
    return 60.0


def test_two_run_at_once_each_on_its_cores_and_callbacks_come_in_this_thread():
    runners, heard = (Steps(0.4), Steps(0.4)), []
    with parts_of(*runners) as parts:
        began = time.monotonic()
        parts.begin(0, order(5), left_s)
        parts.begin(1, order(6), left_s)
        assert parts.free == []
        ended = [
            parts.wait(on_progress=lambda part, progress: heard.append((part, threading.current_thread().name)))
            for _ in range(2)
        ]
        assert time.monotonic() - began < 0.75, "one after the other they take 0.8 s"
    assert sorted(one.trial.number for one in ended) == [5, 6] and {one.part for one in ended} == {0, 1}
    assert {name for _, name in heard} == {threading.current_thread().name} and {part for part, _ in heard} == {0, 1}
    for runner, share in zip(runners, equal_shares(CORES, 2), strict=True):
        assert runner.made[0][1] == set(share)


def test_a_free_part_is_kept_busy_until_a_run_begins_there():
    idle = Steps(0.05)
    with parts_of(Steps(0.5), Steps(0.2), idle=idle) as parts:
        parts.begin(0, order(1), left_s)
        parts.fill(CONFIG)
        assert parts.free == [1], "what does not count can be ended at any time"
        assert parts.wait().part == 0
        made = len(idle.made)
        assert made > 2, "again and again"
        parts.begin(1, order(2), left_s)
        assert parts.wait() == EndedRun(part=1, order=order(2), trial=make_trial(2, CONFIG, 0.5))
        assert len(idle.made) <= made + 1
        parts.fill(CONFIG)
        parts.empty()
        assert parts.free == [0, 1]


def test_an_error_of_one_is_raised_and_closing_ends_the_others():
    slow = Steps(60.0)
    with parts_of(Steps(0.1, error=ValueError("no process")), slow) as parts:
        parts.begin(1, order(2), left_s)
        parts.begin(0, order(1), left_s)
        with pytest.raises(ValueError, match="no process"):
            parts.wait()
        began = time.monotonic()
        assert parts.close() == [], "it had not come to its end"
        assert time.monotonic() - began < 5.0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("part ")]


def test_closing_gives_back_what_had_ended():
    with parts_of(Steps(0.05), Steps(60.0)) as parts:
        parts.begin(0, order(1), left_s)
        parts.begin(1, order(2), left_s)
        time.sleep(0.5)
        assert [ended.trial.number for ended in parts.close()] == [1]
        assert parts.close() == []


# With real processes.


@two_cores
@pytest.mark.slow
def test_a_zygote_that_is_killed_costs_its_own_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cause, "PAUSE_S", 0.05)  # before the run that was killed is run again
    cores = equal_shares(CORES, 2)
    places = [Part(number=i, cores=frozenset(share)) for i, share in enumerate(cores)]
    zygotes = [Zygote(preload=PRELOAD, env={"OMP_NUM_THREADS": "1"}) for _ in places]

    def runner(zygote: Zygote, folder: str) -> TrialRunner:
        return make_runner(zygote, tmp_path / folder, gib=2, function="make_sound")

    killed: list[int] = []
    attempts: list[int] = []

    def on_progress(part: int, progress: Progress) -> None:
        if part == 1 and not killed and zygotes[1].pid is not None:
            killed.append(zygotes[1].pid)
            os.kill(zygotes[1].pid, signal.SIGKILL)

    runners = [runner(zygote, "runs") for zygote in zygotes]
    with Parts(places, runners, [runner(zygote, "idle") for zygote in zygotes], zygotes) as parts:
        first = zygotes[0].pid
        for number, zygote in enumerate(zygotes):
            assert zygote.pid is not None and os.sched_getaffinity(zygote.pid) == places[number].cores
            parts.begin(number, order(number), left_s)
        ended = [
            parts.wait(on_progress=on_progress, on_attempt=lambda order, report: attempts.append(order.number))
            for _ in range(2)
        ]
        assert {one.trial.number: one.trial.outcome for one in ended} == {0: Outcome.OK, 1: Outcome.OK}
        assert killed and attempts == [1], "the one that was killed was run again"
        assert zygotes[0].pid == first
        parts.begin(0, order(2), left_s)
        parts.fill(CONFIG)
        assert parts.wait().trial.outcome is Outcome.OK
