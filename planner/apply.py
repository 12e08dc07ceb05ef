"""Applies a plan: builds the training run that was measured, on the user's own model, data and optimizer.

run = plan.prepare(model, optimizer)          # a causal language model of transformers: its own loss
run = plan.prepare(make_model, make_optimizer, loss, schedule=make_schedule, max_grad_norm=1.0)
for batch in loader:                          # run.local_batch samples each
    result = run.step(batch)
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from autoplan.errors import DeviceError, PlanError, WorkloadError
from autoplan.planner.trust import TRAINING_CODE, refuse_odd_file, require_trust

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoplan.planner.records import Parity
    from autoplan.probes.profile import HardwareProfile
    from autoplan.strategies.analysis.training_facts import TrainingFacts
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

    @property
    def training(self) -> TrainingFacts | None: ...

    @property
    def study(self) -> str: ...

    @property
    def parity(self) -> Parity: ...

    @property
    def edited(self) -> tuple[str, ...]: ...

    def with_workload_at(self, model: str) -> PlanLike: ...


class _AsSearched:
    """The type of AS_SEARCHED."""

    def __repr__(self) -> str:
        return "AS_SEARCHED"


AS_SEARCHED: Any = _AsSearched()
"""For max_grad_norm and schedule: what the workload of the search had."""


def prepare_plan(
    plan: PlanLike,
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
    changed_ok: bool = False,
    trust_code: bool = False,
    workload: str | Path | None = None,
) -> TrainingRun:
    """The training run of a plan: what `Plan.prepare` calls, with the same parameters; its docstring says them."""
    from torch import nn

    from autoplan.strategies.prepare import prepare

    if global_batch is not None and global_batch != plan.workload.global_batch:
        raise PlanError(
            f"the plan is for a global batch of {plan.workload.global_batch}, and {global_batch} was given",
            hint=f"Search again with global_batch={global_batch}: the batch is part of what is trained.",
        )
    if workload is not None:
        plan, trust_code = plan.with_workload_at(str(workload)), True
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
    made = make_workload(plan, parts, trust_code=trust_code)
    if head is not None:
        made = dataclasses.replace(made, head=head)
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
    return run


def check_before_use(plan: PlanLike, *, changed_ok: bool, checks_parity: bool = True) -> str | None:
    """What every verb asks before a plan meets code: prepare, run, verify and export. Reads files; runs none.

    Args:
        plan: The plan.
        changed_ok: Use it although it, or the training code, changed.
        checks_parity: False where the verb makes the parity check itself.

    Returns:
        What else changed since the plan was found, in words; None: nothing.

    Raises:
        PlanError: the plan was edited, failed its parity check, or names a file that is none; or the code changed.
    """
    if plan.edited and not changed_ok:
        raise PlanError(
            f"the plan was edited after the search wrote it: {', '.join(plan.edited)} differ from their digests, so it "
            "says what was never measured",
            hint="Search again: autoplan search. To use it all the same: prepare(changed_ok=True), --changed-ok.",
        )
    if checks_parity and not plan.parity.passed and not changed_ok:
        raise PlanError(
            "the plan failed its parity check: it does not train the same thing",
            hint="Search again: autoplan search. To use it all the same: prepare(changed_ok=True), --changed-ok.",
        )
    refuse_odd_file(plan.workload)
    return refuse_changed_code(plan.workload, changed_ok=changed_ok)


def refuse_changed_code(spec: WorkloadSpec, *, changed_ok: bool) -> str | None:
    """Refuses a workload whose code is not that of the search; returns what else changed, in words.

    Raises:
        PlanError: the code changed, and that was not allowed.
    """
    from autoplan.strategies.workloads.sources import changed_parts

    changed = changed_parts(spec)
    code = [part for part in changed if part in TRAINING_CODE]
    if code and not changed_ok:
        raise PlanError(
            f"the {' and '.join(code)} of {spec.reference} changed since the plan was found: it trains something else",
            hint="Search again: autoplan search. To use the plan all the same: prepare(changed_ok=True), --changed-ok.",
        )
    if not changed:
        return None
    return f"changed since the plan was found: {', '.join(changed)} of {spec.name}"


def refuse_other_training(plan: PlanLike, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
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
    """What the user gives; None: as the search had it.

    `max_grad_norm` and `schedule` may be AS_SEARCHED; None: no clipping, a constant learning rate.
    """

    model: Any = None
    optimizer: Any = None
    loss: Any = None
    make_batch: Any = None
    schedule: Any = AS_SEARCHED
    max_grad_norm: Any = AS_SEARCHED


def make_workload(plan: PlanLike, parts: Parts, *, trust_code: bool = False) -> Workload:
    """The workload that a plan is applied to.

    With a model: one of the user's parts, and what is not among them as in the search. Without: the workload of the
    search with the user's parts in it. Where all parts are the user's, no file that the plan names is imported.

    Raises:
        WorkloadError: the parts do not make a workload.
        PlanError: the plan names code, nobody vouches for it, and a part of it is needed.
    """
    if _are_all_given(plan, parts):
        batches = parts.make_batch or functools.partial(_batch_of_the_search, plan, trust_code)
        return _from_parts(plan, _as_the_plan_says(plan, dataclasses.replace(parts, make_batch=batches)))
    carried = plan.workload.kind != "object" or plan.workload.payload is not None
    searched = _searched_workload(plan, trust_code) if carried else None
    if searched is None:
        return _from_parts(plan, _as_the_plan_says(plan, parts))
    if parts.model is not None:
        return _with_model(plan, parts, searched)
    return _with_parts(plan, parts, searched)


def _are_all_given(plan: PlanLike, parts: Parts) -> bool:
    """Whether nothing is needed of the file that the plan names.

    Batches are handed to `run.step`. Clipping and a constant rate are in the plan; a schedule is not.
    """
    if plan.workload.kind != "function" or any(part is None for part in (parts.model, parts.optimizer, parts.loss)):
        return False
    schedule = parts.schedule is not AS_SEARCHED or (plan.training is not None and plan.training.schedule is None)
    return schedule and (parts.max_grad_norm is not AS_SEARCHED or plan.training is not None)


def _batch_of_the_search(plan: PlanLike, trust_code: bool, count: int, index: int) -> Any:
    """A batch as the plan's own file makes it, which is imported now, if it may run."""
    searched = _searched_workload(plan, trust_code)
    return (_no_batches if searched is None else searched.make_batch)(count, index)


def _as_the_plan_says(plan: PlanLike, parts: Parts) -> Parts:
    """The parts with the clipping of the search, where its workload is not here.

    Raises:
        PlanError: the search had a schedule, which a plan does not contain, and the user says nothing of one.
    """
    training = plan.training
    if training is None:
        unknown = [name for name in ("max_grad_norm", "schedule") if getattr(parts, name) is AS_SEARCHED]
        if unknown:
            warnings.warn(
                f"this plan does not know the {' and '.join(unknown)} of the search, and none was given: there is "
                "none; give them to prepare(), None for none",
                stacklevel=5,
            )
        return dataclasses.replace(parts, **dict.fromkeys(unknown))
    if parts.max_grad_norm is AS_SEARCHED:
        parts = dataclasses.replace(parts, max_grad_norm=training.max_grad_norm)
    if parts.schedule is not AS_SEARCHED:
        return parts
    if training.schedule is not None:
        rates = ", ".join(f"{max(rates):.4g}" for rates in training.schedule.learning_rates[:4])
        raise PlanError(
            f"the search trained with the schedule {training.schedule.kind} (learning rates {rates}, ...), which a "
            "plan does not contain, and prepare() was given none",
            hint="Give the function that makes it: prepare(schedule=...). For a constant rate: prepare(schedule=None).",
        )
    return dataclasses.replace(parts, schedule=None)


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
            schedule=searched.build_schedule if parts.schedule is AS_SEARCHED else parts.schedule,
            max_grad_norm=norm,
        ),
    )
    made = dataclasses.replace(made, seed=searched.seed)
    if parts.loss is not None and parts.loss is not searched.loss:
        return made  # another loss has another head and another count
    return dataclasses.replace(made, count=searched.count, head=searched.head)


def _from_parts(plan: PlanLike, parts: Parts) -> Workload:
    """A workload of the parts alone, under the plan's name, sizes and seed."""
    from autoplan.strategies.workloads.objects import workload_from_objects

    fixed = plan.workload.options.get("fixed_micro_batch")
    return workload_from_objects(
        model=parts.model,
        make_batch=parts.make_batch or _no_batches,
        loss=parts.loss,
        optimizer=parts.optimizer,
        global_batch=plan.workload.global_batch,
        schedule=parts.schedule,
        max_grad_norm=parts.max_grad_norm,
        name=plan.workload.name,
        sequence_length=plan.workload.sequence_length,
        fixed_micro_batch=plan.config.micro_batch if fixed is not None else None,
        seed=0 if plan.training is None else plan.training.seed,
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
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if parts.schedule is not AS_SEARCHED:
        changes["build_schedule"] = parts.schedule
    if parts.loss is not None:  # another loss has another head and another count
        changes |= {"head": None, "count": None}
    if parts.max_grad_norm is not AS_SEARCHED:
        changes["max_grad_norm"] = parts.max_grad_norm
    return dataclasses.replace(searched, global_batch=plan.workload.global_batch, **changes)


def _searched_workload(plan: PlanLike, trust_code: bool) -> Workload | None:
    """The workload of the search, where its reference can be followed here.

    Raises:
        PlanError: it is code that nobody vouches for.
    """
    from autoplan.strategies.workloads.sources import load_workload

    spec = plan.workload
    if spec.kind != "function" or Path(spec.reference.rpartition(":")[0]).is_file():
        require_trust(spec, plan.study, trust_code=trust_code)
    try:
        return load_workload(spec)
    except WorkloadError:
        if spec.kind == "model":
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
