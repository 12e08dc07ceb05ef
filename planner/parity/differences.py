"""The numbers behind the comparisons of the parity check: relative differences, distances, scales. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autoplan.planner.parity.records import ParityMeasurement
from autoplan.planner.parity.tolerances import (
    LARGE_PARAMETER,
    PARAMETER_SCALE_OF_RESIDUAL,
    SCALE_OF_RESIDUAL,
    Tolerance,
)
from autoplan.planner.records.trials import ParityCheck

CAP = 1e6  # of a relative difference: JSON has no infinity
_TINY = 1e-30


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
