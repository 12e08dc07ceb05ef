"""autoplan export: a plan for another trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import output, plans


def export_command(
    plan: plans.PlanArgument = plans.DEFAULT_PLAN,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="json, yaml, pytorch (a script that needs no autoplan), torchrun, slurm, ray, transformers, trl, "
            "accelerate, deepspeed, lightning, fabric, torchtitan or megatron.",
        ),
    ] = "pytorch",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="The file to write. Default: plan-TARGET.* here; plan_TARGET.py for a module."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="TIME", help="Time for building the model, if the target needs it. Default: 5m."
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit", metavar="SIZE", help="Memory for that: 8GiB, or 80% of all. Default: 80% of the free."
        ),
    ] = None,
    unverified_ok: plans.UnverifiedOption = False,
    changed_ok: plans.ChangedOption = False,
    model: plans.ModelOption = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there already.")] = False,
    json_output: output.JsonOption = False,
) -> None:
    """Write a plan for another trainer.

    Each file is checked, as its reader would read it, before it is kept. A file that is there already, with other
    text, is kept too, unless with --force.
    """
    from autoplan.planner.export.run import export_plan
    from autoplan.planner.records.trust import secrets_note

    loaded = plans.load_plan(plan, unverified_ok)
    said = secrets_note(loaded.workload)
    if said is not None:
        output.tell(f"note: {said}")
    exported = export_plan(
        loaded,
        to,
        out,
        budget=budget,
        memory_limit=memory_limit,
        changed_ok=changed_ok,
        workload=model,
        force=force,
    )
    if json_output:
        output.print_json(
            {
                "status": "ok",
                "to": to,
                "files": [str(path) for path in exported.paths],
                "not_carried": list(exported.not_carried),
                "notes": list(exported.notes),
            }
        )
        return
    for path in exported.paths:
        print(path)
    for text in exported.not_carried:
        print(f"not carried: {text}", file=sys.stderr)
    for text in exported.notes:
        print(f"note: {text}", file=sys.stderr)
