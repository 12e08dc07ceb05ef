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


class _AsSearched:
    """The type of AS_SEARCHED."""

    def __repr__(self) -> str:
        return "AS_SEARCHED"


AS_SEARCHED: Any = _AsSearched()
"""For max_grad_norm: what the workload of the search had."""


def prepare_plan(
    plan: PlanLike,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any, Any], LossSum] | None = None,
    *,
    device: str | torch.device | None = None,
    make_batch: Callable[[int, int], Any] | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    max_grad_norm: float | None = AS_SEARCHED,
    global_batch: int | None = None,
    head: OutputHead | None = None,
) -> TrainingRun:
    """The training run of a plan: what `Plan.prepare` calls, with the same parameters; its docstring says them."""
    from torch import nn

    from autoplan.strategies.prepare import prepare

    if global_batch is not None and global_batch != plan.workload.global_batch:
        raise PlanError(
            f"the plan is for a global batch of {plan.workload.global_batch}, and {global_batch} was given",
            hint=f"Search again with global_batch={global_batch}: the batch is part of what is trained.",
        )
    target = _pick_device(plan, device)
    warn_of_other_hardware(plan, target.type)
    parts = Parts(
        model=model,
        optimizer=optimizer,
        loss=loss,
        make_batch=make_batch,
        schedule=schedule,
        max_grad_norm=max_grad_norm,
    )
    workload = make_workload(plan, parts)
    if head is not None:
        workload = dataclasses.replace(workload, head=head)
    state = _state_of(optimizer)
    run = prepare(workload, plan.config, device=target, model=model if isinstance(model, nn.Module) else None)
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What the user gives; None: as the search had it. `max_grad_norm` may be AS_SEARCHED; None: no clipping."""

    model: Any = None
    optimizer: Any = None
    loss: Any = None
    make_batch: Any = None
    schedule: Any = None
    max_grad_norm: Any = AS_SEARCHED


def make_workload(plan: PlanLike, parts: Parts) -> Workload:
    """The workload that a plan is applied to.

    With a model: one of the user's parts, and what is not among them as in the search. Without: the workload of the
    search with the user's parts in it.

    Raises:
        WorkloadError: the parts do not make a workload.
    """
    searched = _searched_workload(plan) if plan.workload.kind != "object" else None
    if searched is None:
        return _from_parts(plan, parts)
    if parts.model is not None:
        return _with_model(plan, parts, searched)
    return _with_parts(plan, parts, searched)


def _with_model(plan: PlanLike, parts: Parts, searched: Workload) -> Workload:
    """The user's model; what else the user does not give is as it was in the search."""
    norm = searched.max_grad_norm if parts.max_grad_norm is AS_SEARCHED else parts.max_grad_norm
    made = _from_parts(
        plan,
        dataclasses.replace(
            parts,
            optimizer=parts.optimizer or searched.build_optimizer,
            loss=parts.loss or searched.loss,
            make_batch=parts.make_batch or searched.make_batch,
            schedule=parts.schedule or searched.build_schedule,
            max_grad_norm=norm,
        ),
    )
    if parts.loss is not None and parts.loss is not searched.loss:
        return made  # another loss has another head and another count
    return dataclasses.replace(made, count=searched.count, head=searched.head, seed=searched.seed)


def _from_parts(plan: PlanLike, parts: Parts) -> Workload:
    """A workload of the parts alone, under the plan's name and sizes."""
    from autoplan.strategies.workloads.objects import workload_from_objects

    fixed = plan.workload.options.get("fixed_micro_batch")
    return workload_from_objects(
        model=parts.model,
        make_batch=parts.make_batch or _no_batches,
        loss=parts.loss,
        optimizer=parts.optimizer,
        global_batch=plan.workload.global_batch,
        schedule=parts.schedule,
        max_grad_norm=None if parts.max_grad_norm is AS_SEARCHED else parts.max_grad_norm,
        name=plan.workload.name,
        sequence_length=plan.workload.sequence_length,
        fixed_micro_batch=plan.config.micro_batch if fixed is not None else None,
    )


def _with_parts(plan: PlanLike, parts: Parts, searched: Workload) -> Workload:
    """The workload of the search, its own model too, with the user's other parts in it."""
    if parts.optimizer is not None and not callable(parts.optimizer):
        raise WorkloadError(
            "an optimizer was given without the model that has its parameters",
            hint="Hand in both, or a function that makes the optimizer from parameters.",
        )
    given = {
        "build_optimizer": parts.optimizer,
        "loss": parts.loss,
        "make_batch": parts.make_batch,
        "build_schedule": parts.schedule,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if parts.loss is not None:  # another loss has another head and another count
        changes |= {"head": None, "count": None}
    if parts.max_grad_norm is not AS_SEARCHED:
        changes["max_grad_norm"] = parts.max_grad_norm
    return dataclasses.replace(searched, global_batch=plan.workload.global_batch, **changes)


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


def _state_of(optimizer: Any) -> dict[Any, Any]:
    """The state of an optimizer that has stepped already, by parameter."""
    import torch

    return dict(optimizer.state) if isinstance(optimizer, torch.optim.Optimizer) else {}


def _give_state(optimizer: torch.optim.Optimizer, state: dict[Any, Any], device: torch.device) -> None:
    """Carries the state of the user's optimizer over to the one of the run; the parameters are the same objects.

    Raises:
        WorkloadError: they are not (sharded or split over ranks): the state would be lost in silence.
    """
    import torch

    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) not in known for parameter in state):
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
