"""The gradients of a loss under a Trainer on several ranks: whether they are those of one process.

In: a Trainer that runs on the plan's ranks, and its workload's loss. Out: the factor that its compute_loss lacks. Each
rank divides by the items of all ranks, and DDP and FSDP take the mean over ranks; transformers multiplies by the number
of processes in `Trainer.compute_loss`, and a compute_loss that does not call it leaves this out.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from autoplan.errors import PlanError
from autoplan.frameworks.transformers.loss import DIVIDES_BY, NOT_TAKEN, inputs_of, is_scaled
from autoplan.frameworks.transformers.rebuild import copy_trainer, scale_loss
from autoplan.strategies.workloads.batch import move_batch
from autoplan.strategies.workloads.carried import attributes_kept, buffers_kept
from autoplan.strategies.workloads.devices import device_of
from autoplan.strategies.workloads.randomness import seed_generators, seeded
from autoplan.strategies.workloads.workload import Workload

SAME = 0.02
"""Relative difference below which two factors are the same one."""


def missing_factor(trainer: Any, workload: Workload, *, divide: bool) -> float:
    """The factor by which the loss on each rank must be multiplied, so that a step on all ranks is that of one process.

    Called in each rank; a loss of a few samples is computed, by one process's parts and by this rank's Trainer.

    Args:
        trainer: The Trainer of this rank, before the plan changes its model; it is left as it was.
        workload: Its training, as one process reads it.
        divide: Its loss is to be divided by num_items_in_batch as well.

    Raises:
        PlanError: no single factor makes the losses of the ranks add up to that of one process.
    """
    from accelerate.utils import gather_object

    world = int(trainer.args.world_size)
    mine: Any
    try:
        mine = _losses(trainer, workload, divide)
    except Exception as error:
        mine = f"{type(error).__name__}: {error}"
    found: list[Any] = gather_object([mine])  # so that all ranks decide the same
    name = type(trainer).__name__
    hint = (
        "Have compute_loss return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch), or "
        "sum / num_items_in_batch * self.accelerator.num_processes. Or search with nproc=1."
    )
    if failed := [text for text in found if isinstance(text, str)]:
        raise PlanError(
            f"compute_loss of {name} was tried on {world} ranks, to see that its step is that of one process: "
            f"{failed[0]}",
            hint=hint,
        )
    items = sum(count for _, _, count, _ in found)
    scaled = found[0][3]
    factors = []
    for real, total, count, _ in found:
        wanted = (total * world / items if items else 0.0) if scaled else total / count
        factors.append(wanted / real if real else 0.0)
    for factor in (1.0, float(world)) if scaled else (1.0, 1 / world):
        if all(abs(one / factor - 1) < SAME for one in factors):
            return factor
    raise PlanError(
        f"the loss of {name} on {world} ranks does not add up to that of one process: on the same samples the ranks' "
        f"losses lack the factors {', '.join(f'{one:.3g}' for one in factors)}, which are to be 1 (nothing is missing) "
        f"or {world:.0f} (the number of processes) on all of them",
        hint=hint,
    )


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Makes a loss see one process alone: in torch.distributed, in accelerate's state and in the environment."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed import GroupMember

    alone = {"num_processes": 1, "distributed_type": DistributedType.NO, "process_index": 0}
    states: list[Any] = [PartialState._shared_state, AcceleratorState._shared_state]
    kept = [{key: state[key] for key in alone if key in state} for state in states]
    group: Any = GroupMember
    world, size = group.WORLD, os.environ.pop("WORLD_SIZE", None)
    group.WORLD = None
    for state, known in zip(states, kept, strict=True):
        state.update({key: alone[key] for key in known})
    try:
        yield
    finally:
        group.WORLD = world
        for state, known in zip(states, kept, strict=True):
            state.update(known)
        if size is not None:
            os.environ["WORLD_SIZE"] = size


def _losses(trainer: Any, workload: Workload, divide: bool) -> tuple[float, float, int, bool]:
    """This rank's loss as its Trainer's step has it; one process's sum and items; whether it is one of items."""
    loss: Any = workload.loss
    model = trainer.model
    device = device_of(model)
    rank = int(trainer.args.process_index)
    batch = move_batch(workload.make_batch(2, rank), device)
    twin = _twin(trainer)
    if divide:
        scale_loss(twin, divided=loss)
    with seeded(0), buffers_kept(model), attributes_kept(model), torch.no_grad():
        model.train()
        for module in model.modules():
            if "BatchNorm" in type(module).__name__:  # the samples of the ranks are others than those of one process
                module.training = False
        with as_one_process():
            alone = loss(model, batch)
        seed_generators(0)
        inputs, _ = inputs_of(batch)
        items = twin._get_num_items_in_batch([inputs], device)
        real = float(twin.compute_loss(model, inputs, **({} if items is None else {DIVIDES_BY: items})))
    return real, float(alone.total), int(alone.count), items is not None and is_scaled(loss.parts, items)


def _twin(trainer: Any) -> Any:
    """A copy of a Trainer whose compute_loss may count and keep what it wants: the Trainer does not see it."""
    twin = copy_trainer(trainer)
    for name, value in vars(twin).items():
        if isinstance(value, dict | list | set | deque) and name not in NOT_TAKEN:
            setattr(twin, name, copy.deepcopy(value))
    twin.state, twin.control = copy.copy(trainer.state), copy.copy(trainer.control)
    if hasattr(twin.args, "average_tokens_across_devices"):
        twin.args.average_tokens_across_devices = True  # as the new Trainer has it
    return twin
