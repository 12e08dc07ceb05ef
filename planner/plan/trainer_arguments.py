"""A configuration as TrainingArguments of transformers, for the export and for `plan.apply_to(trainer)`; and refusals.

In: a configuration. Out: argument values by the plan's terms, the names of the arguments in a version of transformers
(keys/transformers.json has a table per version), sentences on what no argument says, and the errors of any tool that
cannot run what a plan has.
"""

from __future__ import annotations

from typing import Any, Literal

from autoplan.errors import ExportError
from autoplan.strategies.config import LEFT_BY_TOOLS, TrainingConfig
from autoplan.strategies.config import not_carried as left_out
from autoplan.strategies.workloads.loading.settings import LoaderSetting


def plan_values(
    config: TrainingConfig, *, accumulation: int, device: str, keys: dict[str, str | None]
) -> tuple[dict[str, Any], list[str]]:
    """The values of the arguments by the plan's terms, and sentences on what they cannot express.

    Args:
        config: The configuration.
        accumulation: Micro-steps per optimizer step.
        device: cuda or cpu.
        keys: The names of the arguments, by the plan's terms.

    Raises:
        ExportError: it uses tensor or pipeline parallelism, replicas of shards, or fp16 on a CPU.
    """
    refuse_model_parallelism("The Trainer", config, replicas_of_shards=False)
    refuse_fp16_on_cpu(config, device)
    not_carried: list[str] = []
    values: dict[str, Any] = {
        "micro_batch": config.micro_batch,
        "accumulation": accumulation,
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        "use_cpu": device == "cpu",
    }
    if device == "cuda":
        values["tf32"] = config.precision == "tf32"
    if config.gradient_sync == "every":
        values["gradient_sync"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if config.dp_shard > 1 and config.precision in ("bf16", "fp16"):
        not_carried.append(
            f"gradients that shards sum in fp32, as measured: the Trainer's FSDP sums them in {config.precision}"
        )
    values |= _checkpointing(config.checkpointing, keys, not_carried)
    if config.compile == "block":
        not_carried.append("compile=block is no training argument: the companion's prepare_model() compiles each block")
    values["compile"] = config.compile == "model" and not compiles_in_place(config, device)
    values["compile_mode"] = config.compile_mode if values["compile"] else None
    not_carried += left_out(config, "the Trainer", LEFT_BY_TOOLS)
    return values, not_carried


Need = Literal["tensor parallelism", "pipeline parallelism", "replicas of shards", "shards on a CPU"]

_CARRIED_BY: dict[Need, tuple[str, ...]] = {
    "tensor parallelism": ("pytorch", "ray", "torchtitan", "megatron"),
    "pipeline parallelism": ("torchrun", "slurm", "torchtitan", "megatron"),
    "replicas of shards": ("pytorch", "accelerate", "torchtitan"),
    "shards on a CPU": ("pytorch", "deepspeed", "lightning", "fabric"),
}


def refusal(tool: str, need: Need, given: str) -> ExportError:
    """The error of a target that cannot express a plan.

    Args:
        tool: The tool, as a subject.
        need: What it lacks.
        given: What the plan has, the knob first.
    """
    targets, knob = " and ".join(_CARRIED_BY[need]), given.partition("=")[0]
    return ExportError(
        f"{tool} cannot run {need}, and the plan has {given}",
        hint=f"What does: the targets {targets}, or plan.prepare() in your own loop, under torchrun. Or search with "
        f"--fix {knob}=1.",
    )


def refuse_model_parallelism(tool: str, config: TrainingConfig, *, replicas_of_shards: bool) -> None:
    """Refuses tensor and pipeline parallelism, and replicas of shards.

    Args:
        tool: The tool, as a subject.
        config: The plan's.
        replicas_of_shards: Whether the tool has them.

    Raises:
        ExportError: the plan has one of these.
    """
    if config.tp > 1:
        raise refusal(tool, "tensor parallelism", f"tp={config.tp}")
    if config.pp > 1:
        raise refusal(tool, "pipeline parallelism", f"pp={config.pp}")
    if config.dp_shard > 1 and config.dp_replicate > 1 and not replicas_of_shards:
        given = f"dp_replicate={config.dp_replicate} dp_shard={config.dp_shard}"
        raise refusal(tool, "replicas of shards", given)


def refuse_fp16_on_cpu(config: TrainingConfig, device: str) -> None:
    """Refuses what accelerate, and the Trainer, which runs on it, would train in fp32 without a word.

    Raises:
        ExportError: the plan has fp16 for a CPU.
    """
    if config.precision == "fp16" and device == "cpu":
        raise ExportError(
            "the plan has precision=fp16 for a CPU. accelerate, and the Trainer with it, leaves fp16 out on a CPU "
            "without a word: the training would be in fp32",
            hint="Search with --fix precision=bf16 or --fix precision=fp32, or use plan.prepare() in your own loop or "
            "the target pytorch, which train in fp16 as measured.",
        )


def loader_values(setting: LoaderSetting | None) -> dict[str, Any]:
    """The loader's setting by the plan's terms; empty where none was measured: the Trainer's own stays."""
    if setting is None:
        return {}
    return {
        "loader_workers": setting.workers,
        "loader_pin_memory": setting.pin_memory,
        "loader_prefetch_factor": setting.prefetch_factor or 2 if setting.workers else None,
        "loader_persistent_workers": setting.workers > 0,
    }


def named_arguments(config: TrainingConfig, values: dict[str, Any], keys: dict[str, str | None]) -> dict[str, Any]:
    """The values under the names of the arguments, with those of FSDP; terms without an argument are left out."""
    named = {key: value for term, value in values.items() if value is not None and (key := keys.get(term)) is not None}
    if config.dp_shard > 1:
        named |= {
            "fsdp": True,
            "fsdp_config": {"version": 2, "reshard_after_forward": config.reshard_after_forward},
        }
    return named


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


def compiles_in_place(config: TrainingConfig, device: str) -> bool:
    """Whether the whole model is compiled by its own method: by the argument, accelerate switches TF32 on for fp32."""
    return config.compile == "model" and config.precision == "fp32" and device == "cuda"
