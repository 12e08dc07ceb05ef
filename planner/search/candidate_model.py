"""The knowledge of a search about its candidates: predictions, corrected by the trials so far, and a trial's cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.records.trials import Interval, Objective, Outcome, Trial
from autoplan.planner.records.untried import Untried
from autoplan.planner.search.next_work import score
from autoplan.planner.search.objective import THROUGHPUT, best_trial, devices_of, view
from autoplan.planner.search.selection import has_lasting_load, is_beside_work, is_under_load
from autoplan.planner.search.surrogate import (
    Z_90,
    Array,
    Posterior,
    Prior,
    Surrogate,
    encode,
    expected_improvement,
    normal_cdf,
    similarity,
    time_weights,
)
from autoplan.planner.search.trial_cost import TrialCost
from autoplan.strategies.config import SLOW_COMPILE_MODES, TrainingConfig

if TYPE_CHECKING:
    from autoplan.planner.cost.traced.estimator import Estimator

LEAST_GAIN = 0.003
"""Expected improvement (in log step time, about a share of it) below which no further trial is worth its time."""

LEAST_CHANCE = 0.05
"""Candidates that are less likely than this to fit and to run do not keep the search going."""

LEAST_LEAD = 0.01
"""How far below the best log step time a candidate's optimistic end must be, for it to be able to win."""

FEWEST_LOOKS = 3
"""Before so many looks no candidate is taken to be unable to win: one look in a slow moment has moved all predictions
so far that a search with 60 s ended after 22 s."""

MOST_LOOKS = 2
"""So often is a configuration looked at, if other work disturbed the looks before."""

FOLLOWS_CORE = 0.6
"""On a CPU a step's time follows the time of a core (`Window.core_s`) to this power: looks that were made at different
times are compared as if the cores had kept the speed of the first. Fitted: 0.69 in 192 trials of 64 configurations
(benchmarks/results/search_tables/gpt-1), where it takes the spread between runs from 10.5 to 7.4 %; 0.5 and 0.6 in two
configurations of a GPT-2, whose cores changed by a factor of two in ten minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """The present knowledge of the candidates; arrays over the candidates."""

    posterior: Posterior
    untried: NDArray[np.bool_]  # no finished trial yet, and its turn has come (`wait_for_the_leader`)
    cost_s: Array  # expected seconds of a trial
    wanted: Posterior  # what the next trial should lower: the posterior, unless not throughput is looked for
    best: float | None  # the best of it that was measured, as a logarithm; None: nothing was
    early: bool = False  # there were fewer than FEWEST_LOOKS looks
    later: NDArray[np.bool_] | None = None
    """Whose turn comes after all others: a number of threads of its own, while other work disturbs each trial."""


class CandidateModel:
    """The candidates with what the cost model and the trials say of them.

    Args:
        candidates: The legal configurations that may fit.
        estimator, cost: The cost model, which each trial calibrates, and what trials cost in seconds.
        memory_limit_bytes: Of one trial.
        device: cuda or cpu.
        allows: Whether a configuration may be the plan. One that it refuses (the baseline) is no target to beat.
        slow_mode_limit_s: What a compilation in a slow mode may be expected to take.
        objective: What the search looks for.
    """

    def __init__(
        self,
        candidates: Sequence[TrainingConfig],
        estimator: Estimator,
        cost: TrialCost,
        *,
        memory_limit_bytes: float = math.inf,
        device: str = "cpu",
        allows: Callable[[TrainingConfig], bool] = lambda config: True,
        slow_mode_limit_s: float = math.inf,
        objective: Objective = THROUGHPUT,
    ) -> None:
        self.candidates = tuple(candidates)
        self._places = {config: place for place, config in enumerate(self.candidates)}
        self.legal = self._places.keys()
        self.estimator = estimator
        self.trials: list[Trial] = []
        self.out_of_turn: set[TrainingConfig] = set()
        self._elsewhere: frozenset[TrainingConfig] = frozenset()
        self.trial_cost = cost
        self._allows = allows
        self._slow_mode_limit_s = slow_mode_limit_s
        self.objective = objective
        self._surrogate = Surrogate(self.candidates, memory_limit_bytes, device)
        self._fast_siblings = _fast_siblings(self.candidates)
        self._sets_threads = np.array([config.threads is not None for config in self.candidates], dtype=np.bool_)
        self._on_cpu, self._first_core_s = device == "cpu", 0.0
        self.pace = 1.0
        """How many times as long a step takes as when the first trial ran, by the core of the last one."""
        self._at_one_pace: list[Trial] = []
        self._had_quiet: dict[TrainingConfig, bool] = {}  # of each with a number of threads of its own that ran
        self._failed: set[TrainingConfig] = set()
        self._set_back: set[TrainingConfig] = set()
        self._assessment: Assessment | None = None

    def observe(self, trial: Trial) -> None:
        """Takes in a finished trial; one that was taken in before (by its number) changes nothing."""
        if any(seen.number == trial.number for seen in self.trials):
            return
        self.trials.append(trial)
        if trial.config.threads is not None and trial.outcome is Outcome.OK:
            quiet = self._had_quiet.get(trial.config, False) or not is_beside_work(trial)
            self._had_quiet[trial.config] = quiet
        if not self._first_core_s and trial.config.world_size == 1 and trial.window is not None:
            self._first_core_s = trial.window.core_s or 0.0
        pace = self.pace_of(trial)
        if trial.config.world_size == 1:
            self.pace = pace
        at_one_pace = trial.at_pace(1 / pace)
        self._at_one_pace.append(at_one_pace)
        self.estimator.observe(at_one_pace)
        self.trial_cost.observe(trial)
        self._assessment = None

    def pace_of(self, trial: Trial) -> float:
        """How many times as long as on the first trial's core a step took in a trial; of one without a reading, now.

        1 on a GPU, and of several ranks: each has a core of its own.
        """
        if not self._on_cpu or trial.config.world_size > 1:
            return 1.0
        core_s = None if trial.window is None else trial.window.core_s
        if not core_s or not self._first_core_s:
            return self.pace
        return (core_s / self._first_core_s) ** FOLLOWS_CORE

    def set_aside(self, config: TrainingConfig) -> None:
        """Takes a configuration out of what is untried, without a word on how it would run."""
        self.out_of_turn.add(config)
        self._assessment = None

    def set_failed(self, config: TrainingConfig) -> None:
        """Notes that a configuration failed its parity check: its like may fail theirs."""
        self._failed.add(config)
        self._assessment = None

    def set_back(self, config: TrainingConfig) -> None:
        """Notes that a configuration did not pass its parity check: it leads no more, in this run of the search."""
        self._set_back.add(config)
        self._assessment = None

    def set_elsewhere(self, configs: frozenset[TrainingConfig]) -> None:
        """Leaves out of what is untried, for now, what other planners are looking at."""
        self._elsewhere, self._assessment = configs, None

    def assess(self) -> Assessment:
        """The assessment after the trials so far."""
        if self._assessment is None:
            tried = tried_configs(self.trials) | self.out_of_turn | self._elsewhere
            prior = Prior.of(self.estimator.table(self.candidates))
            each = [Prior.of(self.estimator.table([trial.config])) for trial in self.trials]
            trial_prior = Prior.joined(each) if each else prior
            posterior = self._surrogate.posterior(prior, self._at_one_pace, trial_prior, self._failed)
            steps = (trial.step_time_s for trial in self._believed(posterior))
            self._assessment = Assessment(
                posterior=posterior,
                untried=np.array([config not in tried for config in self.candidates]) & ~self.wait_for_the_leader(),
                cost_s=self.trial_cost.all_s(self.pace * np.exp(posterior.log_time)),
                wanted=posterior,
                best=min((math.log(step.median) for step in steps if step is not None), default=None),
                early=sum(trial.purpose == "search" for trial in self.trials) < FEWEST_LOOKS,
                later=self._sets_threads if is_under_load(self.trials) else None,
            )
            self._assessment = self._as_wanted(self._assessment)
        return self._assessment

    def _believed(self, posterior: Posterior) -> Iterator[Trial]:
        """The looks at what may be the plan, with the step times that all trials say they have.

        The fastest of several looks was also the luckiest. What is no candidate has the time that was measured.
        """
        for trial in self._at_one_pace:
            step, place = trial.step_time_s, self._places.get(trial.config)
            if trial.outcome is Outcome.OK and step is not None and self._may_lead(trial.config):
                factor = 1.0 if place is None else math.exp(float(posterior.log_time[place])) / step.median
                yield trial.at_pace(factor)

    def _as_wanted(self, now: Assessment) -> Assessment:
        """The assessment as the objective sees it.

        If memory is looked for, every second trial looks for speed: the floor is a share of the best throughput.
        """
        good = list(self._believed(now.posterior))
        if self.objective.name == "throughput" or not good:
            return now
        value, best = view(self.objective, self.candidates, now.posterior, good)
        wanted = replace(now, wanted=value, best=best)
        if self.objective.name == "cost":
            return wanted
        turns = (now, wanted) if len(self.trials) % 2 else (wanted, now)
        return next((turn for turn in turns if prospects(turn)[1].any()), wanted)

    def wait_for_the_leader(self) -> NDArray[np.bool_]:
        """The candidates in a slow mode of the compiler whose other knobs are not those of the fastest trial so far.

        Such a mode tunes for minutes for a few percent: it is for the leader alone, where it takes a small part of the
        budget. One without a candidate beside it in another mode (the user fixed the mode) does not wait.
        """
        waits = np.zeros(len(self.candidates), dtype=np.bool_)
        best = self.best_trial()
        leader = None if best is None else best.config.model_copy(update={"compile_mode": "default"})
        for index, sibling in self._fast_siblings.items():
            slow_s = self.trial_cost.compile_s(self.candidates[index])
            waits[index] = sibling != leader or slow_s > self._slow_mode_limit_s
        return waits

    def hangs_on_load(self, config: TrainingConfig) -> bool:
        """Whether a number of threads ran only beside other work: it suits that work, and is no plan without it.

        Beside a process that kept one of two cores busy a GPT-2 with one thread ran at 1.34 times the speed of the
        plain run with two; once that process had ended, at 0.81 times. Where no candidate has torch's own number, the
        user chose.
        """
        return not self._sets_threads.all() and self._had_quiet.get(config) is False

    @property
    def hanging(self) -> list[TrainingConfig]:
        """The candidates of which that is so."""
        return [config for config in self._had_quiet if self.hangs_on_load(config)]

    def cost_s(self, config: TrainingConfig) -> float:
        """Expected seconds of a trial of this configuration."""
        return self.trial_cost.one_s(config, self.step_s(config))

    def step_s(self, config: TrainingConfig) -> float:
        """Expected seconds of a step on the cores of now, by the cost model."""
        return self.pace * float(self.estimator.table([config]).step_time_s[0])

    def hopeful(self) -> NDArray[np.bool_]:
        """Which candidates are untried and can still win."""
        return prospects(self.assess())[1]

    def ranking(self, time_left_s: float = math.inf) -> list[TrainingConfig]:
        """What would be next, best first, if no trial taught anything new: it can win, and fits in the time left."""
        now = self.assess()
        gain, wanted = next_looks(now)
        return [self.candidates[index] for index in ordered(now, gain, wanted & (now.cost_s <= time_left_s))]

    def gain_of(self, config: TrainingConfig) -> float:
        """The expected improvement by one candidate; 0 for what is none, or was tried."""
        if config not in self.legal:
            return 0.0
        now, index = self.assess(), self._places[config]
        return float(prospects(now)[0][index]) if now.untried[index] else 0.0

    def believed_s(self, config: TrainingConfig) -> float | None:
        """The step time of a candidate by all trials and the cost model, at the pace of the first; None: it is none."""
        place = self._places.get(config)
        return None if place is None else math.exp(float(self.assess().posterior.log_time[place]))

    def ratio_sd(self, one: TrainingConfig, other: TrainingConfig) -> float:
        """Standard deviation of the logarithm of two configurations' ratio in step time, before either has run."""
        wide = Prior.of(self.estimator.table([one, other])).log_time_sd
        codes = encode([one, other])
        alike = float(similarity(codes[:1], codes[1:], time_weights(self.trials))[0, 0])
        return math.sqrt(max(0.0, float(wide @ wide) - 2 * alike * float(wide.prod())))

    def best_trial(self) -> Trial | None:
        """The fastest measured trial that may be the plan, at the pace of the first."""
        return best_trial(trial for trial in self._at_one_pace if self._may_lead(trial.config))

    def _may_lead(self, config: TrainingConfig) -> bool:
        return self._allows(config) and config not in self._set_back and not self.hangs_on_load(config)


def tried_configs(trials: Sequence[Trial]) -> set[TrainingConfig]:
    """The configurations that are not looked at again.

    A look that other work disturbed is made again, MOST_LOOKS times in all: it is void, and no lost race. Under a load
    that lasts each look is disturbed, and they are compared with each other.
    """
    ended = [t for t in trials if t.outcome is not Outcome.INTERRUPTED and not t.budget_ended]
    lasting = has_lasting_load(ended)
    looks = Counter(trial.config for trial in ended)
    return {t.config for t in ended if lasting or not t.disturbed or looks[t.config] >= MOST_LOOKS}


def prospects(now: Assessment) -> tuple[Array, NDArray[np.bool_]]:
    """The expected improvement of each candidate, and which of the untried ones can still win."""
    posterior, best = now.wanted, now.best
    chance = posterior.fits * posterior.works
    if best is None:  # nothing measured yet: the fastest prediction that fits for sure
        return chance * np.exp(posterior.log_time.min() - posterior.log_time), now.untried
    gain = expected_improvement(posterior, best)
    optimistic = posterior.log_time - Z_90 * posterior.log_time_sd
    can_win = (optimistic < best - LEAST_LEAD) & (chance > LEAST_CHANCE) & (gain > LEAST_GAIN)
    return gain, now.untried & can_win


def next_looks(now: Assessment) -> tuple[Array, NDArray[np.bool_]]:
    """The same; before FEWEST_LOOKS looks, where none can win, all that may run; and those that come later left out."""
    gain, hopeful = prospects(now)
    if now.early and not hopeful.any():
        hopeful = now.untried & (now.wanted.fits * now.wanted.works > LEAST_CHANCE)
    if now.later is not None and (hopeful & ~now.later).any():
        hopeful &= ~now.later
    return gain, hopeful


def ordered(now: Assessment, gain: Array, wanted: NDArray[np.bool_]) -> list[int]:
    """The indices of the wanted candidates, the highest score first (`next_work.score`)."""
    places = np.flatnonzero(wanted)
    return [int(places[i]) for i in np.argsort(-score(gain[places], now.cost_s[places]), kind="stable")]


def find_untried(
    model: CandidateModel, found: TrainingConfig, step_time_s: float, *, drawn: bool = False
) -> Untried | None:
    """The next look with all the time it needs, by the surrogate's posterior; None where all candidates were tried.

    Where none could still win, or another sampler draws: the untried candidate with the largest expected gain. None too
    where memory is looked for: every second trial looks for speed, so that one figure does not say what the next is
    for. The chance that any is better is larger than that of one, and not known: their errors belong together.

    Args:
        model: Of the candidates, after all trials.
        found, step_time_s: What they are compared with, the plan or the best so far; at the pace of the first trial.
        drawn: Another sampler draws the looks.
    """
    known = model.assess()
    if model.objective.name == "memory" or not known.untried.any():
        return None
    posterior = known.wanted
    best = math.log(step_time_s * devices_of(model.objective, found))
    ranking = [] if drawn else model.ranking()
    gain = expected_improvement(posterior, best)
    first = model.candidates.index(ranking[0]) if ranking else int(np.argmax(np.where(known.untried, gain, -1.0)))
    tried_next = None if drawn else bool(ranking)
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


def _fast_siblings(candidates: Sequence[TrainingConfig]) -> dict[int, TrainingConfig]:
    """By index of each candidate in a slow compile mode with a fast one beside it: the same in the default mode."""
    slow = [index for index, config in enumerate(candidates) if config.compile_mode in SLOW_COMPILE_MODES]
    if not slow:
        return {}
    fast = {
        config.model_copy(update={"compile_mode": "default"})
        for config in candidates
        if config.compile_mode not in SLOW_COMPILE_MODES
    }
    siblings = {index: candidates[index].model_copy(update={"compile_mode": "default"}) for index in slow}
    return {index: sibling for index, sibling in siblings.items() if sibling in fast}
