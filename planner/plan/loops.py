"""Applies a plan to a training loop or a step function: what Plan.apply_to does with each.

In: a plan, and the same parts that the search had. Out: the training run with a DataLoader of its size; the step under
the plan's settings.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from autoplan.errors import PlanError, UsageError, WorkloadError
from autoplan.planner.plan.loader import setting_of
from autoplan.planner.plan.parts import Parts
from autoplan.planner.plan.prepare import check_training, draws_kept, prepare_plan
from autoplan.planner.records.plan import PlanRecord
from autoplan.strategies.workloads.frameworks import MODULES, is_one_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from autoplan.strategies.run import TrainingRun

PARTS = ("model", "optimizer", "dataloader", "loss")
"""Of a loop, in the order of autoplan.search, which takes them by name too."""

PLAN_LOADER = "Or make it of the dataset: plan.loader(dataset, run=run), with run = plan.prepare(...)."


class AppliedLoop(NamedTuple):
    """A loop under a plan: `for batch in loader: result = run.step(batch)`.

    Attributes:
        run: The training run over the loop's own model.
        loader: The loop's DataLoader with batches of `run.local_batch` samples; a last, smaller batch is dropped. It
            has the workers that the search measured, where it was given `loader=`. On several ranks it gives this rank
            its share of one order.
    """

    run: TrainingRun
    loader: DataLoader[Any]


class PlannedStep:
    """A step function under a plan: `planned(index)` runs it, and gives its loss as a float.

    Args:
        run: The step's training run.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run

    def __call__(self, index: int) -> float:
        """Runs step(index)."""
        workload = self.run.workload
        return float(self.run.step(workload.make_batch(workload.global_batch, index)).loss)


def apply_parts(plan: PlanRecord, training: Any, parts: tuple[Any, ...], **settings: Any) -> AppliedLoop | PlannedStep:
    """Applies a plan to a loop or a step.

    Raises:
        AutoplanError: see Plan.apply_to.
    """
    if is_one_of(training, MODULES):
        return apply_to_loop(plan, (training, *parts), **settings)
    if callable(training):
        return apply_to_step(plan, training)
    raise WorkloadError(
        f"this is a {type(training).__name__}, and no Trainer of transformers, no model and no function of a step",
        hint="plan.prepare(model, optimizer, loss) gives a training run for a loop of your own.",
    )


def apply_to_loop(plan: PlanRecord, parts: tuple[Any, ...], **settings: Any) -> AppliedLoop:
    """The training run of a loop's parts, and its DataLoader.

    Args:
        plan: Of a search with such parts.
        parts: model, optimizer, dataloader, and the loss where the search had one.
        settings: schedule, schedule_interval, max_grad_norm, loss_mean, accelerator: as the search had them. Also
            parts by name.

    Raises:
        UsageError: a part was given by place and by name.
        WorkloadError: the parts make no training.
        PlanError: they are not those of the search, or the ranks cannot share the DataLoader.
    """
    from autoplan.strategies.workloads.loops.loader import resized
    from autoplan.strategies.workloads.loops.loop import read_loop, unwrap_model
    from autoplan.strategies.workloads.loops.schedules import at_the_start, plain_optimizer, plain_schedule
    from autoplan.strategies.workloads.optimizers import follow

    named = dict(zip(PARTS, parts, strict=False))
    if twice := [name for name in named if name in settings]:
        raise UsageError(
            f"apply_to was given {' and '.join(twice)} twice: by place and by name",
            hint="Give each part once: plan.apply_to(model, optimizer, dataloader, loss).",
        )
    named |= {name: settings.pop(name) for name in PARTS if name in settings}
    given: list[Any] = [named.get(name) for name in PARTS]
    model, optimizer, dataloader, loss = given
    _refuse_split_loader(dataloader)
    if plan.training is not None:
        settings = {"max_grad_norm": plan.training.max_grad_norm, "seed": plan.training.seed} | settings
    if plan.changed_ok:
        settings["global_batch"] = plan.workload.global_batch
    with draws_kept(plan):
        workload = read_loop(model, optimizer, dataloader, loss, **settings)
        _refuse_global_batch(plan, workload.global_batch, given="global_batch" in settings)
        read = Parts(
            model=unwrap_model(model),
            optimizer=at_the_start(plain_optimizer(optimizer)),
            loss=workload.loss,
            make_batch=workload.make_batch,
            schedule=workload.build_schedule,
            max_grad_norm=workload.max_grad_norm,
            head=workload.head,
        )
        beside = {name: getattr(workload, name) for name in ("count", "fixed_micro_batch", "seed")}
        if plan.workload.options.get("fixed_micro_batch") is not None:  # given to the search: the plan says it
            del beside["fixed_micro_batch"]
        run = prepare_plan(plan, read, read=beside)
    follow(plain_optimizer(optimizer), run.optimizer, "run.step(batch)")
    schedule = plain_schedule(settings.get("schedule"))
    if hasattr(schedule, "optimizer"):
        follow(schedule, getattr(run.schedule, "schedule", run.schedule), "run.step(batch)")
    order = None if run.mesh is None else _shared_order(run, dataloader, workload.make_batch)
    by_parts = getattr(workload.make_batch, "collated_by_parts", False) and run.local_batch > plan.config.micro_batch
    micro_batch = plan.config.micro_batch if by_parts else None
    return AppliedLoop(
        run, resized(dataloader, run.local_batch, setting_of(plan), order=order, micro_batch=micro_batch)
    )


def _refuse_global_batch(plan: PlanRecord, found: int, *, given: bool) -> None:
    """Raises PlanError where the loop's batches, or its accumulation, are not those of the search."""
    wanted = plan.workload.global_batch
    if found == wanted:
        return
    made = "was given" if given else "is what this loop trains (its DataLoader's batch size x its accumulation)"
    raise PlanError(
        f"the plan is for a global batch of {wanted}, and {found} {made}",
        hint=f"Search again with this batch. If the search was given global_batch={wanted}, give it here too.",
    )


def _refuse_split_loader(dataloader: Any) -> None:
    from autoplan.strategies.workloads.loading.order import split_over
    from autoplan.strategies.workloads.loops.loader import check_loader

    split = None if dataloader is None else split_over(check_loader(dataloader))
    if split is not None:
        raise PlanError(
            f"the DataLoader is split over {split[1]} processes already ({split[0]}), and apply_to splits it itself",
            hint="Give the DataLoader as it is before it is split, as the search had it. " + PLAN_LOADER,
        )


def _shared_order(run: TrainingRun, dataloader: Any, batches: Any) -> Any:
    """The samples that this rank takes of one order, as plan.loader shares it.

    Args:
        run: Of several ranks.
        dataloader: The loop's own.
        batches: What was read of it on this rank, with its `order`.

    Raises:
        PlanError: ranks draw different orders, on each of them.
    """
    import torch.distributed as dist

    from autoplan.strategies.techniques.mesh import data_position
    from autoplan.strategies.workloads.digests import digest
    from autoplan.strategies.workloads.loading.source import make_order, source_of

    source = source_of(dataloader)
    found: list[Any] = [None] * dist.get_world_size()
    own = None if source.sampler is None else digest([list(batches.order)])
    dist.all_gather_object(found, (len(source.dataset), own))
    if len(set(found)) > 1:
        lengths = sorted({length for length, _ in found})
        what = (
            f"the dataset has {lengths[0]} samples on one rank and {lengths[-1]} on another"
            if len(lengths) > 1
            else f"the sampler {type(source.sampler).__name__} gives other samples on one rank than on another"
        )
        raise PlanError(
            f"{what}, so ranks cannot share its samples",
            hint="Make it in the same way, with the same seed, on all ranks. " + PLAN_LOADER,
        )
    rank, ranks = data_position(run.mesh)
    return make_order(source, batch_size=run.local_batch, rank=rank, ranks=ranks, seed=run.workload.seed)


def apply_to_step(plan: PlanRecord, make_step: Any) -> PlannedStep:
    """The step that make_step gives, under the plan's settings of this process.

    Threads, the allocator and TF32 are set for the whole process, and stay set. make_step and the steps draw from the
    random generators as they are here: nothing seeds them.

    Raises:
        PlanError: the plan is not of a step function, or the step's code is not that of the search.
    """
    import torch

    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.techniques.allocator import set_allocator
    from autoplan.strategies.workloads.loops.step import build_step_model, read_step

    if not plan.workload.is_step:
        raise PlanError(
            f"the plan is of {plan.workload.name}, which is no step function, and a function was given",
            hint="plan.prepare(model, optimizer, loss) applies it; search with step=make_step for a plan of a step.",
        )
    workload = read_step(make_step, global_batch=plan.workload.global_batch, name=plan.workload.name)
    for text in check_training(plan, changed_ok=plan.changed_ok, model=workload.build_model, loss=workload.loss):
        warnings.warn(text, stacklevel=4)
    if plan.device == "cuda":
        set_allocator(plan.config.allocator, torch.device("cuda"))  # before make_step takes memory
    model = build_step_model(make_step)
    with draws_kept(plan):
        return PlannedStep(prepare(workload, plan.config, device=plan.device, model=model))
