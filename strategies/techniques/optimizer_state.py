"""The optimizer_state knob: Adam's moments in bf16 or 8 bits; and the steps over parameters in bf16.

The optimizer stays the workload's own torch.optim.Adam or AdamW, with all its options: the moments are put into fp32
for its step and rounded after it (techniques/rounded_steps.py). In 8 bits they are torchao's (dynamic 8-bit numbers
with a scale for each 256, Dettmers et al. 2022, arXiv 2110.02861).
"""

from __future__ import annotations

import torch

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.techniques.rounded_steps import held_by, reason_against_8bit, with_rounding
from autoplan.strategies.workloads.optimizers import trainable
from autoplan.strategies.workloads.workload import Workload


class OptimizerStateStrategy:
    """own: as the optimizer makes them; bf16; 8bit."""

    name = "optimizer_state"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """Both forms for torch's Adam and AdamW over fp32 parameters; 8bit where torchao is installed."""
        reason = reason_against_rounding(workload.build_optimizer(trainable(structure.model)))
        return offer(self.name, ("own",), {"bf16": reason, "8bit": reason or reason_against_8bit()})

    def apply(self, build: Build) -> None:
        """Has the optimizer step over what is kept rounded: its states, the parameters, or both.

        Raises:
            ConfigError: the optimizer is another, or torchao is missing.
        """
        config, optimizer = build.config, build.optimizer
        assert optimizer is not None, "the optimizer strategy comes before this"
        if config.optimizer_state != "own":
            reason = reason_against_rounding(optimizer, cast=config.parameters != "own")
            if config.optimizer_state == "8bit":
                reason = reason or reason_against_8bit()
            if reason is not None:
                raise ConfigError(
                    f"optimizer_state={config.optimizer_state} does not apply: {reason}",
                    hint="Use optimizer_state=own.",
                )
        if config.optimizer_state != "own" or config.parameters != "own":
            build.optimizer = with_rounding(
                optimizer,
                parameters=config.parameters,
                states=config.optimizer_state,
                seed=build.workload.seed,
            )


def reason_against_rounding(optimizer: torch.optim.Optimizer, *, cast: bool = False) -> str | None:
    """Why an optimizer's moments are not kept rounded; None if they can be.

    Args:
        optimizer: The workload's own.
        cast: Its parameters were put into bf16 by this run.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        return f"it is for torch.optim.Adam and AdamW; this optimizer is {kind.__module__}.{kind.__qualname__}"
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return "amsgrad keeps the largest second moment, and rounding by chance would push that up"
    if not cast and any(parameter.dtype is not torch.float32 for parameter in held_by(optimizer)):
        return "the parameters are not in fp32, and the moments have their dtype already"
    return None
