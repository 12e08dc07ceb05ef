"""The export target trl: SFTConfig as JSON, and a companion module for the other settings.

In: a plan. Out: two files. SFTConfig is TrainingArguments with more fields and other defaults, so the target is that of
transformers with the keys of keys/trl.json besides. The check loads the file with the real class in its own process and
compares every value.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from autoplan.errors import ExportError
from autoplan.planner.export.base import Export, companion_name, same_or_error
from autoplan.planner.export.companion import check_module
from autoplan.planner.export.trainers.transformers_arguments import (
    OFFLINE,
    TransformersTarget,
    checked_arguments,
    compare_with_plan,
    read_back_with,
)
from autoplan.planner.export.trainers.transformers_companion import companion, settings
from autoplan.planner.export.trainers.transformers_training import trained_parts
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.key_tables import installed_version, key_table, pick_table
from autoplan.planner.plan.plan import Plan

if TYPE_CHECKING:
    from autoplan.processes import RankContext


class TrlTarget(TransformersTarget):
    """SFTConfig as JSON for HfArgumentParser.parse_json_file, and a companion module."""

    name = "trl"

    def render(self, plan: Plan, stem: str) -> Export:
        if plan.workload.sequence_length is None:
            raise ExportError(
                f"SFTTrainer trains causal language models on sequences, and {plan.workload.name} has samples",
                hint="Use the target transformers, or plan.prepare() in your own loop.",
            )
        table = key_table("trl", installed_version("trl"))
        keys = pick_table("transformers", installed_version("transformers") or plan.environment.transformers or "5.23")[
            "keys"
        ]
        trained = trained_parts(plan)
        arguments, not_carried = checked_arguments(plan, keys, trained)
        if plan.config.checkpointing == "selective":
            options = keys["checkpointing_options"]
            arguments[options] = arguments[options] | {"selective": True}
            not_carried = [text for text in not_carried if not text.startswith("checkpointing=selective")]
            not_carried.append("checkpointing=selective as measured: TRL's own policy says which results are kept")
        if plan.config.loss == "fused":
            not_carried = [text for text in not_carried if not text.startswith("loss=fused")]
            not_carried.append("loss=fused as measured: SFTTrainer's own loss in chunks takes its place (TRL 1.16)")
        arguments |= table.nest(
            {
                "length": plan.workload.sequence_length,
                "packing": False,
                "padding_free": False,
                "loss_type": "nll",
                "offload_activations": False,
                "count_all_ranks": True,
            }
        )
        module = companion_name(stem)
        said = [f"{table.line()} The other keys are those of transformers.", *_LOSS]
        text = companion(plan, settings(plan, self.name, f"{stem}.json", trained.optimizers), not_carried, said)
        files = {f"{stem}.json": json.dumps(arguments, indent=2) + "\n", module: text}
        return Export(files=files, not_carried=tuple(not_carried))

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        arguments_text, module_text = export.files.values()
        check_module(module_text, settings(plan, self.name, next(iter(export.files)), trained_parts(plan).optimizers))
        if installed_version("trl") is None:
            return ("not read by the real SFTConfig: install trl to have that checked",)
        found = read_back(arguments_text)
        compare_with_plan(plan, arguments_text, found)
        same_or_error("max_length", found["max_length"], plan.workload.sequence_length)
        return key_table("trl", installed_version("trl")).notes()


_LOSS = [
    "Loss: SFTTrainer sums the loss of each label and divides by the labels of the whole global batch, as the plan "
    "does. From TRL 1.16 on it makes the logits in chunks and never has them all, whatever the plan's loss knob says.",
    "Data: max_length is the plan's sequence length; longer sequences are cut. packing and padding_free are off: the "
    "plan was measured on batches of whole samples.",
]


def read_back(text: str) -> dict[str, Any]:
    """The values that the real class reads, in its own process.

    Raises:
        ExportError: the class refuses the arguments.
    """
    tool = f"trl {installed_version('trl')}"
    return read_by_tool(f"{__name__}:read_back_in_rank", (text,), tool=tool, env=OFFLINE)


def read_back_in_rank(context: RankContext, text: str) -> dict[str, Any]:
    """The values that the real class reads, in this process."""
    from trl import SFTConfig

    return read_back_with(context, SFTConfig, text)
