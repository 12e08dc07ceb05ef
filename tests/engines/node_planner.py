"""A planner with ranks on two nodes, as a process of its own: it does numbered tasks, and records each that is done.

    python -m tests.engines.node_planner elastic|slurm|ray FOLDER

A line of FOLDER/done is `[number, results]`. A planner that is started again goes on after the last. It ends well when
there is a file FOLDER/stop. The ranks import no torch, so that a killed agent is soon there again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from autoplan.processes import Task, engines, run_again
from autoplan.processes.nodes import Engine, Nodes
from tests.processes.node_targets import NAME

PRELOAD = ("tests.processes.node_targets",)


def read_done(folder: Path) -> list[Any]:
    """The whole lines so far."""
    path = folder / "done"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def work(engine: Engine, folder: Path) -> int:
    """Task after task; one that something outside ended each time is done again."""
    with Nodes(engine, nodes=2, ranks_per_node=1, preload=PRELOAD) as launcher:
        while not (folder / "stop").exists():
            number = len(read_done(folder))
            task = Task(target=f"{NAME}:add", args=(number,), ranks=2, directory=folder / "task", total_deadline_s=60.0)
            runs = run_again(launcher, task)
            if runs.settled:
                results = runs.report.check().results
                with (folder / "done").open("a") as file:
                    file.write(json.dumps([number, results]) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
    return 0


def main(name: str, folder: Path) -> int:
    engines.QUEUE_LOOK_S, engines.SHORT_S = 0.5, 0.0  # SLURM has nothing else to do, and jobs are killed at once here
    return engines.with_engine(name, 0, lambda engine: work(engine, folder), lambda code: code == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
