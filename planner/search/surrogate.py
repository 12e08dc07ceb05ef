"""The surrogate model: predicts step time and memory of every candidate from the cost model and the trials so far.

In: the cost model's predictions (the prior) and the finished trials. Out: a `Posterior` over the candidates.

It is a Gaussian process over the logarithms of step time and peak memory (Rasmussen and Williams, Gaussian Processes
for Machine Learning, 2006, equations 2.25-2.26). The prior mean and width are the cost model's prediction and its
interval. A trial changes the posterior of a candidate more, the more knobs the two share. With a few dozen trials and
some ten thousand candidates it takes milliseconds.
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
"""Two configurations that differ in one knob correlate by exp(-0.3) = 0.74, in two by exp(-0.6) = 0.55, and so on."""

MIN_TIME_WIDTH, MIN_MEMORY_WIDTH = 0.08, 0.03
"""Lower limits of the prior standard deviations of the logarithms. Assumed: even a calibrated prediction of the time of
an untried configuration is off by some 8 %; so candidates near the best are tried while there is time."""

NOISE = 0.02
"""Standard deviation of a measured logarithm: the width at which a trial stops measuring."""

Z_90 = 1.645


@dataclass(frozen=True, kw_only=True, slots=True)
class Posterior:
    """What the model predicts of each candidate after the trials; arrays over the candidates.

    Attributes:
        log_time, log_time_sd: Natural logarithm of the step time in seconds: mean and standard deviation.
        fits: Probability that the peak stays within the limit.
        works: Probability that it runs at all, by how the trials of similar configurations ended.
        log_memory, log_memory_sd: Natural logarithm of the peak in bytes.
    """

    log_time: Array
    log_time_sd: Array
    fits: Array
    works: Array
    log_memory: Array | None = None
    log_memory_sd: Array | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """The cost model's predictions of some configurations: means and standard deviations of natural logarithms.

    Time is in seconds, memory in bytes.
    """

    log_time: Array
    log_time_sd: Array
    log_memory: Array
    log_memory_sd: Array

    @classmethod
    def of(cls, table: CostTable) -> Prior:
        """From the estimator's columns; their bounds are 90 % intervals."""
        time, time_sd = _log_normal(table.step_time_s, table.step_time_low_s, table.step_time_high_s, MIN_TIME_WIDTH)
        memory, memory_sd = _log_normal(
            table.peak_memory_bytes, table.peak_memory_low_bytes, table.peak_memory_high_bytes, MIN_MEMORY_WIDTH
        )
        return cls(log_time=time, log_time_sd=time_sd, log_memory=memory, log_memory_sd=memory_sd)


class Surrogate:
    """The Gaussian process over a fixed list of candidates.

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

    def posterior(self, prior: Prior, trials: Sequence[Trial], trial_prior: Prior) -> Posterior:
        """The posterior of all candidates.

        Args:
            prior: The cost model's predictions of the candidates, as it is calibrated now.
            trials: The finished trials.
            trial_prior: The same model's predictions of the configurations of the trials.
        """
        timed = [i for i, trial in enumerate(trials) if trial.step_time_s is not None]
        with_peak = [i for i, trial in enumerate(trials) if self._observed_peak_bytes(trial) is not None]
        codes = encode([trial.config for trial in trials])
        times = np.array([math.log(trials[i].step_time_s.median) for i in timed])  # type: ignore[union-attr]
        log_time, log_time_sd = self._condition(
            prior.log_time, prior.log_time_sd, codes[timed], times, trial_prior.log_time[timed],
            trial_prior.log_time_sd[timed],
        )  # fmt: skip
        peaks = np.array([math.log(self._observed_peak_bytes(trials[i]) or 1.0) for i in with_peak])
        log_memory, log_memory_sd = self._condition(
            prior.log_memory, prior.log_memory_sd, codes[with_peak], peaks, trial_prior.log_memory[with_peak],
            trial_prior.log_memory_sd[with_peak],
        )  # fmt: skip
        margin = (self._log_shares - log_memory) / log_memory_sd
        return Posterior(
            log_time=log_time,
            log_time_sd=log_time_sd,
            fits=normal_cdf(margin),
            works=self._works(trials, codes),
            log_memory=log_memory,
            log_memory_sd=log_memory_sd,
        )

    def _observed_peak_bytes(self, trial: Trial) -> float | None:
        """The peak of a trial; 5 % above the limit if it ran out of memory (assumed); None if it has none."""
        if trial.outcome is Outcome.OUT_OF_MEMORY:
            share = memory_share_bytes(trial.config, self.memory_limit_bytes, self.device)
            return max(1.05 * share, float(trial.peak_memory_bytes or 0))
        if trial.outcome is Outcome.OK and trial.peak_memory_bytes:
            return float(trial.peak_memory_bytes)
        return None

    def _condition(
        self, mean: Array, sd: Array, codes: Array, observed: Array, observed_mean: Array, observed_sd: Array
    ) -> tuple[Array, Array]:
        """The posterior mean and standard deviation of each candidate, given observations at some configurations."""
        if not len(codes):
            return mean, sd
        covariance = similarity(codes, codes) * np.outer(observed_sd, observed_sd)
        covariance[np.diag_indices_from(covariance)] += NOISE**2
        cross = similarity(self._codes, codes) * np.outer(sd, observed_sd)
        gain = np.linalg.solve(covariance, cross.T)
        new_mean = mean + gain.T @ (observed - observed_mean)
        variance = sd**2 - np.einsum("ij,ji->i", cross, gain)
        return new_mean, np.sqrt(np.maximum(variance, (0.5 * NOISE) ** 2))

    def _works(self, trials: Sequence[Trial], codes: Array) -> Array:
        """The probability that each candidate runs: the weighted share of similar trials that did, plus one success.

        A failure counts as three. Trials that ran out of memory do not count, since `fits` is about them, nor do those
        that the budget's end stopped.
        """
        failed = (Outcome.CRASHED, Outcome.NONFINITE, Outcome.UNSUPPORTED, Outcome.TIMEOUT)
        known = (Outcome.OK, Outcome.PRUNED, *failed)
        judged = [i for i, trial in enumerate(trials) if trial.outcome in known and not trial.budget_ended]
        if not judged:
            return np.ones(len(self.candidates))
        near = similarity(self._codes, codes[judged]) ** 3
        bad = np.array([float(trials[i].outcome in failed) for i in judged])
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
    """exp(-KNOB_DISTANCE x distance). The distance counts knobs that differ; for numbers, doublings (at most 3)."""
    distance = np.zeros((len(a), len(b)))
    for column, knob in enumerate(KNOBS):
        if np.ptp(np.concatenate([a[:, column], b[:, column]])) == 0:
            continue
        difference = np.abs(a[:, column][:, None] - b[:, column][None, :])
        distance += np.minimum(difference, 3.0 if knob in NUMBERS else 1.0)
    return np.exp(-KNOB_DISTANCE * distance)


def expected_improvement(posterior: Posterior, best_log_time: float) -> Array:
    """Expected gain in log step time over the best (Jones et al. 1998, equation 15), times the chance to run at all."""
    z = (best_log_time - posterior.log_time) / posterior.log_time_sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    gain = (best_log_time - posterior.log_time) * normal_cdf(z) + posterior.log_time_sd * density
    return np.maximum(gain, 0.0) * posterior.fits * posterior.works


def normal_cdf(z: Array) -> Array:
    """The standard normal distribution function."""
    return 0.5 * (1.0 + _erf(z / math.sqrt(2.0)))


_erf = np.vectorize(math.erf, otypes=[float])


def _log_normal(middle: Array, low: Array, high: Array, least_sd: float) -> tuple[Array, Array]:
    """Mean and standard deviation (at least `least_sd`) of the logarithm, from a median and a 90 % interval."""
    width = np.log(np.maximum(high, 1e-12)) - np.log(np.maximum(low, 1e-12))
    return np.log(np.maximum(middle, 1e-12)), np.maximum(width / (2 * Z_90), least_sd)
