"""The export target transformers: TrainingArguments as JSON, and a companion module for the other settings.

In: a plan. Out: two files. The names of the keys are in transformers_keys.json, one table per version of transformers.
The check loads the file with the real class in its own process (the class sets environment variables) and compares
every value.
"""

from __future__ import annotations

import importlib.metadata
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from autoplan.errors import ExportError
from autoplan.planner.export.base import Export, same_or_error
from autoplan.planner.export.transformers_companion import companion
from autoplan.planner.export.transformers_training import TrainedParts, trained_parts
from autoplan.planner.export.user_code import run_user_code
from autoplan.planner.plan import Plan
from autoplan.strategies.config import PLAIN, TrainingConfig

if TYPE_CHECKING:
    from autoplan.processes import RankContext


def key_table(version: str) -> dict[str, Any]:
    """The newest key table for this version: from plan terms to argument names.

    Raises:
        ExportError: transformers is older than every table.
    """
    text = resources.files("autoplan.planner.export").joinpath("transformers_keys.json").read_text()
    tables: list[dict[str, Any]] = json.loads(text)["tables"]
    fitting = [table for table in tables if _number(table["since"]) <= _number(version)]
    if not fitting:
        raise ExportError(
            f"no key table fits transformers {version}",
            hint="Tables start at " + ", ".join(table["since"] for table in tables) + "; update transformers.",
        )
    return max(fitting, key=lambda table: _number(table["since"]))


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def training_arguments(
    plan: Plan, keys: dict[str, str | None], trained: TrainedParts
) -> tuple[dict[str, Any], list[str]]:
    """The keyword arguments, and sentences on what they cannot express.

    Args:
        plan: The plan.
        keys: The names of the arguments, by the plan's terms.
        trained: What the workload trains with.

    Raises:
        ExportError: the plan uses tensor or pipeline parallelism, or replicas of shards.
    """
    config = plan.config
    if config.tp > 1 or config.pp > 1 or (config.dp_shard > 1 and config.dp_replicate > 1):
        raise ExportError(
            f"TrainingArguments cannot carry tp={config.tp} pp={config.pp} dp_replicate={config.dp_replicate} "
            f"dp_shard={config.dp_shard}",
            hint="Use plan.prepare() under torchrun, or search with --fix tp=1 --fix pp=1.",
        )
    not_carried: list[str] = []
    values: dict[str, Any] = {
        "micro_batch": config.micro_batch,
        "accumulation": plan.accumulation,
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        "drop_last": True,
        "use_cpu": plan.device == "cpu",
    }
    if plan.device == "cuda":
        values["tf32"] = config.precision == "tf32"
    values |= _data_parallel(config, keys, not_carried)
    values |= _checkpointing(config.checkpointing, keys, not_carried)
    values |= _compilation(plan, not_carried)
    values |= trained.values
    not_carried += trained.not_carried
    if config.loss == "fused":
        not_carried.append("the fused loss (loss=fused): the Trainer computes all logits, which takes more memory")
    arguments: dict[str, Any] = {"output_dir": "trainer-output"}
    for term, value in values.items():
        key = keys.get(term)
        if value is not None and key is not None:
            arguments[key] = value
    if config.dp_shard > 1:
        arguments |= {
            "fsdp": True,
            "fsdp_config": {"version": 2, "reshard_after_forward": config.reshard_after_forward},
        }
    return arguments, not_carried


def _data_parallel(config: TrainingConfig, keys: dict[str, str | None], not_carried: list[str]) -> dict[str, Any]:
    """The knobs of DDP and FSDP2 that are not at torch's default."""
    values: dict[str, Any] = {}
    if config.ddp_bucket_mb != PLAIN.ddp_bucket_mb:
        values["ddp_bucket_mb"] = config.ddp_bucket_mb
    if config.ddp_static_graph:
        values["ddp_static_graph"] = True
    if config.gradient_sync == "every":
        values["gradient_sync"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    not_carried += [
        f"{knob}={value} is no training argument here" for knob, value in values.items() if keys.get(knob) is None
    ]
    if config.fsdp_prefetch:
        not_carried.append(f"fsdp_prefetch={config.fsdp_prefetch}: the Trainer leaves FSDP2 in torch's own order")
    return values


def _checkpointing(value: str, keys: dict[str, str | None], not_carried: list[str]) -> dict[str, Any]:
    if value == "none":
        return {"checkpointing": False}
    values: dict[str, Any] = {"checkpointing": True, "checkpointing_options": {"use_reentrant": False}}
    every = keys.get("checkpointing_every")
    if value.startswith("every_") and every:
        values["checkpointing_options"] |= {every: int(value.removeprefix("every_"))}
    elif value != "full":
        not_carried.append(f"checkpointing={value}: every block is checkpointed, which is slower and takes less memory")
    return values


def _compilation(plan: Plan, not_carried: list[str]) -> dict[str, Any]:
    if plan.config.compile == "block":
        not_carried.append("compile=block is no training argument: the companion's prepare_model() compiles each block")
    if plan.config.compile != "model":
        return {"compile": False}
    return {"compile": True, "compile_mode": plan.config.compile_mode}


class TransformersTarget:
    """TrainingArguments as JSON for HfArgumentParser.parse_json_file, and a companion module."""

    name = "transformers"
    suffix = ".json"
    runs_code = False

    def render(self, plan: Plan, stem: str) -> Export:
        version = installed_version()
        table = key_table(version or plan.environment.transformers or "5.23")
        trained = trained_parts(plan)
        arguments, not_carried = training_arguments(plan, table["keys"], trained)
        module = stem.replace("-", "_") + "_companion.py"
        return Export(
            files={
                f"{stem}.json": json.dumps(arguments, indent=2) + "\n",
                module: companion(
                    plan, f"{stem}.json", not_carried, table["written_for"], table["verified"], trained.source
                ),
            },
            not_carried=tuple(not_carried),
        )

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        arguments_text, module_text = export.files.values()
        _compiles(module_text)
        if installed_version() is None or not _is_installed("accelerate"):
            return ("not read by the real TrainingArguments, which needs accelerate: install 'autoplan[transformers]'",)
        read_back = read_back_arguments(arguments_text)
        for key, wanted in json.loads(arguments_text).items():
            if key in read_back and key != "use_cpu":
                same_or_error(key, _plain(read_back[key], wanted), wanted)
        return ()


def read_back_arguments(text: str) -> dict[str, Any]:
    """The values that the real class reads, in its own process.

    Raises:
        ExportError: the class refuses the arguments.
    """
    values: dict[str, Any] = run_user_code(
        "autoplan.planner.export.transformers_arguments:read_back_in_rank",
        (text,),
        doing=f"the check with transformers {installed_version()}",
        functions={},
        refused=f"transformers {installed_version()} refuses the arguments",
        hint="Nothing was written. The key table of this version may be out of date: please report it.",
        env={"HF_HUB_OFFLINE": "1"},
    )
    return values


def read_back_in_rank(context: RankContext, text: str) -> dict[str, Any]:
    """The values that the real class reads, in this process.

    The example scripts of transformers read such a file with parse_json_file, too. Without a GPU, the class refuses
    bf16 and fp16 unless use_cpu is set, and refuses tf32 in any case, so tf32 is not checked there.
    """
    import os

    import torch
    from transformers import HfArgumentParser, TrainingArguments

    os.chdir(context.directory)  # the class may make the folder that output_dir names
    given = json.loads(text)
    if not torch.cuda.is_available():
        given["use_cpu"] = True
        given.pop("tf32", None)
    path = context.directory / "arguments.json"
    path.write_text(json.dumps(given))
    kind: Any = TrainingArguments  # a dataclass, which its own annotations hide
    (arguments,) = HfArgumentParser(kind).parse_json_file(path)

    def plain(value: Any) -> Any:
        return value.to_dict() if hasattr(value, "to_dict") else str(value)

    values: dict[str, Any] = json.loads(json.dumps({key: getattr(arguments, key) for key in given}, default=plain))
    return values


def _plain(value: Any, wanted: Any) -> Any:
    """The value as it was written: of a dict only the written keys; of an enum (its text is Class.NAME) the name."""
    if isinstance(wanted, dict) and isinstance(value, dict):
        return {key: value.get(key) for key in wanted}
    if isinstance(wanted, str) and isinstance(value, str) and "." in value and "." not in wanted:
        return value.rsplit(".", 1)[1].lower()
    return value


def _compiles(text: str) -> None:
    try:
        compile(text, "companion", "exec")
    except SyntaxError as error:
        raise ExportError(f"the companion is not Python: {error}", hint="Please report it.") from error


def installed_version() -> str | None:
    """The installed version of transformers; None where it is not installed."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
