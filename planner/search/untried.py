"""The candidates not tried when the search ended: which is next, how much better it could be, and how probably.

In: what is known of the candidates, and what was found. Out: an `Untried`, for the plan and the
screen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from autoplan.planner.records.trials import Interval
from autoplan.planner.records.untried import Untried
from autoplan.planner.search.objective import devices_of
from autoplan.planner.search.surrogate import Z_90, expected_improvement, normal_cdf

if TYPE_CHECKING:
    from autoplan.planner.search.candidate_model import CandidateModel
    from autoplan.strategies.config import TrainingConfig


def find_untried(
    model: CandidateModel, found: TrainingConfig, step_time_s: float, *, drawn: bool = False
) -> Untried | None:
    """The next look with all the time it needs; None where all candidates were tried.

    Where none could still win, or another sampler draws: the untried candidate with the largest expected gain. None too
    where memory is looked for: there every second trial looks for speed, so that one figure does not say what the next
    one is for.

    Args:
        model: Of the candidates, after all trials.
        found: The configuration that they are compared with: the plan's, or the best so far.
        step_time_s: Of it, as it is reported.
        drawn: Another sampler draws the looks.

    The figures are those of the surrogate's posterior, which the trials have calibrated. The chance that any of the
    untried is better is larger than that of one, and not known: their errors belong together.
    """
    known = model.assess()
    if model.objective.name == "memory" or not known.untried.any():
        return None
    posterior = known.wanted
    best = math.log(step_time_s * devices_of(model.objective, found))
    ranking = [] if drawn else model.ranking()
    tried_next: bool | None = True
    if ranking:
        first = model.candidates.index(ranking[0])
    else:
        first = int(np.argmax(np.where(known.untried, expected_improvement(posterior, best), -1.0)))
        tried_next = None if drawn else False
    mean, sd = float(posterior.log_time[first]), float(posterior.log_time_sd[first])
    runs = float(posterior.fits[first] * posterior.works[first])
    better = float(normal_cdf(np.array([(best - mean) / sd]))[0])
    ratio = Interval(
        median=math.exp(best - mean),
        low=math.exp(best - mean - Z_90 * sd),
        high=math.exp(best - mean + Z_90 * sd),
        samples=0,
    )
    begun = {trial.config for trial in model.trials if trial.budget_ended}
    free = [config for config, untried in zip(model.candidates, known.untried, strict=True) if untried]
    return Untried(
        config=model.candidates[first],
        candidates=sum(config not in begun for config in free),
        begun=model.candidates[first] in begun,
        speed_ratio=ratio,
        probability=better * runs,
        trial_s=float(known.cost_s[first]),
        tried_next=tried_next,
        per_rank=model.objective.name == "cost",
    )
