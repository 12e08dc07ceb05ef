"""A whole training in one file: what the target `pytorch` copies.

`prepare()` applies the techniques in the order of strategies/prepare.py; the step is that of strategies/step.py.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoplan.planner.export.kit.model import change_layers, compile_options, find_blocks, set_process, wrap_blocks
from autoplan.planner.export.kit.settings import *
from autoplan.strategies.analysis.tensor_plans import TensorPlan
from autoplan.strategies.analysis.training_facts import own_checkpointing_text
from autoplan.strategies.config import OPTIMIZER_FLAGS
from autoplan.strategies.step import OwnGradients, Stepper, StepResult
from autoplan.strategies.techniques.base import GradientReduction, MicroStepHooks
from autoplan.strategies.techniques.batch_norm import synchronise
from autoplan.strategies.techniques.data_parallel import (
    ddp_gradient_sync,
    fsdp_gradient_sync,
    gather_dtype,
    shard_modules,
    with_parameters,
    wrap_ddp,
)
from autoplan.strategies.techniques.deferred_logits import DeferredLoss
from autoplan.strategies.techniques.host_memory import keep_states_on_host
from autoplan.strategies.techniques.loss import FusedLoss
from autoplan.strategies.techniques.loss_kernels import choose_gpu_kernel, choose_kernel
from autoplan.strategies.techniques.mesh import (
    GlobalNormClipper,
    data_position,
    make_mesh,
    rank_seed,
    sum_over_axes,
    world_size,
)
from autoplan.strategies.techniques.offload import saving_on_host
from autoplan.strategies.techniques.parameters import cast_parameters, clip_in_fp32, rounded_parameters
from autoplan.strategies.techniques.precision import AUTOCAST_DTYPES
from autoplan.strategies.techniques.rounded_steps import with_rounding
from autoplan.strategies.techniques.tensor_parallel import (
    VocabularyParallelLoss,
    reduce_partial_gradients,
    split_model,
)
from autoplan.strategies.techniques.threads import place_rank
from autoplan.strategies.workloads.batch import Batch, device_micro_batches, slice_batch
from autoplan.strategies.workloads.function_file import package_of
from autoplan.strategies.workloads.language_model import language_model_workload
from autoplan.strategies.workloads.loading.order import SampleOrder
from autoplan.strategies.workloads.optimizers import rebuild, trainable
from autoplan.strategies.workloads.samples import SampleBatch, batches_from_dataset
from autoplan.strategies.workloads.training_mode import enter_training_mode, own_checkpointing
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, OutputHead, TrainingModule, Workload


def load_language_model() -> Workload:
    """The model of transformers that MODEL_JSON describes, with random batches."""
    fields = json.loads(MODEL_JSON)
    return language_model_workload(
        fields,
        name=fields["model_type"],
        sequence_length=SEQUENCE_LENGTH or 1,
        global_batch=GLOBAL_BATCH,
        options={
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_GRAD_NORM,
            "seed": SEED,
        },
        weights=Path(MODEL_FOLDER) if MODEL_FOLDER else None,
    )


def load_user_file() -> Workload:
    """The workload that USER_FILE describes. Where the file imports Workload and LossSum from autoplan, it gets the
    classes above, so that autoplan need not be installed."""
    names = {"Workload": Workload, "LossSum": LossSum, "OutputHead": OutputHead, "IGNORE_INDEX": IGNORE_INDEX}
    names |= {"SampleBatch": SampleBatch, "batches_from_dataset": batches_from_dataset}
    workloads = "autoplan.strategies.workloads"
    for name in ("autoplan", "autoplan.strategies", f"{workloads}.workload", f"{workloads}.samples"):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names, __path__=[])
    path = Path(USER_FILE)
    root, packages = package_of(path)
    sys.path[:0] = dict.fromkeys((str(path.parent), str(root)))
    module_name = ".".join([*packages, "user_workload"])
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    before = sys.argv
    sys.argv = [USER_FILE, *USER_ARGUMENTS] if USER_ARGUMENTS else before  # what followed -- in the search
    try:
        spec.loader.exec_module(module)
        function = getattr(module, USER_FUNCTION)
        taken = inspect.signature(function).parameters
        workload: Workload = function(**{name: value for name, value in USER_OPTIONS.items() if name in taken})
    finally:
        sys.argv = before
    return workload


@functools.cache
def the_workload() -> Workload:
    """The workload that is trained: its model, its batches, its loss, its optimizer."""
    return load_user_file() if USER_FILE else load_language_model()


def make_batch(num_samples: int, index: int) -> Batch:
    """A batch of the plan's workload. Put your own data here, of the same shape."""
    return the_workload().make_batch(num_samples, index)


def rank_device(device: torch.device | str) -> torch.device:
    """This rank's own device, where a kind is given."""
    if world_size() != RANKS:
        raise SystemExit(
            f"this script is for {RANKS} ranks, and {world_size()} run(s). Start it with\n"
            f"    torchrun --nproc-per-node {RANKS} {sys.argv[0]}"
        )
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device


class Run(Stepper):
    """The run that prepare() makes, and that train_step works on.

    Attributes:
        mesh: The device mesh; None on one rank.
    """

    mesh: Any = None


def prepare(device: torch.device | str) -> Run:
    """The model with its loss, and the optimizer, as the plan has them."""
    workload = the_workload()
    mesh: Any = None
    device = torch.device(device)
    if RANKS > 1:
        device = rank_device(device)
        mesh = make_mesh((1, DP_REPLICATE, DP_SHARD, TP), device.type)
        place_rank(device)
    set_process()
    torch.manual_seed(workload.seed)
    with torch.device(device):
        model = workload.build_model()
    model.to(device)
    if (said := enter_training_mode(model)) is not None:
        print(said)
    if own_checkpointing(model):
        print(own_checkpointing_text(CHECKPOINTING))
    hooks, gradients = MicroStepHooks(), GradientReduction()
    if PARAMETERS != "own":
        cast_parameters(rounded_parameters(model))
        gradients.clip = clip_in_fp32
    if BLOCKS:
        find_blocks(model)
    change_layers(model)
    training = TrainingModule(model, workload.loss)
    if LOSS == "fused" and TP == 1:
        training.loss = fused_loss(workload, model)
    if TP > 1:
        split(workload, training, mesh, gradients)
    if BATCH_NORM != "own":
        synchronise(model, mesh.get_group("dp_replicate" if DP_REPLICATE > 1 else "dp_shard"))
    wrap_blocks(model)
    module: nn.Module = training
    if COMPILE == "model":
        module.compile(**compile_options())
    set_hooks(hooks, device)
    if RANKS > 1:
        gradients.sum_over_ranks = lambda tensor: sum_over_axes(mesh, tensor, ("dp_replicate", "dp_shard"))
        gradients.clip = GlobalNormClipper(mesh)
        gradients.ranks = DP_REPLICATE * DP_SHARD
    if DDP:
        module = wrap_ddp(module, mesh, device, find_unused=FIND_UNUSED)
        hooks.set_sync = ddp_gradient_sync([module])
    if FSDP:
        hooks.set_sync = shard_over(model, module, mesh, device)
    optimizer = make_optimizer(workload, model)
    own_gradients = None
    if CUDA_GRAPHS and ACCUMULATION > 1:
        own_gradients = OwnGradients(trainable(model), optimizer)
    if RANKS > 1:
        torch.manual_seed(rank_seed(workload.seed, mesh))  # dropout differs from rank to rank
    run = Run(
        model,
        module,
        optimizer,
        None if workload.build_schedule is None else workload.build_schedule(optimizer),
        device=device,
        accumulation=ACCUMULATION,
        max_grad_norm=workload.max_grad_norm,
        counts_ahead=workload.count is not None,
        hooks=hooks,
        gradients=gradients,
        scaler=torch.amp.GradScaler(device.type) if PRECISION == "fp16" else None,
        several_ranks=RANKS > 1,
        recomputes=CHECKPOINTING != "none",
        own_gradients=own_gradients,
        replays_graphs=CUDA_GRAPHS,
    )
    run.mesh = mesh
    return run


def fused_loss(workload: Workload, model: nn.Module) -> Any:
    """Output head and cross-entropy in one, without all logits at once."""
    head: Any = workload.head
    linear: Any = model.get_submodule(HEAD) if HEAD else head.linear(model)
    kernel: Any
    if DEVICE == "cuda" and COMPILE != "model" and PRECISION != "fp16":
        kernel = choose_gpu_kernel(PRECISION, compiled=False)
        if SEQUENCE_LENGTH is not None:  # here, where there are no activations yet; else at its first call
            kernel.choose(linear.weight, getattr(linear, "bias", None), MICRO_BATCH * SEQUENCE_LENGTH)
    else:
        kernel = choose_kernel(PRECISION, compiled=COMPILE == "model")
    return DeferredLoss(workload.loss, linear, kernel) if HEAD else FusedLoss(head, kernel)


def split(workload: Workload, training: TrainingModule, mesh: Any, gradients: GradientReduction) -> None:
    """Splits the model over the tensor-parallel ranks, and its loss where the vocabulary is split."""
    model: Any = training.model
    plan = TensorPlan(**TENSOR_PLAN)
    split_model(model, plan, mesh["tp"], [name for stack in model.plan_stacks for name in stack])
    if plan.head is not None:
        assert workload.head is not None
        training.loss = VocabularyParallelLoss(workload.head, mesh["tp"], chunked=LOSS == "fused")
    gradients.finish.append(functools.partial(reduce_partial_gradients, model))


def set_hooks(hooks: MicroStepHooks, device: torch.device) -> None:
    """Sets what surrounds each micro-step."""
    if CUDA_GRAPHS:
        hooks.begin = torch.compiler.cudagraph_mark_step_begin
    if ATTENTION_KERNEL:
        hooks.around = functools.partial(sdpa_kernel, getattr(SDPBackend, ATTENTION_KERNEL))
    if PRECISION in ("bf16", "fp16"):
        cached = CHECKPOINTING != "selective"
        hooks.forward_context = functools.partial(
            torch.autocast, device.type, dtype=AUTOCAST_DTYPES[PRECISION], cache_enabled=cached
        )
    if OFFLOAD == "activations":
        hooks.forward_context = saving_on_host(hooks.forward_context)


def shard_over(model: Any, module: nn.Module, mesh: Any, device: torch.device) -> Any:
    """Shards each repeated block, then what is left; returns what is called before each micro-step."""
    roots = shard_modules(
        with_parameters(model, model.plan_blocks),
        [module],
        mesh["dp_replicate", "dp_shard"] if DP_REPLICATE > 1 else mesh["dp_shard"],
        reshard=RESHARD_AFTER_FORWARD,
        gathered=gather_dtype(PRECISION, device.type),
        reduced=torch.float32 if PARAMETERS != "own" else None,
        on_host=OFFLOAD == "parameters",
    )
    return fsdp_gradient_sync(roots, every=GRADIENT_SYNC == "every")


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """The workload's optimizer, in the plan's form of its step."""
    optimizer = workload.build_optimizer(trainable(model))
    if OPTIMIZER_STEP != "own":
        optimizer = rebuild(optimizer, OPTIMIZER_FLAGS[OPTIMIZER_STEP])
    if PARAMETERS != "own" or OPTIMIZER_STATE != "own":
        optimizer = with_rounding(optimizer, parameters=PARAMETERS, states=OPTIMIZER_STATE, seed=workload.seed)
    if OFFLOAD == "optimizer":
        keep_states_on_host(optimizer)
    return optimizer


def rank_batch(run: Run, number: int) -> Batch:
    """The samples that train_step takes at a step, counted from 0: this rank's share of the global batch."""
    batch = make_batch(GLOBAL_BATCH, number)
    if DP_REPLICATE * DP_SHARD > 1:
        rank, _ = data_position(run.mesh)
        batch = slice_batch(batch, rank * LOCAL_BATCH, (rank + 1) * LOCAL_BATCH)
    return batch


def train_step(run: Run, batch: Batch) -> StepResult:
    """One optimizer step over this rank's share of the global batch; its loss is the sum over the count of the whole
    global batch, its gradient norm that before clipping."""
    counted = the_workload().count
    divisor = run.divisor_of(LOCAL_BATCH * (SEQUENCE_LENGTH or 1) if counted is None else counted(batch))
    micros = device_micro_batches(batch, MICRO_BATCH, run.device)
    total, count = run.micro_steps(micros, divisor)
    return run.optimizer_step(total, count, divisor)


def make_loader(run: Run, dataset: Any, collate_fn: Any = None, shuffle: bool = True) -> Any:
    """The DataLoader of a dataset: for batch in make_loader(run, dataset): train_step(run, batch). Each time that it is
    gone over is an epoch, each in another order; a dataset that streams has its own."""
    order: SampleOrder | None = None
    rank, ranks = 0, 1
    if DP_REPLICATE * DP_SHARD > 1:
        rank, ranks = data_position(run.mesh)
    if not isinstance(dataset, torch.utils.data.IterableDataset):
        order = SampleOrder(len(dataset), shuffle=shuffle, rank=rank, ranks=ranks, multiple_of=GLOBAL_BATCH)
    return torch.utils.data.DataLoader(
        dataset, batch_size=LOCAL_BATCH, sampler=order, collate_fn=collate_fn, drop_last=True, **LOADER_ARGUMENTS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--device", default=DEVICE)
    arguments = parser.parse_args()
    run = prepare(arguments.device)
    for number in range(arguments.steps):
        batch = rank_batch(run, number)
        started = time.perf_counter()
        loss = float(train_step(run, batch).loss)  # reading it waits for the device
        seconds = time.perf_counter() - started
        first = dist.get_rank() == 0 if RANKS > 1 else True
        if first:
            print(f"step {number + 1}: loss {loss:.8f}, {COUNTED_ITEMS / seconds:.1f} {UNIT}/s", flush=True)
    if RANKS > 1:
        dist.destroy_process_group()
