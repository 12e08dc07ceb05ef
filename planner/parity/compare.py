"""Parity: does a configuration still train the same thing? Compared with one plain process.

Losses alone prove nothing: over five steps from random weights a missing 1/A differs by 2e-7. So the gradients of each
parameter are compared, clipping and the optimizer each by itself, and more: docs/parity.md has the list. The reference
(planner/parity/reference.py) and the candidate (candidate.py) run in ranks; this module loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autoplan.files import replace_file
from autoplan.planner.parity.differences import Samples, excess
from autoplan.planner.parity.judge import Judgement, judge
from autoplan.planner.parity.records import ParityMeasurement, ParityRequest, check_accumulation, dropout_accumulation
from autoplan.planner.parity.text import LIMITS, describe_check, describe_failures, not_checked
from autoplan.planner.parity.tolerances import TOLERANCES, tolerance_of
from autoplan.planner.records import Parity
from autoplan.processes import Ended, ProcessReport, Task, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

FORMAT = 2
"""Of the kept reference. One of an earlier format is made anew."""

REFERENCE_SHARE = 0.5
"""Of the time of a check: the reference begins nothing that a verdict does not need after it."""

CANDIDATE_SHARE = 0.9
"""The same for the candidate, of the time that is left to it."""


def run_parity(
    zygote: Zygote,
    spec: WorkloadSpec,
    config: TrainingConfig,
    *,
    device: str,
    directory: Path,
    deadline_s: float,
    cache_dir: Path | None = None,
    ranks: int | None = None,
) -> Parity:
    """Checks a configuration against one plain process, on fewer and shorter samples.

    Args:
        zygote: Starts the ranks.
        spec: What is trained.
        config: The candidate.
        device: cuda or cpu.
        directory: For the files of the check.
        deadline_s: For the whole check.
        cache_dir: Where the reference is kept for the next candidate of the same sizes; None: in `directory`.
        ranks: Of the candidate; None: its world size.

    Raises:
        TaskFailedError: the deadline passed; that says nothing about the configuration.
    """
    started = time.monotonic()
    reference = _reference(zygote, spec, config, device, cache_dir or directory, deadline_s)
    if isinstance(reference, str):
        return unfinished(config, f"the plain reference did not finish: {reference}")
    left_s = max(1.0, deadline_s - (time.monotonic() - started))
    folder = directory / "candidate"
    request = ParityRequest(
        spec=spec,
        config=config,
        device=device,
        samples=str((folder / "elements").absolute()),
        reference=reference.measurement,
        time_s=CANDIDATE_SHARE * left_s,
    )
    report, candidates = _run(zygote, request, folder, ranks or config.world_size, left_s)
    if not candidates:
        return unfinished(config, f"the candidate did not finish: {report.describe()}")
    return compare(reference, candidates, config)


def compare(reference: Samples, candidates: Sequence[Samples], config: TrainingConfig) -> Parity:
    """Compares each rank of a candidate with the reference; the worst rank gives the verdict.

    Args:
        reference: The plain run.
        candidates: One per rank; each saw the whole gradient.
        config: The candidate's; with the parameters' dtypes, its precision decides the tolerance.
    """
    measurement = reference.measurement
    tolerance = tolerance_of(config.precision, measurement.dtypes)
    judgements = [judge(reference, candidate, tolerance) for candidate in candidates]
    worst = max(judgements, key=lambda judgement: (len(judgement.problems), excess(judgement.worst)))
    problems = [*worst.problems, *_reference_problems(measurement, config)]
    failures = (*problems, *describe_failures(worst.checks))
    ours = candidates[0].measurement
    left_out = not_checked(measurement, ours)
    note = describe_check(ours, worst.checks)
    if left_out:
        note += "; not checked: " + "; ".join(left_out)
    return Parity(
        passed=not failures,
        tolerance=tolerance.norm,
        worst_gradient_difference=_difference(worst, "gradient norms, step 1"),
        worst_update_difference=max(
            _difference(worst, "parameters after the optimizer's steps"), _difference(worst, "change of the parameters")
        ),
        worst_group=worst.worst.where,
        loss_difference=_difference(worst, "loss"),
        worst_gradient_error=_difference(worst, "gradients, step 1"),
        gradient_error_tolerance=tolerance.vector,
        global_batch=measurement.global_batch,
        sequence_length=measurement.sequence_length,
        changes_numerics=config.precision != "fp32",
        note=". ".join([note, *failures, LIMITS]),
        checks=worst.checks,
        failures=failures,
        not_checked=left_out,
    )


def _reference_problems(measurement: ParityMeasurement, config: TrainingConfig) -> list[str]:
    """Why the plain run alone says that nothing can be compared."""
    problems = []
    noisy = measurement.deterministic is False
    if measurement.additive is False and not noisy and measurement.fixed_micro_batch != config.micro_batch:
        problems.append(
            "the loss of two samples is not the sum of their losses, so the micro-batch is part of what is trained; "
            "fix it with --fix micro_batch=N"
        )
    if all(measurement.changes.get(name, 0.0) == 0.0 for name in measurement.parameters):
        problems.append("no parameter changed within three plain steps, so nothing could be compared")
    return problems


def _difference(judgement: Judgement, name: str) -> float:
    found = judgement.find(name)
    return 0.0 if found is None else found.difference


def unfinished(config: TrainingConfig, why: str) -> Parity:
    """The verdict on a check that did not come to its end: not passed."""
    tolerance = TOLERANCES[config.precision]
    return Parity(
        passed=False,
        tolerance=tolerance.norm,
        worst_gradient_difference=1.0,
        worst_update_difference=1.0,
        worst_group="",
        loss_difference=1.0,
        global_batch=0,
        sequence_length=None,
        changes_numerics=config.precision != "fp32",
        note=why,
        failures=(why,),
    )


# Running.


def _reference(
    zygote: Zygote, spec: WorkloadSpec, config: TrainingConfig, device: str, folder: Path, deadline_s: float
) -> Samples | str:
    """The plain run, kept by what decides it; or why there is none."""
    sizes = [config.micro_batch, config.dp, config.pp, check_accumulation(config), dropout_accumulation(config)]
    key = [FORMAT, spec.identity, device, *sizes]
    kept = folder / ("reference-" + hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16])
    found = _load(kept, 1)
    if found:
        return found[0]
    request = ParityRequest(
        spec=spec,
        config=config,
        device=device,
        samples=str((kept / "elements").absolute()),
        time_s=REFERENCE_SHARE * deadline_s,
    )
    report, samples = _run(zygote, request, kept, 1, deadline_s)
    return samples[0] if samples else report.describe()


def _run(
    zygote: Zygote, request: ParityRequest, folder: Path, ranks: int, deadline_s: float
) -> tuple[ProcessReport, list[Samples]]:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("elements.*.npz"):
        old.unlink()
    report = zygote.run(
        Task(
            target="autoplan.planner.parity.worker:run_parity_rank",
            args=(request,),
            ranks=ranks,
            directory=folder,
            deadlines_s={"*": deadline_s},
            total_deadline_s=deadline_s,
        )
    )
    if report.ended in (Ended.DEADLINE, Ended.CANCELLED):
        report.check()
    if report.ended is not Ended.FINISHED:
        return report, []
    replace_file(folder / "measurements.json", json.dumps(list(report.results)), private=True)
    return report, _load(folder, ranks)


def _load(folder: Path, ranks: int) -> list[Samples]:
    try:
        measurements = json.loads((folder / "measurements.json").read_text())
        loaded = []
        for rank in range(ranks):
            with np.load(folder / f"elements.{rank}.npz") as file:
                loaded.append(Samples(ParityMeasurement.model_validate(measurements[rank]), dict(file)))
    except (OSError, ValueError, IndexError):
        return []
    return loaded
