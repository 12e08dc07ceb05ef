"""The training facts of a plan's workload, for the modules that go with other trainers' arguments.

In: a plan (`Plan.training`). Out: the constants of `make_optimizers(model)`, or the reason why there are none, and
sentences for the head of a file.
"""

from __future__ import annotations

import re
from typing import Any

from autoplan.planner.export.base import is_python_name
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.analysis.training_facts import GroupFacts, ScheduleFacts, TrainingFacts
from autoplan.strategies.config import OPTIMIZER_FLAGS

ADAMW = "torch.optim.adamw.AdamW"


def training_of(plan: Plan) -> TrainingFacts | None:
    """The training facts of the plan's workload; None: an earlier version wrote the plan, and it does not say.

    If a plan has no `training`, they are known for a language model alone, which trains with torch's AdamW.
    """
    from autoplan.strategies.workloads.registry import DEFAULT_OPTIONS

    if plan.training is not None:
        return plan.training
    if plan.workload.kind in ("function", "object"):
        return None
    options = DEFAULT_OPTIONS | plan.workload.options
    norm = options["max_grad_norm"]
    group = GroupFacts(
        tensors=0,
        elements=0,
        options={
            "lr": float(options["learning_rate"]),
            "weight_decay": float(options["weight_decay"]),
            "betas": [0.9, 0.999],
            "eps": 1e-8,
        },
    )
    return TrainingFacts(
        optimizer=ADAMW,
        groups=(group,),
        max_grad_norm=None if norm is None else float(norm),
        schedule=None,
        seed=int(options["seed"]),
    )


def why_not_made(training: TrainingFacts) -> str | None:
    """Why source cannot make the optimizer and the schedule of a workload; None: it can."""
    if not training.optimizer.startswith("torch.optim.") or not is_python_name(training.optimizer, dotted=True):
        return f"the class {training.optimizer} is not torch's"
    unread = sorted({key for group in training.groups for key in group.unread})
    if unread:
        return f"its options {', '.join(unread)} are no plain values"
    if any("?" in group.names for group in training.groups):
        return "its groups have parameters that are not the model's"
    if training.schedule is not None and training.schedule.options is None:
        return f"of the schedule {last_part(training.schedule.kind)}, {training.schedule.reason}"
    if training.schedule is not None and not _is_known_schedule(training.schedule):
        return f"the schedule {last_part(training.schedule.kind)} is not torch's, nor one of transformers"
    return None


def _is_known_schedule(schedule: ScheduleFacts) -> bool:
    """Whether the names of a schedule may stand in the companion's source, where they are called."""
    if not all(is_python_name(name) for name in schedule.options or {}):
        return False
    if schedule.function is not None:  # of transformers.optimization
        return is_python_name(schedule.function) and re.fullmatch(r"_get_\w+_lambda", schedule.function) is not None
    kind = schedule.kind
    return is_python_name(kind, dotted=True) and re.fullmatch(r"torch\.optim\.lr_scheduler\.[A-Z]\w*", kind) is not None


def optimizer_settings(plan: Plan, training: TrainingFacts, *, with_schedule: bool) -> dict[str, Any]:
    """The constants of the kit's `make_optimizers(model)`.

    Args:
        plan: The plan.
        training: What its workload trains with, for which `why_not_made` says None.
        with_schedule: Of the schedule too; else None is made in its place.
    """
    flags = OPTIMIZER_FLAGS.get(plan.config.optimizer_step, {})
    values: dict[str, Any] = {
        "MAKES_OPTIMIZERS": True,
        "GROUPS": [(list(group.names), group.options | flags) for group in training.groups],
        "OPTIMIZER": last_part(training.optimizer),
    }
    schedule = training.schedule
    if not with_schedule or schedule is None:
        return values
    assert schedule.options is not None, "why_not_made refuses a schedule without"
    values["SCHEDULE_OPTIONS"] = dict(schedule.options)
    if schedule.function is None:
        return values | {"SCHEDULE": last_part(schedule.kind)}
    return values | {"SCHEDULE_FUNCTION": schedule.function}


def training_not_carried(plan: Plan, whose: str) -> list[str]:
    """Sentences on what of the workload's training the module for one's own loop does not say.

    Args:
        plan: The plan.
        whose: Where optimizer and schedule then are, as in "they are your loop's own".
    """
    training = training_of(plan)
    if training is None:
        return [
            "optimizer, learning rate, weight decay, schedule, clipping and seed of the workload, which this plan does "
            f"not know: they are {whose} own. Search again to have them in the plan"
        ]
    found = []
    reason = why_not_made(training)
    if reason is not None:
        rates = ""
        if training.schedule is not None:
            first = ", ".join(f"{max(step):.6g}" for step in training.schedule.learning_rates[:4])
            rates = f"; the first learning rates of the schedule are {first}"
        found.append(
            f"the optimizer {last_part(training.optimizer)} and its schedule, because {reason}: make your own{rates}"
        )
    if training.dropout:
        found.append("the random numbers of dropout: the rates are the model's, the masks are drawn anew")
    return found


def training_lines(plan: Plan) -> list[str]:
    """Lines on how the workload trains, for the head of a file."""
    training = training_of(plan)
    if training is None:
        return []
    groups = ", ".join(f"{group.options.get('weight_decay', 0)}" for group in training.groups)
    clipping = "none" if training.max_grad_norm is None else f"norm {training.max_grad_norm}"
    schedule = "none" if training.schedule is None else last_part(training.schedule.kind)
    dropout = ", ".join(f"{rate} in {count} modules" for rate, count in training.dropout.items()) or "none"
    return [
        f"Trains with: {last_part(training.optimizer)}, weight decay by parameter group {groups}; clipping {clipping}; "
        f"schedule {schedule}; seed {training.seed}; dropout {dropout}.",
        "Parameters keep the dtype that your model has, which are the masters: give it in fp32, as the plan was "
        "measured, unless the workload's own is another (from_pretrained of transformers 5 takes the file's dtype; "
        "say dtype=torch.float32).",
    ]


def last_part(kind: str) -> str:
    """The name of a class without its module."""
    return kind.rpartition(".")[2]
