"""The code that the targets `transformers` and `trl` copy: arguments from the file beside it, and the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments
from trl import SFTConfig

from autoplan.planner.export.kit.model import (
    allow_one_kernel,
    change_layers,
    compile_options,
    find_blocks,
    set_process,
    wrap_blocks,
)
from autoplan.planner.export.kit.settings import *


def load_arguments() -> Any:
    """The arguments of the Trainer, from the file beside this one.

    Raises:
        RuntimeError: there are not as many ranks as the plan has, or this one sees several GPUs.
    """
    path = Path(__file__).with_name(CONFIG_FILE)
    kind: Any = SFTConfig if TOOL == "trl" else TrainingArguments
    (arguments,) = HfArgumentParser(kind).parse_json_file(path)
    if arguments.n_gpu > 1:
        raise RuntimeError(
            f"this process sees {arguments.n_gpu} GPUs, and the Trainer would split each batch over them "
            f"(DataParallel); the plan has a rank for each GPU. Start it with torchrun --nproc-per-node {RANKS}"
        )
    if arguments.world_size != RANKS:
        raise RuntimeError(
            f"the plan is for {RANKS} ranks, and {arguments.world_size} were started: torchrun --nproc-per-node {RANKS}"
        )
    return arguments


def prepare_model(model: Any) -> Any:
    """Applies the settings of the plan that are no training arguments; returns the model."""
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # the causal loss, as before; the Trainer counts its labels by this
    set_process()
    if ATTENTION_KERNEL:
        allow_one_kernel()
    if BLOCKS:
        find_blocks(model)
    change_layers(model)
    if BATCH_NORM == "sync":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    wrap_blocks(model)
    if COMPILE == "model":
        model.compile(**compile_options())
    if OWN_CHECKPOINTING:
        leave_checkpointing_to_arguments(model)
    return model


def leave_checkpointing_to_arguments(model: Any) -> None:
    """The model had checkpointing of its own switched on; from here on, the training arguments decide."""
    if hasattr(model, "activation_checkpointing_disable"):
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()
