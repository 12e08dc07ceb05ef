"""Optimizer and schedule of a workload as Python source, for the modules that go with other trainers' arguments.

In: what the workload trains with (`Plan.training`). Out: the lines of a function `make_optimizers(model)`, or the
reason why there are none.
"""

from __future__ import annotations

import pprint
import re

from autoplan.planner.export.base import is_python_name
from autoplan.planner.plan import Plan
from autoplan.strategies.analysis.training_facts import GroupFacts, ScheduleFacts, TrainingFacts
from autoplan.strategies.config import OPTIMIZER_FLAGS

ADAMW = "torch.optim.adamw.AdamW"


def training_of(plan: Plan) -> TrainingFacts | None:
    """What the plan's workload trains with; None: an earlier version wrote the plan, and it does not say.

    A plan without `training` says it of a language model, which trains with torch's AdamW.
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


def optimizer_source(
    plan: Plan, training: TrainingFacts, *, with_schedule: bool, clean_names: bool = False
) -> list[str]:
    """The function `make_optimizers(model)`, which returns the optimizer and the schedule; the module imports re.

    Args:
        plan: The plan.
        training: What its workload trains with, for which `why_not_made` says None.
        with_schedule: Make the schedule too; else None is returned in its place.
        clean_names: What wraps a module adds to its parameters' names; the module has `clean_name` to take it away.
    """
    flags = OPTIMIZER_FLAGS.get(plan.config.optimizer_step, {})
    groups = [(list(group.names), group.options | flags) for group in training.groups]
    name = "clean_name(name)" if clean_names else "name"
    lines = [
        "# The parameter groups: names (* for a number; all parameters where there is none), and options.",
        *f"GROUPS = {pprint.pformat(groups, width=110, compact=True, sort_dicts=False)}".splitlines(),
        "",
        "",
        "def make_optimizers(model):",
        '    """Optimizer and schedule (or None) as the workload has them."""',
        f"    trained = {{{name}: p for name, p in model.named_parameters() if p.requires_grad}}",
        "    groups, left = [], dict(trained)",
        "    for patterns, options in GROUPS:",
        '        names = [n for n in left if not patterns or n in patterns or re.sub(r"\\d+", "*", n) in patterns]',
        '        groups.append({"params": [left.pop(name) for name in names], **options})',
        "    if left:",
        '        raise ValueError(f"the plan has no parameter group for {sorted(left)}: the model is another one")',
        f"    optimizer = torch.optim.{last_part(training.optimizer)}(groups)",
    ]
    schedule = training.schedule
    if not with_schedule or schedule is None:
        return [*lines, "    return optimizer, None"]
    assert schedule.options is not None, "why_not_made refuses a schedule without"
    arguments = ", ".join(f"{key}={value!r}" for key, value in schedule.options.items())
    if schedule.function is None:
        made = f"torch.optim.lr_scheduler.{last_part(schedule.kind)}(optimizer, {arguments})"
        return [*lines, f"    return optimizer, {made}"]
    return [
        *lines,
        "    import functools",
        "",
        "    from transformers import optimization",
        "",
        f"    rate = functools.partial(optimization.{schedule.function}, {arguments})",
        "    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)",
    ]


def last_part(kind: str) -> str:
    """The name of a class without its module."""
    return kind.rpartition(".")[2]
