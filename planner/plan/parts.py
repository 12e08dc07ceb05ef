"""The workload that a plan is applied to: the user's parts, and what is not among them as in the search.

In: a plan and parts. Out: a Workload. The file that a plan names is imported only where a part of it is needed, and
where the user named what is called (trust.py).
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import PlanError, WorkloadError
from autoplan.planner.records.plan import PlanRecord
from autoplan.planner.records.trust import own_workload

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload


def refuse_unverified(plan: PlanRecord) -> str | None:
    """Refuses the best so far of a search that verified nothing, unless the user takes it so; returns what it is.

    Raises:
        PlanError: it is unverified, and that was not allowed.
    """
    if plan.unverified is None:
        return None
    text = f"the plan is unverified: {plan.unverified}"
    if not plan.unverified_ok:
        raise PlanError(
            text,
            hint="The same autoplan search command goes on from there and verifies it. To use it all the same: "
            "unverified_ok=True, --unverified-ok.",
        )
    return text


class _AsSearched:
    """The type of AS_SEARCHED."""

    def __repr__(self) -> str:
        return "AS_SEARCHED"


AS_SEARCHED: Any = _AsSearched()
"""For max_grad_norm and schedule: what the workload of the search had."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts that the user gives; None: as the search had it.

    AS_SEARCHED in `max_grad_norm` or `schedule` means that; None there: no clipping, or a constant rate. `head` and
    `count` go with a loss of the user's.
    """

    model: Any = None
    optimizer: Any = None
    loss: Any = None
    make_batch: Any = None
    schedule: Any = AS_SEARCHED
    max_grad_norm: Any = AS_SEARCHED
    head: Any = None
    count: Any = None


def make_workload(plan: PlanRecord, parts: Parts, *, named: bool = False, searched: Workload | None = None) -> Workload:
    """The workload that a plan is applied to.

    With a model: one of the user's parts, and what is not among them as in the search. Without: the workload of the
    search with the user's parts in it. Where all parts are the user's, no file that the plan names is imported.

    Args:
        plan: The plan.
        parts: What the user gives.
        named: The user named the function of the plan's workload.
        searched: The workload of the search, where the user gives it whole.

    Raises:
        WorkloadError: the parts do not make a workload, or the one of the search, which is needed, does not load.
        PlanError: the plan alone says what code would run, and a part of it is needed.
    """
    if searched is None and _are_all_given(plan, parts):

        def batch_of_the_search(count: int, index: int) -> Any:
            found = _searched_workload(plan, named, needed=False)  # the plan's own file is imported now, if it may run
            return (_no_batches if found is None else found.make_batch)(count, index)

        batches = parts.make_batch or batch_of_the_search
        return _from_parts(plan, _as_the_plan_says(plan, dataclasses.replace(parts, make_batch=batches)))
    carried = plan.workload.kind != "object" or plan.workload.payload is not None
    if searched is None and (carried or parts.model is None):
        needed = parts.model is None or parts.optimizer is None
        searched = _searched_workload(plan, named, needed=needed)
    if searched is None:
        return _from_parts(plan, _as_the_plan_says(plan, parts))
    if parts.model is not None:
        return _with_model(plan, parts, searched)
    return _with_parts(plan, parts, searched)


def _are_all_given(plan: PlanRecord, parts: Parts) -> bool:
    """Whether nothing is needed of the file that the plan names.

    Batches are handed to `run.step`. Clipping and a constant rate are in the plan; a schedule is not.
    """
    if plan.workload.kind != "function" or any(part is None for part in (parts.model, parts.optimizer, parts.loss)):
        return False
    schedule = parts.schedule is not AS_SEARCHED or (plan.training is not None and plan.training.schedule is None)
    return schedule and (parts.max_grad_norm is not AS_SEARCHED or plan.training is not None)


def _as_the_plan_says(plan: PlanRecord, parts: Parts) -> Parts:
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


def _with_model(plan: PlanRecord, parts: Parts, searched: Workload) -> Workload:
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
    fixed = made.fixed_micro_batch or searched.fixed_micro_batch
    made = dataclasses.replace(made, seed=searched.seed, fixed_micro_batch=fixed, tensor_plan=searched.tensor_plan)
    if parts.loss is not None and parts.loss is not searched.loss:
        return made  # another loss has another head and another count
    return dataclasses.replace(made, count=searched.count, head=searched.head)


def _from_parts(plan: PlanRecord, parts: Parts) -> Workload:
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


def _with_parts(plan: PlanRecord, parts: Parts, searched: Workload) -> Workload:
    """The workload of the search, its own model too, with the user's other parts in it."""
    if parts.optimizer is not None and not callable(parts.optimizer):
        raise WorkloadError(
            "an optimizer was given without the model that has its parameters",
            hint="Hand in both, or a function that makes the optimizer from parameters.",
        )
    given = {"build_optimizer": parts.optimizer, "loss": parts.loss, "make_batch": parts.make_batch}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if parts.schedule is not AS_SEARCHED:
        changes["build_schedule"] = parts.schedule
    if parts.loss is not None:  # another loss has another head and another count
        changes |= {"head": None, "count": None}
    if parts.max_grad_norm is not AS_SEARCHED:
        changes["max_grad_norm"] = parts.max_grad_norm
    return dataclasses.replace(searched, global_batch=plan.workload.global_batch, **changes)


def _searched_workload(plan: PlanRecord, named: bool, *, needed: bool) -> Workload | None:
    """The workload of the search; None where it is not needed and does not load here.

    Raises:
        PlanError: it is code, and the plan alone names it; or it is needed, and its file is not here.
        WorkloadError: it is needed, or is a built-in model, and does not load.
    """
    from autoplan.strategies.workloads.sources import load_workload

    spec = plan.workload
    if spec.kind != "function" or needed or Path(spec.reference.rpartition(":")[0]).is_file():
        spec = spec if named else own_workload(spec, plan.study)
    try:
        return load_workload(spec)
    except WorkloadError:
        if needed or spec.kind == "model":
            raise
        return None


def _no_batches(count: int, index: int) -> Any:
    raise WorkloadError(
        "this run was prepared without make_batch, so it makes no batches of its own",
        hint="Hand batches to run.step(), or give prepare() make_batch=.",
    )
