"""Activations in the host's memory: what a forward saves for its backward is copied there, and comes back for it.

torch's `save_on_cpu` with four differences: copies run on streams of their own, both ways, beside the work; what the
backward needs next is fetched ahead; a tensor that several operations save is moved once; parameters and small tensors
stay where they are. The numbers are the same, bit for bit.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoplan.strategies.techniques.sizes import IN_FLIGHT_BYTES

SMALLEST_BYTES = 2**20
"""Smaller tensors are not worth their copies."""

LARGEST_WHOLE = 4
"""A part of a larger tensor takes the whole with it, up to so many times its own size; else it stays."""

AHEAD_BYTES = 256 * 2**20
"""Fetched before the backward asks for it."""


class SavedOnHost:
    """A tensor that a forward saved: its numbers in memory order, on the host, and on the device for the backward."""

    def __init__(self, host: torch.Tensor, device: torch.device, copied: Any, place: int) -> None:
        self.host = host
        self.device = device
        self.copied = copied
        self.place = place
        self.back: torch.Tensor | None = None
        self.arrived: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.host.numel() * self.host.element_size()


class HostActivations(torch.autograd.graph.saved_tensors_hooks):
    """Opened around one forward; the backward of what it made may run outside of it.

    Attributes:
        moved_bytes: What the forward has put on the host.

    Args:
        smallest_bytes: Smaller tensors stay; None: SMALLEST_BYTES.
    """

    def __init__(self, smallest_bytes: int | None = None) -> None:
        self._smallest = SMALLEST_BYTES if smallest_bytes is None else smallest_bytes
        self._order: list[weakref.ref[SavedOnHost]] = []
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[SavedOnHost]]] = {}
        self._going: deque[tuple[Any, int]] = deque()
        self._used: deque[tuple[Any, int]] = deque()
        self.moved_bytes = 0
        super().__init__(self._pack, self._unpack)

    # In the forward.

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self._moves(tensor):
            return tensor
        size, strides, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        if _is_dense(size, strides):
            start, count = offset, tensor.numel()
        else:  # a part of a larger tensor (queries among keys and values): all of it, once for all of its parts
            start, count = 0, tensor.untyped_storage().nbytes() // tensor.element_size()
            if count > LARGEST_WHOLE * tensor.numel():
                return tensor
        saved = self._saved(tensor.detach().as_strided((count,), (1,), start), tensor._version)
        return saved, size, strides, offset - start

    def _saved(self, flat: torch.Tensor, version: int) -> SavedOnHost:
        storage = StorageWeakRef(flat.untyped_storage())
        key = (storage.cdata, flat.storage_offset(), flat.numel(), flat.dtype, version)
        if key in self._known:
            # the storage at that address may be another one by now
            earlier, found = self._known[key][0], self._known[key][1]()
            if found is not None and not earlier.expired():
                return found
        saved = self._to_host(flat)
        self.moved_bytes += saved.nbytes
        self._order.append(weakref.ref(saved))
        self._known[key] = storage, self._order[-1]
        return saved

    def _moves(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False  # a parameter, or a tensor of a class of its own
        if isinstance(tensor._base, nn.Parameter):
            return False
        return tensor.numel() * tensor.element_size() >= self._smallest

    def _to_host(self, flat: torch.Tensor) -> SavedOnHost:
        on_cuda = flat.device.type == "cuda"
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=on_cuda)
        place = len(self._order)
        if not on_cuda:
            return SavedOnHost(host.copy_(flat), flat.device, None, place)
        out, _ = _streams_of(flat.device)
        out.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(out):
            host.copy_(flat, non_blocking=True)
            copied = out.record_event()
        flat.record_stream(out)
        saved = SavedOnHost(host, flat.device, copied, place)
        _wait_beyond(self._going, copied, saved.nbytes)
        return saved

    # In the backward.

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        saved, size, strides, offset = packed
        return self._back(saved).as_strided(size, strides, offset)

    def _back(self, saved: SavedOnHost) -> torch.Tensor:
        """The saved tensor on its device, in the order of its memory. Those saved before it are fetched ahead."""
        flat = self._fetch(saved)
        if saved.device.type != "cuda":
            return flat
        ahead = 0
        for reference in reversed(self._order[: saved.place]):
            before = reference()
            if before is None:
                continue
            ahead += before.nbytes
            if ahead > AHEAD_BYTES:
                break
            self._fetch(before)
        current = torch.cuda.current_stream(saved.device)
        current.wait_event(saved.arrived)
        flat.record_stream(current)
        _wait_beyond(self._used, current.record_event(), saved.nbytes)
        return flat

    def _fetch(self, saved: SavedOnHost) -> torch.Tensor:
        """Starts the copy to the device, once; the tensor holds its values after `saved.arrived`."""
        if saved.back is None and saved.device.type != "cuda":
            saved.back = saved.host.to(saved.device, copy=True)
        if saved.back is None:
            _, back = _streams_of(saved.device)
            back.wait_event(saved.copied)
            with torch.cuda.stream(back):
                saved.back = saved.host.to(saved.device, non_blocking=True)
                saved.arrived = back.record_event()
        return saved.back


def _is_dense(size: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether a tensor of these sizes and strides fills its memory, each place once, in whatever order."""
    expected = 1
    for stride, count in sorted((stride, count) for stride, count in zip(strides, size, strict=True) if count != 1):
        if stride != expected:
            return False
        expected *= count
    return True


_STREAMS: dict[torch.device, tuple[Any, Any]] = {}


def _streams_of(device: torch.device) -> tuple[Any, Any]:
    """A device's streams for the two directions of its link, out and in.

    They are the same in every forward: memory that one of them gave back serves it again.
    """
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return _STREAMS[device]


def _wait_beyond(queue: deque[tuple[Any, int]], event: Any, nbytes: int) -> None:
    """Has the host wait for the oldest copies where more than IN_FLIGHT_BYTES are under way.

    The memory of a copy is free after its event; a host that is far ahead would ask for more in the meantime.
    """
    queue.append((event, nbytes))
    while sum(size for _, size in queue) > IN_FLIGHT_BYTES:
        queue.popleft()[0].synchronize()
