"""Samplers of the Optuna study: ours, and any other of Optuna's with its illegal points drawn again.

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
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from autoplan.errors import UsageError
from autoplan.planner.search.candidate_model import Assessment, CandidateModel, prospects
from autoplan.planner.search.surrogate import Array
from autoplan.planner.store.optuna_study import choices_of, make_distributions, read_trial, to_params
from autoplan.strategies.config import TrainingConfig

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MAX_REDRAWS = 200
MAX_REPEATS = 5
"""A sampler that draws the same illegal point so often in a row follows a rule, and would go on with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Why no further trial is worth making: nothing can win any more, or nothing fits in the time left."""

    text: str
    out_of_time: bool = False


class CandidateSampler(optuna.samplers.BaseSampler):
    """A sampler that gives legal candidates only, each once.

    Args:
        candidates: The legal configurations, or a model of them.
        distributions: The study's distribution of each knob; None: one categorical of the candidates' own values.
        seed: Of what is drawn.

    A search sets two more before it asks. `time_left_s`: how long the next trial may take, by its expected cost.
    `deadline_s`: gives the seconds after which a trial of a configuration would be ended; None: it never is.
    """

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
        self.deadline_s: Callable[[TrainingConfig], float] | None = None
        self._other_parameters = optuna.samplers.RandomSampler(seed)

    @abstractmethod
    def choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.bool_]) -> TrainingConfig:
        """The configuration of a trial, among the candidates that are free; there is at least one."""

    def ranking(self, *, in_time: bool = True) -> list[TrainingConfig]:
        """The untried candidates in the order in which they would be next if no trial taught anything new.

        Only those that can win and whose trial would end in the time that is left; none where the next one is drawn.

        Args:
            in_time: False: as if there was all the time.
        """
        return []

    @abstractmethod
    def reason_to_stop(self, study: optuna.Study | None = None) -> Stop | None:
        """Why no further trial is worth making, None while one is. With a study: after the trials that it has now."""

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
        free = self.model.assess().untried & ~self._running(study)
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

    # The trials of the study.

    def learn(self, study: optuna.Study) -> None:
        """Takes in the study's finished trials that were not taken in yet."""
        for frozen in study.get_trials(deepcopy=False):
            if frozen.state.is_finished():
                self._take_in(frozen)

    def _take_in(self, frozen: FrozenTrial) -> None:
        trial = read_trial(frozen, self.model.memory_limit_bytes)
        if trial is not None:
            self.model.observe(trial)

    def _running(self, study: optuna.Study) -> NDArray[np.bool_]:
        """The candidates that other trials are measuring now."""
        frozen = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        configs = {config for config in map(_config_of, frozen) if config is not None}
        return np.array([config in configs for config in self.model.candidates])


class AutoplanSampler(CandidateSampler):
    """The candidate with the most expected improvement per square root of its cost: expensive ones wait, not starve.

    Args:
        candidates: The legal configurations; a search gives a model of them, with its cost model.
        distributions: The study's distribution of each knob; None: one categorical of the candidates' own values.
        seed: Of parameters that are no knobs. The choice of a candidate draws nothing.

    `distributions` is what to ask a study with: `study.ask(sampler.distributions)`.
    """

    def choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.bool_]) -> TrainingConfig:
        """The one with the highest score; of those that can win and that fit in the time left, where there are any."""
        now = self.model.assess()
        gain, hopeful = prospects(now)
        for wanted, in_time in ((free & hopeful, True), (free & hopeful, False), (free, False)):
            for found in self._ordered(now, gain, wanted, in_time=in_time):
                return found
        raise AssertionError("choose() was called with no free candidate")

    def ranking(self, *, in_time: bool = True) -> list[TrainingConfig]:
        """As `choose` would take them, one after the other."""
        now = self.model.assess()
        return list(self._ordered(now, *prospects(now), in_time=in_time))

    def _ordered(
        self, now: Assessment, gain: Array, wanted: NDArray[np.bool_], *, in_time: bool = True
    ) -> Iterator[TrainingConfig]:
        """Some candidates, the highest score first; `in_time`: those whose trial would end in the time that is left."""
        if in_time:
            wanted = wanted & (now.cost_s <= self.time_left_s)
        order = np.argsort(-_score(now, gain, wanted), kind="stable")
        for index in order[: int(wanted.sum())]:
            config = self.model.candidates[index]
            if not in_time or self.deadline_s is None or now.cost_s[index] <= self.deadline_s(config):
                yield config

    def reason_to_stop(self, study: optuna.Study | None = None) -> Stop | None:
        """Nothing untried could still win, or what could does not fit in the time left."""
        if study is not None:
            self.learn(study)
        now = self.model.assess()
        if not now.untried.any():
            return Stop(text="every candidate was tried")
        gain, hopeful = prospects(now)
        if not hopeful.any():
            return Stop(
                text="no untried candidate could still win: each is predicted, at its most optimistic, to be no faster "
                "than the best"
            )
        if next(self._ordered(now, gain, hopeful), None) is None:
            return Stop(text="no candidate that could win fits in the time left", out_of_time=True)
        return None

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


def _score(now: Assessment, gain: Array, wanted: NDArray[np.bool_]) -> Array:
    """The expected improvement per square root of a trial's cost; -1 for what is not wanted."""
    return np.where(wanted, gain / np.sqrt(np.maximum(now.cost_s, 1.0)), -1.0)


class RedrawingSampler(CandidateSampler):
    """Another sampler of Optuna, whose illegal and already tried points are drawn again at no trial's cost.

    It draws in a study of its own, in memory: there each knob has the candidates' values alone, each trial of the real
    study is told as it ended, and a point that is drawn again is told as failed, which Optuna's samplers ignore. After
    MAX_REDRAWS points, MAX_REPEATS times the same one in a row, or the last point of a grid, a legal candidate is drawn
    at random.

    Args:
        candidates: The legal configurations, or a model of them.
        inner: The sampler that draws.
        distributions: The real study's distribution of each knob; None: one categorical of the candidates' own values.
        seed: Of the candidate that is drawn at random in the end.
    """

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
        self._random = random.Random(seed)
        self._mirror = optuna.create_study(direction="minimize", sampler=inner)
        self._mirrored: set[int] = set()
        self._asked: dict[int, optuna.Trial] = {}
        self._ended = False
        self._choices = choices_of(self.model.candidates)
        self._narrow: dict[str, BaseDistribution] = {
            knob: CategoricalDistribution(choices) for knob, choices in self._choices.items()
        }

    def choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.bool_]) -> TrainingConfig:
        """What the other sampler draws, once it is legal, untried, and fits in the time left where anything does."""
        self._tell_mirror(study)
        affordable = free & (self.model.assess().cost_s <= self.time_left_s)
        wanted = affordable if affordable.any() else free
        legal = [self.model.candidates[i] for i in np.flatnonzero(wanted)]
        allowed = frozenset(legal)
        last: Mapping[str, Any] | None = None
        repeats = 0
        for _ in range(MAX_REDRAWS):
            if self._ended:
                break
            asked = self._mirror.ask(self._narrow)
            config = _config_of(asked)
            if config in allowed:
                self._asked[trial.number] = asked
                return config
            self._tell(asked, TrialState.FAIL)
            repeats = repeats + 1 if asked.params == last else 1
            last = asked.params
            if repeats >= MAX_REPEATS:
                break
        return self._random.choice(legal)

    def reason_to_stop(self, study: optuna.Study | None = None) -> Stop | None:
        """Every candidate was tried, or none that was not fits in the time left."""
        if study is not None:
            self.learn(study)
        now = self.model.assess()
        if not now.untried.any():
            return Stop(text="every candidate was tried")
        if not (now.untried & (now.cost_s <= self.time_left_s)).any():
            return Stop(text="no untried candidate fits in the time left", out_of_time=True)
        return None

    def reseed_rng(self) -> None:
        """Gives what is drawn another seed, in the other sampler too."""
        super().reseed_rng()
        self.inner.reseed_rng()

    def _tell_mirror(self, study: optuna.Study) -> None:
        """Tells the study in memory what became of the real study's trials; never a NaN or a missing value."""
        for trial in study.get_trials(deepcopy=False):
            if not trial.state.is_finished() or trial.number in self._mirrored:
                continue
            self._mirrored.add(trial.number)
            asked = self._asked.pop(trial.number, None)
            if asked is not None:
                for name, violation in trial.constraints.items():
                    asked.set_constraint(name, violation)
                self._tell(asked, trial.state, trial.value if trial.state is TrialState.COMPLETE else None)
            elif trial.state is not TrialState.FAIL and self._is_within(trial.params):
                self._mirror.add_trial(
                    optuna.trial.create_trial(
                        state=trial.state,
                        value=trial.value,
                        params={knob: trial.params[knob] for knob in self._narrow},
                        distributions=dict(self._narrow),
                        constraints=trial.constraints,
                    )
                )

    def _tell(self, asked: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        """Tells one trial of the study in memory, and notes whether the sampler has no further points."""
        try:
            self._mirror.tell(asked, value, state=state)
        except RuntimeError as error:
            if "Study.stop" not in str(error):  # what a GridSampler or a BruteForceSampler does after its last point
                raise
            self._ended = True

    def _is_within(self, params: Mapping[str, Any]) -> bool:
        return all(knob in params and params[knob] in choices for knob, choices in self._choices.items())


def make_sampler(
    wanted: str | optuna.samplers.BaseSampler,
    model: CandidateModel,
    distributions: Mapping[str, BaseDistribution],
    *,
    seed: int,
) -> CandidateSampler:
    """The sampler of a search: ours, or one of Optuna's by its name or as an object.

    Raises:
        UsageError: an AutoplanSampler as an object: it would not have the search's cost model.
    """
    if isinstance(wanted, CandidateSampler):
        raise UsageError(
            f"--sampler is {type(wanted).__name__} with candidates of its own",
            hint='Leave it out: a search uses it by itself ("autoplan"), with its own candidates and cost model.',
        )
    if wanted == "autoplan":
        return AutoplanSampler(model, distributions=distributions, seed=seed)
    inner = _named_sampler(wanted, seed) if isinstance(wanted, str) else wanted
    return RedrawingSampler(model, inner, distributions=distributions, seed=seed)


def _named_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's samplers that have a name of their own on the command line."""
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=5)
    assert name == "random", name
    return optuna.samplers.RandomSampler(seed=seed)


def _config_of(trial: FrozenTrial | optuna.Trial) -> TrainingConfig | None:
    try:
        return TrainingConfig.model_validate(trial.params)
    except ValidationError:
        return None  # a combination that is no configuration, or a trial that has no parameters yet
