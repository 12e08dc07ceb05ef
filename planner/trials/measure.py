"""Statistics of timed steps: medians with 95 % intervals, when to stop measuring, how two configurations compare.

In: seconds. Out: an `Interval`, or a decision. Medians are used because a step has outliers only on the slow side (a
page fault, other work on the machine), and because a user's steps are mostly usual ones.

A look at a candidate ends early once its step is longer than the leader's (`compare`). It is compared after every
sample, so a bound for one comparison would drop equals too often: some sample always comes at a bad moment. The bound
here is a confidence sequence, which holds at all moments together. And a process as a whole is faster or slower than
another one of the same configuration; no number of its steps shows that. So the bound has two parts, each with half of
the level:

    mean of the logarithms - within(samples) - between(runs)  >  logarithm of the leader's step time
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from pydantic import Field

from autoplan.planner.records.trials import Interval, Window
from autoplan.record import Record

RUN_SPREAD = 0.025
"""Assumed spread between runs of one configuration (standard deviation, as a share) where nothing was measured yet: the
spread that MLPerf Training publishes for its imaging tasks, which vary less than its other tasks."""

NARROW = 2 * RUN_SPREAD
"""A 95 % interval that is no wider than this share of the median is narrow enough: what is left (1.3 % as a standard
deviation) adds a tenth to what differs between runs, which no further step of this process makes less."""

PRIOR_ROUNDS = 3
"""RUN_SPREAD counts as much as this many measured runs; each run of the same configuration again takes one away."""

CORRELATED_S = 2.0
"""A core that others share keeps its speed for about so long (1 to 3 s on a machine where it was measured). Over longer
stretches its changes even out."""

MOST_FREEDOM = 12
"""Measured repeats count as this many at most, so that the rounds which are compared keep their say."""

MEDIAN_WIDTH = math.sqrt(math.pi / 2)
"""The median of normal samples scatters at most this many times as much as their mean (1.16 for three samples)."""

RESAMPLES = 1000


def median_interval(samples: Sequence[float], *, seed: int = 0) -> Interval:
    """The median with its bootstrap interval (percentile, 95 %).

    One sample shows no spread: its interval is the sample plus and minus 2 x RUN_SPREAD.
    """
    return sum_interval([(1.0, samples)], seed=seed)


def sum_interval(terms: Sequence[tuple[float, Sequence[float]]], *, seed: int = 0, mean: bool = False) -> Interval:
    """The sum of weighted medians, `sum(weight x median(samples))`, with its bootstrap interval.

    Args:
        terms: Weight and samples of each part. The weight is how often the part occurs in a step.
        seed: Of the resampling; the same samples always give the same interval.
        mean: Take means. Of two runs over the same time they have the same share of its slow moments; a median would be
            a slow moment of the one and a fast one of the other.

    One or two samples show too little of their spread, so RUN_SPREAD is added to the interval.
    """
    assert terms and all(len(samples) for _, samples in terms), "each part needs at least one sample"
    rng, typical = np.random.default_rng(seed), np.mean if mean else np.median
    total = np.zeros(RESAMPLES)
    median = 0.0
    extra = 0.0
    for weight, samples in terms:
        values = np.asarray(samples, dtype=float)
        middle = float(typical(values))
        median += weight * middle
        if len(values) <= 2:
            extra += weight * middle * 2 * RUN_SPREAD / len(values)
        total += weight * typical(values[rng.integers(0, len(values), (RESAMPLES, len(values)))], axis=1)
    low, high = np.quantile(total, (0.025, 0.975))
    return Interval(
        median=median,
        low=max(0.0, min(float(low), median) - extra),
        high=max(float(high), median) + extra,
        samples=min(len(samples) for _, samples in terms),
    )


def relative_width(interval: Interval) -> float:
    """The interval's width as a share of the median."""
    return (interval.high - interval.low) / interval.median if interval.median else math.inf


def invert(interval: Interval, amount: float) -> Interval:
    """amount / interval: turns the interval of a time into that of a rate."""
    return Interval(
        median=amount / interval.median,
        low=amount / interval.high,
        high=amount / interval.low if interval.low > 0 else math.inf,
        samples=interval.samples,
    )


def drop_warmup(samples: Sequence[float], *, keep: int, tolerance: float = 0.05) -> list[float]:
    """The samples without the slow ones at the start: those beyond the tolerance above the median of the rest.

    At least `keep` samples are kept. For slow steps, of which few are run before the first that counts.
    """
    left = list(samples)
    while len(left) > keep and left[0] > (1 + tolerance) * float(np.median(left[1:])):
        left.pop(0)
    return left


def spread_warning(samples: Sequence[float]) -> str | None:
    """A warning if the interquartile range is above 10 % of the median (the limit of torch.utils.benchmark)."""
    if len(samples) < 4:
        return None
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    share = (high - low) / middle
    if share <= 0.1:
        return None
    return f"step times scatter: interquartile range {share:.0%} of the median over {len(samples)} samples"


def step_terms(parts: Mapping[str, Sequence[float]], accumulation: int) -> list[tuple[float, Sequence[float]]]:
    """The parts of a step: (how often, samples) of each.

    A step is the first micro-step after an optimizer step, the second, further ones without gradient sync, the last
    one with it, and the optimizer step. The second is a part of its own because it takes longer on a CPU (measured: up
    to twice as long as the later ones): it is the first that needs memory for new gradients beside the accumulated
    ones, and the last zero_grad returned that memory to the system. With accumulation 1 the one micro-step syncs.

    Args:
        parts: Samples of `first_micro_step`, `second_micro_step`, `micro_step`, `micro_step_sync`, `optimizer_step`. A
            part without samples uses those of the most similar part; on one rank all micro-steps are similar, because
            nothing is reduced.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How much runs of one configuration differ on this device: ties, rounds and claims use this one figure.

    Attributes:
        sd: Standard deviation of the logarithm of the step time between runs, about a share of it.
        freedom: Degrees of freedom behind it; 0: nothing was measured, and `assumed` stands for it.
        assumed: Where few runs were repeated: RUN_SPREAD, or `core_spread` where that is more.
    """

    sd: float = RUN_SPREAD
    freedom: int = 0
    assumed: float = RUN_SPREAD

    @classmethod
    def of(cls, runs: Iterable[Sequence[float]], assumed: float = RUN_SPREAD) -> Spread:
        """The pooled spread of several configurations; each has the step times of its runs, in any unit."""
        logs = [np.log(np.asarray(times, dtype=float)) for times in runs if len(times) > 1]
        freedom = sum(len(times) - 1 for times in logs)
        if not freedom:
            return cls(sd=assumed, assumed=assumed)
        squares = sum(float(np.sum((times - times.mean()) ** 2)) for times in logs)
        return cls(sd=math.sqrt(squares / freedom), freedom=freedom, assumed=assumed)

    def of_ratio(self, squares: float = 0.0, freedom: int = 0) -> tuple[float, int]:
        """(standard deviation of the log ratio of two runs, degrees of freedom), with what the rounds themselves show.

        What is assumed is a conjugate prior on the variance that makes up for what is not measured yet.

        Args:
            squares: Sum of squared deviations of the rounds' log ratios.
            freedom: Its degrees of freedom.
        """
        measured = min(self.freedom, MOST_FREEDOM)
        assumed = max(0, PRIOR_ROUNDS - measured)
        total = 2 * (assumed * self.assumed**2 + measured * self.sd**2) + squares
        return math.sqrt(total / (assumed + measured + freedom)), assumed + measured + freedom

    def describe(self) -> str:
        """`1.2 % between runs, measured over 4 repeats`."""
        if not self.freedom:
            how = (
                "assumed"
                if self.assumed in (RUN_SPREAD, SLICED.assumed)
                else "by the speed of this machine's cores, which changes"
            )
            return f"{self.sd:.1%} between runs, {how}"
        return f"{self.sd:.1%} between runs, measured over {self.freedom} repeat{'s' if self.freedom > 1 else ''}"


def core_spread(windows: Iterable[Window | None]) -> float:
    """How much runs differ because the cores' speed changes by itself: a standard deviation of the logarithm.

    In: the windows of trials, of any configurations. Out: RUN_SPREAD at the least. It is the spread of the speed of a
    core between trials (`probes.cpu.time_core`, at the ends of each stretch of a window and within). Those readings are
    moments; what lies between two of them and lasts longer than a core keeps its speed (CORRELATED_S) differs by less,
    as a mean does.

    Repeats are few in a search, and two of a configuration agree by chance: of 60 searches of two equal values on a
    machine whose cores changed by 19 % from one second to the next, 5 claimed a gain without this figure.
    """
    known = [(math.log(w.core_s), w.seconds / max(1, w.core_readings - 1)) for w in windows if w and w.core_s]
    if len(known) < 2:
        return RUN_SPREAD
    longest_s = statistics.median(stretch_s for _, stretch_s in known)
    variance = statistics.variance(log for log, _ in known) * min(1.0, CORRELATED_S / max(longest_s, 1e-9))
    return max(RUN_SPREAD, math.sqrt(variance))


ASSUMED = Spread()
"""Where nothing was measured yet."""

SLICED = Spread(sd=0.04, assumed=0.04)
"""Between runs that shared the machine in slices (slices.py), before their rounds show more. What changes the speed of
its cores changes all of them; what is left differs between processes. Measured between equal runs on two shared cores:
2.1 % (products of small matrices), 2.8 % (a few layers), 3.9 and 4.3 % (a small training: 16 rounds, and 69 rounds of
`python -m benchmarks.false_wins --case same`); of a GPT-2 less: three rounds differed by 2.4 %."""


@lru_cache(maxsize=256)
def student_quantile(freedom: int, tail: float) -> float:
    """The value that Student's t exceeds with a probability of `tail`, by bisection on its integral.

    With t = sqrt(freedom) tan(angle) its density is proportional to cos(angle)^(freedom - 1), which is smooth.
    """
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp(1 - 2 * tail, below / below[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


def half_width(spread: Spread, rounds: int, *, squares: float = 0.0, chosen_from: int = 1, mean: bool = False) -> float:
    """Half the width of the 95 % interval of a log ratio over some rounds: of its median, or of its mean."""
    sd, freedom = spread.of_ratio(squares, rounds - 1)
    half = student_quantile(freedom, 0.025 / chosen_from) * sd / math.sqrt(rounds)
    return half * MEDIAN_WIDTH if rounds > 2 and not mean else half


def ratio_interval(
    candidate: Sequence[Interval],
    reference: Sequence[Interval],
    spread: Spread = ASSUMED,
    *,
    chosen_from: int = 1,
    sliced: bool = False,
) -> Interval:
    """How many times faster the candidate is: reference step time over candidate step time.

    Args:
        candidate: One interval of the step time per run; the i-th runs of both were made side by side.
        reference: The same.
        spread: Between runs on this device.
        chosen_from: If the candidate was chosen by these very runs: among how many it was the best. The best of many
            looks faster than it is, so the level is divided by their number (Bonferroni).
        sliced: The runs of each round shared the machine in slices (`Trial.pauses`).

    The median is the ratio of the pooled runs (`pool_runs`). So the figures shown for both agree with their ratio, and
    one disturbed run of three does not change it. The width is from Student's t on the log ratios of the rounds, times
    MEDIAN_WIDTH where medians are taken. (A percentile bootstrap over three rounds would claim a difference whenever
    all three ratios are on the same side of 1, which is one case in four between equals.) A few rounds say little about
    the spread between runs, so what is known of it counts too. For a single round the intervals within its runs are
    added. In slices the two runs of a round belong together, and rounds differ as the machine does: the ratio is the
    geometric mean of theirs, and so are the figures shown.
    """
    rounds = min(len(candidate), len(reference))
    assert rounds >= 1, "a ratio needs a run of each"
    candidate, reference = candidate[:rounds], reference[:rounds]
    logs = np.array([math.log(r.median / c.median) for c, r in zip(candidate, reference, strict=True)])
    pooled = [pool_runs(runs, mean=sliced).median for runs in (reference, candidate)]
    middle = math.log(pooled[0] / pooled[1])
    squares = float(np.sum((logs - logs.mean()) ** 2))
    half = half_width(spread, rounds, squares=squares, chosen_from=chosen_from, mean=sliced)
    if rounds == 1 and not sliced:  # what varies within these varies in both
        half = math.hypot(half, _log_half_width(candidate[0]), _log_half_width(reference[0]))
    return Interval(median=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half), samples=rounds)


def _log_half_width(interval: Interval) -> float:
    return 0.5 * math.log(interval.high / interval.low) if interval.low > 0 else 1.0


def pool_runs(runs: Sequence[Interval], *, mean: bool = False) -> Interval:
    """One interval for several runs of a configuration: the median of their medians, the lowest and the highest bound.

    The median of an even number of runs is the geometric mean of the two in the middle, because ratios are compared.
    With `mean` it is the geometric mean of all.
    """
    if len(runs) == 1:
        return runs[0]
    middle = statistics.fmean if mean else statistics.median
    return Interval(
        median=math.exp(middle([math.log(run.median) for run in runs])),
        low=min(run.low for run in runs),
        high=max(run.high for run in runs),
        samples=sum(run.samples for run in runs),
    )


# When a look ends early.

STEP_SD, COLD_SD = 0.03, 0.10
"""Standard deviations of the logarithm of a step within one process, before any was seen: after the warm-up, and of
expensive micro-steps that count from the second one on. Assumed; they count as much as PRIOR_STEPS samples."""

PRIOR_STEPS = 4.0
"""Degrees of freedom behind STEP_SD and COLD_SD: the inverse gamma prior on the variance. Assumed."""

STEP_CORRELATION = 0.5
"""Correlation of successive steps of a process, as of an autoregression of order 1: a slow moment outlasts a step.
Assumed. By simulation equals are dropped no more often than the level says at 0.8 too, and at ten times STEP_SD."""

MIXTURE = 100.0
"""Variance of the mixture over how far the mean is off, in variances of a step. The bound holds for each value; this
one makes it narrow at 2 to 10 samples."""


class ToBeat(Record):
    """An estimate of the step time that a candidate has to beat, and when the candidate may be dropped for it."""

    log_s: float = Field(description="natural logarithm of the leader's step time in seconds: the median of its runs")
    sd: float = Field(ge=0, description="standard deviation of `log_s`, with what differs between runs")
    run_sd: float = Field(
        default=RUN_SPREAD, ge=0, description="standard deviation of the logarithm between runs of one configuration"
    )
    freedom: int = Field(default=PRIOR_ROUNDS, ge=1, description="degrees of freedom behind both deviations")
    level: float = Field(
        gt=0, lt=1, description="chance that a candidate that is as fast is dropped; corrected for the number of looks"
    )
    slack: float = Field(
        default=0.0, ge=0, description="natural logarithm of how much longer its step may be for a load of its own"
    )


def compare(steps_s: Sequence[float], to_beat: ToBeat, *, sd: float = STEP_SD) -> float | None:
    """Compares a candidate with the leader after one more sample.

    Args:
        steps_s: Seconds of whole steps so far, all of one process; or what they would be by the samples of a part.
        to_beat: The leader.
        sd: Assumed standard deviation of the logarithm of a sample.

    Returns:
        None, unless the candidate's step is longer than the leader's, which only a short look can say wrongly
        (`ToBeat.level`). Then the seconds that it takes at least, by the same bound without the leader.
    """
    logs = [math.log(seconds) for seconds in steps_s]
    low = math.fsum(logs) / len(logs) - sequence_half_width(logs, to_beat.level / 2, sd=sd)
    runs = student_quantile(to_beat.freedom, to_beat.level / 2)
    behind = low - runs * math.hypot(to_beat.run_sd, to_beat.sd) > to_beat.log_s + to_beat.slack
    return math.exp(low - runs * to_beat.run_sd) if behind else None


def sequence_half_width(logs: Sequence[float], level: float, *, sd: float = STEP_SD) -> float:
    """Half the width of a confidence sequence for the mean of normal samples whose variance is not known; may be inf.

    Robbins' normal mixture (Robbins 1970, Statistical Methods Related to the Law of the Iterated Logarithm) for an
    unknown variance: the likelihood of the samples with the mean mixed over N(mean, MIXTURE x variance) over that with
    the mean itself, the variance mixed over an inverse gamma prior in both. With d = distance of the mean,
    S = PRIOR_STEPS sd^2 + sum of squared deviations, m = effective samples, v = 1 + MIXTURE m:

        v^(-1/2) [(S + m d^2) / (S + m d^2 / v)]^((PRIOR_STEPS + m) / 2)

    It is a martingale that begins at 1, so its chance to ever pass 1 / level is at most that level, on average over the
    prior (Ville's inequality; Lai 1976, On Confidence Sequences; Wang and Ramdas 2024, Anytime-valid t-tests, with the
    improper prior). The width is the d at which it does. m is less than the number of samples since these are
    correlated (`effective`).
    """
    samples = effective(len(logs))
    mean = math.fsum(logs) / len(logs)
    squares = samples / len(logs) * math.fsum((log - mean) ** 2 for log in logs) + PRIOR_STEPS * sd**2
    wider = 1 + MIXTURE * samples
    ratio = (math.sqrt(wider) / level) ** (2 / (PRIOR_STEPS + samples))
    if ratio >= wider:
        return math.inf
    return math.sqrt(squares * (ratio - 1) / (1 - ratio / wider) / samples)


def effective(samples: int, correlation: float = STEP_CORRELATION) -> float:
    """As many independent samples have a mean as sure as that of these (Priestley 1981, section 5.3.2)."""
    lags = math.fsum((1 - lag / samples) * correlation**lag for lag in range(1, samples))
    return samples / (1 + 2 * lags)
