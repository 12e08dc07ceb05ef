"""Another sampler of Optuna as what draws the looks of a search.

A search ranks its candidates by its own model and needs no study (candidate_model.py). Where another sampler draws,
that one has a study here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.store.optuna_study import add_trials, choices_of
from autoplan.strategies.config import TrainingConfig


class MovingSampler:
    """Another sampler of Optuna as what draws the looks of a search: each point is moved to the nearest free candidate.

    The nearest is the one that differs in the fewest knobs; of several, one is drawn. The sampler draws in a study of
    its own, in memory, in which each knob has the candidates' values alone. That study is given each trial of the
    search at the point where it was made; what was drawn counts as failed there.

    Args:
        model: Of the candidates; it has the trials of the search. One of other candidates may take its place: the
            values in the study stay those of the first, since Optuna forbids changed choices.
        inner: The sampler that draws.
        seed: Of the candidate that is drawn among several.
    """

    def __init__(self, model: CandidateModel, inner: optuna.samplers.BaseSampler, *, seed: int | None = None) -> None:
        self.model = model
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = optuna.create_study(direction="minimize", sampler=inner)
        self.rng = np.random.default_rng(seed)
        self._told = 0
        choices = choices_of(model.candidates)
        self.spaces = {knob: optuna.distributions.CategoricalDistribution(values) for knob, values in choices.items()}

    def draw(self, time_left_s: float) -> TrainingConfig:
        """The next candidate: an untried one, that fits in the time left where any does."""
        trials = self.model.trials
        add_trials(self.study, trials[self._told :], self.spaces)
        self._told = len(trials)
        now = self.model.assess()
        in_time = now.untried & (now.cost_s <= time_left_s)
        places = np.flatnonzero(in_time if in_time.any() else now.untried)
        asked = self.study.ask(dict(self.spaces))
        with contextlib.suppress(RuntimeError):  # a grid's last point: "Study.stop" outside of a loop
            self.study.tell(asked, state=TrialState.FAIL)
        point = np.array([asked.params[knob] for knob in self.spaces], dtype=object)
        free = [self.model.candidates[place] for place in places]
        knobs = np.array([[getattr(one, knob) for knob in self.spaces] for one in free], dtype=object)
        away = (knobs != point).sum(axis=1)
        return self.model.candidates[int(self.rng.choice(places[away == away.min()]))]


def make_sampler(wanted: Any, model: CandidateModel, *, seed: int) -> MovingSampler:
    """The sampler that draws the looks of a search: one of Optuna's, by its name (tpe, random) or as an object."""
    if wanted == "tpe":
        wanted = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=5)
    elif wanted == "random":
        wanted = optuna.samplers.RandomSampler(seed=seed)
    return MovingSampler(model, wanted, seed=seed)
