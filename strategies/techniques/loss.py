"""The loss knob: output head and cross-entropy in one operation that never holds all logits.

It computes what the full loss computes, in another order of summation: see `techniques/loss_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.additivity import SHORT_LENGTH, shorten
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure, disable_dropout
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.techniques.loss_kernels import Kernel, choose_kernel
from autoplan.strategies.workloads.batch import Batch, move_batch
from autoplan.strategies.workloads.language_model import CausalHead, causal_loss
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.training_mode import enter_training_mode
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, OutputHead, Workload

CHUNK_ROWS = 1024  # rows of logits held at once where the vocabulary is split over ranks (tensor_parallel.py)

LARGEST_PROVED_PARAMETERS = 200_000_000
"""Models up to this size are run twice on two short samples, to compare the fused loss with the workload's."""

PROOF_BATCHES = 2
LOSS_TOLERANCE = 2e-6
"""Relative difference of the two losses, both in fp32: rounding of their sums measured 1e-7 (GPT-2)."""
GRADIENT_TOLERANCE = 1e-5
"""Relative difference of the whole gradient (L2): rounding measured 8e-7 (GPT-2); a z-loss of 1e-4 gives 1e-3."""


class LossStrategy:
    """full: the workload's own loss; fused: through workload.head."""

    name = "loss"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """fused where the workload says how its head splits off, and it is shown to compute the workload's loss."""
        reason = reason_against_fusing(workload, structure.model) or prove_fused_loss(
            workload, structure.model, torch.device(device)
        )
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


def prove_fused_loss(workload: Workload, model: nn.Module, device: torch.device) -> str | None:
    """Why the fused loss does not compute the workload's own loss; None if it does.

    Loss, count and gradient of both are compared in fp32, with dropout off, on short batches of two samples. So a
    z-loss, label smoothing, class weights or an extra term, which the output head knows nothing of, are found.

    Args:
        workload: Has a head; its model is built once more.
        model: The model on the meta device; only its size is read.
        device: Where to run.
    """
    assert workload.head is not None, "reason_against_fusing refuses a workload without a head"
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST_PROVED_PARAMETERS:
        if workload.loss is causal_loss and isinstance(workload.head, CausalHead):
            return None
        return "the model is too large to compare the fused loss with a loss function of your own before the search"
    try:
        real = _build_real(workload, device)
        for index in range(PROOF_BATCHES):
            reason = _compare_on(workload, real, index, device)
            if reason is not None:
                return reason
    except Exception as error:
        return f"comparing it with the workload's loss failed: {type(error).__name__}: {error}".splitlines()[0]
    return None


def _build_real(workload: Workload, device: torch.device) -> nn.Module:
    seed_generators(workload.seed)
    real = workload.build_model().to(device).float()  # bf16 parameters would hide a small difference
    enter_training_mode(real)
    disable_dropout(real)
    return real


def _compare_on(workload: Workload, model: nn.Module, index: int, device: torch.device) -> str | None:
    """The comparison on one batch; a model that refuses short sequences gets them at full length."""
    whole = workload.make_batch(2, index)
    try:
        own = _loss_and_gradient(workload, model, workload.loss, move_batch(shorten(whole, SHORT_LENGTH), device))
        batch = shorten(whole, SHORT_LENGTH)
    except Exception:  # a window or a pooling may need longer sequences
        batch = whole
        own = _loss_and_gradient(workload, model, workload.loss, move_batch(batch, device))
    assert workload.head is not None
    fused_loss = FusedLoss(workload.head, choose_kernel("fp32", compiled=False))
    fused = _loss_and_gradient(workload, model, fused_loss, move_batch(batch, device))
    if own[1] != fused[1]:
        return f"your loss counts {own[1]:g} items of a batch, and the fused one {fused[1]:g}"
    difference = abs(own[0] - fused[0]) / max(abs(own[0]), 1e-12)
    if difference > LOSS_TOLERANCE:
        return f"your loss is not the cross-entropy of the head's targets alone: it differs by {difference:.2g}"
    squared = sum(float((one - two).square().sum()) for one, two in zip(own[2], fused[2], strict=True))
    norm = sum(float(one.square().sum()) for one in own[2])
    difference = (squared / max(norm, 1e-24)) ** 0.5
    if difference > GRADIENT_TOLERANCE:
        return f"the gradient of your loss is not that of the cross-entropy alone: it differs by {difference:.2g}"
    return None


def _loss_and_gradient(
    workload: Workload, model: nn.Module, loss: Any, batch: Batch
) -> tuple[float, float, list[torch.Tensor]]:
    """The summed loss, its count and its gradient, with the workload's seed."""
    seed_generators(workload.seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        total, count = loss(model, batch)
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return float(total.detach()), float(count), [gradient.detach().float() for gradient in found]
