"""The samplers of replays: a search's own, and Optuna's TPE, GP and random over the candidates of a table alone.

A search moves the points of a sampler of Optuna's to the nearest legal candidate (`MovingSampler`). Of the tables of
whole spaces one point in thousands is in the table, so the sampler itself would choose little. Here each sampler looks
at what is left of the table and at nothing else, with its own densities or its own Gaussian process:

    random  each candidate is as likely as any other, as with Optuna's RandomSampler over knobs that are drawn evenly
    tpe     EI_CANDIDATES of the table drawn by the density of the good trials; of these the best ratio of densities
    gp      the candidate of the table with the largest expected improvement
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial

from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.sampler import AutoplanSampler, make_sampler
from autoplan.strategies.config import TrainingConfig

EI_CANDIDATES = 24
"""Points of which TPE takes the best: Optuna's default."""


class UniformSampler(AutoplanSampler):
    """Draws evenly among the candidates that are left."""

    draws = True

    def __init__(self, model: CandidateModel, distributions: Mapping[str, Any], *, seed: int) -> None:
        super().__init__(model, distributions=distributions, seed=seed)
        self.rng = np.random.default_rng(seed)

    def choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.bool_]) -> TrainingConfig:
        """Any that is free."""
        return self.model.candidates[int(self.rng.choice(np.flatnonzero(free)))]

    def worth_a_trial(self) -> NDArray[np.bool_]:
        """Every untried candidate."""
        return self.model.assess().untried


class PoolSampler(UniformSampler):
    """A sampler of Optuna's that chooses among the candidates of the table; its first points are drawn evenly.

    Args:
        model: Of the candidates.
        distributions: Of each knob.
        inner: The sampler: one of this module's.
        seed: Of the points that are drawn evenly.
    """

    def __init__(
        self, model: CandidateModel, distributions: Mapping[str, Any], inner: _Tpe | _Gp, *, seed: int
    ) -> None:
        super().__init__(model, distributions, seed=seed)
        self.inner = inner
        self.varying = {knob: values for knob, values in self.distributions.items() if not values.single()}
        self.places = np.array([self._places(config) for config in self.model.candidates])

    def choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.bool_]) -> TrainingConfig:
        """What the sampler chooses of those that are free."""
        left = np.flatnonzero(free)
        self.inner.pool, self.inner.chosen = self.places[left], None
        self.inner.sample_relative(study, trial, self.varying)
        if self.inner.chosen is None:
            return super().choose(study, trial, free)
        return self.model.candidates[int(left[self.inner.chosen])]

    def _places(self, config: TrainingConfig) -> list[float]:
        """What Optuna keeps of a configuration: the place of each value among the choices."""
        return [values.to_internal_repr(getattr(config, knob)) for knob, values in self.varying.items()]


class _Tpe(optuna.samplers.TPESampler):
    """`chosen`: the place in `pool` (candidates, knobs); None before there are enough trials."""

    pool: NDArray[np.float64]
    chosen: int | None = None

    def _compute_acquisition_func(self, samples: Any, below: Any, above: Any) -> Any:
        pool = dict(zip(samples, self.pool.T, strict=True))
        good = below.log_pdf(pool)
        likely = np.exp(good - good.max())
        drawn = self._rng.rng.choice(len(likely), EI_CANDIDATES, p=likely / likely.sum())
        self.chosen = int(drawn[np.argmax((good - above.log_pdf(pool))[drawn])])
        return super()._compute_acquisition_func(samples, below, above)


class _Gp(optuna.samplers.GPSampler):
    """`chosen`: the place in `pool` (candidates, knobs); None before there are enough trials."""

    pool: NDArray[np.float64]
    chosen: int | None = None

    def _optimize_acqf(self, acqf: Any, best_params: Any) -> Any:
        """Over the pool; places of categories are not scaled."""
        self.chosen = int(np.argmax(acqf.eval_acqf_no_grad(self.pool)))
        return self.pool[self.chosen]


def sampler_of(name: str, model: CandidateModel, spaces: Mapping[str, Any], seed: int) -> AutoplanSampler:
    """The sampler of a replay: autoplan, tpe, gp or random."""
    if name == "random":
        return UniformSampler(model, spaces, seed=seed)
    if name == "tpe":
        return PoolSampler(model, spaces, _Tpe(seed=seed, multivariate=True, n_startup_trials=5), seed=seed)
    if name == "gp":
        return PoolSampler(model, spaces, _Gp(seed=seed), seed=seed)
    return make_sampler(name, model, spaces, seed=seed)
