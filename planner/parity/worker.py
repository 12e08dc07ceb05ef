"""One run of the parity check, in a rank: the plain fp32 reference, or the candidate as `prepare` builds it.

In: a `ParityRequest`. Out: a `ParityMeasurement` and a file of sampled gradient elements. Both runs take the same few
steps on the same small batches with dropout off. Measured for each module that owns parameters or buffers: the norm of
the gradient before clipping, and the norm of the change of its parameters and buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoplan.planner.parity.records import (
    CHECK_MICRO_BATCH,
    CHECK_SEQUENCE_LENGTH,
    ModuleMeasure,
    ParityMeasurement,
    ParityRequest,
)
from autoplan.planner.trials.worker import RENDEZVOUS_TIMEOUT_S, pick_device
from autoplan.strategies.analysis.additivity import check_additivity, shorten
from autoplan.strategies.analysis.structure import clean_name, disable_dropout
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques.mesh import build_mesh, gather_full, named_parameters
from autoplan.strategies.techniques.precision import set_matmul_tf32
from autoplan.strategies.workloads.batch import Batch, batch_size, move_batch, slice_batch, split_batch
from autoplan.strategies.workloads.optimizers import trainable
from autoplan.strategies.workloads.sources import load_workload
from autoplan.strategies.workloads.training_mode import enter_training_mode
from autoplan.strategies.workloads.workload import IGNORE_INDEX, Workload

if TYPE_CHECKING:
    from autoplan.processes import RankContext

SAMPLED_ELEMENTS = 1 << 16
"""At most so many elements of each parameter's gradient are compared, evenly spread."""

MAX_STEPS = 3
"""Steps are taken until a parameter has changed, but at most so many: a schedule may start at a learning rate of 0."""

_MASKED_SHARE = 0.7
"""Of the labels of the last sample; fewer are masked in earlier samples, so that the counts of micro-batches differ."""

_MAX_SKIPPED_STEPS = 16
"""The loss scale of fp16 begins at 2**16 and halves at each skipped step."""


def run_parity_rank(context: RankContext, request: ParityRequest) -> ParityMeasurement:
    """Runs the reference or the candidate, and writes the sampled gradient elements to a file."""
    context.phase("build")
    device = pick_device(context, request.device)
    workload, config = make_small(load_workload(request.spec), request)
    if request.plain:
        recorder = Recorder()
        measurement = run_plain(workload, device, recorder, context.phase)
    else:
        mesh = None
        if context.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if request.device == "cuda" else "gloo"
            context.init_process_group(backend, RENDEZVOUS_TIMEOUT_S)
            mesh = build_mesh(config, request.device)
        recorder = Recorder(mesh)
        measurement = run_candidate(workload, config, request.steps or 1, device, recorder, context.phase)
    recorder.save_samples(Path(f"{request.samples}.{context.rank}.npz"))
    return measurement


def make_small(workload: Workload, request: ParityRequest) -> tuple[Workload, TrainingConfig]:
    """The workload with dropout off and a small global batch, and the config with a small micro-batch.

    A micro-batch that the user fixed is not changed.
    """

    def build_model() -> nn.Module:
        model = workload.build_model()
        disable_dropout(model)
        return model

    config = request.config
    if workload.fixed_micro_batch is None:
        config = config.model_copy(update={"micro_batch": min(config.micro_batch, CHECK_MICRO_BATCH)})
    global_batch = config.micro_batch * config.dp * request.accumulation
    return dataclasses.replace(workload, build_model=build_model, global_batch=global_batch), config


def parity_batch(workload: Workload, index: int) -> tuple[Batch, bool]:
    """A global batch of the check: with short sequences, and with part of the labels of later samples masked.

    This is done if the batch is a dict of (samples, sequence length) tensors with `labels`, as language models take.
    Other batches are not changed.

    Returns:
        The batch, and whether its samples count different numbers of items.
    """
    batch = workload.make_batch(workload.global_batch, index)
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if workload.count is None or not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return batch, False
    batch = shorten(batch, CHECK_SEQUENCE_LENGTH)
    size = batch_size(batch)
    masked = batch["labels"].clone()
    for sample in range(1, size):
        masked[sample, : int(masked.shape[1] * _MASKED_SHARE * sample / (size - 1))] = IGNORE_INDEX
    uneven = {**batch, "labels": masked}
    counts = {workload.count(slice_batch(uneven, sample, sample + 1)) for sample in range(size)}
    return (uneven, True) if len(counts) > 1 and 0 not in counts else (batch, False)


def run_candidate(
    workload: Workload,
    config: TrainingConfig,
    steps: int,
    device: torch.device,
    recorder: Recorder,
    phase: Callable[[str], None],
) -> ParityMeasurement:
    """Runs the steps of the candidate with the TrainingRun that training uses."""
    run = prepare(workload, config, device=device, mesh=recorder.mesh)
    recorder.start(run.model)
    run.observe_gradients(recorder.gradients_of(run.model))
    phase("steps")
    loss, uneven = float("nan"), False
    for index in range(steps):
        batch, uneven = parity_batch(workload, index)
        result = run.step(run.local_share(batch))
        for _ in range(_MAX_SKIPPED_STEPS):  # the first loss scales of fp16 may be too large
            if not result.skipped:
                break
            recorder.forget_gradients()
            result = run.step(run.local_share(batch))
        if index == 0:
            loss = float(result.loss)
    measurement = recorder.measure(run.model, loss=loss, steps=steps, workload=workload, uneven=uneven)
    return measurement.model_copy(update={"micro_batch": config.micro_batch})


def run_plain(
    workload: Workload,
    device: torch.device,
    recorder: Recorder,
    phase: Callable[[str], None],
) -> ParityMeasurement:
    """Runs the reference: a plain loop in fp32 that shares no code with TrainingRun.

    The whole batch is one micro-batch, unless the user fixed the micro-batch. The gradients of the summed losses are
    added up and divided by the count of the whole batch.
    """
    set_matmul_tf32(False)
    torch.manual_seed(workload.seed)
    with torch.device(device):
        model = workload.build_model()
    enter_training_mode(model.to(device))
    parameters = trainable(model)
    optimizer = workload.build_optimizer(parameters)
    schedule = workload.build_schedule(optimizer) if workload.build_schedule is not None else None
    recorder.start(model)
    record = recorder.gradients_of(model)
    phase("steps")
    loss, steps, uneven = float("nan"), 0, False
    while steps == 0 or (steps < MAX_STEPS and not recorder.has_changed(model)):
        batch, uneven = parity_batch(workload, steps)
        total, count = 0.0, 0.0
        for micro in split_batch(move_batch(batch, device), workload.fixed_micro_batch or workload.global_batch):
            summed, items = workload.loss(model, micro)
            summed.backward()
            total, count = total + float(summed.detach()), count + float(items)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(count)
        record()
        if workload.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, workload.max_grad_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad(set_to_none=True)
        loss = total / count if steps == 0 else loss
        steps += 1
    measurement = recorder.measure(model, loss=loss, steps=steps, workload=workload, uneven=uneven)
    phase("additivity")
    additive, deterministic = check_additivity(workload, model, device)
    return measurement.model_copy(update={"additive": additive, "deterministic": deterministic})


class Recorder:
    """Records the parameters before the first step and the gradients of the first step, and measures them."""

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh
        self._start: dict[str, torch.Tensor] = {}
        self._gradient_squares: dict[str, float] = {}
        self._samples: dict[str, torch.Tensor] = {}
        self._recorded = False

    def start(self, model: nn.Module) -> None:
        """Copies the parameters and buffers."""
        self._start = {name: tensor.clone() for name, tensor in self._full(self._state(model)).items()}

    def gradients_of(self, model: nn.Module) -> Callable[[], None]:
        """A function that records the gradients when it is first called; later calls do nothing."""

        def record() -> None:
            if self._recorded:
                return
            self._recorded = True
            gradients = {name: p.grad for name, p in named_parameters(model) if p.grad is not None}
            for name, gradient in self._full(gradients).items():
                owner = name.rpartition(".")[0]
                square = norm_of(gradient) ** 2
                self._gradient_squares[owner] = self._gradient_squares.get(owner, 0.0) + square
                self._samples[name] = sample_elements(gradient)

        return record

    def forget_gradients(self) -> None:
        """Drops the recorded gradients; the next call records again."""
        self._recorded = False
        self._gradient_squares.clear()
        self._samples.clear()

    def has_changed(self, model: nn.Module) -> bool:
        """Whether any parameter differs from the start."""
        return any(not torch.equal(p.detach().cpu(), self._start[name]) for name, p in named_parameters(model))

    def measure(
        self, model: nn.Module, *, loss: float, steps: int, workload: Workload, uneven: bool
    ) -> ParityMeasurement:
        """The norms per owning module."""
        squares: dict[str, float] = {}
        for name, tensor in self._full(self._state(model)).items():
            owner = name.rpartition(".")[0]
            squares[owner] = squares.get(owner, 0.0) + norm_of(tensor.float() - self._start[name].float()) ** 2
        modules = {
            owner: ModuleMeasure(gradient_norm=self._gradient_squares.get(owner, 0.0) ** 0.5, update_norm=square**0.5)
            for owner, square in squares.items()
        }
        length = workload.sequence_length
        return ParityMeasurement(
            loss=loss,
            modules=modules,
            steps=steps,
            global_batch=workload.global_batch,
            micro_batch=workload.fixed_micro_batch or workload.global_batch,
            fixed_micro_batch=workload.fixed_micro_batch,
            sequence_length=length if length is None else min(length, CHECK_SEQUENCE_LENGTH),
            uneven_counts=uneven,
        )

    def samples(self) -> dict[str, Any]:
        """The sampled gradient elements by parameter name, as NumPy arrays."""
        return {name: sample.numpy() for name, sample in self._samples.items()}

    def save_samples(self, path: Path) -> None:
        """Writes the sampled gradient elements by parameter name."""
        import numpy as np

        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **self.samples())

    def _state(self, model: nn.Module) -> dict[str, Any]:
        """The parameters, and on one rank the saved buffers too: running statistics are part of what is trained.

        With several ranks, each has its own micro-batches, so their running statistics differ from one process's.
        """
        state: dict[str, Any] = dict(named_parameters(model))
        if self.mesh is None:
            saved = set(map(clean_name, model.state_dict().keys()))
            buffers = ((clean_name(name), buffer) for name, buffer in model.named_buffers())
            state |= {name: buffer for name, buffer in buffers if name in saved}
        return state

    def _full(self, named: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU; on one rank they may share memory with the model and change later."""
        if self.mesh is None:
            return {name: tensor.detach().cpu() for name, tensor in named.items()}
        return gather_full(named, self.mesh)


def norm_of(tensor: torch.Tensor) -> float:
    """The 2-norm, summed in fp64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def sample_elements(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of at most SAMPLED_ELEMENTS evenly spread elements in fp32; an odd stride samples all columns."""
    flat = tensor.reshape(-1).float()
    stride = (flat.numel() // SAMPLED_ELEMENTS) | 1
    return flat[:: max(1, stride)][:SAMPLED_ELEMENTS].clone(memory_format=torch.contiguous_format)
