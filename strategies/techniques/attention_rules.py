"""What the kernels of attention go with. Loads no torch."""

from __future__ import annotations

from autoplan.strategies.config import TrainingConfig

READS = ("attention", "precision")
"""The knobs that `incompatible` reads."""

SIXTEEN_BITS_ONLY = ("sdpa_flash", "sdpa_cudnn")
"""Kernels that take bf16 and fp16 alone: torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_dtypes."""


def incompatible(config: TrainingConfig, global_batch: int | None = None) -> str | None:
    """Why the kernel does not go with the precision; None if it does."""
    if config.attention in SIXTEEN_BITS_ONLY and config.precision not in ("bf16", "fp16"):
        return f"attention={config.attention} takes numbers of 16 bits: precision=bf16 or fp16"
    return None
