"""The companion module of the export target transformers: Python source for what is no training argument.

In: a plan and the name of the file of arguments. Out: a module with `load_arguments()` and `prepare_model(model)`, and
comments with the plan's origin and measurement.
"""

from __future__ import annotations

from typing import NamedTuple

from autoplan.planner.apply.trainer_arguments import compiles_in_place
from autoplan.planner.export.base import CODING, comment, provenance_lines
from autoplan.planner.export.loops.loop_companion import workload_lines
from autoplan.planner.export.model_preparation import (
    OWN_CHECKPOINTING_OFF,
    allocator_lines,
    attention_name,
    gelu_lines,
    kernel_lines,
    thread_lines,
)
from autoplan.planner.export.pytorch.pytorch_training import CAUSAL_ATTENTION_NAMES, avoids_masks
from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.config import TrainingConfig


class Trainer(NamedTuple):
    """The names in the module: of the package, and of its classes of arguments and trainers."""

    package: str
    arguments: str
    trainer: str


TRANSFORMERS = Trainer("transformers", "TrainingArguments", "Trainer")
TRL = Trainer("trl", "SFTConfig", "SFTTrainer")


def companion(
    plan: Plan,
    arguments_file: str,
    not_carried: list[str],
    said: list[str],
    optimizers: list[str],
    *,
    trainer: Trainer = TRANSFORMERS,
) -> str:
    """The source of the module.

    Args:
        plan: The plan.
        arguments_file: Name of the file of arguments, in the same folder.
        not_carried: Sentences on what the export cannot express.
        said: What the head says of the version and of the loss, in sentences.
        optimizers: Lines of the function `make_optimizers(model)`; empty where the arguments say it all.
        trainer: Whose arguments they are.
    """
    use = ", optimizers=make_optimizers(model)" if optimizers else ""
    avoids = avoids_masks(plan)
    body = [
        CODING,
        comment(_comment_lines(plan, not_carried, said)),
        '"""The settings of the plan that are no training arguments. Use:',
        "",
        f"{trainer.trainer}(model=prepare_model(model), args=load_arguments(){use}, ...)",
        '"""',
        "",
        *(["import ctypes"] if plan.config.allocator == "keep" else []),
        *(["import sys"] if avoids else []),
        *(["import re"] if any("re.sub" in line for line in optimizers) else []),
        "from pathlib import Path",
        *(["from typing import Any"] if avoids else []),
        "",
        "import torch",
        *(["from torch import nn"] if avoids else []),
        *(
            ["from transformers import HfArgumentParser, TrainingArguments"]
            if trainer is TRANSFORMERS
            else ["from transformers import HfArgumentParser", f"from {trainer.package} import {trainer.arguments}"]
        ),
        "",
        "",
        "def load_arguments():",
        f'    """The {trainer.arguments} from the file beside this one."""',
        f"    path = Path(__file__).with_name({arguments_file!r})",
        f"    (arguments,) = HfArgumentParser({trainer.arguments}).parse_json_file(path)",
        "    return arguments",
        "",
        "",
        *([*take("techniques/causal_attention.py", *CAUSAL_ATTENTION_NAMES).splitlines(), "", ""] if avoids else []),
        "def prepare_model(model):",
        '    """Applies the settings of the plan that are no training arguments; returns the model."""',
        *_prepare_model_lines(plan.config),
        *(
            [f"    model.compile(mode={plan.config.compile_mode!r}, dynamic=False)"]
            if compiles_in_place(plan.config, plan.device)
            else []
        ),
        *(["    use_maskless_attention([model])  # for batches without a mask"] if avoids else []),
        *(OWN_CHECKPOINTING_OFF if plan.training is not None and plan.training.own_checkpointing else []),
        "    return model",
        "",
        *(["", *optimizers, ""] if optimizers else []),
    ]
    return "\n".join(body)


def version_line(version: str, verified: str | None) -> str:
    """What the head says of the version of transformers that its key table is for, and was verified on."""
    return f"Written for transformers {version}" + (f", verified on {verified}." if verified else ", not verified.")


LOSS_LINE = (
    "Loss: the Trainer divides the summed loss by the items of the whole global batch, as the plan does, for models "
    "that take num_items_in_batch (the causal language models do). For other models it takes the mean of the "
    "micro-batches' means, which is another loss if their counts differ: then pass compute_loss_func."
)


def _comment_lines(plan: Plan, not_carried: list[str], said: list[str]) -> list[str]:
    config = plan.config
    return [
        *provenance_lines(plan),
        *workload_lines(plan),
        f"Global batch: {config.micro_batch} x {plan.accumulation} accumulation"
        + (f" x {config.dp} ranks" if config.dp > 1 else "")
        + f" = {plan.workload.global_batch}. Start {config.world_size} process(es).",
        *said,
        *(f"NOT CARRIED: {text}." for text in not_carried),
    ]


def _prepare_model_lines(config: TrainingConfig) -> list[str]:
    # Where a model names no loss, transformers takes the causal one, but the Trainer then counts each first label too.
    lines = [
        '    if getattr(model, "loss_type", "") is None:',
        '        model.loss_type = "ForCausalLM"  # the causal loss, as before; the Trainer counts its labels by this',
    ]
    if config.attention != "own":
        lines.append(f"    model.set_attn_implementation({attention_name(config)!r})")
    lines += kernel_lines(config)
    if config.batch_norm == "sync":
        lines.append("    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)")
    lines += gelu_lines(config)
    lines += thread_lines(config)
    lines += allocator_lines(config)
    if config.compile == "block":
        lines += [
            "    inside = set()  # of blocks that are compiled; an encoder and a decoder each have a list of them",
            "    for blocks in [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]:",
            "        if id(blocks) in inside or len({type(block) for block in blocks}) > 1:",
            "            continue",
            "        inside.update(id(module) for module in blocks.modules())",
            "        for block in blocks:",
            f"            block.compile(mode={config.compile_mode!r}, dynamic=False)",
        ]
    return lines
