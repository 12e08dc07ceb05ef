"""What the factors learn from times that are known, and from those of which only a lower bound is."""

import math

import numpy as np
import pytest

from autoplan.planner.cost.calibrate import FACTORS, NOISE_SD, TimeFit
from autoplan.planner.cost.columns import Floats

MATMUL, MEMORY = FACTORS.index("matmul/full"), FACTORS.index("memory")


def parts(matmul: float, memory: float = 0.0) -> Floats:
    found = np.zeros(len(FACTORS))
    found[[MATMUL, MEMORY]] = matmul, memory
    return found


def predicted_s(fit: TimeFit, *seconds: float) -> float:
    return float(fit.predict(parts(*seconds)[:, None])[0][0])


def test_a_lower_bound_moves_only_a_prediction_that_lies_below_it():
    above, below, value = TimeFit(), TimeFit(), TimeFit()
    above.observe(parts(1.0), 0.5, at_least=True)
    below.observe(parts(1.0), 1.5, at_least=True)
    value.observe(parts(1.0), 0.5)
    assert predicted_s(above, 1.0) == pytest.approx(1.0, rel=1e-6)
    assert above.surprises == [0.0]
    assert predicted_s(value, 1.0) < 0.7  # what it would be as a value
    assert predicted_s(below, 1.0) > 1.3
    assert below.surprises[0] > 1.0


def test_a_lower_bound_teaches_no_more_than_it_says():
    """The interval of a prediction far above the bound stays as wide, and one below gets no narrower than by a time."""
    before = float(TimeFit().predict(parts(1.0)[:, None])[1][0])
    far, near, value = TimeFit(), TimeFit(), TimeFit()
    far.observe(parts(1.0), 0.3, at_least=True)
    near.observe(parts(1.0), 1.0, at_least=True)
    value.observe(parts(1.0), 1.0)
    sds = [float(fit.predict(parts(1.0)[:, None])[1][0]) for fit in (far, near, value)]
    assert sds[0] == pytest.approx(before, rel=1e-6)
    assert sds[2] < sds[1] < before


def test_times_and_bounds_go_together():
    fit = TimeFit()
    fit.observe(parts(1.0, 0.2), 1.1)
    fit.observe(parts(0.2, 1.0), 2.4, at_least=True)
    assert predicted_s(fit, 1.0, 0.2) == pytest.approx(1.15, rel=0.1)
    assert predicted_s(fit, 0.2, 1.0) > 1.8


def test_the_maximum_is_that_of_the_likelihood():
    """By a grid: normal density of one time, normal distribution function of one bound, normal prior."""
    fit = TimeFit(prior_sd=np.array([0.3]), theta=np.zeros(1))
    fit.observe(np.array([1.0]), 1.0)
    fit.observe(np.array([1.0]), 1.4, at_least=True)
    seen = np.log(np.array([1.0, 1.4]))
    grid = np.linspace(-0.5, 0.8, 130_001)
    z = (grid - seen[1]) / NOISE_SD
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    loss = 0.5 * ((grid - seen[0]) / NOISE_SD) ** 2 - np.log(below) + 0.5 * (grid / 0.3) ** 2
    assert fit.theta[0] == pytest.approx(grid[np.argmin(loss)], abs=1e-3)


def test_a_disturbed_time_moves_the_factors_less():
    quiet, loud = TimeFit(), TimeFit()
    quiet.observe(parts(1.0), 1.5)
    loud.observe(parts(1.0), 1.5, noise=math.hypot(NOISE_SD, 0.4))
    assert 1.0 < predicted_s(loud, 1.0) < 1.1 < predicted_s(quiet, 1.0)
    assert loud.surprises[0] < quiet.surprises[0]
