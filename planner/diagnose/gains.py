"""What removing a cause gave: its pairs of blocks, their gain, and whether more of them could tell more."""

from __future__ import annotations

import statistics

from autoplan.planner.diagnose.records import SwitchTrial, exactly
from autoplan.planner.diagnose.suspects import LEAST_SHARE
from autoplan.planner.records.trials import Interval
from autoplan.planner.trials.measure import ratio_interval

PAIRS, LEAST_PAIRS = 6, 3
"""Pairs of blocks of a cause: with six, Student's t is 2.6 times the standard error; with two it is 4.3 and more."""

MORE_PAIRS = 18
"""With what is left of the budget, for a cause that six pairs left open, or whose gain they tell roughly: half the
width, if the pairs scatter alike."""

ROUGH = 1.2
"""The end of a gain's interval over its beginning, from which on it is measured on while there is time."""

SLOWER = 1.25
"""Steps that are so many times slower without a cause in two pairs, or twice as many in one, end its trial."""


def gain_of(trial: SwitchTrial, chosen_from: int = 1) -> Interval | None:
    """How many times faster a step is without the cause; None with too few pairs.

    Where six pairs left it open and more were made, it was looked at twice: the level is halved (Bonferroni).
    """
    if len(trial.pairs) < LEAST_PAIRS:
        return None
    without, as_is = ([exactly(pair[place]) for pair in trial.pairs] for place in (1, 0))
    looks = 2 if len(trial.pairs) > PAIRS else 1
    return ratio_interval(without, as_is, chosen_from=looks * chosen_from)


def is_gain(gain: Interval | None) -> bool:
    """Whether a cause costs something: the interval of its gain lies above 1, and it is worth a mend."""
    return gain is not None and gain.low > 1 and gain.median >= 1 + LEAST_SHARE


def is_open(trial: SwitchTrial, chosen_from: int) -> bool:
    """Whether it looks like a gain that more pairs would prove."""
    gain = gain_of(trial, chosen_from)
    return gain is not None and gain.low <= 1 and gain.median >= 1 + LEAST_SHARE and len(trial.pairs) < MORE_PAIRS


def is_rough(trial: SwitchTrial, chosen_from: int) -> bool:
    """Whether it is a gain that more pairs would tell more exactly."""
    gain = gain_of(trial, chosen_from)
    return gain is not None and is_gain(gain) and gain.high > ROUGH * gain.low and len(trial.pairs) < MORE_PAIRS


def is_slower(trial: SwitchTrial) -> bool:
    """Whether the steps without the cause are so much slower that further pairs tell nothing."""
    as_is, without = (statistics.median(pair[place] for pair in trial.pairs) for place in (0, 1))
    return without > (SLOWER if len(trial.pairs) > 1 else 2 * SLOWER) * as_is
