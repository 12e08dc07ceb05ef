"""Some steps of a plan's own workload, in ranks on this machine or on several nodes: does it train there, how fast?

In: a plan. Out: a `PlanRun`. `autoplan run plan.json --launcher slurm` prints it; without a launcher that command
becomes the ranks itself, as torchrun does, and takes `run_steps` alone.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from autoplan.errors import DidNotRunError, UsageError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.prepare import check_before_use, refuse_changed_code
from autoplan.planner.records.trust import own_workload
from autoplan.planner.search.nodes import make_launcher, options_for, with_engine
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.trials.runner import PHASE_DEADLINES_S
from autoplan.probes.run import read_host_profile
from autoplan.processes import Progress, Task, run_again
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import format_seconds

if TYPE_CHECKING:
    from autoplan.processes import RankContext
    from autoplan.processes.nodes import Engine, Nodes
    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.spec import Counted

DEFAULT_STEPS = 5
STARTING = ("start", "init", "build")
"""The phases of a rank that have deadlines, those of a trial. How long a step takes is the user's affair."""


class StepRecord(Record):
    """One optimizer step."""

    step: int = Field(description="1 for the first")
    loss: float
    seconds: float
    items: float = Field(description="tokens, or samples, over all ranks, from the first rank's own batch")

    def describe(self) -> str:
        """`step 3: loss 6.1234, 210 ms`."""
        return f"step {self.step}: loss {self.loss:.4f}, {format_seconds(self.seconds)}"


class PlanRun(Record):
    """Steps that a plan's workload made, and their speed."""

    steps: tuple[StepRecord, ...]
    unit: str = Field(description="what the rate counts: tokens or samples")
    plan_measured: float = Field(description="the plan's own rate, in units a second")

    @classmethod
    def of(cls, plan: Plan, records: Sequence[StepRecord]) -> PlanRun:
        """The run of a plan that made these steps."""
        measured = plan.measurement.tokens_per_s.median
        return cls(steps=tuple(records), unit=plan.workload.unit, plan_measured=measured)

    @property
    def step_time_s(self) -> float:
        """The median, in seconds, without the first step where there are others."""
        return statistics.median(record.seconds for record in self._later)

    @property
    def items_per_s(self) -> float:
        """Tokens, or samples, a second over all ranks."""
        return statistics.mean(record.items for record in self._later) / self.step_time_s

    @property
    def _later(self) -> tuple[StepRecord, ...]:
        return self.steps[1:] or self.steps


class StepsRequest(Record):
    """What each rank is asked for."""

    spec: WorkloadSpec
    config: TrainingConfig
    device: Literal["cuda", "cpu"]
    steps: int
    changed_ok: bool


def say_no_step(record: StepRecord) -> None:
    """For whoever wants to be told of no step."""


def run_plan(
    plan: Plan | str | Path,
    *,
    steps: int = DEFAULT_STEPS,
    launcher: str | None = None,
    nodes: str | None = None,
    unverified_ok: bool = False,
    changed_ok: bool = False,
    workload: str | Path | None = None,
    on_step: Callable[[StepRecord], None] = say_no_step,
) -> PlanRun:
    """Runs some steps of a plan's own workload in ranks of their own.

    Args:
        plan: A plan, or the file of one.
        steps: Optimizer steps. The first does not count for the speed.
        launcher: What starts the ranks on several nodes: elastic, slurm or ray, as in a search; local: all ranks run on
            this machine. None: local, for a plan that was measured on one machine.
        nodes: N nodes with R ranks each, `"2x8"`. None: as the plan was measured.
        unverified_ok, changed_ok: As `autoplan.verify` takes them.
        workload: What the plan is of, as you name it. Not needed where you searched it.
        on_step: Is told of steps while they run; of very short ones not of each.

    Raises:
        PlanError: the plan was edited, its code changed, or it was measured on several nodes and no launcher was given.
        UsageError: the nodes do not hold its ranks.
        DidNotRunError: something outside ended it each time, such as a node that was lost.
        TaskFailedError: a rank failed; the text says how.
        SystemExit: torchrun started this process as an agent of the first node, and the run has ended.
    """
    if steps < 1:
        raise UsageError(f"--steps is {steps}", hint="Give a whole number of at least 1.")
    loaded = (plan if isinstance(plan, Plan) else Plan.load(plan)).accepted(unverified_ok)
    named = None if workload is None else str(workload)
    loaded = loaded.model_copy(update={"workload": own_workload(loaded.workload, loaded.study, named)})
    options = options_for(loaded, launcher, nodes)
    changed = check_before_use(loaded, changed_ok=changed_ok)
    if changed is not None:
        warnings.warn(changed, stacklevel=2)
    request = StepsRequest(
        spec=loaded.workload, config=loaded.config, device=loaded.device, steps=steps, changed_ok=changed_ok
    )
    records = with_engine(options, lambda engine: _run(request, options, engine, on_step), lambda _: 0)
    return PlanRun.of(loaded, records)


def _run(
    request: StepsRequest,
    options: SearchOptions,
    engine: Engine | Nodes | None,
    on_step: Callable[[StepRecord], None],
) -> tuple[StepRecord, ...]:
    said = 0

    def look(progress: Progress) -> None:
        nonlocal said
        last = progress.facts[0].get("last") if progress.facts else None
        if last is not None and last["step"] > said:
            said = last["step"]
            on_step(StepRecord.model_validate(last))

    task = Task(
        target=f"{__name__}:run_in_rank",
        args=(request,),
        ranks=request.config.world_size,
        deadlines_s={phase: PHASE_DEADLINES_S[phase] for phase in STARTING},
    )
    with make_launcher(options, read_host_profile(), engine, lambda text: None) as launcher:
        runs = run_again(launcher, task, on_progress=look)
    if not runs.settled:
        raise DidNotRunError(runs.report.describe(), hint="The same command tries it again.")
    records = tuple(StepRecord.model_validate(one) for one in runs.report.check().results[0])
    if records[-1].step > said:
        on_step(records[-1])
    return records


def run_in_rank(context: RankContext, request: StepsRequest) -> list[StepRecord]:
    """The steps of one rank, with the same `prepare` as a trial. The code was accepted where the command was given.

    Raises:
        PlanError: this node's files are not those that were searched.
    """
    context.phase("init")
    from autoplan.planner.trials.ranks import join_ranks, pick_device
    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.sources import load_workload

    refuse_changed_code(request.spec, changed_ok=request.changed_ok)
    device = pick_device(context, request.device)
    join_ranks(context, request.device)
    context.phase("build")
    run = prepare(load_workload(request.spec), request.config, device=device)
    context.phase("measure")
    return run_steps(
        run, request.steps, request.spec.counted, on_step=lambda record: context.heartbeat(last=record.model_dump())
    )


def run_steps(
    run: TrainingRun,
    steps: int,
    counted: Counted | None = None,
    *,
    on_step: Callable[[StepRecord], None] = say_no_step,
) -> list[StepRecord]:
    """Steps on the workload's own batches. The clock waits for the device.

    Args:
        run: Of this rank.
        steps: How many.
        counted: What throughput counts, as the plan's file has it.
        on_step: Is told of each.
    """
    from autoplan.strategies.workloads.counting import count_items, find_counted

    records = []
    for number in range(steps):
        batch = run.workload.make_batch(run.local_batch, number)
        started = time.perf_counter()
        result = run.step(batch)
        loss = float(result.loss)  # reading it waits for the device
        seconds = time.perf_counter() - started
        if counted is None or (counted.by == "function" and run.workload.tokens is None):
            counted = find_counted(run.workload, batch, run.model)
        items = count_items(run.workload, counted, batch) * run.config.dp
        records.append(StepRecord(step=number + 1, loss=loss, seconds=seconds, items=items))
        on_step(records[-1])
    return records
