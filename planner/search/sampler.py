"""Which candidate is measured next. Only legal candidates are ever picked, whoever picks."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autoplan.planner.plan import Prediction
from autoplan.planner.search.options import Sampler
from autoplan.planner.search.study import to_params
from autoplan.planner.search.surrogate import Surrogate, expected_improvement
from autoplan.planner.trials.outcome import Outcome, Trial
from autoplan.strategies.config import KNOBS, TrainingConfig

if TYPE_CHECKING:
    from autoplan.planner.cost.estimate import Estimator

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
        memory_limit_bytes: Of one trial.
        kind: Ours, or Optuna's TPE or random sampler restricted to legal candidates.
        seed: Of all drawing.
    """

    def __init__(
        self,
        candidates: Sequence[TrainingConfig],
        estimator: Estimator,
        *,
        memory_limit_bytes: float,
        kind: Sampler,
        seed: int,
    ) -> None:
        self.surrogate = Surrogate(candidates, memory_limit_bytes)
        self.estimator = estimator
        self.kind = kind
        self.seed = seed
        self.trials: list[Trial] = []
        self.time_left_s = math.inf
        self._random = random.Random(seed)
        self.legal = frozenset(candidates)
        self._mirror: Any = None

    def told(self, trial: Trial) -> None:
        """Takes in a finished trial."""
        self.trials.append(trial)
        self.estimator.observe(trial)
        if self._mirror is not None:
            self._add_to_mirror(trial)

    def pick(self) -> TrainingConfig:
        """The next configuration.

        Raises:
            NoCandidateError: nothing left that could win, or that fits in the time left.
        """
        tried = {trial.config for trial in self.trials if trial.outcome is not Outcome.INTERRUPTED}
        open_ = [i for i, config in enumerate(self.surrogate.candidates) if config not in tried]
        if not open_:
            raise NoCandidateError("every candidate was tried", out_of_time=False)
        if self.kind == "ours":
            return self._pick_ours(open_)
        affordable = [i for i in open_ if self.cost_s(self.surrogate.candidates[i]) <= self.time_left_s]
        if not affordable:
            raise NoCandidateError("no untried candidate fits in the time left", out_of_time=True)
        if self.kind == "random":
            return self.surrogate.candidates[self._random.choice(affordable)]
        return self._pick_tpe({self.surrogate.candidates[i] for i in affordable})

    def cost_s(self, config: TrainingConfig) -> float:
        """Expected seconds of a trial of this configuration."""
        return self.estimator.trial_cost_s(config)

    def _pick_ours(self, open_: list[int]) -> TrainingConfig:
        """The most expected improvement per square root of its cost: the dear ones wait, but are not starved."""
        predictions = self.estimator.estimate(self.surrogate.candidates)
        belief = self.surrogate.believe(predictions, self.trials, self._trial_predictions())
        best = self.best_log_time()
        if best is None:  # nothing measured yet: the fastest prediction that fits for sure
            gain = belief.fits * belief.works * np.exp(-(belief.log_time - belief.log_time.min()))
            hopeful = np.array(open_)
        else:
            gain = expected_improvement(belief, best)
            optimistic = belief.log_time - OPTIMISM_Z * belief.log_time_sd
            chance = belief.fits * belief.works
            could_win = (optimistic < best - 0.01) & (chance > LEAST_CHANCE) & (gain > LEAST_GAIN)
            hopeful = np.array([i for i in open_ if could_win[i]])
        if not len(hopeful):
            raise NoCandidateError(
                "no untried candidate could still win: each is predicted, at its most optimistic, to be no faster "
                "than the best",
                out_of_time=False,
            )
        for index in self._by_score(hopeful, gain):
            config = self.surrogate.candidates[index]
            if self.cost_s(config) <= self.time_left_s:
                return config
        raise NoCandidateError("no candidate that could win fits in the time left", out_of_time=True)

    def _by_score(self, indices: Any, gain: Any) -> list[int]:
        """Indices by gain over the root of the cost; the cost is asked for the best few hundred gains only."""
        short = sorted(indices, key=lambda i: -gain[i])[:300]
        scores = {i: gain[i] / math.sqrt(max(1.0, self.cost_s(self.surrogate.candidates[i]))) for i in short}
        rest = [i for i in indices if i not in scores]
        return sorted(short, key=lambda i: -scores[i]) + sorted(rest, key=lambda i: -gain[i])

    def best_log_time(self) -> float | None:
        """The logarithm of the best measured step time; None: nothing was measured."""
        times = [t.step_time_s.median for t in self.trials if t.outcome is Outcome.OK and t.step_time_s is not None]
        return math.log(min(times)) if times else None

    def _trial_predictions(self) -> list[Prediction]:
        return self.estimator.estimate([trial.config for trial in self.trials]) if self.trials else []

    # Optuna's own samplers: they draw in a study in memory, and illegal points are drawn again at no trial's cost.

    def _pick_tpe(self, allowed: set[TrainingConfig]) -> TrainingConfig:
        import optuna

        if self._mirror is None:
            self._start_mirror()
        for _ in range(MAX_REDRAWS):
            asked = self._mirror.ask(self._distributions)
            config = TrainingConfig.model_validate(asked.params)
            self._mirror.tell(asked, state=optuna.trial.TrialState.FAIL)
            if config in allowed:
                return config
        ordered = [config for config in self.surrogate.candidates if config in allowed]
        return self._random.choice(ordered)

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
