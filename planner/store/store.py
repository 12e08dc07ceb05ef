"""The store of one study: its folder, its owner, its record, and what an earlier run of the same search left.

A store has many studies, one folder each, named by the study's identity; `--fresh` renames one to IDENTITY.old-DATE.

FOLDER/record.jsonl   the record: study, budget, trials, attempts, parity checks, the end;
                      append-only, and the only copy
       clock.json     seconds spent, between two lines of the record
       lock           the lock;  lock.owner: the process that holds it
       trials/0007/   output of the trial's processes
       parity/        the reference of the parity check
       hardware.json  the hardware profile that every run of the search uses
       plan.json      the plan
       plan.unverified.json  the best so far as a plan, where nothing is verified yet

With `--storage` the record is in a database (database.py), which several planners share, and the verified plan too.
Each planner has a folder of its own for the rest, IDENTITY.shared-1 and on.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
from pydantic import TypeAdapter, ValidationError

from autoplan.errors import StoreBusyError, StoreError
from autoplan.files import is_special, make_private_folder, refuse_foreign
from autoplan.planner.records.trials import Attempt, ClaimRounds, Parity, Trial, WorkLine
from autoplan.planner.space.bounds import Bound
from autoplan.planner.store.journal import RECORD, SECONDS, RecordFile, SearchEnd, store_error, write_atomically
from autoplan.planner.store.locks import OwnedLock
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.planner.store.database import SharedRecord

RECORD_SCHEMA = 1
CLOCK_PERIOD_S = 2.0
PLAN_FILE = "plan.json"

KINDS: Mapping[str, type[Record]] = {
    "trial": Trial,
    "attempt": Attempt,
    "work": WorkLine,
    "claim": ClaimRounds,
}
"""The types that lines of the record hold, one each; a parity check is not here: its line has its configuration too."""


def study_identity(
    spec: WorkloadSpec,
    hardware_fingerprint: str,
    *,
    device: str,
    fix: Mapping[str, Any],
    bound: Mapping[str, Bound],
    nproc: int,
    nodes: str | None = None,
    memory_limit_bytes: int | None,
    objective: Mapping[str, Any] | None = None,
    side_by_side: int = 1,
    numerics: str = "kept",
    baseline: Mapping[str, Any] | None = None,
) -> str:
    """16 hex digits over what is trained, on what, the baseline, and the options that change the space.

    The budget, the sampler and the place of the plan are left out: changing them continues the same search.
    """
    parts = {
        "schema": RECORD_SCHEMA,
        "workload": spec.identity,
        "hardware": hardware_fingerprint,
        "device": device,
        "fixed": dict(sorted(fix.items())),  # these keys are hashed: other names would be other studies
        "bounds": {knob: allowed.describe() for knob, allowed in sorted(bound.items())},
        "nproc": nproc,
        "memory_limit_bytes": memory_limit_bytes,
        "objective": None if objective is None else dict(objective),
        "nodes": nodes,
        "side_by_side": side_by_side,
        "numerics": numerics,
        "baseline": None if baseline is None else dict(sorted(baseline.items())),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def study_folder(store: Path | None, identity: str) -> Path:
    """The folder of a study in a store, which may be given itself; None: the store in the user's state folder."""
    if store is None:
        store = Path(platformdirs.user_state_dir("autoplan")) / "studies"
    return store if store.name == identity else store / identity


class Store:
    """The open store of one study; a context manager. One process owns it at a time, or several share its record.

    Args:
        folder: The study's folder; with `storage` the beginning of its name.
        identity: The study's identity.
        summary: What the study is, for people; kept in the record's first line.
        fresh: Move what is there of this study aside and begin anew.
        wait: Wait while another search owns it.
        storage: The URL of the database that has its record; None: the record is a file.

    `renamed_to` is where an earlier record was moved, or its new name in the database; None: it was not.

    Raises:
        StoreBusyError: another search owns it, and `wait` is False.
        StoreError: not writable, full, damaged, or the folder is of another study.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        *,
        summary: Mapping[str, Any],
        fresh: bool = False,
        wait: bool = False,
        storage: str | None = None,
    ) -> None:
        self.identity = identity
        self._found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        self.parities: dict[TrainingConfig, Parity] = {}
        """The parity verdicts, by configuration."""
        self._end = SearchEnd()
        self._spent_before_s = 0.0
        self._clock_written = 0.0
        self._key: str | None = None  # of the piece of work that this planner has
        self.folder, self._lock = (folder, _take(folder, wait=wait)) if storage is None else _take_free(folder)
        self._run_began: float | None = None
        self.renamed_to: Path | str | None = None
        head = {"kind": "study", "schema": RECORD_SCHEMA, "identity": identity, "summary": dict(summary)}
        head["created"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: self._lock.release())  # of `fresh` it is another one by then
            self._record: RecordFile | SharedRecord = (
                self._open_file(fresh) if storage is None else self._open_shared(storage, head, fresh)
            )
            undo.callback(self._record.close)
            if not self._record.documents:
                self._record.append(head)
            self._load()
            undo.pop_all()

    def _open_file(self, fresh: bool) -> RecordFile:
        if fresh and (self.folder / RECORD).exists():
            self.renamed_to = _move_aside(self.folder)
            self._lock.release()
            self._lock = _take(self.folder)
        return RecordFile(self.folder / RECORD)

    def _open_shared(self, url: str, head: Mapping[str, Any], fresh: bool) -> SharedRecord:
        from autoplan.planner.store.database import SharedRecord

        for path in self.folder.glob("plan*.json"):  # of another run, which may have been of another database
            path.unlink()
        record = SharedRecord(url, self.identity, head, fresh=fresh)
        self.renamed_to = record.renamed_to
        return record

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes the clock and gives the lock back."""
        with contextlib.suppress(StoreError):  # a full disk: what is in the record counts
            self.tick(force=True)
        self._record.close()
        self._lock.release()

    # What is known.

    @property
    def spent_s(self) -> float:
        """Seconds spent on this study over all runs, this one included from `start_clock` on."""
        running_s = 0.0 if self._run_began is None else time.monotonic() - self._run_began
        return self._spent_before_s + running_s

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All finished trials, in order; those of earlier runs are marked as resumed."""
        return tuple(self._found["trial"])

    def take_number(self) -> int:
        """The number of the next trial; one that did not run keeps its number."""
        numbers = [trial.number for trial in self.trials]
        numbers += [attempt.number for attempt in self.attempts if attempt.number is not None]
        return self._record.take_number(1 + max(numbers, default=-1))

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The runs that something outside ended, in order."""
        return tuple(self._found["attempt"])

    @property
    def ledger(self) -> tuple[WorkLine, ...]:
        """The pieces of work that were done, in order: where the time went."""
        return tuple(self._found["work"])

    @property
    def claims(self) -> tuple[ClaimRounds, ...]:
        """The claims that were begun, in order."""
        return tuple(self._found["claim"])

    def parity_of(self, config: TrainingConfig) -> Parity | None:
        """The parity verdict of a configuration, if it was checked."""
        return self.parities.get(config)

    @property
    def budget_s(self) -> float | None:
        """The budget an earlier run was given; None: none was."""
        return self._end.budget_s

    @property
    def finished(self) -> dict[str, Any] | None:
        """How the search finished, if it did and no budget was added since."""
        return self._end.finished

    @property
    def finished_budget_s(self) -> float:
        """The budget that the search last finished with, in seconds; 0: it never did."""
        return self._end.finished_budget_s

    @property
    def plan_was_found(self) -> bool:
        """Whether the search came to a plan before, also where it goes on now."""
        return self._end.plan_found is not None

    # What is shared with other planners.

    @property
    def shared(self) -> bool:
        """Whether other planners may work on the study meanwhile."""
        return self._record.shared

    def refresh(self) -> tuple[Trial, ...]:
        """Takes in what other planners added to the record since the last call, and returns their trials."""
        known = len(self._found["trial"])
        self._spent_before_s, self._run_began = self.spent_s, time.monotonic()
        self._take_in(self._record.news(), resumed=False)
        return tuple(self._found["trial"][known:])

    def others(self) -> Mapping[str, bool]:
        """The keys of the pieces of work that other living planners have; True: alone."""
        return self._record.others()

    def claim(self, key: str, *, alone: bool = False) -> bool:
        """Takes a piece of work, so that no other planner does it too, and gives back the one that it has.

        Returns False where another planner has it, or has written about it since the last `refresh`. Alone: no other
        planner has any work meanwhile. Until `release`, what is added is refused (LeaseLostError) if another planner
        has taken the work over.
        """
        if self._key not in (None, key):
            self.release()
        if self._record.claim(key, alone=alone):
            self._key = key
            return True
        return False

    def release(self) -> None:
        """Gives back the piece of work that this planner has."""
        key, self._key = self._key, None
        if key is not None:
            self._record.release(key)

    def share_plan(self) -> None:
        """Puts the plan of the folder beside the record, if others share it."""
        if self.shared:
            self._append({"kind": "plan", "text": (self.folder / PLAN_FILE).read_text()})

    # What is added.

    def add(self, record: Trial | Attempt | WorkLine | ClaimRounds) -> None:
        """Puts a record on disk: a finished trial, a run that does not count, a line of the ledger, or how many
        rounds a claim has, before the first.
        """
        kind = next(kind for kind, of in KINDS.items() if isinstance(record, of))
        self._append({"kind": kind, kind: record.model_dump(mode="json", exclude={"resumed"})})
        self._found[kind].append(record)

    def add_parity(self, config: TrainingConfig, parity: Parity) -> None:
        """Puts a parity verdict on disk."""
        self._append(
            {"kind": "parity", "config": config.model_dump(mode="json"), "parity": parity.model_dump(mode="json")}
        )
        self.parities[config] = parity

    def set_budget(self, budget_s: float) -> None:
        """Notes the budget of the whole search; more than it finished with opens a finished search again."""
        if budget_s != self._end.budget_s:
            self._append({"kind": "budget", "budget_s": budget_s})
            self._end.take_budget(budget_s)

    def open_again(self) -> None:
        """A finished search goes on within the budget that it has now."""
        self._end.finished = None

    def finish(self, status: str, **facts: Any) -> None:
        """Notes how the search ended. After a plan was found, `budget_ended` leaves that end: the plan stays."""
        end = self._end
        budget_s = end.finished_budget_s if end.finished is not None else end.budget_s or 0.0
        self._append({"kind": "finished", "budget_s": budget_s, "status": status, **facts})
        end.take_end({"status": status, **facts}, budget_s)

    def start_clock(self) -> None:
        """Begins the time of this run: what it waited for before does not count."""
        self._run_began = time.monotonic()

    def tick(self, *, force: bool = False) -> None:
        """Writes the seconds spent, every two seconds at most, so that a killed run's time still counts."""
        now = time.monotonic()
        if force or now - self._clock_written >= CLOCK_PERIOD_S:
            self._clock_written = now
            self._record.keep_clock(self.spent_s)

    def _append(self, document: dict[str, Any]) -> None:
        self._record.append(document | {"spent_s": round(self.spent_s, 3)}, key=self._key)

    def _load(self) -> None:
        documents = self._record.documents
        self._check_head(documents[0])
        self._take_in(documents[1:], resumed=True)
        with contextlib.suppress(ValueError):  # no time that a search can take: the record's own figure counts
            self._spent_before_s = max(self._spent_before_s, SECONDS.validate_python(self._record.kept_clock()))

    def _take_in(self, documents: Sequence[dict[str, Any]], *, resumed: bool) -> None:
        for number, document in enumerate(documents, start=2):
            try:
                self._load_one(document, resumed=resumed)
            except (ValueError, KeyError, TypeError) as error:  # pydantic's ValidationError is a ValueError
                which = f"line {number}" if resumed else "a line"
                raise StoreError(
                    f"{which} of {self._record.place} is one that this version does not read: {_reason(error)}",
                    hint="Another version of autoplan wrote it, or it was edited. Start over with --fresh; the old "
                    "folder is kept.",
                ) from None

    def _check_head(self, head: dict[str, Any]) -> None:
        if head.get("kind") != "study" or head.get("schema") != RECORD_SCHEMA:
            why = "is not a record of this version of autoplan"
        elif head.get("identity") != self.identity:
            why = "is the record of another search: another workload, machine or options"
        else:
            return
        raise StoreError(
            f"{self._record.place} {why}",
            hint="Give another folder with --store DIR, or start over here with --fresh (the old folder is kept under "
            "another name).",
        )

    def _load_one(self, document: dict[str, Any], *, resumed: bool) -> None:
        self._spent_before_s = max(self._spent_before_s, SECONDS.validate_python(document.get("spent_s", 0.0)))
        match document["kind"]:
            case "trial":
                self._found["trial"].append(Trial.model_validate(document["trial"] | {"resumed": resumed}))
            case "parity":
                parity = Parity.model_validate(document["parity"])
                self.parities[TrainingConfig.model_validate(document["config"])] = parity
            case "attempt" | "work" | "claim" as kind:
                self._found[kind].append(KINDS[kind].model_validate(document[kind]))
            case "plan":
                write_atomically(self.folder / PLAN_FILE, TypeAdapter(str).validate_python(document["text"]))
            case "budget" | "finished":
                self._end.take(document)


def _reason(error: Exception) -> str:
    """The fault of a line, in a few words: pydantic's own texts have several lines, and begin with a class."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if not isinstance(error, ValidationError):
        return str(error).partition("\n")[0]
    first = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'a value'}: {first['msg']}, and it is {str(first['input'])[:80]!r}"


def _take(folder: Path, *, wait: bool = False) -> OwnedLock:
    """Makes the folder, for the user alone, and takes its lock."""
    lock = OwnedLock(folder / "lock")
    try:
        if folder.parent.exists():
            refuse_foreign(folder.parent, root_ok=True)  # who owns the store can put another study into it
        make_private_folder(folder)
        make_private_folder(folder / "trials")
        for path in folder.iterdir():
            if is_special(path):
                raise OSError(errno.EINVAL, f"{path.name} in it is a pipe or a device", str(folder))
        if lock.acquire(wait=wait):
            return lock
    except OSError as error:
        raise store_error(folder, error) from error
    raise StoreBusyError(
        f"the store {folder} is in use by another search, {lock.owner}",
        hint="Wait for it with --wait, end it, or give this search a folder of its own with --store DIR.",
    )


def _take_free(folder: Path) -> tuple[Path, OwnedLock]:
    """The first of FOLDER.shared-1 and on that no other planner on this machine has, and its lock."""
    number = 1
    while True:
        place = folder.with_name(f"{folder.name}.shared-{number}")
        try:
            return place, _take(place)
        except StoreBusyError:
            number += 1


def _move_aside(folder: Path) -> Path:
    """Renames a study's folder, with all that is in it, and returns where it is.

    Raises:
        StoreError: it cannot be renamed.
    """
    stamp = f"{folder.name}.old-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}"
    aside, number = folder.with_name(stamp), 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{stamp}-{number}")
    try:
        os.rename(folder, aside)
        (aside / "lock.owner").unlink(missing_ok=True)  # the process that it names has the new folder
    except OSError as error:
        raise store_error(folder, error) from error
    return aside
