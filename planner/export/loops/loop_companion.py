"""What the companions of the targets accelerate and deepspeed share: Python modules for a training loop of one's own.

In: a plan. Out: Python source. Both tools leave the loop to their user, so the module has what their files cannot say:
the batch arithmetic, `prepare_module(model)`, `make_optimizers(model)`, and a `train_step` whose loss is the sum over
the count of the whole global batch.
"""

from __future__ import annotations

from typing import Any

from autoplan.planner.export.base import CODING, comment, provenance_lines
from autoplan.planner.export.optimizer_source import last_part, optimizer_source, training_of, why_not_made
from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.rounding_knobs import not_carried as rounding_not_carried


def settings(plan: Plan) -> dict[str, Any]:
    """The constants at the top of the module, by name; the check reads them back."""
    training = training_of(plan)
    return {
        "GLOBAL_BATCH": plan.workload.global_batch,
        "MICRO_BATCH": plan.config.micro_batch,
        "ACCUMULATION": plan.accumulation,
        "RANKS": plan.config.world_size,
        "MAX_GRAD_NORM": None if training is None else training.max_grad_norm,
        "SEED": 0 if training is None else training.seed,
    }


REMARKS = {
    "GLOBAL_BATCH": "samples per optimizer step, over all ranks",
    "MICRO_BATCH": "samples per forward and backward on one rank",
    "MAX_GRAD_NORM": "of the whole gradient; None: no clipping",
    "SEED": "set before the model is built",
}


def constants(plan: Plan) -> str:
    """The lines of `settings`."""
    remarks = {name: f"  # {text}" for name, text in REMARKS.items()}
    return "\n".join(f"{name} = {value!r}{remarks.get(name, '')}" for name, value in settings(plan).items())


def makes_optimizers(plan: Plan) -> bool:
    """Whether the module has make_optimizers(model)."""
    training = training_of(plan)
    return training is not None and why_not_made(training) is None


def optimizers(plan: Plan) -> list[str]:
    """The sections with make_optimizers(model); none where source cannot make them."""
    training = training_of(plan)
    if training is None or not makes_optimizers(plan):
        return []
    source = "\n".join(optimizer_source(plan, training, with_schedule=True, clean_names=True))
    return [take("analysis/structure.py", "clean_name"), source]


def not_carried(plan: Plan) -> list[str]:
    """What of plan and workload a module for one's own loop does not say, whichever the tool."""
    training, config = training_of(plan), plan.config
    found = rounding_not_carried(config.model_dump(), "your loop")
    if config.loss == "fused":
        found.append("the fused loss (loss=fused): the loss is your own code, with all logits; it takes more memory")
    if config.compile == "model":
        found.append("compile=model covers the model here, and not its loss, which the measured run compiled with it")
    if training is None:
        found.append(
            "optimizer, learning rate, weight decay, schedule, clipping and seed of the workload, which this plan does "
            "not know: they are your loop's own. Search again to have them in the plan"
        )
        return found
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


def workload_lines(plan: Plan) -> list[str]:
    """What the workload trains with, for the head of a file."""
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


def head(plan: Plan, lines: list[str], missing: list[str]) -> str:
    """The comment at the top of a file.

    Args:
        plan: The plan.
        lines: What the target says besides, in sentences.
        missing: What is not carried.
    """
    config = plan.config
    batch = (
        f"Global batch: {config.micro_batch} x {plan.accumulation} accumulation"
        + (f" x {config.dp} ranks" if config.dp > 1 else "")
        + f" = {plan.workload.global_batch}. Start {config.world_size} process(es)."
    )
    said = [*provenance_lines(plan), *workload_lines(plan), batch, *lines]
    return comment([*said, *(f"NOT CARRIED: {text}." for text in missing)])


def module(plan: Plan, *, said: list[str], missing: list[str], docstring: list[str], sections: list[str]) -> str:
    """The whole module.

    Args:
        plan: The plan.
        said: What the target says besides in the head.
        missing: What is not carried.
        docstring: Lines that say how it is used; no text of the plan is in them.
        sections: The import lines, the constants, then functions.
    """
    top = "\n".join([CODING, head(plan, said, missing), '"""' + "\n".join(docstring) + '\n"""'])
    first, *functions = sections
    return f"{top}\n\n{first}\n\n" + "\n\n\n".join(functions) + "\n"


STEPS = '''def steps(loader):
    """The micro-batches of each optimizer step on this rank, as lists of ACCUMULATION; what is left over is dropped."""
    batches = iter(loader)
    while len(found := list(itertools.islice(batches, ACCUMULATION))) == ACCUMULATION:
        yield found'''
"""Of both modules; they import itertools."""
