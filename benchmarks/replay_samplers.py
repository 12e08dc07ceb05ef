"""The samplers of replays: a search's own, and Optuna's TPE, GP and random over the candidates of a table alone.

A search moves the points of a sampler of Optuna's to the nearest legal candidate (`MovingSampler`). Of the tables of
whole spaces one point in thousands is in the table, so the sampler itself would choose little. Here each sampler looks
at what is left of the table and at nothing else, with its own densities or its own Gaussian process:

    random  each candidate is as likely as any other, as with Optuna's RandomSampler over knobs that are drawn evenly
    tpe     EI_CANDIDATES of the table drawn by the density of the good trials; of these the best ratio of densities
    gp      the candidate of the table with the largest expected improvement
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray

from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.sampler import MovingSampler
from autoplan.strategies.config import TrainingConfig

EI_CANDIDATES = 24
"""Points of which TPE takes the best: Optuna's default."""


class UniformSampler(MovingSampler):
    """Draws evenly among the candidates that are left."""

    def __init__(self, model: CandidateModel, *, seed: int) -> None:
        super().__init__(model, optuna.samplers.RandomSampler(seed=seed), seed=seed)

    def choose(self, places: NDArray[np.intp]) -> int:
        """Any of them."""
        return int(self.rng.choice(places))


class PoolSampler(UniformSampler):
    """A sampler of Optuna's that chooses among the candidates of the table; its first points are drawn evenly.

    Args:
        model: Of the candidates.
        inner: The sampler: one of this module's.
        seed: Of the points that are drawn evenly.
    """

    def __init__(self, model: CandidateModel, inner: _Tpe | _Gp, *, seed: int) -> None:
        super().__init__(model, seed=seed)
        self.inner = inner
        self.varying: dict[str, Any] = {knob: one for knob, one in self.spaces.items() if not one.single()}
        self.places = np.array([self._places(config) for config in self.model.candidates])

    def choose(self, places: NDArray[np.intp]) -> int:
        """The one of them that the sampler chooses."""
        self.inner.pool, self.inner.chosen = self.places[places], None
        asked = self.study.ask()
        trial = self.study.get_trials(deepcopy=False)[asked.number]
        self.inner.sample_relative(self.study, trial, self.varying)
        self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
        return super().choose(places) if self.inner.chosen is None else int(places[self.inner.chosen])

    def _places(self, config: TrainingConfig) -> list[float]:
        """The numbers that Optuna keeps of a configuration: the place of each value among the choices."""
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


def sampler_of(name: str, model: CandidateModel, seed: int) -> MovingSampler:
    """The sampler that draws the trials of a replay: tpe, gp or random."""
    if name == "random":
        return UniformSampler(model, seed=seed)
    if name == "tpe":
        return PoolSampler(model, _Tpe(seed=seed, multivariate=True, n_startup_trials=5), seed=seed)
    return PoolSampler(model, _Gp(seed=seed), seed=seed)
