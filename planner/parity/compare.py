"""Checks that a configuration trains the same thing as one plain fp32 process.

In: a workload and a configuration. Out: a `Parity` verdict. The runs are in ranks (planner/parity/worker.py); this
module loads no torch.

Equal losses prove nothing: a missing 1/A (gradient accumulation) changes the loss of five steps from random weights by
2e-7. So three figures are compared for each module that owns parameters: the norm of its gradient before clipping, the
gradient itself (a sample of its elements), and the norm of the change of its parameters. Dropout is off. There are at
least two micro-batches, and they count different numbers of items.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autoplan.planner.parity.records import ParityMeasurement, ParityRequest
from autoplan.planner.records import Parity
from autoplan.processes import Ended, ProcessReport, Task, Zygote
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CAP = 1e6
"""The largest relative difference that is reported, because JSON has no infinity."""


class Tolerance(Record):
    """The largest relative differences that pass.

    `norm` is for the norms of gradients and updates per module, `vector` for the distance between the gradients of a
    module. `floor`: the difference of a module whose norm is below this share of the whole model's is relative to that
    share instead of its own norm.
    """

    norm: float
    vector: float
    floor: float


# The largest norm / vector difference of any module of correct runs, measured on tiny GPT-2, Llama, T5, BERT and
# convolutional classifiers and on GPT-2 (124M): fp32 2e-6 / 2e-6, fp16 4e-3 / 6e-2, bf16 2e-2 / 9e-2 (the largest are
# modules before a ReLU, where signs flip). The bugs that the tests plant differ by 9e-2 or more.
TOLERANCES: dict[str, Tolerance] = {
    "fp32": Tolerance(norm=1e-3, vector=2e-3, floor=1e-5),
    "tf32": Tolerance(norm=2e-2, vector=1.5e-1, floor=1e-3),
    "bf16": Tolerance(norm=5e-2, vector=2e-1, floor=1e-3),
    "fp16": Tolerance(norm=2e-2, vector=1.5e-1, floor=1e-3),
}


class ParityRun(NamedTuple):
    """The result of one run of the check: its measurement, and sampled gradient elements by parameter name."""

    measurement: ParityMeasurement
    gradients: Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]


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
    """Checks a configuration against one plain fp32 process, on fewer and shorter samples.

    Args:
        zygote: Starts the ranks.
        spec: What is trained.
        config: The candidate.
        device: cuda or cpu.
        directory: For the files of the check.
        deadline_s: For the whole check.
        cache_dir: The reference is kept here for the next candidate of the same sizes; None: in `directory`.
        ranks: Ranks of the candidate; None: its world size.

    Raises:
        TaskFailedError: the deadline passed, which says nothing about the configuration.
    """
    started = time.monotonic()
    reference = _reference(zygote, spec, config, device, cache_dir or directory, deadline_s)
    if isinstance(reference, str):
        return unfinished(config, f"the plain fp32 reference did not finish: {reference}")
    left_s = max(1.0, deadline_s - (time.monotonic() - started))
    folder = directory / "candidate"
    request = ParityRequest(
        spec=spec,
        config=config,
        plain=False,
        device=device,
        samples=str((folder / "gradients").absolute()),
        steps=reference.measurement.steps,
    )
    report, candidates = _run(zygote, request, folder, ranks or config.world_size, left_s)
    if not candidates:
        return unfinished(config, f"the candidate did not finish: {report.describe()}")
    return compare(reference, candidates, config)


def compare(reference: ParityRun, candidates: Sequence[ParityRun], config: TrainingConfig) -> Parity:
    """Compares each rank of a candidate with the reference.

    Args:
        reference: The plain fp32 run.
        candidates: One per rank; each has the whole gradient.
        config: The candidate's configuration; its precision decides the tolerance.
    """
    tolerance = TOLERANCES[config.precision]
    worst = max((_differences(reference, candidate, tolerance) for candidate in candidates), key=lambda d: d.excess)
    measurement = reference.measurement
    problems = list(worst.problems)
    if measurement.additive is False and measurement.fixed_micro_batch != config.micro_batch:
        problems.append(
            "the loss of two samples is not the sum of their losses, so the micro-batch is part of what is trained; "
            "fix it with --fix micro_batch=N"
        )
    if measurement.deterministic is False:
        problems.append("the loss is not the same twice with dropout off, so nothing could be compared")
    if all(module.update_norm == 0 for module in measurement.modules.values()):
        problems.append("no parameter changed within three plain steps, so nothing could be compared")
    return Parity(
        passed=not problems and worst.excess <= 1.0,
        tolerance=tolerance.norm,
        worst_gradient_difference=worst.gradient,
        worst_update_difference=worst.update,
        worst_group=worst.group,
        loss_difference=worst.loss,
        worst_gradient_error=worst.vector,
        gradient_error_tolerance=tolerance.vector,
        global_batch=measurement.global_batch,
        sequence_length=measurement.sequence_length,
        changes_numerics=config.precision != "fp32",
        note="; ".join([_sizes_note(candidates[0].measurement), *problems]),
    )


def unfinished(config: TrainingConfig, why: str) -> Parity:
    """The verdict of a check that did not finish: not passed."""
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
    )


class _Differences(NamedTuple):
    gradient: float
    update: float
    vector: float
    loss: float
    group: str
    excess: float
    problems: tuple[str, ...]


def _differences(reference: ParityRun, candidate: ParityRun, tolerance: Tolerance) -> _Differences:
    """The largest differences between one rank and the reference. `excess` is the largest share of its tolerance."""
    plain, other = reference.measurement, candidate.measurement
    problems = []
    missing = sorted(set(plain.modules) ^ set(other.modules))
    if missing:
        problems.append(f"parameters are not the same: {', '.join(missing[:3])} is in one of the two only")
    if sorted(reference.gradients) != sorted(candidate.gradients):
        missing = sorted(set(reference.gradients) ^ set(candidate.gradients))
        problems.append(f"gradients are not of the same parameters: {', '.join(missing[:3])} is in one of the two only")
    if not math.isfinite(other.loss):
        problems.append(f"the loss is {other.loss}")
    shared = [name for name in plain.modules if name in other.modules]
    whole_gradient = math.sqrt(sum(plain.modules[name].gradient_norm ** 2 for name in shared))
    whole_update = math.sqrt(sum(plain.modules[name].update_norm ** 2 for name in shared))
    rows = []
    for name in shared:
        expected, found = plain.modules[name], other.modules[name]
        gradient = _relative(expected.gradient_norm, found.gradient_norm, tolerance.floor * whole_gradient)
        update = _relative(expected.update_norm, found.update_norm, tolerance.floor * whole_update)
        vector = _vector_error(reference.gradients, candidate.gradients, name, tolerance.floor)
        excess = max(gradient / tolerance.norm, update / tolerance.norm, vector / tolerance.vector)
        rows.append((excess, gradient, update, vector, name))
    excess, _, _, _, group = max(rows, default=(_CAP, _CAP, _CAP, _CAP, ""))
    return _Differences(
        gradient=max((row[1] for row in rows), default=_CAP),
        update=max((row[2] for row in rows), default=_CAP),
        vector=max((row[3] for row in rows), default=_CAP),
        loss=_relative(plain.loss, other.loss, 1e-12),
        group=group,
        excess=excess,
        problems=tuple(problems),
    )


def _relative(reference: float, value: float, floor: float) -> float:
    """|value - reference| / max(|reference|, floor), at most _CAP."""
    if not math.isfinite(value) or not math.isfinite(reference):
        return _CAP
    scale = max(abs(reference), floor)
    difference = abs(value - reference)
    return min(_CAP, difference / scale) if scale > 0 else (0.0 if difference == 0 else _CAP)


def _vector_error(reference: Mapping[str, Any], candidate: Mapping[str, Any], module: str, floor: float) -> float:
    """||g - g_ref|| / ||g_ref|| over the sampled elements of a module's own parameters."""
    names = [name for name in reference if name.rpartition(".")[0] == module and name in candidate]
    if not names:
        return 0.0
    if any(reference[name].shape != candidate[name].shape for name in names):
        return _CAP
    whole = math.sqrt(sum(_square(sample) for sample in reference.values()))
    distance = math.sqrt(sum(_square(candidate[name] - reference[name]) for name in names))
    scale = max(math.sqrt(sum(_square(reference[name]) for name in names)), floor * whole, 1e-30)
    return distance / scale if math.isfinite(distance) else _CAP


def _square(values: Any) -> float:
    return float(np.square(values.astype(np.float64)).sum())


def _sizes_note(measurement: ParityMeasurement) -> str:
    """A sentence on the sizes of the check, from the candidate's measurement."""
    size = f"{measurement.global_batch} samples"
    if measurement.sequence_length is not None:
        size += f" of {measurement.sequence_length} tokens"
    text = f"checked on {size} in micro-batches of {measurement.micro_batch}, dropout off, {measurement.steps} step(s)"
    if not measurement.uneven_counts:
        text += "; all micro-batches count the same number of items"
    return text


# Runs of the check.


def _reference(
    zygote: Zygote, spec: WorkloadSpec, config: TrainingConfig, device: str, folder: Path, deadline_s: float
) -> ParityRun | str:
    """The plain run, from the folder where it is kept, else run now; or a sentence on why there is none."""
    request = ParityRequest(spec=spec, config=config, plain=True, device=device, samples="")
    key = [spec.identity, config.micro_batch, config.dp, request.accumulation, device]
    kept = folder / ("reference-" + hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16])
    found = _load(kept, 1)
    if found:
        return found[0]
    request = request.model_copy(update={"samples": str((kept / "gradients").absolute())})
    report, samples = _run(zygote, request, kept, 1, deadline_s)
    return samples[0] if samples else report.describe()


def _run(
    zygote: Zygote, request: ParityRequest, folder: Path, ranks: int, deadline_s: float
) -> tuple[ProcessReport, list[ParityRun]]:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("gradients.*.npz"):
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
    (folder / "measurements.json").write_text(json.dumps(list(report.results)))
    return report, _load(folder, ranks)


def _load(folder: Path, ranks: int) -> list[ParityRun]:
    try:
        measurements = json.loads((folder / "measurements.json").read_text())
        loaded = []
        for rank in range(ranks):
            with np.load(folder / f"gradients.{rank}.npz") as file:
                loaded.append(ParityRun(ParityMeasurement.model_validate(measurements[rank]), dict(file)))
    except (OSError, ValueError, IndexError):
        return []
    return loaded
