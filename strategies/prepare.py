"""prepare(): builds a training run. The one place that says which technique comes after which, and why."""

from __future__ import annotations

from typing import Any

import torch
from autoplan.strategies.attention import AttentionStrategy
from autoplan.strategies.checkpointing import CheckpointingStrategy
from autoplan.strategies.compilation import CompilationStrategy
from autoplan.strategies.loss import LossStrategy
from autoplan.strategies.optimizer import OptimizerStrategy
from autoplan.strategies.precision import PrecisionStrategy
from autoplan.strategies.structure import find_structure
from autoplan.strategies.threads import ThreadsStrategy
from torch import nn

from autoplan.strategies.base import Build, Strategy
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.workload import TrainingModule, Workload

# Registry and order of application in one.
STRATEGIES: tuple[Strategy, ...] = (
    ThreadsStrategy(),  # before any operation of the run: the thread pool takes its size at first use
    AttentionStrategy(),  # swaps what happens inside the blocks, so before anything wraps them
    LossStrategy(),  # swaps the head and the loss, likewise
    CheckpointingStrategy(),  # wraps blocks; before compile, so that the compiler sees the recomputation
    CompilationStrategy(),  # per block: after checkpointing, before anything that hooks blocks to communicate
    PrecisionStrategy(),  # autocast opens around the whole forward; parameters stay fp32
    OptimizerStrategy(),  # last: it holds the parameters as everything above has left them
)


def prepare(
    workload: Workload,
    config: TrainingConfig,
    *,
    device: torch.device | str = "cpu",
    model: nn.Module | None = None,
    mesh: Any = None,
) -> TrainingRun:
    """Builds the training run of a workload under a config.

    Args:
        workload: What is trained.
        config: How.
        device: Where; one rank's own device.
        model: A model that exists already (it is changed in place); None: the workload builds it.
        mesh: The device mesh where config.world_size > 1.

    Raises:
        ConfigError: the config is not legal for the workload or the device.
    """
    device = torch.device(device)
    config.accumulation(workload.global_batch)
    torch.manual_seed(workload.seed)
    if model is None:
        with torch.device(device):
            model = workload.build_model()
    model.to(device)
    model.train()
    build = Build(
        workload=workload,
        config=config,
        device=device,
        model=model,
        module=TrainingModule(model, workload.loss),
        structure=find_structure(model),
        mesh=mesh,
    )
    for strategy in STRATEGIES:
        strategy.apply(build)
    assert build.optimizer is not None
    schedule = workload.build_schedule(build.optimizer) if workload.build_schedule is not None else None
    return TrainingRun(build, schedule)
