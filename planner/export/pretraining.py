"""Code for torchtitan and megatron: both train causal language models of their own, from a configuration.

In: a plan. Out: the model's configuration, what the workload trains with, and sentences on what neither tool carries.
"""

from __future__ import annotations

from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.export.companion import ADAMW, first_rates, last_part
from autoplan.planner.export.pytorch import model_fields
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.analysis.training_facts import TrainingFacts
from autoplan.strategies.config import LEFT_BY_TOOLS

NEAREST = "Nearest targets: pytorch, lightning, fabric, transformers; or plan.prepare() under torchrun."

NOT_CARRIED = (*LEFT_BY_TOOLS, "batch_norm", "threads", "allocator")
"""Knobs that these tools do not have."""

ADAMW_OPTIONS = ("lr", "betas", "eps", "weight_decay")
"""The options of AdamW that these tools take."""


def causal_fields(plan: Plan, tool: str) -> dict[str, Any]:
    """The configuration of the plan's model, whole: with the defaults of its type, as transformers' config.json has it.

    Raises:
        ExportError: the workload is no causal language model that a configuration describes, or the plan is for a CPU.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from autoplan.strategies.workloads.language_model import make_config, task_of

    if plan.workload.kind in ("function", "object"):
        raise ExportError(
            f"{plan.workload.name} is Python code; {tool} trains language models of its own, from a configuration",
            hint=NEAREST,
        )
    fields = model_fields(plan)
    task = task_of(fields)
    if task != "causal":
        raise ExportError(f"{plan.workload.name} is a {task} model; {tool} trains causal language models", hint=NEAREST)
    if plan.device != "cuda":
        raise ExportError(f"the plan is for {plan.device}; {tool} trains on GPUs", hint=NEAREST)
    # transformers' own defaults are written out; code that a downloaded configuration names is left out.
    whole: dict[str, Any] = make_config(fields).to_dict()
    return {key: value for key, value in whole.items() if key not in ("auto_map", "architectures")} | {
        "architectures": [str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(whole["model_type"]), ""))]
    }


def adamw_of(plan: Plan, tool: str) -> TrainingFacts:
    """The training facts of the workload.

    Raises:
        ExportError: the optimizer is not torch's AdamW with one group, as these tools have it, or not all of
            it is known.
    """
    training = plan.training
    if training is None:
        raise _not_said("what the workload trains with", tool)
    if training.optimizer != ADAMW or len(training.groups) != 1:
        what = last_part(training.optimizer)
        raise ExportError(
            f"the workload trains with {what} over {len(training.groups)} parameter group(s); for {tool}, AdamW over "
            "one is written",
            hint=NEAREST,
        )
    options = training.main_group.options
    unknown = [name for name in ADAMW_OPTIONS if name not in options]
    if unknown:
        raise _not_said(f"{', '.join(unknown)} of the workload's AdamW", tool)
    return training


def _not_said(what: str, tool: str) -> ExportError:
    return ExportError(
        f"the plan does not say {what}, which {tool} has to be told",
        hint="Search again: a plan of this version says it.",
    )


def data_not_carried(plan: Plan) -> list[str]:
    """Sentences on what no such tool takes from a workload."""
    training = plan.training
    found = ["the data: the workload's batches are random tokens; give the tool its own data set and tokenizer"]
    if training is not None and training.schedule is not None:
        found.append(
            f"the schedule {last_part(training.schedule.kind)}: the rate is constant; its first rates are "
            f"{first_rates(training.schedule)}"
        )
    return found
