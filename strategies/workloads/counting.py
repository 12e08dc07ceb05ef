"""The units that throughput counts: the tokens of a batch that enter the model, without padding; or its samples.

In: a batch, and a workload or what was found out about it (`Counted`). Out: whole numbers. Nothing is run.

Tokens are found by the names that transformers gives to the fields of a batch: `input_ids`, `decoder_input_ids` and
others that end so, each with the mask of the same name (`attention_mask`, `decoder_attention_mask`). A position is
padding if its mask is 0. Packed sequences have no padding and count whole. An encoder-decoder that gets no
`decoder_input_ids` makes them of `labels`, so the labels other than IGNORE_INDEX count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.strategies.workloads.batch import Batch, batch_size
from autoplan.strategies.workloads.randomness import with_seeded_batches
from autoplan.strategies.workloads.spec import BatchSizes, Counted, SizeRange, WorkloadSpec
from autoplan.strategies.workloads.workload import IGNORE_INDEX, Workload

IDS, MASK = "input_ids", "attention_mask"
OTHER_INPUTS = ("pixel_values", "input_features", "input_values", "images", "image", "audio")
"""Fields of images and audio: a batch that has one is counted in samples, unless the workload has a sequence length."""

SIZED_BATCHES = 64
"""How many batches are made to see whether their size changes."""

SIZING_LIMIT_S, SAME_LIMIT_S = 5.0, 1.0
"""No further batch is made after so many seconds; the second limit holds as long as all batches had the same size."""


def find_counted(workload: Workload, batch: Batch, model: nn.Module | None) -> Counted:
    """The units that throughput counts for a workload.

    Args:
        workload: Its `tokens` function wins, if it has one.
        batch: A batch of it.
        model: Its model, on any device: it shows if decoder inputs are made of the labels. None: that is not known.
    """
    if workload.tokens is not None:
        return Counted(unit="tokens", by="function")
    fields = _token_fields(batch, model)
    if workload.sequence_length is None:
        other = isinstance(batch, Mapping) and any(name in batch for name in OTHER_INPUTS)
        if not any(name.endswith(IDS) for name in fields) or other:
            return Counted(unit="samples", by="samples")
    if fields:
        masked = tuple(name for name in fields if _mask_of(batch, name) is not None or name == "labels")
        return Counted(unit="tokens", by="fields", fields=fields, without_padding=masked)
    leaves = pytree.tree_leaves(batch)
    index = next((number for number, leaf in enumerate(leaves) if _is_ids(leaf)), None)
    if index is None:
        return Counted(unit="tokens", by="length")
    return Counted(unit="tokens", by="tensor", tensor=index)


def count_items(workload: Workload, counted: Counted, batch: Batch) -> int:
    """The tokens of a batch without padding, or its samples."""
    if counted.by == "function":
        assert workload.tokens is not None, "only a workload with the function is counted by it"
        return int(workload.tokens(batch))
    return _count(counted, batch, workload.sequence_length)


def _count(counted: Counted, batch: Batch, sequence_length: int | None) -> int:
    if counted.by == "fields":
        return sum(_count_field(batch, name) for name in counted.fields if name in batch)
    if counted.by == "tensor":
        leaves = pytree.tree_leaves(batch)
        return _positions(leaves[counted.tensor]) if len(leaves) > counted.tensor else 0
    return batch_size(batch) * (sequence_length or 1 if counted.by == "length" else 1)


def count_positions(workload: Workload, counted: Counted, batch: Batch) -> int:
    """The same with padding: what the model computes on. In samples: the elements of all tensors."""
    if counted.by == "fields":
        return sum(_positions(batch[name]) for name in counted.fields if name in batch)
    if counted.by in ("tensor", "length"):
        return count_items(workload, counted, batch)
    return batch_elements(batch)


def count_on_host(spec: WorkloadSpec, batch: Batch) -> tuple[float, float] | None:
    """(items, positions) of a batch without waiting for a device; None where the spec alone does not say what to count.

    The padding of a batch that is on a device already is not looked at: its items are then as many of its positions as
    in the batches of the search.
    """
    counted = spec.counted
    if counted is None or counted.by == "function":
        return None
    if counted.by in ("samples", "length"):
        return float(_count(counted, batch, spec.sequence_length)), float(batch_size(batch))
    if counted.by == "tensor":
        found = float(_count(counted, batch, None))
        return (found, found) if found else None
    if not isinstance(batch, Mapping):
        return None
    positions = float(sum(_positions(batch[name]) for name in counted.fields if name in batch))
    if not positions:
        return None
    if all(leaf.device.type == "cpu" for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)):
        return float(_count(counted, batch, None)), positions
    sizes = spec.batch_sizes
    return positions * (sizes.items.mean / sizes.positions.mean if sizes is not None else 1.0), positions


def batch_elements(batch: Batch) -> int:
    """The elements of all tensors of a batch."""
    return sum(_positions(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def look_at_sizes(workload: Workload, counted: Counted) -> BatchSizes | None:
    """How the size of a workload's batches varies, from whole global batches as its own make_batch makes them.

    Args:
        workload: What is trained.
        counted: What its throughput counts.

    Returns:
        The sizes; None where no batch could be made. A dataset that ends gives fewer batches.
    """
    make_batch, samples = with_seeded_batches(workload).make_batch, workload.global_batch
    sizes: list[tuple[int, int, int]] = []  # elements, positions and items of each batch
    began = time.monotonic()
    for index in range(SIZED_BATCHES):
        try:
            batch = make_batch(samples, index)
            found = batch_elements(batch), count_positions(workload, counted, batch)
            sizes.append((*found, count_items(workload, counted, batch)))
        except Exception:  # it ends, or fails: the trials meet it and say so
            break
        same = len({size for size, _, _ in sizes}) == 1
        if time.monotonic() - began > (SAME_LIMIT_S if same else SIZING_LIMIT_S):
            break
    if not sizes:
        return None
    elements, positions, items = ([size[place] for size in sizes] for place in range(3))
    mean = sum(elements) / len(elements)
    by_distance = sorted(range(len(elements)), key=lambda index: abs(elements[index] - mean))
    return BatchSizes(
        batches=len(elements),
        samples=samples,
        elements=_range_of(elements),
        positions=_range_of(positions),
        items=_range_of(items),
        largest=max(range(len(elements)), key=lambda index: elements[index]),
        typical=tuple(by_distance[:2]),
    )


def _range_of(values: list[int]) -> SizeRange:
    return SizeRange(min=min(values), mean=sum(values) / len(values), max=max(values))


def _token_fields(batch: Batch, model: nn.Module | None) -> tuple[str, ...]:
    """The fields of a batch whose positions are tokens of the model's input."""
    if not isinstance(batch, Mapping):
        return ()
    fields = [name for name in batch if isinstance(name, str) and name.endswith(IDS) and _is_ids(batch[name])]
    embeds = batch.get("inputs_embeds")
    if not fields and isinstance(embeds, torch.Tensor) and embeds.dim() == 3:
        fields.append("inputs_embeds")
    labels = batch.get("labels")
    makes_inputs = "decoder_input_ids" not in fields and isinstance(labels, torch.Tensor) and labels.dim() == 2
    configs = [getattr(part, "config", None) for part in model.modules()] if makes_inputs and model is not None else []
    if any(getattr(config, "is_encoder_decoder", False) is True for config in configs):
        fields.append("labels")
    return tuple(fields)


def _is_ids(leaf: Any) -> bool:
    """Whole numbers, one for each position: (samples, sequence), or packed (sequence) where a mask or nesting says."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_floating_point() or leaf.is_complex():
        return False
    return leaf.dtype != torch.bool and leaf.dim() >= 2


def _mask_of(batch: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """The padding mask of a field: of the same name and shape. One with more dims says who sees whom, not padding."""
    ids = batch[name]
    other = "decoder_" + MASK if name == "labels" else MASK if name == "inputs_embeds" else name[: -len(IDS)] + MASK
    mask = batch.get(other)
    if mask is None and name == "decoder_" + IDS and isinstance(batch.get("labels"), torch.Tensor):
        mask = batch["labels"] != IGNORE_INDEX  # a collator makes them of the labels, moved by one
    if not isinstance(mask, torch.Tensor) or mask.is_nested or ids.is_nested or mask.shape != ids.shape[:2]:
        return None
    return mask


def _count_field(batch: Mapping[str, Any], name: str) -> int:
    values, mask = batch[name], _mask_of(batch, name)
    if mask is not None:
        return int((mask != 0).sum())
    if name == "labels":
        return int((values != IGNORE_INDEX).sum())
    return _positions(values) if name != "inputs_embeds" else int(values.shape[0] * values.shape[1])


def _positions(values: Any) -> int:
    """The elements of a tensor; of a nested one, those that it has."""
    if not isinstance(values, torch.Tensor):
        return 0
    return int(values.values().numel() if values.is_nested and values.layout == torch.jagged else values.numel())
