"""A runner of trials of tests/planner/data/faulty.py."""

from __future__ import annotations

from pathlib import Path

from autoplan.planner.trials.runner import TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.workloads.sources import make_spec

WORKLOADS = Path(__file__).parents[1] / "data" / "faulty.py"


def make_runner(zygote: Zygote, folder: Path, *, gib: int = 1, function: str = "make") -> TrialRunner:
    """Trials on a CPU.

    Args:
        zygote: Starts the ranks.
        folder: For their files.
        gib: Limit of a trial's memory.
        function: Which workload.
    """
    return TrialRunner(
        zygote,
        make_spec(model=f"{WORKLOADS}:{function}"),
        device="cpu",
        memory_limit_bytes=gib << 30,
        host_limit_bytes=gib << 30,
        directory=folder,
    )
