"""One search of the soak, in a process of its own: `python -m benchmarks.soak_search STORE BUDGET_S PHASE_FILE RESULT`.

It writes the stage that it is in to PHASE_FILE, so that benchmarks/soak.py knows what it kills, and its end to RESULT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from autoplan.errors import AutoplanError
from autoplan.planner.search import next_work, session, state
from autoplan.planner.search.next_work import Work
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.run import run_search
from autoplan.strategies.workloads.sources import make_spec

FIXED = {"compile": "off", "precision": "fp32", "threads": 1, "checkpointing": "none", "optimizer_step": "fused"}
"""The baseline has no fused step, so that there is a gain to claim; all that ran are contenders (`main`)."""
MAX_TRIALS = 4  # the baseline, the setting by hand, and two of the search


class PhaseFile(SearchObserver):
    """Keeps the name of the stage in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_phase(self, name: str, detail: str = "") -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_text(name)
        temporary.replace(self._path)

    def on_work(self, work: Work, *others: object) -> None:
        self.on_phase(work.kind)


def pair_all() -> None:
    """Whatever ran is run side by side with the leader, however far behind it is."""
    session.contenders = lambda objective, candidates, leader, spread: [  # type: ignore[assignment]
        one for one in candidates if one.config != leader.config
    ]
    state.is_decided = lambda *runs: False
    next_work.LEAST_PAIR_GAIN = 0.0


def main(store: str, budget_s: str, phase_file: str, result_file: str) -> None:
    """Runs the search to its end and writes how it ended."""
    pair_all()
    options = SearchOptions(
        spec=make_spec(model=f"{Path(__file__).with_name('soak_workload.py')}:workload"),
        budget=float(budget_s),
        max_trials=MAX_TRIALS,
        fix=FIXED,
        device="cpu",
        store=store,
    )
    observer = PhaseFile(Path(phase_file))
    try:
        result = run_search(options, observer=observer)
        ended = {"status": result.status, "reason": result.reason, "trials": len(result.trials)}
    except AutoplanError as error:
        ended = {"status": "error", "reason": f"{type(error).__name__}: {error.message}", "trials": 0}
    Path(result_file).write_text(json.dumps(ended))


if __name__ == "__main__":
    main(*sys.argv[1:])
