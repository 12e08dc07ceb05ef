"""Watches the host memory of all descendants of a process."""

from __future__ import annotations

import os
import time

from autoplan.processes import linux

_RELIST_S = 0.5
_LISTING_SHARE = 0.05  # of one core, at most: a walk of /proc takes long where thousands of processes run
_NEAR_LIMIT = 0.7
_CONFIRM_S = 0.25  # between exact readings: the kernel walks the page tables for each

# RLIMIT_DATA counts what a process maps, not what it touches, so it has to be larger than the polled limit.
_DATA_LIMIT_FACTOR = 1.5
_DATA_LIMIT_EXTRA_BYTES = 1 << 30

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""The files by which a process reaches an NVIDIA GPU: on Linux, and on Windows' Linux (WSL2)."""


def data_limit_bytes(memory_limit_bytes: int, env: dict[str, str]) -> int | None:
    """The RLIMIT_DATA that goes with a memory limit; None where CUDA may be used.

    The driver maps far more than it touches, so no limit on mappings (RLIMIT_AS, RLIMIT_DATA) is usable there.

    Args:
        memory_limit_bytes: The polled limit, for all processes together.
        env: The environment of the ranks.
    """
    uses_cuda = any(map(os.path.exists, GPU_FILES)) and env.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    return None if uses_cuda else int(memory_limit_bytes * _DATA_LIMIT_FACTOR) + _DATA_LIMIT_EXTRA_BYTES


class MemoryWatch:
    """Polls the memory of a process's descendants.

    The cheap reading (anonymous plus shared resident pages, summed) counts shared pages more than once. Only where
    it passes the limit does the exact one (proportional set size: the kernel walks the page tables) decide.
    """

    def __init__(self, root_pid: int, limit_bytes: int | None) -> None:
        self._root_pid = root_pid
        self._limit_bytes = limit_bytes
        self._pids: set[int] = set()
        self._listed_at = 0.0
        self._listing_s = 0.0
        self._confirmed_at = 0.0
        self.bytes = 0
        self.peak_bytes = 0
        self.by_pid: dict[int, int] = {}

    @property
    def near_limit(self) -> bool:
        """Whether the last reading asks for a shorter interval."""
        return self._limit_bytes is not None and self.bytes > _NEAR_LIMIT * self._limit_bytes

    def poll(self) -> bool:
        """Takes a reading.

        Returns:
            True if the limit is passed.
        """
        now = time.monotonic()
        wait_s = 0.0 if self.near_limit else _RELIST_S
        if now - self._listed_at >= max(wait_s, self._listing_s / _LISTING_SHARE):
            self._pids, self._listed_at = linux.descendants(self._root_pid), now
            self._listing_s = time.monotonic() - now
        self.by_pid = {pid: linux.resident_bytes(pid) for pid in self._pids}
        self.bytes = sum(self.by_pid.values())
        if self._limit_bytes is None or self.bytes <= self._limit_bytes:
            self.peak_bytes = max(self.peak_bytes, self.bytes)
            return False
        if now - self._confirmed_at < _CONFIRM_S and self.bytes < 1.5 * self._limit_bytes:
            return False
        self._confirmed_at = now
        self.by_pid = {pid: linux.proportional_bytes(pid) for pid in self._pids}
        self.bytes = sum(self.by_pid.values())
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return self.bytes > self._limit_bytes
