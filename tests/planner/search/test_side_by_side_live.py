"""Looks side by side with real processes: stopped by Ctrl-C in the middle, and gone on with."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.records.trials import Trial
from autoplan.planner.search.next_work import BESIDE
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.run import run_search
from autoplan.processes import linux
from autoplan.strategies.workloads.sources import make_spec
from tests.time_box import set_time_box

WORKLOADS = Path(__file__).parents[1] / "data" / "faulty.py"
CORES = os.sched_getaffinity(0)


class Impatient(SearchObserver):
    """Presses Ctrl-C when the first of the looks has ended: another one runs then."""

    def on_trial_finished(self, trial: Trial, best: Trial | None, budget: Any) -> None:
        if trial.purpose == "search":
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.skipif(len(CORES) < 2, reason="a part needs a core of its own")
@pytest.mark.slow
def test_a_search_on_two_parts_is_stopped_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    set_time_box(monkeypatch.setattr)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = SearchOptions(
        spec=make_spec(model=f"{WORKLOADS}:make_sound"),
        budget=150.0,
        device="cpu",
        store=tmp_path / "s",
        max_trials=4,
        fix={"compile": "off"},
        side_by_side=2,
    )
    before = linux.descendants(os.getpid())
    stopped = run_search(options, observer=Impatient())
    assert stopped.status == "interrupted", stopped.reason
    assert linux.descendants(os.getpid()) <= before, "nothing runs any more"
    assert os.sched_getaffinity(0) == CORES
    kept = [trial for trial in stopped.trials if trial.purpose in ("baseline", "search")]
    assert len(kept) >= 2

    result = run_search(options)
    assert result.status == "plan_found", result.reason
    assert linux.descendants(os.getpid()) <= before
    assert result.resumed_trials == len(stopped.trials)
    assert {trial.number for trial in kept} <= {trial.number for trial in result.trials}
    assert sum(not trial.is_repeat for trial in result.trials) == 4
    looks = [line for line in result.ledger if line.kind in BESIDE and line.part is not None]
    shared = [
        min(one.began_s + one.seconds, two.began_s + two.seconds) - max(one.began_s, two.began_s)
        for one, two in itertools.combinations(looks, 2)
    ]
    assert max(shared) > 0.5, "two of them ran at once"
    assert all(trial.beside == (0 if trial.is_repeat else 1) for trial in result.trials)
    assert result.plan is not None and any("side by side on 2 parts" in note for note in result.plan.notes)
    assert result.plan.hardware.host.cores_usable == len(CORES) // 2
