"""What is believed of every candidate: the cost model's prediction, corrected by the trials nearby.

A Gaussian process over the logarithms of step time and peak memory. The prior mean and width are the cost model's
prediction and its interval; candidates that share knobs share what a trial shows (Rasmussen and Williams, Gaussian
Processes for Machine Learning, 2006, equations 2.25-2.26). A few dozen trials and some ten thousand candidates: plain
linear algebra, milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.records import Outcome, Trial
from autoplan.planner.space.prune import memory_share_bytes
from autoplan.strategies.config import KNOBS, NUMBERS, TrainingConfig

if TYPE_CHECKING:
    from autoplan.planner.cost.traced.estimator import CostTable

Array = NDArray[np.float64]

KNOB_DISTANCE = 0.3
"""Two configurations that differ in one knob correlate by exp(-0.3) = 0.74, in two by 0.55, and so on."""

MIN_TIME_WIDTH, MIN_MEMORY_WIDTH = 0.08, 0.03
"""Least prior standard deviations of the logarithms: however well calibrated, a prediction of the time of a
configuration that was not tried is off by some 8 %, so that the near ones are tried while there is time."""

NOISE = 0.02
"""Standard deviation of a measured logarithm: the width at which a trial stops measuring."""

Z_90 = 1.645


@dataclass(frozen=True, kw_only=True, slots=True)
class Posterior:
    """What is believed of each candidate; arrays over the candidates.

    Attributes:
        log_time, log_time_sd: Natural logarithm of the step time in seconds: mean and standard deviation.
        fits: Probability that the peak stays within the limit.
        works: Probability that it runs at all, by what became of its neighbours.
    """

    log_time: Array
    log_time_sd: Array
    fits: Array
    works: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """The cost model's word on some configurations: means and standard deviations of natural logarithms.

    Time in seconds, memory in bytes.
    """

    log_time: Array
    log_time_sd: Array
    log_memory: Array
    log_memory_sd: Array

    @classmethod
    def of(cls, table: CostTable) -> Prior:
        """From the estimator's columns, whose bounds hold 90 %."""
        time, time_sd = _log_normal(table.step_time_s, table.step_time_low_s, table.step_time_high_s, MIN_TIME_WIDTH)
        memory, memory_sd = _log_normal(
            table.peak_memory_bytes, table.peak_memory_low_bytes, table.peak_memory_high_bytes, MIN_MEMORY_WIDTH
        )
        return cls(log_time=time, log_time_sd=time_sd, log_memory=memory, log_memory_sd=memory_sd)


class Surrogate:
    """Beliefs over a fixed list of candidates.

    Args:
        candidates: The legal configurations that may fit.
        memory_limit_bytes: The limit on the peak: of one device, or on CPU of all ranks together.
        device: cuda or cpu.
    """

    def __init__(self, candidates: Sequence[TrainingConfig], memory_limit_bytes: float, device: str) -> None:
        self.candidates = tuple(candidates)
        self.memory_limit_bytes = memory_limit_bytes
        self.device = device
        shares = [memory_share_bytes(config, memory_limit_bytes, device) for config in self.candidates]
        self._log_shares = np.log(np.maximum(np.array(shares), 1.0))
        self._codes = encode(self.candidates)

    def believe(self, prior: Prior, trials: Sequence[Trial], trial_prior: Prior) -> Posterior:
        """What is believed now.

        Args:
            prior: The cost model's word on the candidates, as it is calibrated now.
            trials: The finished trials.
            trial_prior: The same model's word on the trials' configurations.
        """
        timed = [i for i, trial in enumerate(trials) if trial.step_time_s is not None]
        weighed = [i for i, trial in enumerate(trials) if self._seen_memory(trial) is not None]
        codes = encode([trial.config for trial in trials])
        times = np.array([math.log(trials[i].step_time_s.median) for i in timed])  # type: ignore[union-attr]
        log_time, log_time_sd = self._condition(
            prior.log_time, prior.log_time_sd, codes[timed], times, trial_prior.log_time[timed],
            trial_prior.log_time_sd[timed],
        )  # fmt: skip
        peaks = np.array([math.log(self._seen_memory(trials[i]) or 1.0) for i in weighed])
        log_memory, log_memory_sd = self._condition(
            prior.log_memory, prior.log_memory_sd, codes[weighed], peaks, trial_prior.log_memory[weighed],
            trial_prior.log_memory_sd[weighed],
        )  # fmt: skip
        room = (self._log_shares - log_memory) / log_memory_sd
        return Posterior(
            log_time=log_time, log_time_sd=log_time_sd, fits=normal_cdf(room), works=self._works(trials, codes)
        )

    def _seen_memory(self, trial: Trial) -> float | None:
        """The peak a trial showed; where it ran out of memory, a little above the limit."""
        if trial.outcome is Outcome.OUT_OF_MEMORY:
            share = memory_share_bytes(trial.config, self.memory_limit_bytes, self.device)
            return max(1.05 * share, float(trial.peak_memory_bytes or 0))
        if trial.outcome is Outcome.OK and trial.peak_memory_bytes:
            return float(trial.peak_memory_bytes)
        return None

    def _condition(
        self, mean: Array, sd: Array, codes: Array, seen: Array, seen_mean: Array, seen_sd: Array
    ) -> tuple[Array, Array]:
        """The posterior mean and standard deviation of each candidate, given what was seen at some configurations."""
        if not len(codes):
            return mean, sd
        among = similarity(codes, codes) * np.outer(seen_sd, seen_sd)
        among[np.diag_indices_from(among)] += NOISE**2
        across = similarity(self._codes, codes) * np.outer(sd, seen_sd)
        solved = np.linalg.solve(among, across.T)
        new_mean = mean + solved.T @ (seen - seen_mean)
        variance = sd**2 - np.einsum("ij,ji->i", across, solved)
        return new_mean, np.sqrt(np.maximum(variance, (0.5 * NOISE) ** 2))

    def _works(self, trials: Sequence[Trial], codes: Array) -> Array:
        """By neighbours: one success is assumed beforehand; memory and time are judged elsewhere."""
        failed = (Outcome.CRASHED, Outcome.NONFINITE, Outcome.UNSUPPORTED, Outcome.TIMEOUT)
        told = [i for i, trial in enumerate(trials) if trial.outcome in (Outcome.OK, Outcome.PRUNED, *failed)]
        if not told:
            return np.ones(len(self.candidates))
        near = similarity(self._codes, codes[told]) ** 3
        bad = np.array([float(trials[i].outcome in failed) for i in told])
        good_weight = 1.0 + near @ (1 - bad)
        return good_weight / (good_weight + 3.0 * (near @ bad))


def encode(configs: Sequence[TrainingConfig]) -> Array:
    """Configurations as rows of numbers: one column per knob; numbers as logarithms to base 2, the rest as codes."""
    rows = np.zeros((len(configs), len(KNOBS)))
    for column, knob in enumerate(KNOBS):
        values = [getattr(config, knob) for config in configs]
        if knob in NUMBERS:
            rows[:, column] = [math.log2(value) if value else -1.0 for value in values]
        else:
            rows[:, column] = [_CODES.setdefault((knob, value), float(len(_CODES))) for value in values]
    return rows


_CODES: dict[tuple[str, object], float] = {}


def similarity(a: Array, b: Array) -> Array:
    """exp(-KNOB_DISTANCE x distance): the distance counts knobs that differ, doublings for numbers (at most 3)."""
    distance = np.zeros((len(a), len(b)))
    for column, knob in enumerate(KNOBS):
        if np.ptp(np.concatenate([a[:, column], b[:, column]])) == 0:
            continue
        difference = np.abs(a[:, column][:, None] - b[:, column][None, :])
        distance += np.minimum(difference, 3.0 if knob in NUMBERS else 1.0)
    return np.exp(-KNOB_DISTANCE * distance)


def expected_improvement(belief: Posterior, best_log_time: float) -> Array:
    """Expected gain in log step time over the best (Jones et al. 1998, equation 15), times the chance to run at all."""
    z = (best_log_time - belief.log_time) / belief.log_time_sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    gain = (best_log_time - belief.log_time) * normal_cdf(z) + belief.log_time_sd * density
    return np.maximum(gain, 0.0) * belief.fits * belief.works


def normal_cdf(z: Array) -> Array:
    """The standard normal distribution function."""
    return 0.5 * (1.0 + _erf(z / math.sqrt(2.0)))


_erf = np.vectorize(math.erf, otypes=[float])


def _log_normal(middle: Array, low: Array, high: Array, least_sd: float) -> tuple[Array, Array]:
    """Mean and standard deviation (at least `least_sd`) of the logarithm from a middle and bounds that hold 90 %."""
    width = np.log(np.maximum(high, 1e-12)) - np.log(np.maximum(low, 1e-12))
    return np.log(np.maximum(middle, 1e-12)), np.maximum(width / (2 * Z_90), least_sd)
