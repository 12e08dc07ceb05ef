"""What a workload's model allows of tensor and pipeline parallelism, for the space of a search."""

from __future__ import annotations

from torch import nn

from autoplan.strategies.analysis.facts import ParallelFacts
from autoplan.strategies.analysis.pipeline_trace import trace_pipeline
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.analysis.tensor_plans import find_tensor_plan
from autoplan.strategies.workloads.workload import Workload


def find_parallel_facts(model: nn.Module, structure: Structure, workload: Workload) -> ParallelFacts:
    """Reads the facts from a model on the meta device."""
    plan = find_tensor_plan(model, structure, workload.tensor_plan)
    trace = trace_pipeline(model, structure, workload)
    length = workload.tokens_per_sample
    return ParallelFacts(
        num_blocks=len(structure.blocks),
        tp_unit=None if isinstance(plan, str) else plan.unit,
        tp_unit_of="" if isinstance(plan, str) else plan.unit_of,
        tp_reason=plan if isinstance(plan, str) else None,
        pp_reason=trace if isinstance(trace, str) else None,
        block_costs=() if isinstance(trace, str) else tuple(cost / length for cost in trace.block_costs),
        first_cost=0.0 if isinstance(trace, str) else trace.first_cost / length,
        last_cost=0.0 if isinstance(trace, str) else trace.last_cost / length,
    )
