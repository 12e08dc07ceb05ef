"""Calibration: a few factors with a physical meaning, fitted to finished trials, kept near 1 by their priors.

    log t_measured = log sum_p exp(theta_p) t_p + noise,      theta_p ~ N(0, sd_p)

over the parts p of the predicted time: matmul per precision class (in 8 bits with its casts), attention, memory-bound
work, the same when compiled, dispatch, first touches of memory, optimizer, communication. The maximum a posteriori is
found by Gauss-Newton; its covariance gives the interval of a prediction: what the trials have pinned down is narrow,
what they have not seen stays wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from autoplan.planner.cost.columns import Floats

# How far off a part is taken to be before any trial, as a standard deviation of its logarithm. Assumed, from what was
# seen of measured rates on a few machines: products were timed by the probe, what a compiler leaves was not.
PRIOR_SD = {
    "matmul/full": 0.15,
    "matmul/half": 0.20,
    "matmul/fp8": 0.40,
    "attention": 0.25,
    "memory": 0.30,
    "fused_memory": 0.50,
    "dispatch": 0.60,
    "first_touch": 0.50,
    "optimizer": 0.35,
    "communication": 0.50,
}
FACTORS = tuple(PRIOR_SD)
# What no factor explains: shapes, caches, neighbours on the machine. Assumed; two rounds of the same trials were 3 to
# 6 % apart (docs/accuracy.md). Smaller than the closed form's 0.1, whose operations are not the traced ones.
NOISE_SD = 0.06
# Newton's steps on the logarithms of the factors are cut at this length, and end below this one.
LONGEST_STEP = 0.5
SHORTEST_STEP = 1e-4
MOST_STEPS = 12
# Of the distribution function; further out its logarithm is a square anyway
LARGEST_Z = 30.0
# A measurement counts as at most so many standard deviations off when intervals are widened
WORST_SURPRISE = 8.0


@dataclass(slots=True)
class TimeFit:
    """The factors of the time, from a prior around 1 and observations.

    Attributes:
        prior_sd: Standard deviation of each factor's logarithm before any observation.
        rows: Of each observation the parts, the seconds, 1 / variance, and whether it is a lower bound.
    """

    prior_sd: Floats = field(default_factory=lambda: np.array(list(PRIOR_SD.values())))
    theta: Floats = field(default_factory=lambda: np.zeros(len(FACTORS)))
    covariance: Floats = field(init=False)
    rows: list[tuple[Floats, float, float, bool]] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.covariance = np.diag(np.square(self.prior_sd))

    def observe(self, parts: Floats, seconds: float, *, noise: float = NOISE_SD, at_least: bool = False) -> None:
        """Takes in one measured time whose predicted parts (one per factor) are these, and fits anew.

        Args:
            parts: Seconds by factor.
            seconds: As measured.
            noise: Standard deviation of the logarithm of a measured time around the prediction.
            at_least: The time is a lower bound: the step was given up before it was known.
        """
        if not parts.sum() > 0 or not seconds > 0:
            return
        expected, sd = self.predict(parts[:, None])
        off = float(np.log(seconds / expected[0])) / math.sqrt(sd[0] ** 2 + max(noise**2 - NOISE_SD**2, 0.0))
        self.surprises.append(min(max(off, 0.0) if at_least else abs(off), WORST_SURPRISE))
        self.rows.append((parts, seconds, 1 / noise**2, at_least))
        self._fit()

    def _fit(self) -> None:
        """The most probable theta and its covariance, by Gauss-Newton.

        It is on the sum of (log seen - log predicted)^2 / noise^2 and (theta / prior_sd)^2. A time that is only known
        to be longer than what was seen counts by its probability, Phi(z) with z = (log predicted - log seen) / noise,
        in the place of the square (Tobin 1958; each step takes the first two derivatives of -log Phi, as Amemiya 1984,
        section 4, has them). So it pulls a prediction that lies below it, and leaves one above it alone.
        """
        parts, seconds, weights, at_least = (np.array(column) for column in zip(*self.rows, strict=True))
        seen = np.log(seconds)
        precision = np.diag(1 / np.square(self.prior_sd))
        theta = np.zeros(len(self.prior_sd))
        for _ in range(MOST_STEPS):
            scaled = parts * np.exp(theta)
            predicted = scaled.sum(axis=1)
            expected, slope = np.log(predicted), scaled / predicted[:, None]
            weight, pull = weights, weights * (seen - expected)
            if at_least.any():
                z = np.clip((expected - seen) * np.sqrt(weights), -LARGEST_Z, LARGEST_Z)
                below = np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in z])
                hazard = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi) / below  # density over distribution function
                weight = np.where(at_least, weights * hazard * (hazard + z), weight)
                pull = np.where(at_least, np.sqrt(weights) * hazard, pull)
            hessian = slope.T @ (weight[:, None] * slope) + precision
            step = np.linalg.solve(hessian, slope.T @ pull - precision @ theta)
            theta = theta + np.clip(step, -LONGEST_STEP, LONGEST_STEP)
            if np.abs(step).max() < SHORTEST_STEP:
                break
        self.theta, self.covariance = theta, np.asarray(np.linalg.inv(hessian), dtype=np.float64)

    def predict(self, parts: Floats) -> tuple[Floats, Floats]:
        """Seconds and the standard deviation of their logarithm, for parts of shape (factors, candidates)."""
        scaled = parts * np.exp(self.theta)[:, None]
        seconds = scaled.sum(axis=0)
        slope = scaled / np.maximum(seconds, 1e-30)
        variance = np.einsum("ic,ij,jc->c", slope, self.covariance, slope) + NOISE_SD**2
        # measurements further off than their intervals say that the intervals are too narrow: all are widened, until
        # others that were as expected outweigh them
        off = np.square(self.surprises)
        wider = max((1 + off.sum()) / (1 + len(off)), 1.0)
        return seconds, np.sqrt(variance * wider)


@dataclass(slots=True)
class MemoryFit:
    """peak = base + (1 + slack) x live, from a prior and observations. Base: process, libraries, CUDA context."""

    base_bytes: float
    slack: float = 0.03
    base_sd_bytes: float = 1e8
    slack_sd: float = 0.1
    noise: float = 0.04
    rows: list[tuple[float, float]] = field(default_factory=list)
    _prior: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._prior = np.array([self.base_bytes, self.slack])

    def observe(self, live_bytes: float, peak_bytes: float) -> None:
        """Takes in one measured peak."""
        self.rows.append((live_bytes, peak_bytes))
        precision = np.diag([1 / self.base_sd_bytes**2, 1 / self.slack_sd**2])
        live = np.array([row[0] for row in self.rows])
        peak = np.array([row[1] for row in self.rows])
        weights = 1 / np.square(self.noise * peak)
        design = np.stack([np.ones_like(live), live], axis=1)
        hessian = design.T @ (weights[:, None] * design) + precision
        right = design.T @ (weights * (peak - live)) + precision @ self._prior
        self.base_bytes, self.slack = (float(value) for value in np.linalg.solve(hessian, right))

    @property
    def sd(self) -> float:
        """Standard deviation of a prediction's logarithm."""
        if not self.rows:
            return 0.09
        errors = [peak / (self.base_bytes + (1 + self.slack) * live) - 1 for live, peak in self.rows]
        return float(np.sqrt((0.05**2 + sum(e * e for e in errors)) / (1 + len(errors))) + 0.01)

    def predict(self, live_bytes: Floats) -> Floats:
        """The peak that the limit is held against."""
        return np.asarray(self.base_bytes + (1 + self.slack) * live_bytes)
