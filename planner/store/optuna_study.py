"""The trials of a search as a study of Optuna's.

The record (planner/store/store.py) is the only copy on disk. `load_study` makes a study of it, for Optuna's importance,
plots and dashboard. Each knob is one parameter with one fixed distribution, as those need. A sampler of Optuna's that
draws the looks of a search has such a study too, in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import StoreError
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.store.journal import RECORD, read_documents
from autoplan.strategies.config import KNOBS, TrainingConfig, knob_values

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import CategoricalDistribution

NUMBER = "autoplan_trial"


def load_study(folder: str | Path, storage: str | optuna.storages.BaseStorage | None = None) -> optuna.Study:
    """The trials of a search as an Optuna study named "autoplan", for Optuna's importance, plots and dashboard.

    A search may own the folder and run meanwhile: nothing there is changed.

    Args:
        folder: Of the search (`SearchResult.store`). Of one in a database: `postgresql://host/database#SEARCH`, with
            the name that `autoplan ls --storage` gives it.
        storage: Where the study is written, as Optuna takes it, for example "sqlite:///study.sqlite3"; it has no study
            of that name. None: in memory.

    Raises:
        StoreError: the folder has no record that can be read.
        optuna.exceptions.DuplicatedStudyError: the storage has such a study.
    """
    import optuna

    url, hash_sign, name = str(folder).partition("#")
    path = Path(folder) / RECORD
    try:
        if hash_sign and url.startswith(("postgresql://", "postgres://")):
            from autoplan.planner.store.database import read_record

            documents = read_record(url, name)
        else:
            documents = read_documents(path)
        found = [doc["trial"] for doc in documents if doc.get("kind") == "trial"]
        trials = [Trial.model_validate(trial) for trial in found]
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(
            f"{path} is no record of a search that can be read: {error}",
            hint="Give the folder of one search: SearchResult.store, or DIR/IDENTITY below --store DIR.",
        ) from error
    distributions = make_distributions(choices_of(trial.config for trial in trials)) if trials else {}
    study = optuna.create_study(storage=storage, study_name="autoplan", direction="minimize")
    add_trials(study, trials, distributions)
    return study


def add_trials(
    study: optuna.Study, trials: Sequence[Trial], distributions: Mapping[str, CategoricalDistribution]
) -> None:
    """Adds the looks among some trials; not those that a distribution has no value for."""
    import optuna

    for trial in trials:
        params = {knob: getattr(trial.config, knob) for knob in KNOBS}
        if trial.is_repeat or any(params[knob] not in one.choices for knob, one in distributions.items()):
            continue
        state, value = _state(trial)
        fields = {"outcome", "detail", "reason", "phase", "purpose", "exit_status", "seconds_spent", "warnings"}
        facts = {NUMBER: trial.number, **json.loads(trial.model_dump_json(include=fields))}
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=value,
                params=params,
                distributions=dict(distributions),
                user_attrs=facts | {"peak_memory_bytes": trial.peak_memory_bytes},
                constraints={"memory": _memory_violation(trial)},
            )
        )


def make_distributions(values: Mapping[str, Sequence[Any]]) -> dict[str, CategoricalDistribution]:
    """One categorical per knob: the closed list where the knob has one (so that it never varies), else the space's.

    The plain run's value is always among them, since that of a baseline is in the study too.
    """
    from optuna.distributions import CategoricalDistribution

    plain = TrainingConfig(micro_batch=1)
    distributions: dict[str, CategoricalDistribution] = {}
    for knob in KNOBS:
        choices = knob_values(knob)
        if choices is None:
            own = () if knob == "micro_batch" else (getattr(plain, knob),)
            choices = tuple(dict.fromkeys((*own, *values.get(knob, ()))))
        distributions[knob] = CategoricalDistribution(choices)
    return distributions


def choices_of(configs: Iterable[TrainingConfig]) -> dict[str, tuple[Any, ...]]:
    """For each knob, the values that it takes among some configurations, in the order in which they come."""
    listed = tuple(configs)
    return {knob: tuple(dict.fromkeys(getattr(config, knob) for config in listed)) for knob in KNOBS}


def _state(trial: Trial) -> tuple[Any, float | None]:
    """Optuna's state and value: measured ones count (given up early or not); memory is a constraint, not a value."""
    from optuna.trial import TrialState

    if trial.outcome in (Outcome.OK, Outcome.PRUNED) and trial.step_time_s is not None:
        return TrialState.COMPLETE, trial.step_time_s.median
    if trial.outcome is Outcome.OUT_OF_MEMORY:
        return TrialState.PRUNED, None
    return TrialState.FAIL, None


def _memory_violation(trial: Trial) -> float:
    """Bytes over the limit as a share of it; above zero is infeasible."""
    limit_bytes = trial.peak_memory.limit_bytes or 0
    if limit_bytes <= 0:
        return 0.0
    peak = float(trial.peak_memory_bytes or 0)
    if trial.outcome is Outcome.OUT_OF_MEMORY:
        return max(0.05, peak / limit_bytes - 1)
    return peak / limit_bytes - 1 if peak else -1.0
