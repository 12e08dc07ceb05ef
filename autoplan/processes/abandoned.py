"""What a killed planner and its zygote left behind is found by a mark in the environment, and killed.

In: marks that the zygotes of this user set. Out: how many processes were killed; those without a mark stay.
"""

from __future__ import annotations

import os
import signal
import time

from autoplan.processes import linux
from autoplan.processes.owner import ProcessIdentity, is_alive

MARKER = "AUTOPLAN_ZYGOTE"
"""The environment variable that a zygote and all its descendants carry."""

_SWEEP_S = 10.0


def sweep_abandoned() -> int:
    """Kills what a dead planner left behind: only processes that carry a zygote's mark in their environment.

    Needed only where planner and zygote were killed at the same moment; otherwise the one that lives does it.

    Returns:
        How many processes were killed.
    """
    marks = linux.environments(MARKER)
    # The pid in a mark is valid in its own pid namespace only: processes of containers are left alone.
    own_namespace = linux.pid_namespace(os.getpid())
    killed = 0
    for marker in {mark for pid, mark in marks.items() if linux.pid_namespace(pid) == own_namespace}:
        parts = marker.split(":")
        if len(parts) == 4 and parts[1].isdigit() and parts[2].isdigit():
            owner = ProcessIdentity(boot_id=parts[0], pid=int(parts[1]), start_time=int(parts[2]))
            killed += 0 if is_alive(owner) else kill_marked(marker)
    return killed


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
