"""Where the studies of a store are: one folder each, named by identity; and what starting over moves aside.

DIR/IDENTITY/                      a study
    IDENTITY.old-20260102T030405/  the same study before `--fresh`
DIR/record.jsonl ...               one study directly in DIR, as stores were before they held several; it still opens
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

from autoplan.files import PRIVATE_FOLDER, open_regular
from autoplan.planner.store.journal import store_error

RECORD = "record.jsonl"
LONGEST_HEAD_BYTES = 1 << 20
"""Of the first line of a record: a study and what was asked of it, some 2 KiB."""
OWN_FILES = (
    RECORD,
    "clock.json",
    "owner.json",
    "hardware.json",
    "learned.json",
    "plan.json",
    "plan.unverified.json",
    "trials",
    "parity",
    "lock",
)
"""What a study's folder contains, beside the SQLite study (`study.sqlite3*`)."""

SQLITE_FILES = ("study.sqlite3", "study.sqlite3-wal", "study.sqlite3-shm", "study.sqlite3-journal")


def study_folder(store: Path | None, identity: str) -> Path:
    """The folder of a study in a store; None: the store in the user's state folder."""
    if store is None:
        import platformdirs

        return Path(platformdirs.user_state_dir("autoplan")) / "studies" / identity
    return store if _identity_in(store) == identity else store / identity


def move_aside(folder: Path, identity: str) -> tuple[Path, Path]:
    """Moves a study aside and deletes nothing; returns where it is to begin anew, and where the old one is.

    A folder that is named by the identity is the study's alone, and is renamed. In any other, only the study's own
    files are moved: it may contain other studies, or files of the user.

    Raises:
        StoreError: they cannot be moved.
    """
    alone = folder.name == identity
    anew = folder if alone else folder / identity
    aside = _free_name(anew)
    try:
        if alone:
            os.rename(folder, aside)
        else:
            aside.mkdir(mode=PRIVATE_FOLDER)
            for path in sorted((*(folder / name for name in OWN_FILES), *folder.glob("study.sqlite3*"))):
                if path.exists():
                    os.rename(path, aside / path.name)
    except OSError as error:
        raise store_error(folder, error) from error
    return anew, aside


def _identity_in(folder: Path) -> str | None:
    """The identity of the study that is directly in a folder; None: there is none, or its first line is damaged."""
    try:
        with open_regular(folder / RECORD) as lines:
            head = json.loads(lines.readline(LONGEST_HEAD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    identity = head.get("identity") if isinstance(head, dict) else None
    return identity if isinstance(identity, str) else None


def _free_name(folder: Path) -> Path:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    aside = folder.with_name(f"{folder.name}.old-{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.old-{stamp}-{number}")
    return aside
