"""The host: cores, memory, limits and versions, read from psutil, /proc and /sys. Nothing is measured here.

Reading takes milliseconds and imports no torch: torch's version and CUDA build come from its metadata.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import psutil

from autoplan.files import read_or_empty
from autoplan.probes.cgroup import CgroupLimits, read_cgroup_limits
from autoplan.probes.profile import Device, Host
from autoplan.record import Reading

# what changes the speed of a training step on a CPU; the names are those of /proc/cpuinfo (x86 and Arm)
VECTOR_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
    "avx_vnni",
    "asimd",
    "asimdhp",
    "sve",
    "sve2",
    "bf16",
    "svebf16",
    "i8mm",
)


def read_host(root: Path = Path("/"), *, driver: str | None = None) -> Host:
    """Read what the machine around the devices is.

    Args:
        root: The folder to read as `/`, for /proc and /sys; what psutil reads is always this machine's.
        driver: The GPU driver's version, where there is one (see `autoplan.probes.nvml`).
    """
    limits = read_cgroup_limits(root)
    memory = psutil.virtual_memory()
    torch_version, cuda = read_torch_build()
    model, flags = read_cpu_model(root)
    return Host(
        cpu_model=model,
        cores_physical=psutil.cpu_count(logical=False),
        cores_logical=psutil.cpu_count(logical=True),
        cores_usable=count_usable_cores(limits),
        numa_nodes=len(parse_id_list(read_or_empty(root / "sys/devices/system/node/online"))) or 1,
        cpu_flags=flags,
        memory_total_bytes=Reading.driver(memory.total, "bytes", "/proc/meminfo MemTotal"),
        memory_available_bytes=_available(memory.available, limits),
        cgroup_version=limits.version,
        cgroup_memory_limit_bytes=_limit(limits.memory_limit_bytes, "bytes", limits.memory_source),
        cgroup_cpu_limit=_limit(limits.cpu_limit, "1", limits.cpu_source),
        shared_memory_bytes=read_shared_memory(root / "dev/shm"),
        load_average=_load_average(),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch_version,
        driver=driver,
        cuda=cuda,
    )


def read_cpu_device(host: Host) -> Device:
    """The CPU as a device that can train: the cores and memory that this process may use."""
    total, limit = host.memory_total_bytes, host.cgroup_memory_limit_bytes
    if limit.value is not None and total.value is not None and limit.value < total.value:
        total = limit
    return Device(
        index=0,
        type="cpu",
        name=host.cpu_model,
        memory_total_bytes=total,
        memory_available_bytes=host.memory_available_bytes,
        cores=host.cores_usable,
    )


def count_usable_cores(limits: CgroupLimits | None = None) -> int:
    """Cores this process may keep busy: its affinity, cut down to whole cores of the cgroup's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = psutil.cpu_count(logical=True) or 1
    if limits is not None and limits.cpu_limit is not None:
        cores = min(cores, max(1, math.floor(limits.cpu_limit)))
    return cores


def read_cpu_model(root: Path = Path("/")) -> tuple[str, tuple[str, ...]]:
    """The CPU's name and those of its vector extensions that matter, from /proc/cpuinfo."""
    name, present = "", set[str]()
    for line in read_or_empty(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        key = key.strip().lower()
        if key == "model name" and not name:
            name = value.strip()
        elif key in ("flags", "features") and not present:
            present = set(value.split())
    flags = tuple(flag for flag in VECTOR_FLAGS if flag in present)
    return name or platform.processor() or platform.machine() or "unknown CPU", flags


def read_last_level_cache_bytes(root: Path = Path("/")) -> int | None:
    """The size of the largest cache of the first CPU; None if /sys does not say."""
    sizes = []
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = read_or_empty(path).strip()
        if text[:-1].isdigit() and text[-1:] in ("K", "M", "G"):
            sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]])
    return max(sizes, default=None)


def parse_id_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: "0-3,8" is (0, 1, 2, 3, 8)."""
    ids: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if first.strip().isdigit():
            ids.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(ids)


def read_shared_memory(path: Path) -> Reading:
    """Free bytes in /dev/shm, where loader workers and NCCL put buffers (a container's default is 64 MB)."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return Reading.unknown("bytes", f"{path}: {error.strerror}", "statvfs")
    return Reading.driver(status.f_bavail * status.f_frsize, "bytes", f"statvfs {path}")


def read_torch_build() -> tuple[str, str | None]:
    """Torch's version and the CUDA version it was built with, without importing it.

    Returns:
        ("2.13.0+cpu", None), for instance. The CUDA version is the literal in torch/version.py.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed", None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return version, None
    source = read_or_empty(Path(spec.origin).with_name("version.py"))  # lines like: cuda: Optional[str] = '12.8'
    found = dict(re.findall(r"^(\w+)\b[^=\n]*= *['\"]([^'\"]*)['\"]", source, re.MULTILINE))
    return found.get("__version__", version), found.get("cuda")


def _available(available_bytes: int, limits: CgroupLimits) -> Reading:
    if limits.memory_free_bytes is not None and limits.memory_free_bytes < available_bytes:
        return Reading.driver(limits.memory_free_bytes, "bytes", f"limit less use, {limits.memory_source}")
    return Reading.driver(available_bytes, "bytes", "/proc/meminfo MemAvailable")


def _limit(value: float | None, unit: str, source: str) -> Reading:
    if value is None:
        return Reading.unknown(unit, source, "cgroup")
    return Reading.driver(value, unit, source)


def _load_average() -> Reading:
    try:
        return Reading.driver(os.getloadavg()[0], "1", "load average of the last minute")
    except OSError as error:
        return Reading.unknown("1", f"no load average: {error}")
