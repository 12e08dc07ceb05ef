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

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.plan import Prediction
from autoplan.planner.trials.outcome import Outcome, Trial
from autoplan.strategies.config import KNOBS, TrainingConfig

Array = NDArray[np.float64]

KNOB_DISTANCE = 0.3
"""Two configurations that differ in one knob correlate by exp(-0.3) = 0.74, in two by 0.55, and so on."""

NUMBERS = ("micro_batch", "threads", "dp_replicate", "dp_shard", "tp", "pp", "pp_microbatches", "virtual_stages")
"""Knobs whose distance is the logarithm of the ratio (one per doubling), not equal or not."""

MIN_WIDTH = 0.03
"""Least prior standard deviation of a logarithm: no prediction is better than 3 %."""

NOISE = 0.02
"""Standard deviation of a measured logarithm: the width at which a trial stops measuring."""

Z_90 = 1.645


@dataclass(frozen=True, kw_only=True, slots=True)
class Belief:
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


class Surrogate:
    """Beliefs over a fixed list of candidates.

    Args:
        candidates: The legal configurations that may fit.
        memory_limit_bytes: The limit on the peak.
    """

    def __init__(self, candidates: Sequence[TrainingConfig], memory_limit_bytes: float) -> None:
        self.candidates = tuple(candidates)
        self.memory_limit_bytes = memory_limit_bytes
        self._codes = encode(self.candidates)

    def believe(
        self,
        predictions: Sequence[Prediction],
        trials: Sequence[Trial],
        trial_predictions: Sequence[Prediction],
    ) -> Belief:
        """What is believed now.

        Args:
            predictions: One per candidate, from the cost model as it is calibrated now.
            trials: The finished trials.
            trial_predictions: One per trial, from the same cost model.
        """
        time_mean, time_sd = _log_normal(
            [(p.step_time_s, p.step_time_low_s, p.step_time_high_s) for p in predictions]
        )
        memory_mean, memory_sd = _log_normal(
            [(p.peak_memory_bytes, p.peak_memory_low_bytes, p.peak_memory_high_bytes) for p in predictions]
        )
        timed = [i for i, trial in enumerate(trials) if trial.step_time_s is not None]
        weighed = [i for i, trial in enumerate(trials) if self._seen_memory(trial) is not None]
        time_mean, time_sd = self._condition(
            time_mean,
            time_sd,
            [trials[i].config for i in timed],
            np.array([math.log(trials[i].step_time_s.median) for i in timed]),  # type: ignore[union-attr]
            *_log_normal(
                [
                    (p.step_time_s, p.step_time_low_s, p.step_time_high_s)
                    for p in (trial_predictions[i] for i in timed)
                ]
            ),
        )
        memory_mean, memory_sd = self._condition(
            memory_mean,
            memory_sd,
            [trials[i].config for i in weighed],
            np.array([math.log(self._seen_memory(trials[i]) or 1.0) for i in weighed]),
            *_log_normal(
                [
                    (p.peak_memory_bytes, p.peak_memory_low_bytes, p.peak_memory_high_bytes)
                    for p in (trial_predictions[i] for i in weighed)
                ]
            ),
        )
        room = (math.log(max(self.memory_limit_bytes, 1.0)) - memory_mean) / memory_sd
        return Belief(
            log_time=time_mean,
            log_time_sd=time_sd,
            fits=normal_cdf(room),
            works=self._works(trials),
        )

    def _seen_memory(self, trial: Trial) -> float | None:
        """The peak a trial showed; where it ran out of memory, a little above the limit."""
        if trial.outcome is Outcome.OUT_OF_MEMORY:
            return max(1.05 * self.memory_limit_bytes, float(trial.peak_memory_bytes or 0))
        if trial.outcome is Outcome.OK and trial.peak_memory_bytes:
            return float(trial.peak_memory_bytes)
        return None

    def _condition(
        self,
        mean: Array,
        sd: Array,
        configs: Sequence[TrainingConfig],
        seen: Array,
        seen_mean: Array,
        seen_sd: Array,
    ) -> tuple[Array, Array]:
        """The posterior mean and standard deviation of each candidate, given what was seen at some configurations."""
        if not configs:
            return mean, sd
        codes = encode(configs)
        among = similarity(codes, codes) * np.outer(seen_sd, seen_sd)
        among[np.diag_indices_from(among)] += NOISE**2
        across = similarity(self._codes, codes) * np.outer(sd, seen_sd)
        solved = np.linalg.solve(among, across.T)
        new_mean = mean + solved.T @ (seen - seen_mean)
        variance = sd**2 - np.einsum("ij,ji->i", across, solved)
        return new_mean, np.sqrt(np.maximum(variance, (0.25 * MIN_WIDTH) ** 2))

    def _works(self, trials: Sequence[Trial]) -> Array:
        """By neighbours: one success is assumed beforehand; memory and time are judged elsewhere."""
        failed = (Outcome.CRASHED, Outcome.NONFINITE, Outcome.UNSUPPORTED, Outcome.TIMEOUT)
        told = [trial for trial in trials if trial.outcome in (Outcome.OK, Outcome.PRUNED, *failed)]
        if not told:
            return np.ones(len(self.candidates))
        near = similarity(self._codes, encode([trial.config for trial in told])) ** 3
        bad = np.array([float(trial.outcome in failed) for trial in told])
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
        difference = np.abs(a[:, column][:, None] - b[:, column][None, :])
        distance += np.minimum(difference, 3.0) if knob in NUMBERS else np.minimum(difference, 1.0)
    return np.exp(-KNOB_DISTANCE * distance)


def expected_improvement(belief: Belief, best_log_time: float) -> Array:
    """Expected gain in log step time over the best (Jones et al. 1998, equation 15), times the chance to run at all."""
    z = (best_log_time - belief.log_time) / belief.log_time_sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    gain = (best_log_time - belief.log_time) * normal_cdf(z) + belief.log_time_sd * density
    return np.maximum(gain, 0.0) * belief.fits * belief.works


def normal_cdf(z: Array) -> Array:
    """The standard normal distribution function."""
    return 0.5 * (1.0 + np.array([math.erf(value) for value in z / math.sqrt(2.0)]))


def _log_normal(bounds: Sequence[tuple[float, float, float]]) -> tuple[Array, Array]:
    """Mean and standard deviation of the logarithm from (middle, low, high) with low and high at 90 %."""
    if not bounds:
        return np.zeros(0), np.zeros(0)
    table = np.log(np.maximum(np.array(bounds, dtype=float), 1e-12))
    return table[:, 0], np.maximum((table[:, 2] - table[:, 1]) / (2 * Z_90), MIN_WIDTH)
