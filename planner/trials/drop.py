"""When a look at a candidate ends early: once its step is longer than the leader's, by a bound that holds at each look.

In: the logarithms of the step times that one process has seen so far, and what is known of the leader (`ToBeat`). Out:
whether the candidate is behind, and how long its step takes at least.

A candidate is compared after every sample, so a bound for one comparison would drop equals too often: some sample
always comes at a bad moment. The bound here is a confidence sequence, which holds at all moments together. And a
process as a whole is faster or slower than another one of the same configuration; no number of its steps shows that.
So the bound has two parts, each with half of the level:

    mean of the logarithms - within(samples) - between(runs)  >  logarithm of the leader's step time
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from autoplan.planner.trials.measure import PRIOR_ROUNDS, RUN_SPREAD, student_quantile
from autoplan.record import Record

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
    """What is known of the step time that a candidate has to beat, and when it may be dropped for it."""

    log_s: float = Field(description="natural logarithm of the leader's step time in seconds: the median of its runs")
    sd: float = Field(ge=0, description="standard deviation of `log_s`, with what differs between runs")
    run_sd: float = Field(
        default=RUN_SPREAD, ge=0, description="standard deviation of the logarithm between runs of one configuration"
    )
    freedom: int = Field(default=PRIOR_ROUNDS, ge=1, description="degrees of freedom behind both deviations")
    level: float = Field(
        gt=0, lt=1, description="chance that a candidate that is as fast is dropped; corrected for the number of looks"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A candidate against the leader, by the samples so far.

    Attributes:
        behind: Its step is longer than the leader's; only a short look can say so wrongly (`ToBeat.level`).
        at_least_s: Its step takes so many seconds at least, by the same bound without the leader.
    """

    behind: bool
    at_least_s: float


def compare(steps_s: Sequence[float], to_beat: ToBeat, *, sd: float = STEP_SD) -> Compared:
    """Compares a candidate with the leader after one more sample.

    Args:
        steps_s: Seconds of whole steps so far, all of one process; or what they would be by the samples of a part.
        to_beat: The leader.
        sd: Assumed standard deviation of the logarithm of a sample.
    """
    logs = [math.log(seconds) for seconds in steps_s]
    low = math.fsum(logs) / len(logs) - half_width(logs, to_beat.level / 2, sd=sd)
    runs = student_quantile(to_beat.freedom, to_beat.level / 2)
    return Compared(
        behind=low - runs * math.hypot(to_beat.run_sd, to_beat.sd) > to_beat.log_s,
        at_least_s=math.exp(low - runs * to_beat.run_sd),
    )


def half_width(logs: Sequence[float], level: float, *, sd: float = STEP_SD) -> float:
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
