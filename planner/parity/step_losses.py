"""Parity of a workload whose steps are a program of its own: only their losses can be compared.

In: the spec and a configuration. Out: a `Parity` that says so. The plain run is made twice, so that a step that gives
other losses each time is not taken for one that a configuration changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.files import replace_file
from autoplan.planner.parity.compare import Launch, unfinished
from autoplan.planner.parity.differences import make_check, relative
from autoplan.planner.parity.tolerances import TOLERANCES
from autoplan.planner.records.trials import Parity
from autoplan.processes import Ended, ProcessReport, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.processes import RankContext

STEPS = 5

NOT_CHECKED = (
    "gradients, clipping, the optimizer and the schedule: they are inside of the step function, and losses alone see "
    "little of them",
)


def run_step_parity(
    zygote: Zygote,
    spec: WorkloadSpec,
    config: TrainingConfig,
    *,
    device: str,
    directory: Path,
    deadline_s: float,
    memory_limit_bytes: int | None = None,
    on_attempt: Callable[[ProcessReport], None] | None = None,
) -> Parity:
    """Compares the losses of the first steps with those of two plain runs.

    Args:
        zygote: Starts the ranks.
        spec: What is trained.
        config: The candidate.
        device: cuda or cpu.
        directory: For the files of the check.
        deadline_s: For each of the three runs, a third.
        memory_limit_bytes: Host memory of a run; None: no limit.
        on_attempt: Is told of each run that something outside ended; it is then made again.

    Raises:
        TaskFailedError: the deadline passed; that says nothing about the configuration.
        DidNotRunError: something outside ended a run each time.
    """
    end = time.monotonic() + deadline_s
    launch = Launch(zygote, deadline_at=end, late_at=end, memory_limit_bytes=memory_limit_bytes, on_attempt=on_attempt)
    plain = TrainingConfig(micro_batch=config.micro_batch)
    found: list[list[float]] = []
    for name, run in (("plain", plain), ("again", plain), ("candidate", config)):
        report = launch.run(
            "autoplan.planner.parity.step_losses:run_steps_rank",
            (spec, run, device),
            directory / name,
            of_candidate=name == "candidate",
            deadline_s=deadline_s / 3,
        )
        if report.ended is not Ended.FINISHED:
            return unfinished(config, f"the {name} run did not finish: {report.describe()}")
        found.append([float(loss) for loss in list(report.results)[0]])
    replace_file(directory / "losses.json", json.dumps(found), private=True)
    return compare_losses(config, *found)


def compare_losses(
    config: TrainingConfig, plain: Sequence[float], again: Sequence[float], candidate: Sequence[float]
) -> Parity:
    """The verdict on the losses of some steps.

    Args:
        config: The candidate's; its precision decides the tolerance.
        plain, again: Of two plain runs.
        candidate: Of the candidate.
    """
    checks, failures = [], []
    own = TOLERANCES["fp32"]
    tolerance = TOLERANCES[config.precision]
    for name, losses, first, later in (
        ("losses of two plain runs", again, own.loss, own.later),
        ("losses", candidate, tolerance.loss, tolerance.later),
    ):
        apart = [relative(other, one, 1e-12) for one, other in zip(losses, plain, strict=True)]
        over = [distance / (first if step == 0 else later) for step, distance in enumerate(apart)]
        worst = over.index(max(over))
        allowed = first if worst == 0 else later
        checks.append(make_check(name, apart[worst], allowed, f"step {worst}"))
        if over[worst] > 1.0:
            failures.append(
                f"{name} differ by {apart[worst]:.2g} at step {worst} ({losses[worst]:.6g}, {plain[worst]:.6g}); up to "
                f"{allowed:.2g} passes"
            )
            if losses is again:
                failures[-1] += ". Seed everything in make_step, so that two runs can be compared"
    if len(set(plain)) == 1:
        failures.append(f"the loss is {plain[0]:.6g} at every step, so nothing could be compared")
    difference = checks[-1].difference
    note = f"losses of {STEPS} steps differ by at most {difference:.2g}"
    return Parity(
        passed=not failures,
        tolerance=tolerance.later,
        worst_gradient_difference=difference,
        worst_update_difference=difference,
        worst_group="the losses: nothing else is known",
        loss_difference=difference,
        global_batch=config.micro_batch,
        sequence_length=None,
        changes_numerics=config.precision != "fp32",
        note=". ".join([note, *failures, f"not checked: {NOT_CHECKED[0]}"]),
        checks=tuple(checks),
        failures=tuple(failures),
        not_checked=NOT_CHECKED,
    )


def run_steps_rank(context: RankContext, spec: WorkloadSpec, config: TrainingConfig, device: str) -> list[float]:
    """The losses of the first steps under a configuration, in a rank."""
    from autoplan.planner.trials.ranks import pick_device
    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.sources import load_workload

    context.phase("build")
    place = pick_device(context, device)
    workload = load_workload(spec)
    run: Any = prepare(workload, config, device=place)
    context.phase("steps")
    return [float(run.step(workload.make_batch(workload.global_batch, index)).loss) for index in range(STEPS)]
