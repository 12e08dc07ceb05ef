"""Temporary folders that name their owner, so that what a killed process left can be told from what is in use."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from autoplan.processes import linux
from autoplan.processes.owner import ProcessIdentity, boot_id, is_alive

_NAME = re.compile(r"autoplan-[a-z]+-(?P<place>[0-9a-f]{8}-\d+)-(?P<pid>\d+)-(?P<start>\d+)-\w+")


def folder_prefix(kind: str) -> str:
    """The beginning of a temporary folder's name, for tempfile: what it is for, this machine and this process.

    Args:
        kind: What the folder is for, in small letters: "task".
    """
    owner = ProcessIdentity.current()
    return f"autoplan-{kind}-{_place()}-{owner.pid}-{owner.start_time}-"


def sweep_folders() -> int:
    """Removes the temporary folders of this user's processes that ended without removing them.

    Left alone is what another boot, machine or container made: whether its owner lives cannot be known from here.

    Returns:
        How many folders were removed.
    """
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob("autoplan-*"):
        name = _NAME.fullmatch(folder.name)
        if name is None or name["place"] != _place():
            continue
        owner = ProcessIdentity(boot_id=boot_id(), pid=int(name["pid"]), start_time=int(name["start"]))
        if is_alive(owner) or not _is_own_folder(folder):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed += 1
    return removed


def _place() -> str:
    """This boot of this machine, and this pid namespace."""
    digits = re.sub(r"\D", "", linux.pid_namespace(os.getpid()) or "") or "0"
    return f"{boot_id()[:8]}-{digits}"


def _is_own_folder(folder: Path) -> bool:
    """Whether it is a folder of this user's, not a link to one."""
    try:
        return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()
    except OSError:
        return False
