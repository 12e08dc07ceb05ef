"""The parts of a plan in a loop of one's own: its loader, its optimizer, and a step by accelerate or Fabric."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoplan.planner.export.kit.settings import *
from autoplan.strategies.analysis.structure import clean_name
from autoplan.strategies.step import OwnGradients, Stepper
from autoplan.strategies.techniques.base import GradientReduction, MicroStepHooks
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.workload import LossSum, TrainingModule


def loader_arguments() -> dict[str, Any]:
    """Arguments of your DataLoader: a micro-batch at a time, and no smaller one at its end; where the search measured
    workers beside the step, those too."""
    return {"batch_size": MICRO_BATCH, "drop_last": True, **LOADER_ARGUMENTS}


def steps(loader: Iterable[Batch]) -> Iterator[list[Batch]]:
    """The micro-batches of each optimizer step on this rank, as lists of ACCUMULATION; what is left over is dropped."""
    batches = iter(loader)
    while len(found := list(itertools.islice(batches, ACCUMULATION))) == ACCUMULATION:
        yield found


def make_optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Optimizer and schedule (or None) as the workload has them."""
    trained = {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    groups, left = [], dict(trained)
    for patterns, options in GROUPS:
        names = [name for name in left if not patterns or _is_among(name, patterns)]
        groups.append({"params": [left.pop(name) for name in names], **options})
    if unknown := sorted(name for name in left if not _is_among(name, UNHELD)):
        raise ValueError(f"the plan has no parameter group for {unknown}: the model is another one")
    optimizer: torch.optim.Optimizer = getattr(torch.optim, OPTIMIZER)(groups)
    if SCHEDULE_FUNCTION:
        from transformers import optimization

        rate = functools.partial(getattr(optimization, SCHEDULE_FUNCTION), **SCHEDULE_OPTIONS)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    if SCHEDULE:
        return optimizer, getattr(torch.optim.lr_scheduler, SCHEDULE)(optimizer, **SCHEDULE_OPTIONS)
    return optimizer, None


def _is_among(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter's name is one of these, in which * stands for a number."""
    return name in patterns or re.sub(r"\d+", "*", name) in patterns


class ToolStepper(Stepper):
    """The plan's step where accelerate or Fabric has wrapped model and optimizer: it exchanges, casts and scales.

    Args:
        tool: The Accelerator, or the Fabric.
        model: As the tool gave it.
        optimizer: As the tool gave it.
    """

    def __init__(self, tool: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._tool, self._last = tool, True
        hooks, gradients = MicroStepHooks(), GradientReduction()
        hooks.forward_context, hooks.set_sync = tool.autocast, self._note
        if CUDA_GRAPHS:
            hooks.begin = torch.compiler.cudagraph_mark_step_begin
        if SYNCS_LAST:
            hooks.around = self._exchange
        if TOOL == "accelerate":
            gradients.ranks = tool.num_processes
            gradients.sum_over_ranks = lambda tensor: tool.reduce(tensor, reduction="sum")
            gradients.clip = lambda parameters, norm: tool.clip_grad_norm_(model.parameters(), norm)
        if TOOL == "fabric":
            gradients.ranks = tool.world_size
            gradients.sum_over_ranks = lambda tensor: tool.all_reduce(tensor, reduce_op="sum")
            gradients.clip = lambda parameters, norm: tool.clip_gradients(
                model, optimizer, max_norm=norm, error_if_nonfinite=False
            )
        own_gradients = None
        if CUDA_GRAPHS and ACCUMULATION > 1:  # in memory that no CUDA graph writes to
            own_gradients = OwnGradients([p for p in model.parameters() if p.requires_grad], optimizer)
        super().__init__(
            model,
            model,
            optimizer,
            None,
            device=tool.device,
            accumulation=ACCUMULATION,
            max_grad_norm=MAX_GRAD_NORM,
            counts_ahead=False,
            hooks=hooks,
            gradients=gradients,
            own_gradients=own_gradients,
            replays_graphs=CUDA_GRAPHS,
        )

    def _note(self, sync: bool) -> None:
        self._last = sync

    def _exchange(self) -> contextlib.AbstractContextManager[Any]:
        """Ranks exchange gradients at the last micro-step alone."""
        if TOOL == "accelerate":
            return contextlib.nullcontext() if self._last else self._tool.no_sync(self.model)
        else:
            return self._tool.no_backward_sync(self.model, enabled=not self._last)

    def _backward(self, loss: torch.Tensor) -> None:
        self._tool.backward(loss)

    def _step_optimizer(self) -> bool:
        self.optimizer.step()
        return self._tool.optimizer_step_was_skipped if TOOL == "accelerate" else False


def train_step(
    tool: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    micro_batches: Iterable[Batch],
    loss_sum: Callable[[nn.Module, Batch], LossSum],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One optimizer step. Returns the loss of the global batch, and the norm of its gradient before clipping (None
    without clipping).

    Args:
        tool, model, optimizer: The Accelerator or the Fabric, and what it made of model and optimizer.
        schedule: From make_optimizers(); None: a constant rate.
        micro_batches: ACCUMULATION batches of MICRO_BATCH samples, this rank's share of the global batch.
        loss_sum: loss_sum(model, micro_batch) returns the summed loss and how many items it is the sum of.
    """
    stepper = model.__dict__.get("plan_stepper")
    if stepper is None or stepper.optimizer is not optimizer:
        stepper = model.__dict__["plan_stepper"] = ToolStepper(tool, model, optimizer)
    stepper.schedule = schedule
    stepper.module = TrainingModule(model, loss_sum)
    divisor = torch.full((), float(ITEMS), device=stepper.device)
    total, count = stepper.micro_steps(micro_batches, divisor)
    result = stepper.optimizer_step(total, count, divisor)
    return result.loss, result.grad_norm
