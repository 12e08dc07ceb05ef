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
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.workload import LossSum, Workload

TOLERANCE = 1e-3
SHORT_LENGTH = 32  # tokens: enough for the check, and cheap
SEEDS = 5  # a layer that is dropped half of the time escapes as many equal draws in one check of sixteen


def check_additivity(workload: Workload, model: nn.Module, device: torch.device) -> tuple[bool, bool]:
    """Whether the summed loss of two samples is the sum of their losses. Buffers are put back.

    Args:
        workload: Makes the samples and computes the loss.
        model: In train mode, on the device, with its dropout off.
        device: Where.

    Returns:
        Whether it adds up, and whether the same two samples give the same loss with any seed. Where they don't (noise
        in the loss, layerdrop), whether it adds up is not known, and the first is False too.

    Raises:
        WorkloadError: the loss is not a LossSum.
    """
    whole = workload.make_batch(2, 0)
    try:
        return _check(workload, model, shorten(whole, SHORT_LENGTH), device)
    except WorkloadError:
        raise
    except Exception:  # a window or a pooling may need longer sequences
        return _check(workload, model, whole, device)


def _check(workload: Workload, model: nn.Module, given: Batch, device: torch.device) -> tuple[bool, bool]:
    batch = move_batch(slice_batch(given, 0, 2), device)
    with torch.no_grad(), _buffers_kept(model):

        def loss_of(part: Batch, seed: int = workload.seed) -> float:
            seed_generators(seed)
            result = workload.loss(model, part)
            if not isinstance(result, LossSum):
                raise WorkloadError(
                    f"the loss of {workload.name} gave {type(result).__name__}; it gives an autoplan.LossSum",
                    hint="End it with: return autoplan.LossSum(sum of the losses, number of items). A sum, not a mean.",
                )
            return float(result.total)

        both = loss_of(batch)
        others = (loss_of(batch, workload.seed + number) for number in range(1, SEEDS))
        if any(abs(both - other) > 1e-5 * max(abs(both), 1e-12) for other in others):
            return False, False  # noise or layerdrop: one sample alone draws something else, so sums say nothing
        try:
            alone = sum(loss_of(slice_batch(batch, i, i + 1)) for i in range(2))
        except ValueError:  # BatchNorm over a single value refuses it
            return False, True
    return abs(both - alone) <= TOLERANCE * max(abs(both), 1e-12), True


def shorten(batch: Batch, length: int) -> Batch:
    """The first tokens of a batch of sequences: a dict with `labels`, all of its tensors (samples, sequence length).

    Any other batch stays as it is.
    """
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return batch
    if any(not isinstance(value, torch.Tensor) or value.shape != labels.shape for value in batch.values()):
        return batch
    # whole tensors, as make_batch gives them: models take views of them
    return {name: value[:, :length].contiguous() for name, value in batch.items()}


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
