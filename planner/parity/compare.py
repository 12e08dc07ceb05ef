"""Parity: does a configuration still train the same thing? Compared with one plain process.

Losses alone prove nothing: over five steps from random weights a missing 1/A differs by 2e-7. So the gradients of each
parameter are compared, clipping and the optimizer each by itself, and more: docs/parity.md has the list. The reference
(planner/parity/reference.py) and the candidate (candidate.py) run in ranks; this module loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.errors import DidNotRunError
from autoplan.files import replace_file
from autoplan.planner.parity.judge import (
    SAME_MASKS,
    Samples,
    buffers_to_compare,
    excess,
    is_replayed,
    judge,
    names_of,
    not_finite,
    same_masks_on_ranks,
)
from autoplan.planner.parity.records import (
    CHECK_MICRO_BATCH,
    RUNGS,
    ParityMeasurement,
    ParityRequest,
    Rung,
    check_accumulation,
    dropout_accumulation,
)
from autoplan.planner.parity.tolerances import TOLERANCES, tolerance_of
from autoplan.planner.records.trials import Parity, ParityCheck
from autoplan.processes import Ended, ProcessReport, Task, Zygote, limit_hit, run_again
from autoplan.strategies.config import TrainingConfig, knobs

MEASUREMENTS = "measurements.json"
LIMITS = "What no check of a few steps can see is listed in docs/parity.md"

FORMAT = 7
"""Of the kept reference. One of an earlier format is made anew."""

REFERENCE_SHARE = 0.5
"""Of the time of a check: the reference begins nothing that a verdict does not need after it."""

CANDIDATE_SHARE = 0.9
"""The same for the candidate, of the time that is left to it."""


FUNCTIONS = {
    "build": "build_model()",
    "dropout": "loss(model, batch)",
    "additivity": "loss(model, batch) of two samples",
    "steps": "the steps of training",
    "own length": "loss(model, batch) at the workload's own length",
}
"""The phases of a run of the check, and the function of the user's that runs in each."""


def run_parity(launch: Launch, request: ParityRequest, directory: Path, cache_dir: Path) -> Parity:
    """Checks the configuration of a request against one plain process: see `check_parity`.

    Raises:
        TaskFailedError, DidNotRunError, CandidateDidNotRunError: see `check_parity`.
    """
    config, rung = request.config, request.rung
    attempts: list[tuple[bool, Rung]] = [(True, rung)] if request.own_shapes else []
    attempts += [(False, lower) for lower in RUNGS[RUNGS.index(rung) :]]
    for own, fitting in attempts:
        changes = {"own_shapes": own, "rung": fitting, "time_s": REFERENCE_SHARE * launch.time_s()}
        plain = request.model_copy(update=changes)
        reference = _reference(launch, plain, cache_dir)
        if isinstance(reference, ProcessReport):
            verdict = unfinished(config, why_unfinished(reference, "the plain reference"))
            hit = limit_hit(reference, "it")  # the own length comes after shorter samples
            too_long = hit is not None and hit.kind == "memory" and reference.phase == "own length"
            if not own and fitting == "plain" and not too_long:
                break
            continue
        beside: dict[str, Any] = {"reference": reference.measurement, "time_s": CANDIDATE_SHARE * launch.time_s()}
        report, candidates = _run(launch, plain.model_copy(update=beside), directory / "candidate")
        if candidates:
            return compare(reference, candidates, config).model_copy(update={"own_shapes": own})
        verdict = unfinished(config, why_unfinished(report, "the candidate"))
        if not own and fitting == "plain":
            break
    return verdict


def compare(reference: Samples, candidates: Sequence[Samples], config: TrainingConfig) -> Parity:
    """Compares each rank of a candidate with the reference; the worst rank gives the verdict.

    Args:
        reference: The plain run.
        candidates: One per rank; each saw the whole gradient.
        config: The candidate's; with the parameters' dtypes, its precision decides the tolerance.
    """
    measurement = reference.measurement
    tolerance = tolerance_of(config, measurement.dtypes)
    judgements = [judge(reference, one, tolerance, states=config.optimizer_state) for one in candidates]
    worst = max(judgements, key=lambda judgement: (len(judgement.problems), excess(judgement.worst)))
    problems = [*_reference_problems(measurement, config), *worst.problems]
    if config.pp == 1 and (same_masks := same_masks_on_ranks([one.measurement for one in candidates])):
        problems.append(same_masks)
    failures = (*problems, *describe_failures(worst.checks))
    ours = candidates[0].measurement
    left_out = (*not_checked(measurement, ours), *([worst.too_sensitive] if worst.too_sensitive else []))
    note = "; ".join(describe_check(measurement, ours, worst.checks))
    if left_out:
        note += "; not checked: " + "; ".join(left_out)
    return Parity(
        passed=not failures,
        tolerance=tolerance.norm,
        worst_gradient_difference=worst.difference("gradient norms, step 1"),
        worst_update_difference=max(
            worst.difference("parameters after the optimizer's steps"), worst.difference("change of the parameters")
        ),
        worst_group=worst.worst.where,
        loss_difference=worst.difference("loss"),
        worst_gradient_error=worst.difference("gradients, step 1"),
        gradient_error_tolerance=tolerance.vector,
        global_batch=measurement.global_batch,
        sequence_length=measurement.sequence_length,
        changes_numerics=changes_numerics(config),
        note=". ".join([note, *failures, LIMITS]),
        checks=worst.checks,
        failures=failures,
        not_checked=left_out,
    )


def changes_numerics(config: TrainingConfig) -> bool:
    """Whether a configuration computes with other numbers than the plain run: precision, what is kept rounded."""
    return any(knobs()[knob].numerics == "changes" for knob in config.knobs_off_default())


def _reference_problems(measurement: ParityMeasurement, config: TrainingConfig) -> Iterator[str]:
    """Why the plain run alone says that nothing can be compared."""
    norms = [(number, step.gradient_norm) for number, step in enumerate(measurement.steps, start=1)]
    broken = next(((number, norm) for number, norm in norms if not math.isfinite(norm)), None)
    if broken is not None:
        yield (
            f"the plain run itself has gradients that are no numbers (their norm is {broken[1]} in step {broken[0]}), "
            "so nothing can be compared: look for a division by zero or an overflow in the model or its loss"
        )
    lost = not_finite(measurement.changes)
    if broken is None and lost:
        yield (
            f"the plain run itself has parameters that are not finite after its steps ({names_of(lost)}), so nothing "
            "can be compared: look at the optimizer and its schedule (a learning rate or an eps that divides by zero)"
        )
    if measurement.unproved and config.checkpointing != "none":
        yield f"{measurement.unproved}, and this configuration has checkpointing too"
    noisy = measurement.deterministic is False
    if noisy and config.tp * config.pp > 1:
        yield (
            "the loss draws random numbers, and each rank others, so ranks that share a model see other data: use tp=1 "
            "and pp=1"
        )
    if measurement.additive is False and not noisy and measurement.fixed_micro_batch != config.micro_batch:
        yield (
            "the loss of two samples is not the sum of their losses, so the micro-batch is part of what is trained; "
            "fix it with --fix micro_batch=N"
        )
    if all(measurement.changes.get(name, 0.0) == 0.0 for name in measurement.parameters):
        yield "no parameter changed within the plain steps, so nothing could be compared"


def describe_failures(checks: Sequence[ParityCheck]) -> tuple[str, ...]:
    """A sentence for each comparison that failed, the worst first."""
    failed = sorted((check for check in checks if excess(check) > 1.0), key=excess, reverse=True)
    return tuple(
        f"{check.name}: {check.where + ' ' if check.where else ''}differs by {check.difference:.2g} "
        f"(at most {check.allowed:.2g} passes)"
        for check in failed
    )


def describe_check(plain: ParityMeasurement, ours: ParityMeasurement, checks: Sequence[ParityCheck]) -> Iterator[str]:
    """The comparison that was made, and on what, in a few short phrases."""
    size = f"{plain.global_batch} samples"
    if plain.sequence_length is not None:
        size += f" of {plain.sequence_length} tokens"
    yield (
        f"checked on {size} in micro-batches of {ours.micro_batch} ({plain.accumulation} per rank and step), "
        f"{len(ours.steps)} steps, dropout off"
    )
    yield "compared for each parameter: gradients, clipping, optimizer groups and what the optimizer did"
    if plain.deterministic is False:
        yield "the loss draws noise of its own: every micro-batch was seeded alike in both runs"
    if plain.has_labels and not plain.labels_masked:
        yield "all micro-batches counting the same: the loss does not leave masked labels out"
    scaled = [step.gradient_factor for step in ours.steps if step.gradient_factor != 1.0]
    if scaled:
        yield f"clipping did not bind by itself, and was checked on gradients scaled by {scaled[0]:.3g}"
    if is_replayed(ours):
        yield "the workload's own optimizer replayed on the candidate's gradients"
    if ours.own_length is not None:
        yield f"one forward and backward at {ours.own_length.sequence_length} tokens"
    if ours.chunk_rows is not None:
        yield f"the fused loss in chunks of {ours.chunk_rows} rows"
    if ours.twin is not None:
        own = " and at its own length" if ours.twin.own_length is not None else ""
        yield f"the same knobs in fp32, eager, beside the same reference in the first step{own}"
    if ours.dropout or (ours.twin is not None and ours.twin.dropout):
        same = any(check.name == SAME_MASKS for check in checks)
        yield "dropout on: " + ("the same masks and gradients" if same else "as much noise as the reference")


def not_checked(plain: ParityMeasurement, ours: ParityMeasurement) -> Iterator[str]:
    """The comparisons that were not made this time, and why."""
    yield from dict.fromkeys((*plain.not_checked, *ours.not_checked))
    if ours.replay is not None and ours.replay.method == "norms":
        yield f"the optimizer by replay: {ours.replay.reason}; the norms of the changes were compared"
    elif ours.replay is not None and ours.replay.unresolved:
        share = f"{len(ours.replay.unresolved)} of {len(plain.parameters)}"
        yield (f"the optimizer's step of {share} parameters: in the first steps it is smaller than their rounding")
    if any(plain.buffers.values()) and not buffers_to_compare(plain, ours):
        yield "buffers: ranks share the model, or each has those of its own samples in micro-batches that vary"


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
        changes_numerics=changes_numerics(config),
        note=why,
        failures=(why,),
        finished=False,
    )


def why_unfinished(report: ProcessReport, which: str) -> str:
    """Why a run of the check did not come to its end: the limit that ended it and what to do, or how it ended."""
    hit = limit_hit(report, which, FUNCTIONS)
    return f"{which} did not finish: {report.describe()}" if hit is None else f"{hit.text}. {hit.hint}"


def where_ended(report: ProcessReport) -> str:
    """Which limit ended a run of the check, and in which function."""
    hit = limit_hit(report, "it", FUNCTIONS)
    return report.describe() if hit is None else hit.text


# Running.


class CandidateDidNotRunError(DidNotRunError):
    """Something outside ended the candidate's part of the check each time: no verdict on the configuration."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the runs of one check are started: by whom, within which limits, and who is told of lost ones."""

    zygote: Zygote
    deadline_at: float
    late_at: float  # from then on, no part that a verdict can do without
    memory_limit_bytes: int | None
    on_attempt: Callable[[ProcessReport], None] | None

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline_at - time.monotonic()

    def time_s(self) -> float:
        """Seconds for the parts that a verdict can do without."""
        return max(0.0, self.late_at - time.monotonic())

    def run(
        self, target: str, args: tuple[Any, ...], folder: Path, *, of_candidate: bool, deadline_s: float, ranks: int = 1
    ) -> ProcessReport:
        """One run, made again where something outside ended it.

        Raises:
            TaskFailedError: the deadline passed.
            DidNotRunError: something outside ended it each time.
        """
        folder.mkdir(parents=True, exist_ok=True)
        task = Task(
            target=target,
            args=args,
            ranks=ranks,
            directory=folder,
            deadlines_s={"*": deadline_s},
            total_deadline_s=deadline_s,
            memory_limit_bytes=self.memory_limit_bytes,
        )
        runs = run_again(self.zygote, task, on_attempt=self.on_attempt, left_s=self.left_s)
        if not runs.settled:
            what, kind = ("configuration", CandidateDidNotRunError) if of_candidate else ("plain run", DidNotRunError)
            ending = runs.report.describe()
            raise kind(f"the parity check of the {what} did not run: something outside ended it: {ending}")
        if runs.report.ended in (Ended.DEADLINE, Ended.CANCELLED):
            runs.report.check()
        return runs.report


def _reference(launch: Launch, request: ParityRequest, folder: Path) -> Samples | ProcessReport:
    """The plain run, kept by what decides it; or how it ended where there is none.

    A micro-batch that the workload fixes is the same for all candidates of a folder; any other is cut to the check's.
    """
    config = request.config
    micro_batch = config.micro_batch if request.own_shapes else min(config.micro_batch, CHECK_MICRO_BATCH)
    sizes = [micro_batch, config.dp, config.pp, check_accumulation(config), dropout_accumulation(config)]
    key = [FORMAT, request.spec.identity, request.device, *sizes, *(["own shapes"] if request.own_shapes else [])]
    key += [] if request.rung == "plain" else [request.rung]
    key += ["bf16 parameters"] if config.parameters != "own" else []
    key += [f"fp8={config.fp8}"] if config.fp8 != "off" else []
    key += [config.batch_norm] if config.batch_norm != "own" else []
    kept = folder / ("reference-" + hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16])
    found = _load(kept, 1)
    if found:
        return found[0]
    report, samples = _run(launch, request, kept)
    return samples[0] if samples else report


def _run(launch: Launch, request: ParityRequest, folder: Path) -> tuple[ProcessReport, list[Samples]]:
    is_plain, left_s = request.reference is None, launch.left_s()
    ranks = 1 if is_plain else request.config.world_size
    for old in (*folder.glob("elements.*.npz"), folder / MEASUREMENTS):
        old.unlink(missing_ok=True)
    report = launch.run(
        "autoplan.planner.parity.worker:run_parity_rank",
        (request,),
        folder,
        of_candidate=not is_plain,
        deadline_s=left_s if is_plain else max(1.0, left_s),
        ranks=ranks,
    )
    if report.ended is not Ended.FINISHED:
        return report, []
    # After all elements: they are whole.
    replace_file(folder / MEASUREMENTS, json.dumps(list(report.results)), private=True)
    return report, _load(folder, ranks)


def _load(folder: Path, ranks: int) -> list[Samples]:
    """The samples of the ranks of a run; empty if a file is missing or torn."""
    try:
        measurements = json.loads((folder / MEASUREMENTS).read_text())
        loaded = []
        for rank in range(ranks):
            with np.load(folder / f"elements.{rank}.npz") as file:
                loaded.append(Samples(ParityMeasurement.model_validate(measurements[rank]), dict(file)))
    except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return []
    return loaded
