"""One optimizer step at the full global batch: the step of every run, and of every export that steps by itself.

In: a model that is prepared, its optimizer, and how ranks exchange. Out: the loss of the global batch. The exports copy
this file's classes as they are (planner/export/bundle.py), so nothing here asks for a plan or a workload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.techniques.base import GradientReduction, MicroStepHooks
from autoplan.strategies.techniques.mesh import agree_on_overflow, local_tensor, named_parameters
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.training_mode import (
    caching_configs,
    own_checkpointing,
    without_cache,
    without_own_checkpointing,
)


class StepResult(NamedTuple):
    """The result of one optimizer step, as tensors on the device: a caller waits only if it reads them.

    Attributes:
        loss: The summed loss over the count, of the whole global batch, as a scalar.
        grad_norm: The norm of all gradients before clipping, or None without clipping.
        skipped: fp16: the gradients held inf or NaN, and no step was taken. Always False in other precisions.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    skipped: bool


class Stepper:
    """Makes optimizer steps: micro-steps, whose losses are summed, then one step of the optimizer.

    Args:
        model: The model whose parameters train.
        module: What a micro-step calls; it returns the summed loss of a micro-batch, and how many items that counts.
        optimizer: Over the parameters that train.
        schedule: Of the learning rate, stepped once per step that was taken; None: a constant rate.
        device: This rank's.
        accumulation: Micro-steps of a step on each rank.
        max_grad_norm: Gradients are clipped to it; None: no clipping.
        counts_ahead: Backwards divide by the count of the whole global batch, which is known before them. Else each
            step multiplies the gradients once more.
        hooks: What surrounds each micro-step.
        gradients: How ranks exchange.
        scaler: Of fp16; None in other precisions, and where a tool scales.
        several_ranks: Ranks agree on whether an fp16 step is skipped.
        recomputes: Something is checkpointed: no key-value cache is kept meanwhile.
        own_gradients: Gradients outside of the memory of CUDA graphs, where several micro-steps replay them.
        replays_graphs: The results of a micro-step lie in memory that the next one overwrites.
    """

    def __init__(
        self,
        model: nn.Module,
        module: Callable[[Batch], Any],
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        *,
        device: torch.device,
        accumulation: int,
        max_grad_norm: float | None,
        counts_ahead: bool,
        hooks: MicroStepHooks,
        gradients: GradientReduction,
        scaler: torch.amp.GradScaler | None = None,
        several_ranks: bool = False,
        recomputes: bool = False,
        own_gradients: OwnGradients | None = None,
        replays_graphs: bool = False,
    ) -> None:
        self.model = model
        self.module = module
        self.optimizer = optimizer
        self.schedule = schedule
        self.device = device
        self.accumulation = accumulation
        self.scaler = scaler
        self.steps = 0
        self._max_grad_norm = max_grad_norm
        self._counts_ahead = counts_ahead
        self._hooks = hooks
        self._gradients = gradients
        self._several_ranks = several_ranks
        self._own_gradients = own_gradients
        self._replays_graphs = replays_graphs
        self._observers: list[Callable[[], None]] = []
        self._caching = caching_configs(model) if recomputes else []
        self._own_checkpointing = own_checkpointing(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    def divisor_of(self, share: float) -> torch.Tensor:
        """The divisor of every backward: the sum of all ranks' shares, for the whole global batch."""
        divisor = torch.full((), float(share), device=self.device)  # torch.tensor() would copy, and wait for the copy
        return self._gradients.sum_over_ranks(divisor)

    def micro_steps(self, micros: Iterable[Batch], divisor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All micro-steps of a step: this rank's summed loss and its count. Gradients are exchanged at the last."""
        total = torch.zeros((), device=self.device)
        count = torch.zeros((), device=self.device)
        for number, micro in enumerate(micros, start=1):
            micro_total, micro_count = self.micro_step(micro, divisor, sync=number == self.accumulation)
            total += micro_total
            count += micro_count
        return total, count

    def micro_step(self, micro: Batch, divisor: torch.Tensor, *, sync: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of one micro-batch; gradients are reduced over ranks only with `sync`.

        Returns:
            The micro-batch's summed loss and its count, detached.
        """
        self._hooks.set_sync(sync)
        self._hooks.begin()
        if self._own_gradients is not None:
            self._own_gradients.attach()
        with self._around_forward_and_backward():
            with self._hooks.forward_context():
                total, count = self.module(micro)
            self._backward(total * self._loss_scale(divisor))
        if self._replays_graphs:  # the next replay overwrites what this one gave
            total, count = total.detach().clone(), count.clone()
        return total.detach().float(), count.detach().float()

    @contextlib.contextmanager
    def _around_forward_and_backward(self) -> Iterator[None]:
        """Around the backward too: a recomputation runs the forward again."""
        with (
            self._hooks.around(),
            without_cache(self._caching),
            without_own_checkpointing(self._own_checkpointing),
        ):
            yield

    def _backward(self, loss: torch.Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def _loss_scale(self, divisor: torch.Tensor) -> torch.Tensor:
        """DDP and FSDP2 average over the data-parallel ranks; the gradient is a sum over them."""
        return self._gradients.ranks / divisor

    def optimizer_step(self, total: torch.Tensor, count: torch.Tensor, divisor: torch.Tensor) -> StepResult:
        """Clips, steps the optimizer and the schedule, and clears the gradients.

        Args:
            total: This rank's summed loss over all micro-batches.
            count: This rank's count over all micro-batches.
            divisor: What micro_step divided by.

        Raises:
            WorkloadError: parameters were unfrozen that the optimizer does not step.
        """
        if self._own_gradients is not None:
            self._own_gradients.drop_unused()
        # FSDP2 makes no gradient of a parameter that was frozen when it was sharded
        unfrozen = [p for p in self._frozen if p.requires_grad and (p.grad is not None or self._several_ranks)]
        if unfrozen:
            self._take_in(unfrozen)
        for finish in self._gradients.finish:
            finish()
        total = self._gradients.sum_over_ranks(total)
        count = self._gradients.sum_over_ranks(count)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            if self._several_ranks:
                agree_on_overflow(self.scaler, self.optimizer)
        if not self._counts_ahead:
            gradients = [local_tensor(p.grad) for p in self._parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, (divisor / count).to(gradients[0].device))
        for observe in self._observers:
            observe()
        norm = None
        if self._max_grad_norm is not None:
            norm = self._gradients.clip(self._parameters, self._max_grad_norm)
        skipped = self._step_optimizer()
        if self.schedule is not None and not skipped:
            self.schedule.step()
        self._clear_gradients()
        self.steps += 1
        return StepResult(loss=total / count, grad_norm=norm, skipped=skipped)

    def _take_in(self, unfrozen: list[nn.Parameter]) -> None:
        """Has parameters train that were unfrozen since the run was made, if the optimizer was given them.

        What exchanges gradients over ranks, records graphs or rounds parameters knows only those that trained then.
        """
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        rounding = getattr(self.optimizer, "rounding", None)
        rounds = rounding is not None and rounding.parameters != "own"
        fixed = self._several_ranks or self._gradients.ranks > 1 or self._own_gradients is not None or rounds
        ids = {id(parameter) for parameter in unfrozen}
        if not fixed and ids <= held:
            self._parameters += unfrozen
            self._frozen = [parameter for parameter in self._frozen if id(parameter) not in ids]
            return
        for parameter in unfrozen:
            parameter.grad = None  # nothing else clears it
        names = [name for name, parameter in named_parameters(self.model) if id(parameter) in ids]
        raise WorkloadError(
            f"{len(names)} parameter(s) were unfrozen after the run was made, which does not train them: "
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}",
            hint="Make a new run, with an optimizer over them."
            if fixed
            else "Give them to the optimizer when you unfreeze them: optimizer.add_param_group({'params': [...]}).",
        )

    def _clear_gradients(self) -> None:
        if self._own_gradients is not None:
            self._own_gradients.clear()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def _step_optimizer(self) -> bool:
        """Steps the optimizer; returns whether the step was skipped."""
        if self.scaler is None:
            self.optimizer.step()
            return False
        scale_before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < scale_before


class OwnGradients:
    """Gradients of their own memory, for CUDA graphs: attached before each backward, added to, zeroed after each step.

    A recorded graph writes its results, the gradients among them, to the same addresses at each replay. Where `.grad`
    is None, autograd keeps the graph's own output as the gradient, and the next micro-step overwrites it: torch raises
    "accessing gradient tensor output of CUDAGraphs that has been overwritten by a subsequent run", and asks for
    gradients made outside of the graphs (torch/_inductor/cudagraph_trees.py, format_dealloc_msg, torch 2.13).

    A parameter that no backward of a step reached has no gradient for the optimizer, as in a plain loop: AdamW would
    decay its weight otherwise.

    Args:
        parameters: Those that train.
        optimizer: What a plain loop's `zero_grad` clears is what it holds; other gradients go on adding up.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = list(parameters)
        self._held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._buffers: dict[int, torch.Tensor] = {}
        self._reached: set[int] = set()
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        self._reached.add(id(parameter))

    def attach(self) -> None:
        """Gives each parameter without a gradient one of zeros; before each backward."""
        for parameter in self._parameters:
            if parameter.grad is None:
                buffer = self._buffers.get(id(parameter))
                if buffer is None:
                    buffer = self._buffers[id(parameter)] = torch.zeros_like(parameter, requires_grad=False)
                else:
                    buffer.zero_()
                parameter.grad = buffer

    def drop_unused(self) -> None:
        """Takes the gradient of zeros from parameters that no backward reached; before anything reads gradients."""
        for parameter in self._parameters:
            if id(parameter) in self._held and id(parameter) not in self._reached:
                parameter.grad = None

    def clear(self) -> None:
        """Zeroes the gradients in place; after the optimizer's step."""
        held = (parameter for parameter in self._parameters if id(parameter) in self._held)
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)
        self._reached.clear()
