"""prepare(): builds a training run. The one place that says which technique comes after which, and why."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from autoplan.errors import ConfigError
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import LEFT_BY_TOOLS, TrainingConfig, not_carried
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.techniques.allocator import AllocatorStrategy, set_allocator
from autoplan.strategies.techniques.attention import AttentionStrategy
from autoplan.strategies.techniques.base import Build, Strategy
from autoplan.strategies.techniques.batch_norm import BatchNormStrategy
from autoplan.strategies.techniques.checkpointing import CheckpointingStrategy
from autoplan.strategies.techniques.compilation import CompilationStrategy, CompileModeStrategy
from autoplan.strategies.techniques.data_parallel import DataParallelStrategy
from autoplan.strategies.techniques.fp8 import Fp8Strategy
from autoplan.strategies.techniques.kernels import KernelsStrategy
from autoplan.strategies.techniques.loss import LossStrategy
from autoplan.strategies.techniques.mesh import broadcast_values, build_mesh, rank_seed
from autoplan.strategies.techniques.micro_batch import MicroBatchStrategy
from autoplan.strategies.techniques.offload import OffloadStrategy
from autoplan.strategies.techniques.optimizer import OptimizerStateStrategy, OptimizerStrategy
from autoplan.strategies.techniques.parameters import ParametersStrategy
from autoplan.strategies.techniques.pipeline_parallel import PipelineEngineStrategy, PipelineStrategy
from autoplan.strategies.techniques.precision import PrecisionStrategy, set_matmul_tf32
from autoplan.strategies.techniques.rules import incompatible
from autoplan.strategies.techniques.tensor_parallel import TensorParallelStrategy
from autoplan.strategies.techniques.threads import ThreadsStrategy, place_rank
from autoplan.strategies.workloads.randomness import seeded_build
from autoplan.strategies.workloads.training_mode import caching_configs, enter_training_mode
from autoplan.strategies.workloads.workload import TrainingModule, Workload

# Registry and order of application in one.
STRATEGIES: tuple[Strategy, ...] = (
    MicroBatchStrategy(),  # refuses before anything is changed
    ThreadsStrategy(),  # before any operation of the run: the thread pool takes its size at first use
    AllocatorStrategy(),  # for the process too, before the first activations; on CUDA prepare() has set it already
    PipelineStrategy(),  # drops what other stages hold, so that all below works on this rank's part alone
    ParametersStrategy(),  # casts what is left, in place, before anything makes other tensors of it
    AttentionStrategy(),  # swaps what happens inside the blocks, so before anything wraps them
    KernelsStrategy(),  # likewise
    Fp8Strategy(),  # swaps linear layers inside the blocks, likewise; those of kernels look them up by name
    LossStrategy(),  # swaps the head and the loss, likewise
    TensorParallelStrategy(),  # splits what is inside the blocks, so before they are wrapped
    BatchNormStrategy(),  # swaps modules inside the blocks, likewise
    CheckpointingStrategy(),  # wraps blocks; before compile, so that the compiler sees the recomputation
    CompilationStrategy(),  # per block: after checkpointing, before anything that hooks blocks to communicate
    CompileModeStrategy(),  # a choice of its own, applied with the one above
    PrecisionStrategy(),  # autocast opens around the whole forward; parameters stay fp32
    DataParallelStrategy(),  # DDP or FSDP2 around all that is called in a step
    PipelineEngineStrategy(),  # makes stages of what is left, each wrapped as above, and their schedule
    OptimizerStrategy(),  # it holds the parameters as everything above has left them
    OptimizerStateStrategy(),  # after it: steps of that optimizer over what is kept rounded
    OffloadStrategy(),  # last: it moves the states of that optimizer, and what is saved inside every other context
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

    Three settings belong to the process, not to the run, and stay set: torch's number of threads (where the config
    names one), the allocator (likewise; on CUDA before the model is built), and, on CUDA, whether fp32 matmuls round to
    TF32. Torch is seeded with the workload's seed; `random` and NumPy too, while the model is built.

    Args:
        workload: What is trained.
        config: How.
        device: Where; one rank's own device.
        model: A model that exists already; it is changed in place, and every rank gets the values of rank 0. None: the
            workload builds it.
        mesh: The device mesh where config.world_size > 1.

    Raises:
        ConfigError: the config is not legal for the workload or the device.
        WorkloadError: the workload's functions fail or return the wrong thing.
    """
    device = torch.device(device)
    config.accumulation(workload.global_batch)
    reason = incompatible(config, workload.global_batch)
    if reason is not None:
        hint = "Leave that knob at its default, or change what it goes with."
        raise ConfigError(f"{config.describe()}: {reason}", hint=hint)
    if mesh is None:
        mesh = build_mesh(config, device.type)
    if mesh is not None:
        place_rank(device)
    if device.type == "cuda":  # before the parameters: what lies in a segment of fixed size stays there
        set_allocator(config.allocator, device)
    torch.manual_seed(workload.seed)
    given = model is not None
    if model is None:
        with torch.device(device), seeded_build(workload.seed):
            model = workload.build_model()
    model.to(device)
    if given and mesh is not None:
        broadcast_values(model)
    enter_training_mode(model)
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
    if mesh is not None:
        torch.manual_seed(rank_seed(workload.seed, mesh))
    schedule = workload.build_schedule(build.optimizer) if workload.build_schedule is not None else None
    return TrainingRun(build, schedule)


IN_PLACE = ("threads", "allocator", "attention", "batch_norm", "checkpointing", "compile")
"""The knobs that change a model if another trainer runs it; the other knobs are the trainer's, or are not carried."""


def apply_to_model(
    workload: Workload, config: TrainingConfig, model: nn.Module, *, device: torch.device
) -> tuple[str, ...]:
    """Changes a model in place for a trainer that has steps of its own; sets what belongs to the process too.

    Args:
        workload: What is trained.
        config: How.
        model: The model.
        device: Where it will run.

    Returns:
        What of the config is left out, in sentences.
    """
    build = Build(
        workload=workload,
        config=config,
        device=device,
        model=model,
        module=TrainingModule(model, workload.loss),
        structure=find_structure(model),
    )
    for strategy in STRATEGIES:
        if strategy.name in IN_PLACE and not (strategy.name == "compile" and config.compile == "model"):
            strategy.apply(build)
    set_matmul_tf32(config.precision == "tf32")
    if config.checkpointing != "none":
        for caching in caching_configs(model):
            caching.use_cache = False
    left = []
    if build.hooks.around is not contextlib.nullcontext:
        left.append(f"attention={config.attention}: wrap what calls the model in torch.nn.attention.sdpa_kernel")
    if config.compile == "model":
        left.append("compile=model: compile the model yourself, torch.compile(model, dynamic=False)")
    if config.optimizer_step != "own":
        left.append(f"optimizer_step={config.optimizer_step}: give your optimizer that flag")
    return (*left, *not_carried(config, "Lightning", [name for name in LEFT_BY_TOOLS if name != "loss"]))
