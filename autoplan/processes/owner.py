"""Who owns something on disk: a process named so that a reused pid or a reboot cannot be taken for it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from autoplan.processes.linux import start_ticks
from autoplan.record import Record


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
        ticks = start_ticks(pid)
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
