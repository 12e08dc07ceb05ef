"""The store of one study: its folder, its owner, its record, and what an earlier run of the same search left.

A store has many studies, one folder each, named by the study's identity (planner/store/folders.py).

FOLDER/record.jsonl   the record: study, budget, trials, attempts, what was compiled ahead, parity checks, the end;
                      append-only, the truth
       study.sqlite3  the Optuna study, the samplers' memory; made again from the record if it is damaged
       clock.json     seconds spent, between two lines of the record
       lock           the lock;  owner.json: the process that holds it
       trials/0007/   output of the trial's processes
       parity/        the reference of the parity check
       hardware.json  the hardware profile that every run of the search uses
       plan.json      the plan
       plan.unverified.json  the best so far as a plan, where nothing is verified yet
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from autoplan.errors import StoreBusyError, StoreError
from autoplan.files import PRIVATE_FILE, is_special, make_private_folder, read_regular, refuse_foreign
from autoplan.planner.records import Attempt, ClaimRounds, CompiledAhead, Parity, Trial, WorkLine
from autoplan.planner.space.bounds import Bound
from autoplan.planner.store.folders import OWN_FILES, RECORD, SQLITE_FILES, move_aside
from autoplan.planner.store.journal import RecordFile, store_error, write_atomically
from autoplan.processes import ProcessIdentity, is_alive
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

RECORD_SCHEMA = 1
CLOCK_PERIOD_S = 2.0
LONGEST_CLOCK_BYTES = 4096

# What a file of the store may say, which anybody could have edited: a time of a search (ten years are none), its end.
SECONDS = TypeAdapter(Annotated[float, Field(ge=0.0, le=10 * 365 * 86_400, allow_inf_nan=False)])
END: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, str | None])
STATUS = TypeAdapter(Literal["plan_found", "no_feasible_plan", "did_not_run", "budget_ended", "interrupted"])


def study_identity(
    spec: WorkloadSpec,
    hardware_fingerprint: str,
    *,
    device: str,
    fix: Mapping[str, Any],
    bound: Mapping[str, Bound],
    nproc: int,
    memory_limit_bytes: int | None,
    objective: Mapping[str, Any] | None = None,
    numerics: str = "kept",
) -> str:
    """16 hex digits over what is trained, on what, and the options that change the space.

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
    }
    parts |= {"objective": dict(objective)} if objective else {}  # searches without one had no such key
    if numerics != "kept":  # earlier studies have no such key
        parts["numerics"] = numerics
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """The open store of one study; a context manager. One process owns it at a time.

    Args:
        folder: The study's folder.
        identity: The study's identity.
        summary: What the study is, for people; kept in the record's first line.
        fresh: Move what is there of this study aside and begin anew.
        wait: Wait while another search owns it.

    `renamed_to` is where an earlier record was moved; None: it was not. `folder` is where the study is now.

    Raises:
        StoreBusyError: another search owns it, and `wait` is False.
        StoreError: not writable, full, damaged, or the folder is of another study.
    """

    def __init__(
        self, folder: Path, identity: str, *, summary: Mapping[str, Any], fresh: bool = False, wait: bool = False
    ) -> None:
        self.folder = folder
        self.identity = identity
        self._trials: list[Trial] = []
        self._attempts: list[Attempt] = []
        self._compiled: list[CompiledAhead] = []
        self._parities: dict[TrainingConfig, Parity] = {}
        self._ledger: list[WorkLine] = []
        self._claims: list[ClaimRounds] = []
        self._budget_s: float | None = None
        self._finished: dict[str, Any] | None = None
        self._finished_budget_s = 0.0  # what it finished with: only more opens it again
        self._plan_found: dict[str, Any] | None = None  # the last end with a plan, also where the search goes on
        self._spent_before_s = 0.0
        self._clock_written = 0.0
        self._lock = _take(folder, identity, wait=wait)
        self._run_began = time.monotonic()
        try:
            self.renamed_to: Path | None = None
            if fresh and (folder / RECORD).exists():
                self.folder, self.renamed_to = move_aside(folder, identity)
                self._lock.release()
                self._lock = _take(self.folder, identity)
            self._record = RecordFile(self.folder / RECORD)
            self._load(summary)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes the clock and gives the lock back."""
        try:
            self.tick(force=True)
        except StoreError:
            pass  # a full disk: what is in the record counts
        self._record.close()
        (self.folder / "owner.json").unlink(missing_ok=True)
        self._lock.release()

    # What is known.

    @property
    def spent_s(self) -> float:
        """Seconds spent on this study over all runs, this one included."""
        return self._spent_before_s + time.monotonic() - self._run_began

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All finished trials, in order; those of earlier runs are marked as resumed."""
        return tuple(self._trials)

    @property
    def next_number(self) -> int:
        """The number of the next trial; one that did not run keeps its number."""
        numbers = [trial.number for trial in self._trials]
        numbers += [attempt.number for attempt in self._attempts if attempt.number is not None]
        return 1 + max(numbers, default=-1)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The runs that something outside ended, in order."""
        return tuple(self._attempts)

    @property
    def compiled_ahead(self) -> tuple[CompiledAhead, ...]:
        """What was compiled side by side before its trials, in order."""
        return tuple(self._compiled)

    @property
    def ledger(self) -> tuple[WorkLine, ...]:
        """The pieces of work that were done, in order: where the time went."""
        return tuple(self._ledger)

    @property
    def claims(self) -> tuple[ClaimRounds, ...]:
        """The claims that were begun, in order."""
        return tuple(self._claims)

    def parity_of(self, config: TrainingConfig) -> Parity | None:
        """The parity verdict of a configuration, if it was checked."""
        return self._parities.get(config)

    @property
    def budget_s(self) -> float | None:
        """The budget an earlier run was given; None: none was."""
        return self._budget_s

    @property
    def finished(self) -> dict[str, Any] | None:
        """How the search finished, if it did and no budget was added since."""
        return self._finished

    @property
    def finished_budget_s(self) -> float:
        """The budget that the search last finished with, in seconds; 0: it never did."""
        return self._finished_budget_s

    @property
    def plan_was_found(self) -> bool:
        """Whether the search came to a plan before, also where it goes on now."""
        return self._plan_found is not None

    # What is added.

    def add_trial(self, trial: Trial) -> None:
        """Puts a finished trial on disk."""
        self._append({"kind": "trial", "trial": trial.model_dump(mode="json", exclude={"resumed"})})
        self._trials.append(trial)

    def add_attempt(self, attempt: Attempt) -> None:
        """Puts a run that does not count on disk."""
        self._append({"kind": "attempt", "attempt": attempt.model_dump(mode="json")})
        self._attempts.append(attempt)

    def add_compiled_ahead(self, compiled: CompiledAhead) -> None:
        """Puts on disk what was compiled ahead."""
        self._append({"kind": "compiled_ahead", "compiled_ahead": compiled.model_dump(mode="json")})
        self._compiled.append(compiled)

    def add_work(self, line: WorkLine) -> None:
        """Puts a line of the ledger on disk."""
        self._append({"kind": "work", "work": line.model_dump(mode="json")})
        self._ledger.append(line)

    def add_claim(self, claim: ClaimRounds) -> None:
        """Puts on disk how many rounds a claim has, before the first."""
        self._append({"kind": "claim", "claim": claim.model_dump(mode="json")})
        self._claims.append(claim)

    def add_parity(self, config: TrainingConfig, parity: Parity) -> None:
        """Puts a parity verdict on disk."""
        self._append(
            {"kind": "parity", "config": config.model_dump(mode="json"), "parity": parity.model_dump(mode="json")}
        )
        self._parities[config] = parity

    def set_budget(self, budget_s: float) -> None:
        """Notes the budget of the whole search; more than it finished with opens a finished search again."""
        if budget_s != self._budget_s:
            self._append({"kind": "budget", "budget_s": budget_s})
            self._take_budget(budget_s)

    def open_again(self) -> None:
        """A finished search goes on within the budget that it has now."""
        self._finished = None

    def finish(self, status: str, **facts: Any) -> None:
        """Notes how the search ended. After a plan was found, `budget_ended` leaves that end: the plan stays."""
        budget_s = self._finished_budget_s if self._finished is not None else self._budget_s or 0.0
        self._append({"kind": "finished", "budget_s": budget_s, "status": status, **facts})
        self._take_end({"status": status, **facts}, budget_s)

    def start_clock(self) -> None:
        """Begins the time of this run: what it waited for before does not count."""
        self._run_began = time.monotonic()

    def tick(self, *, force: bool = False) -> None:
        """Writes the seconds spent, every two seconds at most, so that a killed run's time still counts."""
        now = time.monotonic()
        if force or now - self._clock_written >= CLOCK_PERIOD_S:
            self._clock_written = now
            write_atomically(self.folder / "clock.json", json.dumps({"spent_s": round(self.spent_s, 3)}))

    def _take_budget(self, budget_s: float) -> None:
        self._budget_s = budget_s
        if budget_s > self._finished_budget_s:
            self._finished = None

    def _take_end(self, end: dict[str, Any], budget_s: float) -> None:
        if end["status"] != "budget_ended":
            self._plan_found = end if end["status"] == "plan_found" else None
        elif self._plan_found is not None:
            end = self._plan_found | {"ended_by": end.get("ended_by", "time")}
        self._finished, self._finished_budget_s = end, budget_s

    def _append(self, document: dict[str, Any]) -> None:
        self._record.append(document | {"spent_s": round(self.spent_s, 3)})

    def _load(self, summary: Mapping[str, Any]) -> None:
        documents = self._record.documents
        if not documents:
            head = {"kind": "study", "schema": RECORD_SCHEMA, "identity": self.identity, "summary": dict(summary)}
            self._record.append(head | {"created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")})
            return
        self._check_head(documents[0], summary)
        for number, document in enumerate(documents[1:], start=2):
            try:
                self._load_one(document)
            except (ValueError, KeyError, TypeError) as error:  # pydantic's ValidationError is a ValueError
                raise StoreError(
                    f"line {number} of {self._record.path} is one that this version does not read: {_reason(error)}",
                    hint="Another version of autoplan wrote it, or it was edited. Start over with --fresh; the old "
                    "folder is kept.",
                ) from None
        try:
            clock = json.loads(read_regular(self.folder / "clock.json", limit_bytes=LONGEST_CLOCK_BYTES))
            self._spent_before_s = max(self._spent_before_s, SECONDS.validate_python(clock["spent_s"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # never written, torn, or no time that a search can take: the record's own figure counts

    def _check_head(self, head: dict[str, Any], summary: Mapping[str, Any]) -> None:
        if head.get("kind") != "study" or head.get("schema") != RECORD_SCHEMA:
            raise StoreError(
                f"{self._record.path} is not a record of this version of autoplan",
                hint="Give another folder with --store DIR, or start over with --fresh.",
            )
        if head.get("identity") != self.identity:
            raise StoreError(
                f"{self.folder} holds another search: {_differences(head.get('summary'), summary)}",
                hint="A search resumes only with the same workload, machine and options. Give another folder with "
                "--store DIR, or start over here with --fresh (the old folder is kept under another name).",
            )

    def _load_one(self, document: dict[str, Any]) -> None:
        self._spent_before_s = max(self._spent_before_s, SECONDS.validate_python(document.get("spent_s", 0.0)))
        match document["kind"]:
            case "trial":
                self._trials.append(Trial.model_validate(document["trial"] | {"resumed": True}))
            case "parity":
                parity = Parity.model_validate(document["parity"])
                self._parities[TrainingConfig.model_validate(document["config"])] = parity
            case "attempt":
                self._attempts.append(Attempt.model_validate(document["attempt"]))
            case "compiled_ahead":
                self._compiled.append(CompiledAhead.model_validate(document["compiled_ahead"]))
            case "work":
                self._ledger.append(WorkLine.model_validate(document["work"]))
            case "claim":
                self._claims.append(ClaimRounds.model_validate(document["claim"]))
            case "budget":
                self._take_budget(SECONDS.validate_python(document["budget_s"]))
            case "finished":
                end = {key: value for key, value in document.items() if key not in ("kind", "spent_s", "budget_s")}
                STATUS.validate_python(end["status"])
                self._take_end(END.validate_python(end), SECONDS.validate_python(document["budget_s"]))


DIGESTS = {
    "workload_digest": "what is trained (code, configuration, data or weights) is not the same",
    "hardware_digest": "the machine is not the same (devices, memory, driver or version of torch)",
}


def _differences(there: object, here: Mapping[str, Any]) -> str:
    """What a search that is on disk was asked for, where that differs from this one; in words."""
    if not isinstance(there, dict):
        return "what it was asked for is not known"
    known = [key for key in (*there, *(key for key in here if key not in there)) if key not in DIGESTS]
    said = [
        f"{key.replace('_', ' ')} {_value(there.get(key))} there, {_value(here.get(key))} here"
        for key in known
        if there.get(key) != here.get(key)
    ]
    said += [text for key, text in DIGESTS.items() if key in there and key in here and there[key] != here[key]]
    return "; ".join(said) or "its workload, machine or version is not the same, and its record does not say which"


def _reason(error: Exception) -> str:
    """What is wrong with a line, in a few words: pydantic's own texts have several lines, and begin with a class."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if not isinstance(error, ValidationError):
        return str(error).partition("\n")[0]
    first = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'a value'}: {first['msg']}, and it is {str(first['input'])[:80]!r}"


def _value(value: object) -> str:
    return "not given" if value in (None, {}, "") else str(value)


def _take(folder: Path, identity: str, *, wait: bool = False) -> Any:
    """Makes the folder, for the user alone, and takes its lock."""
    import filelock

    try:
        if folder.name == identity and folder.parent.exists():
            refuse_foreign(folder.parent, root_ok=True)  # who owns the store can put another study into it
        make_private_folder(folder, close=folder.name == identity)  # in any other, there may be files of the user
        make_private_folder(folder / "trials")
        for name in (*OWN_FILES, *SQLITE_FILES):
            if is_special(folder / name):
                raise OSError(errno.EINVAL, f"{name} in it is a pipe or a device", str(folder))
        lock = filelock.FileLock(folder / "lock", timeout=-1 if wait else 0, mode=PRIVATE_FILE)
        lock.acquire()
    except filelock.Timeout:
        raise StoreBusyError(
            f"the store {folder} is in use by another search, {_owner(folder)}",
            hint="Wait for it with --wait, end it, or give this search a folder of its own with --store DIR.",
        ) from None
    except OSError as error:
        raise store_error(folder, error) from error
    try:
        write_atomically(folder / "owner.json", ProcessIdentity.current().model_dump_json())
    except BaseException:
        lock.release()
        raise
    return lock


def _owner(folder: Path) -> str:
    try:
        identity = ProcessIdentity.model_validate_json(read_regular(folder / "owner.json", limit_bytes=4096))
    except (OSError, ValidationError):
        return "process unknown"
    return f"process {identity.pid}" + ("" if is_alive(identity) else " (not on this machine)")
