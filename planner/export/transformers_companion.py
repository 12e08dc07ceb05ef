"""The companion module of the export target transformers: Python source for what is no training argument.

In: a plan and the name of the file of arguments. Out: a module with `load_arguments()` and `prepare_model(model)`, and
comments with the plan's origin and measurement.
"""

from __future__ import annotations

from autoplan.planner.export.base import CODING, comment, provenance_lines
from autoplan.planner.export.pytorch_training import CAUSAL_ATTENTION_NAMES, avoids_masks
from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.config import ATTENTION_BACKENDS, TrainingConfig

MALLOPT = {"M_MMAP_THRESHOLD": (-3, 1 << 30), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}
"""Options of mallopt(3) and their values, as in strategies/techniques/allocator.py."""


def companion(
    plan: Plan,
    arguments_file: str,
    not_carried: list[str],
    version: str,
    verified: str | None,
    optimizers: list[str],
) -> str:
    """The source of the module.

    Args:
        plan: The plan.
        arguments_file: Name of the file of arguments, in the same folder.
        not_carried: Sentences on what the export cannot express.
        version: Of transformers, that the key table is for.
        verified: The version whose real class read every key of the table back; None: the table was not checked.
        optimizers: Lines of the function `make_optimizers(model)`; empty where the arguments say it all.
    """
    use = ", optimizers=make_optimizers(model)" if optimizers else ""
    avoids = avoids_masks(plan)
    body = [
        CODING,
        comment(_comment_lines(plan, not_carried, version, verified)),
        '"""The settings of the plan that are no training arguments. Use:',
        "",
        f"Trainer(model=prepare_model(model), args=load_arguments(){use}, ...)",
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
        "from transformers import HfArgumentParser, TrainingArguments",
        "",
        "",
        "def load_arguments():",
        '    """The TrainingArguments from the file beside this one."""',
        f"    path = Path(__file__).with_name({arguments_file!r})",
        "    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(path)",
        "    return arguments",
        "",
        "",
        *([*take("techniques/causal_attention.py", *CAUSAL_ATTENTION_NAMES).splitlines(), "", ""] if avoids else []),
        "def prepare_model(model):",
        '    """Applies the settings of the plan that are no training arguments; returns the model."""',
        *_prepare_model_lines(plan.config),
        *(["    use_maskless_attention([model])  # for batches without a mask"] if avoids else []),
        *(_OWN_CHECKPOINTING_OFF if plan.training is not None and plan.training.own_checkpointing else []),
        "    return model",
        "",
        *(["", *optimizers, ""] if optimizers else []),
    ]
    return "\n".join(body)


def _comment_lines(plan: Plan, not_carried: list[str], version: str, verified: str | None) -> list[str]:
    config = plan.config
    return [
        *provenance_lines(plan),
        f"Written for transformers {version}" + (f", verified on {verified}." if verified else ", not verified."),
        f"Global batch: {config.micro_batch} x {plan.accumulation} accumulation"
        + (f" x {config.dp} ranks" if config.dp > 1 else "")
        + f" = {plan.workload.global_batch}. Start {config.world_size} process(es).",
        "Loss: the Trainer divides the summed loss by the items of the whole global batch, as the plan does, for "
        "models that take num_items_in_batch (the causal language models do). For other models it takes the mean of "
        "the micro-batches' means, which is another loss if their counts differ: then pass compute_loss_func.",
        *(f"NOT CARRIED: {text}." for text in not_carried),
    ]


_OWN_CHECKPOINTING_OFF = [
    "    # The model had checkpointing of its own switched on; from here on, the training arguments decide.",
    '    if hasattr(model, "activation_checkpointing_disable"):',
    "        model.activation_checkpointing_disable()",
    "    else:",
    "        model.gradient_checkpointing_disable()",
]


def _prepare_model_lines(config: TrainingConfig) -> list[str]:
    # Where a model names no loss, transformers takes the causal one, but the Trainer then counts each first label too.
    lines = [
        '    if getattr(model, "loss_type", "") is None:',
        '        model.loss_type = "ForCausalLM"  # the causal loss, as before; the Trainer counts its labels by this',
    ]
    kernel = config.attention.removeprefix("sdpa_") if config.attention in ATTENTION_BACKENDS else None
    if config.attention != "own":
        lines.append(f"    model.set_attn_implementation({'sdpa' if kernel else config.attention!r})")
    if kernel is not None:
        names = {"flash": "flash_sdp", "cudnn": "cudnn_sdp", "efficient": "mem_efficient_sdp", "math": "math_sdp"}
        lines += ["    # one attention kernel and no other, for the whole process"] + [
            f"    torch.backends.cuda.enable_{name}({key == kernel})" for key, name in names.items()
        ]
    if config.batch_norm == "sync":
        lines.append("    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)")
    if config.gelu != "own":
        lines += [
            "    # GPT-2's tanh formula of GELU as one operation",
            "    for name, module in list(model.named_modules(remove_duplicate=False)):",
            '        if type(module).__name__ in ("NewGELUActivation", "FastGELUActivation"):',
            '            parent, _, child = name.rpartition(".")',
            '            setattr(model.get_submodule(parent), child, torch.nn.GELU(approximate="tanh"))',
        ]
    if config.threads is not None:
        lines.append(f"    torch.set_num_threads({config.threads})")
    if config.allocator == "keep":
        lines += [
            "    libc = ctypes.CDLL(None)  # glibc keeps freed memory, for the whole process (mallopt(3))",
            *(f"    libc.mallopt({option}, {value})  # {name}" for name, (option, value) in MALLOPT.items()),
        ]
    if config.compile == "block":
        lines += [
            "    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]",
            "    for block in max(lists, key=lambda m: sum(p.numel() for p in m.parameters())):",
            f"        block.compile(mode={config.compile_mode!r}, dynamic=False)",
        ]
    return lines
