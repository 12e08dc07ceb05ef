"""From the step time of a model cut to a few blocks to that of the whole model, and how far that can be trusted.

In: short trials, and the whole trials of the same search. Out: an extrapolated step time of each configuration that was
cut, and the comparison with those that ran whole too.

A step's time is a straight line in the number of blocks, part by part: embeddings, output head and loss are there
once, each block takes as long as the next one, and so does the optimizer with the parameters of each. So

    log(whole) = log(micro-steps x micro_ratio + optimizer step x optimizer_ratio) + level

where both times are measured, cut, and the ratios are the cost model's: it traced the operations of a block and those
outside the blocks apart (planner/trace/linear_fit.py), timed them on this device, and knows what precision,
checkpointing and micro-batch change of each. The level is what it is off by for this model, the same for all
configurations. It is learnt from configurations that ran both ways.

Two cut depths and the line through them would need no cost model. But the line through 2 and 4 of 12 blocks,
5 x T(4) - 4 x T(2), has 2.4 to 3.2 times the relative noise of one measurement (of blocks that take 6 % of a step each,
or 5), and with a large vocabulary T(2) and T(4) together cost about as much as the whole: GPT-2 of 124M parameters,
0.43 + 0.54.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.planner.records import Outcome, ShortTrial, ShortTrials, Trial
from autoplan.planner.trials.measure import Spread
from autoplan.strategies.config import TrainingConfig

LEVEL_SD = 0.2
"""How far the cost model's ratio is taken to be off before any configuration ran both ways, as a standard deviation of
its logarithm. Assumed: its parts are known to some 15 to 50 % (planner/cost/calibrate.py), and of an error of the
blocks against the rest about half comes through to the ratio of 12 blocks to 2."""

LEAST_SD = 0.03
"""Of an extrapolated step time's logarithm: no better is assumed, however well the checks agree."""

LIMIT_SDS = 2.0
"""The checks pass while their root mean square is within so many standard deviations of the log ratio of two runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolation:
    """What is known of the way from cut to whole step times.

    Attributes:
        level: Mean of log(whole / what the ratios say), drawn to 0 while few configurations ran both ways.
        sd: Standard deviation of an extrapolated step time's logarithm.
        checks: Extrapolated over whole step time of each configuration that ran both ways, by those before it. The
            first has none before it: it sets the level, and is no check.
        allowed: What the root mean square of the checks' logarithms may be.
        pairs: Configurations that ran both ways.
        first_error: log(whole / what the ratios say) of the first of them; None: there is none.
    """

    level: float
    sd: float
    checks: tuple[float, ...]
    allowed: float
    pairs: int
    first_error: float | None

    @property
    def error(self) -> float:
        """Root mean square of the checks' logarithms; 0 without a check."""
        return _root_mean_square([math.log(check) for check in self.checks])

    @property
    def why_not(self) -> str | None:
        """Why extrapolated step times are not to be used, a sentence; None: nothing speaks against it."""
        most = LIMIT_SDS * math.hypot(LEVEL_SD, self.allowed / LIMIT_SDS)
        if self.first_error is not None and abs(self.first_error) > most:
            return (
                f"the first one that ran whole too took {math.exp(self.first_error):.2f} times what the cost model's "
                f"ratio says, and {math.exp(most):.2f} is the limit"
            )
        if self.error > self.allowed:
            return (
                f"extrapolated and whole step times differ by {self.error:.1%}, and runs of one configuration by "
                f"at most {self.allowed:.1%}"
            )
        return None

    def log_time(self, short: ShortTrial) -> float | None:
        """Logarithm of the whole step time in seconds; None: the short trial has no step time."""
        return None if short.whole_s is None else math.log(short.whole_s) + self.level


def extrapolate(shorts: Sequence[ShortTrial], trials: Sequence[Trial], spread: Spread) -> Extrapolation:
    """What the configurations that ran both ways say.

    Args:
        shorts: Short trials of a search.
        trials: Its whole trials.
        spread: Between runs on this device.
    """
    run_sd = spread.of_ratio()[0]
    errors = _errors(shorts, trials)
    checks = []
    for count in range(1, len(errors)):
        checks.append(math.exp(_level(errors[:count], run_sd) - errors[count]))
    misses = [math.log(check) for check in checks]
    unsure = LEVEL_SD if not errors else LEVEL_SD / math.sqrt(1 + len(errors) * (LEVEL_SD / run_sd) ** 2)
    return Extrapolation(
        level=_level(errors, run_sd),
        sd=max(LEAST_SD, math.hypot(run_sd, unsure), _root_mean_square(misses)),
        checks=tuple(checks),
        allowed=LIMIT_SDS * run_sd,
        pairs=len(errors),
        first_error=errors[0] if errors else None,
    )


def summary(shorts: Sequence[ShortTrial], trials: Sequence[Trial], spread: Spread) -> ShortTrials | None:
    """What a plan says of the short trials of its search; None: there were none."""
    if not shorts:
        return None
    found = extrapolate(shorts, trials, spread)
    return ShortTrials(trials=tuple(shorts), checks=found.checks, allowed=found.allowed, why_not=found.why_not)


def _level(errors: Sequence[float], run_sd: float) -> float:
    """The posterior mean of a normal level with a prior of LEVEL_SD around 0."""
    return sum(errors) / (len(errors) + (run_sd / LEVEL_SD) ** 2)


def _errors(shorts: Sequence[ShortTrial], trials: Sequence[Trial]) -> list[float]:
    """log(whole / what the ratios say) of each configuration that ran both ways, in the order of the second way's end.

    Runs of the claim are left out: they have no part in a choice.
    """
    whole: dict[TrainingConfig, list[Trial]] = {}
    for trial in trials:
        if trial.outcome is Outcome.OK and trial.step_time_s is not None and trial.purpose != "claim":
            whole.setdefault(trial.config, []).append(trial)
    found: dict[TrainingConfig, tuple[int, float]] = {}
    for short in shorts:
        runs = whole.get(short.trial.config)
        if (
            runs is None
            or short.whole_s is None
            or short.trial.outcome is not Outcome.OK
            or short.trial.config in found
        ):
            continue
        logs = [math.log(run.step_time_s.median) for run in runs if run.step_time_s is not None]
        error = sum(logs) / len(logs) - math.log(short.whole_s)
        found[short.trial.config] = (max(short.trial.number, runs[0].number), error)
    return [error for _, error in sorted(found.values())]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else 0.0
