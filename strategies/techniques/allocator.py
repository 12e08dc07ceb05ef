"""The allocator knob: what happens to memory that was freed. On CPU in the C library, on CUDA in torch's allocator.

What both settings do and were measured to give: docs/techniques.md. Each holds for the rest of the process's life.
"""

from __future__ import annotations

import ctypes
import sys

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
            return offer(self.name, ("own",), {"keep": keep, "expandable": None})
        keep = None if can_keep_freed_memory() else "the C library of this system is not glibc, whose mallopt it takes"
        return offer(self.name, ("own",), {"keep": keep, "expandable": "it is a setting of torch's CUDA allocator"})

    def apply(self, build: Build) -> None:
        """Sets an allocator; this holds for the rest of the process's life, not only for the run.

        Raises:
            ConfigError: the device has no such setting.
        """
        set_allocator(build.config.allocator, build.device)


def set_allocator(value: str, device: torch.device) -> None:
    """Sets this process's allocator for what is allocated from now on: a model that exists stays where it is.

    Args:
        value: Of the knob.
        device: Where the run is.

    Raises:
        ConfigError: the device has no such setting.
    """
    if value == "own":
        return
    if value == "expandable":
        if device.type != "cuda":
            raise ConfigError(
                f"allocator=expandable is a setting of torch's CUDA allocator; this run is on {device.type}",
                hint="Leave allocator at own.",
            )
        expand_segments()
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


def expand_segments() -> None:
    """Has torch's CUDA allocator take segments that grow, from the next one on; for the rest of the process's life."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
