"""What was not tried when the search ended: how much faster the best of it could be, and how probable that is.

In: what is known of the candidates, the winner's step time. Out: an `Untried`, for the plan and the screen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from autoplan.planner.records import Interval, Untried
from autoplan.planner.search.surrogate import Z_90, expected_improvement, normal_cdf

if TYPE_CHECKING:
    from autoplan.planner.search.candidate_model import CandidateModel


def find_untried(model: CandidateModel, step_time_s: float) -> Untried | None:
    """The untried candidate with the largest expected gain over the winner; None where all were tried.

    None too where throughput is not what is looked for.

    Args:
        model: The candidates, after all trials.
        step_time_s: Of the winner: the median of all its runs.

    The gain is that of the surrogate's posterior (expected improvement, Jones et al. 1998), which the trials have
    calibrated. The chance that any of the untried is faster is larger than that of one, and not known: their errors
    belong together.
    """
    if model.objective.name != "throughput":
        return None
    known = model.assess()
    posterior, best = known.posterior, math.log(step_time_s)
    gains = np.where(known.untried, expected_improvement(posterior, best), -1.0)
    if not known.untried.any():
        return None
    first = int(np.argmax(gains))
    mean, sd = float(posterior.log_time[first]), float(posterior.log_time_sd[first])
    runs = float(posterior.fits[first] * posterior.works[first])
    faster = float(normal_cdf(np.array([(best - mean) / sd]))[0])
    ratio = Interval(
        median=math.exp(best - mean),
        low=math.exp(best - mean - Z_90 * sd),
        high=math.exp(best - mean + Z_90 * sd),
        samples=0,
    )
    return Untried(
        config=model.candidates[first],
        candidates=int(known.untried.sum()),
        speed_ratio=ratio,
        probability=faster * runs,
        trial_s=float(known.cost_s[first]),
    )
