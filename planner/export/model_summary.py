"""What an export must know of a model itself: the task of a language model, and the names of the repeated blocks.

In: a `WorkloadSpec`. Out: a `ModelSummary`. The model is built on the meta device in its own process, because that
loads torch and perhaps the user's code.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from autoplan.errors import ConfigError
from autoplan.planner.export.user_code import run_user_code
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.processes import RankContext

FUNCTIONS = {"load": "the workload's own function or file", "build_model": "build_model()"}
"""The phases of the rank, and the function of the user's that runs in each."""


class ModelSummary(NamedTuple):
    """What an export needs to know of a model.

    Attributes:
        task: Of a language model; "" for other models.
        stacks: The names of the blocks of each stack.
        frozen_stacks: The same of stacks that do not train beside others that do.
        head: The name of the output head whose logits loss=fused defers; "" where the workload's own head splits off.
        tensor_plan: The fields of a TensorPlan, or why the model has none.
    """

    task: str
    stacks: list[list[str]]
    frozen_stacks: list[list[str]] = []
    head: str = ""
    tensor_plan: dict[str, Any] | str = ""


def summarize_model(spec: WorkloadSpec) -> ModelSummary:
    """Builds the model of a workload on the meta device and returns its summary.

    Raises:
        ExportError: the workload cannot be built, or not within the limits of the export.
    """
    return _summarize_model(spec.model_dump_json(), spec.name)


@functools.lru_cache(maxsize=16)
def _summarize_model(spec: str, name: str) -> ModelSummary:
    document: dict[str, Any] = run_user_code(
        "autoplan.planner.export.model_summary:summarize_in_rank",
        (spec,),
        doing=f"building the model of {name} for the export",
        functions=FUNCTIONS,
        refused=f"the model of {name} could not be built for the export",
        hint="The workload's files must be where they were when the plan was made.",
    )
    return ModelSummary(**document)


def summarize_in_rank(context: RankContext, spec: str) -> dict[str, Any]:
    """Builds the model on the meta device, in this process."""
    context.phase("load")
    import torch

    from autoplan.strategies.analysis.structure import find_structure
    from autoplan.strategies.techniques.loss import output_linear, splits_by_head
    from autoplan.strategies.techniques.tensor_parallel import make_tensor_plan
    from autoplan.strategies.workloads.language_model import LANGUAGE_MODEL_LOSSES
    from autoplan.strategies.workloads.sources import load_workload

    workload = load_workload(WorkloadSpec.model_validate_json(spec))
    losses = {loss: task for task, loss in LANGUAGE_MODEL_LOSSES.items()}
    context.phase("build_model")
    with torch.device("meta"):
        model = workload.build_model()
    structure = find_structure(model)
    linear = None if splits_by_head(workload, model) else output_linear(structure)
    try:
        tensor_plan: dict[str, Any] | str = dataclasses.asdict(make_tensor_plan(model, structure, workload, 1))
    except ConfigError as error:
        tensor_plan = error.message
    return {
        "task": losses.get(workload.loss, ""),
        "stacks": [[name for name, _ in stack] for stack in structure.stacks],
        "frozen_stacks": [[name for name, _ in stack] for stack in structure.frozen_stacks],
        "head": next((name for name, module in model.named_modules() if module is linear), ""),
        "tensor_plan": tensor_plan,
    }


def stack_source(stack: list[str]) -> str:
    """Names as Python source: a comprehension if they are numbered in order, else a list."""
    match = re.fullmatch(r"(.*?)(\d+)", stack[0])
    if match and len(stack) > 2:
        prefix, first = match[1], int(match[2])
        if stack == [f"{prefix}{first + number}" for number in range(len(stack))]:
            return f"[{prefix!r} + str(number) for number in range({first}, {first + len(stack)})]"
    return repr(stack)
