"""The searches of a store, as their files say: what each is, how old, how large, how it ended. Loads no torch."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.errors import StoreBusyError, StoreError
from autoplan.files import folder_bytes, read_regular
from autoplan.planner.store.journal import RECORD, parse_lines, read_end
from autoplan.planner.store.locks import OwnedLock

LONGEST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One search of a store.

    Attributes:
        folder: Its folder; None: it is in a database.
        name: The folder's name: the identity of the search, or IDENTITY.old-DATE of one that was moved aside.
        summary: What is trained and how it was asked for, as its record begins.
        age_s: Seconds since its record was last written.
        size_bytes: Of all its files.
        trials: How many finished.
        status: `running`, how it ended, or `stopped` if it can go on.
        speedup: Of its plan over the baseline, the median and the interval; None: it has none.
    """

    folder: Path | None
    name: str
    summary: Mapping[str, Any]
    age_s: float
    size_bytes: int
    trials: int
    status: str
    speedup: Mapping[str, float] | None


def list_studies(store: Path) -> list[Study]:
    """The searches in a store, the one that was written last first; what is no search is left out.

    Raises:
        StoreError: the store cannot be read.
    """
    try:
        paths = store.iterdir() if store.is_dir() else ()
        folders = [path for path in paths if path.is_dir() and not path.is_symlink()]
    except OSError as error:
        raise StoreError(
            f"the store {store} cannot be read: {error.strerror}",
            hint="Make it readable, or give another with --store.",
        ) from error
    return sorted((study for folder in folders if (study := _read(folder))), key=lambda study: study.age_s)


def remove_study(study: Study) -> None:
    """Removes a search of a store with all its files.

    Raises:
        StoreBusyError: it runs.
        StoreError: it cannot be removed.
    """
    assert study.folder is not None, "one of a database is removed there"
    lock = OwnedLock(study.folder / "lock")
    try:
        if not lock.acquire():
            raise StoreBusyError(f"{study.name} runs: {lock.owner}", hint="End it first, or leave it out.")
        try:
            shutil.rmtree(study.folder)
        finally:
            lock.release()
    except OSError as error:
        raise StoreError(
            f"{study.folder} cannot be removed: {error.strerror}", hint="Remove the folder by hand."
        ) from error


def _read(folder: Path) -> Study | None:
    """The search that the files of a folder describe; None: it is no search, or was removed meanwhile."""
    try:
        lines, _ = parse_lines(read_regular(folder / RECORD, limit_bytes=LONGEST_BYTES))
        written_s = (folder / RECORD).stat().st_mtime
    except OSError:
        return None
    if not lines or lines[0].get("kind") != "study":
        return None
    kinds = [line.get("kind") for line in lines]
    status = "running" if _runs(folder) else read_end(lines).status
    try:
        speedup = json.loads(read_regular(folder / "plan.json"))["speedup"] if status == "plan_found" else None
    except (OSError, ValueError, KeyError, TypeError):
        speedup = None
    return Study(
        folder=folder,
        name=folder.name,
        summary=lines[0].get("summary") or {},
        age_s=max(0.0, time.time() - written_s),
        size_bytes=folder_bytes(folder),
        trials=kinds.count("trial"),
        status=status,
        speedup=speedup,
    )


def _runs(folder: Path) -> bool:
    """Whether a living process has the search: the one that its lock names."""
    return (folder / "lock.owner").exists() and "not on this" not in OwnedLock(folder / "lock").owner
