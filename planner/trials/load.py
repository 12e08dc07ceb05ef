"""The load that others put on the device while a trial times its steps. Runs in a rank.

    load = LoadMonitor(torch.device("cpu"), root_pid=os.getppid())
    load.begin()
    ...                                       # steps are timed
    problem = load.end()                      # None, or why the times of this stretch do not count

In: the kernel's figures (/proc, the cgroup, NVML) at the ends of a stretch. Out: a sentence for each disturbed stretch,
and a `Window` for the trial's record. `Stretches` keeps the samples by stretch: those of disturbed ones are set aside
and measured again. A stretch lasts `SHORTEST_STRETCH_S` at least, one step at most where steps take longer. All ranks
decide alike.

The trial's own processes are those below the zygote, which starts nothing but the ranks of one trial (design.md,
section 5). All other CPU time on the trial's cores is that of others: other programs, other threads of the program
that called the search, and what the hypervisor took (steal).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import torch

from autoplan.planner.records.trials import RECOMPILED, Window
from autoplan.planner.trials.device_monitor import GpuMonitor, compiled_graphs
from autoplan.planner.trials.ranks import RankSync
from autoplan.probes.cgroup import cpu_stat_path, read_cgroup_limits
from autoplan.probes.cpu import CpuTimes, cpu_shares, read_cpu_times, time_core

SHORTEST_STRETCH_S = 0.4
"""The kernel counts CPU time in ticks of 10 ms; over a shorter stretch that is more than half of OTHERS_SHARE."""

OTHERS_SHARE = 0.05
"""Others that take this share of the cores lower a step's speed by about as much: more than runs differ by (2.5 %)."""

WAITED_SHARE, WAITED_OTHERS_SHARE = 0.05, 0.02
"""A thread that waits so long for a core holds up the threads that wait for it. It counts only where others used the
cores at all: a configuration with more threads than cores waits for itself."""

FULL_IDLE_SHARE = 0.1
"""With less idleness than this a host is full. Whoever has a quota of its cores, or starts a GPU's kernels from one of
them, waits for them."""

GPU_OTHERS_SHARE = 0.05
"""Utilisation of the GPU by other processes above which a stretch is disturbed; the same share as of the CPU."""

MOST_RECOMPILES = 2
"""So many stretches with a compilation are not counted as time spent on measuring; further ones are."""

Parts = dict[str, list[float]]


def load_between(before: CpuTimes, after: CpuTimes, cores: int) -> Window:
    """What the CPU's figures say of the time between two readings."""
    seconds = max(after.at_s - before.at_s, 1e-9)
    waited = [after.waited_s[thread] - before.waited_s.get(thread, 0.0) for thread in after.waited_s]
    pressure = None
    if before.pressure_s is not None and after.pressure_s is not None:
        pressure = min(1.0, (after.pressure_s - before.pressure_s) / seconds)
    return Window(
        seconds=seconds,
        others_cpu_share=cpu_shares(before, after, cores)[1],
        steal_share=min(1.0, max(0.0, (after.steal_s - before.steal_s) / (seconds * cores))),
        waited_share=max(waited) / seconds if waited else None,
        pressure_share=pressure,
        throttled_s=after.throttled_s - before.throttled_s,
        throttled_periods=after.throttled_periods - before.throttled_periods,
    )


def cpu_problem(before: CpuTimes, after: CpuTimes, cores: int, *, only_if_full: bool = False) -> str | None:
    """Why times between two readings do not count; None if others were idle.

    Args:
        before, after: The readings.
        cores: How many the trial may run on.
        only_if_full: What others take of all the cores counts only where hardly any core is free: the trial may use
            a quota of the cores (a container on a host with others), or it needs few of them (it runs on a GPU).
    """
    load, (idle, others) = load_between(before, after, cores), cpu_shares(before, after, cores)
    if others is None or idle is None:
        return None
    if others > OTHERS_SHARE and (not only_if_full or idle < FULL_IDLE_SHARE):
        stolen = ", with what the hypervisor took" if load.steal_share > OTHERS_SHARE / 2 else ""
        return f"other work took {others:.0%} of the CPU time{stolen}"
    if (load.waited_share or 0.0) > WAITED_SHARE and others > WAITED_OTHERS_SHARE:
        return f"other work kept the trial waiting for a core for {load.waited_share:.0%} of the time"
    return None


CORE_EVERY_S = 0.5
"""A reading of a core's speed takes about a thousandth of that."""


@dataclass(kw_only=True)
class LoadMonitor:
    """Watches the CPU and the GPU over the stretches of a trial's window.

    Attributes:
        device: The rank's.
        root_pid: The process whose descendants are the trial: the zygote.
        cores: That the trial may run on.
        gauge: Time a fixed calculation at the ends of each stretch: on a CPU that other machines share, the speed of a
            core changes by itself, which no figure of the kernel shows.
        gpu: The driver's figures of the rank's GPU; empty on CPU.
        discarded: Reasons why stretches were measured again, with their numbers.
    """

    device: torch.device
    root_pid: int
    cores: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    gauge: bool = False
    gpu: GpuMonitor = field(init=False)
    discarded: dict[str, int] = field(default_factory=dict)
    _cpu_stat: Path | None = None
    _shares_host: bool = False
    _first: CpuTimes | None = None
    _last: CpuTimes | None = None
    _began: CpuTimes | None = None
    _core_logs: list[float] = field(default_factory=list)
    _core_read_s: float = 0.0
    _graphs: int = 0  # that torch.compile had made when the stretch began

    def __post_init__(self) -> None:
        self.gpu = GpuMonitor(self.device)
        self._cpu_stat = cpu_stat_path()
        quota = read_cgroup_limits().cpu_limit
        self._shares_host = quota is not None and quota < len(self.cores)

    def restart(self) -> None:
        """Begins the window anew: what was seen before it does not belong to the record."""
        self._first = None
        self._core_logs = []
        self.discarded = {}

    def begin(self) -> None:
        """Begins a stretch."""
        if not self._core_logs:
            self._time_core()
        self._began = self._read()
        self._first = self._first or self._began
        self._graphs = compiled_graphs()
        self.gpu.start()

    @property
    def seconds(self) -> float:
        """Since the stretch began."""
        return 0.0 if self._began is None else time.monotonic() - self._began.at_s

    @property
    def is_long_enough(self) -> bool:
        """Whether the kernel's figures say something about this stretch."""
        return self.seconds >= SHORTEST_STRETCH_S

    def end(self) -> str | None:
        """Ends the stretch: why its times do not count, or None."""
        assert self._began is not None, "a stretch ends that never began"
        self.gpu.end()
        self._last = self._read()
        self._time_core()
        if compiled_graphs() > self._graphs:
            return RECOMPILED
        problem = self.gpu.problem(GPU_OTHERS_SHARE)
        if problem is None and self.is_long_enough:
            only_if_full = self._shares_host or self.device.type == "cuda"
            problem = cpu_problem(self._began, self._last, len(self.cores), only_if_full=only_if_full)
        return problem

    def discard(self, reason: str) -> None:
        """Notes that a stretch is measured again."""
        kind = reason.split(" took ")[0].split(" for ")[0]
        self.discarded[kind] = self.discarded.get(kind, 0) + 1

    def window(self, disturbed: str | None) -> Window | None:
        """The record of all stretches so far; None before the first."""
        if self._first is None or self._last is None:
            return None
        return load_between(self._first, self._last, len(self.cores)).model_copy(
            update={
                "core_s": math.exp(mean(self._core_logs)) if self._core_logs else None,
                "core_readings": len(self._core_logs),
                "gpu_others_share": self.gpu.others_share,
                "sm_clock_hz": median(self.gpu.clocks_hz) if self.gpu.clocks_hz else None,
                "clock_events": tuple(sorted(self.gpu.events)),
                "discarded": self.discarded,
                "disturbed": disturbed,
            }
        )

    def watch_core(self) -> None:
        """Times the core within a stretch, at most every CORE_EVERY_S: two readings say little of a long one."""
        if self._core_logs and time.monotonic() - self._core_read_s >= CORE_EVERY_S:
            self._time_core()

    def _time_core(self) -> None:
        if self.gauge:
            self._core_logs.append(math.log(time_core()))
            self._core_read_s = time.monotonic()

    def _read(self) -> CpuTimes:
        return read_cpu_times(self.cores, self.root_pid, self._cpu_stat)


@dataclass(kw_only=True)
class Stretches:
    """Samples, in seconds by part of a step.

    Attributes:
        load: Judges each stretch.
        ranks: Makes all ranks judge alike.
        most_extra_s: Time that may be spent on measuring again.
        clean: Samples of stretches in which nothing else used the device.
        aside: Samples of the other stretches.
        current: Samples of the stretch that is not judged yet.
        problem: Why the last samples were set aside.
    """

    load: LoadMonitor
    ranks: RankSync
    most_extra_s: float
    clean: Parts = field(default_factory=dict)
    aside: Parts = field(default_factory=dict)
    current: Parts = field(default_factory=dict)
    problem: str | None = None
    _lost_s: float = 0.0
    _compiling_s: float = 0.0
    _recompiles: int = 0
    _began: bool = False

    def begin(self) -> None:
        """Begins a stretch; samples of an unfinished one are dropped."""
        self.current = {}
        self._began = True
        self.load.begin()

    def add(self, times: Mapping[str, list[float]]) -> None:
        """Adds samples to the stretch, and judges it if it is long enough."""
        if not self._began:
            self.begin()
        _extend(self.current, times)
        if self.is_long_enough():
            self.close()

    def is_long_enough(self) -> bool:
        """Whether the stretch can be judged: the kernel's figures are coarse."""
        return self.ranks.any(self.load.is_long_enough)

    def is_clean(self) -> bool:
        """Whether nothing has disturbed the stretch up to now; it goes on."""
        return not self.ranks.any(self.load.end() is not None)

    def close(self) -> bool:
        """Judges the stretch and begins another; returns whether it was clean."""
        seconds, found = self.load.seconds, self.load.end()
        # all three are those of all ranks: `extra_s` ends measuring
        figures = [float(found is not None), float(found == RECOMPILED), seconds]
        disturbed, recompiled, seconds = self.ranks.largest(figures)
        if disturbed:
            elsewhere = f"{RECOMPILED} on another rank" if recompiled else "the device of another rank was disturbed"
            self.problem = found or elsewhere
            self.load.discard(self.problem)
            _extend(self.aside, self.current)
            if recompiled and self._recompiles < MOST_RECOMPILES:
                self._recompiles += 1
                self._compiling_s += seconds
            else:
                self._lost_s += seconds
        else:
            _extend(self.clean, self.current)
        self.begin()
        return not disturbed

    @property
    def extra_s(self) -> float:
        """Seconds that measuring may take longer because of what was set aside."""
        return self._compiling_s + min(self._lost_s, self.most_extra_s)

    def so_far(self) -> Parts:
        """The samples that count if nothing more comes: those not set aside."""
        found: Parts = {}
        _extend(found, self.clean)
        _extend(found, self.current)
        return found

    def everything(self) -> Parts:
        """All samples, also those that were set aside."""
        found = self.so_far()
        _extend(found, self.aside)
        return found


def _extend(parts: Parts, more: Mapping[str, list[float]]) -> None:
    for part, seconds in more.items():
        parts.setdefault(part, []).extend(seconds)
