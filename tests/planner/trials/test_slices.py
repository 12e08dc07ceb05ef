"""Runs that share the machine in slices: real processes, their clocks, and what becomes of a round that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.records.trials import Outcome
from autoplan.planner.trials.runner import TrialOrder
from autoplan.planner.trials.slices import MOST_WEIGHT, Slices, alternate
from autoplan.processes import Ended, Task, Zygote
from autoplan.strategies.config import TrainingConfig
from tests.planner.trials.runs import make_runner

COUNTED_S = 1.0


@pytest.fixture
def zygote(training_zygote: Zygote) -> Zygote:
    """It runs: what it imports is no part of a deadline."""
    training_zygote.start()
    return training_zygote


CHILD = """
import sys, time
with open(sys.argv[1], "w", buffering=1) as file:
    while True:
        print(time.monotonic(), file=file)
        time.sleep(0.002)
"""


def work(context: Any, file: str, weights: tuple[float, ...], counted_s: tuple[float, ...]) -> Any:
    """Processes that do nothing but note when they run, and the one that has them alternate."""
    if context.rank == len(counted_s):
        alternate(Path(file), weights)
        return None
    mine = Slices(Path(file), context.rank, len(counted_s))
    mine.ready()
    mine.count()
    mine.count()  # again: it does nothing
    began_s, seen, notes = mine.now_s(), [], Path(f"{file}-{context.rank}")
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(notes)])  # it is stopped with its parent
    while mine.now_s() - began_s < counted_s[context.rank]:
        seen.append(time.monotonic())
        time.sleep(0.001)
    own_s = mine.now_s() - began_s
    child.kill()
    child.wait()
    mine.end()
    seen += [float(line) for line in notes.read_text().splitlines()[:-1]]
    return {"seen": seen, "own_s": own_s, "pauses": mine.pauses, "wall_s": max(seen) - min(seen)}


def run_all(
    zygote: Zygote, folder: Path, weights: tuple[float, ...], counted_s: tuple[float, ...]
) -> list[dict[str, Any]]:
    task = Task(
        target=work,
        args=(str(folder / "slices"), weights, counted_s),
        ranks=len(counted_s) + 1,
        independent=True,
        total_deadline_s=60.0,
    )
    return list(zygote.run(task).check().results[:-1])


def test_one_runs_at_a_time_and_its_clock_counts_its_own_slices(zygote: Zygote, tmp_path: Path):
    runs = 3
    made = run_all(zygote, tmp_path, (1.0,) * runs, (COUNTED_S,) * runs)
    for one in made:
        assert one["own_s"] == pytest.approx(COUNTED_S, abs=0.3)
        assert one["pauses"] >= 3
    assert made[0]["wall_s"] > (runs - 0.5) * COUNTED_S, "what the others had is not in its own clock"
    marks = sorted((at, number) for number, one in enumerate(made) for at in one["seen"])
    changes = sum(a[1] != b[1] for a, b in zip(marks, marks[1:], strict=False))
    pauses = sum(one["pauses"] for one in made)
    assert changes <= pauses + runs, f"{changes} changes in {len(marks)} looks at the clock"


def test_runs_with_a_fixed_number_of_steps_end_together_by_their_weights(zygote: Zygote, tmp_path: Path):
    longer = 3.0
    first, second = run_all(zygote, tmp_path, (1.0, longer), (COUNTED_S, longer * COUNTED_S))
    alone_s = max(second["seen"]) - max(first["seen"])
    assert alone_s < 0.5 * second["own_s"], "most of the second's time it shared with the first"
    assert longer < MOST_WEIGHT


def order(number: int, micro_batch: int, **facts: Any) -> TrialOrder:
    config = TrainingConfig(micro_batch=micro_batch)
    given: dict[str, Any] = {"purpose": "claim", "prediction": None, "deadline_s": 60.0, "round": 0}
    return TrialOrder(number=number, config=config, **(given | {"method": "whole_steps"} | facts))


def test_a_round_measures_both_over_the_same_time(zygote: Zygote, tmp_path: Path):
    made = make_runner(zygote, tmp_path, gib=3).run_round((order(3, 128), order(4, 6)))
    one, other = made.trials
    assert (one.number, other.number) == (3, 4) and one.config.micro_batch == 128
    for trial in made.trials:
        assert trial.outcome is Outcome.OK and trial.round == 0 and trial.purpose == "claim"
        assert trial.pauses >= 3 and trial.peak_memory_bytes and trial.first_losses
        assert trial.phase_seconds["measure"] > trial.step_time_s.median  # type: ignore[union-attr]
    assert one.step_time_s.median < other.step_time_s.median  # type: ignore[union-attr]
    assert one.seconds_spent == other.seconds_spent == pytest.approx(made.report.seconds / 2, rel=0.2)


def test_steps_of_one_expensive_micro_step_are_measured_in_slices(zygote: Zygote, tmp_path: Path):
    runner = make_runner(zygote, tmp_path, gib=3, function="make_expensive")
    made = runner.run_round([order(number, 384, method="parts", remeasure=0.0) for number in range(2)])
    assert len(made.trials) == 2 and all(trial.outcome is Outcome.OK for trial in made.trials)
    assert all(trial.pauses >= 3 for trial in made.trials)


def only_wait(context: Any, file: str) -> None:
    """Two processes that measure nothing, and the one that has them alternate."""
    if context.rank == 2:
        alternate(Path(file), (1.0, 1.0))
        return
    mine = Slices(Path(file), context.rank)
    mine.ready()
    mine.end()


def test_what_stops_while_it_waits_for_the_others_has_not_run_in_slices(zygote: Zygote, tmp_path: Path):
    file = str(tmp_path / "slices")
    task = Task(target=only_wait, args=(file,), ranks=3, independent=True, total_deadline_s=60.0)
    zygote.run(task).check()
    assert [Slices(Path(file), number).pauses for number in range(2)] == [0, 0]


@pytest.mark.parametrize(("micro_batch", "place"), [(12, 0), (192, 1)], ids=["first-raises", "second-killed"])
def test_a_round_of_which_one_fails_ends_soon_and_is_no_verdict(
    zygote: Zygote, tmp_path: Path, micro_batch: int, place: int
):
    orders = [order(0, 128), order(1, micro_batch)]
    began_s = time.monotonic()
    made = make_runner(zygote, tmp_path, gib=3).run_round((orders[place == 0], orders[place == 1]), left_s=lambda: 0.0)
    assert made.trials == () and made.report.ended is Ended.RANK_FAILED and made.report.failed_rank == place
    assert made.settled == (micro_batch == 12), "a signal from outside is none of its doing"
    assert time.monotonic() - began_s < 45.0, "before its deadline"
    assert not [pid for rank in made.report.ranks if (pid := rank.pid) and os.path.exists(f"/proc/{pid}")]


def stop(context: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_process_is_ended_by_the_deadline_like_any_other(zygote: Zygote):
    report = zygote.run(Task(target=stop, total_deadline_s=1.0))
    assert report.ended is Ended.DEADLINE and report.left_behind == 0
    assert report.ranks[0].signal == signal.SIGTERM, "it could end by itself"
