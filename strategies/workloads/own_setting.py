"""The setting that a training has now, as a reader sees it: the baseline of its search.

In: the parts of a training. Out: a configuration, or None where a part of it is no knob or cannot be known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoplan.strategies.config import TrainingConfig, knob_values
from autoplan.strategies.workloads.training_mode import own_checkpointing

PRECISIONS = {"no": "fp32", "32-true": "fp32", "bf16": "bf16", "bf16-mixed": "bf16", "fp16": "fp16", "16-mixed": "fp16"}
"""The knob's value for the mixed precision of Accelerate, and for the precision of Lightning and Fabric."""

_MODES = {
    (False, False): "default",
    (True, False): "reduce-overhead",
    (False, True): "max-autotune-no-cudagraphs",
    (True, True): "max-autotune",
}
"""By what Inductor was told: record CUDA graphs, time kernels."""

NOT_KNOWN = "no knobs say your setting: baseline= does, if it is to be compared with"
"""For a note of a training that has something besides."""

UNKNOWN = "unknown"
"""What the values of a knob do not have: another compiler, other modules, another place."""


def own_setting(
    model: nn.Module,
    *,
    micro_batch: int,
    precision: str | None,
    checkpointing: str = "none",
    compile_mode: str | None = None,
) -> TrainingConfig | None:
    """The setting of a training in one process; None: it has something that no knob says.

    Args:
        model: Its own checkpointing is a part of the setting.
        micro_batch: Samples per forward.
        precision: A value of the knob; None: another one.
        checkpointing: What something beside the model has recomputed.
        compile_mode: Of torch.compile around the whole model; None: it is not compiled.
    """
    if checkpointing == "none" and own_checkpointing(model):
        checkpointing = "full"
    if compile_mode is None and any(map(is_compiled, model.modules())):
        compile_mode = UNKNOWN  # of parts, which may be others than the repeated blocks
    knobs: dict[str, Any] = {"precision": precision, "checkpointing": checkpointing}
    if compile_mode is not None:
        knobs |= {"compile": "model", "compile_mode": compile_mode}
    if any(value not in (knob_values(knob) or ()) for knob, value in knobs.items()):
        return None
    return TrainingConfig.model_validate(knobs | {"micro_batch": micro_batch})


def fp32_format(device: torch.device, *, asked: bool | None = None) -> str:
    """What matmuls of fp32 tensors compute in on a device, as the knob says it: `tf32`, or `fp32`.

    Args:
        device: Of the training.
        asked: Whether the training asks for TF32; None: it leaves it as torch is set in this process.
    """
    if device.type != "cuda" or (torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)):
        return "fp32"
    if asked is None:
        matmul: Any = torch.backends.cuda.matmul
        try:
            asked = bool(matmul.allow_tf32)
        except RuntimeError:  # it was set through the newer interface alone
            asked = matmul.fp32_precision == "tf32"
    return "tf32" if asked else "fp32"


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile wraps a module, or its own compile() compiled it."""
    return type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None


def compile_mode_of(model: nn.Module) -> str | None:
    """The mode with which torch.compile, or the model's own compile(), compiled it whole; None: neither did.

    torch keeps no mode, only the settings of Inductor that it stands for.
    """
    if type(model).__name__ == "OptimizedModule":
        settings = getattr(getattr(model, "dynamo_ctx", None), "compiler_config", None)
    elif (compiled := vars(model).get("_compiled_call_impl")) is not None:
        settings = getattr(compiled, "get_compiler_config", lambda: None)()
    else:
        return None
    if not isinstance(settings, dict):
        return UNKNOWN  # of another backend
    return _MODES[bool(settings.get("triton.cudagraphs")), bool(settings.get("max_autotune"))]
