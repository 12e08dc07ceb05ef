"""What the workload trains with, as TrainingArguments and, where those cannot say it, as source that makes it.

In: a plan (its `training`). Out: argument values by term, sentences on what is not carried, and the function
`make_optimizers(model)` of the companion, for what the Trainer's own optimizer and schedule do not do.
"""

from __future__ import annotations

import pprint
import re
from typing import Any, NamedTuple

from autoplan.planner.export.base import is_python_name
from autoplan.planner.plan import Plan
from autoplan.strategies.analysis.training_facts import GroupFacts, ScheduleFacts, TrainingFacts
from autoplan.strategies.config import OPTIMIZER_FLAGS

ADAMW = "torch.optim.adamw.AdamW"

# Optimizers that the Trainer makes: its name for them, the options that it takes, and options that it leaves at these.
# From trainer_optimizer.py of transformers 5.23: `_get_adamw_torch`, `_get_sgd`, `_get_adagrad`, `_get_rmsprop`.
_TRAINERS_OWN: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    ADAMW: ("adamw_torch", (), {"amsgrad": False, "maximize": False}),
    "torch.optim.sgd.SGD": ("sgd", ("momentum", "dampening", "nesterov"), {"maximize": False}),
    "torch.optim.adagrad.Adagrad": (
        "adagrad",
        ("lr_decay", "eps"),
        {"maximize": False, "initial_accumulator_value": 0},
    ),
    "torch.optim.rmsprop.RMSprop": ("rmsprop", ("momentum", "alpha", "eps", "centered"), {"maximize": False}),
}

# The functions of transformers.optimization behind the names of schedules that need nothing but steps.
_TRAINERS_SCHEDULES = {
    "_get_constant_lambda": "constant",
    "_get_constant_schedule_with_warmup_lr_lambda": "constant_with_warmup",
    "_get_linear_schedule_with_warmup_lr_lambda": "linear",
    "_get_cosine_schedule_with_warmup_lr_lambda": "cosine",
}
_SCHEDULE_DEFAULTS = {"num_cycles": 0.5, "min_lr_rate": 0.0}


class TrainedParts(NamedTuple):
    """Argument values by term, sentences on what is not carried, and lines of source for the companion."""

    values: dict[str, Any]
    not_carried: list[str]
    source: list[str]


def trained_parts(plan: Plan) -> TrainedParts:
    """What the plan's workload trains with, for the Trainer."""
    training = plan.training or _of_options(plan)
    if training is None:
        return TrainedParts({}, [_UNKNOWN], [])
    values: dict[str, Any] = {"max_grad_norm": training.max_grad_norm or 0.0, "seed": training.seed}
    not_carried: list[str] = []
    values |= _optimizer_values(plan, training)
    schedule = _schedule_values(training.schedule)
    values |= schedule or {"schedule": "constant"}
    optimizer_fits = _trainer_makes_it(plan, training)
    if optimizer_fits and schedule is not None:
        return TrainedParts(values, _step_form(plan), [])
    reason = _why_not_made(plan, training)
    if reason is not None:
        not_carried += _handed_in_by_the_user(training, reason, optimizer_fits, schedule is not None)
        return TrainedParts(values, not_carried, [])
    what = [] if optimizer_fits else [_what_differs(training)]
    what += (
        [] if schedule is not None or training.schedule is None else [f"the schedule {_last(training.schedule.kind)}"]
    )
    not_carried.append(f"{' and '.join(what)}, by the arguments alone: the companion's make_optimizers(model) makes it")
    return TrainedParts(values, not_carried, _source(plan, training, with_schedule=schedule is None))


_UNKNOWN = (
    "optimizer, learning rate, weight decay, schedule, clipping and seed of the workload, which this plan does not "
    "know: the Trainer would use its own (AdamW, 5e-5, linear to zero, clipping at 1.0). Search again, or set them all"
)


def _of_options(plan: Plan) -> TrainingFacts | None:
    """What a plan without `training` says of a language model, which trains with torch's AdamW."""
    from autoplan.strategies.workloads.registry import DEFAULT_OPTIONS

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


def _optimizer_values(plan: Plan, training: TrainingFacts) -> dict[str, Any]:
    """The arguments of the optimizer, as far as there are any; of the largest group."""
    options = training.main_group.options
    values: dict[str, Any] = {"learning_rate": options.get("lr"), "weight_decay": options.get("weight_decay")}
    if training.optimizer not in _TRAINERS_OWN:
        return values
    name, taken, _ = _TRAINERS_OWN[training.optimizer]
    if training.optimizer == ADAMW:
        name += "_fused" if plan.config.optimizer_step == "fused" else ""
        betas = options.get("betas", [None, None])
        values |= {"beta1": betas[0], "beta2": betas[1], "epsilon": options.get("eps")}
    given = {key: options[key] for key in taken if key in options}
    if given:
        values["optimizer_options"] = ",".join(f"{key}={value}" for key, value in given.items())
    return values | {"optimizer": name}


def _trainer_makes_it(plan: Plan, training: TrainingFacts) -> bool:
    """Whether the Trainer's own optimizer is the workload's.

    The Trainer makes two groups, with the weight decay and, for biases and norms, without.
    """
    if training.optimizer not in _TRAINERS_OWN or len(training.groups) > 1:
        return False
    group = training.main_group
    _, _, needed = _TRAINERS_OWN[training.optimizer]
    return (
        not group.unread
        and not group.options.get("weight_decay")
        and all(group.options.get(key, value) == value for key, value in needed.items())
        and (training.optimizer == ADAMW or plan.config.optimizer_step == "own")
    )


def _what_differs(training: TrainingFacts) -> str:
    if training.optimizer not in _TRAINERS_OWN:
        return f"the optimizer {_last(training.optimizer)}"
    if len(training.groups) > 1:
        return f"the {len(training.groups)} parameter groups of the optimizer"
    if training.main_group.options.get("weight_decay"):
        return "weight decay on every parameter (the Trainer leaves biases and norms out of it)"
    return f"the options of the optimizer {_last(training.optimizer)}"


def _step_form(plan: Plan) -> list[str]:
    step = plan.config.optimizer_step
    if step == "for_loop" and plan.device == "cuda":
        return ["optimizer_step=for_loop: adamw_torch takes torch's default on CUDA, which is foreach"]
    if step == "foreach" and plan.device == "cpu":
        return ["optimizer_step=foreach: adamw_torch takes torch's default on a CPU, which is the for-loop"]
    return []


def _why_not_made(plan: Plan, training: TrainingFacts) -> str | None:
    """Why the companion cannot make the optimizer and schedule; None: it can."""
    if not training.optimizer.startswith("torch.optim.") or not is_python_name(training.optimizer, dotted=True):
        return f"the class {training.optimizer} is not torch's"
    unread = sorted({key for group in training.groups for key in group.unread})
    if unread:
        return f"its options {', '.join(unread)} are no plain values"
    if any("?" in group.names for group in training.groups):
        return "its groups have parameters that are not the model's"
    if training.schedule is not None and training.schedule.options is None:
        return f"of the schedule {_last(training.schedule.kind)}, {training.schedule.reason}"
    if training.schedule is not None and not _is_known_schedule(training.schedule):
        return f"the schedule {_last(training.schedule.kind)} is not torch's, nor one of transformers"
    if plan.config.dp_shard > 1:
        return "the Trainer takes no optimizer together with FSDP"
    return None


def _is_known_schedule(schedule: ScheduleFacts) -> bool:
    """Whether the names of a schedule may stand in the companion's source, where they are called."""
    if not all(is_python_name(name) for name in schedule.options or {}):
        return False
    if schedule.function is not None:  # of transformers.optimization
        return is_python_name(schedule.function) and re.fullmatch(r"_get_\w+_lambda", schedule.function) is not None
    kind = schedule.kind
    return is_python_name(kind, dotted=True) and re.fullmatch(r"torch\.optim\.lr_scheduler\.[A-Z]\w*", kind) is not None


def _handed_in_by_the_user(
    training: TrainingFacts, reason: str, optimizer_fits: bool, schedule_fits: bool
) -> list[str]:
    found = []
    if not optimizer_fits:
        found.append(f"{_what_differs(training)}, because {reason}: hand it to Trainer(optimizers=...)")
    if not schedule_fits and training.schedule is not None:
        rates = ", ".join(f"{max(rates):.6g}" for rates in training.schedule.learning_rates[:4])
        found.append(
            f"the schedule {_last(training.schedule.kind)}, because {reason}: the arguments say constant; its first "
            f"learning rates are {rates}; hand your own to Trainer(optimizers=(optimizer, schedule))"
        )
    return found


def _schedule_values(schedule: ScheduleFacts | None) -> dict[str, Any] | None:
    """The arguments that say the schedule; None: there are none for it."""
    if schedule is None:
        return {"schedule": "constant"}
    name = _TRAINERS_SCHEDULES.get(schedule.function or "")
    if name is None or schedule.options is None:
        return None
    options = {key: value for key, value in schedule.options.items() if _SCHEDULE_DEFAULTS.get(key, not value) != value}
    warmup, steps = options.pop("num_warmup_steps", 0), options.pop("num_training_steps", None)
    if options or not (isinstance(warmup, int) and isinstance(steps, int | None)):
        return None
    values: dict[str, Any] = {"schedule": name}
    values |= {"warmup_steps": warmup} if warmup else {}
    return values | ({} if steps is None else {"max_steps": steps})


def _source(plan: Plan, training: TrainingFacts, *, with_schedule: bool) -> list[str]:
    """The function of the companion that makes the optimizer and, where no argument says it, the schedule."""
    flags = OPTIMIZER_FLAGS.get(plan.config.optimizer_step, {})
    groups = [(list(group.names), group.options | flags) for group in training.groups]
    lines = [
        "# The parameter groups: names (* for a number; all parameters where there is none), and options.",
        *f"GROUPS = {pprint.pformat(groups, width=110, compact=True, sort_dicts=False)}".splitlines(),
        "",
        "",
        "def make_optimizers(model):",
        '    """Optimizer and schedule as the workload has them, for Trainer(optimizers=...)."""',
        "    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}",
        "    groups, left = [], dict(trained)",
        "    for patterns, options in GROUPS:",
        '        names = [n for n in left if not patterns or n in patterns or re.sub(r"\\d+", "*", n) in patterns]',
        '        groups.append({"params": [left.pop(name) for name in names], **options})',
        "    if left:",
        '        raise ValueError(f"the plan has no parameter group for {sorted(left)}: the model is another one")',
        f"    optimizer = torch.optim.{_last(training.optimizer)}(groups)",
    ]
    schedule = training.schedule
    if not with_schedule or schedule is None:
        return [*lines, "    return optimizer, None"]
    assert schedule.options is not None, "_why_not_made refuses a schedule without"
    arguments = ", ".join(f"{key}={value!r}" for key, value in schedule.options.items())
    if schedule.function is None:
        made = f"torch.optim.lr_scheduler.{_last(schedule.kind)}(optimizer, {arguments})"
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


def _last(kind: str) -> str:
    return kind.rpartition(".")[2]
