"""The export target torchtitan: a module with a function that returns a Trainer.Config, and the model's file.

In: a plan of a causal language model. Out: `NAME.py` for `--module NAME --config plan_recipe`, and `NAME_model.json`,
the model's configuration, which torchtitan's backend for models of transformers builds. The fields are in
planner/plan/keys/torchtitan.json. The check has the real ConfigManager read the module, where torchtitan is installed.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.export.base import (
    CODING,
    Export,
    Target,
    comment,
    is_python_name,
    provenance_lines,
    same_or_error_each,
)
from autoplan.planner.export.companion import parse_export
from autoplan.planner.export.pretraining import (
    ADAMW_OPTIONS,
    NEAREST,
    NOT_CARRIED,
    adamw_of,
    causal_fields,
    data_not_carried,
)
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.key_tables import installed_version, pick_table, version_line
from autoplan.planner.plan.plan import Plan
from autoplan.processes import RankContext
from autoplan.strategies.config import CUDAGRAPH_MODES, not_carried

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}
FORMS = {"own": "foreach", "for_loop": "for-loop", "foreach": "foreach", "fused": "fused"}
"""By value of optimizer_step; torch's own form is foreach on CUDA."""

CHECKPOINTING = {"none": None, "selective": "SelectiveAC"}
"""By value of checkpointing; any other is FullAC."""

SECTIONS = {
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "compile": "CompileConfig",
    "debug": "DebugConfig",
    "lr_scheduler": "LRSchedulersContainer.Config",
}


class TorchtitanTarget(Target):
    """A recipe module of torchtitan, and the model's configuration beside it."""

    name = "torchtitan"
    suffix = ".py"
    is_module = True
    carries_loader = False

    def render(self, plan: Plan, stem: str) -> Export:
        if not is_python_name(stem):
            raise ExportError(
                f"the file name {stem!r} is no Python name, and torchtitan imports the module",
                hint="Write --out plan_torchtitan.py.",
            )
        version = installed_version("torchtitan")
        table = pick_table("torchtitan", version)
        fields = causal_fields(plan, "torchtitan")
        _refuse_model(fields, table)
        not_carried = _not_carried(plan)
        text = _text(plan, stem, version, not_carried)
        files = {f"{stem}.py": text, f"{stem}_model.json": json.dumps(fields, indent=2) + "\n"}
        return Export(files=files, not_carried=tuple(not_carried))

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        (name, text), (_, model) = export.files.items()
        parse_export(text)
        if installed_version("torchtitan") is None:
            return ("not read by torchtitan's own ConfigManager: install torchtitan 0.3.0 to have that checked",)
        wanted, version = expected(plan), installed_version("torchtitan")
        parts = (text, model, name.removesuffix(".py"), list(wanted))
        found = read_by_tool(f"{__name__}:read_back_in_rank", parts, tool=f"torchtitan {version}", what="the recipe")
        same_or_error_each(wanted, found)
        return ()


def _refuse_model(fields: dict[str, Any], table: dict[str, Any]) -> None:
    """Refuses models that torchtitan's backend for models of transformers does not build as they are.

    Raises:
        ExportError: it has another layout of modules, or its output head is its embedding.
    """
    kind = fields["model_type"]
    if kind not in table["models"]:
        raise ExportError(
            f"torchtitan {table['written_for']} does not build models of type {kind}",
            hint=f"It builds {', '.join(table['models'])}. {NEAREST}",
        )
    if fields.get("tie_word_embeddings"):
        raise ExportError(
            "the model's output head is its embedding (tie_word_embeddings), and torchtitan trains two: another model",
            hint=NEAREST,
        )


def settings(plan: Plan) -> dict[str, Any]:
    """The values by section and field: `training.seq_len`.

    Raises:
        ExportError: torchtitan has no number format or optimizer that the plan has.
    """
    config, keys = plan.config, pick_table("torchtitan", installed_version("torchtitan"))["keys"]
    if config.precision == "fp16":
        raise ExportError("torchtitan has no fp16 with loss scaling, and the plan has precision=fp16", hint=NEAREST)
    training = adamw_of(plan, "torchtitan")
    norm = training.max_grad_norm
    values: dict[str, Any] = {
        "local_batch": config.micro_batch * (config.pp_microbatches if config.pp > 1 else 1),
        "global_batch": plan.workload.global_batch,
        "length": plan.workload.sequence_length,
        "max_grad_norm": math.inf if norm is None else norm,
        "master_dtype": "float32",
        "compute_dtype": "bfloat16" if config.precision == "bf16" else "float32",
        "reduce_dtype": "float32",
        "no_cuda_graphs": not (config.compile_mode in CUDAGRAPH_MODES and config.pp == 1),
        "dp_replicate": config.dp_replicate,
        "dp_shard": config.dp_shard,
        "reshard": "always" if config.reshard_after_forward and config.pp == 1 else "never",
        "tp": config.tp,
        "sequence_parallel": True,
        "pp": config.pp,
        "pp_schedule": SCHEDULES[config.pp_schedule],
        "pp_micro_batch": config.micro_batch if config.pp > 1 else 1,
        "compile": config.compile != "off",
        "compiled": ["model", "loss"] if config.compile == "model" else ["model"],
        "optimizer_form": FORMS[config.optimizer_step],
        "warmup": 0,
        "decay": 0.0,
        "seed": training.seed,
    }
    if config.pp > 1:  # torchtitan counts the embedding and the head as one layer each
        layers = causal_fields(plan, "torchtitan")["num_hidden_layers"] + 2
        values["pp_layers"] = math.ceil(layers / (config.pp * config.virtual_stages))
    return {keys[term]: value for term, value in values.items()}


def expected(plan: Plan) -> dict[str, Any]:
    """The values that should be read back: the settings, and those of the optimizer."""
    wanted = settings(plan) | {f"optimizer_kwargs.{key}": value for key, value in _adamw_options(plan).items()}
    wanted["world_size"] = plan.config.world_size
    return wanted | {"activation_checkpoint": CHECKPOINTING.get(plan.config.checkpointing, "FullAC")}


def _adamw_options(plan: Plan) -> dict[str, Any]:
    options = adamw_of(plan, "torchtitan").main_group.options
    return {key: options[key] for key in ADAMW_OPTIONS} | {"betas": list(options["betas"])}


def _not_carried(plan: Plan) -> list[str]:
    config = plan.config
    found = data_not_carried(plan) + not_carried(config, "torchtitan", NOT_CARRIED)
    if config.precision == "bf16":
        found.append(
            "precision=bf16 as autocast: torchtitan casts the parameters of each block to bf16, so norms and residuals "
            "run in bf16 too; masters and optimizer states are fp32, as in the plan"
        )
    if config.checkpointing == "selective":
        found.append("checkpointing=selective by the plan's policy: torchtitan's SelectiveAC keeps other operations")
    elif config.checkpointing.startswith("every_"):
        found.append(f"checkpointing={config.checkpointing}: every block is checkpointed, with less memory and speed")
    if config.compile == "model":
        found.append("compile=model: torchtitan compiles each block and the loss, not the whole model")
    if config.compile_mode != "default":
        graphs = " its own CUDA graphs are on in place of them" if config.compile_mode in CUDAGRAPH_MODES else ""
        found.append(f"compile_mode={config.compile_mode}: torchtitan compiles in torch's default mode;{graphs}")
    if config.attention != "own":
        found.append(f"attention={config.attention}: torchtitan's backend for models of transformers picks the kernel")
    if config.dp_shard > 1 and config.gradient_sync == "last" and plan.accumulation > 1:
        found.append("gradient_sync=last: torchtitan scatters gradients at every micro-step, with less memory")
    if config.pp > 1:
        found.append("the plan's cut of the pipeline: torchtitan cuts by its own rule, from the layers per stage")
    return found


def _text(plan: Plan, stem: str, version: str | None, not_carried: list[str]) -> str:
    config = plan.config
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in settings(plan).items():
        section, _, field = key.rpartition(".")
        sections[section][field] = value
    checkpointing = CHECKPOINTING.get(config.checkpointing, "FullAC")
    head = [
        *provenance_lines(plan),
        f"{version_line('torchtitan', version)} torchtitan 0.2 reads TOML, and versions after 0.3 count tokens in "
        "place of samples: neither reads this file.",
        f"Start: torchrun --nproc-per-node {config.world_size} -m torchtitan.train --module {stem} "
        "--config plan_recipe",
        f"Global batch: {plan.workload.global_batch} = {config.micro_batch} x {plan.accumulation} accumulation x "
        f"{config.dp} data-parallel ranks. Loss: the sum over the tokens of the global batch, as in the plan.",
        "Its CUDA graphs are on unless disable_cuda_graphs says otherwise, and pipelines refuse them; the plan was "
        f"measured {'with' if config.compile_mode in CUDAGRAPH_MODES else 'without'} graphs.",
    ]
    optimizer = sections.pop("optimizer")
    lines = [
        CODING,
        comment(head, not_carried),
        '"""The plan as a recipe of torchtitan: set dataset, hf_assets_path (the tokenizer) and steps below."""',
        "",
        "from pathlib import Path",
        "",
        "import torch",
        "from torchtitan.components.loss import CrossEntropyLoss",
        "from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig",
        "from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {checkpointing}"] if checkpointing else []),
        "from torchtitan.experiments.transformers_modeling_backend import model_registry",
        "from torchtitan.experiments.transformers_modeling_backend.configs import TransformersBackendConfig",
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "",
        "",
        f"OPTIMIZER = {_adamw_options(plan)}",
        "",
        "",
        "def plan_recipe() -> TransformersBackendConfig:",
        f"    torch.set_float32_matmul_precision({'high' if config.precision == 'tf32' else 'highest'!r})",
        "    return TransformersBackendConfig(",
        f"        hf_model=str(Path(__file__).with_name({stem + '_model.json'!r})),",
        '        model_spec=model_registry("full"),',
        '        hf_assets_path="./assets/hf/tokenizer",',
        '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),',
        "        loss=CrossEntropyLoss.Config(),",
        f"        activation_checkpoint={checkpointing + '.Config()' if checkpointing else None},",
        "        optimizer=OptimizersContainer.Config(",
        f"            implementation={optimizer['implementation']!r},",
        "            param_groups=[",
        '                ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=OPTIMIZER)',
        "            ],",
        "        ),",
    ]
    for section, fields in sections.items():
        lines.append(f"        {section}={SECTIONS[section]}(")
        texts = {field: 'float("inf")' if value == math.inf else repr(value) for field, value in fields.items()}
        lines += [f"            {field}={text}," for field, text in texts.items()]
        lines.append("        ),")
    return "\n".join([*lines, "    )", ""])


def read_back_in_rank(context: RankContext, text: str, model: str, stem: str, keys: list[str]) -> dict[str, Any]:
    """The values that torchtitan's ConfigManager reads, in this process."""
    import os
    import sys

    os.chdir(context.directory)
    (context.directory / f"{stem}.py").write_text(text, encoding="utf-8")
    (context.directory / f"{stem}_model.json").write_text(model, encoding="utf-8")
    sys.path.insert(0, str(context.directory))
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    config = ConfigManager().parse_args(["--module", stem, "--config", "plan_recipe"])
    (group,) = config.optimizer.param_groups
    checkpointing = config.activation_checkpoint
    degrees = {
        "dp_replicate": config.parallelism.data_parallel_replicate_degree,
        "dp_shard": config.parallelism.data_parallel_shard_degree,
        "tp": config.parallelism.tensor_parallel_degree,
        "pp": config.parallelism.pipeline_parallel_degree,
    }
    dims = ParallelDims(**degrees, cp=1, ep=1, world_size=math.prod(degrees.values()))
    _build(config)
    found: dict[str, Any] = {"world_size": dims.world_size}
    found["activation_checkpoint"] = None if checkpointing is None else type(checkpointing).__qualname__.split(".")[0]
    found |= {f"optimizer_kwargs.{key}": value for key, value in group.optimizer_kwargs.items()}
    for key in keys:
        section, _, field = key.rpartition(".")
        if hasattr(config, section):
            found[key] = getattr(getattr(config, section), field)
    return found


def _build(config: Any) -> None:
    """Builds the model on the meta device, as torchtitan's trainer does, and asks for the parts that it needs."""
    import torch

    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    with torch.device("meta"):
        model = model_config.build()
    for part in ("tok_embeddings", "layers", "norm", "lm_head", "rotary_emb"):
        getattr(model, part)
    model.verify_module_protocol()
