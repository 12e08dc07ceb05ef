"""Applies a plan: builds the training run that was measured, on the user's own model, data and optimizer.

run = plan.prepare(model, optimizer)          # a causal language model of transformers: its own loss
run = plan.prepare(make_model, make_optimizer, loss, schedule=make_schedule, max_grad_norm=1.0)
for batch in loader:                          # run.local_batch samples each
    result = run.step(batch)
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from autoplan.errors import DeviceError, PlanError, WorkloadError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoplan.probes.profile import HardwareProfile
    from autoplan.strategies.config import TrainingConfig
    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.spec import WorkloadSpec
    from autoplan.strategies.workloads.workload import LossSum, OutputHead, Workload


class PlanLike(Protocol):
    """What applying reads of a plan."""

    @property
    def workload(self) -> WorkloadSpec: ...

    @property
    def config(self) -> TrainingConfig: ...

    @property
    def hardware(self) -> HardwareProfile: ...

    @property
    def device(self) -> str: ...


AS_SEARCHED: Any = object()
"""For max_grad_norm: what the workload of the search had."""


def prepare_plan(
    plan: PlanLike,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
    loss: Callable[[nn.Module, Any], LossSum] | None = None,
    *,
    device: str | torch.device | None = None,
    make_batch: Callable[[int, int], Any] | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    max_grad_norm: float | None = AS_SEARCHED,
    global_batch: int | None = None,
    head: OutputHead | None = None,
) -> TrainingRun:
    """The training run of a plan.

    Args:
        plan: What the search found.
        model: A module (changed in place), or a function that makes one; None: the workload of the search.
        optimizer: An optimizer over the model's parameters (made anew over them, with its groups, hyper-parameters
            and state), or a function that makes one from parameters; None: as the workload of the search has it.
        loss: `loss(model, batch)` gives a LossSum; None: the search's own loss, where the plan can name it, or the
            causal loss of a transformers model with `labels`.
        device: Where; None: the device the plan was found for, the current one of its kind.
        make_batch: Batches, where something asks the workload for them; training itself does not.
        schedule: Makes the learning-rate schedule from the optimizer; stepped once per optimizer step.
        max_grad_norm: Clip to this norm; None: no clipping; not given: as in the search.
        global_batch: Must be the plan's own, if given: a plan never changes it.
        head: With a loss of your own: how the output head splits off (`Workload.head`), where the plan's loss is fused.

    Raises:
        PlanError: the global batch is not the plan's.
        ConfigError: the world does not have the plan's ranks, or a knob does not apply to this model.
        WorkloadError: the parts do not make a workload.
        DeviceError: the plan's kind of device is not here.
    """
    from autoplan.strategies.prepare import prepare

    if global_batch is not None and global_batch != plan.workload.global_batch:
        raise PlanError(
            f"the plan is for a global batch of {plan.workload.global_batch}, and {global_batch} was given",
            hint=f"Search again with global_batch={global_batch}: the batch is part of what is trained.",
        )
    target = _pick_device(plan, device)
    warn_of_other_hardware(plan, target.type)
    workload = _workload(plan, model, optimizer, loss, make_batch, schedule, max_grad_norm)
    if head is not None:
        workload = dataclasses.replace(workload, head=head)
    from torch import nn

    instance = model if isinstance(model, nn.Module) else None
    state = _held_state(optimizer)
    run = prepare(workload, plan.config, device=target, model=instance)
    if state:
        _give_state(run.optimizer, state, target)
    return run


def warn_of_other_hardware(plan: PlanLike, device: str) -> str | None:
    """Says, as a warning, where this machine is not the one the plan was found on; returns what it said."""
    from autoplan.probes.run import read_host_profile

    try:
        here = read_host_profile()
    except (DeviceError, OSError):
        return None
    if here.fingerprint == plan.hardware.fingerprint:
        return None
    text = f"the plan was found on other hardware ({_machine(plan.hardware, device)}); this is {_machine(here, device)}"
    text += ". It runs, but another plan may be faster here: autoplan search"
    warnings.warn(text, stacklevel=3)
    return text


def _machine(hardware: Any, device: str) -> str:
    name = next((found.name for found in hardware.devices if found.type == device), "no such device")
    return f"{name}, torch {hardware.host.torch}"


def _pick_device(plan: PlanLike, device: str | torch.device | None) -> torch.device:
    import os

    import torch

    target = torch.device(plan.device if device is None else device)
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(
                "the plan runs on cuda, and torch sees no CUDA device here",
                hint="Check nvidia-smi and CUDA_VISIBLE_DEVICES, or find a plan for this machine: autoplan search",
            )
        if target.index is None:
            target = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
        torch.cuda.set_device(target)
    return target


def _workload(
    plan: PlanLike,
    model: Any,
    optimizer: Any,
    loss: Any,
    make_batch: Any,
    schedule: Any,
    max_grad_norm: float | None,
) -> Workload:
    """The workload of the search with the user's parts in it, or one of the user's parts alone."""
    searched = _searched_workload(plan) if plan.workload.kind != "object" else None
    fixed = plan.workload.options.get("fixed_micro_batch")
    if searched is None or model is not None:
        from autoplan.strategies.workloads.objects import workload_from_objects

        if searched is not None:  # what the user does not give is as it was in the search
            optimizer = optimizer or searched.build_optimizer
            loss = loss or searched.loss
            make_batch = make_batch or searched.make_batch
            schedule = schedule or searched.build_schedule
        norm = max_grad_norm
        if norm is AS_SEARCHED:
            norm = searched.max_grad_norm if searched is not None else None
        made = workload_from_objects(
            model=model,
            make_batch=make_batch or _no_batches,
            loss=loss,
            optimizer=optimizer,
            global_batch=plan.workload.global_batch,
            schedule=schedule,
            max_grad_norm=norm,
            name=plan.workload.name,
            sequence_length=plan.workload.sequence_length,
            fixed_micro_batch=plan.config.micro_batch if fixed is not None else None,
        )
        if searched is None or loss is not searched.loss:
            return made
        return dataclasses.replace(made, count=searched.count, head=searched.head, seed=searched.seed)
    changes: dict[str, Any] = {"global_batch": plan.workload.global_batch}
    if optimizer is not None:
        if not callable(optimizer):
            raise WorkloadError(
                "an optimizer was given without the model that holds its parameters",
                hint="Hand in both, or a function that makes the optimizer from parameters.",
            )
        changes["build_optimizer"] = optimizer
    for name, value in (("loss", loss), ("make_batch", make_batch), ("build_schedule", schedule)):
        if value is not None:
            changes[name] = value
    if loss is not None:  # another loss has another head and another count
        changes |= {"head": None, "count": None}
    if max_grad_norm is not AS_SEARCHED:
        changes["max_grad_norm"] = max_grad_norm
    return dataclasses.replace(searched, **changes)


def _searched_workload(plan: PlanLike) -> Workload | None:
    """The workload of the search, where its reference can be followed here."""
    from autoplan.strategies.workloads.sources import load_workload

    try:
        return load_workload(plan.workload)
    except WorkloadError:
        if plan.workload.kind == "model":
            raise
        return None  # a file that is not on this machine: the parts must come from the caller


def _no_batches(count: int, index: int) -> Any:
    raise WorkloadError(
        "this run was prepared without make_batch, so it makes no batches of its own",
        hint="Hand batches to run.step(), or give prepare() make_batch=.",
    )


def _held_state(optimizer: Any) -> dict[Any, Any]:
    """The state of an optimizer that has stepped already, by parameter."""
    import torch

    return dict(optimizer.state) if isinstance(optimizer, torch.optim.Optimizer) else {}


def _give_state(optimizer: torch.optim.Optimizer, state: dict[Any, Any], device: torch.device) -> None:
    """Carries the state of the user's optimizer over to the one of the run; the parameters are the same objects.

    Raises:
        WorkloadError: they are not (sharded or split over ranks): the state would be lost in silence.
    """
    import torch

    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) not in held for parameter in state):
        raise WorkloadError(
            "the optimizer has stepped already, and the plan spreads its parameters over ranks",
            hint="Hand in a fresh optimizer and restore with run.load_state_dict(), which knows the layout.",
        )
    for parameter, values in state.items():
        moved = {}
        for name, value in values.items():
            keep_on_host = name == "step" and not optimizer.defaults.get("fused") and not parameter.is_cuda
            to = torch.device("cpu") if keep_on_host else device
            moved[name] = value.to(to) if isinstance(value, torch.Tensor) else value
        optimizer.state[parameter] = moved
