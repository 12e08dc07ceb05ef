"""Which candidate is measured next. Only legal candidates are ever picked, whoever picks."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.records import Outcome, Trial
from autoplan.planner.search.options import Sampler
from autoplan.planner.search.surrogate import Array, Posterior, Prior, Surrogate, expected_improvement
from autoplan.planner.search.trial_cost import TrialCost
from autoplan.planner.store.optuna_study import to_params
from autoplan.strategies.config import KNOBS, TrainingConfig

if TYPE_CHECKING:
    from autoplan.planner.cost.traced.estimator import Estimator

LEAST_GAIN = 0.003
"""Expected improvement (in log step time, about a share of it) below which no further trial is worth its time."""

LEAST_CHANCE = 0.05
"""Candidates that are less likely than this to fit and to run do not keep the search going."""

OPTIMISM_Z = 1.645

MAX_REDRAWS = 200


class NoCandidateError(Exception):
    """There is nothing left to try; the text says why: nothing can win any more, or nothing fits in the time left."""

    def __init__(self, text: str, *, out_of_time: bool) -> None:
        super().__init__(text)
        self.out_of_time = out_of_time


class Picker:
    """Chooses among the candidates that were not tried.

    Args:
        candidates: The legal configurations that may fit.
        estimator: The cost model, calibrated by the trials.
        cost: What trials cost in seconds.
        memory_limit_bytes: Of one trial.
        device: cuda or cpu.
        kind: Ours, or Optuna's TPE or random sampler restricted to legal candidates.
        seed: Of all drawing.
    """

    def __init__(
        self,
        candidates: Sequence[TrainingConfig],
        estimator: Estimator,
        cost: TrialCost,
        *,
        memory_limit_bytes: float,
        device: str,
        kind: Sampler,
        seed: int,
        allows: Callable[[TrainingConfig], bool] = lambda config: True,
    ) -> None:
        self.surrogate = Surrogate(candidates, memory_limit_bytes, device)
        self.estimator = estimator
        self.cost = cost
        self.kind = kind
        self.seed = seed
        self.trials: list[Trial] = []
        self.time_left_s = math.inf
        self._random = random.Random(seed)
        self.legal = frozenset(candidates)
        self.allows = allows
        self._mirror: Any = None

    def told(self, trial: Trial) -> None:
        """Takes in a finished trial."""
        self.trials.append(trial)
        self.estimator.observe(trial)
        self.cost.observe(trial)
        if self._mirror is not None:
            self._add_to_mirror(trial)

    def pick(self) -> TrainingConfig:
        """The next configuration.

        Raises:
            NoCandidateError: nothing left that could win, or that fits in the time left.
        """
        tried = {trial.config for trial in self.trials if trial.outcome is not Outcome.INTERRUPTED}
        candidates = self.surrogate.candidates
        open_ = np.array([config not in tried for config in candidates])
        if not open_.any():
            raise NoCandidateError("every candidate was tried", out_of_time=False)
        prior = Prior.of(self.estimator.table(candidates))
        trial_prior = Prior.of(self.estimator.table([trial.config for trial in self.trials])) if self.trials else prior
        belief = self.surrogate.posterior(prior, self.trials, trial_prior)
        costs = self.cost.all_s(np.exp(belief.log_time))
        if self.kind == "ours":
            return candidates[self._pick_ours(belief, open_, costs)]
        affordable = open_ & (costs <= self.time_left_s)
        if not affordable.any():
            raise NoCandidateError("no untried candidate fits in the time left", out_of_time=True)
        legal = [candidates[i] for i in np.flatnonzero(affordable)]
        return self._random.choice(legal) if self.kind == "random" else self._pick_tpe(legal)

    def _pick_ours(self, belief: Posterior, open_: NDArray[np.bool_], costs: Array) -> int:
        """The most expected improvement per square root of its cost: the dear ones wait, but are not starved."""
        chance = belief.fits * belief.works
        best = self.best_log_time()
        if best is None:  # nothing measured yet: the fastest prediction that fits for sure
            gain = chance * np.exp(belief.log_time.min() - belief.log_time)
            hopeful = open_
        else:
            gain = expected_improvement(belief, best)
            optimistic = belief.log_time - OPTIMISM_Z * belief.log_time_sd
            hopeful = open_ & (optimistic < best - 0.01) & (chance > LEAST_CHANCE) & (gain > LEAST_GAIN)
        if not hopeful.any():
            raise NoCandidateError(
                "no untried candidate could still win: each is predicted, at its most optimistic, to be no faster "
                "than the best",
                out_of_time=False,
            )
        affordable = hopeful & (costs <= self.time_left_s)
        if not affordable.any():
            raise NoCandidateError("no candidate that could win fits in the time left", out_of_time=True)
        score = np.where(affordable, gain / np.sqrt(np.maximum(costs, 1.0)), -1.0)
        return int(np.argmax(score))

    def cost_s(self, config: TrainingConfig) -> float:
        """Expected seconds of a trial of this configuration."""
        return self.cost.one_s(config, float(self.estimator.table([config]).step_time_s[0]))

    def best_log_time(self) -> float | None:
        """The logarithm of the best measured step time that may be the plan's; None: nothing was measured."""
        times = [
            t.step_time_s.median
            for t in self.trials
            if t.outcome is Outcome.OK and t.step_time_s is not None and self.allows(t.config)
        ]
        return math.log(min(times)) if times else None

    # Optuna's own samplers: they draw in a study in memory, and illegal points are drawn again at no trial's cost.

    def _pick_tpe(self, legal: Sequence[TrainingConfig]) -> TrainingConfig:
        import optuna

        allowed = frozenset(legal)

        if self._mirror is None:
            self._start_mirror()
        for _ in range(MAX_REDRAWS):
            asked = self._mirror.ask(self._distributions)
            config = TrainingConfig.model_validate(asked.params)
            self._mirror.tell(asked, state=optuna.trial.TrialState.FAIL)
            if config in allowed:
                return config
        return self._random.choice(legal)

    def _start_mirror(self) -> None:
        import optuna

        values = {
            knob: tuple(dict.fromkeys(getattr(config, knob) for config in self.surrogate.candidates)) for knob in KNOBS
        }
        self._distributions: dict[str, Any] = {
            knob: optuna.distributions.CategoricalDistribution(choices) for knob, choices in values.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(seed=self.seed, multivariate=True, n_startup_trials=5)
        self._mirror = optuna.create_study(direction="minimize", sampler=sampler)
        for trial in self.trials:
            self._add_to_mirror(trial)

    def _add_to_mirror(self, trial: Trial) -> None:
        import optuna

        params = to_params(trial.config)
        if any(params[knob] not in d.choices for knob, d in self._distributions.items()):
            return
        timed = trial.outcome in (Outcome.OK, Outcome.PRUNED) and trial.step_time_s is not None
        over = trial.outcome is Outcome.OUT_OF_MEMORY
        if not timed and not over:
            return
        self._mirror.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE if timed else optuna.trial.TrialState.PRUNED,
                value=trial.step_time_s.median if timed and trial.step_time_s else None,
                params=params,
                distributions=self._distributions,
                constraints={"memory": 0.05 if over else -0.05},
            )
        )
