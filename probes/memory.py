"""Memory bandwidth of a device, and of the way between the host and a GPU.

As in STREAM, bytes read and bytes written both count; buffers are larger than the caches.

- "copy": a -> b, 2 x 4 x n bytes. "add": c = a + s b, 3 x 4 x n bytes. float32, shape (n,).
- "first_touch": a new buffer is allocated and written once, so that every page of it faults; CPU only.
- "host_to_device_pinned", "host_to_device_pageable" and back: shape (bytes,); each byte counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from autoplan.probes.timing import Operation, filled

SMALLEST_BUFFER_BYTES = 128 << 20
LARGEST_BUFFER_BYTES = 256 << 20
FIRST_TOUCH_BYTES = 64 << 20
TRANSFER_SIZES_BYTES = (1 << 20, 256 << 20)


def bandwidth_operations(device: torch.device, *, cache_bytes: int | None) -> Iterator[Operation]:
    """Copy and add over buffers that do not stay in the cache.

    Args:
        device: The device to measure.
        cache_bytes: Its last-level cache. Buffers are four times as large, within 128 to 256 MiB each (a
            virtual machine often reports the cache of the whole host).
    """
    wanted = 4 * cache_bytes if cache_bytes else SMALLEST_BUFFER_BYTES
    count = min(max(wanted, SMALLEST_BUFFER_BYTES), LARGEST_BUFFER_BYTES) // 4

    def build_copy() -> Callable[[], object]:
        a, b = (filled((count,), torch.float32, device) for _ in range(2))
        return lambda: b.copy_(a)

    def build_add() -> Callable[[], object]:
        a, b, c = (filled((count,), torch.float32, device) for _ in range(3))
        return lambda: torch.add(a, b, alpha=0.5, out=c)

    if device.type == "cpu":
        # past 32 MiB glibc maps every allocation anew (mallopt(3), M_MMAP_THRESHOLD)
        fresh = FIRST_TOUCH_BYTES // 4
        yield Operation(
            kind="first_touch",
            dtype="float32",
            shape=(fresh,),
            work=float(FIRST_TOUCH_BYTES),
            unit="bytes/s",
            memory_bytes=FIRST_TOUCH_BYTES,
            build=lambda: lambda: torch.empty(fresh, dtype=torch.float32).fill_(1.0),
        )
    for kind, build, buffers in (("copy", build_copy, 2), ("add", build_add, 3)):
        yield Operation(
            kind=kind,
            dtype="float32",
            shape=(count,),
            work=4.0 * count * buffers,
            unit="bytes/s",
            memory_bytes=4 * count * (buffers + 1),
            build=build,
        )


def transfer_operations(device: torch.device) -> Iterator[Operation]:
    """Host to GPU and back, from pinned and from pageable memory; nothing on a CPU."""
    if device.type != "cuda":
        return
    for size in TRANSFER_SIZES_BYTES:
        for pinned in (True, False):
            for to_device in (True, False):
                way = "host_to_device" if to_device else "device_to_host"
                yield Operation(
                    kind=f"{way}_{'pinned' if pinned else 'pageable'}",
                    dtype="uint8",
                    shape=(size,),
                    work=float(size),
                    unit="bytes/s",
                    memory_bytes=size,
                    build=_transfer_builder(device, size, pinned, to_device),
                )


def _transfer_builder(
    device: torch.device, size: int, pinned: bool, to_device: bool
) -> Callable[[], Callable[[], object]]:
    def build() -> Callable[[], object]:
        # zeros, not empty: untouched pages of the host are not there yet
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        if to_device:
            return lambda: there.copy_(host, non_blocking=pinned)
        return lambda: host.copy_(there, non_blocking=pinned)

    return build
