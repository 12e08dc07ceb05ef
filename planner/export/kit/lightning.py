"""The code that the target `lightning` copies: the Trainer of a plan, and the parts that make its loss the plan's."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule

from autoplan.planner.export.kit.loop import make_optimizers
from autoplan.planner.export.kit.settings import *
from autoplan.strategies.step import OwnGradients
from autoplan.strategies.techniques.mesh import local_tensor


def global_mean(module: Any, total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """The value for training_step to return, so that the loss is the mean over the whole global batch.

    Args:
        module: The LightningModule.
        total: The summed loss of the micro-batch, a scalar.
        count: How many items (labels, samples) it is the sum of.
    """
    count = torch.as_tensor(count, dtype=torch.float32, device=total.device)
    module.__dict__.setdefault("plan_counts", []).append(count.detach())
    return total * (1 / ITEMS)  # PlanCallback puts the real count in its place


class PlanCallback(Callback):
    """The parts of a plan that no argument of the Trainer says: the division of the loss by the count of the global
    batch, and settings of each process."""

    gradients: Any = None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Lightning sets another number of threads as it starts processes."""
        if THREADS is not None:
            torch.set_num_threads(THREADS)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Gradients are exchanged at the last micro-step alone, where the plan has it so."""
        if CUDA_GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        if FSDP and SYNCS_LAST:
            last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_requires_gradient_sync(last, recurse=False)
                    part.set_is_last_backward(last)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Gradients are in memory that no CUDA graph writes to, where several micro-steps replay graphs."""
        if CUDA_GRAPHS and ACCUMULATION > 1:
            if self.gradients is None:
                trained = [p for p in module.parameters() if p.requires_grad]
                self.gradients = OwnGradients(trained, trainer.optimizers[0])
            self.gradients.attach()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Divides by the real count, over all micro-batches and ranks."""
        if CUDA_GRAPHS and ACCUMULATION > 1:
            self.gradients.drop_unused()
            self.gradients._reached.clear()
        counts = module.__dict__.pop("plan_counts", [])
        if not counts:
            return  # training_step does without global_mean: a mean of the micro-batches' means
        count = trainer.strategy.reduce(torch.stack(counts).sum(), reduce_op="sum")
        factor = ITEMS * trainer.accumulate_grad_batches * trainer.world_size / count
        gradients = [local_tensor(p.grad) for p in module.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor)


def trainer_arguments() -> dict[str, Any]:
    """Keyword arguments of Trainer(...)."""
    arguments = dict(ARGUMENTS)
    if STRATEGY == "DDPStrategy":
        arguments["strategy"] = DDPStrategy(**STRATEGY_OPTIONS)
    if STRATEGY == "ModelParallelStrategy":
        arguments["strategy"] = ModelParallelStrategy(**STRATEGY_OPTIONS)
    if PLUGIN_OPTIONS:
        arguments["plugins"] = [MixedPrecision(**PLUGIN_OPTIONS)]
    arguments["callbacks"] = [PlanCallback()]
    return arguments


def make_trainer(**more: Any) -> Trainer:
    """A Trainer of the plan; `more` are your own arguments (max_epochs, logger, callbacks, ...)."""
    arguments = trainer_arguments()
    callbacks = more.pop("callbacks", None) or []
    callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    return Trainer(**(arguments | more | {"callbacks": [*arguments["callbacks"], *callbacks]}))


def optimizers(model: nn.Module) -> Any:
    """The result for configure_optimizers(): the schedule moves with each optimizer step, and not with each epoch."""
    optimizer, schedule = make_optimizers(model)
    if schedule is None:
        return optimizer
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
