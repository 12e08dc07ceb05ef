"""Corrections of estimates by measured rows: shrunk by how much the rows tell, and used only where they help."""

from __future__ import annotations

import numpy as np
import pytest

from autoplan.planner.cost.columns import Floats
from autoplan.planner.cost.correction import Correction, learn

RNG = np.random.default_rng(0)
BOTH = np.array([[1.0, 1.0], [2.0, 1.0]])


def parts_of(rows: int) -> Floats:
    """Seconds of three parts of steps of about 10 s."""
    return RNG.dirichlet((3.0, 2.0, 1.0), rows) * RNG.uniform(5, 15, (rows, 1))


def learned(parts: Floats, ratio: Floats, kinds: Floats | None = None) -> Correction:
    kinds = np.ones((len(parts), 2)) if kinds is None else kinds
    return learn(parts, kinds, range(len(parts)), parts.sum(axis=1) * ratio)


def test_a_level_that_all_rows_share_is_taken_over() -> None:
    parts = parts_of(6)
    correction = learned(parts, 1.3 * np.exp(RNG.normal(0, 0.03, 6)))
    factor, sd = correction.predict(parts_of(20), np.ones((20, 2)))
    assert correction.used and correction.error_after < correction.error_before  # type: ignore[operator]
    assert factor == pytest.approx(np.full(20, 1.3), rel=0.08) and sd.max() < 0.15


def test_rows_that_scatter_around_the_estimate_leave_it_and_set_its_interval() -> None:
    loud, still = (learned(parts_of(12), np.exp(sd * np.tile([1.0, -1.0], 6))) for sd in (0.2, 0.03))
    for correction in (loud, still):
        assert not correction.used and "no gain" in correction.describe()
    (factor, wide), (_, narrow) = (one.predict(parts_of(5), np.ones((5, 2))) for one in (loud, still))
    assert np.all(factor == 1.0) and wide.min() > 0.15 and narrow.max() < 0.1


def test_few_rows_move_the_level_and_many_the_slope() -> None:
    parts = np.array([[9.0, 1.0, 0.0], [1.0, 9.0, 0.0]] * 20)
    ratio = 1 + 0.35 * parts[:, 0] / 10  # the first part takes longer than estimated

    def between(rows: int) -> float:
        factor, _ = learned(parts[:rows], ratio[:rows]).predict(parts[:2], np.ones((2, 2)))
        return float(factor[0] / factor[1])

    assert between(4) < between(40)
    assert between(40) == pytest.approx(ratio[0] / ratio[1], rel=0.05)


def test_a_kind_without_rows_is_corrected_less_and_has_a_wider_interval() -> None:
    correction = learned(parts_of(8), np.full(8, 1.4), BOTH[[0] * 8])
    same = parts_of(1)
    (seen, narrow), (unseen, wide) = (correction.predict(same, BOTH[[kind]]) for kind in (0, 1))
    assert 1.05 < unseen < 1.25 < seen and wide > 1.5 * narrow


def test_a_row_of_another_framework_pulls_little() -> None:
    parts, ratio = parts_of(8), np.full(8, 1.2)
    ratio[3] = 2.0
    factor, _ = learned(parts, ratio).predict(parts, np.ones((8, 2)))
    assert factor == pytest.approx(np.full(8, 1.2), rel=0.07)


def test_one_row_corrects_nothing() -> None:
    correction = learned(parts_of(1), np.array([1.5]))
    factor, sd = correction.predict(parts_of(3), np.ones((3, 2)))
    assert not correction.used and "two or more" in correction.describe()
    assert np.all(factor == 1.0) and sd.min() > 0.3, "what it shows is in the interval"


def test_rows_of_one_group_are_left_out_together() -> None:
    """Two models that are off in opposite ways, each many times: no row of a model speaks for the other."""
    parts, ratio = parts_of(12), np.repeat([1.3, 1 / 1.3], 6)
    seconds = parts.sum(axis=1) * ratio
    assert not learn(parts, np.ones((12, 2)), ["a"] * 6 + ["b"] * 6, seconds).used
