"""Applies a plan: builds the training run that was measured, on the user's own model, data and optimizer.

run = plan.prepare(model, optimizer)          # a causal language model of transformers: its own loss
run = plan.prepare(make_model, make_optimizer, loss, schedule=make_schedule, max_grad_norm=1.0)
for batch in loader:                          # run.local_batch samples each
    result = run.step(batch)
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import DeviceError, PlanError, WorkloadError
from autoplan.planner.plan.parts import AS_SEARCHED, Parts, make_workload, refuse_unverified
from autoplan.planner.records.changes import HINT, name_pieces, refuse_changed_parts
from autoplan.planner.records.plan import PlanRecord
from autoplan.planner.records.trust import TRAINING_CODE, refuse_odd_file

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.spec import WorkloadSpec
    from autoplan.strategies.workloads.workload import LossSum, OutputHead, Workload


_FIELDS = {"model": "build_model", "optimizer": "build_optimizer", "schedule": "build_schedule"}
"""The parts that a Workload has under another name."""


def prepare_plan(
    plan: PlanRecord,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any, Any], LossSum] | None = None,
    *,
    device: str | torch.device | None = None,
    make_batch: Callable[[int, int], Any] | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = AS_SEARCHED,
    max_grad_norm: float | None = AS_SEARCHED,
    global_batch: int | None = None,
    head: OutputHead | None = None,
    count: Callable[[Any], int] | None = None,
    changed_ok: bool = False,
    workload: str | Path | Workload | None = None,
    read: Mapping[str, Any] | None = None,
) -> TrainingRun:
    """The training run of a plan: what `Plan.prepare` calls, with the same parameters; its docstring says them.

    The answer to `unverified_ok` comes with the plan. `read` has fields of the workload that none of these is, where
    the parts were read from a loop.
    """
    from torch import nn

    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.workload import Workload

    whole = workload if isinstance(workload, Workload) else None
    for size in (global_batch, None if whole is None else whole.global_batch):
        if size is not None and size != plan.workload.global_batch:
            raise PlanError(
                f"the plan is for a global batch of {plan.workload.global_batch}, and {size} was given",
                hint=f"Search again with global_batch={size}: the batch is part of what is trained.",
            )
    is_named = workload is not None and whole is None
    if is_named:
        plan = plan.with_workload_at(str(workload))
    said = check_before_use(plan, changed_ok=changed_ok)
    if said is not None:
        warnings.warn(said, stacklevel=3)
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
    given = {name: getattr(parts, name) for name in ("model", "loss", "optimizer", "schedule", "make_batch")}
    given = {name: None if value is AS_SEARCHED else value for name, value in given.items()}
    if whole is not None:
        own = {name: getattr(whole, _FIELDS.get(name, name)) for name in given}
        given = own | {name: part for name, part in given.items() if part is not None}
    changed = refuse_changed_parts(plan.workload, changed_ok=changed_ok, **given)
    if changed is not None:
        warnings.warn(changed, stacklevel=3)
    made = make_workload(plan, parts, named=is_named, searched=whole)
    named: dict[str, Any] = {name: value for name, value in (("head", head), ("count", count)) if value is not None}
    made = dataclasses.replace(made, **named, **(read or {}))
    state = _state_of(optimizer)
    instance = model if isinstance(model, nn.Module) else None
    if instance is not None and not changed_ok:  # before anything is changed in place
        from autoplan.strategies.workloads.optimizers import trainable

        refuse_other_training(plan, made.build_optimizer(trainable(instance)), instance)
    run = prepare(made, plan.config, device=target, model=instance)
    if instance is None and not changed_ok:
        refuse_other_training(plan, run.optimizer, run.model)
    if state:
        _give_state(run.optimizer, state, target)
    if run.said is not None:
        warnings.warn(run.said, stacklevel=3)
    return run


def check_before_use(plan: PlanRecord, *, changed_ok: bool, checks_parity: bool = True) -> str | None:
    """What every verb asks before a plan meets code: prepare, run, verify and export. Reads files; runs none.

    Args:
        plan: The plan. One that is unverified is refused, unless the user accepted it so.
        changed_ok: Use it although it, or the training code, changed.
        checks_parity: False where the verb makes the parity check itself.

    Returns:
        What is to be said of the plan: that it is unverified, and what else changed since it was found; None: nothing.

    Raises:
        PlanError: the plan was edited, failed its parity check, has more threads than a machine, or names a file that
            is none; or the code changed.
    """
    unverified = refuse_unverified(plan)
    if plan.edited and not changed_ok:
        raise PlanError(
            f"the plan was edited after the search wrote it (changed: {', '.join(plan.edited)}), so nobody measured it "
            "as it is now",
            hint="Search again: autoplan search. To use it all the same: prepare(changed_ok=True), --changed-ok.",
        )
    if checks_parity and not plan.parity.passed and not changed_ok and unverified is None:
        raise PlanError(
            "the plan failed its parity check: it does not train the same thing",
            hint="Search again: autoplan search. To use it all the same: prepare(changed_ok=True), --changed-ok.",
        )
    threads, cores = plan.config.threads or 1, plan.hardware.host.cores_logical or plan.hardware.host.cores_usable
    if threads > max(cores, os.cpu_count() or 1) and not changed_ok:
        raise PlanError(
            f"the plan has {threads} threads per rank; it is of a machine with {cores} cores, and this one has "
            f"{os.cpu_count()}",
            hint="Search again: autoplan search. To use it all the same: prepare(changed_ok=True), --changed-ok.",
        )
    refuse_odd_file(plan.workload)
    said = (unverified, refuse_changed_code(plan.workload, changed_ok=changed_ok))
    return "; ".join(text for text in said if text) or None


def check_training(plan: PlanRecord, *, changed_ok: bool, **parts: Any) -> list[str]:
    """What a plan is asked before it meets a training that was read; warns where this is another machine.

    Args:
        plan: The plan.
        changed_ok: Use it although it, or the training code, changed.
        parts: model, loss, schedule, make_batch: see `refuse_changed_parts`.

    Returns:
        What is to be said, in sentences.

    Raises:
        PlanError: see `check_before_use`; or the training is not that of the search.
    """
    said = [check_before_use(plan, changed_ok=changed_ok)]
    said.append(refuse_changed_parts(plan.workload, changed_ok=changed_ok, **parts))
    warn_of_other_hardware(plan, plan.device)
    return [text for text in said if text is not None]


def refuse_changed_code(spec: WorkloadSpec, *, changed_ok: bool) -> str | None:
    """Refuses a workload whose code is not that of the search; returns what else changed, in words.

    Raises:
        PlanError: the code changed, and that was not allowed.
    """
    from autoplan.strategies.workloads.sources import changed_parts, changed_pieces

    changed = changed_parts(spec)
    pieces = name_pieces(changed_pieces(spec)) if changed else ""
    code = [part for part in changed if part in TRAINING_CODE]
    if code and not changed_ok:
        raise PlanError(
            f"the {' and '.join(code)} of {spec.reference} changed since the plan was found{pieces}: it trains "
            "something else",
            hint=HINT,
        )
    if not changed:
        return None
    return f"changed since the plan was found: {', '.join(changed)} of {spec.name}{pieces}"


def refuse_other_training(plan: PlanRecord, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer that trains otherwise than the search did, and warns of other dropout rates.

    Raises:
        PlanError: it has another class, other groups, or other values in them.
    """
    from autoplan.strategies.analysis.training_facts import dropout_rates, optimizer_differences

    if plan.training is None:
        return
    found = optimizer_differences(plan.training, optimizer)
    if found:
        raise PlanError(
            f"the optimizer is not that of the search: {'; '.join(found[:4])}",
            hint="Give the optimizer that the search had. To train with this one on purpose: prepare(changed_ok=True).",
        )
    here, then = dropout_rates(model), plan.training.dropout
    if plan.config.pp == 1 and here != then:
        warnings.warn(f"the model has dropout rates {here or 'of 0'}; the search had {then or '0'}", stacklevel=4)


def warn_of_other_hardware(plan: PlanRecord, device: str) -> str | None:
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


def _pick_device(plan: PlanRecord, device: str | torch.device | None) -> torch.device:
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

    from autoplan.strategies.state import place_steps

    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) not in known for parameter in state):
        raise WorkloadError(
            "the optimizer has stepped already, and the plan spreads its parameters over ranks",
            hint="Hand in a fresh optimizer and restore with run.load_state_dict(), which knows the layout.",
        )
    for parameter, values in state.items():
        moves = (name for name, value in values.items() if name != "step" and isinstance(value, torch.Tensor))
        optimizer.state[parameter] = values | {name: values[name].to(device) for name in moves}
    place_steps(optimizer)
