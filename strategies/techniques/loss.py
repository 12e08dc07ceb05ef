"""The loss knob: output head and cross-entropy in one operation that never holds all logits.

It computes what the full loss computes, in another order of summation: see `techniques/loss_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.additivity import SHORT_LENGTH, shorten
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure, disable_dropout, find_structure
from autoplan.strategies.techniques.base import Build, check_applies
from autoplan.strategies.techniques.deferred_logits import FUSED, DeferredLoss
from autoplan.strategies.techniques.loss_kernels import (
    FastestKernel,
    Kernel,
    choose_gpu_kernel,
    choose_kernel,
    full_fp32,
)
from autoplan.strategies.workloads.batch import Batch, move_batch
from autoplan.strategies.workloads.devices import build_fake, is_elsewhere
from autoplan.strategies.workloads.language_model import CausalHead, causal_loss
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.training_mode import enter_training_mode
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, OutputHead, Workload

CHUNK_ROWS = 1024  # rows of logits held at once where the vocabulary is split over ranks (tensor_parallel.py)

LARGEST_PROVED_PARAMETERS = 200_000_000
"""Models up to this size are run twice on two short samples, to compare the fused loss with the workload's."""

LARGEST_COMPARED_PARAMETERS = 20_000_000
"""The same where the loss function runs as it is, with the logits of its head deferred: what it does with them is then
seen without values, in a fraction of the seconds."""

PROOF_BATCHES = 2
LOSS_TOLERANCE = 2e-6
"""Relative difference of the two losses, both in fp32: rounding of their sums measured 1e-7 (GPT-2)."""
GRADIENT_TOLERANCE = 1e-5
"""Relative difference of the whole gradient (L2): rounding measured 8e-7 (GPT-2); a z-loss of 1e-4 gives 1e-3."""


class LossStrategy:
    """full: the workload's own loss; fused: through workload.head, or with the logits of the model's head deferred."""

    name = "loss"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """fused where a head is known, and the fused loss is shown to compute the workload's loss."""
        reason = reason_against_fusing(workload, structure) or prove_fused_loss(
            workload, structure.model, torch.device("cpu" if is_elsewhere(device) else device)
        )
        return offer(self.name, ("full",), {"fused": reason})

    def apply(self, build: Build) -> None:
        """Puts the fused loss in the place of the workload's.

        Raises:
            ConfigError: there is no head to fuse.
        """
        if build.config.loss == "full":
            return
        if build.cut is not None and build.structure.head is None:
            return  # the last stage of the pipeline has the head, and the loss
        hint = "Say how the head splits off (Workload(head=...), plan.prepare(..., head=...)), or use loss=full."
        check_applies(build.config, self.name, reason_against_fusing(build.workload, build.structure), hint)
        kernel = kernel_on(build.device, build.config.precision, compiled=build.config.compile == "model")
        fused = build.training_module.loss = make_fused_loss(build.workload, build.structure, kernel)
        if isinstance(kernel, FastestKernel):  # here, where there are no activations yet
            linear: Any = fused.linear if isinstance(fused, DeferredLoss) else fused.head.linear(build.model)
            rows = build.config.micro_batch * (build.workload.sequence_length or SHORT_LENGTH)
            kernel.choose(linear.weight, getattr(linear, "bias", None), rows)


def kernel_on(device: torch.device, precision: str, *, compiled: bool) -> Kernel:
    """The kernel of a precision on a device; `compiled`: it runs inside torch.compile."""
    choose = choose_gpu_kernel if device.type == "cuda" else choose_kernel
    return choose(precision, compiled=compiled)


def make_fused_loss(workload: Workload, structure: Structure, kernel: Kernel) -> FusedLoss | DeferredLoss:
    """The fused loss of a workload: by the head that it names, or by deferring the logits of the model's own."""
    if splits_by_head(workload, structure.model):
        assert workload.head is not None
        return FusedLoss(workload.head, kernel)
    linear = output_linear(structure)
    assert linear is not None, "reason_against_fusing refuses a model without a head"
    return DeferredLoss(workload.loss, linear, kernel)


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


def splits_by_head(workload: Workload, model: nn.Module) -> bool:
    """Whether the fused loss goes through the head that the workload names."""
    if workload.head is None:
        return False
    reason = getattr(workload.head, "reason_against", None)
    return reason is None or reason(model) is None


def output_linear(structure: Structure) -> nn.Linear | None:
    """The linear layer that is the model's output head; None where there is none.

    Where the head is wrapped (a copy of it trains beside the original, as in peft's modules_to_save), it is the one
    inside that trains.
    """
    if structure.head is None:
        return None
    inside = [module for module in structure.head[1].modules() if type(module) is nn.Linear]
    if len(inside) > 1:
        inside = [module for module in inside if module.weight.requires_grad]
    return inside[0] if len(inside) == 1 else None


def reason_against_fusing(workload: Workload, structure: Structure) -> str | None:
    """Why the fused loss does not apply; None if it does."""
    if splits_by_head(workload, structure.model):
        return None
    linear = output_linear(structure)
    if linear is None:
        kind = "" if structure.head is None else f" (it is a {type(structure.head[1]).__name__})"
        return f"the model has no output head that is a plain linear layer{kind}, and the workload names none"
    if linear.out_features <= linear.in_features:
        return (
            f"the output head has {linear.out_features} classes for a hidden size of {linear.in_features}: its logits "
            "take no more memory than its input"
        )
    return None


def prove_fused_loss(workload: Workload, model: nn.Module, device: torch.device) -> str | None:
    """Why the fused loss does not compute the workload's own loss; None if it does.

    Loss, count and gradient of both are compared in fp32, with dropout off, on short batches of two samples. So a
    z-loss, label smoothing, class weights or an extra term, which the output head knows nothing of, are found.

    Args:
        workload: Its model is built once more.
        model: The model on the meta device; only its size is read.
        device: Where to run.
    """
    by_head = splits_by_head(workload, model)
    if by_head and workload.loss is causal_loss and type(workload.head) is CausalHead:
        return None  # both are ours, and tested together
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST_PROVED_PARAMETERS or (size > LARGEST_COMPARED_PARAMETERS and not by_head):
        if by_head:
            return "the model is too large to compare the fused loss with a loss function of your own before the search"
        return _reason_to_need_logits(workload, device)
    try:
        seed_generators(workload.seed)
        real = workload.build_model().to(device).float()  # bf16 parameters would hide a small difference
        enter_training_mode(real)
        disable_dropout(real)
        for index in range(PROOF_BATCHES):
            with full_fp32():  # whatever the script has set: TF32 rounds more than what is looked for
                reason = _compare_on(workload, real, index, device)
            if reason is not None:
                return reason
    except Exception as error:
        return f"comparing it with the workload's loss failed: {type(error).__name__}: {error}".splitlines()[0]
    return None


def _reason_to_need_logits(workload: Workload, device: torch.device) -> str | None:
    """The same for a model that is too large to run: deferred logits are the workload's own loss, if it needs no more.

    What the loss function does with them is seen without values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watched: list[str] = []
    try:
        short = shorten(workload.make_batch(workload.fixed_micro_batch or 2, 0), SHORT_LENGTH)  # reads labels
        fake = build_fake(workload.build_model, mode, device)
        with mode, torch.device(device):
            enter_training_mode(fake)
            deferred = make_fused_loss(workload, find_structure(fake), choose_kernel("fp32", compiled=False))
            assert isinstance(deferred, DeferredLoss)
            deferred.watch = watched
            deferred(fake, move_batch(short, device))
    except Exception as error:
        return f"its loss function needs values to run: {type(error).__name__}: {error}".splitlines()[0]
    return _reason_of_watch(watched)


def _reason_of_watch(watched: list[str]) -> str | None:
    """Why deferring logits saves nothing, by what was done with them; None where it does."""
    others = [operation for operation in watched if operation != FUSED]
    if others:
        return f"your loss function needs all logits at once, for more than a plain cross-entropy ({others[0]})"
    if not watched:
        return "your loss function takes no cross-entropy of the output head's logits"
    return None


def _compare_on(workload: Workload, model: nn.Module, index: int, device: torch.device) -> str | None:
    """The comparison on one batch; a model that refuses short sequences gets them at full length."""
    whole = workload.make_batch(workload.fixed_micro_batch or 2, index)
    try:
        batch = shorten(whole, SHORT_LENGTH)
        own = _loss_and_gradient(workload, model, workload.loss, move_batch(batch, device))
    except Exception:  # a window or a pooling may need longer sequences
        batch = whole
        own = _loss_and_gradient(workload, model, workload.loss, move_batch(batch, device))
    fused_loss = make_fused_loss(workload, find_structure(model), choose_kernel("fp32", compiled=False))
    watched: list[str] = []
    if isinstance(fused_loss, DeferredLoss):
        fused_loss.watch = watched
    fused = _loss_and_gradient(workload, model, fused_loss, move_batch(batch, device))
    if isinstance(fused_loss, DeferredLoss) and (reason := _reason_of_watch(watched)) is not None:
        return reason
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
