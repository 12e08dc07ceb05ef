"""Plants wrong keys and values into exported files and asks each target's check: `planted.py TOOL`, in its environment.

Prints one JSON line: what the check said of the right file, and of each planted one; null where it saw nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import yaml

from autoplan.errors import ExportError
from autoplan.planner.export.base import Export
from autoplan.planner.export.run import load_target
from autoplan.planner.plan.plan import Plan
from tests.exports.six_steps import make_plan
from tests.exports.trained import on_gpus

Change = Callable[[dict[str, Any]], None]


def rename(path: str, to: str) -> Change:
    """Gives a key another name, one that the tool does not know."""

    def change(document: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        for parent in parents:
            document = document[parent]
        document[to] = document.pop(key)

    return change


def put(path: str, value: Any) -> Change:
    """Gives a key another value, or adds it."""

    def change(document: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        for parent in parents:
            document = document.setdefault(parent, {})
        document[key] = value

    return change


PLANTED: dict[str, tuple[Callable[[], Plan], dict[str, Change]]] = {
    "accelerate": (
        lambda: on_gpus(dp_shard=2, dp_replicate=2, micro_batch=1, precision="bf16"),
        {
            "unknown key at the top": put("gradient_accumulation_steps", 4),
            "misspelt key of a section": rename("fsdp_config.fsdp_reshard_after_forward", "fsdp_reshard_after_foward"),
            "misspelt degree": rename(
                "parallelism_config.parallelism_config_dp_shard_size", "parallelism_config_dp_shard"
            ),
            "key of another version": rename("fsdp_config.fsdp_version", "version"),
            "wrong value in a section": put("fsdp_config.fsdp_reshard_after_forward", False),
            "wrong number of ranks": put("num_processes", 3),
            "wrong precision": put("mixed_precision", "fp16"),
            "something switched on": put("dynamo_config", {"dynamo_backend": "INDUCTOR"}),
        },
    ),
    "deepspeed": (
        lambda: make_plan(dp_shard=2, precision="bf16"),
        {
            "unknown key at the top": put("gradient_clip", 0.1),
            "misspelt key at the top": rename("gradient_clipping", "gradient_cliping"),
            "misspelt key of a section": rename("zero_optimization.stage", "stages"),
            "misspelt key of a plain section": rename("torch_autocast.dtype", "type"),
            "batch of one rank": put("train_batch_size", 4),
            "wrong accumulation": put("gradient_accumulation_steps", 1),
            "wrong stage": put("zero_optimization.stage", 2),
            "bf16 parameters": put("bf16", {"enabled": True}),
        },
    ),
    "trl": (
        lambda: make_plan(),
        {
            "misspelt key": rename("max_length", "max_seq_length"),
            "unknown key": put("micro_batch_size", 2),
            "wrong value": put("gradient_accumulation_steps", 2),
            "default of TRL": lambda document: document.pop("activation_checkpointing"),
            "cut sequences": put("max_length", 8),
        },
    ),
    "transformers": (
        lambda: make_plan(),
        {
            "misspelt key": rename("max_grad_norm", "max_gradient_norm"),
            "unknown key": put("micro_batch_size", 2),
            "no such schedule": put("lr_scheduler_type", "linear_warmup"),
            "wrong clipping": put("max_grad_norm", 0.0),
            "wrong accumulation": put("gradient_accumulation_steps", 2),
        },
    ),
}


def ask(tool: str, plan: Plan, export: Export) -> str | None:
    """What the check of a target says against an export; None: nothing."""
    try:
        load_target(tool).check(plan, export)
    except ExportError as error:
        return error.message
    return None


def main(tool: str) -> dict[str, str | None]:
    make, changes = PLANTED[tool]
    plan = make()
    export = load_target(tool).render(plan, "export")
    (name, text), *rest = export.files.items()
    said = {"right": ask(tool, plan, export)}
    for what, change in changes.items():
        document = yaml.safe_load(text)  # which reads JSON too
        change(document)
        said[what] = ask(tool, plan, Export(files={name: json.dumps(document), **dict(rest)}))
    return said


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
