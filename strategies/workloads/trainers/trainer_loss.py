"""The loss and the schedule of a Trainer, by the Trainer's own code, as a workload wants them.

In: the parts of a Trainer. Out: `loss(model, batch)` that gives a sum and a count, and `build_schedule(optimizer)`.

A Trainer's step adds the losses of its micro-batches. Where `compute_loss` divides by `num_items_in_batch`, the items
(labels) of the whole step, the step's loss is sum / items. Where it does not, the Trainer divides each by the number of
micro-batches, and the step's loss is the mean over samples. Given the items of the micro-batch alone, `compute_loss`
gives that micro-batch's mean in both cases, so mean x items is the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch, batch_size
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.samples import SAMPLES
from autoplan.strategies.workloads.trainers.trainer_parts import attach
from autoplan.strategies.workloads.workload import LossSum

DIVIDES_BY = "num_items_in_batch"


class TrainerLoss:
    """A Trainer's loss as a sum and a count.

    Args:
        parts: The parts of the Trainer.
        micro_batches: How many micro-batches the Trainer's own step adds: accumulation x ranks.
        micro_batch: Samples in each.
    """

    def __init__(self, parts: Any, *, micro_batches: int, micro_batch: int) -> None:
        self.parts = parts
        self.micro_batches = micro_batches
        self.micro_batch = micro_batch

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """The loss of a micro-batch, times its items; and the items."""
        inputs, samples = inputs_of(batch)
        parts = attach(self.parts, model, _device_of(inputs))
        items = parts._get_num_items_in_batch([inputs], parts.accelerator.device)
        if items is None or not is_scaled(parts, items):
            mean = parts.compute_loss(model, inputs, **({} if items is None else {DIVIDES_BY: items}))
            return LossSum(mean * samples, samples)
        divisor = items.clamp(min=1) if isinstance(items, torch.Tensor) else max(1, items)  # a batch without any label
        mean = parts.compute_loss(model, inputs, **{DIVIDES_BY: divisor})
        return LossSum(mean * divisor, items)

    def count(self, batch: Batch) -> int:
        """The items of a batch on the host, as the loss will count them."""
        inputs, samples = inputs_of(batch)
        items = self.parts._get_num_items_in_batch([inputs], torch.device("cpu"))
        return samples if items is None or not is_scaled(self.parts, items) else int(items)

    def check(self, model: nn.Module, batch: Batch) -> None:
        """Looks, on a few samples, at what the Trainer's own step makes of several micro-batches.

        Raises:
            WorkloadError: it adds up means that nothing divides, so its gradients grow with accumulation.
        """
        if self.micro_batches == 1 or (ratio := self.divided_share(model, batch)) is None or abs(ratio - 1) < 0.01:
            return
        name, times = type(self.parts).__name__, self.micro_batches
        what = f"does not divide by {DIVIDES_BY}" if abs(ratio) < 0.01 else f"divides only a part by {DIVIDES_BY}"
        raise WorkloadError(
            f"the loss of {name} with {type(model).__name__} {what}, and the Trainer takes it as divided: it adds "
            f"the losses of the {times} micro-batches of a step, so its gradients are up to {times} times those of the "
            "same samples in one micro-batch, and depend on the micro-batch",
            hint=f"Set loss_is_scaled_for_ga = False on the Trainer, or divide by {DIVIDES_BY} in compute_loss. Or "
            f"hand in the Trainer with per_device_train_batch_size={times * self.micro_batch} and "
            "gradient_accumulation_steps=1: its loss is then the mean over all items of the step, and the search finds "
            "the micro-batch that fits.",
        )

    def divided_share(self, model: nn.Module, batch: Batch) -> float | None:
        """Which share of the loss is divided by the number of items: 1 all, 0 nothing. None: it is not asked to.

        Args:
            model: In training mode, on its device.
            batch: A few samples, on the same device.
        """
        inputs, _ = inputs_of(batch)
        parts = attach(self.parts, model, _device_of(inputs))
        items = parts._get_num_items_in_batch([inputs], parts.accelerator.device)
        if items is None or not is_scaled(parts, items) or not int(items):
            return None
        losses = []
        for times in (1, 2):
            seed_generators(0)
            with torch.no_grad():
                losses.append(float(parts.compute_loss(model, dict(inputs), **{DIVIDES_BY: items * times})))
        return 2 * (1 - losses[1] / losses[0]) if losses[0] else None

    def describe_dependence(self, text: str) -> str:
        """Why the micro-batch is not free, for a reader who has a Trainer and no LossSum.

        Args:
            text: What the losses of two samples were.
        """
        return (
            f"{text.partition(': ')[0]}: compute_loss of {type(self.parts).__name__} depends on which samples are in a "
            "micro-batch together (a mean over items whose number differs, a contrastive or an auxiliary loss)"
        )


class TrainerSchedule:
    """Makes the learning-rate schedule as the Trainer makes it.

    Args:
        parts: The parts of the Trainer.
        steps: Optimizer steps of the whole training.
    """

    def __init__(self, parts: Any, steps: int) -> None:
        self.parts = parts
        self.steps = steps

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        parts = copy.copy(self.parts)
        parts.optimizer, parts.lr_scheduler = optimizer, None
        return parts.create_scheduler(num_training_steps=self.steps, optimizer=optimizer)


def is_scaled(parts: Any, items: Any) -> bool:
    """Whether the Trainer takes the loss as divided by the items of the whole step; else it divides by accumulation."""
    said = getattr(type(parts), "loss_is_scaled_for_ga", None)
    said = vars(parts).get("loss_is_scaled_for_ga", said)
    if said is not None:
        return bool(said)
    return (parts.model_accepts_loss_kwargs and items is not None) or parts.compute_loss_func is not None


def inputs_of(batch: Batch) -> tuple[dict[str, Any], int]:
    """The fields of a batch as a dict that compute_loss may change, and the number of samples."""
    if not isinstance(batch, Mapping):
        raise WorkloadError(
            f"the collator made a {type(batch).__name__}; a Trainer's batches are dicts of tensors",
            hint="Return a dict from data_collator.",
        )
    return {name: value for name, value in batch.items() if name != SAMPLES}, batch_size(batch)


def _device_of(inputs: Any) -> torch.device:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
