"""The append-only record of a search: one JSON document per line, on disk before append() returns.

`RecordFile` is a record in a file, which has one owner. Its methods say what a store needs of any record; the other
one, which several planners share, is in database.py.

A write that was cut short (power, SIGKILL, a full disk) leaves a torn last line; opening drops it. The lines
before it are untouched.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from autoplan.errors import StoreError, UsageError
from autoplan.files import PRIVATE_FILE, read_regular, refuse_special, replace_file

RECORD, CLOCK = "record.jsonl", "clock.json"
LONGEST_CLOCK_BYTES = 4096
ROOM_HINT = "Free some space there, or give another place with --store DIR. What finished so far is kept."

# What a line may say, which anybody could have edited: a time of a search (ten years are none), its end.
SECONDS = TypeAdapter(Annotated[float, Field(ge=0.0, le=10 * 365 * 86_400, allow_inf_nan=False)])
END: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, str | None])
STATUS = TypeAdapter(Literal["plan_found", "no_feasible_plan", "did_not_run", "budget_ended", "interrupted"])


class LeaseLostError(StoreError):
    """Another planner has taken over the work that a line is about: the line is not written."""


class RecordFile:
    """Lines of JSON in a file that is only ever added to. It has one owner, who has all the work.

    Args:
        path: The file; it is made if it is not there.

    Attributes:
        documents: The lines as it was opened; the first says what the study is.
        place: Where it is, for errors.
        shared: Whether other planners may work on the study meanwhile.

    Raises:
        StoreError: the file cannot be opened, or a line before the last is damaged.
    """

    shared = False

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, str(path)
        try:
            existed = path.exists()
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, PRIVATE_FILE)
        except OSError as error:
            raise store_error(path, error) from error
        try:
            refuse_special(self._fd, path)
            os.fchmod(self._fd, PRIVATE_FILE)  # one that was copied here may be readable to others
            if not existed:
                sync_directory(path.parent)
            with os.fdopen(self._fd, "rb", closefd=False) as file:
                content = file.read()
            self.documents, self._end = _whole_lines(path, content)
            if self._end < len(content):  # a torn tail
                os.ftruncate(self._fd, self._end)
                os.fsync(self._fd)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise store_error(path, error) from error
            raise

    def append(self, document: dict[str, Any], *, key: str | None = None) -> None:
        """Adds a line and waits until it is on disk. With a key: only if this planner still has that piece of work.

        An interrupt (Ctrl-C) leaves the whole line or nothing of it.

        Raises:
            LeaseLostError: another planner has it now.
            StoreError: it could not be written; the file is then as it was before.
        """
        line, before = json.dumps(document, separators=(",", ":")).encode() + b"\n", self._end
        try:
            os.lseek(self._fd, before, os.SEEK_SET)
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
            self._end = before + len(line)
            os.fsync(self._fd)
        except BaseException as error:
            if isinstance(error, OSError):
                self._end = before
            with contextlib.suppress(OSError):  # the next open drops the torn line
                os.ftruncate(self._fd, self._end)
            if isinstance(error, OSError):
                raise store_error(self.path, error) from error
            raise
        self.documents.append(document)

    def news(self) -> list[dict[str, Any]]:
        """The lines that other planners added since the last call, in order: none."""
        return []

    def others(self) -> Mapping[str, bool]:
        """The pieces of work that other living planners have, and whether they have them alone: none."""
        return {}

    def claim(self, key: str, *, alone: bool = False) -> bool:
        """Takes a piece of work; False: another planner has it, or has written about it since the last `news`.

        Alone: no other planner has any work meanwhile, and none has written anything since.
        """
        return True

    def release(self, key: str) -> None:
        """Gives a piece of work back."""

    def take_number(self, least: int) -> int:
        """A number for a trial, at least `least`."""
        return least

    def keep_clock(self, spent_s: float) -> None:
        """Writes the seconds spent beside the record, so that a killed planner's time still counts."""
        write_atomically(self.path.with_name(CLOCK), json.dumps({"spent_s": round(spent_s, 3)}))

    def kept_clock(self) -> float:
        """The seconds that were written; 0 where the file is torn, or is none."""
        try:
            clock = json.loads(read_regular(self.path.with_name(CLOCK), limit_bytes=LONGEST_CLOCK_BYTES))
            return float(clock["spent_s"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return 0.0

    def close(self) -> None:
        """Closes the file; closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(kw_only=True, slots=True)
class SearchEnd:
    """How a search ended, by those lines of its record that say so, taken in one after another.

    Attributes:
        budget_s: The budget that it was given last; None: it was given none.
        finished: How it finished; None: it did not, or a larger budget was added since.
        finished_budget_s: What it last finished with: only more opens it again.
        plan_found: The last end with a plan, also where the search goes on.
    """

    budget_s: float | None = None
    finished: dict[str, Any] | None = None
    finished_budget_s: float = 0.0
    plan_found: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """How it ended, in a word; `stopped`: it can go on."""
        return "stopped" if self.finished is None else str(self.finished["status"])

    def take(self, document: Mapping[str, Any]) -> None:
        """Takes in a line; one of another kind changes nothing.

        Raises:
            KeyError, TypeError, ValueError: it says no budget, or no end, of a search.
        """
        match document.get("kind"):
            case "budget":
                self.take_budget(SECONDS.validate_python(document["budget_s"]))
            case "finished":
                end = {key: value for key, value in document.items() if key not in ("kind", "spent_s", "budget_s")}
                STATUS.validate_python(end["status"])
                self.take_end(END.validate_python(end), SECONDS.validate_python(document["budget_s"]))

    def take_budget(self, budget_s: float) -> None:
        """Takes in a budget; more than it finished with opens the search again."""
        self.budget_s = budget_s
        if budget_s > self.finished_budget_s:
            self.finished = None

    def take_end(self, end: dict[str, Any], budget_s: float) -> None:
        """Takes in an end. After a plan was found, `budget_ended` leaves that end: the plan stays."""
        if end["status"] != "budget_ended":
            self.plan_found = end if end["status"] == "plan_found" else None
        elif self.plan_found is not None:
            end = self.plan_found | {"ended_by": end.get("ended_by", "time")}
        self.finished, self.finished_budget_s = end, budget_s


def read_end(documents: Iterable[Mapping[str, Any]]) -> SearchEnd:
    """The end that a record says; what is no line of a search in it is passed over."""
    end = SearchEnd()
    for document in documents:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            end.take(document)
    return end


def read_documents(path: Path) -> list[dict[str, Any]]:
    """The documents of all whole lines of a record that another process may be adding to; changes nothing.

    Raises:
        OSError: it is not there, or cannot be read.
        StoreError: a line before the last is damaged.
    """
    return _whole_lines(path, read_regular(path))[0]


def _whole_lines(path: Path, content: bytes) -> tuple[list[dict[str, Any]], int]:
    """As `parse_lines`, of a record in which only the last line may be damaged."""
    documents, end = parse_lines(content)
    if content.count(b"\n", end) > 1:
        raise StoreError(
            f"line {len(documents) + 1} of {path} is damaged, and whole lines follow it",
            hint="The file was changed by something else. Start over with --fresh (the old folder is kept), "
            "or repair that line with an editor.",
        )
    return documents, end


def parse_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The documents of all whole lines up to the first that is damaged, and where the last of them ends."""
    documents: list[dict[str, Any]] = []
    end = 0
    while (newline := content.find(b"\n", end)) >= 0:
        try:
            document = json.loads(content[end:newline])
        except (ValueError, RecursionError):
            break
        if not isinstance(document, dict):
            break
        documents.append(document)
        end = newline + 1
    return documents, end


def sync_directory(path: Path) -> None:
    """Makes the names in a folder durable (fsync of the folder itself)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file as a whole; it is for the user alone.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        replace_file(path, text, private=True)
    except OSError as error:
        raise store_error(path, error) from error


def check_out(path: Path) -> None:
    """Looks whether a plan can be written to a file, before a search spends its time.

    Raises:
        UsageError: it is no file, or nothing can be written there.
    """
    hint = "Give another place with --out."
    folder = path.parent
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "no regular file"
            raise UsageError(f"--out is {path}, which is {what}", hint=hint)
        if not folder.exists():
            raise UsageError(f"--out is {path}, and there is no folder {folder}", hint=f"Make it first. {hint}")
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
            file.flush()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--out is {path}, which cannot be written: {reason}", hint=hint) from None


def store_error(path: Path, error: OSError) -> StoreError:
    """The error that tells the user what an OSError in the store means."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"{path} cannot be written: the disk is full ({error.strerror})", hint=ROOM_HINT)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreError(
            f"{path} cannot be written: {error.strerror}", hint="Give a folder you may write to with --store DIR."
        )
    return StoreError(f"{path} cannot be used: {error.strerror or error}", hint="Give another place with --store DIR.")
