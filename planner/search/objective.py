"""The objectives of a search: throughput, little memory at a floor of throughput, or little cost per token.

In: configurations with their runs; what is expected of the untried. Out: their order; and, for the choice of the next
trial, the same expectations as a value that is to be small. Trials measure the same whatever the objective is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autoplan.planner.records.trials import Objective, Outcome, Trial
from autoplan.planner.search.selection import MOST_CONTENDERS, CandidateRuns, rank, shared_rounds, speed_ratio
from autoplan.planner.search.selection import contenders as near_leader
from autoplan.planner.search.surrogate import Posterior, normal_cdf
from autoplan.planner.trials.measure import Spread, ToBeat

if TYPE_CHECKING:
    from autoplan.strategies.config import TrainingConfig

THROUGHPUT = Objective()

DROP_LEVEL = 0.05
"""The chance that any candidate as fast as the leader is dropped for it, over all looks of a search together."""

USUAL_LOOKS = 10
"""The first so many looks have each the same share of DROP_LEVEL; together half of it, and all later ones the rest."""


def devices_of(objective: Objective, config: TrainingConfig) -> int:
    """By how much a second of this configuration counts: where cost is looked for, once for each rank."""
    return config.world_size if objective.name == "cost" else 1


def order(objective: Objective, candidates: Sequence[CandidateRuns], spread: Spread) -> list[CandidateRuns]:
    """The candidates, best first; `spread` is that between runs on this device."""
    own = {candidate.config: candidate for candidate in candidates}
    ranked = [own[one.config] for one in rank([_scaled(objective, one) for one in candidates], spread)]
    if objective.name != "memory" or not ranked:
        return ranked
    fastest = min(ranked, key=lambda candidate: candidate.look_s)
    good = [candidate for candidate in ranked if _share(candidate, fastest) >= objective.floor]
    good.sort(key=lambda candidate: (candidate.peak_memory_bytes, candidate.step_time.median))
    return good + [candidate for candidate in ranked if candidate not in good]


def _share(candidate: CandidateRuns, fastest: CandidateRuns) -> float:
    """The speed of a candidate as a share of the fastest's: by their pairs, else by looks."""
    if shared_rounds((candidate, fastest)):
        return speed_ratio(candidate, fastest).median
    return fastest.look_s / candidate.look_s


def _scaled(objective: Objective, candidate: CandidateRuns) -> CandidateRuns:
    """The candidate with step times as many times as long as its seconds count."""
    return replace(candidate, weight=devices_of(objective, candidate.config))


def contenders(
    objective: Objective, candidates: Sequence[CandidateRuns], leader: CandidateRuns, spread: Spread
) -> list[CandidateRuns]:
    """The candidates that run side by side with the leader before one is chosen.

    Where memory is looked for: the fastest, which the floor is a share of, and the smallest that reach it.
    """
    if objective.name != "memory":
        scaled = [_scaled(objective, one) for one in candidates]
        near = {one.config for one in near_leader(scaled, _scaled(objective, leader), spread)}
        return [one for one in order(objective, candidates, spread) if one.config in near]
    best_first = order(objective, candidates, spread)
    fastest = min(candidates, key=lambda candidate: candidate.look_s)
    small = [candidate for candidate in best_first if candidate.config not in (fastest.config, leader.config)]
    return [one for one in (fastest, *small) if one.config != leader.config][:MOST_CONTENDERS]


def to_beat(
    objective: Objective, best: Trial | None, config: TrainingConfig, spread: Spread, looks: int
) -> ToBeat | None:
    """The step time that a candidate must beat, else it is dropped; None: nothing was measured yet.

    Args:
        best: The best trial so far: by cost where that is looked for, else the fastest.
        looks: How many candidates were looked at, this one with them: it has its share of DROP_LEVEL (Bonferroni).
    """
    if best is None or best.step_time_s is None:
        return None
    step = best.step_time_s
    if objective.name == "memory":
        longest_s = step.median / objective.floor
    else:
        longest_s = step.median * devices_of(objective, best.config) / devices_of(objective, config)
    of_two, freedom = spread.of_ratio()
    run_sd, within = of_two / math.sqrt(2), math.log(step.high / max(step.low, 1e-9)) / (2 * 1.96)
    return ToBeat(
        log_s=math.log(longest_s),
        sd=math.hypot(run_sd, within),
        run_sd=run_sd,
        freedom=freedom,
        level=drop_level(looks),
    )


def drop_level(looks: int) -> float:
    """The share of DROP_LEVEL that the next look has; over any number of looks the shares add up to less than all.

    With n = USUAL_LOOKS: 1 / (2 (n + 1)) for each of the first n, then n / (2 k (k + 1)) for the k-th, whose sum from
    k = n + 1 on is n / (2 (n + 1)).
    """
    k = max(looks, USUAL_LOOKS)
    return DROP_LEVEL * USUAL_LOOKS / (2 * k * (k + 1))


def best_trial(trials: Iterable[Trial], objective: Objective = THROUGHPUT) -> Trial | None:
    """The best good look: by cost where that is looked for, else the fastest; what measured again does not count."""
    good = [t for t in trials if t.outcome is Outcome.OK and t.step_time_s is not None and not t.is_repeat]
    return min(
        good,
        key=lambda t: t.step_time_s.median * devices_of(objective, t.config) if t.step_time_s else math.inf,
        default=None,
    )


# The next trial.


def view(
    objective: Objective, configs: Sequence[TrainingConfig], posterior: Posterior, trials: Sequence[Trial]
) -> tuple[Posterior, float | None]:
    """The value expected of each candidate, as a logarithm that is to be small, and the best value measured.

    `trials` are good ones that may be the plan. If memory is looked for, `works` has the probability to reach the floor
    as well.
    """
    times = [math.log(t.step_time_s.median * devices_of(objective, t.config)) for t in trials if t.step_time_s]
    if objective.name == "cost":
        factors = np.log([devices_of(objective, config) for config in configs])
        return replace(posterior, log_time=posterior.log_time + factors), min(times)
    limit = min(times) - math.log(objective.floor)
    reaches = normal_cdf((limit - posterior.log_time) / posterior.log_time_sd)
    seen = [
        math.log(trial.peak_memory_bytes)
        for trial, time in zip(trials, times, strict=True)
        if trial.peak_memory_bytes and time <= limit
    ]
    small = replace(
        posterior,
        log_time=posterior.log_memory,
        log_time_sd=posterior.log_memory_sd,
        works=posterior.works * reaches,
    )
    return small, min(seen, default=None)
