"""The comparisons of the parity check: what the reference saw beside what one rank of the candidate saw. No torch.

First the numbers behind them: relative differences, distances, scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autoplan.planner.parity.records import (
    AGAIN,
    DROPOUT,
    MASKS,
    NOISE,
    OWN_LENGTH,
    START,
    TWIN,
    DropoutMeasure,
    GroupMeasure,
    ParityMeasurement,
    StepMeasure,
    TwinMeasure,
    step_part,
)
from autoplan.planner.parity.tolerances import (
    AMPLIFIED,
    CHANCE_DEVIATIONS,
    CHANGE_NORM,
    DROPOUT_NOISE,
    LARGE_PARAMETER,
    MOMENTS_KEPT,
    PARAMETER_SCALE_OF_RESIDUAL,
    PRODUCTS,
    SAME_GRADIENT,
    SAME_MASK,
    SAME_STREAM,
    SCALE_OF_RESIDUAL,
    SENSITIVE,
    TOLERANCES,
    Tolerance,
)
from autoplan.planner.parity.tolerances import START as START_TOLERANCE
from autoplan.planner.records.trials import IN_FP32, ParityCheck

SAME_MASKS = "gradients, dropout on"  # compared where both runs drew the same masks
CAP = 1e6  # of a relative difference: JSON has no infinity
_TINY = 1e-30
_NEAR_STEPS = 3  # in which the parameters of both runs still differ by little more than rounding


def excess(check: ParityCheck) -> float:
    """A difference over what is allowed; above 1 it fails."""
    if check.allowed == 0.0:
        return 0.0 if check.difference == 0.0 else CAP
    return check.difference / check.allowed


class Samples(NamedTuple):
    """The results of one run: its measurement, and sampled elements by `part/parameter`."""

    measurement: ParityMeasurement
    elements: Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]

    def part(self, name: str) -> dict[str, Any]:
        """The sampled elements of one part (a step's gradients, the start), by parameter."""
        prefix = name + "/"
        return {key.removeprefix(prefix): value for key, value in self.elements.items() if key.startswith(prefix)}


class Gradients:
    """The gradients of one part of both runs; the candidate's has a prefix where its knobs ran in fp32."""

    def __init__(
        self, reference: Samples, candidate: Samples, part: str, tolerance: Tolerance, prefix: str = ""
    ) -> None:
        self.reference = reference.part(part)
        self.candidate = candidate.part(prefix + part)
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
        off, residual = self.scale_and_residual()
        scale = max(tolerance.scale, SCALE_OF_RESIDUAL * residual)  # rounding changes the scale too, by such a part
        shared = {name: one[name] for name in self.names}
        theirs = {name: self.reference[name] for name in self.names}
        distances = distances_of(theirs, self.candidate, tolerance, self.weights)
        return [
            largest(f"gradient norms, {where}", tolerance.norm, relatives(shared, other, tolerance)),
            largest(f"gradients, {where}", tolerance.vector, distances),
            make_check(f"whole gradient, {where}", self.distance(), tolerance.whole, "all parameters"),
            make_check(f"gradient scale, {where}", off, scale, "all parameters"),
            self._parameter_scale_check(f"gradient scale of a parameter, {where}", one),
        ]

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
        apart = sum(self.weights[name] * square(self.candidate[name] - self.reference[name]) for name in chosen)
        whole = sum(self.weights[name] * square(self.reference[name]) for name in chosen)
        return finite(math.sqrt(apart / whole)) if whole != 0 else (CAP if apart else 0.0)

    def scale_and_residual(self, names: Sequence[str] | None = None) -> tuple[float, float]:
        """|scale - 1|, and the part of the distance that is not along the reference's gradient."""
        scale = self.scale(names)
        if scale == CAP:
            return CAP, 0.0
        off = abs(scale - 1)
        return off, math.sqrt(max(0.0, self.distance(names) ** 2 - off**2))

    def _parameter_scale_check(self, name: str, norms: Mapping[str, float]) -> ParityCheck:
        whole = math.sqrt(sum(norm**2 for norm in norms.values()))
        worst = make_check(name, 0.0, self.tolerance.parameter_scale)
        for parameter in self.names:
            elements = self.weights[parameter] * self.reference[parameter].size
            if elements < LARGE_PARAMETER or norms[parameter] <= 10 * self.tolerance.floor * whole:
                continue
            off, residual = self.scale_and_residual([parameter])
            allowed = max(self.tolerance.parameter_scale, PARAMETER_SCALE_OF_RESIDUAL * residual)
            found = make_check(name, off, allowed, parameter)
            worst = max(worst, found, key=excess)
        return worst


def distances_of(
    reference: Mapping[str, Any],
    candidate: Mapping[str, Any],
    tolerance: Tolerance | None = None,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """||a - a_ref|| / ||a_ref|| by parameter, ||a_ref|| not smaller than `least_norms` says."""
    weight = weights or {}
    squares = {name: weight.get(name, 1.0) * square(values) for name, values in reference.items()}
    least = least_norms({name: math.sqrt(square) for name, square in squares.items()}, tolerance)
    found = {}
    for name, values in reference.items():
        if name not in candidate:
            continue
        if candidate[name].shape != values.shape:
            found[name] = CAP
            continue
        distance = math.sqrt(weight.get(name, 1.0) * square(candidate[name] - values))
        found[name] = finite(distance / max(math.sqrt(squares[name]), least[name], _TINY))
    return found


def relatives(reference: Mapping[str, float], candidate: Mapping[str, float], tolerance: Tolerance) -> dict[str, float]:
    """|b - a| / a by name, a not smaller than `least_norms` says."""
    least = least_norms(reference, tolerance)
    return {
        name: relative(value, candidate[name], least[name]) for name, value in reference.items() if name in candidate
    }


def least_norms(norms: Mapping[str, float], tolerance: Tolerance | None) -> dict[str, float]:
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


def relative(reference: float, value: float, least: float = 0.0) -> float:
    if not math.isfinite(value) or not math.isfinite(reference):
        return CAP
    scale = max(abs(reference), least)
    difference = abs(value - reference)
    return min(CAP, difference / scale) if scale > 0 else (0.0 if difference == 0 else CAP)


def square(values: Any) -> float:
    return float(np.square(values.astype(np.float64)).sum())


def finite(value: float) -> float:
    """A difference that can be compared: CAP stands for one that is no number, which would pass every comparison."""
    return min(CAP, value) if math.isfinite(value) else CAP


def make_check(name: str, difference: float, allowed: float, where: str = "") -> ParityCheck:
    return ParityCheck(name=name, difference=finite(difference), allowed=allowed, where=where)


def largest(name: str, allowed: float, differences: Mapping[str, float]) -> ParityCheck:
    where = max(differences, key=lambda key: finite(differences[key]), default="")
    return make_check(name, differences.get(where, 0.0), allowed, where)


# The comparisons.


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """All comparisons of one rank, and what could not be put as a number."""

    checks: tuple[ParityCheck, ...]
    problems: tuple[str, ...]
    too_sensitive: str = ""  # which steps are not compared for that, in a sentence

    @property
    def worst(self) -> ParityCheck:
        """The comparison that is nearest to failing, or furthest past it."""
        return max(self.checks, key=excess)

    def difference(self, name: str) -> float:
        """What the comparison of a name found; 0 where it was not made."""
        return next((check.difference for check in self.checks if check.name == name), 0.0)


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
    all_steps = len(ours.steps) == len(plain.steps)
    amplified = amplification(reference)
    made, off = min(plain.trained, len(ours.steps)), first.distance()
    # Later steps are compared up to the first one where rounding alone may be more than what passes.
    lost = (factor > SENSITIVE and 2 * factor * off > tolerance.later_whole for factor in amplified[:made])
    steps = next((number for number, is_lost in enumerate(lost) if is_lost), made)
    checks = [
        largest("start", START_TOLERANCE, distances_of(reference.part(START), candidate.part(START))),
        *first.checks("step 1", plain.steps[0].gradient_norms, ours.steps[0].gradient_norms),
        make_check("loss", relative(plain.steps[0].loss, ours.steps[0].loss, 1e-12), tolerance.loss, "step 1"),
        *_later_steps(reference, candidate, tolerance, steps, amplified),
        *_clipping(ours, tolerance, plain.max_grad_norm),
        largest("parameter groups", 1e-6, _groups(plain.steps, ours.steps)),
        *([largest("learning rate after the last step", 1e-6, rates_apart)] if all_steps else []),
        *([_optimizer(plain, ours, tolerance)] if is_replayed(ours) or steps >= plain.trained else []),
        *_rounding(ours, states),
        *([largest("products in fp8", PRODUCTS, ours.products)] if ours.products else []),
        *_frozen(plain, ours, tolerance, changes=steps >= plain.trained),
    ]
    buffers = buffers_to_compare(plain, ours)
    if buffers and steps >= plain.trained:
        checks.append(largest("buffers", tolerance.norm, relatives(buffers, ours.buffers, tolerance)))
    if plain.own_length is not None and ours.own_length is not None:
        own = Gradients(reference, candidate, OWN_LENGTH, tolerance)
        checks += own.checks("own length", plain.own_length.gradient_norms, ours.own_length.gradient_norms)
    if plain.dropout is not None and ours.dropout is not None:
        checks += _dropout(reference, candidate, plain.dropout, ours.dropout, tolerance)
    if ours.twin is not None:
        checks += _twin(reference, candidate, ours.twin)
    too_sensitive = ""
    if steps < made:
        too_sensitive = (
            f"steps {steps + 1} to {plain.trained} beside the plain run: the training is too sensitive, gradients of "
            f"the plain run that are off by {NOISE:.1%} are off by {amplified[steps] * NOISE:.2g} in step {steps + 1}"
        )
    return Judgement(checks=tuple(checks), problems=tuple(_problems(reference, candidate)), too_sensitive=too_sensitive)


def amplification(reference: Samples) -> list[float]:
    """By step, how far the gradient is off, over what each one before it was off by; empty without a second run.

    Infinite where that run diverged.
    """
    if not reference.part(AGAIN + step_part(0)):
        return []
    steps, tolerance = range(1, reference.measurement.trained), TOLERANCES["fp32"]
    apart = [Gradients(reference, reference, step_part(step), tolerance, AGAIN) for step in steps]
    return [1.0, *(one.distance() / NOISE if one.names else math.inf for one in apart)]


def buffers_to_compare(plain: ParityMeasurement, ours: ParityMeasurement) -> dict[str, float]:
    """The reference's changes of what a candidate's rank keeps; empty where they cannot be compared."""
    if not ours.buffers:
        return {}
    if ours.data_ranks == 1:
        return plain.buffers
    return plain.rank_buffers[ours.data_rank] if ours.data_rank < len(plain.rank_buffers) else {}


# What is not a number.


def _problems(reference: Samples, candidate: Samples) -> Iterator[str]:
    plain, ours = reference.measurement, candidate.measurement
    one, other = set(reference.part(START)), set(candidate.part(START))
    if one != other:
        yield f"parameters are not the same: {names_of(one ^ other)} trains in one of the two only"
    for number, (theirs, own) in enumerate(zip(plain.steps, ours.steps, strict=False), start=1):
        one, other = set(theirs.gradient_norms), set(own.gradient_norms)
        if theirs.samples and one != other:
            where = f"in step {number}: {names_of(one ^ other)} is in one of the two only"
            yield f"gradients are not of the same parameters {where}"
            break
    if ours.uneven:
        yield ours.uneven
    if ours.lost:
        yield f"saving and loading between two steps loses {ours.lost}"
    if ours.hides_nan:
        yield f"a loss that is NaN leaves {ours.hides_nan} finite: the plain loop hides it nowhere"
    for measured in (ours.dropout, None if ours.twin is None else ours.twin.dropout):
        yield from _dropout_problems(plain.dropout, measured)
    for number, step in enumerate(ours.steps, start=1):
        if not math.isfinite(step.loss):
            yield f"the loss of step {number} is {step.loss}"
        if step.optimizer_steps != 1:
            yield f"the optimizer was stepped {step.optimizer_steps} times in step {number}"
    changed = (("parameters", plain.changes, ours.changes), ("buffers", plain.buffers, ours.buffers))
    for what, of_plain, of_ours in changed:
        broken = not_finite(of_ours) - not_finite(of_plain)
        if broken:
            yield f"{what} are not finite after the last step: {names_of(broken)}"
    if plain.schedule_steps != ours.schedule_steps and len(ours.steps) == len(plain.steps):
        yield f"the schedule was stepped {ours.schedule_steps} times, not {plain.schedule_steps}"
    for number, (theirs, own) in enumerate(zip(plain.steps, ours.steps, strict=False), start=1):
        if theirs.samples and theirs.cleared and not own.cleared:
            yield f"gradients are left in the parameters after step {number}"
        one, other = _held(theirs.groups), _held(own.groups)
        if one != other and own.optimizer_steps:
            yield f"the optimizer of step {number} does not hold the same parameters: {names_of(one ^ other)}"
            break


def not_finite(figures: Mapping[str, float]) -> set[str]:
    """The names of those that are NaN or infinite."""
    return {name for name, value in figures.items() if not math.isfinite(value)}


def _held(groups: Iterable[GroupMeasure]) -> set[str]:
    return {name for group in groups for name in group.parameters}


def names_of(names: set[str]) -> str:
    """The first three names, and how many more there are."""
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _later_steps(
    reference: Samples, candidate: Samples, tolerance: Tolerance, steps: int, amplified: Sequence[float]
) -> list[ParityCheck]:
    """The whole gradient and the loss of later steps, which are taken with parameters that differ a little.

    Where it is known how much a training amplifies, the second step's may be off by AMPLIFIED times what is expected of
    the first one's distance; in later ones a kink (a ReLU) may make much of a rounding.
    """
    plain, ours = reference.measurement, candidate.measurement
    scales: dict[str, float] = {}
    losses: dict[str, float] = {}
    whole = make_check("whole gradient, later steps", 0.0, tolerance.later_whole)
    first = Gradients(reference, candidate, step_part(0), tolerance).distance()
    for number in range(1, steps):
        where = f"step {number + 1}"
        found = Gradients(reference, candidate, step_part(number), tolerance)
        expected = first * max(amplified[:2]) if number == 1 and amplified else math.inf
        allowed = min(tolerance.later_whole, max(tolerance.later, AMPLIFIED * expected))
        offs = {where: found.distance()}
        (scales if number < _NEAR_STEPS else offs)[f"scale, {where}"] = abs(found.scale() - 1)
        whole = max(whole, largest(whole.name, allowed, offs), key=excess)
        losses[where] = relative(plain.steps[number].loss, ours.steps[number].loss, 1e-12)
    return [
        largest("gradient scale, later steps", tolerance.later, scales),
        whole,
        largest("loss, later steps", tolerance.later_loss, losses),
    ]


# Steps.


def _clipping(ours: ParityMeasurement, tolerance: Tolerance, most: float | None) -> list[ParityCheck]:
    """The norm that the run reports, and what clipping leaves of each gradient, beside what they have to be.

    The factor is that of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
    """
    norms, shares = {}, {}
    for number, step in enumerate(ours.steps, start=1):
        expected = step.gradient_factor
        if most is not None:
            expected *= min(1.0, most / (step.gradient_norm + 1e-6))
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
    if ours.replay is not None and is_replayed(ours):
        return largest(name, tolerance.optimizer, ours.replay.differences)
    if len(ours.steps) < plain.trained:
        return make_check("change of the parameters", 0.0, CHANGE_NORM, "not compared")
    trained = {key: value for key, value in plain.changes.items() if key in plain.parameters}
    allowed = max(tolerance.norm, CHANGE_NORM)
    return largest("change of the parameters", allowed, relatives(trained, ours.changes, tolerance))


def is_replayed(ours: ParityMeasurement) -> bool:
    """Whether the optimizer ran again on what the candidate recorded."""
    return ours.replay is not None and ours.replay.method != "norms"


def _rounding(ours: ParityMeasurement, states: str) -> list[ParityCheck]:
    """Parameters and moments that are kept rounded, beside what the steps gave."""
    if ours.replay is None or not is_replayed(ours):
        return []
    checks = []
    if ours.replay.rounding:
        checks.append(largest("rounding of the parameters", 0.0, ours.replay.rounding))
    if ours.replay.chance > 0:
        checks.append(make_check("rounding by chance", ours.replay.chance, CHANCE_DEVIATIONS, "all parameters"))
    if ours.replay.moments:
        checks.append(largest("moments as they are kept", MOMENTS_KEPT[states], ours.replay.moments))
    return checks


def _frozen(
    plain: ParityMeasurement, ours: ParityMeasurement, tolerance: Tolerance, *, changes: bool
) -> list[ParityCheck]:
    """No change at all; with `changes`, those of parameters that the plain forward moves (a teacher)."""
    frozen = {name: change for name, change in plain.changes.items() if name not in plain.parameters}
    still = {name: finite(ours.changes.get(name, 0.0)) for name, change in frozen.items() if change == 0.0}
    moved = {name: change for name, change in frozen.items() if change != 0.0}
    checks = [largest("frozen parameters", 0.0, still)]
    if moved and changes:
        differences = relatives(moved, ours.changes, tolerance)
        checks.append(largest("frozen parameters that the forward moves", tolerance.norm, differences))
    return checks


# Dropout.


def _dropout(
    reference: Samples,
    candidate: Samples,
    plain: DropoutMeasure,
    ours: DropoutMeasure,
    tolerance: Tolerance,
    prefix: str = "",
) -> list[ParityCheck]:
    """Rates in use, the same seed twice, and the noise that dropout puts into the gradient.

    Where losses or gradients show that both runs drew the same masks, the gradients themselves are compared.
    """
    rates = {name: abs(rate - ours.rates[name]) for name, rate in plain.rates.items() if name in ours.rates}
    again = relative(ours.passes[0].loss, math.nan if ours.repeated_loss is None else ours.repeated_loss)
    where = IN_FP32 if prefix and candidate.measurement.dropout is not None else ""
    checks = [
        largest(f"dropout rates{where}", 1e-6, rates),
        make_check(f"dropout, the same seed twice{where}", again, tolerance.loss, "the loss"),
    ]
    parts = [f"{DROPOUT}{number}" for number in range(len(plain.passes))]
    noise, noise_of_ours = _noise(reference, parts), _noise(candidate, [prefix + part for part in parts])
    distances = {part: Gradients(reference, candidate, part, tolerance, prefix).distance() for part in parts}
    near = max(distances.values()) < SAME_GRADIENT * math.sqrt(2 * noise)
    if near or _same_losses(plain, ours):
        checks.append(largest(SAME_MASKS + where, tolerance.vector, distances))
        return checks
    ratio = noise_of_ours / max(noise, _TINY)
    apart = max(ratio, 1.0 / ratio) if ratio > 0 else CAP
    name = f"noise of dropout in the gradient{where}"
    checks.append(make_check(name, apart - 1, DROPOUT_NOISE - 1, "all parameters"))
    return checks


def _dropout_problems(plain: DropoutMeasure | None, ours: DropoutMeasure | None) -> Iterator[str]:
    """Masks that are drawn again, and kinds of dropout that do nothing, where the plain loop shows neither."""
    if plain is None or ours is None:
        return
    new_alike = set(ours.alike) - set(plain.alike)
    if plain.unseeded and ours.unseeded and _are_apart([loss for step in plain.unseeded for loss in step]):
        if all(len(step) > 1 and _are_equal(step) for step in ours.unseeded):
            yield "dropout draws the same masks in every micro-batch of a step"
        if all(_are_equal(losses) for losses in zip(*ours.unseeded, strict=True)):
            yield "dropout draws the same masks in every step"
    yield from (f"dropout draws the same masks {where}" for name, where in MASKS.items() if name in new_alike)
    for kind, losses in ours.sources.items():
        if _are_apart(plain.sources.get(kind, ())) and _are_equal(losses):
            yield f"dropout that is on in the plain run does nothing: {kind or 'of no dropout module'}"


def same_masks_on_ranks(candidates: Sequence[ParityMeasurement]) -> str | None:
    """A sentence, where two data-parallel ranks draw the same masks from the start.

    Not for pipelines, whose loss of a step is the sum over the ranks.
    """
    seen: dict[tuple[float, ...], int] = {}
    for ours in candidates:
        measured = ours.dropout or (ours.twin.dropout if ours.twin is not None else None)
        if measured is None or not measured.unseeded:
            continue
        losses = tuple(loss for step in measured.unseeded for loss in step)
        for found, rank in seen.items():
            if rank != ours.data_rank and all(map(_are_equal, zip(found, losses, strict=True))):
                return f"dropout draws the same masks on data-parallel ranks {rank} and {ours.data_rank}"
        seen.setdefault(losses, ours.data_rank)
    return None


def _are_equal(losses: Sequence[float]) -> bool:
    return max(losses) - min(losses) <= SAME_MASK * abs(losses[0])


def _are_apart(losses: Sequence[float]) -> bool:
    """Whether every two of them differ."""
    ordered = sorted(losses)
    gaps = [after - before for before, after in itertools.pairwise(ordered)]
    return bool(gaps) and min(gaps) > 10 * SAME_MASK * abs(losses[0])


# The same knobs in fp32.


def _twin(reference: Samples, candidate: Samples, ours: TwinMeasure) -> list[ParityCheck]:
    """Gradients and losses of the candidate's knobs in fp32, by the tolerances of fp32."""
    plain, tolerance = reference.measurement, TOLERANCES["fp32"]
    first = Gradients(reference, candidate, step_part(0), tolerance, TWIN)
    loss = relative(plain.steps[0].loss, ours.step.loss, 1e-12)
    checks = [
        *first.checks("step 1" + IN_FP32, plain.steps[0].gradient_norms, ours.step.gradient_norms),
        make_check("loss" + IN_FP32, loss, tolerance.loss, "step 1"),
    ]
    if ours.second is not None:
        second, factors = Gradients(reference, candidate, step_part(1), tolerance, TWIN), amplification(reference)
        allowed = max(tolerance.later, AMPLIFIED * first.distance() * max(factors[:2])) if factors else CAP
        checks.append(make_check("whole gradient" + IN_FP32, second.distance(), allowed, "step 2"))
    if candidate.measurement.data_ranks == 1 and ours.buffers:
        statistics = relatives(plain.first_buffers, ours.buffers, tolerance)
        checks.append(largest("buffers" + IN_FP32, tolerance.norm, statistics))
    if plain.own_length is not None and ours.own_length is not None:
        own = Gradients(reference, candidate, OWN_LENGTH, tolerance, TWIN)
        norms = plain.own_length.gradient_norms, ours.own_length.gradient_norms
        checks += own.checks("own length" + IN_FP32, *norms)
    if plain.dropout is not None and ours.dropout is not None:
        checks += _dropout(reference, candidate, plain.dropout, ours.dropout, tolerance, TWIN)
    return checks


def _same_losses(plain: DropoutMeasure, ours: DropoutMeasure) -> bool:
    """Whether the losses of all seeds are those of the reference, as far as their spread over seeds can tell."""
    theirs = [measured.loss for measured in plain.passes]
    own = [measured.loss for measured in ours.passes]
    spread = max(theirs) - min(theirs)
    return len(own) == len(theirs) and all(abs(a - b) <= SAME_STREAM * spread for a, b in zip(theirs, own, strict=True))


def _noise(samples: Samples, names: Sequence[str]) -> float:
    """The variance of the gradient over seeds, as a share of the squared mean gradient."""
    parts = [samples.part(name) for name in names]
    sizes = samples.measurement.parameters
    apart = whole = 0.0
    shapes = {name: sample for part in parts for name, sample in part.items()}
    for name, sample in shapes.items():  # a layer that a seed dropped has no gradient there
        values = np.stack([part.get(name, np.zeros_like(sample)).astype(np.float64) for part in parts])
        weight = sizes[name].elements / max(1, values.shape[1]) if name in sizes else 1.0
        apart += weight * float(values.var(axis=0, ddof=1).sum())
        whole += weight * float(np.square(values.mean(axis=0)).sum())
    return finite(apart / whole) if whole != 0 else 0.0
