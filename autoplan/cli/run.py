"""autoplan run: some steps of a plan's own workload, as plan.prepare builds it."""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli import output
from autoplan.cli.plans import DEFAULT_PLAN, ChangedOption, ModelOption, PlanArgument, TrustOption, load_plan
from autoplan.errors import UsageError
from autoplan.units import format_number, format_seconds

if TYPE_CHECKING:
    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.spec import Counted


def run_command(
    plan: PlanArgument = DEFAULT_PLAN,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Optimizer steps. The first does not count for the speed.")
    ] = 5,
    changed_ok: ChangedOption = False,
    trust_code: TrustOption = False,
    model: ModelOption = None,
    json_output: output.JsonOption = False,
) -> None:
    """Run some steps of a plan and print the speed.

    The model and the data are those of the search. Start a plan for several ranks with torchrun.
    """
    if steps < 1:
        raise UsageError(f"--steps is {steps}", hint="Give a whole number of at least 1.")
    loaded = load_plan(plan)
    run = loaded.prepare(changed_ok=changed_ok, trust_code=trust_code, workload=model)
    records = run_steps(run, steps, loaded.workload.counted)
    if not is_first_rank():
        return
    later = records[1:] or records
    step_s = statistics.median(record["seconds"] for record in later)
    rate = statistics.mean(record["items"] for record in later) / step_s
    measured = loaded.measurement.tokens_per_s.median
    if json_output:
        document = {"status": "ok", "steps": records, "step_time_s": step_s, f"{loaded.workload.unit}_per_s": rate}
        output.print_json(document | {"plan_measured": measured})
        return
    unit = loaded.workload.unit
    sys.stderr.write(f"the plan measured {format_number(measured)} {unit}/s; this run is {rate / measured:.0%} of it\n")
    print(f"{format_number(rate)} {unit}/s, {format_seconds(step_s)} a step")


def run_steps(run: TrainingRun, steps: int, counted: Counted | None = None) -> list[dict[str, Any]]:
    """Steps on the workload's own batches; a line each on stderr. The clock waits for the device.

    `items` are the tokens, or samples, of a step over all ranks, from this rank's own batch.
    """
    from autoplan.strategies.workloads.counting import count_items, find_counted

    records = []
    for number in range(steps):
        batch = run.workload.make_batch(run.local_batch, number)
        started = time.perf_counter()
        result = run.step(batch)
        loss = float(result.loss)  # reading it waits for the device
        seconds = time.perf_counter() - started
        counted = counted or find_counted(run.workload, batch, run.model)
        items = count_items(run.workload, counted, batch) * run.config.dp
        records.append({"step": number + 1, "loss": loss, "seconds": seconds, "items": items})
        if is_first_rank():
            sys.stderr.write(f"step {number + 1}: loss {loss:.4f}, {format_seconds(seconds)}\n")
    return records


def is_first_rank() -> bool:
    """True but in the other ranks of a torchrun."""
    import os

    return os.environ.get("RANK", "0") == "0"
