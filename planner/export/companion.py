"""The Python modules of the exports: the constants of a plan and of its workload's training, their text, the check.

In: a plan, and what of the kit a target takes. Out: values of the kit's constants (planner/export/kit/settings.py),
the source of a module, and sentences on what it does not say. The targets for other trainers write such a module beside
what the tool itself reads.
"""

from __future__ import annotations

import ast
import pprint
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.export.base import CODING, comment, is_python_name, provenance_lines, same_or_error
from autoplan.planner.export.bundle import Bundle
from autoplan.planner.export.kit import settings
from autoplan.planner.plan.loader import setting_of
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.analysis.training_facts import ScheduleFacts, TrainingFacts
from autoplan.strategies.config import (
    ATTENTION_BACKENDS,
    CHECKPOINT_EVERY,
    CUDAGRAPH_MODES,
    LEFT_BY_TOOLS,
    OPTIMIZER_FLAGS,
    not_carried,
)

# The constants of a plan.

REMARKS = {
    "GLOBAL_BATCH": "samples per optimizer step, over all ranks",
    "MICRO_BATCH": "samples per forward and backward on one rank",
    "MAX_GRAD_NORM": "of the whole gradient; None: no clipping",
    "SEED": "set before the model is built",
    "ITEMS": "of a micro-batch without padding; it keeps the loss at the scale of a mean",
    "HEAD": "the output head, whose logits are not computed all at once",
    "FIND_UNUSED": "some parameters get no gradient, and DDP looks for them in each backward",
    "TENSOR_PLAN": "which projections are split over the tensor-parallel ranks, and how",
}


def plain_settings() -> dict[str, Any]:
    """The constants of the kit at the plain run's values."""
    return {name: value for name, value in vars(settings).items() if name.isupper()}


def plan_settings(plan: Plan) -> dict[str, Any]:
    """The constants of a plan's batch and knobs; the workload's are at the values of the plain run."""
    config = plan.config
    kernel = ATTENTION_BACKENDS.get(config.attention, "")
    ddp = config.dp > 1 and config.dp_shard == 1 and config.tp == 1  # as techniques/data_parallel.py
    fsdp = config.dp > 1 and not ddp
    by_block = config.checkpointing != "none" or config.compile == "block" or config.fp8 != "off"
    loading = setting_of(plan)
    return plain_settings() | {
        "DEVICE": plan.device,
        "GLOBAL_BATCH": plan.workload.global_batch,
        "MICRO_BATCH": config.micro_batch,
        "ACCUMULATION": plan.accumulation,
        "LOCAL_BATCH": config.micro_batch * plan.accumulation,
        "SEQUENCE_LENGTH": plan.workload.sequence_length,
        "ITEMS": config.micro_batch * (plan.workload.sequence_length or 1),
        "UNIT": plan.workload.unit,
        "LOADER_ARGUMENTS": {} if loading is None else loading.arguments,
        **{name.upper(): getattr(config, name) for name in _AS_THEY_ARE},
        "CHECKPOINT_EVERY": CHECKPOINT_EVERY.get(config.checkpointing, 1),
        "CUDA_GRAPHS": config.compile_mode in CUDAGRAPH_MODES,
        "ATTENTION": "sdpa" if kernel else config.attention,
        "ATTENTION_KERNEL": kernel,
        # as techniques/attention.py: where transformers would make a mask tensor that plainly causal attention lacks
        "MASKLESS": config.tp * config.pp == 1 and (config.compile == "model" or plan.device == "cuda"),
        "BLOCKS": by_block or config.tp > 1 or fsdp,
        "RANKS": config.world_size,
        "DDP": ddp,
        "FIND_UNUSED": plan.workload.find_unused_parameters,
        "FSDP": fsdp,
        "RESHARD_AFTER_FORWARD": config.reshard_after_forward and config.dp_shard > 1,
    }


_AS_THEY_ARE = (
    *("precision", "checkpointing", "compile", "compile_mode", "kernels", "fp8", "loss", "optimizer_step"),
    *("offload", "parameters", "optimizer_state", "threads", "allocator", "batch_norm"),
    *("dp_replicate", "dp_shard", "tp", "gradient_sync"),
)
"""Knobs whose constants have their values."""


# What the workload trains with.

ADAMW = "torch.optim.adamw.AdamW"


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
    name, known = schedule.kind, r"torch\.optim\.lr_scheduler\.[A-Z]\w*"
    if schedule.function is not None:
        name, known = schedule.function, r"_get_\w+_lambda"  # of transformers.optimization
    return is_python_name(name, dotted=True) and re.fullmatch(known, name) is not None


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
        "UNHELD": list(training.unheld),
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
    training = plan.training
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
            rates = f"; the first learning rates of the schedule are {first_rates(training.schedule)}"
        found.append(
            f"the optimizer {last_part(training.optimizer)} and its schedule, because {reason}: make your own{rates}"
        )
    if training.dropout:
        found.append("the random numbers of dropout: the rates are the model's, the masks are drawn anew")
    return found


def training_lines(plan: Plan) -> list[str]:
    """Lines on how the workload trains, for the head of a file."""
    training = plan.training
    if training is None:
        return []
    groups = ", ".join(str(group.options.get("weight_decay", 0)) for group in training.groups)
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


def first_rates(schedule: ScheduleFacts) -> str:
    """The learning rates of the first steps, each the largest of its groups."""
    return ", ".join(f"{max(rates):.6g}" for rates in schedule.learning_rates[:4])


def last_part(kind: str) -> str:
    """The name of a class without its module."""
    return kind.rpartition(".")[2]


# A module.

SHOWN = ("GLOBAL_BATCH", "MICRO_BATCH", "ACCUMULATION", "RANKS", "MAX_GRAD_NORM", "SEED")
"""Constants that each module for a loop has: for its user, too."""


def loop_settings(plan: Plan, tool: str, **changes: Any) -> dict[str, Any]:
    """The constants of a module for a loop of one's own.

    Args:
        plan: The plan.
        tool: The tool that wraps model and optimizer.
        **changes: Of the plan's constants, where the tool does it by itself.
    """
    config, training = plan.config, plan.training
    fsdp = config.dp_shard > 1
    values = plan_settings(plan) | {
        "TOOL": tool,
        "FSDP": fsdp,
        "BLOCKS": config.checkpointing != "none" or config.compile == "block" or fsdp,
        "SYNCS_LAST": config.dp > 1 and config.gradient_sync == "last",
        # Sentences of not_carried say that the tool leaves these as they are.
        "KERNELS": "own",
        "FP8": "off",
    }
    if training is not None:
        values |= {"MAX_GRAD_NORM": training.max_grad_norm, "SEED": training.seed}
        if why_not_made(training) is None:
            values |= optimizer_settings(plan, training, with_schedule=True)
    return values | changes


def loop_not_carried(plan: Plan, tool: str, names: Iterable[str] = LEFT_BY_TOOLS) -> list[str]:
    """Sentences on the parts of plan and workload that a module for one's own loop does not say.

    Args:
        plan: The plan.
        tool: Whose loop it is.
        names: The knobs that the tool does not have.
    """
    whole = [COMPILES_MODEL] if plan.config.compile == "model" else []
    return not_carried(plan.config, tool, names) + whole + training_not_carried(plan, "your loop's")


COMPILES_MODEL = "compile=model covers the model here, and not its loss, which the measured run compiled with it"


def head(plan: Plan, said: Sequence[str], not_carried: Sequence[str], *, start: bool = True) -> str:
    """The comment at the top of a file.

    Args:
        plan: The plan.
        said: What the target says besides, in sentences.
        not_carried: What is not carried.
        start: Say how many processes the user starts.
    """
    config = plan.config
    batch = (
        f"Global batch: {config.micro_batch} x {plan.accumulation} accumulation"
        + (f" x {config.dp} ranks" if config.dp > 1 else "")
        + f" = {plan.workload.global_batch}."
        + (f" Start {config.world_size} process(es)." if start else "")
    )
    return comment([*provenance_lines(plan), *training_lines(plan), batch, *said], not_carried)


def module_text(
    values: dict[str, Any], takes: Sequence[str], *, head: str, docstring: Sequence[str], shown: Sequence[str] = SHOWN
) -> str:
    """A whole module.

    Args:
        values: The constants of the kit.
        takes: What it takes of the kit, as `module:name`, besides `make_optimizers(model)` where the values have it.
        head: The comment at its top.
        docstring: Lines that say how it is used; no text of the plan is in them.
        shown: Constants that it has whether its code asks them or not.
    """
    bundle = Bundle(values, *takes, *(["loop:make_optimizers"] if values["MAKES_OPTIMIZERS"] else []))
    constants = {name: value for name, value in values.items() if name in bundle.asked or name in shown}
    top = [CODING, head, '"""' + "\n".join(docstring) + '\n"""', "", "from __future__ import annotations", ""]
    parts = ["\n".join(top) + "\n" + "\n\n".join(bundle.imports()), constant_lines(constants), bundle.source()]
    return "\n\n\n".join(part for part in parts if part) + "\n"


def check_module(text: str, values: dict[str, Any]) -> None:
    """Checks that a module is Python and has the plan's constants.

    Raises:
        ExportError: it is not, or has not.
    """
    for name, value in read_constants(text).items():
        if name in values:
            same_or_error(name, value, values[name])


def parse_export(text: str) -> ast.Module:
    """The syntax tree of an exported file.

    Raises:
        ExportError: it is not Python.
    """
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ExportError(f"the file is not Python: {error}", hint="Nothing was written. Please report it.") from error


def read_constants(text: str) -> dict[str, Any]:
    """The constants of a module whose values are literals.

    Raises:
        ExportError: it is not Python.
    """
    found = {}
    for node in parse_export(text).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def constant_lines(constants: Mapping[str, Any]) -> str:
    """Lines that set constants, each with what it is."""
    lines = []
    for name, value in constants.items():
        text = repr(value)
        if isinstance(value, dict | list):
            text = pprint.pformat(value, width=110, compact=True, sort_dicts=False)
        elif isinstance(value, str) and "\n" in value:
            text = "(\n" + "\n".join(f"    {line!r}" for line in value.splitlines(keepends=True)) + "\n)"
        lines.append(f"{name} = {text}" + (f"  # {REMARKS[name]}" if name in REMARKS else ""))
    return "\n".join(lines)
