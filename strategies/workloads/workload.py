"""Workload: what is trained. Its model, its batches, its loss as a sum and a count, its optimizer, its global batch.

A plan changes none of this. `workloads/sources.py` makes workloads from a model name, a
config.json, a folder or `file.py:function`; a library call builds one from Python objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.batch import Batch


class LossSum(NamedTuple):
    """A loss as a sum over items (tokens, samples) and how many items it counts.

    The training loss is the sum over the whole global batch divided by the count over the whole global batch. A mean
    of the micro-batches' means is a different loss wherever counts differ.
    """

    total: torch.Tensor
    count: torch.Tensor | int  # type: ignore[assignment]  # of items; hides tuple.count


class OutputHead(Protocol):
    """How a model splits into hidden states and a linear output head, for the fused loss (techniques/loss.py)."""

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The hidden states that enter the head, (samples, sequence, hidden)."""

    def linear(self, model: nn.Module) -> nn.Module:
        """The output head, with `weight` (vocabulary, hidden) and perhaps `bias`."""

    def targets(self, batch: Batch) -> torch.Tensor:
        """The class of each position, (samples, sequence), already shifted; IGNORE_INDEX is not counted."""


IGNORE_INDEX = -100


@dataclass(kw_only=True)
class Workload:
    """A training: model, batches, loss, optimizer, schedule and global batch.

    Attributes:
        name: For screens and plans.
        build_model: Makes the model, on the current default device (it may be `meta`); weights are random or read
            from disk. Freeze parameters here (`requires_grad_(False)`): plans keep them frozen.
        make_batch: `make_batch(num_samples, index)` gives a CPU batch; the same index gives the same batch.
            Batches are those that training meets. Their sizes may differ: the largest of some decides what fits.
        loss: `loss(model, batch)` gives a LossSum. It calls the model; it does not divide by the count.
        build_optimizer: Makes the optimizer from the model's parameters (or parameter groups).
        global_batch: Samples per optimizer step, over all ranks. Never changed.
        sequence_length: Tokens per sample, or None where samples are not sequences.
        max_grad_norm: Clip the norm of all gradients to this before each optimizer step; None: no clipping.
        build_schedule: Makes the learning-rate schedule from the optimizer; stepped once per optimizer step.
        count: `count(batch)` gives the items the loss will count, without running the model. Optional: it saves one
            pass over the gradients where counts differ between batches.
        tokens: `tokens(batch)` gives the tokens of a batch that tokens/s counts. None: they are found by the names of
            the batch's fields, without padding (`autoplan.strategies.workloads.counting`).
        head: How to split hidden states from the output head; None: the fused loss does not apply.
        load_weights: Fills a model that was built on `meta` and materialised; None: build_model does all.
        tensor_plan: Which projections are split over tensor-parallel ranks: names (with `*` for a number) to colwise,
            rowwise or fused_colwise_n. None: the plan that is known for the model's family, if there is one.
        fixed_micro_batch: A micro-batch the user fixed because modules depend on it (BatchNorm and the like).
        seed: For weights, batches and dropout.
        find_unused_parameters: As of DDP: a backward may leave a parameter that trains without a gradient. A search
            finds out; say it where few batches do.
        taken_from: The class of the training that it was read from: "Trainer"; empty where it was made as a Workload.
        own_setting: The setting that the training has now, which a search compares with. None: it is not known.
        knobs: The only knobs that a plan may change, each with its values (None: all that there are here). None: all
            knobs. For steps that are a program of their own (loops/step.py); of these, parity sees the losses alone.
        notes: Sentences for the user on where it came from: what was taken over of a Trainer, and what was not.
    """

    name: str
    build_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], LossSum]
    build_optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]
    global_batch: int
    sequence_length: int | None = None
    max_grad_norm: float | None = None
    build_schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    count: Callable[[Batch], int] | None = None
    tokens: Callable[[Batch], int] | None = None
    head: OutputHead | None = None
    load_weights: Callable[[nn.Module], None] | None = None
    tensor_plan: Mapping[str, str] | None = None
    fixed_micro_batch: int | None = None
    seed: int = 0
    find_unused_parameters: bool = False
    taken_from: str = ""
    own_setting: TrainingConfig | None = None
    knobs: Mapping[str, tuple[Any, ...] | None] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.global_batch, bool) or not isinstance(self.global_batch, int) or self.global_batch < 1:
            raise WorkloadError(
                f"global_batch is {self.global_batch!r}; it is the number of samples per optimizer step, "
                "a whole number of at least 1",
                hint="Give the batch size your training is meant to have, for example --global-batch 32.",
            )

    @property
    def tokens_per_sample(self) -> int:
        """Positions of a sample: the sequence length, or 1 where samples are no sequences."""
        return self.sequence_length or 1


class TrainingModule(nn.Module):
    """The model with its loss, so that one forward gives the loss's sum and count.

    DDP, FSDP2 and the compiler wrap this module, so that the loss runs inside them.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Batch], LossSum]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss and the count, both scalars on the model's device."""
        result = self.loss(self.model, batch)
        try:
            total, count = result
        except (TypeError, ValueError):
            raise WorkloadError(
                f"the loss function returned {type(result).__name__}; it returns a sum and a count",
                hint="Return autoplan.LossSum(total, count): the loss summed over its items and "
                "how many items that were, for example cross_entropy(..., reduction='sum') and labels.numel().",
            ) from None
        if not isinstance(count, torch.Tensor):
            count = torch.full((), count, device=total.device)  # torch.tensor() would make the host wait for a copy
        return total, count
