"""What an export must know of a model that only the model itself says: its task and the names of its blocks."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from typing import Any, NamedTuple

from autoplan.errors import ExportError
from autoplan.strategies.workloads.spec import WorkloadSpec

# In a process of its own: it loads torch and perhaps the user's code. The model is on the meta device.
_READ = """
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
print("OUTLINE " + json.dumps({"task": losses.get(workload.loss, ""), "stacks": stacks}))
"""


class Outline(NamedTuple):
    """The training task of a language model ("" for others), and the names of the repeated blocks, run by run."""

    task: str
    stacks: list[list[str]]


def read_outline(spec: WorkloadSpec) -> Outline:
    """Builds the workload's model on the meta device and reads its outline.

    Raises:
        ExportError: the workload cannot be built.
    """
    return _read_outline(spec.model_dump_json(), spec.name)


@functools.lru_cache(maxsize=16)
def _read_outline(spec: str, name: str) -> Outline:
    done = subprocess.run([sys.executable, "-c", _READ], input=spec, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTLINE ")]
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ExportError(
            f"the model of {name} could not be built to write it down: {last[0]}",
            hint="The workload's files must be where they were when the plan was made.",
        )
    document: dict[str, Any] = json.loads(lines[-1].removeprefix("OUTLINE "))
    return Outline(task=document["task"], stacks=document["stacks"])


def stack_source(stack: list[str]) -> str:
    """Names as Python source: a comprehension where they count up, else a list."""
    match = re.fullmatch(r"(.*?)(\d+)", stack[0])
    if match and len(stack) > 2:
        prefix, first = match[1], int(match[2])
        if stack == [f"{prefix}{first + number}" for number in range(len(stack))]:
            return f'[f"{prefix}{{number}}" for number in range({first}, {first + len(stack)})]'
    return repr(stack)
