"""Who owns a process or a temporary folder, and what owners that are gone left behind.

A process is named so that a reused pid or a reboot cannot be taken for it. A temporary folder has its owner in its
name, a process that a zygote started has it in its environment: so that what a killed planner left can be told from
what is in use.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from functools import cache
from pathlib import Path

from autoplan.processes import linux
from autoplan.record import Record

_NAME = re.compile(r"autoplan-[a-z]+-(?P<place>[0-9a-f]{8}-\d+)-(?P<pid>\d+)-(?P<start>\d+)-\w+")

MARKER = "AUTOPLAN_ZYGOTE"
"""The environment variable that a zygote and all its descendants carry."""

_SWEEP_S = 10.0


class ProcessIdentity(Record):
    """One process, for as long as this machine is up.

    `start_time` is in clock ticks since boot, an integer from /proc/PID/stat: unlike a time of day it does not
    move when the clock is set.
    """

    boot_id: str
    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of a living process; None if there is none with this pid."""
        ticks = linux.start_ticks(pid)
        return None if ticks is None else cls(boot_id=boot_id(), pid=pid, start_time=ticks)

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The identity of this process."""
        identity = cls.of(os.getpid())
        assert identity is not None, "this process does not see itself in /proc"
        return identity


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still runs here; a zombie does not.

    "Here" is this machine and this pid namespace. Of a process on another machine or in another container it
    says False: what they may share needs a lock, and this only says who has it.
    """
    return ProcessIdentity.of(identity.pid) == identity


@cache
def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# Temporary folders.


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


# Processes.


def sweep_abandoned() -> None:
    """Kills what a dead planner left behind: only processes that carry a zygote's mark in their environment.

    Needed only where planner and zygote were killed at the same moment; otherwise the one that lives does it.
    """
    marks = linux.environments(MARKER)
    # The pid in a mark is valid in its own pid namespace only: processes of containers are left alone.
    own_namespace = linux.pid_namespace(os.getpid())
    for marker in {mark for pid, mark in marks.items() if linux.pid_namespace(pid) == own_namespace}:
        parts = marker.split(":")
        if len(parts) == 4 and parts[1].isdigit() and parts[2].isdigit():
            owner = ProcessIdentity(boot_id=parts[0], pid=int(parts[1]), start_time=int(parts[2]))
            if not is_alive(owner):
                kill_marked(marker)


def kill_marked(marker: str) -> int:
    """SIGKILL to every process with a zygote's mark, until a look finds none; bounded."""
    killed: set[int] = set()
    give_up_at = time.monotonic() + _SWEEP_S
    while time.monotonic() < give_up_at:
        marks = linux.environments(MARKER)
        found = {pid for pid, value in marks.items() if value == marker} - {os.getpid()}
        if not found:
            break
        for pid in found:
            if linux.signal_quietly(pid, signal.SIGKILL):
                killed.add(pid)
        time.sleep(0.01)
    return len(killed)
