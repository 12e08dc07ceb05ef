"""Parts that all techniques share: the Strategy protocol, and the Build that it works on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from autoplan.errors import ConfigError
from autoplan.probes import catalog
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.config import PLAIN, TrainingConfig
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.workload import TrainingModule, Workload

if TYPE_CHECKING:
    from autoplan.strategies.analysis.pipeline_trace import PipelineTrace
    from autoplan.strategies.analysis.structure import Structure
    from autoplan.strategies.analysis.tensor_plans import TensorPlan


class MicroStepHooks:
    """Hooks around the forward of each micro-step.

    This is no dataclass: a dataclass looks up its module, and exports copy this class into modules that anybody loads.

    Attributes:
        begin: Called before every micro-step.
        forward_context: Opens the context of each forward (autocast).
        around: Opens the context of each forward and its backward (which attention kernel may run).
        set_sync: Called before every micro-step, with True before the last of a step and False before the others: DDP
            and FSDP2 exchange gradients accordingly.
    """

    def __init__(self) -> None:
        self.begin: Callable[[], None] = lambda: None
        self.forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.set_sync: Callable[[bool], None] = lambda sync: None


class GradientReduction:
    """How the gradients of all ranks become those of the whole global batch.

    Attributes:
        ranks: The ranks over which DDP or FSDP2 averages; the loss is multiplied by it, since the gradient of a run is
            a sum over ranks divided by the global count.
        sum_over_ranks: Sums a tensor over the data-parallel ranks.
        finish: Called once per step, after the last backward and before anything reads the gradients.
        clip: Clips to a norm and returns the norm before clipping, over all ranks that hold gradients.
        norm_weights: By id of a parameter, the share with which this rank counts its gradient in the norm (tied over
            two stages: a half); 1 where not given.
    """

    def __init__(self) -> None:
        self.ranks = 1
        self.sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        self.finish: list[Callable[[], None]] = []
        self.clip: Callable[[list[nn.Parameter], float], torch.Tensor] = torch.nn.utils.clip_grad_norm_
        self.norm_weights: dict[int, float] = {}


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
        hooks: What surrounds each micro-step.
        gradients: How gradients are summed, finished and clipped.
        tensor_plan: Of a pipeline over tp: how the whole model is split, made before the cut.
        cut: Where the model is cut into stages, and which of them are this rank's; None: it is not cut.
        run_pipeline: Runs forward and backward of this rank's share of the batch; None: one micro-batch after another.
            In: the share, and what each summed loss is multiplied by. Out: the summed loss and the count.
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
    hooks: MicroStepHooks = field(default_factory=MicroStepHooks)
    gradients: GradientReduction = field(default_factory=GradientReduction)
    tensor_plan: TensorPlan | None = None
    cut: PipelineCut | None = None
    run_pipeline: Callable[[Batch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def training_module(self) -> TrainingModule:
        """The TrainingModule inside whatever wraps it; a build always holds one."""
        return next(module for module in self.module.modules() if isinstance(module, TrainingModule))


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """Where a model is cut into pipeline stages, and which of them are this rank's.

    Attributes:
        trace: The order of the model's modules, and the hidden states between blocks.
        bounds: (first block, one past the last block) per stage.
        own: This rank's stages.
        tied: Pairs of names of one parameter, of which the first stage holds one and the last the other.
    """

    trace: PipelineTrace
    bounds: list[tuple[int, int]]
    own: list[int]
    tied: list[tuple[str, str]]


class Strategy(Protocol):
    """One technique: which values it offers here, and how it changes a build.

    `choices` gets the model on the meta device: it reads structure, never numbers.
    """

    name: str

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """The plain value alone: others come with another technique, or with the degrees (`degrees.legal_degrees`)."""
        return offer(self.name, (getattr(PLAIN, self.name),))

    def apply(self, build: Build) -> None:
        """Nothing: another technique applies it."""
        return  # else mypy takes it for abstract


def compute_capability(hardware: HardwareProfile) -> tuple[int, int]:
    """Of the GPU of a profile, by its datasheet or else by the driver here; (0, 0): there is none."""
    names = (found.datasheet_name for found in hardware.devices if found.type == "cuda" and found.datasheet_name)
    sheet = next((sheet for name in names if (sheet := catalog.find(name)) is not None), None)
    if sheet is not None:
        major, minor = (sheet.compute_capability or "9.4").split(".")  # AMD's: as torch says it of CDNA 3
        return int(major), int(minor)
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def check_applies(config: TrainingConfig, knob: str, reason: str | None, hint: str = "") -> None:
    """Raises ConfigError where there is a reason against a knob's value; without a hint it names the plain value."""
    if reason is not None:
        hint = hint or f"Use {knob}={getattr(PLAIN, knob)}."
        raise ConfigError(f"{knob}={getattr(config, knob)} does not apply: {reason}", hint=hint)
