"""The parameters knob: parameters and gradients in bf16, stepped on fp32 master copies or rounded by chance.

Everything that the model holds in fp32 is put into bf16 (but for what docs/techniques.md names); tied ones stay one.
"""

from __future__ import annotations

import torch
from torch import nn

from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build, check_applies
from autoplan.strategies.workloads.workload import Workload

NONE_IN_FP32 = "none of the parameters that train is in fp32"


class ParametersStrategy:
    """own: as the model has them; bf16, bf16_stochastic: cast here, stepped by the optimizer_state technique."""

    name = "parameters"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """Both forms where a parameter that trains is in fp32."""
        reason = None if any(p.requires_grad for p in rounded_parameters(structure.model)) else NONE_IN_FP32
        return offer(self.name, ("own",), {"bf16": reason, "bf16_stochastic": reason})

    def apply(self, build: Build) -> None:
        """Casts the parameters in place; gradients, made in their dtype, are then in bf16 too.

        Raises:
            ConfigError: there is nothing to cast.
        """
        if build.config.parameters == "own":
            return
        found = rounded_parameters(build.model)
        if not any(parameter.requires_grad for parameter in found):
            check_applies(build.config, self.name, NONE_IN_FP32)
        cast_parameters(found)
        build.gradients.clip = clip_in_fp32


def rounded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are put into bf16: those in fp32, but for what has to stay in it."""
    kept = {id(parameter) for module in model.modules() for parameter in _kept_in_fp32(module)}
    return [p for p in model.parameters() if p.dtype is torch.float32 and id(p) not in kept]


def _kept_in_fp32(module: nn.Module) -> list[nn.Parameter]:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return list(module.parameters())
    names = getattr(module, "_keep_in_fp32_modules_strict", None) or ()  # of transformers: for bf16 too
    return [p for name, p in module.named_parameters() if any(part in name.split(".") for part in names)]


def cast_parameters(parameters: list[nn.Parameter]) -> None:
    """Puts parameters into bf16, in place: each stays the object that modules share."""
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)


def clip_in_fp32(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_, with the norm of gradients in bf16 added up in fp32; gives the norm."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack([one.float() for one in norms]))
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
