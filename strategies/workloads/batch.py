"""Batches: nested tensors whose first dim counts samples; their size, slices and micro-batches.

A batch is a tensor, or a dict (any mapping), dataclass, tuple or list of batches. A list of texts
may have one for each sample. Other leaves, and tensors without dims, belong to the whole batch and are passed on as
they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.samples import SAMPLES, SampleBatch

Batch = Any


def batch_size(batch: Batch) -> int:
    """Samples in a batch: the common first dim of its tensors.

    Raises:
        WorkloadError: no tensor, or tensors whose first dims differ.
    """
    if isinstance(batch, Mapping) and SAMPLES in batch:
        return int(batch[SAMPLES])
    know_containers(batch)
    sizes = {leaf.size(0) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(sizes) != 1:
        arrays = any(type(leaf).__module__ == "numpy" for leaf in pytree.tree_leaves(batch))
        given = f"tensors with first dims {sorted(sizes)}" if sizes else "arrays of NumPy" if arrays else "no tensor"
        raise WorkloadError(
            f"the batch has {given}; every tensor of a batch has the samples as its first dim",
            hint="Make tensors of arrays (torch.from_numpy). For another layout (time first, lists of images, graphs), "
            "give a Workload whose make_batch returns autoplan.SampleBatch(samples, collate, rows_are_samples=False): "
            "then the samples of each micro-batch are collated by themselves.",
        )
    return int(sizes.pop())


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """The samples start to stop (views, no copy). A list of texts, one for each sample, is sliced too."""
    by_samples = getattr(batch, "slice_samples", None)  # a batch that collates a part of its samples by itself
    if by_samples is not None:
        return by_samples(start, stop)

    def part(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            return torch.nested.as_nested_tensor(list(leaf.unbind()[start:stop]), layout=leaf.layout)
        return leaf[start:stop]

    return _map_samples(batch, part)


def repeat_samples(batch: Batch, times: int) -> Batch:
    """All samples of a batch, so many times."""
    if isinstance(batch, SampleBatch):
        return batch.repeat_samples(times)

    def repeated(leaf: Any) -> Any:
        return torch.cat([leaf] * times) if isinstance(leaf, torch.Tensor) else leaf * times

    return _map_samples(batch, repeated)


def _map_samples(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """The batch with a change of each leaf that has one item for each sample."""
    know_containers(batch)
    leaves = pytree.tree_leaves(batch, is_leaf=_is_texts)
    samples = batch_size(batch) if any(map(_is_texts, leaves)) else -1

    def part(leaf: Any) -> Any:
        of_samples = leaf.dim() > 0 if isinstance(leaf, torch.Tensor) else _is_texts(leaf) and len(leaf) == samples
        return change(leaf) if of_samples else leaf

    return pytree.tree_map(part, batch, is_leaf=_is_texts)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def split_batch(batch: Batch, micro_batch: int) -> Iterator[Batch]:
    """The batch in micro-batches, in order.

    Raises:
        WorkloadError: micro_batch does not divide the batch.
    """
    size = batch_size(batch)
    if size % micro_batch:
        raise WorkloadError(
            f"a batch of {size} samples does not split into micro-batches of {micro_batch}",
            hint="Pass step() this rank's whole share of the global batch: TrainingRun.local_batch samples.",
        )
    for start in range(0, size, micro_batch):
        yield slice_batch(batch, start, start + micro_batch)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device; to a GPU through pinned host memory, so that the host does not wait."""
    know_containers(batch)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        plain = type(leaf) is torch.Tensor and leaf.device.type == "cpu" and not leaf.requires_grad
        if device.type == "cuda" and plain and leaf.is_contiguous():
            leaf = leaf.pin_memory()  # itself where it is pinned
        return leaf.to(device, non_blocking=True)

    return pytree.tree_map(move, batch)


# Containers.


def know_containers(batch: Any) -> None:
    """Registers the classes of the mappings and dataclasses in a batch with pytree, each once per process.

    A mapping whose class cannot be made from a dict stays a leaf.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, type):
            continue
        with contextlib.suppress(Exception):  # such a leaf is passed on as it is
            if isinstance(leaf, Mapping):
                if list(_make_mapping(*_parts_of_mapping(leaf))) != list(leaf):
                    continue
                pytree.register_pytree_node(type(leaf), _parts_of_mapping, _make_mapping)
                know_containers(leaf)
            elif dataclasses.is_dataclass(leaf):
                pytree.register_pytree_node(type(leaf), _parts_of_dataclass, _make_dataclass)
                know_containers(leaf)


def _parts_of_mapping(value: Mapping[Any, Any]) -> tuple[list[Any], Any]:
    return list(value.values()), (type(value), tuple(value))


def _make_mapping(parts: Iterable[Any], context: Any) -> Any:
    kind, keys = context
    items = dict(zip(keys, parts, strict=True))
    return kind(**items) if dataclasses.is_dataclass(kind) else kind(items)  # type: ignore[operator]


def _parts_of_dataclass(value: Any) -> tuple[list[Any], Any]:
    names = tuple(field.name for field in dataclasses.fields(value))
    return [getattr(value, name) for name in names], (type(value), names)


def _make_dataclass(parts: Iterable[Any], context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)  # frozen or not, and whatever its __init__ takes
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


# The micro-batches of a step on the device that trains, without a wait of the host.
#
# A copy from ordinary host memory makes the host wait until it is done (cudaMemcpyAsync stages it); one from pinned
# memory does not. So the batch of a step is pinned, and moved once, and its micro-batches are cut on the device; one
# too large for that is copied micro-batch by micro-batch on a stream of its own, ahead of the work. torch keeps pinned
# memory until the copies from it are done (aten/src/ATen/native/cuda/Copy.cu), so nobody has to hold on to it.


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
