"""The export target transformers: TrainingArguments as JSON, and a companion module for the other settings.

In: a plan. Out: two files. What a configuration is in arguments is said by planner/plan/trainer_arguments.py, which
`plan.apply_to(trainer)` uses too; here it becomes files.
The check loads the file with the real class in its own process (the class sets environment variables) and compares
every value.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from autoplan.planner.export.base import Export, companion_name, refusal, refuse_model_parallelism, same_or_error
from autoplan.planner.export.companion import check_module
from autoplan.planner.export.trainers.transformers_companion import LOSS_LINE, companion, settings, version_line
from autoplan.planner.export.trainers.transformers_training import TrainedParts, trained_parts
from autoplan.planner.export.training import training_of
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.key_tables import installed_version, pick_table
from autoplan.planner.plan.loader import setting_of
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.trainer_arguments import compiles_in_place, loader_values, named_arguments, plan_values

if TYPE_CHECKING:
    from autoplan.processes import RankContext


def training_arguments(
    plan: Plan, keys: dict[str, str | None], trained: TrainedParts
) -> tuple[dict[str, Any], list[str]]:
    """The keyword arguments, and sentences on what they cannot express.

    Args:
        plan: The plan.
        keys: The names of the arguments, by the plan's terms.
        trained: What the workload trains with.

    Raises:
        ExportError: the plan uses tensor or pipeline parallelism, replicas of shards, or fp16 on a CPU.
    """
    values, not_carried = plan_values(plan.config, accumulation=plan.accumulation, device=plan.device, keys=keys)
    values |= {"drop_last": True} | loader_values(setting_of(plan)) | trained.values
    not_carried += trained.not_carried
    return {"output_dir": "trainer-output"} | named_arguments(plan.config, values, keys), not_carried


class TransformersTarget:
    """TrainingArguments as JSON for HfArgumentParser.parse_json_file, and a companion module."""

    name = "transformers"
    suffix = ".json"
    runs_code = False

    def render(self, plan: Plan, stem: str) -> Export:
        version = installed_version("transformers")
        table = pick_table("transformers", version or plan.environment.transformers or "5.23")
        trained = trained_parts(plan)
        arguments, not_carried = checked_arguments(plan, table["keys"], trained)
        module = companion_name(stem)
        said = [version_line(table["written_for"], table["verified"]), LOSS_LINE]
        text = companion(plan, settings(plan, self.name, f"{stem}.json", trained.optimizers), not_carried, said)
        files = {f"{stem}.json": json.dumps(arguments, indent=2) + "\n", module: text}
        return Export(files=files, not_carried=tuple(not_carried))

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        arguments_text, module_text = export.files.values()
        check_module(module_text, settings(plan, self.name, next(iter(export.files)), trained_parts(plan).optimizers))
        if None in (installed_version("transformers"), installed_version("accelerate")):
            return ("not read by the real TrainingArguments, which needs accelerate: install 'autoplan[transformers]'",)
        compare_with_plan(plan, arguments_text, read_back_arguments(arguments_text))
        version = installed_version("transformers")
        verified = pick_table("transformers", str(version))["verified"]
        if verified == version:
            return ()
        return (
            f"the keys for transformers were verified on {verified or 'no version'}; {version} is installed here and "
            "read every value back as the plan has it",
        )


def checked_arguments(
    plan: Plan, keys: dict[str, str | None], trained: TrainedParts
) -> tuple[dict[str, Any], list[str]]:
    """`training_arguments`, without what accelerate, which the Trainer runs on, would do otherwise in silence.

    Raises:
        ExportError: as `training_arguments`, or the plan has shards on a CPU, where accelerate leaves FSDP off.
    """
    refuse_model_parallelism("The Trainer", plan.config, replicas_of_shards=False)
    if plan.config.dp_shard > 1 and plan.device == "cpu":
        raise refusal("The Trainer", "shards on a CPU", f"dp_shard={plan.config.dp_shard} for a CPU")
    arguments, not_carried = training_arguments(plan, keys, trained)
    if compiles_in_place(plan.config, plan.device):
        not_carried.append(
            "compile=model as an argument, with which accelerate switches TF32 on for an fp32 plan: the companion's "
            "prepare_model() compiles the model"
        )
    return arguments, not_carried


def compare_with_plan(plan: Plan, text: str, found: dict[str, Any]) -> None:
    """Compares what the real class read with the file, value by value, and with the plan.

    Raises:
        ExportError: a value differs.
    """
    for key, wanted in (json.loads(text) | expected(plan)).items():
        if key in found and key != "use_cpu":
            same_or_error(key, as_written(found[key], wanted), wanted)


def expected(plan: Plan) -> dict[str, Any]:
    """What the arguments of a Trainer have, by their own names, where the file says what the plan has."""
    config, training = plan.config, training_of(plan)
    values: dict[str, Any] = {
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        "torch_compile": config.compile == "model" and not compiles_in_place(plan.config, plan.device),
        "gradient_checkpointing": config.checkpointing != "none",
        "dataloader_drop_last": True,
    }
    if training is not None:
        values |= {"max_grad_norm": training.max_grad_norm or 0.0, "seed": training.seed}
    return values


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def read_back_arguments(text: str) -> dict[str, Any]:
    """The values that the real class reads, in its own process.

    Raises:
        ExportError: the class refuses the arguments.
    """
    tool = f"transformers {installed_version('transformers')}"
    return read_by_tool(f"{__name__}:read_back_in_rank", (text,), tool=tool, env=OFFLINE)


def read_back_in_rank(context: RankContext, text: str) -> dict[str, Any]:
    """The values that the real class reads, in this process."""
    from transformers import TrainingArguments

    return read_back_with(context, TrainingArguments, text)


ALWAYS_READ = ("gradient_checkpointing", "max_grad_norm", "seed", "torch_compile", "gradient_accumulation_steps")
"""Arguments that are read back whether a file has them or not: their defaults are not every plan's."""


def read_back_with(context: RankContext, kind: Any, text: str) -> dict[str, Any]:
    """The values that a class of arguments reads, in this process, and those of ALWAYS_READ.

    The example scripts of transformers read such a file with parse_json_file, too. Without a GPU, the class refuses
    bf16 and fp16 unless use_cpu is set, and refuses tf32 in any case, so tf32 is not checked there.
    """
    import os

    import torch
    from transformers import HfArgumentParser

    os.chdir(context.directory)  # the class may make the folder that output_dir names
    given = json.loads(text)
    if not torch.cuda.is_available():
        given["use_cpu"] = True
        given.pop("tf32", None)
    path = context.directory / "arguments.json"
    path.write_text(json.dumps(given))
    (arguments,) = HfArgumentParser(kind).parse_json_file(path)

    def plain(value: Any) -> Any:
        return value.to_dict() if hasattr(value, "to_dict") else str(value)

    found = {key: getattr(arguments, key) for key in (*given, *ALWAYS_READ)}
    values: dict[str, Any] = json.loads(json.dumps(found, default=plain))
    return values


def as_written(value: Any, wanted: Any) -> Any:
    """The value as it was written: of a dict only the written keys; of an enum (its text is Class.NAME) the name."""
    if isinstance(wanted, dict) and isinstance(value, dict):
        return {key: value.get(key) for key in wanted}
    if isinstance(wanted, str) and isinstance(value, str) and "." in value and "." not in wanted:
        return value.rsplit(".", 1)[1].lower()
    return value
