"""The allocator knob: what happens to memory that was freed. On CPU in the C library, on CUDA in torch's allocator.

CPU: glibc gives freed memory back to the kernel: every allocation past a threshold (128 KiB, growing up to 32 MiB) is a
mapping of its own that is unmapped when it is freed, and the top of the heap is cut off. The next micro-step then takes
the same memory page by page, one fault and one clearing each: on a GPT-2 of 124M that was a third of a micro-step,
measured. Set to keep what was freed (mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), it pays once; the process then
stays about as large as it ever was, a fifth more than its peak otherwise.

CUDA: torch's allocator takes memory of the driver in segments and never moves a block, so memory that is free in pieces
cannot serve a large request. Segments that grow (`expandable_segments`, torch.cuda's notes on memory management) are
mapped page by page, so that most of it can.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch

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
    """`own` leaves the allocators as they are; `keep` and `expandable` set one for the whole process."""

    name = "allocator"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """On CPU with glibc `keep`, on CUDA `expandable`."""
        if device != "cpu":
            keep: str | None = "torch's CUDA allocator keeps freed memory by itself"
            expandable = None if can_expand_segments() else "this torch has no call that sets its CUDA allocator"
        else:
            glibc = can_keep_freed_memory()
            keep = None if glibc else "the C library of this system is not glibc, whose mallopt it takes"
            expandable = "it is a setting of torch's CUDA allocator"
        return offer(self.name, ("own",), {"keep": keep, "expandable": expandable})

    def apply(self, build: Build) -> None:
        """Sets an allocator; this holds for the rest of the process's life, not only for the run.

        Raises:
            ConfigError: the device or this torch has no such setting.
        """
        set_allocator(build.config.allocator, build.device)


def set_allocator(value: str, device: torch.device) -> None:
    """Sets this process's allocator for what is allocated from now on: a model that exists stays where it is.

    Args:
        value: Of the knob.
        device: Where the run is.

    Raises:
        ConfigError: the device or this torch has no such setting.
    """
    if value == "own":
        return
    if value == "expandable":
        if device.type != "cuda" or not expand_segments():
            raise ConfigError(
                f"allocator=expandable is a setting of torch's CUDA allocator; this run is on {device.type}, "
                f"with torch {torch.__version__}",
                hint="Leave allocator at own.",
            )
        return
    if device.type != "cpu" or not keep_freed_memory():
        raise ConfigError(
            f"allocator=keep needs a CPU and glibc; this run is on {device.type} ({sys.platform})",
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


def can_expand_segments() -> bool:
    """Whether this torch has a call that sets its CUDA allocator while the process runs."""
    return _segment_setter() is not None


def expand_segments() -> bool:
    """Has torch's CUDA allocator take segments that grow, from the next one on; for the rest of the process's life.

    Returns:
        Whether this torch can.
    """
    setter = _segment_setter()
    if setter is None:
        return False
    setter("expandable_segments:True")
    return True


def _segment_setter() -> Callable[[str], None] | None:
    """The call that sets torch's allocator, by its newer or its older name."""
    names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
    return next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
