"""From the step time of a model cut to a few blocks to that of the whole model, and how far that can be trusted.

In: short trials, and the whole trials of the same search. Out: an extrapolated step time of each configuration that was
cut, and the comparison with those that ran whole too.

A step's time is a straight line in the number of blocks, part by part: embeddings, output head and loss are there
once, each block takes as long as the next one, and so does the optimizer with the parameters of each. So

    log(whole) = log(micro-steps x micro_ratio + optimizer step x optimizer_ratio) + level(configuration)

where both times are measured, cut, and the ratios are the cost model's: it traced the operations of a block and those
outside the blocks apart (planner/trace/linear_fit.py), timed them on this device, and knows what precision,
checkpointing and micro-batch change of each. The level is what it is off by for this model: mostly the same for all
configurations, and a little by their knobs. It is learnt from configurations that ran both ways, as a Gaussian process
with the surrogate's similarity of configurations (surrogate.py).

Two cut depths and the line through them would need no cost model. But the line through 2 and 4 of 12 blocks,
5 x T(4) - 4 x T(2), has 2.4 to 3.2 times the relative noise of one measurement (of blocks that take 6 % of a step each,
or 5), and with a large vocabulary T(2) and T(4) together cost about as much as the whole: GPT-2 of 124M parameters,
0.43 + 0.54.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.planner.records import Outcome, ShortTrial, ShortTrials, Trial
from autoplan.planner.search.surrogate import Array, encode, similarity
from autoplan.planner.trials.measure import Spread
from autoplan.strategies.config import TrainingConfig

LEVEL_SD = 0.2
"""How far the cost model's ratio is taken to be off before any configuration ran both ways, as a standard deviation of
its logarithm. Assumed: its parts are known to some 15 to 50 % (planner/cost/calibrate.py), and of an error of the
blocks against the rest about half comes through to the ratio of 12 blocks to 2."""

SHARED = 0.75
"""Of that variance, what all configurations of a model have in common; the rest goes by their knobs. A GPT of 12 blocks
(256 wide, 8,192 tokens), CPU time on one busy core: what the ratios say over the whole was 1.22, 1.27, 1.16 (bf16),
1.24; 1.09 with the fused loss, and with full checkpointing. Two runs of the same were up to 10 % apart."""

LEAST_SD = 0.03
"""Of an extrapolated step time's logarithm: no better is assumed, however well the checks agree."""

LIMIT_SDS = 2.0
"""The checks pass while their root mean square is within so many standard deviations of the log ratio of two runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolation:
    """What is known of the way from cut to whole step times.

    Attributes:
        configs, errors: What ran both ways, in order, and log(whole / what the ratios say) of each.
        run_sd: Standard deviation of the log ratio of two runs of one configuration.
        checks: Extrapolated over whole step time of each configuration that ran both ways, by those before it. The
            first has none before it: it sets the level, and is no check.
    """

    configs: tuple[TrainingConfig, ...]
    errors: tuple[float, ...]
    run_sd: float
    checks: tuple[float, ...]

    @property
    def pairs(self) -> int:
        """Configurations that ran both ways."""
        return len(self.configs)

    @property
    def allowed(self) -> float:
        """What the root mean square of the checks' logarithms may be."""
        return LIMIT_SDS * self.run_sd

    @property
    def error(self) -> float:
        """Root mean square of the checks' logarithms, the largest that it ever was: what disagreed once stays so."""
        squares = np.square(np.log(self.checks))
        return math.sqrt(max(np.cumsum(squares) / np.arange(1, len(squares) + 1), default=0.0))

    @property
    def why_not(self) -> str | None:
        """Why extrapolated step times are not to be used, a sentence; None: nothing speaks against it."""
        most = LIMIT_SDS * math.hypot(LEVEL_SD, self.run_sd)
        if self.errors and abs(self.errors[0]) > most:
            return (
                f"the first one that ran whole too took {math.exp(self.errors[0]):.2f} times what the cost model's "
                f"ratio says, and {math.exp(most):.2f} is the limit"
            )
        if self.error > self.allowed:
            return (
                f"extrapolated and whole step times differ by {self.error:.1%}, and runs of one configuration by "
                f"at most {self.allowed:.1%}"
            )
        return None

    def level(self, config: TrainingConfig) -> float:
        """What is to be added to the logarithm of what the ratios say."""
        return float(_levels(self.configs, self.errors, self.run_sd, [config])[0][0])

    def log_time(self, short: ShortTrial) -> float | None:
        """Logarithm of the whole step time in seconds; None: the short trial has no step time."""
        return None if short.whole_s is None else math.log(short.whole_s) + self.level(short.trial.config)

    def sds(self, configs: Sequence[TrainingConfig]) -> Array:
        """Standard deviations of the logarithms of extrapolated step times: a run's, the level's, and what is seen."""
        level_sd = _levels(self.configs, self.errors, self.run_sd, configs)[1]
        return np.maximum(np.hypot(level_sd, self.run_sd), max(LEAST_SD, self.error))


def extrapolate(shorts: Sequence[ShortTrial], trials: Sequence[Trial], spread: Spread) -> Extrapolation:
    """What the configurations that ran both ways say.

    Args:
        shorts: Short trials of a search.
        trials: Its whole trials.
        spread: Between runs on this device.
    """
    run_sd = spread.of_ratio()[0]
    pairs = _pairs(shorts, trials)
    configs, errors = tuple(config for config, _ in pairs), tuple(error for _, error in pairs)
    checks = []
    for count in range(1, len(pairs)):
        level = _levels(configs[:count], errors[:count], run_sd, [configs[count]])[0][0]
        checks.append(math.exp(float(level) - errors[count]))
    return Extrapolation(configs=configs, errors=errors, run_sd=run_sd, checks=tuple(checks))


def summary(shorts: Sequence[ShortTrial], trials: Sequence[Trial], spread: Spread) -> ShortTrials | None:
    """What a plan says of the short trials of its search; None: there were none."""
    if not shorts:
        return None
    found = extrapolate(shorts, trials, spread)
    return ShortTrials(trials=tuple(shorts), checks=found.checks, allowed=found.allowed, why_not=found.why_not)


def _levels(
    known: Sequence[TrainingConfig], errors: Sequence[float], run_sd: float, wanted: Sequence[TrainingConfig]
) -> tuple[Array, Array]:
    """Mean and standard deviation of the levels of some configurations, given the errors of others.

    A Gaussian process (Rasmussen and Williams 2006, equations 2.25-2.26) with mean 0 and noise run_sd.
    """
    sd = np.full(len(wanted), LEVEL_SD)
    if not known:
        return np.zeros(len(wanted)), sd
    codes = encode([*known, *wanted])
    mine, theirs = codes[: len(known)], codes[len(known) :]

    def covariance(a: Array, b: Array) -> Array:
        return LEVEL_SD**2 * (SHARED + (1 - SHARED) * similarity(a, b))

    cross = covariance(theirs, mine)
    gain = np.linalg.solve(covariance(mine, mine) + run_sd**2 * np.eye(len(known)), cross.T)
    variance = sd**2 - np.einsum("ij,ji->i", cross, gain)
    return gain.T @ np.array(errors), np.sqrt(np.maximum(variance, 0.0))


def _pairs(shorts: Sequence[ShortTrial], trials: Sequence[Trial]) -> list[tuple[TrainingConfig, float]]:
    """What ran both ways, in the order in which the second way ended, with log(whole / what the ratios say).

    Runs of the claim are left out: they have no part in a choice.
    """
    whole: dict[TrainingConfig, list[Trial]] = {}
    for trial in trials:
        if trial.outcome is Outcome.OK and trial.step_time_s is not None and trial.purpose != "claim":
            whole.setdefault(trial.config, []).append(trial)
    found: dict[TrainingConfig, tuple[int, float]] = {}
    for short in shorts:
        runs = whole.get(short.trial.config)
        if runs is None or short.whole_s is None or short.trial.outcome is not Outcome.OK:
            continue
        logs = [math.log(run.step_time_s.median) for run in runs if run.step_time_s is not None]
        error = sum(logs) / len(logs) - math.log(short.whole_s)
        found[short.trial.config] = (max(short.trial.number, runs[0].number), error)
    in_order = sorted(found.items(), key=lambda item: item[1][0])
    return [(config, error) for config, (_, error) in in_order]
