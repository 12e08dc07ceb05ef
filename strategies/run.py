"""TrainingRun: a workload put together by a config, one optimizer step at a time, at the full global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.analysis.training_facts import own_checkpointing_text
from autoplan.strategies.config import CUDAGRAPH_MODES
from autoplan.strategies.state import collect_state, restore_state
from autoplan.strategies.step import OwnGradients, Stepper, StepResult
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.techniques.mesh import data_position, rank_seed
from autoplan.strategies.techniques.rounded_steps import rounding_of
from autoplan.strategies.workloads.batch import Batch, batch_size, device_micro_batches, move_batch, slice_batch


class TrainingRun(Stepper):
    """A model, its optimizer and its schedule as a plan runs them.

    Made by `autoplan.strategies.prepare.prepare` alone: a trial, `plan.prepare` and the examples call the same one.
    """

    def __init__(self, build: Build, schedule: Any) -> None:
        assert build.optimizer is not None, "prepare() applies the optimizer strategy before this"
        config, workload = build.config, build.workload
        accumulation = config.accumulation(workload.global_batch)
        replays_graphs = config.compile_mode in CUDAGRAPH_MODES
        trained = [parameter for parameter in build.model.parameters() if parameter.requires_grad]
        super().__init__(
            build.model,
            build.module,
            build.optimizer,
            schedule,
            device=build.device,
            accumulation=accumulation,
            max_grad_norm=workload.max_grad_norm,
            counts_ahead=workload.count is not None,
            hooks=build.hooks,
            gradients=build.gradients,
            scaler=build.scaler,
            several_ranks=build.mesh is not None,
            recomputes=config.checkpointing != "none",
            own_gradients=OwnGradients(trained, build.optimizer) if replays_graphs and accumulation > 1 else None,
            replays_graphs=replays_graphs,
        )
        self._build = build
        self._state_at_once = bool(getattr(build.optimizer, "state", None))
        self.workload = workload
        self.config = config
        self.local_batch = accumulation * config.micro_batch

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
        try:
            return self.optimizer_step(*self.forward_backward(batch))
        except BaseException:  # out of memory, Ctrl-C: a program may go on, and this step is no part of the next one
            self._clear_gradients()
            if self.scaler is not None:  # else unscale_() says at the next step that it was called already
                self.scaler._per_optimizer_states.pop(id(self.optimizer), None)
            raise

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
        if (run_pipeline := self._build.run_pipeline) is not None:
            with self._around_forward_and_backward():
                total, count = run_pipeline(batch, self._loss_scale(divisor))
            return total, count, divisor
        total, count = self.micro_steps(self.micro_batches(batch), divisor)
        return total, count, divisor

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """The micro-batches of some of a step's samples on this rank's device, in order; the host waits for none."""
        return device_micro_batches(batch, self.config.micro_batch, self.device)

    def loss_divisor(self, batch: Batch) -> torch.Tensor:
        """The divisor of the summed loss in the backward: the count of the whole global batch.

        Where the workload cannot count ahead it is the number of samples or tokens; optimizer_step() then scales the
        gradients to the real count. All data-parallel ranks get the same value.
        """
        count = self.workload.count
        return self.divisor_of(
            count(batch) if count is not None else batch_size(batch) * self.workload.tokens_per_sample
        )

    def micro_step(self, micro: Batch, divisor: torch.Tensor, *, sync: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`Stepper.micro_step` of a micro-batch that may still be on the host."""
        return super().micro_step(move_batch(micro, self.device), divisor, sync=sync)

    @property
    def said(self) -> str | None:
        """A sentence on what this run does otherwise than the model was set to; None: nothing."""
        return own_checkpointing_text(self.config.checkpointing) if self._own_checkpointing else None

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

    def _step_optimizer(self) -> bool:
        if (rounding := rounding_of(self.optimizer)) is not None:
            rounding.steps = self.steps
        return super()._step_optimizer()

    # Saving and restoring.

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: model, optimizer, scaler, schedule, step count, torch's random state.

        What the program itself draws from `random` and NumPy is its own to keep.

        Parameter names are the model's own, whatever wraps it, so that a state saved under one plan loads under
        another. The optimizer's state goes by parameter name. On several ranks it is this rank's part, as
        torch.distributed.checkpoint saves and loads it; all ranks call it.
        """
        has_stepped = self.steps > 0 and self.scaler is None  # fp16 counts steps that were skipped too
        model_state, optimizer_state = collect_state(self.model, self.optimizer, has_stepped=has_stepped)
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
        restore_state(self.model, self.optimizer, state["model"], state["optimizer"], at_once=self._state_at_once)
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
