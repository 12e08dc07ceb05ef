"""What an export must know of a model itself: the task of a language model, and the names of the repeated blocks.

In: a `WorkloadSpec`. Out: a `ModelSummary`. The model is built on the meta device in its own process, because that
loads torch and perhaps the user's code.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from typing import Any, NamedTuple

from autoplan.errors import ExportError
from autoplan.strategies.workloads.spec import WorkloadSpec

_SUMMARIZE = """
import json, sys
import torch
from autoplan.strategies.workloads import language_model
from autoplan.strategies.workloads.sources import load_workload
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.strategies.analysis.structure import find_structure
workload = load_workload(WorkloadSpec.model_validate_json(sys.stdin.read()))
losses = {loss: task for task, loss in language_model.LANGUAGE_MODEL_LOSSES.items()}
with torch.device("meta"):
    model = workload.build_model()
stacks = [[name for name, _ in stack] for stack in find_structure(model).stacks]
print("SUMMARY " + json.dumps({"task": losses.get(workload.loss, ""), "stacks": stacks}))
"""


class ModelSummary(NamedTuple):
    """The task of a language model ("" for other models), and the names of the blocks of each stack."""

    task: str
    stacks: list[list[str]]


def summarize_model(spec: WorkloadSpec) -> ModelSummary:
    """Builds the model of a workload on the meta device and returns its summary.

    Raises:
        ExportError: the workload cannot be built.
    """
    return _summarize_model(spec.model_dump_json(), spec.name)


@functools.lru_cache(maxsize=16)
def _summarize_model(spec: str, name: str) -> ModelSummary:
    done = subprocess.run([sys.executable, "-c", _SUMMARIZE], input=spec, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SUMMARY ")]
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ExportError(
            f"the model of {name} could not be built for the export: {last[0]}",
            hint="The workload's files must be where they were when the plan was made.",
        )
    document: dict[str, Any] = json.loads(lines[-1].removeprefix("SUMMARY "))
    return ModelSummary(task=document["task"], stacks=document["stacks"])


def stack_source(stack: list[str]) -> str:
    """Names as Python source: a comprehension if they are numbered in order, else a list."""
    match = re.fullmatch(r"(.*?)(\d+)", stack[0])
    if match and len(stack) > 2:
        prefix, first = match[1], int(match[2])
        if stack == [f"{prefix}{first + number}" for number in range(len(stack))]:
            return f"[{prefix!r} + str(number) for number in range({first}, {first + len(stack)})]"
    return repr(stack)
