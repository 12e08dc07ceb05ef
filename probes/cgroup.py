"""The limits that a container or a batch system puts on this process: cgroup v1, v2 and hybrid.

Every function takes `root`, the folder to read as `/`, so that tests can pass a tree of files.
A limit at any level above the process applies to it, so each level is read and the smallest limit is taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from autoplan.files import read_or_empty

# v1 writes "no limit" as the largest multiple of the page size below 2**63 (PAGE_COUNTER_MAX)
UNLIMITED_FROM_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupLimits:
    """The limits of this process; None where there is none.

    `memory_free_bytes` counts the page cache that the kernel drops under pressure (inactive_file) as free.
    """

    version: int | None
    memory_limit_bytes: int | None
    memory_free_bytes: int | None
    memory_source: str
    cpu_limit: float | None
    cpu_source: str


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Read the memory and CPU limits of this process.

    Args:
        root: The folder to read as `/`: `proc/self/cgroup`, `proc/self/mountinfo` and the mounts are
            below it.
    """
    memory_levels, memory_version = _levels(root, "memory")
    cpu_levels, cpu_version = _levels(root, "cpu")
    limit, free, memory_source = _tightest_memory(root, memory_levels, memory_version)
    cpu, cpu_source = _tightest_cpu(root, cpu_levels, cpu_version)
    return CgroupLimits(
        version=memory_version if memory_version is not None else cpu_version,
        memory_limit_bytes=limit,
        memory_free_bytes=free,
        memory_source=memory_source,
        cpu_limit=cpu,
        cpu_source=cpu_source,
    )


def cpu_stat_path(root: Path = Path("/")) -> Path | None:
    """The `cpu.stat` of this process's own cgroup, which counts how often its quota was used up; None: there is none.

    Args:
        root: The folder to read as `/`.
    """
    levels, _ = _levels(root, "cpu")
    return next((level / "cpu.stat" for level in levels if (level / "cpu.stat").is_file()), None)


def _levels(root: Path, controller: str) -> tuple[list[Path], int | None]:
    """The folders from this process's own cgroup up to its mount, and the cgroup version in charge."""
    mounts = _mounts(root)
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            for mount in mounts:
                if mount.kind == "cgroup" and controller in mount.options:
                    return _walk_up(root, mount, path), 1
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            for mount in mounts:
                if mount.kind == "cgroup2":
                    return _walk_up(root, mount, line[3:]), 2
    return [], None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mount:
    kind: str
    inside: str  # which folder of the hierarchy is mounted
    point: str  # where
    options: tuple[str, ...]


def _mounts(root: Path) -> list[_Mount]:
    """The cgroup mounts of /proc/self/mountinfo (format: proc_pid_mountinfo(5))."""
    mounts = []
    for line in read_or_empty(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 5 and len(tail) >= 3 and tail[0] in ("cgroup", "cgroup2"):
            mounts.append(
                _Mount(
                    kind=tail[0],
                    inside=_unescape(fields[3]),
                    point=_unescape(fields[4]),
                    options=tuple(tail[2].split(",")),
                )
            )
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _walk_up(root: Path, mount: _Mount, path: str) -> list[Path]:
    """Own cgroup first, the mount point last.

    In a container the mount often shows only the container's own part of the hierarchy, while
    /proc/self/cgroup names the path from the host's root; a path outside the mount means the mount itself.
    """
    top = root / mount.point.lstrip("/")
    inside = mount.inside.rstrip("/")
    if inside and path != inside and not path.startswith(inside + "/"):
        relative = ""
    else:
        relative = path[len(inside) :]
    parts = [part for part in relative.split("/") if part]
    if ".." in parts:  # a cgroup namespace names what is above its root like this
        parts = []
    levels = [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [level for level in levels if level.is_dir()]


def _tightest_memory(root: Path, levels: list[Path], version: int | None) -> tuple[int | None, int | None, str]:
    """(lowest limit, lowest free, which file) over the levels; (None, None, why) where none is set."""
    limit: int | None = None
    free: int | None = None
    source = "no cgroup limit on the way up" if levels else "no cgroup mounted"
    for level in levels:
        for name in ("memory.limit_in_bytes",) if version == 1 else ("memory.max", "memory.high"):
            value = _number(read_or_empty(level / name))
            if value is None or value >= UNLIMITED_FROM_BYTES:
                continue
            used = _number(read_or_empty(level / ("memory.usage_in_bytes" if version == 1 else "memory.current")))
            level_free = max(0, value - (used or 0) + _reclaimable_bytes(level, version))
            free = level_free if free is None else min(free, level_free)
            if limit is None or value < limit:
                limit, source = value, f"/{(level / name).relative_to(root)}"
    return limit, None if free is None or limit is None else min(free, limit), source


def _reclaimable_bytes(level: Path, version: int | None) -> int:
    key = "total_inactive_file" if version == 1 else "inactive_file"
    for line in read_or_empty(level / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return _number(value) or 0
    return 0


def _tightest_cpu(root: Path, levels: list[Path], version: int | None) -> tuple[float | None, str]:
    """(cores that the quota allows, which file)."""
    limit: float | None = None
    source = "no cgroup limit on the way up" if levels else "no cgroup mounted"
    for level in levels:
        if version == 1:
            name = "cpu.cfs_quota_us"
            quota = _number(read_or_empty(level / name))
            period = _number(read_or_empty(level / "cpu.cfs_period_us"))
        else:
            name = "cpu.max"
            fields = read_or_empty(level / name).split()
            quota, period = (_number(fields[0]), _number(fields[1])) if len(fields) == 2 else (None, None)
        if quota is None or period is None or quota <= 0 or period <= 0:
            continue
        if limit is None or quota / period < limit:
            limit, source = quota / period, f"/{(level / name).relative_to(root)}"
    return limit, source


def _number(text: str) -> int | None:
    """An integer, or None for "max", an empty file or anything else."""
    try:
        return int(text.strip())
    except ValueError:
        return None
