"""The data files that a workload reads: those that its functions open while they are looked at.

Python says each `open` to an audit hook; files that a library opens in C (Arrow, HDF5, memory maps) are seen where they
are still open or mapped afterwards. Not seen: what worker processes of the workload's own open, and what no batch of
the inspection needed. A file is known by path, size and time; its content is not read.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoplan.strategies.workloads.digests import sampled
from autoplan.strategies.workloads.function_file import is_own_file

MAX_FILES = 200
"""Of more files than this, as many at regular distances in the order of their names are kept."""

_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/run/", "/usr/", "/lib", "/bin/", "/var/lib/")
_CODE = (".py", ".pyc", ".pyi", ".so", ".pth", ".egg-link", ".toml", ".cfg")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_watching: list[set[str]] = []
_hooked: list[bool] = []


class DataFiles:
    """Files and their stamps; `stamps` is filled when the watching ends."""

    def __init__(self) -> None:
        self.stamps: dict[str, str] = {}


@contextlib.contextmanager
def watch_data_files() -> Iterator[DataFiles]:
    """Notes which files are opened for reading in this process meanwhile."""
    if not _hooked:  # an audit hook cannot be removed, so there is one for the life of the process
        sys.addaudithook(_on_event)
        _hooked.append(True)
    opened: set[str] = set()
    before = _held_files()
    found = DataFiles()
    _watching.append(opened)
    try:
        yield found
    finally:
        _watching.remove(opened)
        names = {name for name in opened | (_held_files() - before) if _is_data(name)}
        stamps = {name: stamp for name in sampled(sorted(names), MAX_FILES) if (stamp := stamp_of(name)) is not None}
        found.stamps.update(stamps)


def stamp_of(name: str) -> str | None:
    """`stat:` with the size and the time of a regular file; None where there is none."""
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        return None
    return f"stat:{status.st_size}-{status.st_mtime_ns}" if stat.S_ISREG(status.st_mode) else None


def changed_files(stamps: dict[str, str]) -> list[str]:
    """The files that are here with another size or time. What is not here may be elsewhere on this machine."""
    return [name for name, stamp in stamps.items() if stamp_of(name) not in (None, stamp)]


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching or event != "open":
        return
    path, mode, flags = arguments
    reads = not set(mode) & set("wax+") if isinstance(mode, str) else not (flags or 0) & _WRITES
    if reads and isinstance(path, str | bytes):
        name = os.fsdecode(path)
        for opened in _watching:
            opened.add(os.path.abspath(name))


def _held_files() -> set[str]:
    """The files that this process has open or mapped; empty where the system does not say."""
    held: set[str] = set()
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        held |= {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(f"/proc/self/fd/{number}"))
    return held


def _is_data(name: str) -> bool:
    import platformdirs

    ours = (platformdirs.user_cache_dir("autoplan"), platformdirs.user_state_dir("autoplan"))
    if not name.startswith("/") or name.startswith((*_SYSTEM, *ours)) or name.endswith(_CODE) or ".so." in name:
        return False
    return is_own_file(name) and not {"__pycache__", ".git"} & set(Path(name).parts)
