"""A numeric check that the loss of a batch is the sum of its samples' losses, so that micro-batches may be any size.

It is not for BatchNorm (found by structure too), contrastive losses and the auxiliary losses of mixtures of experts.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch, move_batch, slice_batch
from autoplan.strategies.workloads.carried import buffers_kept
from autoplan.strategies.workloads.padding import padding_share, padding_words
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, Workload

TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of a model that is stored in few bits: each of its losses is rounded to a part in 256 or in 2048."""

SHORT_LENGTH = 32  # tokens: enough for the check, and cheap
SEEDS = 5  # a layer that is dropped half of the time escapes as many equal draws in one check of sixteen


@dataclass(frozen=True, kw_only=True, slots=True)
class Additivity:
    """Findings from the losses of two samples.

    Attributes:
        additive: The summed loss of both is the sum of their losses. False if that is not known.
        deterministic: The same two samples give the same loss with any seed.
        both: The summed loss of both.
        alone: The loss of each by itself; empty if that is not known.
        padding: How much padding changes the gradient (1); None: it does not.
    """

    additive: bool
    deterministic: bool
    both: float = math.nan
    alone: tuple[float, ...] = ()
    padding: float | None = None

    def describe(self) -> str:
        """Why the micro-batch is not free, where the losses do not add up."""
        if self.padding is not None:
            return f"depends on the micro-batch: {padding_words(self.padding)}"
        if not self.alone:
            return "of two samples is not known for each sample by itself, so it may depend on the micro-batch"
        text = (
            f"of two samples is {self.both:.4g}, and that of each by itself {self.alone[0]:.4g} and {self.alone[1]:.4g}"
        )
        if min(self.alone) <= self.both <= max(self.alone) or math.isclose(
            2 * self.both, sum(self.alone), rel_tol=0.05
        ):
            return (
                f"{text}: that is a mean; LossSum takes the sum and the count, so return LossSum(mean * count, count)"
            )
        return f"{text}: it is not their sum (a contrastive or an auxiliary loss)"


def check_additivity(workload: Workload, model: nn.Module, device: torch.device) -> tuple[bool, bool]:
    """`additive` and `deterministic` of `measure_additivity`."""
    found = measure_additivity(workload, model, device)
    return found.additive, found.deterministic


def measure_additivity(
    workload: Workload, model: nn.Module, device: torch.device, *, noise: bool = True, seeds: bool = False
) -> Additivity:
    """Whether the summed loss of two samples is the sum of their losses. Buffers are put back.

    Where the loss is another with each seed (noise in the loss, layerdrop), whether it adds up is not known.

    Args:
        workload: Makes the samples and computes the loss.
        model: In train mode, on the device, with its dropout off.
        device: Where.
        noise: Look for noise first. Whether a loss with noise adds up is then not looked at.
        seeds: Without that: try other seeds of a loss that adds up, too.

    Raises:
        WorkloadError: the loss is not a LossSum.
    """
    whole = workload.make_batch(2, 0)
    # A window or a pooling may need longer sequences, and a loss that differentiates by its inputs needs a graph.
    for batch, graph in ((shorten(whole, SHORT_LENGTH), False), (whole, False)):
        with contextlib.suppress(Exception):
            found = _measure(workload, model, batch, device, graph=graph, noise=noise, seeds=seeds)
            break
    else:
        found = _measure(workload, model, whole, device, graph=True, noise=noise, seeds=seeds)
    if not found.additive:
        return found
    share = padding_share(workload.loss, model, workload.make_batch, device, seed=workload.seed)
    return found if share is None else replace(found, additive=False, padding=share)


def _measure(
    workload: Workload,
    model: nn.Module,
    given: Batch,
    device: torch.device,
    *,
    graph: bool,
    noise: bool,
    seeds: bool,
) -> Additivity:
    both_samples = slice_batch(given, 0, 2)
    batch = move_batch(both_samples, device)

    def loss_of(part: Batch, seed: int = workload.seed) -> float:
        seed_generators(seed)
        with torch.set_grad_enabled(graph), buffers_kept(model):
            result = workload.loss(model, part)
        if not isinstance(result, LossSum):
            raise WorkloadError(
                f"the loss of {workload.name} gave {type(result).__name__}; it gives an autoplan.LossSum",
                hint="End it with: return autoplan.LossSum(sum of the losses, number of items). A sum, not a mean.",
            )
        return float(result.total) if float(result.count) else 0.0  # a mean over nothing is not a number

    both = loss_of(batch)

    def draws() -> bool:
        others = (loss_of(batch, workload.seed + number) for number in range(1, SEEDS))
        return any(abs(both - other) > 1e-5 * max(abs(both), 1e-12) for other in others)

    if noise and draws():
        return Additivity(additive=False, deterministic=False)  # one sample alone draws something else
    try:
        alone = tuple(loss_of(move_batch(slice_batch(both_samples, i, i + 1), device)) for i in range(2))
    except ValueError:  # BatchNorm over a single value refuses it
        return Additivity(additive=False, deterministic=noise or not draws())
    low = [LOW_PRECISION_TOLERANCE.get(parameter.dtype, 0.0) for parameter in model.parameters()]
    allowed = max(TOLERANCE, *low) * max(abs(both), 1e-12)
    additive = abs(both - sum(alone)) <= allowed
    if not noise and (seeds or not additive) and draws():
        return Additivity(additive=additive, deterministic=False)
    return Additivity(additive=additive, deterministic=True, both=both, alone=alone)


def shorten(batch: Batch, length: int) -> Batch:
    """Some tokens of a batch of sequences: a dict with `labels`, all of its tensors (samples, sequence length).

    They are the first ones, or the last ones where a sample would have no label among the first (an answer after a long
    question, padding on the left). A batch where neither will do stays as it is, and so does any other batch.
    """
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return batch
    if any(not isinstance(value, torch.Tensor) or value.shape != labels.shape for value in batch.values()):
        return batch
    start = _start_with_labels(labels, length)
    if start is None:
        return batch
    # whole tensors, as make_batch gives them: models take views of them
    return {name: value[:, start : start + length].contiguous() for name, value in batch.items()}


def _start_with_labels(labels: torch.Tensor, length: int) -> int | None:
    """Where so many tokens begin that each sample keeps a label; a mean over no label is not a number.

    The first label does not count: a causal model predicts none for the first token.
    """
    counted = labels != IGNORE_INDEX
    wanted = counted[:, 1:].any(1)
    for start in (0, max(0, labels.shape[1] - length)):
        found = counted[:, start + 1 : start + length].any(1)
        if bool((found | ~wanted).all()):
            return start
    return None
