"""The loss knob: output head and cross-entropy in one operation that never holds all logits.

It computes what the full loss computes, in another order of summation: see `techniques/loss_kernels.py`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.techniques.loss_kernels import Kernel, choose_kernel
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, OutputHead, Workload

CHUNK_ROWS = 1024  # rows of logits held at once where the vocabulary is split over ranks (tensor_parallel.py)


class LossStrategy:
    """full: the workload's own loss; fused: through workload.head."""

    name = "loss"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """fused where the workload says how its head splits off."""
        reason = reason_against_fusing(workload, structure.model)
        return offer(self.name, ("full",), {"fused": reason})

    def apply(self, build: Build) -> None:
        """Puts the fused loss in the place of the workload's.

        Raises:
            ConfigError: the workload has no head to fuse.
        """
        if build.config.loss == "full":
            return
        if build.pipeline.cut is not None and build.structure.head is None:
            return  # the last stage of the pipeline has the head, and the loss
        reason = reason_against_fusing(build.workload, build.model)
        if reason is not None:
            raise ConfigError(
                f"loss=fused does not apply: {reason}",
                hint="Say how the head splits off (Workload(head=...), plan.prepare(..., head=...)), or use loss=full.",
            )
        assert build.workload.head is not None
        kernel = choose_kernel(build.config.precision, compiled=build.config.compile == "model")
        build.training_module.loss = FusedLoss(build.workload.head, kernel)


class FusedLoss:
    """A loss function in the form that TrainingModule calls."""

    def __init__(self, head: OutputHead, kernel: Kernel) -> None:
        self.head = head
        self.kernel = kernel

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        hidden = self.head.hidden(model, batch)
        linear: Any = self.head.linear(model)
        targets = self.head.targets(batch).reshape(-1)
        total = self.kernel(hidden.reshape(-1, hidden.shape[-1]), linear.weight, getattr(linear, "bias", None), targets)
        return LossSum(total, (targets != IGNORE_INDEX).sum())


def reason_against_fusing(workload: Workload, model: nn.Module) -> str | None:
    """Why the fused loss does not apply; None if it does."""
    if workload.head is None:
        return "the workload does not say how its output head splits off (Workload.head)"
    reason = getattr(workload.head, "reason_against", None)
    return reason(model) if reason is not None else None
