"""Samplers of the Optuna study: ours, and any other of Optuna's with its points moved to legal candidates.

    candidates = [TrainingConfig(micro_batch=m, precision=p) for m in (1, 2, 4) for p in ("fp32", "bf16")]
    sampler = AutoplanSampler(candidates)
    study = optuna.create_study(sampler=sampler)         # minimises: the value of a trial is its step time
    while sampler.reason_to_stop(study) is None:
        trial = study.ask(sampler.distributions)
        study.tell(trial, seconds_of(TrainingConfig.model_validate(trial.params)))

A search does the same with a cost model behind the candidates. Both samplers follow the contract of
`optuna.samplers.BaseSampler`: what they know of other trials they read from the study.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from autoplan.errors import UsageError
from autoplan.planner.search.candidate_model import Assessment, CandidateModel, prospects
from autoplan.planner.search.next_work import ENDS, score
from autoplan.planner.search.surrogate import Array
from autoplan.planner.store.optuna_study import choices_of, make_distributions, read_trial, to_params
from autoplan.strategies.config import TrainingConfig

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class AutoplanSampler(optuna.samplers.BaseSampler):
    """Legal candidates only, each once: the one with the most expected improvement for its cost.

    Args:
        candidates: The legal configurations; a search gives a model of them, with its cost model.
        distributions: The study's distribution of each knob; None: one categorical of the candidates' own values.
        seed: Of parameters that are no knobs. The choice of a candidate draws nothing.

    `distributions` is what to ask a study with: `study.ask(sampler.distributions)`. A search sets `time_left_s` before
    it asks: how long the next trial may take, by its expected cost.

    Raises:
        UsageError: there are no candidates.
    """

    draws = False
    """Whether the next candidate is drawn; else `ranking` knows it."""

    def __init__(
        self,
        candidates: Sequence[TrainingConfig] | CandidateModel,
        *,
        distributions: Mapping[str, BaseDistribution] | None = None,
        seed: int | None = None,
    ) -> None:
        self.model = candidates if isinstance(candidates, CandidateModel) else CandidateModel(candidates)
        if not self.model.candidates:
            raise UsageError("the sampler was given no candidates", hint="Give it at least one TrainingConfig.")
        self.distributions: dict[str, BaseDistribution] = dict(
            make_distributions(choices_of(self.model.candidates)) if distributions is None else distributions
        )
        self.time_left_s = math.inf
        self._other_parameters = optuna.samplers.RandomSampler(seed)

    def worth_a_trial(self) -> NDArray[np.bool_]:
        """Which candidates are: the untried ones that can still win."""
        return prospects(self.model.assess())[1]

    def choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.bool_]) -> TrainingConfig:
        """The configuration of a trial, among the candidates that are free (at least one): the highest score.

        Of those that can win and that fit in the time left, where there are any.
        """
        now = self.model.assess()
        gain, hopeful = prospects(now)
        masks = (free & hopeful & (now.cost_s <= self.time_left_s), free & hopeful, free)
        wanted = next(mask for mask in masks if mask.any())
        return self.model.candidates[ordered(now, gain, wanted)[0]]

    def ranking(self, *, in_time: bool = True) -> list[TrainingConfig]:
        """The untried candidates in the order in which they would be next if no trial taught anything new.

        Only those that can win, and whose trial fits in `time_left_s`; none if the next one is drawn.

        Args:
            in_time: False: as if there was all the time.
        """
        if self.draws:
            return []
        now = self.model.assess()
        gain, hopeful = prospects(now)
        wanted = hopeful & (now.cost_s <= self.time_left_s) if in_time else hopeful
        return [self.model.candidates[index] for index in ordered(now, gain, wanted)]

    def reason_to_stop(self, study: optuna.Study | None = None) -> str | None:
        """Why no further trial is worth making, None while one is. With a study: after the trials that it has now."""
        if study is not None:
            self.learn(study)
        now, worth = self.model.assess(), self.worth_a_trial()
        if not now.untried.any():
            return "every candidate was tried"
        if not worth.any():
            return ENDS["nothing_left"]
        if not (worth & (now.cost_s <= self.time_left_s)).any():
            return ENDS["time"]
        return None

    # Optuna's contract.

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every knob: a configuration is sampled as a whole."""
        self._raise_error_if_multi_objective(study)
        if study.direction is not optuna.study.StudyDirection.MINIMIZE:
            raise ValueError(f"{self} minimises the step time: create the study with direction='minimize'")
        return dict(self.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A candidate that no trial has or had; where all were tried, the best one again."""
        self.learn(study)
        running = {_config_of(other) for other in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))}
        free = self.model.assess().untried & np.array([one not in running for one in self.model.candidates])
        best = self.model.best_trial()
        if free.any():
            config = self.choose(study, trial, free)
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


def ordered(now: Assessment, gain: Array, wanted: NDArray[np.bool_]) -> list[int]:
    """The indices of the wanted candidates, the highest score first (`next_work.score`)."""
    places = np.flatnonzero(wanted)
    return [int(places[i]) for i in np.argsort(-score(gain[places], now.cost_s[places]), kind="stable")]


class MovingSampler(AutoplanSampler):
    """Another sampler of Optuna, each of whose points is moved to the nearest legal candidate that is free.

    The nearest is the one that differs in the fewest knobs; of several, one is drawn. The other sampler draws in a
    study of its own, in memory, in which each knob has the candidates' values alone. That study is given each trial at
    the point where it was made; what was drawn counts as failed there.

    Args:
        candidates: The legal configurations, or a model of them.
        inner: The sampler that draws.
        distributions: The real study's distribution of each knob; None: one categorical of the candidates' own values.
        seed: Of the candidate that is drawn among several.
    """

    draws = True

    def __init__(
        self,
        candidates: Sequence[TrainingConfig] | CandidateModel,
        inner: optuna.samplers.BaseSampler,
        *,
        distributions: Mapping[str, BaseDistribution] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(candidates, distributions=distributions, seed=seed)
        self.inner = inner
        self._rng = np.random.default_rng(seed)
        self._own = optuna.create_study(direction="minimize", sampler=inner)
        self._told: set[int] = set()
        self._choices = choices_of(self.model.candidates)
        self._spaces: dict[str, BaseDistribution] = {
            knob: CategoricalDistribution(values) for knob, values in self._choices.items()
        }
        rows = [[getattr(one, knob) for knob in self._choices] for one in self.model.candidates]
        self._knobs = np.array(rows, dtype=object)

    def worth_a_trial(self) -> NDArray[np.bool_]:
        """Every untried candidate."""
        return self.model.assess().untried

    def choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.bool_]) -> TrainingConfig:
        """The nearest to what the other sampler draws, of those that fit in the time left where any does."""
        self._tell(study)
        affordable = free & (self.model.assess().cost_s <= self.time_left_s)
        places = np.flatnonzero(affordable if affordable.any() else free)
        asked = self._own.ask(self._spaces)
        point = np.array([asked.params[knob] for knob in self._choices], dtype=object)
        away = (self._knobs[places] != point).sum(axis=1)
        with contextlib.suppress(RuntimeError):  # a grid's last point: "Study.stop" outside of a loop
            self._own.tell(asked, state=TrialState.FAIL)
        return self.model.candidates[int(self._rng.choice(places[away == away.min()]))]

    def reseed_rng(self) -> None:
        """Gives what is drawn another seed, in the other sampler too."""
        super().reseed_rng()
        self.inner.reseed_rng()

    def _tell(self, study: optuna.Study) -> None:
        """Tells the other sampler what became of the real study's trials; never a NaN or a missing value."""
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            known = all(trial.params.get(knob) in values for knob, values in self._choices.items())
            if trial.number not in self._told and known:
                self._told.add(trial.number)
                self._own.add_trial(
                    optuna.trial.create_trial(
                        state=trial.state,
                        value=trial.value,
                        params={knob: trial.params[knob] for knob in self._spaces},
                        distributions=self._spaces,
                        constraints=trial.constraints,
                    )
                )


def make_sampler(
    wanted: str | optuna.samplers.BaseSampler,
    model: CandidateModel,
    distributions: Mapping[str, BaseDistribution],
    *,
    seed: int,
) -> AutoplanSampler:
    """The sampler of a search: ours, or one of Optuna's by its name or as an object.

    Raises:
        UsageError: an AutoplanSampler as an object: it would not have the search's cost model.
    """
    if isinstance(wanted, AutoplanSampler):
        raise UsageError(
            f"--sampler is {type(wanted).__name__} with candidates of its own",
            hint='Leave it out: a search uses it by itself ("autoplan"), with its own candidates and cost model.',
        )
    if wanted == "autoplan":
        return AutoplanSampler(model, distributions=distributions, seed=seed)
    if wanted == "tpe":
        wanted = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=5)
    elif isinstance(wanted, str):
        assert wanted == "random", wanted
        wanted = optuna.samplers.RandomSampler(seed=seed)
    return MovingSampler(model, wanted, distributions=distributions, seed=seed)


def _config_of(trial: FrozenTrial) -> TrainingConfig | None:
    try:
        return TrainingConfig.model_validate(trial.params)
    except ValidationError:
        return None  # a combination that is no configuration, or a trial that has no parameters yet
