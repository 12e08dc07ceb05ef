"""The parity check of a workload: of a whole training (compare.py), or of a step function.

The steps of a step function are a program of its own: only their losses can be compared. The plain run is made twice,
so that a step that gives other losses each time is not taken for one that a configuration changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.files import replace_file
from autoplan.planner.parity import compare
from autoplan.planner.parity.judge import make_check, relative
from autoplan.planner.parity.records import ParityRequest, Rung
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


def check_parity(
    zygote: Zygote,
    spec: WorkloadSpec,
    config: TrainingConfig,
    *,
    plain: TrainingConfig | None,
    device: str,
    directory: Path,
    deadline_s: float,
    memory_limit_bytes: int | None = None,
    on_attempt: Callable[[ProcessReport], None] | None = None,
    time_s: float | None = None,
    sample_s: float | None = None,
    cache_dir: Path | None = None,
    own_shapes: bool = False,
) -> Parity:
    """Checks a configuration against one plain process, on fewer and shorter samples.

    Of a step function nothing but the losses is compared.

    Args:
        zygote: Starts the ranks.
        spec: What is trained.
        config: The candidate.
        plain: The plain run that fits at the workload's own length; None: it is not known, as where the baseline is the
            user's own setting. One with checkpointing is taken where the plain one runs out of memory there; if neither
            fits, that length is left out.
        device: cuda or cpu.
        directory: For the files of the check.
        deadline_s: For the whole check.
        memory_limit_bytes: Host memory of all processes of a run together; None: no limit.
        on_attempt: Is told of each run that something outside ended; it is then made again.
        time_s: Seconds in which the parts that a verdict can do without have to end; None: `deadline_s`.
        sample_s: Seconds of a plain forward and backward of one sample of the workload's own length; None: not known.
        cache_dir: Where the reference is kept for the next candidate of the same sizes; None: in `directory`.
        own_shapes: With the micro-batch and the sequences of training, whose kernels a trial has compiled already; only
            where `plain` needs no knob to fit. If that does not come to its end (its copies of the parameters may not
            fit beside them), small ones are taken.

    Raises:
        TaskFailedError: the deadline passed; that says nothing about the configuration.
        DidNotRunError: something outside ended the plain reference each time.
        CandidateDidNotRunError: the same of the candidate.
    """
    now, late_s = time.monotonic(), deadline_s if time_s is None else min(time_s, deadline_s)
    launch = compare.Launch(zygote, now + deadline_s, now + late_s, memory_limit_bytes, on_attempt)
    if spec.is_step:
        return run_step_parity(launch, spec, config, device, directory)
    rung = rung_of(plain)
    own = own_shapes and rung == "plain"
    request = ParityRequest(spec=spec, config=config, device=device, own_shapes=own, rung=rung, sample_s=sample_s)
    return compare.run_parity(launch, request, directory, cache_dir or directory)


def rung_of(plain: TrainingConfig | None) -> Rung:
    """Which plain run fits at the workload's own length, by the knobs that it needed."""
    knobs = set[str]() if plain is None else plain.knobs_off_default().keys() - {"micro_batch"}
    return "plain" if not knobs else "checkpointing" if knobs == {"checkpointing"} else "none"


def run_step_parity(
    launch: compare.Launch, spec: WorkloadSpec, config: TrainingConfig, device: str, directory: Path
) -> Parity:
    """Compares the losses of the first steps with those of two plain runs; each run has a third of the time."""
    deadline_s = launch.left_s() / 3
    plain = TrainingConfig(micro_batch=config.micro_batch)
    found: list[list[float]] = []
    for name, run in (("plain", plain), ("again", plain), ("candidate", config)):
        report = launch.run(
            f"{__name__}:run_steps_rank",
            (spec, run, device),
            directory / name,
            of_candidate=name == "candidate",
            deadline_s=deadline_s,
        )
        if report.ended is not Ended.FINISHED:
            return compare.unfinished(config, f"the {name} run did not finish: {report.describe()}")
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
