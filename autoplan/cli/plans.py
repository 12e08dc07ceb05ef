"""The common parts of commands that take a plan: the argument, loading it, the options for the code that it names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli import output

if TYPE_CHECKING:
    from autoplan.planner.plan.plan import Plan

PlanArgument = Annotated[Path, typer.Argument(metavar="[PLAN]", help="A plan file, as autoplan search writes it.")]
DEFAULT_PLAN = Path("plan.json")

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The plan's workload, if you did not search it here: file.py:function, with options and arguments "
        "'train.py:workload seed=3 -- --lr 0.5'; or where its config.json or folder is now.",
    ),
]
ChangedOption = Annotated[
    bool,
    typer.Option("--changed-ok", help="Go on although the plan was edited, or the workload's code changed since."),
]

UnverifiedOption = Annotated[
    bool,
    typer.Option(
        "--unverified-ok",
        help="Go on although the plan is unverified: the best so far of a search that ended before its proof.",
    ),
]

MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit", metavar="SIZE", help="What the plan may take: 8GiB, or 80% of all. Default: as a search."
    ),
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait while a search measures on the device. Default: exit code 4.")
]
LauncherOption = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="NAME",
        help="What starts the ranks on --nodes: elastic, slurm or ray (docs/nodes.md). Default: all on this machine.",
    ),
]
NodesOption = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="NxR",
        help="With --launcher: N nodes with R ranks each, 2x8. Default: what the plan was measured on.",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]


def load_plan(path: Path, unverified_ok: bool = False) -> Plan:
    """The plan in a file; what is to be known of the file goes to stderr; PlanError says what is wrong with it."""
    from autoplan.planner.plan.plan import Plan

    plan = Plan.load(path)
    for note in plan.load_notes:
        output.tell(f"note: {note}")
    return plan.accepted(unverified_ok)
