"""The few Linux calls that Python does not wrap, and readings from /proc. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# <linux/falloc.h>
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_PAGE_UNITS_BYTES = 1024  # /proc/PID/status and smaps_rollup count in kB of 1024 bytes


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), *(ctypes.c_ulong(0),) * 3) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Makes this process the parent of every orphan among its descendants, whatever their session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> bool:
    """Asks the kernel for SIGKILL when the parent's forking thread ends; it survives an exec.

    Args:
        parent_pid: The process that forked this one.

    Returns:
        False where the parent is gone already: the signal will never come, so the caller must exit.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent_pid


def punch_hole(fd: int, length_bytes: int) -> None:
    """Frees the disk of the beginning of a file, which then reads as zeros; its length stays (fallocate(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if libc.fallocate(fd, mode, ctypes.c_int64(0), ctypes.c_int64(length_bytes)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"fallocate({length_bytes}): {os.strerror(number)}")


def open_pidfd(pid: int) -> int | None:
    """A descriptor that polls readable when the process ends; None where the kernel has no pidfd."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def await_readable(fds: Iterable[int], timeout_s: float | None = None) -> bool:
    """Waits until one of the descriptors can be read; False where the time is over first. None: as long as it takes.

    By poll(2): a descriptor has the number that the planner had for it, and select(2) refuses those from 1024 on.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


def parent_of(pid: int) -> int | None:
    """The parent's pid, from /proc/PID/stat (proc(5), field 4); None if the process is gone."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (proc(5), field 22); None if gone or a zombie."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def runs(pid: int) -> bool:
    """Whether a process may run: it is neither stopped nor gone."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in ("T", "t", "Z", "X")


def cpu_time_s(pid: int) -> float:
    """CPU seconds of a process and of its children that were waited for (proc(5), fields 14 to 17); 0 if it is gone."""
    fields = _stat_fields(pid)
    return 0.0 if fields is None else sum(map(int, fields[11:15])) / TICKS_PER_S


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: the second, the name, may contain blanks and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def all_pids() -> list[int]:
    """Every process that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root_pid: int) -> set[int]:
    """All living or zombie descendants of a process, found by parent, so sessions and groups do not matter."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid in all_pids():
        parent = parent_of(pid)
        if parent is not None:
            children[parent].append(pid)
    found: set[int] = set()
    frontier = [root_pid]
    while frontier:
        new = [pid for pid in children[frontier.pop()] if pid not in found]
        found.update(new)
        frontier.extend(new)
    return found


def pid_namespace(pid: int) -> str | None:
    """The pid namespace of a process; None if it is gone or belongs to another user."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def environments(name: str) -> dict[int, str]:
    """The value of a variable in each process that had it at its last exec; only our own user's can be read."""
    prefix = name.encode() + b"="
    found = {}
    for pid in all_pids():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(prefix):
                    found[pid] = entry.removeprefix(prefix).decode(errors="replace")
                    break  # as getenv takes the first
    return found


def resident_bytes(pid: int) -> int:
    """Anonymous and shared memory resident in a process (RssAnon + RssShmem); 0 if it is gone.

    File pages are left out: the kernel can drop them. What a fork still shares with its parent counts in both,
    so a sum over processes is an upper bound; `proportional_bytes` settles it, at a higher cost.
    """
    return _sum_kib(Path(f"/proc/{pid}/status"), ("RssAnon:", "RssShmem:"))


def proportional_bytes(pid: int) -> int:
    """As `resident_bytes`, each shared page divided by the processes that map it (smaps_rollup)."""
    return _sum_kib(Path(f"/proc/{pid}/smaps_rollup"), ("Pss_Anon:", "Pss_Shmem:"))


def _sum_kib(path: Path, names: tuple[str, ...]) -> int:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * _PAGE_UNITS_BYTES for line in lines if line.startswith(names))


def kernel_oom_kills() -> int:
    """How often the kernel's OOM killer ended a process of our cgroup; where no cgroup says so, any process since boot.

    Source: memory.events of cgroup v2 and memory.oom_control of v1 (oom_kill: kills by any OOM killer), /proc/vmstat.
    """
    for place in (*_oom_counters(), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", place.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _oom_counters() -> list[Path]:
    """Where the cgroup of this process counts its OOM kills; in a container the mount may show it as the root."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    places = []
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.oom_control"
        elif not controllers:
            root, name = Path("/sys/fs/cgroup"), "memory.events"
        else:
            continue
        places += [root / path.lstrip("/") / name, root / name]
    return places


def signal_quietly(pid: int, number: int, *, group: bool = False) -> bool:
    """Sends a signal to a process or to a process group; False if it was gone already."""
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
