"""Samplers of Optuna: ours for a study of a user's own, and any other as what draws the looks of a search.

    candidates = [TrainingConfig(micro_batch=m, precision=p) for m in (1, 2, 4) for p in ("fp32", "bf16")]
    sampler = AutoplanSampler(candidates)
    study = optuna.create_study(sampler=sampler)         # minimises: the value of a trial is its step time
    while sampler.reason_to_stop(study) is None:
        trial = study.ask(sampler.distributions)
        study.tell(trial, seconds_of(TrainingConfig.model_validate(trial.params)))

A search ranks its candidates with the same model, with a cost model behind it, and needs no study
(candidate_model.py); only where another sampler draws, that one has a study here.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from autoplan.errors import UsageError
from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.next_work import ENDS
from autoplan.planner.store.optuna_study import add_trials, choices_of, make_distributions, read_trial, to_params
from autoplan.strategies.config import TrainingConfig

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class AutoplanSampler(optuna.samplers.BaseSampler):
    """Legal candidates only, each once: the one with the most expected improvement for its cost.

    It follows the contract of `optuna.samplers.BaseSampler`: what it knows of other trials it reads from the study.

    Args:
        candidates: The legal configurations, or a model of them.
        seed: Of parameters that are no knobs. The choice of a candidate draws nothing.

    `distributions` is what to ask a study with, one categorical of the candidates' own values for each knob:
    `study.ask(sampler.distributions)`.

    Raises:
        UsageError: there are no candidates.
    """

    def __init__(self, candidates: Sequence[TrainingConfig] | CandidateModel, *, seed: int | None = None) -> None:
        self.model = candidates if isinstance(candidates, CandidateModel) else CandidateModel(candidates)
        if not self.model.candidates:
            raise UsageError("the sampler was given no candidates", hint="Give it at least one TrainingConfig.")
        self.distributions: dict[str, BaseDistribution] = dict(make_distributions(choices_of(self.model.candidates)))
        self._other_parameters = optuna.samplers.RandomSampler(seed)

    def reason_to_stop(self, study: optuna.Study | None = None) -> str | None:
        """Why no further trial is worth making, None while one is. With a study: after the trials that it has now."""
        if study is not None:
            self.learn(study)
        if not self.model.assess().untried.any():
            return "every candidate was tried"
        return None if self.model.hopeful().any() else ENDS["nothing_left"]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every knob: a configuration is sampled as a whole."""
        self._raise_error_if_multi_objective(study)
        if study.direction is not optuna.study.StudyDirection.MINIMIZE:
            raise ValueError(f"{self} minimises the step time: create the study with direction='minimize'")
        return dict(self.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A candidate that no trial has or had, of those that can win where any can; where all were tried, the best."""
        self.learn(study)
        running = {_config_of(other) for other in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))}
        free = self.model.assess().untried & np.array([one not in running for one in self.model.candidates])
        best = self.model.best_trial()
        if free.any():
            hopeful = free & self.model.hopeful()
            config = self.model.in_order(hopeful if hopeful.any() else free)[0]
        else:
            config = self.model.candidates[0] if best is None else best.config
        return {knob: value for knob, value in to_params(config).items() if knob in search_space}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A parameter that is no knob: at random."""
        return self._other_parameters.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Gives what is drawn another seed."""
        self._other_parameters.reseed_rng()

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Ends `study.optimize` once nothing could win any more, as Optuna's GridSampler does."""
        ended = copy.copy(trial)  # Optuna stores the state after this call
        ended.state, ended.values = state, values
        self._take_in(ended)
        if self.reason_to_stop() is not None:
            with contextlib.suppress(RuntimeError):  # asked and told by the caller: there is no loop to end
                study.stop()

    def learn(self, study: optuna.Study) -> None:
        """Takes in the study's finished trials that were not taken in yet."""
        for frozen in study.get_trials(deepcopy=False):
            if frozen.state.is_finished():
                self._take_in(frozen)

    def _take_in(self, frozen: FrozenTrial) -> None:
        trial = read_trial(frozen, self.model.memory_limit_bytes)
        if trial is not None:
            self.model.observe(trial)


class MovingSampler:
    """Another sampler of Optuna as what draws the looks of a search: each point is moved to the nearest free candidate.

    The nearest is the one that differs in the fewest knobs; of several, one is drawn. The sampler draws in a study of
    its own, in memory, in which each knob has the candidates' values alone. That study is given each trial of the
    search at the point where it was made; what was drawn counts as failed there.

    Args:
        model: Of the candidates; it has the trials of the search.
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
        rows = [[getattr(one, knob) for knob in choices] for one in model.candidates]
        self._knobs = np.array(rows, dtype=object)

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
        away = (self._knobs[places] != point).sum(axis=1)
        return self.model.candidates[int(self.rng.choice(places[away == away.min()]))]


def make_sampler(wanted: Any, model: CandidateModel, *, seed: int) -> MovingSampler:
    """The sampler that draws the looks of a search: one of Optuna's, by its name (tpe, random) or as an object.

    Raises:
        UsageError: an AutoplanSampler as an object: it would not have the search's cost model.
    """
    if isinstance(wanted, AutoplanSampler):
        raise UsageError(
            f"--sampler is {type(wanted).__name__} with candidates of its own",
            hint='Leave it out: a search uses it by itself ("autoplan"), with its own candidates and cost model.',
        )
    if wanted == "tpe":
        wanted = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=5)
    elif wanted == "random":
        wanted = optuna.samplers.RandomSampler(seed=seed)
    return MovingSampler(model, wanted, seed=seed)


def _config_of(trial: FrozenTrial) -> TrainingConfig | None:
    try:
        return TrainingConfig.model_validate(trial.params)
    except ValidationError:
        return None  # a combination that is no configuration, or a trial that has no parameters yet
