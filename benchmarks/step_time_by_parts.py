"""Compares step times by parts with whole steps, and measures the overhead of a trial.

    python -m benchmarks.step_time_by_parts [--out FILE]

For each configuration, one trial with each method, in turn, three times; the medians of their medians are compared. A
whole step of `gpt2 32 x 8` takes about a second on a small CPU. The overhead is the part of a trial's seconds that is
not building, compiling, warm-up or measuring: starting, joining and reporting.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from autoplan.planner.search.preload import PRELOAD
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec

WORKLOADS = Path(__file__).resolve().parent.parent / "tests" / "planner" / "data" / "faulty.py"
CASES: tuple[tuple[str, dict[str, Any], TrainingConfig], ...] = (
    (f"{WORKLOADS}:make_wide", {}, TrainingConfig(micro_batch=32)),
    ("gpt2", {"sequence_length": 32, "global_batch": 4}, TrainingConfig(micro_batch=1)),
    ("gpt2", {"sequence_length": 32, "global_batch": 8}, TrainingConfig(micro_batch=2, optimizer_step="fused")),
)
ROUNDS = 3
WORK_PHASES = ("build", "compile", "warmup", "measure")


def measure_case(
    zygote: Zygote, folder: Path, model: str, options: dict[str, Any], config: TrainingConfig
) -> tuple[dict[str, Any], list[float], list[float]]:
    """One row of the table, and of each trial the seconds of overhead and of startup."""
    runner = TrialRunner(
        zygote,
        make_spec(model=model, **options),
        device="cpu",
        memory_limit_bytes=8 << 30,
        host_limit_bytes=8 << 30,
        directory=folder,
    )
    seconds: dict[str, list[float]] = {"whole_steps": [], "parts": []}
    overheads, startups = [], []
    for number in range(2 * ROUNDS):
        method = ("whole_steps", "parts")[number % 2]
        order = TrialOrder(
            number=number,
            purpose="search",
            config=config,
            prediction=None,
            deadline_s=300.0,
            method=method,  # type: ignore[arg-type]
        )
        began = time.monotonic()
        trial = runner.run(order)
        spent = time.monotonic() - began
        if trial.step_time_s is None:
            raise SystemExit(f"{config.describe()} {trial.outcome}: {trial.reason}")
        seconds[method].append(trial.step_time_s.median)
        overheads.append(spent - sum(trial.phase_seconds.get(name, 0.0) for name in WORK_PHASES))
        startups.append(trial.startup_s)
    whole, parts = median(seconds["whole_steps"]), median(seconds["parts"])
    row = {
        "workload": Path(model).name,
        **options,
        "config": config.describe(),
        "whole_s": whole,
        "parts_s": parts,
        "parts_over_whole": parts / whole,
        "runs": seconds,
    }
    return row, overheads, startups


def main() -> None:
    """Measures and prints one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    out = parser.parse_args().out
    rows: list[dict[str, Any]] = []
    overheads: list[float] = []
    startups: list[float] = []
    with Zygote(preload=PRELOAD) as zygote, tempfile.TemporaryDirectory() as folder:
        for model, options, config in CASES:
            row, case_overheads, case_startups = measure_case(
                zygote, Path(folder) / str(len(rows)), model, options, config
            )
            rows.append(row)
            overheads += case_overheads
            startups += case_startups
    document = {
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "rows": rows,
        "trial_overhead_s": {"median": median(overheads), "max": max(overheads)},
        "trial_startup_s": {"median": median(startups), "max": max(startups)},
    }
    text = json.dumps(document, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
