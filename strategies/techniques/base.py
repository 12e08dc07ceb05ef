"""What every technique shares: the Strategy protocol, the Build that it works on, and the Choices it offers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.workload import TrainingModule, Workload

if TYPE_CHECKING:
    from autoplan.strategies.analysis.structure import Structure
    from autoplan.strategies.analysis.tensor_plans import TensorPlan


class LeftOut(Record):
    """A value that a knob does not offer here, and why."""

    value: Any
    reason: str


class Choices(Record):
    """The values of one knob that are legal for this workload on this machine, the plain one first.

    `left_out` keeps the others with the reason, for the explanation of the plan.
    """

    knob: str
    values: tuple[Any, ...]
    left_out: tuple[LeftOut, ...] = ()


@dataclass(kw_only=True)
class Build:
    """A training run while it is being put together. Each strategy's apply() changes one part of it.

    Attributes:
        workload, config, device: What is built, how, and where.
        model: The user's model, the one whose state is saved.
        module: What a step calls: TrainingModule(model, loss), perhaps wrapped (DDP, compile).
        structure: The repeated blocks, embeddings and head of the model.
        mesh: The device mesh, or None for one rank.
        optimizer: Set by the optimizer strategy.
        scaler: The gradient scaler of fp16, else None.
        forward_context: Opens the context of each forward (autocast).
        set_gradient_sync: Called with False before every micro-step but the last (DDP, FSDP2).
        gradient_ranks: The ranks over which the wrapper averages gradients; the loss is scaled by it, since the
            gradient of the run is a sum over ranks divided by the global count.
        sum_over_ranks: Sums a tensor over the data-parallel ranks.
        clip_gradients: Clips to a norm and returns the norm before clipping, over all ranks that hold gradients.
        begin_micro_step: Called before every micro-step.
        dp_rank: Which share of the global batch is this rank's.
        gradient_weights: By id of a parameter, the share with which this rank counts its gradient in the norm (tied
            over two stages: a half); 1 where not given.
        finish_gradients: Called once per step, after the last backward and before anything reads the gradients.
        tensor_plan: How the whole model is split over tp, made before a pipeline cut.
        pipeline: How the model is cut, between the two steps of pipeline parallelism.
        step_engine: Runs forward and backward over a whole share of the batch (pipeline); None: one after another.
    """

    workload: Workload
    config: TrainingConfig
    device: torch.device
    model: nn.Module
    module: nn.Module
    structure: Structure
    mesh: Any = None
    optimizer: torch.optim.Optimizer | None = None
    scaler: torch.amp.GradScaler | None = None
    forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    set_gradient_sync: Callable[[bool], None] = field(default=lambda sync: None)
    gradient_ranks: int = 1
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda tensor: tensor)
    clip_gradients: Callable[[list[nn.Parameter], float], torch.Tensor] = torch.nn.utils.clip_grad_norm_
    begin_micro_step: Callable[[], None] = field(default=lambda: None)
    dp_rank: int = 0
    gradient_weights: dict[int, float] = field(default_factory=dict)
    finish_gradients: list[Callable[[], None]] = field(default_factory=list)
    tensor_plan: TensorPlan | None = None
    pipeline: Any = None
    step_engine: Any = None

    @property
    def training_module(self) -> TrainingModule:
        """The TrainingModule inside whatever wraps it."""
        for module in self.module.modules():
            if isinstance(module, TrainingModule):
                return module
        raise AssertionError("a build always holds a TrainingModule")


class Strategy(Protocol):
    """One technique: which values it offers here, and how it changes a build.

    `choices` gets the model on the meta device: it reads structure, never numbers.
    """

    name: str

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices: ...

    def apply(self, build: Build) -> None: ...
