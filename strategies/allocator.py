"""The allocator of a process: what it does with memory that was freed.

glibc gives freed memory back to the kernel: every allocation past a threshold (128 KiB, growing up to 32 MiB) is a
mapping of its own that is unmapped when it is freed, and the top of the heap is cut off. The next micro-step then takes
the same memory page by page, one fault and one clearing each: on a GPT-2 of 124M that was a third of a micro-step,
measured. Told to keep what was freed (mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), it pays once.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_MAPPED_BYTES = 1 << 30
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tells this process's C library to keep freed memory for the allocations to come; for the rest of its life.

    Returns:
        Whether it took it: glibc does, other C libraries have no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return mallopt(M_MMAP_THRESHOLD, LARGEST_MAPPED_BYTES) == 1 and mallopt(M_TRIM_THRESHOLD, NEVER) == 1
