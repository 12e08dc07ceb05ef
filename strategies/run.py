"""TrainingRun: a workload put together by a config, one optimizer step at a time, at the full global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.analysis.training_facts import own_checkpointing_text
from autoplan.strategies.config import CUDAGRAPH_MODES
from autoplan.strategies.state import collect_state, restore_state
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.techniques.mesh import agree_on_overflow, data_position, local_tensor, rank_seed
from autoplan.strategies.techniques.own_gradients import OwnGradients
from autoplan.strategies.techniques.rounded_steps import rounding_of
from autoplan.strategies.workloads.batch import Batch, batch_size, move_batch, slice_batch
from autoplan.strategies.workloads.training_mode import (
    caching_configs,
    own_checkpointing,
    without_cache,
    without_own_checkpointing,
)
from autoplan.strategies.workloads.transfer import device_micro_batches


class StepResult(NamedTuple):
    """What one optimizer step gives back; tensors on the device, so that reading them is the caller's choice to wait.

    Attributes:
        loss: The summed loss over the count, of the whole global batch, as a scalar.
        grad_norm: The norm of all gradients before clipping, or None without clipping.
        skipped: fp16: the gradients held inf or NaN, and no step was taken. Always False in other precisions.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    skipped: bool


class TrainingRun:
    """A model, its optimizer and its schedule as a plan runs them.

    Made by `autoplan.strategies.prepare.prepare` alone: a trial, `plan.prepare` and the examples call the same one.
    """

    def __init__(self, build: Build, schedule: Any) -> None:
        assert build.optimizer is not None, "prepare() applies the optimizer strategy before this"
        self._build = build
        self.workload = build.workload
        self.config = build.config
        self.device = build.device
        self.model = build.model
        self.optimizer: torch.optim.Optimizer = build.optimizer
        self.scaler = build.scaler
        self.schedule = schedule
        self.steps = 0
        self._gradients_finished = False
        self._observers: list[Callable[[], None]] = []
        self.accumulation = build.config.accumulation(build.workload.global_batch)
        self.local_batch = self.accumulation * build.config.micro_batch
        self._caching = caching_configs(self.model) if self.config.checkpointing != "none" else []
        self._own_checkpointing = own_checkpointing(self.model)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._replays_graphs = self.config.compile_mode in CUDAGRAPH_MODES
        several = self._replays_graphs and self.accumulation > 1
        self._own_gradients = OwnGradients(self._parameters, self.optimizer) if several else None

    # One step, whole.

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step over this rank's share of the global batch, `local_batch` samples.

        Raises:
            WorkloadError: the batch does not hold `local_batch` samples.
        """
        size = batch_size(batch)
        if size != self.local_batch:
            raise WorkloadError(
                f"step() got {size} samples; a step takes {self.local_batch} on each data-parallel rank, which is the "
                f"global batch of {self.workload.global_batch} over {self.config.dp} rank(s)",
                hint="Make the loader's batch size TrainingRun.local_batch; accumulation happens inside step().",
            )
        return self.optimizer_step(*self.forward_backward(batch))

    @property
    def mesh(self) -> Any:
        """The device mesh, or None on one rank."""
        return self._build.mesh

    def local_share(self, global_batch: Batch) -> Batch:
        """This rank's samples of a whole global batch (views)."""
        rank, _ = data_position(self.mesh)
        start = rank * self.local_batch
        return slice_batch(global_batch, start, start + self.local_batch)

    # The parts of a step; trials time them one by one where whole steps would take too long.

    def forward_backward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All micro-steps of a step: this rank's summed loss, its count, and what the backward divided by."""
        divisor = self.loss_divisor(batch)
        if (engine := self._build.pipeline.engine) is not None:
            with self._around_forward_and_backward():
                total, count = engine.forward_backward(batch, self._loss_scale(divisor))
            return total, count, divisor
        total = torch.zeros((), device=self.device)
        count = torch.zeros((), device=self.device)
        for number, micro in enumerate(self.micro_batches(batch), start=1):
            micro_total, micro_count = self.micro_step(micro, divisor, sync=number == self.accumulation)
            total += micro_total
            count += micro_count
        return total, count, divisor

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """The micro-batches of some of a step's samples on this rank's device, in order; the host waits for none."""
        return device_micro_batches(batch, self.config.micro_batch, self.device)

    def loss_divisor(self, batch: Batch) -> torch.Tensor:
        """What the summed loss is divided by in the backward: the count of the whole global batch.

        Where the workload cannot count ahead it is the number of samples or tokens; optimizer_step() then scales the
        gradients to the real count. All data-parallel ranks get the same value.
        """
        count = self.workload.count
        share = count(batch) if count is not None else batch_size(batch) * self.workload.tokens_per_sample
        divisor = torch.full((), float(share), device=self.device)  # torch.tensor() would copy, and wait for the copy
        return self._build.gradients.sum_over_ranks(divisor)

    def micro_step(self, micro: Batch, divisor: torch.Tensor, *, sync: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of one micro-batch; gradients are reduced over ranks only with `sync`.

        Returns:
            The micro-batch's summed loss and its count, detached.
        """
        self._build.hooks.set_sync(sync)
        self._build.hooks.begin()
        if self._own_gradients is not None:
            self._own_gradients.attach()
        micro = move_batch(micro, self.device)
        with self._around_forward_and_backward():
            with self._build.hooks.forward_context():
                total, count = self._build.module(micro)
            loss = total * self._loss_scale(divisor)
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            loss.backward()
        if self._replays_graphs:  # the next replay overwrites what this one gave
            total, count = total.detach().clone(), count.clone()
        return total.detach().float(), count.detach().float()

    @contextlib.contextmanager
    def _around_forward_and_backward(self) -> Iterator[None]:
        """Around the backward too: a recomputation runs the forward again."""
        with (
            self._build.hooks.around(),
            without_cache(self._caching),
            without_own_checkpointing(self._own_checkpointing),
        ):
            yield

    @property
    def said(self) -> str | None:
        """What this run does otherwise than the model was set to, in a sentence; None: nothing."""
        return own_checkpointing_text(self.config.checkpointing) if self._own_checkpointing else None

    def _loss_scale(self, divisor: torch.Tensor) -> torch.Tensor:
        return self._build.gradients.ranks / divisor

    def finish_gradients(self) -> None:
        """Completes the sums over ranks that the backward leaves open; once per step, optimizer_step() does it too."""
        if self._gradients_finished:
            return
        for finish in self._build.gradients.finish:
            finish()
        self._gradients_finished = True

    def observe_gradients(self, observe: Callable[[], None]) -> None:
        """Has a function called at each step when the gradients are whole: averaged and unscaled, not yet clipped."""
        self._observers.append(observe)

    def before_micro_steps(self, call: Callable[[], None]) -> None:
        """Has a function called before each micro-step; a pipeline's micro-batches are not announced."""
        begin = self._build.hooks.begin

        def both() -> None:
            call()
            begin()

        self._build.hooks.begin = both

    def optimizer_step(self, total: torch.Tensor, count: torch.Tensor, divisor: torch.Tensor) -> StepResult:
        """Clips, steps the optimizer and the schedule, and clears the gradients.

        Args:
            total: This rank's summed loss over all micro-batches.
            count: This rank's count over all micro-batches.
            divisor: What micro_step divided by.
        """
        if self._own_gradients is not None:
            self._own_gradients.drop_unused()
        self.finish_gradients()
        self._gradients_finished = False
        total = self._build.gradients.sum_over_ranks(total)
        count = self._build.gradients.sum_over_ranks(count)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            if self.mesh is not None:
                agree_on_overflow(self.scaler, self.optimizer)
        if self.workload.count is None:
            gradients = [local_tensor(p.grad) for p in self._parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, (divisor / count).to(gradients[0].device))
        for observe in self._observers:
            observe()
        norm = None
        if self.workload.max_grad_norm is not None:
            norm = self._build.gradients.clip(self._parameters, self.workload.max_grad_norm)
        skipped = self._step_optimizer()
        if self.schedule is not None and not skipped:
            self.schedule.step()
        if self._own_gradients is not None:
            self._own_gradients.clear()
        else:
            self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return StepResult(loss=total / count, grad_norm=norm, skipped=skipped)

    def _step_optimizer(self) -> bool:
        if (rounding := rounding_of(self.optimizer)) is not None:
            rounding.steps = self.steps
        if self.scaler is None:
            self.optimizer.step()
            return False
        scale_before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < scale_before

    # Saving and restoring.

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: model, optimizer, scaler, schedule, step count and random state.

        Parameter names are the model's own, whatever wraps it, so that a state saved under one plan loads under
        another. The optimizer's state goes by parameter name. On several ranks it is this rank's part, as
        torch.distributed.checkpoint saves and loads it; all ranks call it.
        """
        model_state, optimizer_state = collect_state(self.model, self.optimizer)
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "steps": self.steps,
            "random": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict() gave, under this or another config of the same workload.

        On several ranks each continues with a random state of its own, made of the seed, the step and the rank.
        """
        restore_state(self.model, self.optimizer, state["model"], state["optimizer"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.steps = int(state["steps"])
        if self.mesh is not None:
            torch.manual_seed(rank_seed(self.workload.seed, self.mesh) + 1_000_003 * self.steps)
            return
        torch.set_rng_state(state["random"]["cpu"].cpu())
        if self.device.type == "cuda" and state["random"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["random"]["cuda"].cpu(), self.device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that train."""
        return list(self._parameters)
