"""Modules that the zygote of a search imports once, before it forks the first rank: else each rank would import them.

In: what is trained. Out: names of modules. One that cannot be imported costs nothing: a rank imports what it needs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from autoplan.errors import AutoplanError
from autoplan.strategies.workloads import registry
from autoplan.strategies.workloads.spec import WorkloadSpec

PRELOAD = (
    "torch",
    "autoplan.planner.trials.worker",
    "autoplan.strategies.prepare",
    "autoplan.strategies.workloads.sources",
)
"""Of every search. The compiler comes before the first trial that needs it (trials/runner.py)."""

MODELS = "transformers.modeling_utils"
"""The module that every model of transformers imports, some 600 modules in all: a second or more of each rank."""

MOST_MODELS = 8


def preload_for(spec: WorkloadSpec) -> tuple[str, ...]:
    """The modules for the ranks of a workload: with the code of its model, where that is known before it is built."""
    match spec.kind:
        case "model" | "config" | "folder":
            kind = _model_type(spec)
            return (*PRELOAD, MODELS, *([f"transformers.models.{kind}.modeling_{kind}"] if kind else []))
        case "function":
            return (*PRELOAD, *([MODELS] if "transformers" in _text(spec) else []))
        case "object":  # it was made in this process, so what it is made of is imported here
            found = [name for name in sys.modules if re.fullmatch(r"transformers\.models\.\w+\.modeling_\w+", name)]
            return (*PRELOAD, *([MODELS] if MODELS in sys.modules else []), *found[:MOST_MODELS])


def _model_type(spec: WorkloadSpec) -> str:
    """The type of the model, as the folder of its code is called; empty where it is not known."""
    try:
        if spec.kind == "model":
            fields = registry.read_config(spec.reference)
        else:
            path = Path(spec.reference)
            fields = registry.read_config_file(path / "config.json" if spec.kind == "folder" else path)
    except (AutoplanError, OSError, KeyError):
        return ""  # inspection says what is wrong
    return re.sub(r"\W", "_", str(fields.get("model_type", "")))


def _text(spec: WorkloadSpec) -> str:
    try:
        return Path(spec.reference.rpartition(":")[0]).read_text(errors="replace")
    except (OSError, ValueError):
        return ""
