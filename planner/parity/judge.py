"""The comparisons of the parity check: what the reference saw beside what one rank of the candidate saw. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoplan.planner.parity.differences import (
    CAP,
    Gradients,
    Samples,
    distances_of,
    excess,
    finite,
    largest,
    make_check,
    relative,
    relatives,
)
from autoplan.planner.parity.records import (
    DROPOUT,
    OWN_LENGTH,
    START,
    GroupMeasure,
    ParityMeasurement,
    StepMeasure,
    step_part,
)
from autoplan.planner.parity.tolerances import (
    CHANCE_DEVIATIONS,
    CHANGE_NORM,
    DROPOUT_NOISE,
    MOMENTS_KEPT,
    PRODUCTS,
    SAME_GRADIENT,
    SAME_STREAM,
    Tolerance,
)
from autoplan.planner.parity.tolerances import START as START_TOLERANCE
from autoplan.planner.records.trials import ParityCheck

SAME_MASKS = "gradients, dropout on"  # compared where both runs drew the same masks
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """All comparisons of one rank, and what could not be put as a number."""

    checks: tuple[ParityCheck, ...]
    problems: tuple[str, ...]

    @property
    def worst(self) -> ParityCheck:
        """The comparison that is nearest to failing, or furthest past it."""
        return max(self.checks, key=lambda check: excess(check))

    def find(self, name: str) -> ParityCheck | None:
        """The comparison of a name, if it was made."""
        return next((check for check in self.checks if check.name == name), None)


def judge(reference: Samples, candidate: Samples, tolerance: Tolerance, *, states: str = "own") -> Judgement:
    """Makes every comparison that both runs have the figures for.

    Args:
        reference: The plain run.
        candidate: One rank of the candidate.
        tolerance: What passes.
        states: How the candidate keeps Adam's moments (optimizer_state).
    """
    plain, ours = reference.measurement, candidate.measurement
    rates = enumerate(zip(plain.learning_rates, ours.learning_rates, strict=False))
    rates_apart = {f"group {number}": relative(one, other) for number, (one, other) in rates}
    first = Gradients(reference, candidate, step_part(0), tolerance)
    checks = [
        largest("start", START_TOLERANCE, distances_of(reference.part(START), candidate.part(START))),
        *first.checks("step 1", plain.steps[0].gradient_norms, ours.steps[0].gradient_norms),
        largest("gradient scale, later steps", tolerance.later, _later_steps(reference, candidate, tolerance)),
        # of the first step: later ones are taken with parameters that differ a little
        make_check("loss", relative(plain.steps[0].loss, ours.steps[0].loss, 1e-12), tolerance.loss, "step 1"),
        *_clipping(ours, tolerance),
        largest("parameter groups", 1e-6, _groups(plain.steps, ours.steps)),
        largest("learning rate after the last step", 1e-6, rates_apart),
        _optimizer(plain, ours, tolerance),
        *_rounding(ours, states),
        *([largest("products in fp8", PRODUCTS, ours.products)] if ours.products else []),
        largest("frozen parameters", 0.0, _frozen(plain, ours)),
    ]
    buffers = buffers_to_compare(plain, ours)
    if buffers:
        checks.append(largest("buffers", tolerance.norm, relatives(buffers, ours.buffers, tolerance)))
    if plain.own_length is not None and ours.own_length is not None:
        own = Gradients(reference, candidate, OWN_LENGTH, tolerance)
        checks += own.checks("own length", plain.own_length.gradient_norms, ours.own_length.gradient_norms)
    checks += _dropout(reference, candidate, tolerance)
    return Judgement(checks=tuple(checks), problems=tuple(_problems(reference, candidate)))


def buffers_to_compare(plain: ParityMeasurement, ours: ParityMeasurement) -> dict[str, float]:
    """The reference's changes of what a candidate's rank keeps; empty where they cannot be compared."""
    if not ours.buffers:
        return {}
    if ours.data_ranks == 1:
        return plain.buffers
    return plain.rank_buffers[ours.data_rank] if ours.data_rank < len(plain.rank_buffers) else {}


# What is not a number.


def _problems(reference: Samples, candidate: Samples) -> list[str]:
    plain, ours = reference.measurement, candidate.measurement
    problems = []
    one, other = set(reference.part(START)), set(candidate.part(START))
    if one != other:
        problems.append(f"parameters are not the same: {names_of(one ^ other)} trains in one of the two only")
    one, other = set(reference.part(step_part(0))), set(candidate.part(step_part(0)))
    if one != other:
        problems.append(f"gradients are not of the same parameters: {names_of(one ^ other)} is in one of the two only")
    for number, step in enumerate(ours.steps, start=1):
        if not math.isfinite(step.loss):
            problems.append(f"the loss of step {number} is {step.loss}")
        if step.optimizer_steps != 1:
            problems.append(f"the optimizer was stepped {step.optimizer_steps} times in step {number}")
    changed = (("parameters", plain.changes, ours.changes), ("buffers", plain.buffers, ours.buffers))
    for what, of_plain, of_ours in changed:
        broken = not_finite(of_ours) - not_finite(of_plain)
        if broken:
            problems.append(f"{what} are not finite after the last step: {names_of(broken)}")
    if plain.schedule_steps != ours.schedule_steps:
        problems.append(f"the schedule was stepped {ours.schedule_steps} times, not {plain.schedule_steps}")
    for number, (theirs, own) in enumerate(zip(plain.steps, ours.steps, strict=False), start=1):
        if theirs.cleared and not own.cleared:
            problems.append(f"gradients are left in the parameters after step {number}")
        one, other = _held(theirs.groups), _held(own.groups)
        if one != other and own.optimizer_steps:
            problems.append(
                f"the optimizer of step {number} does not hold the same parameters: {names_of(one ^ other)}"
            )
            break
    return problems


def not_finite(figures: Mapping[str, float]) -> set[str]:
    """The names of those that are NaN or infinite."""
    return {name for name, value in figures.items() if not math.isfinite(value)}


def _held(groups: Iterable[GroupMeasure]) -> set[str]:
    return {name for group in groups for name in group.parameters}


def names_of(names: set[str]) -> str:
    """The first three names, and how many more there are."""
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _later_steps(reference: Samples, candidate: Samples, tolerance: Tolerance) -> dict[str, float]:
    """How far the scale of the whole gradient of later steps is off: what is not cleared, or remembered wrongly."""
    steps = range(1, min(len(reference.measurement.steps), len(candidate.measurement.steps)))
    gradients = {number: Gradients(reference, candidate, step_part(number), tolerance) for number in steps}
    return {f"scale, step {number + 1}": abs(found.scale() - 1) for number, found in gradients.items()}


# Steps.


def _clipping(ours: ParityMeasurement, tolerance: Tolerance) -> list[ParityCheck]:
    """The norm that the run reports, and what clipping leaves of each gradient, beside what they have to be.

    The factor is that of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
    """
    norms, shares = {}, {}
    for number, step in enumerate(ours.steps, start=1):
        expected = step.gradient_factor
        if ours.max_grad_norm is not None:
            expected *= min(1.0, ours.max_grad_norm / (step.gradient_norm + 1e-6))
            reported = math.nan if step.clipping_norm is None else step.clipping_norm
            norms[f"step {number}"] = relative(step.gradient_norm, reported)
        for name, share in step.clipped_share.items():
            shares[f"{name} in step {number}"] = relative(expected, share)
    checks = [largest("gradients after clipping", tolerance.clipping, shares)]
    if norms:
        checks.append(largest("norm before clipping", tolerance.clipping, norms))
    return checks


def _groups(plain: Sequence[StepMeasure], ours: Sequence[StepMeasure]) -> dict[str, float]:
    """The difference of each option of each parameter at each step."""
    found: dict[str, float] = {}
    for number, (theirs, own) in enumerate(zip(plain, ours, strict=False), start=1):
        one, other = _options(theirs.groups), _options(own.groups)
        for name, options in one.items():
            if name not in other:
                continue
            for key in options.keys() | other[name].keys():
                difference = _option_difference(options.get(key), other[name].get(key))
                if difference:
                    found[f"{key} of {name} in step {number}"] = difference
    return found


def _options(groups: Iterable[GroupMeasure]) -> dict[str, dict[str, Any]]:
    return {name: group.options for group in groups for name in group.parameters}


def _option_difference(one: Any, other: Any) -> float:
    if isinstance(one, float) and isinstance(other, float):
        return relative(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return max((relative(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return 0.0 if one == other else 1.0


def _optimizer(plain: ParityMeasurement, ours: ParityMeasurement, tolerance: Tolerance) -> ParityCheck:
    """The parameters beside those of the replayed optimizer, or the norms of the changes beside the reference's."""
    name = "parameters after the optimizer's steps"
    if any(step.optimizer_steps == 0 for step in ours.steps):
        return make_check(name, 1.0, tolerance.optimizer, "all parameters")
    if ours.replay is not None and ours.replay.method != "norms":
        return largest(name, tolerance.optimizer, ours.replay.differences)
    trained = {key: value for key, value in plain.changes.items() if key in plain.parameters}
    allowed = max(tolerance.norm, CHANGE_NORM)
    return largest("change of the parameters", allowed, relatives(trained, ours.changes, tolerance))


def _rounding(ours: ParityMeasurement, states: str) -> list[ParityCheck]:
    """Parameters and moments that are kept rounded, beside what the steps gave."""
    if ours.replay is None or ours.replay.method == "norms":
        return []
    checks = []
    if ours.replay.rounding:
        checks.append(largest("rounding of the parameters", 0.0, ours.replay.rounding))
    if ours.replay.chance > 0:
        checks.append(make_check("rounding by chance", ours.replay.chance, CHANCE_DEVIATIONS, "all parameters"))
    if ours.replay.moments:
        checks.append(largest("moments as they are kept", MOMENTS_KEPT[states], ours.replay.moments))
    return checks


def _frozen(plain: ParityMeasurement, ours: ParityMeasurement) -> dict[str, float]:
    return {
        name: finite(ours.changes[name])
        for name, change in plain.changes.items()
        if change == 0.0 and name not in plain.parameters and name in ours.changes
    }


# Dropout.


def _dropout(reference: Samples, candidate: Samples, tolerance: Tolerance) -> list[ParityCheck]:
    """Rates in use, the same seed twice, and the noise that dropout puts into the gradient.

    Where losses or gradients show that both runs drew the same masks, the gradients themselves are compared.
    """
    plain, ours = reference.measurement, candidate.measurement
    if not plain.dropout or not ours.dropout:
        return []
    rates = {
        name: abs(rate - ours.dropout_rates[name])
        for name, rate in plain.dropout_rates.items()
        if name in ours.dropout_rates
    }
    again = relative(
        ours.dropout[0].loss, math.nan if ours.dropout_repeated_loss is None else ours.dropout_repeated_loss
    )
    checks = [
        largest("dropout rates", 1e-6, rates),
        make_check("dropout, the same seed twice", again, tolerance.loss, "the loss"),
    ]
    noise = _noise(reference, len(plain.dropout))
    parts = [f"{DROPOUT}{number}" for number in range(len(plain.dropout))]
    distances = {part: Gradients(reference, candidate, part, tolerance).distance() for part in parts}
    near = max(distances.values()) < SAME_GRADIENT * math.sqrt(2 * noise)
    if near or _same_losses(plain, ours):
        checks.append(largest(SAME_MASKS, tolerance.vector, distances))
        return checks
    ratio = _noise(candidate, len(ours.dropout)) / max(noise, _TINY)
    apart = max(ratio, 1.0 / ratio) if ratio > 0 else CAP
    checks.append(make_check("noise of dropout in the gradient", apart - 1, DROPOUT_NOISE - 1, "all parameters"))
    return checks


def _same_losses(plain: ParityMeasurement, ours: ParityMeasurement) -> bool:
    """Whether the losses of all seeds are those of the reference, as far as their spread over seeds can tell."""
    theirs = [measured.loss for measured in plain.dropout]
    own = [measured.loss for measured in ours.dropout]
    spread = max(theirs) - min(theirs)
    return len(own) == len(theirs) and all(abs(a - b) <= SAME_STREAM * spread for a, b in zip(theirs, own, strict=True))


def _noise(samples: Samples, passes: int) -> float:
    """The variance of the gradient over seeds, as a share of the squared mean gradient."""
    parts = [samples.part(f"{DROPOUT}{number}") for number in range(passes)]
    sizes = samples.measurement.parameters
    apart = whole = 0.0
    shapes = {name: sample for part in parts for name, sample in part.items()}
    for name, sample in shapes.items():  # a layer that a seed dropped has no gradient there
        values = np.stack([part.get(name, np.zeros_like(sample)).astype(np.float64) for part in parts])
        weight = sizes[name].elements / max(1, values.shape[1]) if name in sizes else 1.0
        apart += weight * float(values.var(axis=0, ddof=1).sum())
        whole += weight * float(np.square(values.mean(axis=0)).sum())
    return apart / whole if whole > 0 else 0.0
