"""Plants wrong keys and values into exported files and asks a target's check: `planted.py TARGET`, in its environment.

Prints one JSON line: what the check said of the right files, and of each planted one; empty where it saw nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.errors import ExportError
from autoplan.planner.export import user_code
from autoplan.planner.export.base import Export
from autoplan.planner.export.run import load_target
from autoplan.planner.plan.plan import Plan
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from tests import recorded
from tests.exports.six_steps import make_plan
from tests.exports.trained import on_gpus
from tests.planner.export.test_pretraining import plan_of

Change = Callable[[str], str]
"""Of the text of the first file."""


def in_document(change: Callable[[dict[str, Any]], object]) -> Change:
    """Changes a file of JSON or YAML."""

    def changed(text: str) -> str:
        document = yaml.safe_load(text)  # which reads JSON too
        change(document)
        return json.dumps(document)

    return changed


def rename(path: str, to: str) -> Change:
    """Gives a key another name, one that the tool does not know."""

    def change(document: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        for parent in parents:
            document = document[parent]
        document[to] = document.pop(key)

    return in_document(change)


def put(path: str, value: Any) -> Change:
    """Gives a key another value, or adds it."""

    def change(document: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        for parent in parents:
            document = document.setdefault(parent, {})
        document[key] = value

    return in_document(change)


def replace(old: str, new: str) -> Change:
    """Changes a file of Python."""

    def change(text: str) -> str:
        assert old in text, old
        return text.replace(old, new)

    return change


STAGED = {"pp": 2, "pp_microbatches": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "tp": 2}
PLANS: dict[str, Callable[[Path], Plan]] = {
    "one": lambda _: make_plan(),
    "bf16": lambda _: make_plan(precision="bf16"),
    "fp16": lambda _: make_plan(precision="fp16"),
    "ddp": lambda _: make_plan(dp_replicate=2, micro_batch=4),
    "shard": lambda _: make_plan(dp_shard=2),
    "shard_bf16": lambda _: make_plan(dp_shard=2, precision="bf16"),
    "cuda": lambda _: recorded.make_plan(TrainingConfig(micro_batch=2, precision="fp16"), device="cuda"),
    "hsdp": lambda _: on_gpus(dp_shard=2, dp_replicate=2, micro_batch=1, precision="bf16"),
    "titan": lambda folder: plan_of(folder, dp_shard=4, precision="bf16", checkpointing="selective", compile="block"),
    "titan_staged": lambda folder: plan_of(folder, **STAGED),
}
"""The plans, each made with a folder for the files that its workload is in."""

LIGHTNING = ("bf16", "ddp", "shard", "fp16", "cuda")
RIGHT = {
    **{"accelerate": ("hsdp",), "deepspeed": ("shard_bf16",), "trl": ("one",), "transformers": ("one",)},
    **{"lightning": LIGHTNING, "fabric": LIGHTNING, "torchtitan": ("titan", "titan_staged")},
}
"""Of which plans the check of each target sees nothing wrong."""


@dataclass(frozen=True)
class Mistake:
    """What is planted in an export.

    Attributes:
        what: A name for it.
        change: Plants it.
        words: What the check has to say of it.
        plan: Whose export it is; None: of the first right plan of the target.
    """

    what: str
    change: Change
    words: str = ""
    plan: str | None = None


RESHARD = "fsdp_config.fsdp_reshard_after_forward"
DEGREE = "parallelism_config_dp_shard"
PLANTED = {
    "accelerate": [
        Mistake("unknown key at the top", put("gradient_accumulation_steps", 4)),
        Mistake("misspelt key of a section", rename(RESHARD, "fsdp_reshard_after_foward")),
        Mistake("misspelt degree", rename(f"parallelism_config.{DEGREE}_size", DEGREE)),
        Mistake("key of another version", rename("fsdp_config.fsdp_version", "version")),
        Mistake("wrong value in a section", put(RESHARD, False)),
        Mistake("wrong number of ranks", put("num_processes", 3)),
        Mistake("wrong precision", put("mixed_precision", "fp16")),
        Mistake("something switched on", put("dynamo_config", {"dynamo_backend": "INDUCTOR"})),
    ],
    "deepspeed": [
        Mistake("unknown key at the top", put("gradient_clip", 0.1)),
        Mistake("misspelt key at the top", rename("gradient_clipping", "gradient_cliping")),
        Mistake("misspelt key of a section", rename("zero_optimization.stage", "stages")),
        Mistake("misspelt key of a plain section", rename("torch_autocast.dtype", "type")),
        Mistake("batch of one rank", put("train_batch_size", 4)),
        Mistake("wrong accumulation", put("gradient_accumulation_steps", 1)),
        Mistake("wrong stage", put("zero_optimization.stage", 2)),
        Mistake("bf16 parameters", put("bf16", {"enabled": True})),
    ],
    "trl": [
        Mistake("misspelt key", rename("max_length", "max_seq_length")),
        Mistake("unknown key", put("micro_batch_size", 2)),
        Mistake("wrong value", put("gradient_accumulation_steps", 2)),
        Mistake("default of TRL", in_document(lambda document: document.pop("activation_checkpointing"))),
        Mistake("cut sequences", put("max_length", 8)),
    ],
    "transformers": [
        Mistake("misspelt key", rename("max_grad_norm", "max_gradient_norm")),
        Mistake("unknown key", put("micro_batch_size", 2)),
        Mistake("no such schedule", put("lr_scheduler_type", "linear_warmup")),
        Mistake("wrong clipping", put("max_grad_norm", 0.0)),
        Mistake("wrong accumulation", put("gradient_accumulation_steps", 2)),
    ],
    "lightning": [
        Mistake("key", replace("'accumulate_grad_batches'", "'accumulate_batches'"), "refuses the arguments"),
        Mistake("value", replace("_batches': 4", "_batches': 3"), "accumulate_grad_batches reads back as 3"),
        Mistake("precision", replace("'bf16-mixed'", "'bf16-mix'"), "refuses the arguments"),
        Mistake("clipping", replace("_clip_val': 0.1", "_clip_val': 1.0"), "gradient_clip_val reads back as 1.0"),
        Mistake("plugin", replace("[MixedPrecision(**PLUGIN_OPTIONS)]", "[]"), "reads back as '32-true'", "fp16"),
    ],
    "fabric": [
        Mistake("constant", replace("MAX_GRAD_NORM = 0.1", "MAX_GRAD_NORM = 1.0"), "MAX_GRAD_NORM reads back as 1.0"),
        Mistake("option", replace("'broadcast_", "'broadcasts_"), "broadcast_buffers reads back as None", "ddp"),
        Mistake("degree", replace("_size': 2", "_size': 1"), "data_parallel_size reads back as 1", "shard"),
    ],
    "torchtitan": [
        Mistake("key", replace("max_norm=", "max_norms="), "refuses the recipe"),
        Mistake("value", replace("seq_len=32", "seq_len=2048"), "training.seq_len reads back as 2048"),
        Mistake("choice", replace("'always'", "'allways'"), "fsdp_reshard_after_forward reads back as 'allways'"),
        Mistake("optimizer", replace("'weight_decay': 0.0", "'weight_decay': 0.1"), "weight_decay reads back as 0.1"),
        Mistake(
            "graphs",
            replace("cuda_graphs=True", "cuda_graphs=False"),
            "do not support pipeline parallelism",
            "titan_staged",
        ),
        Mistake("model", replace("export_model.json", "export.json"), "refuses the recipe"),
    ],
}


def main(target: str) -> dict[str, str]:
    """What the check says of each right and each planted export of a target."""
    right = RIGHT[target]
    with tempfile.TemporaryDirectory() as folder:
        rows = [(f"right: {plan}", plan, str) for plan in right]
        rows += [(mistake.what, mistake.plan or right[0], mistake.change) for mistake in PLANTED[target]]
        return {what: ask(target, PLANS[plan](Path(folder)), change) for what, plan, change in rows}


def ask(target: str, plan: Plan, change: Change) -> str:
    """What the check says of an export whose first file is changed."""
    (name, text), *rest = load_target(target).render(plan, "export").files.items()
    try:
        return " ".join(load_target(target).check(plan, Export(files={name: change(text), **dict(rest)})))
    except ExportError as error:
        return str(error)


if __name__ == "__main__":
    tool = {"fabric": "lightning"}.get(sys.argv[1], sys.argv[1])
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        @functools.cache
        def zygote_with(env: tuple[tuple[str, str], ...]) -> Any:
            """Each check would import the tool again, for some ten seconds."""
            return stack.enter_context(Zygote(preload=("torch", tool), env=dict(env)))

        patch.setattr(
            user_code,
            "Zygote",
            lambda *, env=None, **_: contextlib.nullcontext(zygote_with(tuple((env or {}).items()))),
        )
        print(json.dumps(main(sys.argv[1])))
