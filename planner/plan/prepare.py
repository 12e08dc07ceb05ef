"""Applies a plan: builds the training run that was measured, on the user's own model, data and optimizer.

run = plan.prepare(model, optimizer)          # a causal language model of transformers: its own loss
run = plan.prepare(make_model, make_optimizer, loss, schedule=make_schedule, max_grad_norm=1.0)
for batch in loader:                          # run.local_batch samples each
    result = run.step(batch)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import DeviceError, PlanError, WorkloadError
from autoplan.planner.plan.hardware import found_elsewhere
from autoplan.planner.plan.parts import AS_SEARCHED, Parts, make_workload, refuse_unverified
from autoplan.planner.records.plan import PlanRecord
from autoplan.planner.records.trust import TRAINING_CODE, own_workload, refuse_odd_file

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.spec import WorkloadSpec
    from autoplan.strategies.workloads.workload import Workload

PARTS = ("model", "weights", "loss", "optimizer", "schedule", "data", "environment")
"""The parts of `WorkloadSpec.sources` that objects are compared with."""

SHOWN = 4
"""How many changed pieces are named."""

USE_ALL_THE_SAME = "Search again: autoplan search. To use it all the same: prepare(changed_ok=True), --changed-ok."


def prepare_plan(
    plan: PlanRecord,
    parts: Parts,
    *,
    device: str | torch.device | None = None,
    global_batch: int | None = None,
    workload: str | Path | Workload | None = None,
    read: Mapping[str, Any] | None = None,
) -> TrainingRun:
    """The training run of a plan: what `Plan.prepare` calls; its docstring says parameters and errors.

    The answers to `unverified_ok` and `changed_ok` come with the plan. `read` has fields of the workload that no part
    is, as they were read from a loop.
    """
    import torch
    from torch import nn

    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.optimizers import follow, trainable
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
        plan = plan.model_copy(update={"workload": own_workload(plan.workload, plan.study, str(workload))})
    given = {name: getattr(parts, name) for name in ("model", "loss", "optimizer", "schedule", "make_batch")}
    given = {name: None if value is AS_SEARCHED else value for name, value in given.items()}
    if whole is not None:
        fields = {"model": "build_model", "optimizer": "build_optimizer", "schedule": "build_schedule"}
        all_parts = {name: getattr(whole, fields.get(name, name)) for name in given}
        given = all_parts | {name: part for name, part in given.items() if part is not None}
    target = _pick_device(plan, device)
    for text in check_training(plan, changed_ok=plan.changed_ok, device=target.type, **given):
        warnings.warn(text, stacklevel=3)
    instance = parts.optimizer if isinstance(parts.optimizer, torch.optim.Optimizer) else None
    _refuse_hooks_on_shards(plan, instance)
    made = make_workload(plan, parts, named=is_named, searched=whole)
    named = {name: part for name in ("head", "count") if (part := getattr(parts, name)) is not None}
    made = dataclasses.replace(made, **named, **(read or {}))
    if plan.workload.find_unused_parameters:
        made = dataclasses.replace(made, find_unused_parameters=True)
    own = parts.model if isinstance(parts.model, nn.Module) else None
    if own is not None and not plan.changed_ok:  # before anything is changed in place
        refuse_other_training(plan, made.build_optimizer(trainable(own)), own, workload=made if read else None)
    run = prepare(made, plan.config, device=target, model=own)
    if own is None and not plan.changed_ok:  # with an optimizer that no schedule has changed
        refuse_other_training(plan, made.build_optimizer(trainable(run.model)), run.model)
    if instance is not None:
        state = {one: values for one, values in instance.state.items() if getattr(one, "requires_grad", True)}
        if state:  # of a parameter that is frozen now there is none to carry
            _give_state(run.optimizer, state, target, on_ranks=run.mesh is not None)
        follow(instance, run.optimizer, "run.step(batch)")
    if run.said is not None:
        warnings.warn(run.said, stacklevel=3)
    return run


def draws_kept(plan: PlanRecord, *, on_ranks: bool = False) -> contextlib.AbstractContextManager[None]:
    """Puts the random generators back afterwards, so that the user's program draws what it drew without a plan.

    On several ranks they stay as the run has seeded them, each rank otherwise, so that no two draw the same masks.

    Args:
        plan: The plan.
        on_ranks: Put them back on several ranks too: a trainer of a framework seeds its ranks itself.
    """
    from autoplan.strategies.workloads.randomness import generators_kept

    if plan.config.world_size > 1 and not on_ranks:
        return contextlib.nullcontext()
    return generators_kept(cuda=plan.device == "cuda")


def check_before_use(plan: PlanRecord, *, changed_ok: bool, checks_parity: bool = True) -> str | None:
    """Checks a plan before it meets code, for every verb: prepare, run, verify and export. Reads files; runs none.

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
            hint=USE_ALL_THE_SAME,
        )
    if checks_parity and not plan.parity.passed and not changed_ok and unverified is None:
        raise PlanError(
            "the plan failed its parity check: it does not train the same thing",
            hint=USE_ALL_THE_SAME,
        )
    threads, cores = plan.config.threads or 1, plan.hardware.host.cores_logical or plan.hardware.host.cores_usable
    if threads > max(cores, os.cpu_count() or 1) and not changed_ok:
        raise PlanError(
            f"the plan has {threads} threads per rank; it is of a machine with {cores} cores, and this one has "
            f"{os.cpu_count()}",
            hint=USE_ALL_THE_SAME,
        )
    refuse_odd_file(plan.workload)
    said = (unverified, refuse_changed_code(plan.workload, changed_ok=changed_ok))
    return "; ".join(text for text in said if text) or None


def check_training(plan: PlanRecord, *, changed_ok: bool, device: str | None = None, **parts: Any) -> list[str]:
    """Checks a plan before it meets a training that was read.

    Args:
        plan: The plan.
        changed_ok: Use it although it, or the training code, changed.
        device: The kind that it runs on; None: the plan's own.
        parts: model, loss, schedule, make_batch: see `refuse_changed_parts`.

    Returns:
        What is to be said, in sentences; also where this is another machine.

    Raises:
        PlanError: see `check_before_use`; or the training is not that of the search.
    """
    said = [check_before_use(plan, changed_ok=changed_ok)]
    said.append(refuse_changed_parts(plan.workload, changed_ok=changed_ok, **parts))
    said.append(found_elsewhere(plan, device))
    return [text for text in said if text is not None]


def refuse_changed_parts(spec: WorkloadSpec, *, changed_ok: bool, **parts: Any) -> str | None:
    """Compares the parts that `plan.prepare` was given with those of the search.

    Args:
        spec: The plan's workload.
        changed_ok: Changed training code is a warning.
        parts: model, loss, optimizer, schedule, make_batch; None: not given.

    Returns:
        What else changed, in words; None: nothing that is known of.

    Raises:
        PlanError: the code or the values of the model, loss, optimizer or schedule are others than in the search.
    """
    if not spec.sources.keys() & {*PARTS}:
        return None
    from autoplan.strategies.workloads.fingerprint import TRAINING_PARTS, changed_names, fingerprints

    found = {
        part: changed_names(spec.sources[part], now)
        for part, now in fingerprints(**parts).items()
        if part in spec.sources
    }
    code = [name for part in TRAINING_PARTS for name in found.get(part, ())]
    other = [f"{name} (data)" for name in found.get("data", ())] + found.get("weights", [])
    for name in found.get("environment", ()):
        (other if name.startswith("$") else code).append(name)
    if code and not changed_ok:
        raise PlanError(
            f"{_named(code)} {'is' if len(code) == 1 else 'are'} not what the search had: it trains something else",
            hint=USE_ALL_THE_SAME,
        )
    if not code and not other:
        return None
    return f"changed since the plan was found: {_named(code + other)}"


def refuse_changed_code(spec: WorkloadSpec, *, changed_ok: bool, hint: str = USE_ALL_THE_SAME) -> str | None:
    """Refuses a workload whose code is not that of the search; returns what else changed, in words.

    Args:
        spec: Of the plan, with its digests.
        changed_ok: Changed code is said, not refused.
        hint: What to do where it is refused.

    Raises:
        PlanError: the code changed, and that was not allowed.
    """
    from autoplan.strategies.workloads.sources import changed_parts, changed_pieces

    changed = changed_parts(spec)
    pieces = f" ({_named(found)})" if changed and (found := changed_pieces(spec)) else ""
    code = [part for part in changed if part in TRAINING_CODE]
    if code and not changed_ok:
        raise PlanError(
            f"the {' and '.join(code)} of {spec.reference} changed since the plan was found{pieces}: it trains "
            "something else",
            hint=hint,
        )
    if not changed:
        return None
    return f"changed since the plan was found: {', '.join(changed)} of {spec.name}{pieces}"


def _named(pieces: list[str]) -> str:
    more = f" and {len(pieces) - SHOWN} more" if len(pieces) > SHOWN else ""
    return ", ".join(pieces[:SHOWN]) + more


def refuse_other_training(
    plan: PlanRecord, optimizer: torch.optim.Optimizer, model: nn.Module, *, workload: Workload | None = None
) -> None:
    """Refuses a training whose optimizer, clipping or schedule is not that of the search; warns of dropout and seed.

    Args:
        plan: The plan.
        optimizer: As it would train.
        model: Its model.
        workload: The training as it was read from a loop, a module or a Trainer. None: the parts were given one by
            one, and clipping and schedule are what the user said.

    Raises:
        PlanError: the optimizer has another class, other groups, or other values in them; gradients are clipped
            otherwise; or the schedule gives other rates.
    """
    from autoplan.strategies.analysis.training_facts import (
        dropout_rates,
        optimizer_differences,
        read_schedule,
        schedule_difference,
    )
    from autoplan.strategies.workloads.optimizers import trainable

    then = plan.training
    if then is None:
        return
    found = [f"the optimizer is not that of the search: {text}" for text in optimizer_differences(then, optimizer)[:4]]
    if workload is not None:
        if len(set(norms := (workload.max_grad_norm, then.max_grad_norm))) > 1:
            here, was = (f"clipped to a norm of {norm:g}" if norm else "not clipped" for norm in norms)
            found.append(f"gradients are {here} (max_grad_norm), and in the search they were {was}")
        schedule = read_schedule(workload, workload.build_optimizer(trainable(model)))
        found += schedule_difference(then.schedule, schedule)
    if found:
        raise PlanError(
            "; ".join(found),
            hint="Give optimizer, max_grad_norm= and schedule= (with schedule_interval=) as the search had them, or "
            "search again. To train with these on purpose: changed_ok=True.",
        )
    rates = dropout_rates(model)
    if plan.config.pp == 1 and rates != then.dropout:
        text = f"the model has dropout rates {rates or 'of 0'}; the search had {then.dropout or '0'}"
        warnings.warn(text, stacklevel=4)
    if workload is not None and workload.seed != then.seed:
        warnings.warn(f"the seed is {workload.seed}; the search had {then.seed}: other orders and masks", stacklevel=4)


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


def _refuse_hooks_on_shards(plan: PlanRecord, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuses hooks on the step of an optimizer whose parameters a plan spreads over ranks: they know the whole ones.

    Raises:
        PlanError: there are some.
    """
    from autoplan.strategies.workloads.optimizers import step_hooks

    names = [] if optimizer is None else step_hooks(optimizer)
    if names and plan.config.dp_shard * plan.config.tp * plan.config.pp > 1:
        raise PlanError(
            f"the optimizer has hooks on its step ({', '.join(names)}), and the plan spreads over ranks the parameters "
            "that they know",
            hint="Hand in a function that makes the optimizer from parameters, with its hooks. Or search with "
            "fix={'dp_shard': 1, 'tp': 1, 'pp': 1}.",
        )


def _give_state(
    optimizer: torch.optim.Optimizer, state: dict[Any, Any], device: torch.device, *, on_ranks: bool = False
) -> None:
    """Carries the state of the user's optimizer over to the one of the run; the parameters are the same objects.

    Raises:
        WorkloadError: they are not (sharded or split over ranks): the state would be lost in silence.
    """
    import torch

    from autoplan.strategies.state import place_steps

    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) not in known for parameter in state):
        why = "the plan spreads its parameters over ranks" if on_ranks else "not all that it stepped is trained here"
        raise WorkloadError(
            f"the optimizer has stepped already, and {why}",
            hint="Hand in a fresh optimizer and restore with run.load_state_dict(), which knows the layout.",
        )
    for parameter, values in state.items():
        moves = (name for name, value in values.items() if name != "step" and isinstance(value, torch.Tensor))
        optimizer.state[parameter] = values | {name: values[name].to(device) for name in moves}
    place_steps(optimizer)
