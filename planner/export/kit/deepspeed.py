"""The code that the target `deepspeed` copies: DeepSpeed's engine of a plan, and a step of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.planner.export.kit.loop import make_optimizers
from autoplan.planner.export.kit.settings import *
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.workload import LossSum


def initialize(model: nn.Module, optimizer: Any = None, schedule: Any = None, **more: Any) -> Any:
    """The engine of the plan.

    Args:
        model: From prepare_module().
        optimizer, schedule: Your own, where the module has no make_optimizers().
        **more: Your own arguments of deepspeed.initialize.

    Raises:
        RuntimeError: there are not as many ranks as the plan has.
    """
    if MAKES_OPTIMIZERS:
        optimizer, schedule = make_optimizers(model)
    config = str(Path(__file__).with_name(CONFIG_FILE))
    arguments = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule, "config": config}
    engine = deepspeed.initialize(**(arguments | more))[0]
    if engine.dp_world_size != RANKS:
        raise RuntimeError(f"the plan is for {RANKS} ranks, and {engine.dp_world_size} were started")
    return engine


def train_step(
    engine: Any,
    micro_batches: Sequence[Batch],
    loss_sum: Callable[[Any, Batch], LossSum],
    count_items: Callable[[Batch], int],
) -> tuple[torch.Tensor, Any]:
    """One optimizer step. Returns the loss of the global batch, and the norm of its gradient before clipping (None in
    fp16 without ZeRO). The engine clips and steps by itself, so this is no Stepper.

    Args:
        engine: From initialize().
        micro_batches: ACCUMULATION batches of MICRO_BATCH samples, this rank's share of the global batch.
        loss_sum: loss_sum(model, micro_batch) returns the summed loss and how many items it is the sum of.
        count_items: count_items(micro_batch) returns how many items that will be, without running the model.
    """
    sums = torch.zeros(2, device=engine.device)
    sums[1] = float(sum(count_items(micro_batch) for micro_batch in micro_batches))
    comm.all_reduce(sums)
    norm = None
    for number, micro_batch in enumerate(micro_batches, start=1):
        micro_batch = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(engine.device, non_blocking=True), micro_batch
        )
        total, _ = loss_sum(engine, micro_batch)
        engine.backward(total * (RANKS * ACCUMULATION / sums[1]))
        if number == ACCUMULATION and not engine.zero_optimization() and not engine.torch_autocast_z0_gradscaler:
            norm = torch.nn.utils.get_total_norm([p.grad for p in engine.parameters() if p.grad is not None])
        engine.step()  # clips, and steps the optimizer and the schedule, after the last of ACCUMULATION
        sums[0] += total.detach().float()
    total = sums[:1].clone()
    comm.all_reduce(total)
    return total[0] / sums[1], engine.get_global_grad_norm() if norm is None else norm
