"""The micro-batches of a step on the device that trains, without a wait of the host.

A copy from ordinary host memory makes the host wait until it is done (cudaMemcpyAsync stages it), at each micro-step.
From pinned memory it does not. So the batch of a step is pinned, and moved once, and its micro-batches are cut on the
device; one too large for that is copied micro-batch by micro-batch on a stream of its own, one ahead of the work.
torch keeps pinned memory until the copies from it are done (aten/src/ATen/native/cuda/Copy.cu records an event for each
with the host allocator), so nobody has to hold on to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch.utils import _pytree as pytree

from autoplan.strategies.workloads.batch import Batch, know_containers, move_batch, split_batch

MOVED_AT_ONCE_BYTES = 64 << 20
"""A larger batch is not held on the device as a whole: tokens are never that large, images are."""


def device_micro_batches(batch: Batch, micro_batch: int, device: torch.device) -> Iterator[Batch]:
    """The micro-batches of a step on the device, in order.

    Args:
        batch: This rank's samples of the step, on the host or on the device.
        micro_batch: Samples of each.
        device: Where.

    Raises:
        WorkloadError: micro_batch does not divide the batch.
    """
    if device.type != "cuda" or hasattr(batch, "slice_samples"):  # a SampleBatch: its parts are made on the host
        for micro in split_batch(batch, micro_batch):
            yield move_batch(micro, device)
    elif _host_bytes(batch) <= MOVED_AT_ONCE_BYTES:
        yield from split_batch(move_batch(batch, device), micro_batch)
    else:
        yield from _copied_ahead(split_batch(batch, micro_batch), device)


def _host_bytes(batch: Batch) -> int:
    """Bytes of the tensors that are not on a GPU yet."""
    know_containers(batch)
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_cuda]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def _copied_ahead(micro_batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Each micro-batch on the device; the next one is copied on a stream of its own while this one is worked on."""
    copying, working = _copy_stream(device), torch.cuda.current_stream(device)
    ahead: Batch | None = None
    for micro in micro_batches:
        with torch.cuda.stream(copying):
            coming = move_batch(micro, device)
        if ahead is not None:
            yield ahead
        working.wait_stream(copying)
        for leaf in pytree.tree_leaves(coming):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(working)  # its memory belongs to the other stream, and must outlive the work
        ahead = coming
    if ahead is not None:
        yield ahead


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
