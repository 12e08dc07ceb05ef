"""The precision knob: in which number format matmuls run. Parameters, gradients and optimizer states stay fp32."""

from __future__ import annotations

import functools

import torch

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build, compute_capability
from autoplan.strategies.workloads.workload import Workload

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PrecisionStrategy:
    """fp32, tf32, bf16 and fp16 autocast."""

    name = "precision"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """The precisions that the device can compute at all; the probes say which of them is slow there."""
        if device == "cpu":
            return offer(self.name, ("fp32", "bf16", "fp16"), {"tf32": "TF32 is a format of NVIDIA GPUs"})
        capability = compute_capability(hardware)
        if capability >= (8, 0):
            if any(parameter.dtype is torch.float32 for parameter in structure.model.parameters()):
                return offer(self.name, ("fp32", "tf32", "bf16", "fp16"))
            return offer(self.name, ("fp32", "bf16", "fp16"), {"tf32": "no parameter is in fp32, so no product is"})
        reason = f"it needs compute capability 8.0; this device has {capability[0]}.{capability[1]}"
        return offer(self.name, ("fp32", "fp16"), dict.fromkeys(("tf32", "bf16"), reason))

    def apply(self, build: Build) -> None:
        """Sets the matmul format, the autocast context and the loss scaler.

        The matmul format is a setting of the process: each run sets it, to fp32 for every precision but tf32. A step
        that is a program of its own keeps what it set, unless a precision was chosen.

        Raises:
            ConfigError: tf32 without a CUDA device.
        """
        precision = build.config.precision
        if precision == "tf32" and build.device.type != "cuda":
            raise ConfigError("precision=tf32 needs a CUDA device", hint="Use precision=fp32 or bf16 on CPU.")
        if build.workload.knobs is None or precision != "fp32":
            set_matmul_tf32(precision == "tf32")
        dtype = AUTOCAST_DTYPES.get(precision)
        if dtype is None:
            return
        # The selective policy records the operations of a block. Where a block runs twice in a forward, the cache
        # of autocast leaves the casts of weights out of the second record, and its recomputation does not match.
        cached = build.config.checkpointing != "selective"
        build.hooks.forward_context = functools.partial(
            torch.autocast, build.device.type, dtype=dtype, cache_enabled=cached
        )
        if precision == "fp16":
            build.scaler = torch.amp.GradScaler(build.device.type)


def set_matmul_tf32(enabled: bool) -> None:
    """Lets fp32 matmuls and convolutions on CUDA round their inputs to TF32, or not; for the whole process.

    Set through the older of torch's two interfaces: it sets the newer one (`fp32_precision`) along, while after the
    newer one alone the getters raise, and torch.compile calls them (torch 2.13, measured).
    """
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if enabled else "highest")
        torch.backends.cudnn.allow_tf32 = enabled
