"""The comparisons of the parity check: what the reference saw beside what one rank of the candidate saw. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

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
    CHANGE_NORM,
    DROPOUT_NOISE,
    LARGE_PARAMETER,
    PARAMETER_SCALE_OF_RESIDUAL,
    SAME_GRADIENT,
    SAME_STREAM,
    SCALE_OF_RESIDUAL,
    Tolerance,
)
from autoplan.planner.parity.tolerances import START as START_TOLERANCE
from autoplan.planner.records import ParityCheck

CAP = 1e6  # of a relative difference: JSON has no infinity
SAME_MASKS = "gradients, dropout on"  # compared where both runs drew the same masks
_TINY = 1e-30


class Samples(NamedTuple):
    """What one run left: its measurement, and sampled elements by `part/parameter`."""

    measurement: ParityMeasurement
    elements: Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]

    def part(self, name: str) -> dict[str, Any]:
        """The sampled elements of one part (a step's gradients, the start), by parameter."""
        prefix = name + "/"
        return {key.removeprefix(prefix): value for key, value in self.elements.items() if key.startswith(prefix)}


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


def excess(check: ParityCheck) -> float:
    """A difference over what is allowed; above 1 it fails."""
    if check.allowed == 0.0:
        return 0.0 if check.difference == 0.0 else CAP
    return check.difference / check.allowed


def judge(reference: Samples, candidate: Samples, tolerance: Tolerance) -> Judgement:
    """Makes every comparison that both runs have the figures for."""
    problems = _problems(reference, candidate)
    plain, ours = reference.measurement, candidate.measurement
    first = _Gradients(reference, candidate, step_part(0), tolerance)
    checks = [
        _largest("start", START_TOLERANCE, _distances(reference.part(START), candidate.part(START))),
        *first.checks("step 1", plain.steps[0].gradient_norms, ours.steps[0].gradient_norms),
        *_later_steps(reference, candidate, tolerance),
        _largest("loss", tolerance.loss, _losses(plain.steps, ours.steps)),
        *_clipping(ours, tolerance),
        _largest("parameter groups", 1e-6, _groups(plain.steps, ours.steps)),
        _largest("learning rate after the last step", 1e-6, _rates_after(plain, ours)),
        _optimizer(plain, ours, tolerance),
        _largest("frozen parameters", 0.0, _frozen(plain, ours)),
    ]
    if plain.buffers and ours.buffers:
        checks.append(_largest("buffers", tolerance.norm, _relatives(plain.buffers, ours.buffers, tolerance)))
    if plain.own_length is not None and ours.own_length is not None:
        own = _Gradients(reference, candidate, OWN_LENGTH, tolerance)
        checks += own.checks("own length", plain.own_length.gradient_norms, ours.own_length.gradient_norms)
    checks += _dropout(reference, candidate, tolerance)
    return Judgement(checks=tuple(checks), problems=tuple(problems))


# What is not a number.


def _problems(reference: Samples, candidate: Samples) -> list[str]:
    plain, ours = reference.measurement, candidate.measurement
    problems = []
    one, other = set(reference.part(START)), set(candidate.part(START))
    if one != other:
        problems.append(f"parameters are not the same: {_names(one ^ other)} trains in one of the two only")
    one, other = set(reference.part(step_part(0))), set(candidate.part(step_part(0)))
    if one != other:
        problems.append(f"gradients are not of the same parameters: {_names(one ^ other)} is in one of the two only")
    for number, step in enumerate(ours.steps, start=1):
        if not math.isfinite(step.loss):
            problems.append(f"the loss of step {number} is {step.loss}")
        if step.optimizer_steps != 1:
            problems.append(f"the optimizer was stepped {step.optimizer_steps} times in step {number}")
    if plain.schedule_steps != ours.schedule_steps:
        problems.append(f"the schedule was stepped {ours.schedule_steps} times, not {plain.schedule_steps}")
    for number, (theirs, own) in enumerate(zip(plain.steps, ours.steps, strict=False), start=1):
        if theirs.cleared and not own.cleared:
            problems.append(f"gradients are left in the parameters after step {number}")
        one, other = _held(theirs.groups), _held(own.groups)
        if one != other and own.optimizer_steps:
            problems.append(f"the optimizer of step {number} does not hold the same parameters: {_names(one ^ other)}")
            break
    return problems


def _held(groups: Iterable[GroupMeasure]) -> set[str]:
    return {name for group in groups for name in group.parameters}


def _names(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


# Gradients.


class _Gradients:
    """The gradients of one part of both runs."""

    def __init__(self, reference: Samples, candidate: Samples, part: str, tolerance: Tolerance) -> None:
        self.reference = reference.part(part)
        self.candidate = candidate.part(part)
        self.names = [name for name in self.reference if name in self.candidate]
        self.tolerance = tolerance
        sizes = reference.measurement.parameters
        self.weights = {
            name: sizes[name].elements / max(1, self.reference[name].size) if name in sizes else 1.0
            for name in self.names
        }

    def checks(self, where: str, one: Mapping[str, float], other: Mapping[str, float]) -> list[ParityCheck]:
        """Norms and distances per parameter, and scales.

        Args:
            where: Which pass, for the names of the comparisons.
            one, other: The norms of the whole gradients, of the reference and of the candidate.
        """
        tolerance = self.tolerance
        shared = {name: one[name] for name in self.names}
        distances = _distances(self._select(self.reference), self._select(self.candidate), tolerance, self.weights)
        return [
            _largest(f"gradient norms, {where}", tolerance.norm, _relatives(shared, other, tolerance)),
            _largest(f"gradients, {where}", tolerance.vector, distances),
            _check(f"whole gradient, {where}", self.distance(), tolerance.whole, "all parameters"),
            self._scale_check(f"gradient scale, {where}"),
            self._parameter_scale_check(f"gradient scale of a parameter, {where}", one),
        ]

    def _select(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in self.names}

    def scale(self, names: Sequence[str] | None = None) -> float:
        """<g, g_ref> / <g_ref, g_ref>, each parameter with the weight of what its sample stands for."""
        above = below = 0.0
        for name in self.names if names is None else names:
            theirs = self.reference[name].astype(np.float64)
            if self.candidate[name].shape != theirs.shape:
                return CAP
            above += self.weights[name] * float(theirs @ self.candidate[name].astype(np.float64))
            below += self.weights[name] * float(theirs @ theirs)
        if not math.isfinite(above):
            return CAP
        return above / below if below > 0 else 1.0

    def distance(self, names: Sequence[str] | None = None) -> float:
        """||g - g_ref|| / ||g_ref||."""
        chosen = self.names if names is None else names
        apart = sum(self.weights[name] * _square(self.candidate[name] - self.reference[name]) for name in chosen)
        whole = sum(self.weights[name] * _square(self.reference[name]) for name in chosen)
        return _finite(math.sqrt(apart / whole)) if whole > 0 else 0.0

    def scale_and_residual(self, names: Sequence[str] | None = None) -> tuple[float, float]:
        """|scale - 1|, and the part of the distance that is not along the reference's gradient."""
        scale = self.scale(names)
        if scale == CAP:
            return CAP, 0.0
        off = abs(scale - 1)
        return off, math.sqrt(max(0.0, self.distance(names) ** 2 - off**2))

    def _scale_check(self, name: str) -> ParityCheck:
        """Rounding changes the scale too, by a part of what it changes in all: less than that part passes."""
        off, residual = self.scale_and_residual()
        return _check(name, off, max(self.tolerance.scale, SCALE_OF_RESIDUAL * residual), "all parameters")

    def _parameter_scale_check(self, name: str, norms: Mapping[str, float]) -> ParityCheck:
        whole = math.sqrt(sum(norm**2 for norm in norms.values()))
        worst = _check(name, 0.0, self.tolerance.parameter_scale)
        for parameter in self.names:
            elements = self.weights[parameter] * self.reference[parameter].size
            if elements < LARGE_PARAMETER or norms[parameter] <= 10 * self.tolerance.floor * whole:
                continue
            off, residual = self.scale_and_residual([parameter])
            allowed = max(self.tolerance.parameter_scale, PARAMETER_SCALE_OF_RESIDUAL * residual)
            found = _check(name, off, allowed, parameter)
            worst = max(worst, found, key=excess)
        return worst


def _later_steps(reference: Samples, candidate: Samples, tolerance: Tolerance) -> list[ParityCheck]:
    """The whole gradient of the later steps: what is not cleared or remembered wrongly shows there."""
    found: dict[str, float] = {}
    for number in range(1, min(len(reference.measurement.steps), len(candidate.measurement.steps))):
        gradients = _Gradients(reference, candidate, step_part(number), tolerance)
        found[f"scale, step {number + 1}"] = abs(gradients.scale() - 1)
    return [_largest("gradient scale, later steps", tolerance.later, found)]


def _distances(
    reference: Mapping[str, Any],
    candidate: Mapping[str, Any],
    tolerance: Tolerance | None = None,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """||a - a_ref|| / ||a_ref|| by parameter, ||a_ref|| not smaller than `_least` says."""
    weight = weights or {}
    squares = {name: weight.get(name, 1.0) * _square(values) for name, values in reference.items()}
    least = _least({name: math.sqrt(square) for name, square in squares.items()}, tolerance)
    found = {}
    for name, values in reference.items():
        if name not in candidate:
            continue
        if candidate[name].shape != values.shape:
            found[name] = CAP
            continue
        distance = math.sqrt(weight.get(name, 1.0) * _square(candidate[name] - values))
        found[name] = _finite(distance / max(math.sqrt(squares[name]), least[name], _TINY))
    return found


def _relatives(
    reference: Mapping[str, float], candidate: Mapping[str, float], tolerance: Tolerance
) -> dict[str, float]:
    """|b - a| / a by name, a not smaller than `_least` says."""
    least = _least(reference, tolerance)
    return {
        name: _relative(value, candidate[name], least[name]) for name, value in reference.items() if name in candidate
    }


def _least(norms: Mapping[str, float], tolerance: Tolerance | None) -> dict[str, float]:
    """By parameter, the norm under which its gradient counts as one that cancels: what is left of it is rounding.

    The bias of a key, a bias before a BatchNorm: their gradients are zero but for rounding, whose size is that of what
    cancels. It shows in the other parameters of the same module.
    """
    if tolerance is None:
        return dict.fromkeys(norms, 0.0)
    whole = math.sqrt(sum(norm**2 for norm in norms.values()))
    modules: dict[str, float] = {}
    for name, norm in norms.items():
        owner = name.rpartition(".")[0]
        modules[owner] = math.hypot(modules.get(owner, 0.0), norm)
    return {
        name: max(tolerance.floor * whole, tolerance.module_floor * modules[name.rpartition(".")[0]]) for name in norms
    }


def _relative(reference: float, value: float, least: float = 0.0) -> float:
    if not math.isfinite(value) or not math.isfinite(reference):
        return CAP
    scale = max(abs(reference), least)
    difference = abs(value - reference)
    return min(CAP, difference / scale) if scale > 0 else (0.0 if difference == 0 else CAP)


def _square(values: Any) -> float:
    return float(np.square(values.astype(np.float64)).sum())


def _finite(value: float) -> float:
    return min(CAP, value) if math.isfinite(value) else CAP


def _check(name: str, difference: float, allowed: float, where: str = "") -> ParityCheck:
    return ParityCheck(name=name, difference=_finite(difference), allowed=allowed, where=where)


def _largest(name: str, allowed: float, differences: Mapping[str, float]) -> ParityCheck:
    where = max(differences, key=lambda key: differences[key], default="")
    return _check(name, differences.get(where, 0.0), allowed, where)


# Steps.


def _losses(plain: Sequence[StepMeasure], ours: Sequence[StepMeasure]) -> dict[str, float]:
    """Of the first step: later ones are taken with parameters that differ a little."""
    return {"step 1": _relative(plain[0].loss, ours[0].loss, 1e-12)}


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
            norms[f"step {number}"] = _relative(step.gradient_norm, reported)
        for name, share in step.clipped_share.items():
            shares[f"{name} in step {number}"] = _relative(expected, share)
    checks = [_largest("gradients after clipping", tolerance.clipping, shares)]
    if norms:
        checks.append(_largest("norm before clipping", tolerance.clipping, norms))
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
        return _relative(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return max((_relative(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return 0.0 if one == other else 1.0


def _rates_after(plain: ParityMeasurement, ours: ParityMeasurement) -> dict[str, float]:
    pairs = enumerate(zip(plain.learning_rates, ours.learning_rates, strict=False))
    return {f"group {number}": _relative(one, other) for number, (one, other) in pairs}


def _optimizer(plain: ParityMeasurement, ours: ParityMeasurement, tolerance: Tolerance) -> ParityCheck:
    """The parameters beside those of the replayed optimizer, or the norms of the changes beside the reference's."""
    name = "parameters after the optimizer's steps"
    if any(step.optimizer_steps == 0 for step in ours.steps):
        return _check(name, 1.0, tolerance.optimizer, "all parameters")
    if ours.replay is not None and ours.replay.method != "norms":
        return _largest(name, tolerance.optimizer, ours.replay.differences)
    trained = {key: value for key, value in plain.changes.items() if key in plain.parameters}
    allowed = max(tolerance.norm, CHANGE_NORM)
    return _largest("change of the parameters", allowed, _relatives(trained, ours.changes, tolerance))


def _frozen(plain: ParityMeasurement, ours: ParityMeasurement) -> dict[str, float]:
    return {
        name: _finite(ours.changes[name])
        for name, change in plain.changes.items()
        if change == 0.0 and name not in plain.parameters and name in ours.changes
    }


# Dropout.


def _dropout(reference: Samples, candidate: Samples, tolerance: Tolerance) -> list[ParityCheck]:
    """Rates in use, the same seed twice, and the noise that dropout puts into the gradient.

    Where the losses show that both runs drew the same masks, the gradients themselves are compared.
    """
    plain, ours = reference.measurement, candidate.measurement
    if not plain.dropout or not ours.dropout:
        return []
    rates = {
        name: abs(rate - ours.dropout_rates[name])
        for name, rate in plain.dropout_rates.items()
        if name in ours.dropout_rates
    }
    again = _relative(
        ours.dropout[0].loss, math.nan if ours.dropout_repeated_loss is None else ours.dropout_repeated_loss
    )
    checks = [
        _largest("dropout rates", 1e-6, rates),
        _check("dropout, the same seed twice", again, tolerance.loss, "the loss"),
    ]
    noise = _noise(reference, len(plain.dropout))
    parts = [f"{DROPOUT}{number}" for number in range(len(plain.dropout))]
    distances = {part: _Gradients(reference, candidate, part, tolerance).distance() for part in parts}
    near = max(distances.values()) < SAME_GRADIENT * math.sqrt(2 * noise)
    if near or _same_losses(plain, ours):
        checks.append(_largest(SAME_MASKS, tolerance.vector, distances))
        return checks
    ratio = _noise(candidate, len(ours.dropout)) / max(noise, _TINY)
    apart = max(ratio, 1.0 / ratio) if ratio > 0 else CAP
    checks.append(_check("noise of dropout in the gradient", apart - 1, DROPOUT_NOISE - 1, "all parameters"))
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
    for name in parts[0]:
        values = np.stack([part[name].astype(np.float64) for part in parts])
        weight = sizes[name].elements / max(1, values.shape[1]) if name in sizes else 1.0
        apart += weight * float(values.var(axis=0, ddof=1).sum())
        whole += weight * float(np.square(values.mean(axis=0)).sum())
    return apart / whole if whole > 0 else 0.0
