"""Correction: what measured step times teach about estimates, shrunk towards the estimate by how much they tell.

    log t_measured = log t_estimated + level + kind + sum_p share_p slope_p + noise

A level of all rows, one of each kind of device and precision, and a slope for each part p that takes share_p of the
step, all normal around 0. The noise is Student's t, so a row of another framework pulls little (Lange, Little and
Taylor 1989). How wide level, slopes and noise are is not known: each setting counts by its marginal likelihood, by
Laplace's approximation (MacKay 1992). So few rows move the level alone.

Whether that helps is judged by leaving out one group of equal work at a time. The correction is used if its errors
there are smaller than the estimate's by more than one standard error of their difference (the rule of Breiman et al.,
"Classification and Regression Trees", 1984). Otherwise the estimate stays, and only its interval is learned.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autoplan.planner.cost.columns import Floats

# Standard deviations of logarithms between which the rows decide. Assumed, as a range: estimates of published tables
# are 1 to 25 % off in their level and scatter by 5 to 15 % around it (docs/accuracy.md). What datasheets
# leave open is mostly of a device and a precision, so most of the level is that of the kind.
LEVEL_SD = (0.03, 0.1, 0.3)
OF_THE_KIND = 0.7  # of the level's variance
SLOPE_SD = (0.0, 0.1, 0.3)
NOISE_SD = (0.04, 0.06, 0.09, 0.13, 0.2, 0.3)
SETTINGS = np.array(list(itertools.product(LEVEL_SD, SLOPE_SD, NOISE_SD)))
# Student's t: a row that is far off counts as (degrees + 1) / (degrees + z^2) of one. Its 95th percentile is 2.13
# scales and a normal's 1.645, so as a standard deviation of intervals of 90 % it has 1.3 scales.
DEGREES = 4.0
SCALES = 1.3
REWEIGHTED = 8
MOST_FOLDS = 10


class _Posterior(NamedTuple):
    """Coefficients of each setting, (settings, features), their covariances, the settings' noise and weights."""

    coefficients: Floats
    covariance: Floats
    noise: Floats
    weights: Floats

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        """The logarithm of measured over estimated and its standard deviation, for rows of features."""
        each = self.coefficients @ features.T
        mean = self.weights @ each
        variance = np.einsum("rf,sfg,rg->sr", features, self.covariance, features, optimize=True)
        variance += np.square(SCALES * self.noise)[:, None] + np.square(each - mean)
        return mean, self.weights @ np.sqrt(variance)


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The correction that rows have taught.

    Attributes:
        kinds: Those of the rows, of shape (kinds, columns).
        used: Whether it makes estimates better out of sample; if not, they stay as they are.
        rows, groups: How many it was learned from.
        error_before, error_after: Mean relative error of the estimate and of the corrected one on the groups that were
            left out; None where there was but one row.
        left_out: Rows that it could not be learned from, and why.
    """

    kinds: Floats
    posterior: _Posterior
    rows: int
    groups: int
    used: bool = False
    error_before: float | None = None
    error_after: float | None = None
    left_out: tuple[str, ...] = ()

    def predict(self, parts: Floats, kinds: Floats) -> tuple[Floats, Floats]:
        """The factor on estimated step times, and the standard deviation of the logarithm of what is measured.

        Args:
            parts: Estimated seconds by part, of shape (rows, parts).
            kinds: Of each row, of shape (rows, columns).
        """
        shift, sd = self.posterior.predict(_features(parts, kinds, self.kinds))
        if self.used:
            return np.exp(shift), sd
        return np.ones(len(shift)), np.hypot(sd, shift)

    def describe(self) -> str:
        """The correction in a sentence."""
        more = f"; left out: {'; '.join(self.left_out)}" if self.left_out else ""
        if self.error_before is None or self.error_after is None:
            return f"not calibrated: with one row nothing can be left out to judge by; give two or more{more}"
        errors = f"{self.error_before:.1%} off as it is, {self.error_after:.1%} calibrated"
        how = f"on each of {self.groups} groups of rows while it was left out the estimate was {errors}"
        return (f"calibrated on {self.rows} rows: {how}" if self.used else f"not calibrated: {how}, no gain") + more


def learn(parts: Floats, kinds: Floats, groups: Sequence[object], seconds: Floats) -> Correction:
    """Learns the correction from rows.

    Args:
        parts: Estimated seconds by part, of shape (rows, parts).
        kinds: Of device and precision, as numbers, of shape (rows, columns).
        groups: Of each row the group of equal work that it belongs to.
        seconds: As measured.
    """
    seen = np.log(seconds / parts.sum(axis=1))
    known = np.unique(kinds, axis=0)
    features = _features(parts, kinds, known)
    fold = np.unique([str(group) for group in groups], return_inverse=True)[1]
    if fold.max() == 0:  # rows of one group judge each other
        fold = np.arange(len(seen))
    correction = Correction(
        kinds=known,
        posterior=_fit(features, seen, parts.shape[1]),
        rows=len(seen),
        groups=int(fold.max()) + 1,
    )
    if len(seen) < 2:
        return correction
    left_out = np.zeros(len(seen))
    for part in range(min(correction.groups, MOST_FOLDS)):
        out = fold % MOST_FOLDS == part
        left_out[out] = _fit(features[~out], seen[~out], parts.shape[1]).predict(features[out])[0]
    before, after = np.abs(np.exp(-seen) - 1), np.abs(np.exp(left_out - seen) - 1)
    gain = before - after
    return replace(
        correction,
        used=bool(gain.mean() > gain.std(ddof=1) / np.sqrt(len(gain))),
        error_before=float(before.mean()),
        error_after=float(after.mean()),
    )


def _features(parts: Floats, kinds: Floats, known: Floats) -> Floats:
    """One, whether a row is of each known kind or of another, and shares of the step: of shape (rows, features)."""
    of_kind = (kinds[:, None, :] == known).all(axis=2)
    unknown = ~of_kind.any(axis=1)
    shares = parts / parts.sum(axis=1, keepdims=True)
    return np.column_stack([np.ones(len(parts)), of_kind, unknown, shares])


def _fit(features: Floats, seen: Floats, num_parts: int) -> _Posterior:
    """The posterior of each setting, by reweighted least squares; the last features are the shares of the parts."""
    level, slope, noise = SETTINGS.T
    num_kinds = features.shape[1] - 1 - num_parts
    kind = level * np.sqrt(OF_THE_KIND)
    sd = np.column_stack([level * np.sqrt(1 - OF_THE_KIND), *[kind] * num_kinds, *[slope] * num_parts])
    scaled = features * sd[:, None, :]
    weights = np.ones((len(sd), len(seen)))
    for _ in range(REWEIGHTED):
        weighted = (weights / noise[:, None] ** 2)[:, :, None] * scaled
        precision = np.eye(features.shape[1]) + weighted.swapaxes(1, 2) @ scaled
        found = np.linalg.solve(precision, (weighted.swapaxes(1, 2) @ seen)[..., None])[..., 0]
        off = np.square((seen - np.einsum("srf,sf->sr", scaled, found)) / noise[:, None])
        weights = (DEGREES + 1) / (DEGREES + off)
    fits = (-(DEGREES + 1) / 2 * np.log1p(off / DEGREES) - np.log(noise)[:, None]).sum(axis=1)
    evidence = fits - 0.5 * np.square(found).sum(axis=1) - 0.5 * np.linalg.slogdet(precision)[1]
    likely = np.exp(evidence - evidence.max())
    covariance = np.linalg.inv(precision) * sd[:, :, None] * sd[:, None, :]
    return _Posterior(found * sd, covariance, noise, likely / likely.sum())
