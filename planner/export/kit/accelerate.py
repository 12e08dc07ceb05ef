"""The code that the target `accelerate` copies besides the step: the Accelerator of a plan."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoplan.planner.export.kit.settings import *


def make_accelerator(**more: Any) -> Accelerator:
    """The Accelerator of the plan; `more` are your own arguments (log_with, project_dir, ...).

    Raises:
        RuntimeError: it was not started with the plan's config file.
    """
    set_seed(SEED)
    arguments: dict[str, Any] = {}
    if DEVICE == "cpu":
        arguments["cpu"] = True
    if DDP:
        ddp = DistributedDataParallelKwargs(
            broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=FIND_UNUSED
        )
        arguments["kwargs_handlers"] = [ddp]
    if FSDP and DEVICE == "cuda" and PRECISION == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    accelerator = Accelerator(**(arguments | more))
    wanted = {"num_processes": RANKS, "mixed_precision": MIXED_PRECISION}
    if FSDP:
        wanted["distributed_type"] = "FSDP"
    found = {name: getattr(accelerator, name) for name in wanted}
    if found != wanted:
        raise RuntimeError(
            f"the plan has {wanted}, and this process {found}: start it with "
            f"accelerate launch --config_file {CONFIG_FILE}"
        )
    return accelerator


def prepare(accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, *others: Any) -> Any:
    """accelerator.prepare(), with the plan's units of sharding; the schedule stays outside (accelerate would step it
    once per rank)."""
    if FSDP:
        blocks: list[nn.Module] = [model.get_submodule(name) for name in model.plan_blocks]
        kinds = {type(getattr(block, "_checkpoint_wrapped_module", block)).__name__ for block in blocks}
        plugin: Any = accelerator.state.fsdp_plugin
        plugin.transformer_cls_names_to_wrap = sorted(kinds)
    return accelerator.prepare(model, optimizer, *others)
