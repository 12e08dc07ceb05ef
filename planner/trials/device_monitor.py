"""Monitors the device while a trial runs: peak memory, the GPU's clock and users, compilations. Runs in a rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from autoplan.planner.records.trials import PeakMemory

SAMPLE_PERIOD_S = 0.2
"""Between two questions to the GPU's driver: each takes some hundred microseconds."""


class MemoryMonitor:
    """Peak memory of this process from the moment the monitor is made.

    CUDA: the peaks of torch's allocator (allocated, reserved), and what the driver says that this process has, minus
    what it had at the start. Where the driver does not show this process (a container), the memory in use on the device
    stands for it, other processes included. CPU: the peak resident set (VmHWM). Before it starts, free pages are
    returned to the system (malloc_trim) and the peak is reset (`clear_refs`, proc(5)).

    Args:
        device: The rank's device.
        limit_bytes: The limit of its memory; torch's allocator keeps it on CUDA. None: no limit.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        if device.type == "cuda":
            self._gpu = _Gpu(device)
            free, total = torch.cuda.mem_get_info(device)  # makes the context; without one the driver knows no process
            self._used_before, self._own_before = total - free, self._gpu.own_bytes()
            if limit_bytes is not None and limit_bytes < total:
                torch.cuda.set_per_process_memory_fraction(limit_bytes / total, device)
            torch.cuda.reset_peak_memory_stats(device)
            self._retries_before = _allocator_retries(device)
        else:
            with contextlib.suppress(OSError, AttributeError):  # not glibc: the peak then counts pages that were free
                ctypes.CDLL("libc.so.6").malloc_trim(0)
            with contextlib.suppress(OSError):  # forbidden in some sandboxes: the peak is that of the whole process
                Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> PeakMemory:
        """The peaks so far."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            used, own = total - free - self._used_before, self._gpu.own_bytes()
            if own is not None and self._own_before is not None:
                used = own - self._own_before
            reserved = torch.cuda.max_memory_reserved(self.device)
            return PeakMemory(
                allocated_bytes=torch.cuda.max_memory_allocated(self.device),
                reserved_bytes=reserved,
                driver_bytes=max(reserved, used),
                limit_bytes=self.limit_bytes,
            )
        return PeakMemory(resident_bytes=resident_peak_bytes(), limit_bytes=self.limit_bytes)

    def forget_retries(self) -> None:
        """Counts from now on: in the first steps the allocator's cache holds blocks of sizes that come but once."""
        if self.device.type == "cuda":
            self._retries_before = _allocator_retries(self.device)

    @property
    def allocator_retries(self) -> int:
        """How often the allocator had to free its cache and try again since then: the configuration barely fits."""
        return _allocator_retries(self.device) - self._retries_before if self.device.type == "cuda" else 0


def _allocator_retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def resident_peak_bytes() -> int | None:
    """The peak resident set of this process, since it began or since the peak was reset; None where it is not known."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


class _Gpu:
    """A GPU as the driver's library sees it; without the library, or without a GPU, nothing is known."""

    def __init__(self, device: torch.device) -> None:
        self.nvml: Any = None
        self.handle: Any = None
        if device.type != "cuda":
            return
        from autoplan.probes.nvml import open_nvml

        self.nvml, _ = open_nvml()
        if self.nvml is not None:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self.handle = self.nvml.query("nvmlDeviceGetHandleByUUID", uuid).value

    def running(self) -> dict[int, int | None]:
        """Bytes by process, of those that compute on it."""
        if self.handle is None:
            return {}
        processes = self.nvml.query("nvmlDeviceGetComputeRunningProcesses", self.handle).value or ()
        return {process.pid: process.usedGpuMemory for process in processes}

    def own_bytes(self) -> int | None:
        """What this process has there."""
        return self.running().get(os.getpid())


class GpuMonitor:
    """The rank's GPU while steps are timed: its clock, why the driver limits it, and what other processes take.

    The driver is asked for the clock at most five times a second, while kernels run (`sample`): an idle GPU has other
    clocks. Without a GPU, or without the driver's library, nothing is known.

    Attributes:
        events: Why the clock was limited, over the whole window; the software power cap and clocks that a person set
            are among them, and are no throttling: a card at its power limit runs at its usual speed.
        clocks_hz: Of the multiprocessors.
        others_share: The highest utilisation by other processes, as the mean of a stretch; None: the driver does not
            say, or it counts pids as another container does, so that this rank is not among them.
    """

    def __init__(self, device: torch.device) -> None:
        self.events: set[str] = set()
        self.clocks_hz: list[float] = []
        self.others_share: float | None = None
        self._slowed: set[str] = set()
        self._sampled = False
        self._others_now = 0.0
        self._asked = 0.0
        self._seen_us = 0
        self._gpu = _Gpu(device)

    def start(self) -> None:
        """Begins a stretch: what was seen before it does not count."""
        self._slowed.clear()
        self._sampled = False
        self._others_now = 0.0
        self._seen_us = int(time.time() * 1e6)

    def sample(self) -> None:
        """Asks for the clock and what limits it; does nothing if there is no driver, or it was asked just before."""
        now = time.monotonic()
        if self._gpu.handle is not None and now - self._asked >= SAMPLE_PERIOD_S:
            self._asked = now
            self._sample_clock()

    def end(self) -> None:
        """Ends a stretch: asks what others took in it, and for the clock if nobody did while kernels ran."""
        if self._gpu.handle is None:
            return
        if not self._sampled:
            self._sample_clock()
        self._sample_others()

    def _sample_clock(self) -> None:
        from autoplan.probes.gpu import read_clock_events
        from autoplan.probes.nvml import SLOWDOWNS

        self._sampled = True
        events = read_clock_events(self._gpu.nvml, self._gpu.handle)
        self.events.update(events)
        self._slowed.update(SLOWDOWNS.intersection(events))
        clock = self._gpu.nvml.reading("Hz", 1e6, "nvmlDeviceGetClockInfo", self._gpu.handle, 1).value
        if clock is not None:
            self.clocks_hz.append(clock)

    def _sample_others(self) -> None:
        if os.getpid() not in self._gpu.running():
            return
        answer = self._gpu.nvml.query("nvmlDeviceGetProcessUtilization", self._gpu.handle, self._seen_us).value or ()
        samples = [sample for sample in answer if sample.timeStamp >= self._seen_us]
        # a process has no sample of a moment at which it did nothing
        moments = max(1, len({sample.timeStamp for sample in samples}))
        others = sum(sample.smUtil / 100 for sample in samples if sample.pid != os.getpid())
        self._others_now = min(1.0, others / moments)
        self.others_share = max(self.others_share or 0.0, self._others_now)

    def problem(self, most: float) -> str | None:
        """Why the times of this stretch do not count: the card was slowed down, or others took more than `most`."""
        if self._slowed:
            return f"the GPU was throttled ({', '.join(sorted(self._slowed))})"
        if self._others_now > most:
            return f"other processes took {self._others_now:.0%} of the GPU"
        return None


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process; 0 where nothing was compiled."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
