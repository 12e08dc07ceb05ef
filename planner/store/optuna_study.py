"""The Optuna study: one per search, asked and told by this process alone, on SQLite.

Each knob is one parameter with one fixed distribution, so that Optuna's importance, plots and dashboard work on the
file. The record (planner/store/store.py) is the truth; a study that is damaged or lags behind is made again from it.
Which configuration is next is the business of the study's sampler, any `optuna.samplers.BaseSampler`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from autoplan.errors import StoreError
from autoplan.files import PRIVATE_FILE
from autoplan.planner.records import Interval, Outcome, PeakMemory, Trial
from autoplan.planner.store.journal import ROOM_HINT
from autoplan.processes import ProcessIdentity, is_alive
from autoplan.strategies.config import KNOBS, TrainingConfig, knob_values

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution
    from optuna.trial import FrozenTrial

SQLITE_TIMEOUT_S = 30
NUMBER = "autoplan_trial"
OWNER = "owner"

# File systems on which SQLite's write-ahead log is not safe (sqlite.org/wal.html: all processes on one host).
NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "9p")
    + ("fuse.ceph", "glusterfs", "fuse.glusterfs", "afs", "ocfs2", "gfs2", "fuse.s3fs", "fuse.gcsfuse")
)


class SearchStudy:
    """The study of one search.

    Args:
        path: The SQLite file; None: in memory.
        distributions: The distribution of each knob (`make_distributions`).
        trials: The finished trials of the record.
        sampler: Says which configuration is next, where none is given; None: Optuna's own default.

    `notes` says what had to be repaired.

    Raises:
        StoreError: the file cannot be written, for example on a full disk; asking and telling raise it too.
    """

    def __init__(
        self,
        path: Path | None,
        distributions: Mapping[str, CategoricalDistribution],
        trials: Sequence[Trial],
        sampler: optuna.samplers.BaseSampler | None = None,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.path = path
        self.notes: list[str] = []
        self.distributions = dict(distributions)
        self._spaces: dict[str, BaseDistribution] = dict(distributions)
        self._sampler = sampler
        try:
            self._study = self._open()
            self._close_dead_trials()
            self._catch_up(trials)
        except _storage_errors() as error:
            if path is None:
                raise
            if "disk is full" in str(error):  # nothing is damaged, and a new file would not fit either
                raise _unwritable(path, error) from error
            aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
            for suffix in ("", "-wal", "-shm"):
                file = path.with_name(path.name + suffix)
                if file.exists():
                    file.rename(aside.with_name(aside.name + suffix))
            self.notes.append(f"the Optuna study was made again from the record ({type(error).__name__}: {error})")
            with _writing(path):
                self._study = self._open()
                self._catch_up(trials)

    @property
    def study(self) -> optuna.Study:
        """Optuna's own object."""
        return self._study

    def ask(self, number: int, config: TrainingConfig | None = None) -> optuna.trial.Trial:
        """A RUNNING trial of the study: of the configuration that is given, else of the one that the sampler gives.

        Args:
            number: The trial's number in the record.
            config: What is measured whatever the sampler says: the baseline, the careful hand setting.
        """
        with _writing(self.path):
            if config is not None:
                self._study.enqueue_trial(to_params(config))
            trial = self._study.ask(self._spaces)
            trial.set_user_attr(NUMBER, number)
            trial.set_user_attr(OWNER, ProcessIdentity.current().model_dump())
        return trial

    def tell(self, asked: optuna.trial.Trial, trial: Trial) -> None:
        """Tells how it ended: reason and memory first, since a finished trial cannot be changed."""
        state, figure = _state(trial)
        with _writing(self.path):
            for key, value in _attributes(trial).items():
                asked.set_user_attr(key, value)
            asked.set_constraint("memory", _memory_violation(trial))
            self._study.tell(asked, figure, state=state)

    def drop(self, asked: optuna.trial.Trial) -> None:
        """Ends a trial that was asked for but never run."""
        import optuna

        with _writing(self.path):
            self._study.tell(asked, state=optuna.trial.TrialState.FAIL)

    def _open(self) -> optuna.Study:
        import optuna

        storage = None
        if self.path is not None:
            _make_private(self.path)
            with sqlite3.connect(self.path, timeout=SQLITE_TIMEOUT_S) as connection:
                mode = "DELETE" if is_on_network(self.path) else "WAL"
                connection.execute(f"PRAGMA journal_mode={mode}")
            connection.close()
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{self.path}", engine_kwargs={"connect_args": {"timeout": SQLITE_TIMEOUT_S}}
            )
        return optuna.create_study(
            storage=storage, study_name="autoplan", direction="minimize", sampler=self._sampler, load_if_exists=True
        )

    def _close_dead_trials(self) -> None:
        """Ends RUNNING trials of owners that are gone: they would repel the sampler from where they sat, for ever."""
        import optuna

        for trial in self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            owner = trial.user_attrs.get(OWNER)
            if owner is None or not is_alive(ProcessIdentity.model_validate(owner)):
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                self.notes.append(f"trial {trial.number} of the study was left running by a dead process; closed")
        while self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,)):
            # Killed between giving a configuration and asking for it: the next ask would be answered with it.
            self._study.tell(self._study.ask(), state=optuna.trial.TrialState.FAIL)

    def _catch_up(self, trials: Sequence[Trial]) -> None:
        """Adds what the record has and the study lacks; checks that the distributions are the same."""
        import optuna

        there = self._study.get_trials(deepcopy=False)
        for old in there:
            for knob, distribution in old.distributions.items():
                if self.distributions.get(knob) != distribution:
                    raise ValueError(f"the values of {knob} have changed")
        known = {t.user_attrs.get(NUMBER) for t in there if t.state.is_finished() and "outcome" in t.user_attrs}
        for trial in trials:
            if trial.is_repeat or trial.number in known:
                continue
            params = to_params(trial.config)
            if any(params[k] not in d.choices for k, d in self.distributions.items()):
                continue  # tried before its family was left out
            state, value = _state(trial)
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=state,
                    value=value,
                    params=params,
                    distributions=dict(self.distributions),
                    user_attrs={NUMBER: trial.number, **_attributes(trial)},
                    constraints={"memory": _memory_violation(trial)},
                )
            )


def make_distributions(values: Mapping[str, Sequence[Any]]) -> dict[str, CategoricalDistribution]:
    """One categorical per knob: the closed list where the knob has one (so that it never varies), else the space's.

    The plain run's value is always among them, since the baseline is in the study too.
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


def to_params(config: TrainingConfig) -> dict[str, Any]:
    """A configuration as Optuna's parameters."""
    return {knob: getattr(config, knob) for knob in KNOBS}


def read_trial(frozen: FrozenTrial, memory_limit_bytes: float) -> Trial | None:
    """A finished trial of any study over the knobs as a record; None: it was never run, or it is no configuration.

    The value is the step time in seconds. Where the study was not a search's own, a trial with a constraint above zero
    ran out of memory, one that failed crashed, and one that was pruned ran but has no time. Without a memory limit, out
    of memory counts as crashed: nothing says how far above the limit it was.

    Raises:
        ValueError: the value is no step time.
    """
    attributes = frozen.user_attrs
    if NUMBER in attributes and "outcome" not in attributes:
        return None  # asked for and dropped
    try:
        config = TrainingConfig.model_validate({k: v for k, v in frozen.params.items() if k in KNOBS})
    except ValidationError:
        return None
    outcome = Outcome(attributes["outcome"]) if "outcome" in attributes else _outcome(frozen)
    if outcome is Outcome.OUT_OF_MEMORY and not math.isfinite(memory_limit_bytes):
        outcome = Outcome.CRASHED
    step_time = None
    if frozen.value is not None and outcome in (Outcome.OK, Outcome.PRUNED):
        if not (math.isfinite(frozen.value) and frozen.value > 0):
            raise ValueError(f"trial {frozen.number} has the value {frozen.value}; a step time is above zero seconds")
        step_time = Interval(median=frozen.value, low=frozen.value, high=frozen.value, samples=1)
    peak = attributes.get("peak_memory_bytes")
    limit = int(memory_limit_bytes) if math.isfinite(memory_limit_bytes) else None
    return Trial(
        number=attributes.get(NUMBER, frozen.number),
        purpose=attributes.get("purpose", "search"),
        config=config,
        outcome=outcome,
        phase=attributes.get("phase", "done"),
        step_time_s=step_time,
        peak_memory=PeakMemory(resident_bytes=peak, limit_bytes=limit),
        seconds_spent=attributes.get("seconds_spent", 0.0),
    )


def _outcome(frozen: FrozenTrial) -> Outcome:
    """How a trial of a study that is no search's own ended."""
    if any(violation > 0 for violation in frozen.constraints.values()):
        return Outcome.OUT_OF_MEMORY
    return {"COMPLETE": Outcome.OK, "PRUNED": Outcome.PRUNED}.get(frozen.state.name, Outcome.CRASHED)


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


def _attributes(trial: Trial) -> dict[str, Any]:
    fields = {"outcome", "detail", "reason", "phase", "purpose", "exit_status", "seconds_spent", "warnings"}
    return json.loads(trial.model_dump_json(include=fields)) | {"peak_memory_bytes": trial.peak_memory_bytes}


@contextlib.contextmanager
def _writing(path: Path | None) -> Iterator[None]:
    """What goes wrong in the database is the store's trouble, which the user can do something about."""
    import optuna
    import sqlalchemy.exc

    try:
        yield
    except (sqlite3.DatabaseError, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path | None, error: BaseException) -> StoreError:
    cause = getattr(error, "orig", None) or error.__cause__ or error
    text = str(getattr(cause, "orig", None) or cause).splitlines()[0]
    return StoreError(f"{path or 'the study'} cannot be written: {text}", hint=ROOM_HINT)


def _storage_errors() -> tuple[type[Exception], ...]:
    import optuna
    import sqlalchemy.exc

    return (sqlite3.DatabaseError, ValueError, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)


def _make_private(path: Path) -> None:
    """Makes the file for the user alone; SQLite gives its -wal and -shm the same permissions."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
    except OSError as error:
        raise sqlite3.OperationalError(f"unable to open database file: {error.strerror}") from error
    try:
        os.fchmod(handle, PRIVATE_FILE)
    finally:
        os.close(handle)


def is_on_network(path: Path) -> bool:
    """Whether a file lies on a network file system, by the mount it is under."""
    import psutil

    path = path.resolve()
    best, kind = "", ""
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, partition.fstype
    return kind.lower() in NETWORK_FILE_SYSTEMS
