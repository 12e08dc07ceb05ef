"""What a trial sees of its device while it runs: memory peaks, throttling, compiler events. Runs in a rank."""

from __future__ import annotations

import ctypes
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoplan.planner.records import PeakMemory


class MemoryWatch:
    """Peak memory from the moment it is made.

    CUDA: torch's allocator (allocated, reserved) and what the device has in use beyond what others had at the start.
    CPU: the peak resident set (VmHWM), after free pages went back to the system (malloc_trim) and the peak was reset
    (`clear_refs`, proc(5)).
    """

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        if device.type == "cuda":
            total, free = _device_memory(device)
            self._used_before = total - free
            if limit_bytes is not None and limit_bytes < total:
                torch.cuda.set_per_process_memory_fraction(limit_bytes / total, device)
            torch.cuda.reset_peak_memory_stats(device)
            self._retries_before = _allocator_retries(device)
        else:
            _return_free_pages()
            _reset_resident_peak()

    def read(self) -> PeakMemory:
        """The peaks so far."""
        if self.device.type == "cuda":
            total, free = _device_memory(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            return PeakMemory(
                allocated_bytes=torch.cuda.max_memory_allocated(self.device),
                reserved_bytes=reserved,
                driver_bytes=max(reserved, total - free - self._used_before),
                limit_bytes=self.limit_bytes,
            )
        return PeakMemory(resident_bytes=_resident_peak_bytes(), limit_bytes=self.limit_bytes)

    @property
    def allocator_retries(self) -> int:
        """How often the allocator had to give cached memory back and try again: it fits, but only just."""
        return _allocator_retries(self.device) - self._retries_before if self.device.type == "cuda" else 0


def _device_memory(device: torch.device) -> tuple[int, int]:
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def _allocator_retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def _return_free_pages() -> None:
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc: the peak then holds pages that were free already


def _reset_resident_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # not permitted in some sandboxes: the peak then is the process's, not the build's


def _resident_peak_bytes() -> int | None:
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


class ThrottleWatch:
    """Collects why the GPU ran below its clocks; asks the driver at most five times a second."""

    def __init__(self, device: torch.device) -> None:
        self.seen: set[str] = set()
        self._asked = 0.0
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        from autoplan.probes.nvml import open_nvml

        self._nvml, _ = open_nvml()
        if self._nvml is not None:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = self._nvml.query("nvmlDeviceGetHandleByUUID", uuid).value

    def sample(self) -> None:
        """Asks once; does nothing without a driver that answers."""
        now = time.monotonic()
        if self._handle is None or now - self._asked < 0.2:
            return
        self._asked = now
        from autoplan.probes.gpu import read_throttle_reasons

        self.seen.update(read_throttle_reasons(self._nvml, self._handle))


@dataclass(kw_only=True, slots=True)
class CompilerWatch:
    """Counts what torch.compile does from `start()` on: compilations (a recompile inside a timed window spoils it)."""

    _graphs: int = 0
    _cache: tuple[int, int] = field(default=(0, 0))

    def start(self) -> None:
        """Begins a window."""
        self._graphs = _compiled_graphs()

    def recompiled(self) -> bool:
        """Whether anything was compiled since start()."""
        return _compiled_graphs() > self._graphs

    @staticmethod
    def graph_breaks() -> int:
        """Graph breaks so far in this process."""
        return sum(_counters().get("graph_break", {}).values())

    @staticmethod
    def cache_state() -> str:
        """How much the compile cache gave, in words."""
        inductor = _counters().get("inductor", {})
        hits, misses = inductor.get("fxgraph_cache_hit", 0), inductor.get("fxgraph_cache_miss", 0)
        return f"compile cache: {hits} hit(s), {misses} miss(es)"


def _counters() -> dict[str, Any]:
    from torch._dynamo.utils import counters

    return counters


def _compiled_graphs() -> int:
    import sys

    if "torch._dynamo.utils" not in sys.modules:
        return 0
    return int(_counters().get("stats", {}).get("unique_graphs", 0))
