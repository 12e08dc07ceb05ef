"""Applies a plan to a Trainer of transformers or TRL: what `plan.apply_to(trainer)` does.

In: a plan, a Trainer that has not trained. Out: a new Trainer of the same class, with the plan's arguments. What a
Trainer has of its accelerator, precision and compiler is fixed when it is made, so the parts of the old one go into a
new one (rebuild.py).
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import os
import warnings
from typing import Any, Literal

import torch

from autoplan.errors import ExportError, PlanError, UsageError
from autoplan.frameworks.transformers.loss import TrainerLoss
from autoplan.frameworks.transformers.ranks import as_one_process, missing_factor
from autoplan.frameworks.transformers.read import (
    global_batch_of,
    make_optimizer,
    read_training,
    refuse_other_batch_size,
    steps_of_training,
)
from autoplan.frameworks.transformers.rebuild import build_anew, copy_trainer, scale_loss, switch_on
from autoplan.planner.plan.key_tables import pick_table
from autoplan.planner.plan.loader import setting_of
from autoplan.planner.plan.prepare import check_training, refuse_other_training
from autoplan.planner.plan.trainer_arguments import loader_values, named_arguments, plan_values
from autoplan.planner.records.plan import PlanRecord
from autoplan.processes.compile_cache import use_own_cache
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.analysis.training_facts import read_groups
from autoplan.strategies.config import CUDAGRAPH_MODES, OPTIMIZER_FLAGS
from autoplan.strategies.techniques.attention import AttentionStrategy
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.techniques.batch_norm import BatchNormStrategy
from autoplan.strategies.workloads.batch import move_batch
from autoplan.strategies.workloads.carried import buffers_kept
from autoplan.strategies.workloads.devices import device_of
from autoplan.strategies.workloads.loops.schedules import plain_optimizer, same_schedule
from autoplan.strategies.workloads.optimizers import follow, rebuild, step_hooks
from autoplan.strategies.workloads.randomness import seeded
from autoplan.strategies.workloads.training_mode import own_checkpointing
from autoplan.strategies.workloads.workload import TrainingModule, Workload

COUNTS_ALL_RANKS = "average_tokens_across_devices"
"""The argument by which num_items_in_batch is that of all ranks."""


def apply_plan(plan: PlanRecord, trainer: Any, *parts: Any, changed_ok: bool = False, **settings: Any) -> Any:
    """The new Trainer; the docstring of Plan.apply_to says the parameters and errors."""
    if parts or settings:
        raise UsageError(
            f"a {type(trainer).__name__} was given, and {', '.join(settings) or 'parts of a training'} too",
            hint="Give the Trainer alone, which has all of them.",
        )
    workload = read_training(_of_one_process(trainer))
    if plan.workload.taken_from not in ("", workload.taken_from) and not changed_ok:
        raise PlanError(
            f"the plan is of a {plan.workload.taken_from}, and this is a {workload.taken_from}: another loss",
            hint="Search this one. To apply it all the same: apply_to(changed_ok=True).",
        )
    said = check_training(
        plan,
        changed_ok=changed_ok,
        model=trainer.model,
        loss=workload.loss,
        schedule=workload.build_schedule,
        make_batch=workload.make_batch,
    )
    _refuse_given_optimizer(plan, trainer)
    _refuse_world(plan, trainer)
    if not changed_ok:
        _refuse_other_global_batch(plan, trainer, workload)
    step, source = plan.config.optimizer_step, make_optimizer(trainer)
    optimizer = rebuild(source, {} if step == "own" else OPTIMIZER_FLAGS[step])
    if not changed_ok:
        refuse_other_training(plan, optimizer, trainer.model, workload=workload)
    refuse_other_batch_size(trainer, plan.config.micro_batch)
    divisor = _missing_divisor(plan, trainer, workload)
    on_ranks = plan.config.dp == plan.config.world_size > 1
    times = missing_factor(trainer, workload, divide=divisor == "items") if on_ranks else 1.0
    arguments, not_carried = _arguments(plan, trainer)  # from here on, accelerate has no state for the old Trainer
    not_carried += _prepare_model(plan, trainer, workload)
    switch_on(trainer.model, plan.config, plan.device)
    made = build_anew(trainer, arguments, optimizers=_optimizers(plan, trainer, optimizer))
    if made.optimizer is optimizer:  # with FSDP the Trainer makes its own
        follow(
            source if trainer.optimizer is None else plain_optimizer(trainer.optimizer), optimizer, "trainer.train()"
        )
        if trainer.lr_scheduler is not None:
            follow(trainer.lr_scheduler, made.lr_scheduler, "trainer.train()")
    said += _correct_loss(plan, made, workload, divisor, times)
    if plan.config.dp > 1 and getattr(trainer.args, COUNTS_ALL_RANKS, True) is False:
        said.append(
            f"{COUNTS_ALL_RANKS} is on: without it a step is a mean of the ranks' means, not that of one process"
        )
    said += [f"not carried by the Trainer: {text}" for text in not_carried]
    said += [*_other_steps(trainer, made), *_other_substeps(trainer, made)]
    for text in said:
        warnings.warn(text, stacklevel=3)
    return made


def _refuse_given_optimizer(plan: PlanRecord, trainer: Any) -> None:
    """Refuses shards for a Trainer that was given its optimizer or schedule: with FSDP it makes both itself."""
    if plan.config.dp_shard == 1:
        return
    given = []
    if trainer.optimizer is not None:
        alone = copy.copy(trainer)
        alone.optimizer = None
        mine, own = make_optimizer(trainer), make_optimizer(alone)
        hooks = [f" with the hook {name}" for name in step_hooks(mine)]
        if hooks or type(mine) is not type(own) or read_groups(mine, trainer.model) != read_groups(own, trainer.model):
            given.append(f"the optimizer {type(mine).__name__}{''.join(hooks)}")
    if trainer.lr_scheduler is not None and not getattr(trainer, "_created_lr_scheduler", False):
        given.append(f"the schedule {type(trainer.lr_scheduler).__name__}")
    if given:
        raise PlanError(
            f"the plan shards the model (dp_shard={plan.config.dp_shard}), and this {type(trainer).__name__} was given "
            f"{' and '.join(given)}; with FSDP a Trainer takes none, and would train with those of its arguments",
            hint="Make them in create_optimizer and create_scheduler of a subclass, and search that one without "
            "optimizers=. Or search with fix={'dp_shard': 1}.",
        )


def _refuse_world(plan: PlanRecord, trainer: Any) -> None:
    """Refuses a plan of another number of processes than this Trainer trains on, and a process with several GPUs."""
    here, wanted = int(trainer.args.world_size), plan.config.world_size
    several = (
        f"Start the script with torchrun --nproc-per-node {wanted}, load the plan there (autoplan.load_plan), and "
        "apply it."
    )
    if (gpus := int(trainer.args.n_gpu)) > 1:
        raise PlanError(
            f"this process sees {gpus} GPUs, and the Trainer would split each batch over them (DataParallel); a plan "
            "has one process for each GPU",
            hint=several if wanted > 1 else "Set CUDA_VISIBLE_DEVICES to one GPU before the script starts.",
        )
    if here != wanted:
        raise PlanError(
            f"the plan is for {wanted} process(es), and this {type(trainer).__name__} trains on {here}",
            hint=several if wanted > 1 else "Start the script without torchrun, or search with nproc=.",
        )


def _refuse_other_global_batch(plan: PlanRecord, trainer: Any, workload: Workload) -> None:
    """Refuses a Trainer of another global batch than that of the search.

    The search was one process. Under torchrun a script may keep its arguments, or divide them by the ranks.
    """
    wanted, found = plan.workload.global_batch, global_batch_of(trainer)
    if wanted in (workload.global_batch, found):
        return
    raise PlanError(
        f"the plan is for a global batch of {wanted}, and this {type(trainer).__name__} trains {found} samples a step "
        "(per_device_train_batch_size x gradient_accumulation_steps x processes)",
        hint=f"Make the Trainer with arguments that give {wanted}, or search again. To train with {wanted} all the "
        "same: apply_to(changed_ok=True).",
    )


def _of_one_process(trainer: Any) -> Any:
    """The Trainer as its parts are read: under torchrun, one process of several is as good as another."""
    if trainer.args.world_size == 1:
        return trainer
    alone = copy_trainer(trainer)
    alone.args.distributed_state = None
    return alone


def _optimizers(plan: PlanRecord, trainer: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The value for Trainer(optimizers=); with FSDP the Trainer makes the optimizer itself."""
    if plan.config.dp_shard > 1:
        return None, None
    return optimizer, None if trainer.lr_scheduler is None else same_schedule(trainer.lr_scheduler)(optimizer)


def _arguments(plan: PlanRecord, trainer: Any) -> tuple[Any, list[str]]:
    """The Trainer's arguments with the plan's values, and what they cannot express.

    Raises:
        PlanError: the plan has a layout that no argument says, or fp16 on a CPU.
    """
    keys = pick_table("transformers", importlib.metadata.version("transformers"))["keys"]
    config = plan.config
    accumulation = config.accumulation(plan.workload.global_batch)
    try:
        values, not_carried = plan_values(config, accumulation=accumulation, device=plan.device, keys=keys)
    except ExportError as error:
        raise PlanError(error.flag_message, hint=error.flag_hint) from error
    loading = loader_values(setting_of(plan))
    named = named_arguments(config, values | loading, keys)
    named |= {key: None for term, value in loading.items() if value is None and (key := keys.get(term)) is not None}
    fields = {field.name for field in dataclasses.fields(trainer.args) if field.init}
    for suffix in ("", "_kwargs"):
        new, old = f"activation_checkpointing{suffix}", f"gradient_checkpointing{suffix}"
        if new in named and old in fields:
            named[old] = named[new]
    named |= {"auto_find_batch_size": False, "deepspeed": None}
    if "accelerator_config" in fields:
        named["accelerator_config"] = own_accelerator_config(
            trainer.args.accelerator_config, named.get("accelerator_config", {})
        )
    if config.dp > 1:
        named[COUNTS_ALL_RANKS] = True
    if config.dp_shard == 1:
        named["fsdp"] = type(trainer.args.fsdp)() if trainer.args.fsdp else trainer.args.fsdp
    if not named.get("torch_compile"):
        named |= {"torch_compile_backend": None, "torch_compile_mode": None}
    left_out = [text for text in not_carried if not text.startswith("compile=block")]  # blocks are compiled in place
    arguments = dataclasses.replace(trainer.args, **{name: value for name, value in named.items() if name in fields})
    precision = config.precision if config.precision in ("bf16", "fp16") else "no"
    if hasattr(arguments, "mixed_precision"):  # taken from the environment, where `accelerate launch` leaves one
        arguments.mixed_precision = precision
    else:  # older ones leave theirs in the environment
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    return arguments, left_out


def own_accelerator_config(config: Any, values: dict[str, Any]) -> Any:
    """A copy of the accelerator_config of a Trainer's arguments, with the plan's values.

    A Trainer writes num_steps=1 into the one that it gets; none is made with that where gradients accumulate.

    Args:
        config: Not changed.
        values: The plan's gradient_accumulation_kwargs; may be empty.
    """
    own, name = copy.deepcopy(config), "gradient_accumulation_kwargs"
    options = {**(getattr(own, name) or {}), **values.get(name, {})}
    options.pop("num_steps", None)
    setattr(own, name, options or None)
    return own


def _missing_divisor(plan: PlanRecord, trainer: Any, workload: Workload) -> Literal["items", "accumulation"] | None:
    """What the new Trainer has to divide its loss by, where nothing does and several micro-batches make that matter.

    Raises:
        PlanError: a part of the loss is divided; or it has no items, and this version of transformers cannot divide it.
    """
    from transformers import Trainer

    accumulation = plan.config.accumulation(plan.workload.global_batch)
    if accumulation * plan.config.dp == 1:
        return None
    assert isinstance(workload.loss, TrainerLoss), "read_training makes it"
    with seeded(0), buffers_kept(trainer.model), as_one_process():
        batch = move_batch(workload.make_batch(2, 0), device_of(trainer.model))
        divided = workload.loss.divided(trainer.model, batch)
    whole = f"search with the micro-batch of a whole step: fix={{'micro_batch': {plan.workload.global_batch}}}."
    if divided == "part":
        raise PlanError(
            f"the loss of {type(trainer).__name__} divides only a part by num_items_in_batch, and a step of the plan "
            "adds the losses of several micro-batches: the other part would grow with them",
            hint=f"Divide all of it by num_items_in_batch in compute_loss, or {whole}",
        )
    if divided != "nothing":
        return None
    if workload.loss.has_items(batch):
        return "items"
    if accumulation == 1:  # DDP takes the mean over ranks
        return None
    if not hasattr(Trainer, "loss_is_scaled_for_ga"):
        raise PlanError(
            f"nothing divides the loss of {type(trainer).__name__}, which has no labels to count, and a step of the "
            f"plan adds the losses of {accumulation} micro-batches: its gradients would grow with them",
            hint=f"Update transformers: a newer Trainer can divide it (loss_is_scaled_for_ga). Or {whole}",
        )
    return "accumulation"


def _correct_loss(plan: PlanRecord, made: Any, workload: Workload, divisor: str | None, times: float) -> list[str]:
    """Has the new Trainer divide its loss and multiply it by what is missing; returns what is said of that.

    Args:
        plan: The plan.
        made: The new Trainer.
        workload: The training as it was read.
        divisor: See `_missing_divisor`.
        times: See `missing_factor`.
    """
    said = []
    accumulation = plan.config.accumulation(plan.workload.global_batch)
    if divisor == "items" or times != 1:
        scale_loss(made, divided=workload.loss if divisor == "items" else None, times=times)
    if divisor == "items":
        said.append(
            "the model's loss is a mean that does not divide by num_items_in_batch; the new Trainer divides it, so "
            f"that its {accumulation} micro-batches add up to the same loss"
        )
    elif divisor == "accumulation":
        made.loss_is_scaled_for_ga = False
        said.append(
            "the loss is a mean that nothing divides, without labels to count; the new Trainer divides it by its "
            f"{accumulation} micro-batches (loss_is_scaled_for_ga = False)"
        )
    if times != 1:
        said.append(
            f"on {plan.config.dp} ranks compute_loss of {type(made).__name__} makes gradients {1 / times:.3g} times "
            f"those of one process; the new Trainer multiplies the loss by {times:.3g}"
        )
    return said


def _prepare_model(plan: PlanRecord, trainer: Any, workload: Workload) -> list[str]:
    """Changes the model as the trials did, by the same techniques; returns what the Trainer cannot carry."""
    config, model = plan.config, trainer.model
    if config.compile != "off":
        use_own_cache()
    if config.batch_norm == "sync":
        model.train()  # as each step does: a BatchNorm in evaluation mode trains too
    build = Build(
        workload=workload,
        config=config,
        device=torch.device(plan.device),
        model=model,
        module=TrainingModule(model, workload.loss),
        structure=find_structure(model),
    )
    for strategy in (AttentionStrategy(), BatchNormStrategy()):
        strategy.apply(build)
    for module, flag in own_checkpointing(model):
        setattr(module, flag, False)  # from here on the arguments decide
    if config.compile != "off" and config.compile_mode in CUDAGRAPH_MODES:
        return [f"compile_mode={config.compile_mode} with accumulation: the Trainer does not mark where a step begins"]
    return []


def _other_steps(old: Any, new: Any) -> list[str]:
    """A sentence where the new Trainer takes another number of steps: the last step of an epoch may be cut."""
    before, now = steps_of_training(old), steps_of_training(new)
    if before == now:
        return []
    return [
        f"the new Trainer trains for {now} optimizer steps, the old one for {before}: the last step of an epoch is cut "
        "differently. max_steps in the arguments fixes it"
    ]


def _other_substeps(old: Any, new: Any) -> list[str]:
    """A sentence where callbacks are called for another number of micro-batches in a step than before; else none."""
    before, now = (int(one.args.gradient_accumulation_steps) for one in (old, new))
    called = [type(one) for one in new.callback_handler.callbacks]
    base = "transformers.trainer_callback"
    names = [kind.__name__ for kind in called if not kind.on_substep_end.__module__.startswith(base)]
    if before == now or not names:
        return []
    return [
        f"on_substep_end of {', '.join(names)} is called {now - 1} times in a step; the old Trainer did {before - 1}"
    ]
