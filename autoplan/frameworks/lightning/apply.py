"""Applies a plan to a LightningModule: what `plan.apply_to(module, data)` does.

In: a plan, the module with its data, perhaps the Trainer of the search. Out: the arguments of the lightning.Trainer
that trains the module under the plan, also those that count batches, whose size is another one now; and sentences on
what no argument says.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from autoplan.frameworks.lightning.read import ModuleReading, is_overridden, read_module, steps_between
from autoplan.planner.plan.lightning_arguments import lightning_arguments
from autoplan.planner.plan.loader import setting_of
from autoplan.planner.plan.prepare import check_training, refuse_other_training
from autoplan.planner.records.plan import PlanRecord
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import apply_to_model
from autoplan.strategies.workloads.frameworks import LIGHTNING_MODULES, class_names
from autoplan.strategies.workloads.loops.mean_loss import CountLabels
from autoplan.strategies.workloads.optimizers import trainable
from autoplan.strategies.workloads.workload import Workload

COUNT_BATCHES = ("limit_train_batches", "val_check_interval")
"""Arguments of the Trainer that count training batches where they are whole numbers."""

PER_BATCH = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward")
"""Hooks that Lightning calls for each batch, whatever the accumulation."""

LOOKED_AT = 8
"""So many micro-batches are looked at for their number of labels."""


@dataclass(frozen=True)
class LightningSettings:
    """The settings of a lightning.Trainer for a plan; the module itself was changed in place if the plan says so.

    Attributes:
        trainer_arguments: For `lightning.Trainer(**settings.trainer_arguments)`. They have limit_train_batches and
            val_check_interval if the searched Trainer counts batches by them: batches have another size now.
        batch_size: Of the DataLoader of a rank.
        not_carried: The parts of the plan that the Trainer does not do, in sentences.
        loader_arguments: For the DataLoader: workers, prefetch factor and pinned memory as they were measured.
    """

    trainer_arguments: dict[str, Any]
    batch_size: int
    not_carried: tuple[str, ...]
    loader_arguments: dict[str, Any] = field(default_factory=dict)


def apply_plan(
    plan: PlanRecord,
    module: Any,
    data: Any = None,
    *,
    changed_ok: bool = False,
    trainer: Any = None,
    **settings: Any,
) -> LightningSettings:
    """Changes a LightningModule in place as the plan says, and gives the arguments of the Trainer that trains it.

    Args:
        plan: Of a search with such a module.
        module: It is changed in place.
        data: Its datamodule or DataLoader.
        changed_ok: See Plan.prepare.
        trainer: The lightning.Trainer of the search; None: there was none.
        settings: schedule, max_grad_norm, loss_mean: as the search had them.

    Raises:
        PlanError: the module is not that of the search.
        ExportError: the plan has what no Trainer does.
    """
    config = plan.config
    reading = read_module(module, data, trainer=trainer, global_batch=plan.workload.global_batch, **settings)
    workload = reading.workload
    said = check_training(
        plan,
        changed_ok=changed_ok,
        model=workload.build_model,
        loss=workload.loss,
        schedule=workload.build_schedule,
        make_batch=workload.make_batch,
    )
    if not changed_ok:  # without the Trainer, its clipping is not known, nor the length of its schedule
        known = None if trainer is None else workload
        refuse_other_training(plan, workload.build_optimizer(trainable(module)), module, workload=known)
    norm = workload.max_grad_norm if plan.training is None else plan.training.max_grad_norm
    accumulation = config.accumulation(plan.workload.global_batch)
    arguments = lightning_arguments(
        config,
        device=plan.device,
        accumulation=accumulation,
        max_grad_norm=norm,
        find_unused=plan.workload.find_unused_parameters,
    )
    counts, unscaled = rescaled_counts(reading, trainer, config)
    frequency = [*_other_frequency(reading, accumulation), *_other_hooks(reading, module, trainer, accumulation)]
    mean = _mean_of_means(workload, config)
    not_done = [*(unscaled if trainer is not None else ()), *frequency]
    not_done += mean if mean and _counts_differ(workload, config) else []
    said += [f"the Trainer does not do this of the plan: {text}" for text in not_done]
    for text in said:
        warnings.warn(text, stacklevel=3)
    left = apply_to_model(workload, config, module, device=torch.device(plan.device))
    left = tuple(text for text in left if not text.startswith(("offload=", "kernels=")))  # the arguments say it
    setting = setting_of(plan)
    return LightningSettings(
        arguments.make(package_of(module)) | counts,
        config.micro_batch,
        tuple(dict.fromkeys((*unscaled, *frequency, *mean, *arguments.not_carried, *left))),
        {} if setting is None else setting.arguments,
    )


def package_of(module: Any) -> str:
    """The package of a LightningModule: lightning.pytorch or pytorch_lightning, whose objects do not go together."""
    base = next(name for name in class_names(module) if name in LIGHTNING_MODULES)
    return base.removesuffix(".core.module.LightningModule")


def rescaled_counts(reading: ModuleReading, trainer: Any, config: TrainingConfig) -> tuple[dict[str, int], list[str]]:
    """Arguments of the Trainer that count batches, for the plan's batches; and sentences on those that cannot.

    Args:
        reading: The module as it was read.
        trainer: That of the search; None: not given.
        config: The plan's.
    """
    before, now = reading.batch_samples, config.micro_batch * config.dp
    if before == now:
        return {}, []
    sizes = f"of {before} samples, and the plan's have {now}"
    if trainer is None:
        names = " and ".join(COUNT_BATCHES)
        return {}, [f"whole numbers for {names} count batches {sizes}; give trainer= to have them rescaled"]
    arguments, missing = {}, []
    for name in COUNT_BATCHES:
        value = getattr(trainer, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or not value:
            continue  # a share of an epoch, or a time
        if value * before % now:
            missing.append(
                f"{name}={value} counts batches {sizes}: that is {value * before / now:.4g} of them, no whole number; "
                f"give the Trainer the {name} that you want"
            )
        else:
            arguments[name] = value * before // now
    return arguments, missing


def _other_frequency(reading: ModuleReading, accumulation: int) -> list[str]:
    """A sentence where the Trainer steps the schedule at other optimizer steps than the search; else none.

    Args:
        reading: The module as it was read.
        accumulation: Of the plan.
    """
    wanted = steps_between(reading.frequency, reading.accumulation)
    found = steps_between(reading.frequency, accumulation)
    if wanted == found:
        return []
    every = "each optimizer step" if found == 1 else f"every {found} optimizer steps"
    return [
        f"the schedule's frequency={reading.frequency} counts batches: with the plan's accumulation {accumulation} "
        f"Lightning steps it after {every}, where the training has {wanted}. In configure_optimizers, give "
        f"frequency={wanted * accumulation}"
    ]


def _other_hooks(reading: ModuleReading, module: Any, trainer: Any, accumulation: int) -> list[str]:
    """A sentence where hooks of the module or of callbacks run for another number of batches than before; else none.

    Args:
        reading: The module as it was read.
        module: The user's.
        trainer: That of the search, with its callbacks; None: not given.
        accumulation: Of the plan.
    """
    if accumulation == reading.accumulation:
        return []
    holders = [module, *getattr(trainer, "callbacks", ())]
    found = [f"{hook} of {type(one).__name__}" for one in holders for hook in PER_BATCH if is_overridden(one, hook)]
    if not found:
        return []
    return [
        f"{' and '.join(found)}: Lightning calls it for each micro-batch, {accumulation} times an optimizer step; the "
        f"training has {reading.accumulation}. What is meant for a step goes into on_before_optimizer_step, or "
        "where (batch_idx + 1) % trainer.accumulate_grad_batches == 0"
    ]


def _mean_of_means(workload: Workload, config: TrainingConfig) -> list[str]:
    """A sentence where the Trainer's mean of micro-batches is not that of the global batch's labels; else none.

    Args:
        workload: The module's.
        config: The plan's.
    """
    parts = config.accumulation(workload.global_batch) * config.dp
    if parts == 1 or not isinstance(workload.count, CountLabels):
        return []
    return [
        f"the mean over all labels of the global batch: the loss is a mean over {workload.count.describe()}, and "
        f"Lightning averages the means of {parts} micro-batches, which weights the labels of a micro-batch with few of "
        "them more. autoplan export --to lightning writes global_mean and a callback that divide by the count of all"
    ]


def _counts_differ(workload: Workload, config: TrainingConfig) -> bool:
    """Whether the first micro-batches of a workload whose loss counts labels have different numbers of them."""
    assert workload.count is not None, "the loss counts labels"
    parts = config.accumulation(workload.global_batch) * config.dp
    counts = {workload.count(workload.make_batch(config.micro_batch, k)) for k in range(min(max(parts, 2), LOOKED_AT))}
    return len(counts) > 1
