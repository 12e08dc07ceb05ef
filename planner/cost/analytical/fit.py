"""Fits the closed form's factors to measured step times."""

from __future__ import annotations

import numpy as np

from autoplan.planner.cost.analytical.layouts import Layouts
from autoplan.planner.cost.analytical.step_time import FACTOR_SD, Factors, estimate_layouts
from autoplan.planner.cost.calibrate import gauss_newton
from autoplan.planner.cost.columns import Floats

# Scatter of a measured step around the closed form with the right factors; assumed. Larger than the 0.06 of the search
# (calibrate.py), whose operations are those that run.
NOISE_SD = 0.1
# Slopes by a logarithm of a factor are taken over this difference: parts of a step overlap, so there is no closed form.
DIFFERENCE = 0.02
NAMES = tuple(FACTOR_SD)


def fit_factors(layouts: Layouts, seconds: Floats) -> Factors:
    """The factors that explain measured step times, as far as they differ from the prior.

    Args:
        layouts: One row per measurement.
        seconds: Measured step times.
    """

    def predict(theta: Floats) -> tuple[Floats, Floats]:
        base = _log_seconds(layouts, theta)
        moved = [_log_seconds(layouts, theta + DIFFERENCE * unit) for unit in np.eye(len(NAMES))]
        return base, np.stack([(log - base) / DIFFERENCE for log in moved], axis=1)

    weights = np.full(len(seconds), 1 / NOISE_SD**2)
    theta, _ = gauss_newton(predict, np.log(seconds), weights, np.array(list(FACTOR_SD.values())))
    return _factors(theta)


def _factors(theta: Floats) -> Factors:
    return Factors(**dict(zip(NAMES, map(float, theta), strict=True)))


def _log_seconds(layouts: Layouts, theta: Floats) -> Floats:
    return np.log(estimate_layouts(layouts, _factors(theta)).step_time_s)
