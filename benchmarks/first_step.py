"""Measures what a search does before the first timed step of the plain run: `python -m benchmarks.first_step`.

    python -m benchmarks.first_step [--model gpt2] [--budget 120] [--rounds 3]

Each round is two searches in fresh processes with a cache folder of their own: the first finds it empty, the second
finds what the first left. A search is interrupted where its baseline begins to measure. For each phase the seconds that
passed, and the CPU seconds of all its processes, which other work on the machine lengthens less. Imports are those of
the command and of the process that forks the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from autoplan.planner.records.trials import Trial
from autoplan.planner.search.options import BudgetState, SearchObserver, SearchOptions

PARTS = ("imports", "inspect", "probe", "trace", "space", "refine", "baseline", "warmup")
"""`refine`: what is measured and traced besides, where that comes before the baseline. `baseline`: until its first step
begins; `warmup`: until the first step that counts."""


def cpu_s() -> float:
    """CPU seconds of this process and all that it started."""
    own = os.times()
    spent = own.user + own.system + own.children_user + own.children_system
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        spent += times.user + times.system + times.children_user + times.children_system
    return spent


class Watch(SearchObserver):
    """Adds up the seconds of each phase; ends the search at the first step that counts."""

    def __init__(self) -> None:
        self.phase = "imports"
        self.began = (psutil.Process().create_time(), 0.0)
        self.spent: dict[str, list[float]] = {part: [0.0, 0.0] for part in PARTS}
        self.done = False

    def on_phase(self, name: str, detail: str = "") -> None:
        if self.spent["space"][0] and name in ("probe", "trace", "space"):
            name = "refine"
        now = (time.time(), cpu_s())
        for place in range(2):
            self.spent.setdefault(self.phase, [0.0, 0.0])[place] += now[place] - self.began[place]
        self.phase, self.began = name, now

    def on_progress(self, phase: str, facts: dict[str, Any], budget: BudgetState) -> None:
        if phase == "measure" or "samples" in facts:
            self.end()
            raise KeyboardInterrupt
        if phase == "warmup" and self.phase != phase:
            self.on_phase(phase)

    def on_trial_finished(self, trial: Trial, best: Trial | None, budget: BudgetState) -> None:
        self.end()
        raise KeyboardInterrupt

    def end(self) -> None:
        self.on_phase("measured")
        self.done = True


def search_once(model: str, budget_s: float, store: Path) -> dict[str, Any]:
    """One search up to its first timed step, in this process."""
    from autoplan.planner.search.run import run_search
    from autoplan.strategies.workloads.sources import make_spec

    watch = Watch()
    run_search(SearchOptions(spec=make_spec(model=model), budget=budget_s, store=store), observer=watch)
    return {"reached": watch.done, "spent": watch.spent}


def run_fresh(model: str, budget_s: float, folder: Path) -> dict[str, Any]:
    """The same in a process of its own whose caches are in the folder."""
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-m", "benchmarks.first_step", "--model", model, "--budget", str(budget_s)]
        environment = os.environ | {"XDG_CACHE_HOME": str(folder), "XDG_STATE_HOME": store}
        done = subprocess.run([*command, "--once", store], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(title: str, runs: list[dict[str, Any]]) -> None:
    """A row per phase: the median of the runs."""
    print(f"{title}: seconds, CPU seconds; the median of {len(runs)}")
    total = [0.0, 0.0]
    for part in PARTS:
        both = [statistics.median(run["spent"][part][place] for run in runs) for place in range(2)]
        if part not in ("imports", "refine", "warmup"):
            total = [a + b for a, b in zip(total, both, strict=True)]
        print(f"  {part:10} {both[0]:6.2f} {both[1]:6.2f}")
    print(
        f"  {'in all':10} {total[0]:6.2f} {total[1]:6.2f}   until the first step, without imports and refine",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", type=Path, default=None, help="the store of one search in this process")
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(search_once(options.model, options.budget, options.once)))
        return
    load = os.getloadavg()[0]
    print(f"{options.model} on {os.cpu_count()} cores, load {load:.1f}")
    cold, warm = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(run_fresh(options.model, options.budget, Path(folder)))
            warm.append(run_fresh(options.model, options.budget, Path(folder)))
    show("no cache", cold)
    show("with caches", warm)
    if not all(run["reached"] for run in (*cold, *warm)):
        print("a search ended before its first timed step", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
