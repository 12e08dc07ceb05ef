"""The small workload of the check: short sequences, a small global batch, dropout off, labels masked unevenly."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.planner.parity.records import CHECK_SEQUENCE_LENGTH, LARGE_MODEL_SEQUENCE_LENGTH, SMALL_MODEL_PARAMETERS
from autoplan.strategies.analysis.additivity import SHORT_LENGTH, shorten
from autoplan.strategies.analysis.structure import disable_dropout
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.batch import Batch, batch_size
from autoplan.strategies.workloads.carried import buffers_kept
from autoplan.strategies.workloads.samples import SAMPLES, SampleBatch
from autoplan.strategies.workloads.workload import IGNORE_INDEX, Workload

_MASKED_SHARE = 0.7  # of the last sample's labels


def small_workload(
    workload: Workload, config: TrainingConfig, *, length: int, masked: bool, accumulation: int, dropout: bool = False
) -> Workload:
    """The workload with a global batch of the check's few micro-batches.

    Args:
        workload: What is trained.
        config: The candidate's small config.
        length: Longer sequences are cut to it.
        masked: Mask labels, so that the micro-batches count differently.
        accumulation: Micro-batches per step on a data-parallel rank.
        dropout: Leave dropout on.
    """

    def build_model() -> nn.Module:
        model = workload.build_model()
        disable_dropout(model)
        return model

    def make_batch(samples: int, index: int) -> Batch:
        batch = shorten(workload.make_batch(samples, index), length)
        return mask_labels(batch, config.micro_batch) if masked else batch

    return dataclasses.replace(
        workload,
        build_model=workload.build_model if dropout else build_model,
        make_batch=make_batch,
        global_batch=config.micro_batch * config.dp * accumulation,
    )


def interleaved(batch: Batch, ranks: int, micro_batch: int) -> Batch:
    """The samples in the order in which data-parallel ranks run them together.

    First the first micro-batch of each rank, then the second of each. Rank 0 has the first samples of the batch.
    """
    samples = batch_size(batch)
    order = torch.arange(samples).view(ranks, samples // (ranks * micro_batch), micro_batch).transpose(0, 1).reshape(-1)
    if isinstance(batch, SampleBatch):
        return batch.pick_samples(order.tolist())

    def pick(value: Any) -> Any:
        return value[order.to(value.device)] if value.dim() > 0 and value.shape[0] == samples else value

    return pytree.tree_map_only(torch.Tensor, pick, batch)


def check_length(workload: Workload, parameters: int, *, own_shapes: bool = False) -> int:
    """Tokens per sequence in the steps of the check: fewer for a large model, all of them with own shapes."""
    longest = CHECK_SEQUENCE_LENGTH if parameters <= SMALL_MODEL_PARAMETERS else LARGE_MODEL_SEQUENCE_LENGTH
    if own_shapes:
        return own_length(workload, longest) or longest
    return longest if workload.sequence_length is None else min(longest, workload.sequence_length)


def own_length(workload: Workload, length: int) -> int | None:
    """The tokens of the workload's own sequences, where the check cuts them at `length`; None: it does not."""
    batch = workload.make_batch(1, 0)
    short = shorten(batch, length)
    if short is batch or short["labels"].shape == batch["labels"].shape:
        return None
    return int(batch["labels"].shape[1])


# Labels.


def labels_of(batch: Batch) -> torch.Tensor | None:
    """The labels of a batch: whole numbers under `labels`, with the samples as their first dim; None: it has none."""
    labels = batch.get("labels") if isinstance(batch, dict) and SAMPLES not in batch else None
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0:
        return None
    is_class = labels.dtype in (torch.int64, torch.int32, torch.int16)
    return labels if is_class else None


def mask_labels(batch: Batch, micro_batch: int) -> Batch:
    """The batch with labels masked, more of them in later samples: the micro-batches then count differently.

    Where a sample has one label, the last sample of the first micro-batch loses its own.
    """
    labels = labels_of(batch)
    size = batch_size(batch)
    if labels is None or size < 2:
        return batch
    masked = labels.clone()
    if labels[0].numel() == 1:
        if micro_batch > 1:
            masked[min(micro_batch, size) - 1] = IGNORE_INDEX
        return {**batch, "labels": masked}
    rows = masked.view(size, -1)
    for sample in range(1, size):
        _mask_some(rows[sample], _MASKED_SHARE * sample / (size - 1))
    return {**batch, "labels": masked}


def _mask_some(row: torch.Tensor, share: float) -> None:
    """Masks a share of a sample's labels in place, spread over the sample; one is left in any case.

    A sample without any would have a mean over nothing, which is not a number.
    """
    counted = (row != IGNORE_INDEX).nonzero()[:, 0]
    kept = max(1, len(counted) - int(share * len(counted)))
    if kept >= len(counted):
        return
    last = len(counted) - 1  # kept in any case: a causal model predicts nothing for the first
    places = [last - round(number * last / kept) for number in range(kept)]
    left = row[counted[places]].clone()
    row[counted] = IGNORE_INDEX
    row[counted[places]] = left


def can_mask_labels(workload: Workload, model: nn.Module, device: torch.device, micro_batch: int) -> bool:
    """Whether the loss leaves masked labels out: it runs on them, and counts fewer.

    A workload that counts ahead is asked so. Else the loss is run on a few short samples; on the CPU, where a label
    out of range is an exception and not the end of the CUDA context.
    """
    size = max(2, workload.fixed_micro_batch or 0)
    batch = shorten(workload.make_batch(size, 0), SHORT_LENGTH)
    if labels_of(batch) is None:
        return False
    masked = mask_labels(batch, max(size, micro_batch))
    if workload.count is not None:
        return workload.count(masked) < workload.count(batch)
    with buffers_kept(model):
        try:
            model.to("cpu")
            with torch.no_grad():
                counts = [float(workload.loss(model, given).count) for given in (batch, masked)]
        except Exception:  # labels of another meaning, or a model that runs on its device alone
            return False
        finally:
            model.to(device)
    return counts[1] < counts[0]
