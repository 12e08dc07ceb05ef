"""A plan's changes inside a model and in the process, for every export. The code is that of the techniques."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoplan.planner.export.kit.settings import *
from autoplan.strategies.analysis.structure import language_models, repeated_blocks
from autoplan.strategies.techniques.allocator import expand_segments, keep_freed_memory
from autoplan.strategies.techniques.attention import use_maskless_attention
from autoplan.strategies.techniques.checkpointing import replace_module, wrap
from autoplan.strategies.techniques.data_parallel import gather_dtype, shard_modules, with_parameters
from autoplan.strategies.techniques.fp8 import fp8_linears, use_fp8
from autoplan.strategies.techniques.kernels import use_liger
from autoplan.strategies.techniques.precision import set_matmul_tf32
from autoplan.strategies.workloads.training_mode import caching_configs, enter_training_mode, own_checkpointing


def prepare_module(model: nn.Module) -> nn.Module:
    """Applies to a model what is no setting of the tool; returns the model, which is changed in place.

    Args:
        model: What the loss calls, an nn.Module. For the Trainer of Lightning it is the one inside a LightningModule;
            the LightningModule itself where its training_step calls `self(...)`.
    """
    enter_training_mode(model)  # from_pretrained returns evaluation mode, and nothing below changes it
    for part, flag in own_checkpointing(model):
        setattr(part, flag, False)  # the plan decides what is recomputed
    set_process()
    if ATTENTION_KERNEL:
        allow_one_kernel()
    if BLOCKS:
        find_blocks(model)
    change_layers(model)
    if BATCH_NORM == "sync":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if CHECKPOINTING != "none":
        for config in caching_configs(model):
            config.use_cache = False  # a recomputation would append to a key-value cache
    if CHECKPOINTING == "selective" and PRECISION in ("bf16", "fp16"):
        torch.set_autocast_cache_enabled(False)  # else a recomputation has fewer casts to record
    wrap_blocks(model)
    if COMPILE == "model":
        model.compile(**compile_options())
    return model


def set_process() -> None:
    """Sets what belongs to the whole process: threads, allocator, the format of fp32 matmuls."""
    if THREADS is not None:
        torch.set_num_threads(THREADS)
    if ALLOCATOR == "keep":
        keep_freed_memory()
    if ALLOCATOR == "expandable":
        expand_segments()
    if DEVICE == "cuda":
        set_matmul_tf32(PRECISION == "tf32")


def allow_one_kernel() -> None:
    """Leaves scaled_dot_product_attention one kernel, for the whole process."""
    torch.backends.cuda.enable_flash_sdp(ATTENTION_KERNEL == "FLASH_ATTENTION")
    torch.backends.cuda.enable_cudnn_sdp(ATTENTION_KERNEL == "CUDNN_ATTENTION")
    torch.backends.cuda.enable_mem_efficient_sdp(ATTENTION_KERNEL == "EFFICIENT_ATTENTION")
    torch.backends.cuda.enable_math_sdp(False)


def find_blocks(model: Any) -> None:
    """Finds the repeated blocks, and keeps their names at the model: `plan_stacks`, and all as `plan_blocks`."""
    trained, frozen = repeated_blocks(model)
    model.plan_stacks = [[name for name, _ in stack] for stack in trained]
    model.plan_blocks = [name for stack in (*trained, *frozen) for name, _ in stack]


def change_layers(model: Any) -> None:
    """Swaps what happens inside of the blocks."""
    if ATTENTION != "own":
        for inner in language_models(model):
            if ATTENTION == "eager" or inner._supports_sdpa:
                inner.set_attn_implementation(ATTENTION)
    if MASKLESS:
        use_maskless_attention(language_models(model))  # for batches without a mask
    if KERNELS != "own":
        assert use_liger(model), KERNELS
    if FP8 != "off":
        in_fp8 = fp8_linears(model, [name for stack in model.plan_stacks for name in stack], FP8)
        assert in_fp8, "no linear layer is large enough: it is another model"
        use_fp8(model, in_fp8, FP8)  # pip install torchao


def wrap_blocks(model: Any) -> None:
    """Has blocks recomputed in the backward, and compiled, after everything that changes their inside."""
    if CHECKPOINTING != "none" or COMPILE == "block":
        require_blocks(model)
    if CHECKPOINTING != "none":
        selective = CHECKPOINTING == "selective"
        for name in [name for stack in model.plan_stacks for name in stack[::CHECKPOINT_EVERY]]:
            block = wrap(model.get_submodule(name), selective=selective, compiled=COMPILE != "off")
            replace_module(model, name, block)
    if COMPILE == "block":
        for name in model.plan_blocks:
            model.get_submodule(name).compile(**compile_options())


def require_blocks(model: Any) -> None:
    """Refuses a model without repeated blocks, which the plan needs.

    Raises:
        ValueError: it has none.
    """
    if not model.plan_stacks:
        raise ValueError("the model has no repeated blocks, which the plan needs: it is another model")


def compile_options() -> dict[str, Any]:
    """The arguments of torch.compile."""
    options: dict[str, Any] = {"dynamic": False}
    if COMPILE_MODE != "default":
        options["mode"] = COMPILE_MODE
    return options


def shard(model: Any, mesh: Any) -> Any:
    """Shards a prepared model over the data-parallel ranks with FSDP2; returns the model.

    Args:
        model: From prepare_module().
        mesh: The device mesh that the tool made, with an axis `data_parallel`.
    """
    shard_modules(
        with_parameters(model, model.plan_blocks),
        [model],
        mesh["data_parallel"],
        reshard=RESHARD_AFTER_FORWARD,
        gathered=gather_dtype(PRECISION, DEVICE),
    )
    return model
