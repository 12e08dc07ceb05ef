"""The Optuna study: one per search, asked and told by this process alone, on SQLite.

Each knob is one parameter with one fixed distribution, so that Optuna's importance, plots and dashboard work on the
file. The record (planner/store/store.py) is the truth; a study that is damaged or lags behind is made again from it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import StoreError
from autoplan.planner.records import Outcome, Trial
from autoplan.planner.store.journal import ROOM_HINT
from autoplan.processes import ProcessIdentity, is_alive
from autoplan.strategies.config import KNOBS, TrainingConfig, knob_values

if TYPE_CHECKING:
    import optuna

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
        path: The SQLite file.
        values: The values each knob takes over the space.
        trials: The finished trials of the record.

    `notes` says what had to be mended.

    Raises:
        StoreError: the file cannot be written, for example on a full disk; asking and telling raise it too.
    """

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Sequence[Any]],
        trials: Sequence[Trial],
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.path = path
        self.notes: list[str] = []
        self.distributions = make_distributions(values)
        self._sampler = _make_sampler(self.distributions)
        try:
            self._study = self._open()
            self._close_dead_trials()
            self._catch_up(trials)
        except _storage_errors() as error:
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

    def ask(self, number: int, config: TrainingConfig) -> optuna.trial.Trial:
        """A RUNNING trial of the study for the configuration that was picked."""
        self._sampler.params = to_params(config)
        with _writing(self.path):
            trial = self._study.ask(self.distributions)
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
            if trial.purpose == "finalist" or trial.number in known:
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


def make_distributions(values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """One categorical per knob: the closed list where the knob has one (so that it never varies), else the space's.

    The plain run's value is always among them, since the baseline is in the study too.
    """
    from optuna.distributions import CategoricalDistribution

    plain = TrainingConfig(micro_batch=1)
    distributions = {}
    for knob in KNOBS:
        choices = knob_values(knob)
        if choices is None:
            own = () if knob == "micro_batch" else (getattr(plain, knob),)
            choices = tuple(dict.fromkeys((*own, *values.get(knob, ()))))
        distributions[knob] = CategoricalDistribution(choices)
    return distributions


def _make_sampler(distributions: Mapping[str, Any]) -> Any:
    """An Optuna sampler that gives what was put into its `params`, all knobs at once."""
    import optuna

    class GivenSampler(optuna.samplers.BaseSampler):  # here, since importing this module loads no optuna
        params: Mapping[str, Any] = {}

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return dict(distributions)

        def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
            return dict(self.params)

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            raise AssertionError(f"the sampler gives every knob at once; {param_name} was asked for by itself")

    return GivenSampler()


def to_params(config: TrainingConfig) -> dict[str, Any]:
    """A configuration as Optuna's parameters."""
    return {knob: getattr(config, knob) for knob in KNOBS}


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
def _writing(path: Path) -> Iterator[None]:
    """What goes wrong in the database is the store's trouble, which the user can do something about."""
    import optuna
    import sqlalchemy.exc

    try:
        yield
    except (sqlite3.DatabaseError, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: BaseException) -> StoreError:
    cause = getattr(error, "orig", None) or error.__cause__ or error
    text = str(getattr(cause, "orig", None) or cause).splitlines()[0]
    return StoreError(f"{path} cannot be written: {text}", hint=ROOM_HINT)


def _storage_errors() -> tuple[type[Exception], ...]:
    import optuna
    import sqlalchemy.exc

    return (sqlite3.DatabaseError, ValueError, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)


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
