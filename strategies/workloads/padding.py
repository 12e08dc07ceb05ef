"""Whether padding changes what is trained: a recurrent layer that reads it, a mean over it, a mask that is not there.

Then the gradient of a sample depends on the samples that it shares a micro-batch with, and the micro-batch is part of
what is trained. The loss alone hardly shows it: a bidirectional GRU under CTC differed by 4e-5 of the loss and by 3 %
of a gradient (measured).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.strategies.workloads.batch import Batch, move_batch
from autoplan.strategies.workloads.randomness import seeded
from autoplan.strategies.workloads.samples import SampleBatch

SAMPLES = 8
"""Of which the largest and the smallest are compared."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative, by the dtype of the parameters: what other sums of the same numbers differ by, with a wide margin."""


def padding_share(
    loss: Callable[[nn.Module, Batch], Any],
    model: nn.Module,
    make_batch: Callable[[int, int], Batch],
    device: torch.device,
    *,
    seed: int,
) -> float | None:
    """How much the gradient of two samples changes when they are padded to one size, where it is more than rounding.

    Args:
        loss: Gives a LossSum.
        model: On the device, without dropout and without statistics of a batch.
        make_batch: Makes the samples.
        device: Where.
        seed: Of the generators while it runs.

    Returns:
        The distance over the norm of the gradient (1); None: it does not change, or nothing is padded, or that cannot
        be measured.
    """
    batch = make_batch(SAMPLES, 0)
    if not isinstance(batch, SampleBatch):
        return None
    sizes = batch.largest_first()
    pair = sizes.pick_samples((0, sizes.num_samples - 1))
    alone = [pair.slice_samples(number, number + 1) for number in range(2)]
    if len({tuple(_shapes(part)) for part in alone}) == 1:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradient(part: Batch) -> list[torch.Tensor]:
        with seeded(seed), torch.enable_grad():
            total = loss(model, move_batch(part, device)).total
            found = torch.autograd.grad(total, trained, allow_unused=True)
        return [torch.zeros(1, device=device) if one is None else one.detach().float() for one in found]

    try:
        together, first, second = gradient(pair), gradient(alone[0]), gradient(alone[1])
    except Exception:  # too large, a loss of its own kind: the trials and the parity check say more
        return None
    apart = [whole - one - other for whole, one, other in zip(together, first, second, strict=True)]
    norms = [float(torch.linalg.vector_norm(torch.stack([one.norm() for one in some]))) for some in (apart, together)]
    allowed = max(TOLERANCE.get(parameter.dtype, 1e-3) for parameter in trained)
    return norms[0] / norms[1] if norms[0] > allowed * norms[1] else None


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    """The shapes of one sample's tensors."""
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor)]


def padding_words(share: float) -> str:
    """Why the micro-batch is part of what is trained."""
    return f"padding changes the gradient of a sample (by {share:.1%} in two samples), and a micro-batch decides on it"
