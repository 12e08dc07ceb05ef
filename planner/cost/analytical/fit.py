"""Fits the closed form's factors to measured step times: Gauss-Newton on logarithms, shrunk to the prior."""

from __future__ import annotations

import numpy as np

from autoplan.planner.cost.analytical.layouts import Layouts
from autoplan.planner.cost.analytical.step_time import FACTOR_SD, Factors, price
from autoplan.planner.cost.candidates import Floats

# Scatter of a measured step around the closed form with the right factors
NOISE_SD = 0.1
NAMES = tuple(FACTOR_SD)


def fit_factors(layouts: Layouts, seconds: Floats) -> Factors:
    """The factors that explain measured step times, as far as they differ from the prior.

    Args:
        layouts: One row per measurement.
        seconds: Measured step times.
    """
    theta = np.zeros(len(NAMES))
    target = np.log(seconds)
    precision = np.diag([1 / FACTOR_SD[name] ** 2 for name in NAMES])
    for _ in range(10):
        base = _log_seconds(layouts, theta)
        slope = np.stack([(_log_seconds(layouts, theta + 0.02 * unit) - base) / 0.02 for unit in np.eye(len(NAMES))], 1)
        hessian = slope.T @ slope / NOISE_SD**2 + precision
        step = np.linalg.solve(hessian, slope.T @ (target - base) / NOISE_SD**2 - precision @ theta)
        theta = theta + np.clip(step, -0.4, 0.4)
        if np.abs(step).max() < 1e-4:
            break
    return Factors(**dict(zip(NAMES, map(float, theta), strict=True)))


def _log_seconds(layouts: Layouts, theta: Floats) -> Floats:
    return np.log(price(layouts, Factors(**dict(zip(NAMES, map(float, theta), strict=True)))).step_time_s)
