"""The surrogate model: predicts step time and memory of every candidate from the cost model and the trials so far.

In: the cost model's predictions (the prior) and the finished trials. Out: a `Posterior` over the candidates.

It is a Gaussian process over the logarithms of step time and peak memory (Rasmussen and Williams, Gaussian Processes
for Machine Learning, 2006, equations 2.25-2.26). The prior mean and width are the cost model's prediction and its
interval. A trial changes the posterior of a candidate more, the more knobs the two share. With a few dozen trials and
some ten thousand candidates it takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.space.prune import memory_share_bytes
from autoplan.planner.trials.measure import RUN_SPREAD, core_spread
from autoplan.strategies.config import KNOBS, NUMBERS, TrainingConfig

if TYPE_CHECKING:
    from autoplan.planner.cost.traced.estimator import CostTable

Array = NDArray[np.float64]

KNOB_DISTANCE = 0.3
"""Two configurations that differ in one knob correlate by exp(-0.3) = 0.74, in two by exp(-0.6) = 0.55, and so on."""

OPTIMIZER_KNOBS = ("optimizer_step", "optimizer_state")
"""Knobs that change the time of the optimizer step alone, and so no more of a step than its share."""

WHOLE_SHARE = 0.2
"""Of a step, the optimizer's share from which on these knobs count like any other. Below it their distance falls with
the square of the share, so that the difference in time that is expected falls with the share. Chosen: of
predictions whose standard deviation is a tenth, another form of the optimizer step then takes a third more or less. (A
GPT-2 on a CPU, share 0.001, had looks at all three optimizer steps, a sixth of its ten minutes.)"""

MIN_TIME_WIDTH, MIN_MEMORY_WIDTH = 0.08, 0.03
"""Lower limits of the prior standard deviations of the logarithms. Assumed: even a calibrated prediction of the time of
an untried configuration is off by some 8 %; so candidates near the best are tried while there is time."""

NOISE = RUN_SPREAD
"""Standard deviation of a measured logarithm: what one process differs from the next."""

LEFT_OF_CORE = 0.7
"""What is left of the spread between looks after their times are those of one speed of the cores (`FOLLOWS_CORE`)."""

CORE_SD = 0.25
"""Standard deviation of that power, over programs. Assumed."""

Z_90, Z_95 = 1.645, 1.96


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """What is expected of some configurations: mean and standard deviation of the natural logarithms of s and bytes."""

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

    @classmethod
    def joined(cls, priors: Sequence[Prior]) -> Prior:
        """Of all their configurations, in their order."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: np.concatenate([getattr(prior, name) for prior in priors]) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Posterior(Prior):
    """The same of each candidate after the trials.

    Attributes:
        fits: Probability that the peak stays within the limit.
        works: Probability that it runs and passes its check, by how the trials and checks of similar ones ended.
    """

    fits: Array
    works: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Observed logarithms of some configurations, whose rows are `codes` (`encode`), beside the prior there.

    `noise` is the standard deviation of each around the truth; `weights` are of the knobs in `similarity`.
    """

    codes: Array
    values: Array
    mean: Array
    sd: Array
    noise: Array
    weights: Mapping[str, float] = field(default_factory=dict)

    def predict(self, codes: Array, mean: Array, sd: Array) -> tuple[Array, Array]:
        """The posterior mean and standard deviation at other configurations, whose prior is given."""
        if not len(self.codes):
            return mean, sd
        covariance = similarity(self.codes, self.codes, self.weights) * np.outer(self.sd, self.sd)
        covariance[np.diag_indices_from(covariance)] += self.noise**2
        cross = similarity(codes, self.codes, self.weights) * np.outer(sd, self.sd)
        gain = np.linalg.solve(covariance, cross.T)
        variance = sd**2 - np.einsum("ij,ji->i", cross, gain)
        return mean + gain.T @ (self.values - self.mean), np.sqrt(np.maximum(variance, (0.5 * NOISE) ** 2))


def _timed(trials: Sequence[Trial], codes: Array, prior: Prior) -> Observed:
    """The observed step times; those of which only a lower bound is known as the values that say the same.

    The noise of a time is what one process differs from the next (more where the cores change their speed by
    themselves), the width of its own interval, what disturbed it, and a part of what its core differed from the others.
    """
    spread = max(RUN_SPREAD, LEFT_OF_CORE * core_spread(trial.window for trial in trials))
    apart, weights = CORE_SD * _cores_apart(trials), time_weights(trials)
    exact = [i for i, trial in enumerate(trials) if trial.step_time_s is not None and trial.at_least_s is None]
    late = [i for i, trial in enumerate(trials) if trial.at_least_s is not None]
    steps = [trials[i].step_time_s for i in exact]

    def at(places: list[int], values: Array, noise: Array) -> Observed:
        mean, sd = prior.log_time[places], prior.log_time_sd[places]
        return Observed(codes=codes[places], values=values, mean=mean, sd=sd, noise=noise, weights=weights)

    observed = at(
        exact,
        np.array([math.log(step.median) for step in steps if step is not None]),
        np.array([math.hypot(_noise(trials[i], spread), apart[i]) for i in exact]),
    )
    if not late:
        return observed
    bounds = np.log(np.array([trials[i].at_least_s for i in late], dtype=float))
    values, noise = as_value(bounds, *observed.predict(codes[late], prior.log_time[late], prior.log_time_sd[late]))
    return at(exact + late, np.concatenate([observed.values, values]), np.concatenate([observed.noise, noise]))


def time_weights(trials: Sequence[Trial]) -> dict[str, float]:
    """What the knobs count whose part of the step is known by now: by the largest share that a trial saw."""
    shares = [
        trial.parts_s["optimizer_step"] / trial.step_time_s.median
        for trial in trials
        if trial.step_time_s is not None and "optimizer_step" in trial.parts_s
    ]
    return dict.fromkeys(OPTIMIZER_KNOBS, min(1.0, (max(shares) / WHOLE_SHARE) ** 2)) if shares else {}


def _cores_apart(trials: Sequence[Trial]) -> Array:
    """By how much the core of each trial was slower or faster than in most of them: natural logarithms."""
    logs = [math.log(w.core_s) if (w := trial.window) is not None and w.core_s else math.nan for trial in trials]
    if np.isnan(logs).all():
        return np.zeros(len(trials))
    return np.nan_to_num(np.abs(np.array(logs) - np.nanmedian(logs)))


def _noise(trial: Trial, spread: float) -> float:
    assert trial.step_time_s is not None, "only a timed trial has noise"
    step = trial.step_time_s
    within = math.log(step.high / step.low) / (2 * Z_95) if 0 < step.low <= step.high < math.inf else 1.0
    return math.hypot(spread, within, trial.disturbed_sd)


def as_value(bounds: Array, mean: Array, sd: Array) -> tuple[Array, Array]:
    """Lower bounds as values with noise, so that a normal N(mean, sd) learns as much from one as from the other.

    The mean and the variance of a normal that is cut off below the bound (Tobin 1958) are those after observing such a
    value: the site of one step of expectation propagation (Minka 2001; Rasmussen and Williams, section 3.6). Far above
    the bound the noise is so wide that nothing changes.

    Args:
        bounds: Logarithms of seconds that a step takes at least; measured, so with NOISE.
        mean, sd: What the other trials say of them.
    """
    wide = np.hypot(sd, NOISE)
    z = np.clip((bounds - mean) / wide, -30.0, 30.0)
    hazard = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi) / normal_cdf(-z)
    left = np.maximum(hazard * (hazard - z), 1e-12)  # by this share of itself the variance gets smaller
    return mean + wide * hazard / left, np.sqrt(np.maximum(wide**2 / left - sd**2, NOISE**2))


class Surrogate:
    """The Gaussian process over a fixed list of candidates; the memory limit is of a device, or on CPU of all ranks."""

    def __init__(self, candidates: Sequence[TrainingConfig], memory_limit_bytes: float, device: str) -> None:
        self.candidates = tuple(candidates)
        self.memory_limit_bytes = memory_limit_bytes
        self.device = device
        shares = [memory_share_bytes(config, memory_limit_bytes, device) for config in self.candidates]
        self._log_shares = np.log(np.maximum(np.array(shares), 1.0))
        self._codes = encode(self.candidates)

    def posterior(
        self, prior: Prior, trials: Sequence[Trial], trial_prior: Prior, refused: Collection[TrainingConfig] = ()
    ) -> Posterior:
        """The posterior of all candidates after the finished trials.

        `prior`, `trial_prior`: the cost model's predictions, as it is calibrated now, of the candidates and the trials;
        `refused` ran and failed their parity check.
        """
        with_peak = [i for i, trial in enumerate(trials) if self._observed_peak_bytes(trial) is not None]
        codes = encode([trial.config for trial in trials])
        timed = _timed(trials, codes, trial_prior)
        log_time, log_time_sd = timed.predict(self._codes, prior.log_time, prior.log_time_sd)
        peaks = np.array([math.log(self._observed_peak_bytes(trials[i]) or 1.0) for i in with_peak])
        weighed = Observed(
            codes=codes[with_peak],
            values=peaks,
            mean=trial_prior.log_memory[with_peak],
            sd=trial_prior.log_memory_sd[with_peak],
            noise=np.full(len(peaks), NOISE),
        )
        log_memory, log_memory_sd = weighed.predict(self._codes, prior.log_memory, prior.log_memory_sd)
        margin = (self._log_shares - log_memory) / log_memory_sd
        return Posterior(
            log_time=log_time,
            log_time_sd=log_time_sd,
            fits=normal_cdf(margin),
            works=self._works(trials, codes, refused),
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

    def _works(self, trials: Sequence[Trial], codes: Array, refused: Collection[TrainingConfig]) -> Array:
        """The probability that each candidate runs: the weighted share of similar trials that did, plus one success.

        A failure counts as three, also that of a parity check. Trials that ran out of memory do not count, since `fits`
        is about them, nor do those that the budget's end stopped.
        """
        failed = (Outcome.CRASHED, Outcome.NONFINITE, Outcome.UNSUPPORTED, Outcome.TIMEOUT)
        known = (Outcome.OK, Outcome.PRUNED, *failed)
        judged = [i for i, trial in enumerate(trials) if trial.outcome in known and not trial.budget_ended]
        if not judged:
            return np.ones(len(self.candidates))
        near = similarity(self._codes, codes[judged]) ** 3
        bad = np.array([float(trials[i].outcome in failed or trials[i].config in refused) for i in judged])
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


def similarity(a: Array, b: Array, weights: Mapping[str, float] | None = None) -> Array:
    """exp(-KNOB_DISTANCE x distance). The distance counts knobs that differ; for numbers, doublings (at most 3).

    `weights` has what a knob counts, where that is not 1.
    """
    distance = np.zeros((len(a), len(b)))
    for column, knob in enumerate(KNOBS):
        if np.ptp(np.concatenate([a[:, column], b[:, column]])) == 0:
            continue
        difference = np.abs(a[:, column][:, None] - b[:, column][None, :])
        distance += (weights or {}).get(knob, 1.0) * np.minimum(difference, 3.0 if knob in NUMBERS else 1.0)
    return np.exp(-KNOB_DISTANCE * distance)


def expected_improvement(posterior: Posterior, best_log_time: float) -> Array:
    """Expected gain in log step time over the best (Jones et al. 1998, equation 15), times the chance to run at all."""
    z = (best_log_time - posterior.log_time) / posterior.log_time_sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    gain = (best_log_time - posterior.log_time) * normal_cdf(z) + posterior.log_time_sd * density
    return np.maximum(gain, 0.0) * posterior.fits * posterior.works


def normal_cdf(z: Array) -> Array:
    """The standard normal distribution function."""
    return 0.5 * _erfc(-z / math.sqrt(2.0))


_erfc = np.vectorize(math.erfc, otypes=[float])


def _log_normal(middle: Array, low: Array, high: Array, least_sd: float) -> tuple[Array, Array]:
    """Mean and standard deviation (at least `least_sd`) of the logarithm, from a median and a 90 % interval."""
    width = np.log(np.maximum(high, 1e-12)) - np.log(np.maximum(low, 1e-12))
    return np.log(np.maximum(middle, 1e-12)), np.maximum(width / (2 * Z_90), least_sd)
