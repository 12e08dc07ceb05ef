"""A plan's values of the kit's constants (planner/export/kit/settings.py), and their lines in an export."""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from typing import Any

from autoplan.planner.export.kit import settings
from autoplan.planner.plan.loader import setting_of
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.config import ATTENTION_BACKENDS, CHECKPOINT_EVERY, CUDAGRAPH_MODES, TrainingConfig

REMARKS = {
    "GLOBAL_BATCH": "samples per optimizer step, over all ranks",
    "MICRO_BATCH": "samples per forward and backward on one rank",
    "MAX_GRAD_NORM": "of the whole gradient; None: no clipping",
    "SEED": "set before the model is built",
    "ITEMS": "of a micro-batch without padding; it keeps the loss at the scale of a mean",
    "HEAD": "the output head, whose logits are not computed all at once",
    "TENSOR_PLAN": "which projections are split over the tensor-parallel ranks, and how",
}


def plain_settings() -> dict[str, Any]:
    """The constants of the kit at the plain run's values."""
    return {name: value for name, value in vars(settings).items() if name.isupper()}


def uses_ddp(config: TrainingConfig) -> bool:
    """DDP for replicas of plain parameters, as techniques/data_parallel.py; FSDP2 for other data-parallel ranks."""
    return config.dp > 1 and config.dp_shard == 1 and config.tp == 1


def plan_settings(plan: Plan) -> dict[str, Any]:
    """The constants of a plan's batch and knobs; the workload's are at the values of the plain run."""
    config = plan.config
    kernel = ATTENTION_BACKENDS.get(config.attention, "")
    fsdp = config.dp > 1 and not uses_ddp(config)
    by_block = config.checkpointing != "none" or config.compile == "block" or config.fp8 != "off"
    loading = setting_of(plan)
    return plain_settings() | {
        "DEVICE": plan.device,
        "GLOBAL_BATCH": plan.workload.global_batch,
        "MICRO_BATCH": config.micro_batch,
        "ACCUMULATION": plan.accumulation,
        "LOCAL_BATCH": config.micro_batch * plan.accumulation,
        "SEQUENCE_LENGTH": plan.workload.sequence_length,
        "ITEMS": config.micro_batch * (plan.workload.sequence_length or 1),
        "UNIT": plan.workload.unit,
        "LOADER_ARGUMENTS": {} if loading is None else loading.arguments,
        **{name.upper(): getattr(config, name) for name in _AS_THEY_ARE},
        "CHECKPOINT_EVERY": CHECKPOINT_EVERY.get(config.checkpointing, 1),
        "CUDA_GRAPHS": config.compile_mode in CUDAGRAPH_MODES,
        "ATTENTION": "sdpa" if kernel else config.attention,
        "ATTENTION_KERNEL": kernel,
        "MASKLESS": avoids_masks(plan),
        "BLOCKS": by_block or config.tp > 1 or fsdp,
        "RANKS": config.world_size,
        "DDP": uses_ddp(config),
        "FSDP": fsdp,
        "RESHARD_AFTER_FORWARD": config.reshard_after_forward and config.dp_shard > 1,
    }


_AS_THEY_ARE = (
    *("precision", "checkpointing", "compile", "compile_mode", "kernels", "fp8", "loss", "optimizer_step"),
    *("offload", "parameters", "optimizer_state", "threads", "allocator", "batch_norm"),
    *("dp_replicate", "dp_shard", "tp", "gradient_sync"),
)
"""Knobs whose constants have their values."""


def avoids_masks(plan: Plan) -> bool:
    """As techniques/attention.py: where transformers would make a mask tensor that plainly causal attention lacks."""
    return plan.config.tp * plan.config.pp == 1 and (plan.config.compile == "model" or plan.device == "cuda")


def constant_lines(constants: Mapping[str, Any]) -> str:
    """Lines that set constants, each with what it is."""
    lines = []
    for name, value in constants.items():
        text = repr(value)
        if isinstance(value, dict | list):
            text = pprint.pformat(value, width=110, compact=True, sort_dicts=False)
        elif isinstance(value, str) and "\n" in value:
            text = "(\n" + "\n".join(f"    {line!r}" for line in value.splitlines(keepends=True)) + "\n)"
        lines.append(f"{name} = {text}" + (f"  # {REMARKS[name]}" if name in REMARKS else ""))
    return "\n".join(lines)
