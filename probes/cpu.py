"""The cores' time and whose it was, by the kernel's figures at two moments (/proc, the cgroup).

    before = read_cpu_times(cores, root_pid=os.getpid())
    ...
    idle, others = cpu_shares(before, read_cpu_times(cores, root_pid=os.getpid()), len(cores))

All CPU time that is not of the processes below `root_pid` is that of others: other programs, and what the hypervisor
took (steal).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autoplan.files import read_or_empty
from autoplan.processes import linux

GAUGE_SIZE, GAUGE_PRODUCTS, GAUGE_REPEATS = 48, 200, 3
"""Of `time_core`: some 1 ms of products that stay in the core's own cache, and on one thread (OpenBLAS takes more from
64 x 64 on); the fastest of three, so that an interrupt does not count."""


def time_core() -> float:
    """Seconds of a fixed calculation on the core that this thread is on, in fp32: how fast that core is now.

    Where other machines share a core (two threads of one core, a common limit of power), its speed changes by itself,
    and the kernel shows no steal. On such a machine the steps of a small training followed such products with
    a correlation of 0.83; both scattered by 19 %.
    """
    matrix = np.ones((GAUGE_SIZE, GAUGE_SIZE), np.float32)
    fastest_s = float("inf")
    for _ in range(GAUGE_REPEATS):
        began = time.perf_counter()
        for _ in range(GAUGE_PRODUCTS):
            matrix @ matrix
        fastest_s = min(fastest_s, time.perf_counter() - began)
    return fastest_s


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTimes:
    """Figures of the kernel at one moment; None where this machine does not have them.

    Attributes:
        at_s: time.monotonic().
        idle_s: Idle time summed over the cores. (Busy time is what is left of the clock: the kernel samples it at
            ticks, while it times idleness exactly.)
        steal_s: Summed over the cores.
        own_s: CPU time of the processes below `root_pid`, those that have ended included.
        waited_s: By thread of this process: how long it was ready to run and waited for a core.
        pressure_s: Time in which some task waited for a core.
        throttled_s, throttled_periods: By the quota of the cgroup.
    """

    at_s: float
    idle_s: float | None
    steal_s: float
    own_s: float
    waited_s: dict[int, float]
    pressure_s: float | None
    throttled_s: float
    throttled_periods: int


def read_cpu_times(cores: Iterable[int], root_pid: int, cpu_stat: Path | None = None) -> CpuTimes:
    """The figures now.

    Args:
        cores: Those that count.
        root_pid: The process whose descendants are not others.
        cpu_stat: The `cpu.stat` of the cgroup; None: throttling is not read.
    """
    idle_s, steal_s = read_idle(set(cores))
    throttled_periods, throttled_s = read_throttling(cpu_stat)
    return CpuTimes(
        at_s=time.monotonic(),
        idle_s=idle_s,
        steal_s=steal_s,
        own_s=cpu_time_below(root_pid),
        waited_s=read_waited(),
        pressure_s=read_pressure(),
        throttled_s=throttled_s,
        throttled_periods=throttled_periods,
    )


def read_idle(cores: set[int], path: Path = Path("/proc/stat")) -> tuple[float | None, float]:
    """Seconds of idleness (iowait too) and of steal, over these cores (proc(5), /proc/stat).

    The idleness is None where the file is missing, or holds nothing but zeros as in a gVisor sandbox.
    """
    idle = steal = 0
    found = False
    for line in read_or_empty(path).splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores and len(fields) >= 8:
            found = found or any(map(int, fields))
            idle += int(fields[3]) + int(fields[4])
            steal += int(fields[7])
    return (idle / linux.TICKS_PER_S if found else None), steal / linux.TICKS_PER_S


def cpu_time_below(root_pid: int) -> float:
    """CPU seconds of a process and its descendants; what has ended and was waited for is in its parent's figure."""
    return sum(map(linux.cpu_time_s, {root_pid} | linux.descendants(root_pid)))


def read_waited(task: Path = Path("/proc/self/task")) -> dict[int, float]:
    """Seconds that each thread of this process waited for a core (the second figure of schedstat, in ns)."""
    waited: dict[int, float] = {}
    for folder in task.iterdir() if task.is_dir() else ():
        fields = read_or_empty(folder / "schedstat").split()
        if len(fields) >= 2:
            waited[int(folder.name)] = int(fields[1]) / 1e9
    return waited


def read_pressure(path: Path = Path("/proc/pressure/cpu")) -> float | None:
    """Seconds in which some task of this machine waited for a core (PSI, in microseconds); None where it is off."""
    for line in read_or_empty(path).splitlines():
        if line.startswith("some ") and "total=" in line:
            return int(line.rpartition("total=")[2]) / 1e6
    return None


def read_throttling(cpu_stat: Path | None) -> tuple[int, float]:
    """(periods, seconds) in which the cgroup stood still because its quota was used up; cgroup v1 and v2."""
    lines = [] if cpu_stat is None else read_or_empty(cpu_stat).splitlines()
    found = dict(line.split(maxsplit=1) for line in lines if len(line.split()) == 2)
    seconds = int(found["throttled_usec"]) / 1e6 if "throttled_usec" in found else 0.0
    if "throttled_time" in found:  # v1, in nanoseconds
        seconds = int(found["throttled_time"]) / 1e9
    return int(found.get("nr_throttled", 0)), seconds


def cpu_shares(before: CpuTimes, after: CpuTimes, cores: int) -> tuple[float | None, float | None]:
    """(idle, taken by others) between two readings, as shares of all the cores; None: nothing is known."""
    if before.idle_s is None or after.idle_s is None:
        return None, None
    capacity_s = max(after.at_s - before.at_s, 1e-9) * cores
    idle_s, own_s = after.idle_s - before.idle_s, after.own_s - before.own_s
    return min(1.0, idle_s / capacity_s), min(1.0, max(0.0, (capacity_s - idle_s - own_s) / capacity_s))
