"""Statistics of timed steps: medians with intervals, when to stop, and when two configurations differ.

Medians, since a training step has outliers on the slow side only (a page fault, a neighbour), and since the step a
user gets is the usual one. Intervals hold 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoplan.planner.records import Interval

NARROW = 0.02
"""A 95 % interval narrower than this share of the median is narrow enough to rank a configuration."""

SETTLED = 0.02
"""Two successive windows whose medians differ by less than this share are taken as warm."""

RUN_SPREAD = 0.025
"""Assumed spread (standard deviation, as a share) between two runs of one configuration where only one was made:
the spread that MLPerf Training publishes for its imaging tasks, the steadier kind."""

PRIOR_ROUNDS = 3
"""How many rounds RUN_SPREAD counts for, beside the rounds that were made."""

MEDIAN_WIDTH = math.sqrt(math.pi / 2)
"""The median of normal samples scatters at most this many times as much as their mean (1.16 for three samples)."""

RESAMPLES = 1000

# Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom (any table of the distribution)
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def median_interval(samples: Sequence[float], *, seed: int = 0) -> Interval:
    """The median with its bootstrap interval (percentile, 95 %).

    One sample has no spread to show: its interval is taken as RUN_SPREAD to either side, twice over.
    """
    return sum_interval([(1.0, samples)], seed=seed)


def sum_interval(terms: Sequence[tuple[float, Sequence[float]]], *, seed: int = 0) -> Interval:
    """The sum of weighted medians, `sum(weight x median(samples))`, with its bootstrap interval.

    Args:
        terms: Weight and samples of each part; a step put together from its parts has the counts as weights.
        seed: Of the resampling; the same samples always give the same interval.

    One or two samples show little of their spread: RUN_SPREAD stands in for it.
    """
    assert terms and all(len(samples) for _, samples in terms), "each part needs at least one sample"
    rng = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    median = 0.0
    slack = 0.0
    for weight, samples in terms:
        values = np.asarray(samples, dtype=float)
        middle = float(np.median(values))
        median += weight * middle
        if len(values) <= 2:
            slack += weight * middle * 2 * RUN_SPREAD / len(values)
        total += weight * np.median(values[rng.integers(0, len(values), (RESAMPLES, len(values)))], axis=1)
    low, high = np.quantile(total, (0.025, 0.975))
    return Interval(
        median=median,
        low=max(0.0, min(float(low), median) - slack),
        high=max(float(high), median) + slack,
        samples=min(len(samples) for _, samples in terms),
    )


def relative_width(interval: Interval) -> float:
    """The interval's width as a share of the median."""
    return (interval.high - interval.low) / interval.median if interval.median else math.inf


def invert(interval: Interval, amount: float) -> Interval:
    """amount / interval: the interval of a rate from that of a time."""
    return Interval(
        median=amount / interval.median,
        low=amount / interval.high,
        high=amount / interval.low if interval.low > 0 else math.inf,
        samples=interval.samples,
    )


def is_settled(samples: Sequence[float], window: int = 3, tolerance: float = SETTLED) -> bool:
    """Whether the last two windows of samples have medians that differ by less than the tolerance."""
    if len(samples) < 2 * window:
        return False
    before, after = np.median(samples[-2 * window : -window]), np.median(samples[-window:])
    return bool(abs(after - before) <= tolerance * before)


def drop_warmup(samples: Sequence[float], *, keep: int, tolerance: float = 0.05) -> list[float]:
    """The samples without the slow ones at the start: those beyond the tolerance above the median of the rest.

    Stops when `keep` are left. For the few, dear samples of a slow machine, where whole windows cannot be spent.
    """
    left = list(samples)
    while len(left) > keep and left[0] > (1 + tolerance) * float(np.median(left[1:])):
        left.pop(0)
    return left


def spread_warning(samples: Sequence[float]) -> str | None:
    """A sentence if the samples scatter: interquartile range over median above 10 % (torch.utils.benchmark's line)."""
    if len(samples) < 4:
        return None
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    share = (high - low) / middle
    if share <= 0.1:
        return None
    return f"step times scatter: interquartile range {share:.0%} of the median over {len(samples)} samples"


Stop = Literal["narrow", "losing", "time_box"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """When a trial has measured enough.

    Attributes:
        time_box_s: Seconds of measuring after which it ends, whatever it knows.
        best_high_s: The high bound of the best configuration's step time so far; None: nothing to lose against.
        min_samples: Fewer are never enough, the time box aside.
        narrow: The relative width that is narrow enough.
    """

    time_box_s: float
    best_high_s: float | None = None
    min_samples: int = 5
    narrow: float = NARROW

    def decide(self, interval: Interval, elapsed_s: float) -> Stop | None:
        """Why to stop, or None to go on.

        `losing`: even the low bound of this step time is above the high bound of the best one.
        """
        if interval.samples >= 3 and self.best_high_s is not None and interval.low > self.best_high_s:
            return "losing"
        if interval.samples >= self.min_samples and relative_width(interval) <= self.narrow:
            return "narrow"
        return "time_box" if elapsed_s >= self.time_box_s else None


def step_terms(parts: Mapping[str, Sequence[float]], accumulation: int) -> list[tuple[float, Sequence[float]]]:
    """A step as weighted parts.

    A step is the first micro-step after an optimizer step, the second, further ones without gradient sync, the last
    one with it, and the optimizer step. The second is a kind of its own: it is the first that needs room for new
    gradients beside those that it adds to, and what the last zero_grad gave back to the system comes page by page
    (measured: up to twice as long as the later ones on a CPU). With accumulation 1 the one micro-step syncs.

    Args:
        parts: Samples of `first_micro_step`, `second_micro_step`, `micro_step`, `micro_step_sync`, `optimizer_step`. A
            kind that was not sampled is taken from the nearest that was: alike on one rank, where nothing is reduced.
        accumulation: Micro-steps per optimizer step.
    """

    def of(*names: str) -> Sequence[float]:
        return next(parts[name] for name in names if parts.get(name))

    first, second, middle, sync = "first_micro_step", "second_micro_step", "micro_step", "micro_step_sync"
    terms: list[tuple[float, Sequence[float]]] = [(1.0, of("optimizer_step"))]
    if accumulation <= 2:
        terms.append((1.0, of(sync, second, middle, first)))
    else:
        terms += [(1.0, of(sync, middle, second, first)), (1.0, of(second, middle, first, sync))]
    if accumulation >= 2:
        terms.append((1.0, of(first, middle, second, sync)))
    if accumulation >= 4:
        terms.append((float(accumulation - 3), of(middle, second, sync, first)))
    return terms


def ratio_interval(candidate: Sequence[Interval], reference: Sequence[Interval]) -> Interval:
    """How many times faster the candidate is: reference step time over candidate step time.

    Args:
        candidate: One interval of the step time per run; the i-th run of both were made side by side.
        reference: The same.

    The middle is the ratio of the pooled runs (`pool_runs`), so that the figures shown for both and their ratio agree,
    and so that one disturbed run of three does not move it. The width is Student's t on the rounds' log ratios (a
    percentile bootstrap over three rounds claims a difference whenever all three lean the same way, which is one case
    in four between equals), times MEDIAN_WIDTH where medians are taken. Few rounds say little about the spread between
    runs, so RUN_SPREAD stands in as PRIOR_ROUNDS rounds' worth of knowledge of it (a conjugate prior on the variance);
    a single round adds the intervals within its runs.
    """
    rounds = min(len(candidate), len(reference))
    assert rounds >= 1, "a ratio needs a run of each"
    candidate, reference = candidate[:rounds], reference[:rounds]
    logs = np.array([math.log(r.median / c.median) for c, r in zip(candidate, reference, strict=True)])
    middle = math.log(pool_runs(reference).median / pool_runs(candidate).median)
    freedom = PRIOR_ROUNDS + rounds - 1
    variance = (PRIOR_ROUNDS * 2 * RUN_SPREAD**2 + float(np.sum((logs - logs.mean()) ** 2))) / freedom
    half = _T_95[min(freedom, len(_T_95)) - 1] * math.sqrt(variance / rounds)
    if rounds == 1:
        half = math.hypot(half, _log_half_width(candidate[0]), _log_half_width(reference[0]))
    elif rounds > 2:
        half *= MEDIAN_WIDTH
    return Interval(median=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half), samples=rounds)


def _log_half_width(interval: Interval) -> float:
    return 0.5 * math.log(interval.high / interval.low) if interval.low > 0 else 1.0


def pool_runs(runs: Sequence[Interval]) -> Interval:
    """One interval for several runs of a configuration: the median of their medians, bounds that hold all of theirs.

    Between the two middle ones of an even number it is the geometric mean: what is compared are ratios.
    """
    return Interval(
        median=math.exp(float(np.median([math.log(run.median) for run in runs]))),
        low=min(run.low for run in runs),
        high=max(run.high for run in runs),
        samples=sum(run.samples for run in runs),
    )
