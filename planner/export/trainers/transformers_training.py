"""What the workload trains with, as TrainingArguments and, where those cannot say it, as source that makes it.

In: a plan (its `training`). Out: argument values by term, sentences on what is not carried, and the function
`make_optimizers(model)` of the companion, for what the Trainer's own optimizer and schedule do not do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from autoplan.planner.export.training import ADAMW, last_part, optimizer_settings, training_of, why_not_made
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.analysis.training_facts import ScheduleFacts, TrainingFacts

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
    """Argument values by term, sentences on what is not carried, and the constants of `make_optimizers(model)` in the
    companion, where the Trainer's own optimizer and schedule will not do."""

    values: dict[str, Any]
    not_carried: list[str]
    optimizers: dict[str, Any]


def trained_parts(plan: Plan) -> TrainedParts:
    """What the plan's workload trains with, for the Trainer."""
    training = training_of(plan)
    if training is None:
        return TrainedParts({}, [_UNKNOWN], {})
    values: dict[str, Any] = {"max_grad_norm": training.max_grad_norm or 0.0, "seed": training.seed}
    not_carried: list[str] = []
    values |= _optimizer_values(plan, training)
    schedule = _schedule_values(training.schedule)
    values |= schedule or {"schedule": "constant"}
    optimizer_fits = _trainer_makes_it(plan, training)
    if optimizer_fits and schedule is not None:
        return TrainedParts(values, _step_form(plan), {})
    reason = why_not_made(training)
    if reason is None and plan.config.dp_shard > 1:
        reason = "the Trainer takes no optimizer together with FSDP"
    if reason is not None:
        not_carried += _handed_in_by_the_user(training, reason, optimizer_fits, schedule is not None)
        return TrainedParts(values, not_carried, {})
    what = [] if optimizer_fits else [_what_differs(training)]
    if schedule is None and training.schedule is not None:
        what.append(f"the schedule {last_part(training.schedule.kind)}")
    not_carried.append(f"{' and '.join(what)}, by the arguments alone: the companion's make_optimizers(model) makes it")
    return TrainedParts(values, not_carried, optimizer_settings(plan, training, with_schedule=schedule is None))


_UNKNOWN = (
    "optimizer, learning rate, weight decay, schedule, clipping and seed of the workload, which this plan does not "
    "know: the Trainer would use its own (AdamW, 5e-5, linear to zero, clipping at 1.0). Search again, or set them all"
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
        return f"the optimizer {last_part(training.optimizer)}"
    if len(training.groups) > 1:
        return f"the {len(training.groups)} parameter groups of the optimizer"
    if training.main_group.options.get("weight_decay"):
        return "weight decay on every parameter (the Trainer leaves biases and norms out of it)"
    return f"the options of the optimizer {last_part(training.optimizer)}"


def _step_form(plan: Plan) -> list[str]:
    step = plan.config.optimizer_step
    if step == "for_loop" and plan.device == "cuda":
        return ["optimizer_step=for_loop: adamw_torch takes torch's default on CUDA, which is foreach"]
    if step == "foreach" and plan.device == "cpu":
        return ["optimizer_step=foreach: adamw_torch takes torch's default on a CPU, which is the for-loop"]
    return []


def _handed_in_by_the_user(
    training: TrainingFacts, reason: str, optimizer_fits: bool, schedule_fits: bool
) -> list[str]:
    found = []
    if not optimizer_fits:
        found.append(f"{_what_differs(training)}, because {reason}: hand it to Trainer(optimizers=...)")
    if not schedule_fits and training.schedule is not None:
        rates = ", ".join(f"{max(rates):.6g}" for rates in training.schedule.learning_rates[:4])
        found.append(
            f"the schedule {last_part(training.schedule.kind)}, because {reason}: the arguments say constant; its "
            f"first learning rates are {rates}; hand your own to Trainer(optimizers=(optimizer, schedule))"
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
