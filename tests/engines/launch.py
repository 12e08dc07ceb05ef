"""A planner whose ranks are on two nodes, as a process of its own: it runs three tasks and says how they ended.

    python -m tests.engines.launch elastic|slurm|ray FOLDER [fail|hang]

One line of JSON on stdout: what the ranks said, how a task ended whose second agent was killed, and what came of the
next try. With torch elastic the second process is the agent. `fail`: it ends with status 3 after the first task.
`hang`: its one task hangs.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from autoplan.processes import Task, run_again
from autoplan.processes.engines import ENGINES, Elastic
from autoplan.processes.nodes import Nodes
from autoplan.processes.task import Progress
from tests.processes.node_targets import NAME

PRELOAD = ("torch", "torch.distributed", "tests.processes.node_targets")


def main(name: str, folder: Path, how: str = "") -> None:
    engine = ENGINES[name](0)
    if isinstance(engine, Elastic) and not engine.first:
        raise SystemExit(engine.serve())
    given = Progress(seconds=1.0, phase="given", phase_seconds=0.5, facts=(), memory_bytes=3)
    task = partial(Task, ranks=2, directory=folder / "task")
    with Nodes(engine, nodes=2, ranks_per_node=1, preload=PRELOAD, env={"OMP_NUM_THREADS": "1"}) as launcher:
        if how == "hang":
            launcher.run(task(target=f"{NAME}:hang_marked", args=(str(folder),)))
        met = launcher.run(task(target=f"{NAME}:meet", args=(given, ())))
        agents = len(launcher._agents)
        print(met.describe(), *(rank.stderr_tail for rank in met.ranks), file=sys.stderr)
        if how != "fail":
            failed = launcher.run(task(target=f"{NAME}:end", args=("raise", 1)))
            runs = run_again(launcher, task(target=f"{NAME}:twice", args=(str(folder / "marker"),)))
    if how == "fail":
        with (folder / "met").open("a") as file:
            file.write(f"{met.ended.value}\n")
        engine.leave(ok=False)
        raise SystemExit(3)
    said = {
        "agents": agents,
        "met": [None if one is None else [one["total"], one["place"]] for one in met.results],
        "failed": [failed.ended, failed.failed_rank],
        "lost": [lost.ended for lost in runs.lost],
        "then": [runs.report.ended, runs.report.results],
    }
    (folder / "said.json").write_text(json.dumps(said))
    engine.leave(ok=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
