"""The allocator knob (CPU): what the C library does with memory that was freed.

glibc gives freed memory back to the kernel: every allocation past a threshold (128 KiB, growing up to 32 MiB) is a
mapping of its own that is unmapped when it is freed, and the top of the heap is cut off. The next micro-step then takes
the same memory page by page, one fault and one clearing each: on a GPT-2 of 124M that was a third of a micro-step,
measured. Set to keep what was freed (mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), it pays once; the process then
stays about as large as it ever was, a fifth more than its peak otherwise.
"""

from __future__ import annotations

import ctypes
import sys

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.workloads.workload import Workload

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_MAPPED_BYTES = 1 << 30
NEVER = 2**31 - 1


class AllocatorStrategy:
    """`own` leaves the C library as it is; `keep` sets it for the whole process."""

    name = "allocator"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """On CPU with glibc both; elsewhere its own."""
        if device != "cpu":
            reason = "torch's CUDA allocator keeps freed memory by itself"
        elif not can_keep_freed_memory():
            reason = "the C library of this system is not glibc, whose mallopt it takes"
        else:
            return offer(self.name, ("own", "keep"))
        return offer(self.name, ("own",), {"keep": reason})

    def apply(self, build: Build) -> None:
        """Sets the C library; this holds for the rest of the process's life, not only for the run."""
        if build.config.allocator == "own":
            return
        if build.device.type != "cpu" or not keep_freed_memory():
            raise ConfigError(
                f"allocator=keep needs a CPU and glibc; this run is on {build.device.type} ({sys.platform})",
                hint="Leave allocator at own.",
            )


def can_keep_freed_memory() -> bool:
    """Whether the C library has the setting: glibc does."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    return hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version")


def keep_freed_memory() -> bool:
    """Sets this process's C library to keep freed memory for the allocations to come; for the rest of its life.

    Returns:
        Whether it took it.
    """
    if not can_keep_freed_memory():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return mallopt(M_MMAP_THRESHOLD, LARGEST_MAPPED_BYTES) == 1 and mallopt(M_TRIM_THRESHOLD, NEVER) == 1
