"""A numeric check that the loss of a batch is the sum of its samples' losses, so that micro-batches may be any size.

It is not for BatchNorm (found by structure too), contrastive losses and the auxiliary losses of mixtures of experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch, move_batch, slice_batch
from autoplan.strategies.workloads.workload import LossSum, Workload

TOLERANCE = 1e-3
SHORT_LENGTH = 32  # tokens: enough for the check, and cheap


def check_additivity(workload: Workload, model: nn.Module, device: torch.device) -> tuple[bool, bool]:
    """Whether the summed loss of two samples is the sum of their losses. Buffers are put back.

    Args:
        workload: Makes the samples and computes the loss.
        model: In train mode, on the device, with its dropout off.
        device: Where.

    Returns:
        Whether it adds up, and whether the same two samples give the same loss twice.

    Raises:
        WorkloadError: the loss is not a LossSum.
    """
    whole = shorten(workload.make_batch(2, 0), SHORT_LENGTH)
    batch = move_batch(slice_batch(whole, 0, 2), device)
    with torch.no_grad(), _buffers_kept(model):
        given = workload.loss(model, batch)
        if not isinstance(given, LossSum):
            raise WorkloadError(
                f"the loss of {workload.name} gave {type(given).__name__}; it gives an autoplan.LossSum",
                hint="End it with: return autoplan.LossSum(sum of the losses, number of items). A sum, not a mean.",
            )
        both = float(given.total)
        again = float(workload.loss(model, batch).total)
        deterministic = abs(both - again) <= 1e-5 * max(abs(both), 1e-12)
        try:
            alone = sum(float(workload.loss(model, slice_batch(batch, i, i + 1)).total) for i in range(2))
        except ValueError:  # BatchNorm over a single value refuses it
            return False, deterministic
    return abs(both - alone) <= TOLERANCE * max(abs(both), 1e-12), deterministic


def shorten(batch: Batch, length: int) -> Batch:
    """The first tokens of a batch of sequences: a dict with `labels`, all of its tensors (samples, sequence length).

    Any other batch stays as it is.
    """
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return batch
    if any(not isinstance(value, torch.Tensor) or value.shape != labels.shape for value in batch.values()):
        return batch
    return {name: value[:, :length] for name, value in batch.items()}


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
