"""The facts that an export must know of a model itself: its blocks, its output head, how it is split.

In: a `WorkloadSpec`. Out: a `ModelSummary`. The model is built on the meta device in its own process, because that
loads torch and perhaps the user's code.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from autoplan.errors import ConfigError
from autoplan.planner.export.user_code import run_user_code
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.processes import RankContext

FUNCTIONS = {"load": "the workload's own function or file", "build_model": "build_model()"}
"""The phases of the rank, and the function of the user's that runs in each."""


class ModelSummary(NamedTuple):
    """The facts that an export needs to know of a model.

    Attributes:
        has_blocks: Whether the model repeats blocks.
        head: The name of the output head whose logits loss=fused defers; "" where the workload's own head splits off.
        tensor_plan: The fields of a TensorPlan, or why the model has none.
    """

    has_blocks: bool
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
    document = run_user_code(
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
    from autoplan.strategies.workloads.sources import load_workload

    workload = load_workload(WorkloadSpec.model_validate_json(spec))
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
        "has_blocks": bool(structure.stacks),
        "head": next((name for name, module in model.named_modules() if module is linear), ""),
        "tensor_plan": tensor_plan,
    }
