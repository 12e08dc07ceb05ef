"""The reference of the parity check: a plain loop in one process, in the workload's own precision.

It shares no line with TrainingRun or with any technique. A step takes the whole batch at once, or the micro-batches
that the user fixed. Gradients of summed losses add up and are divided by the count of the whole batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoplan.planner.parity.batches import (
    can_mask_labels,
    check_length,
    interleaved,
    labels_of,
    own_length,
    small_config,
    small_workload,
)
from autoplan.planner.parity.rank_buffers import RankBuffers
from autoplan.planner.parity.recorder import Recorder
from autoplan.planner.parity.records import (
    CHECK_MICRO_BATCH,
    CHECK_STEPS,
    DROPOUT,
    DROPOUT_SEEDS,
    DROPOUT_SEQUENCE_LENGTH,
    OWN_LENGTH,
    ParityMeasurement,
    PassMeasure,
    check_accumulation,
    dropout_accumulation,
)
from autoplan.planner.parity.rounded_products import RoundedProducts
from autoplan.planner.parity.time_limit import TimeLimit
from autoplan.strategies.analysis.additivity import buffers_kept, check_additivity, shorten
from autoplan.strategies.analysis.structure import clean_name, disable_dropout, find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques.fp8 import selected_linears
from autoplan.strategies.techniques.host_activations import HostActivations
from autoplan.strategies.techniques.host_states import keep_states_on_host
from autoplan.strategies.techniques.parameters import rounded_parameters
from autoplan.strategies.techniques.precision import set_matmul_tf32
from autoplan.strategies.workloads.batch import Batch, move_batch, split_batch
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.training_mode import enter_training_mode
from autoplan.strategies.workloads.workload import Workload

_CLIPPED_TO = 0.25  # of their norm, where gradients are scaled up so that clipping has something to do


def run_reference(
    workload: Workload,
    config: TrainingConfig,
    device: torch.device,
    recorder: Recorder,
    phase: Callable[[str], None],
    limit: TimeLimit,
    *,
    own_shapes: bool = False,
) -> ParityMeasurement:
    """All parts of the reference.

    Args:
        workload: What is trained, as the user gave it.
        config: The candidate's; only its sizes are used.
        device: Where.
        recorder: Keeps what is seen.
        phase: Is told what begins.
        limit: What is not needed for a verdict is left out where it is late.
        own_shapes: With the candidate's own micro-batch and sequence length. The plain loop takes fewer samples at
            once: what a checkpointed or 16-bit candidate fits in may be too little for it.
    """
    set_matmul_tf32(False)
    torch.manual_seed(workload.seed)
    with torch.device(device):
        model = workload.build_model()
    enter_training_mode(model.to(device))
    config = small_config(workload, config, own_shapes=own_shapes)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reference = _Reference(workload, model, parameters, device, recorder)
    reference.most_samples = CHECK_MICRO_BATCH if own_shapes else None
    if config.parameters != "own":
        reference.round_parameters(rounded_parameters(model))
    if config.fp8 != "off":
        reference.round_products(config)
    reference.offload = config.offload
    reference.normalised_ranks = config.dp if config.batch_norm == "sync" else 1
    masked = can_mask_labels(workload, model, device, config.micro_batch)
    recorder.begin(model)

    size = sum(parameter.numel() for parameter in parameters)
    length = check_length(workload, size, own_shapes=own_shapes)
    length, dropout_length = reference.lengths_that_run(config, length)

    phase("dropout")
    dropout, rates = reference.dropout_passes(config, dropout_length)
    disable_dropout(model)
    recorder.restore()

    small = small_workload(workload, config, length=length, masked=masked, accumulation=check_accumulation(config))
    phase("additivity")
    with reference.plain_products():
        additive, deterministic = check_additivity(small, model, device)
    if not deterministic:  # noise in the loss: the same draws, in micro-batches of the same size
        reference.noisy_micro_batch = config.micro_batch
    recorder.restore()
    phase("steps")
    began = time.monotonic()
    if config.dp > 1 and config.batch_norm == "own" and workload.fixed_micro_batch is not None:
        reference.rank_buffers = RankBuffers(model, config.dp, check_accumulation(config))
    schedule, optimizer = reference.steps(small)
    step_s = (time.monotonic() - began) / CHECK_STEPS
    measurement = ParityMeasurement(
        steps=tuple(recorder.steps),
        parameters=recorder.parameters(model),
        changes=recorder.changes(),
        buffers=recorder.buffer_changes(model),
        rank_buffers=reference.rank_buffer_changes(),
        schedule_steps=getattr(schedule, "last_epoch", None),
        learning_rates=tuple(float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None),
        dropout=dropout,
        dropout_rates=rates,
        global_batch=small.global_batch,
        micro_batch=config.micro_batch,
        fixed_micro_batch=workload.fixed_micro_batch,
        accumulation=check_accumulation(config),
        length=length,
        sequence_length=None if workload.sequence_length is None else length,
        own_sequence_length=workload.sequence_length,
        labels_masked=masked,
        has_labels=labels_of(workload.make_batch(1, 0)) is not None,
        max_grad_norm=workload.max_grad_norm,
    )
    recorder.restore()
    reference.rank_buffers = None
    phase("own length")
    own, left_out = reference.own_length(config, length, step_s / small.global_batch, limit)
    return measurement.model_copy(
        update={"additive": additive, "deterministic": deterministic, "own_length": own, "not_checked": left_out}
    )


class _Reference:
    """The plain loop over one model."""

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        parameters: list[nn.Parameter],
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self.workload = workload
        self.model = model
        self.parameters = parameters
        self.device = device
        self.recorder = recorder
        self.normalised_ranks = 1
        self.most_samples: int | None = None  # at once; None: the whole batch
        self.offload = "none"  # what the candidate moves, where nothing else fits: the plain numbers are the same
        self.rank_buffers: RankBuffers | None = None  # set during the steps, where ranks have buffers of their own
        self.rounded: list[nn.Parameter] = []  # those that the candidate keeps in bf16
        self.products: RoundedProducts | None = None  # those that the candidate makes in fp8
        self.noisy_micro_batch: int | None = None  # set where the loss draws noise: each micro-batch is then seeded

    def backward(self, batch: Batch, micro_batch: int, seed: int | None = None) -> float:
        """Adds the gradient of the batch's mean loss to the parameters'; gives that loss.

        A gradient may be there already: of a parameter that the user's optimizer does not hold, nobody clears it.

        Args:
            batch: The samples.
            micro_batch: How many go through at once.
            seed: Where the loss draws noise, the generators are set to it, and one higher for each micro-batch.
        """
        total, count = 0.0, 0.0
        if self.normalised_ranks > 1:  # SyncBatchNorm: the ranks' micro-batches are normalised together
            batch = interleaved(batch, self.normalised_ranks, micro_batch)
            micro_batch *= self.normalised_ranks
        earlier = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        for number, micro in enumerate(split_batch(batch, micro_batch)):
            if seed is not None and self.noisy_micro_batch is not None:
                seed_generators(seed + number)
            if self.rank_buffers is not None:
                self.rank_buffers.before(number)
            with HostActivations() if self.offload == "activations" else contextlib.nullcontext():
                summed, items = self.workload.loss(self.model, move_batch(micro, self.device))
            summed.backward()
            total, count = total + float(summed.detach()), count + float(items)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(count)
        for parameter, gradient in zip(self.parameters, earlier, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return total / count

    def round_products(self, config: TrainingConfig) -> None:
        """Rounds the operands of the linear layers that the candidate takes, in micro-batches of its size.

        One scale holds for all samples that go through at once.
        """
        linears = [linear for _, linear in selected_linears(find_structure(self.model), config.fp8)]
        self.products = RoundedProducts(linears, config.fp8)
        self.most_samples = config.micro_batch

    @contextlib.contextmanager
    def plain_products(self) -> Iterator[None]:
        """Here no operand is rounded."""
        if self.products is not None:
            self.products.enabled = False
        yield
        if self.products is not None:
            self.products.enabled = True

    def round_parameters(self, rounded: list[nn.Parameter]) -> list[torch.Tensor]:
        """Puts the numbers of bf16 into parameters, which stay fp32; gives them as they were."""
        self.rounded = rounded
        exact = [parameter.detach().clone() for parameter in rounded]
        for parameter in rounded:
            parameter.data.copy_(parameter.data.to(torch.bfloat16))
        return exact

    def rank_buffer_changes(self) -> tuple[dict[str, float], ...]:
        """By data-parallel rank, the norm of the change of each saved buffer."""
        if self.rank_buffers is None:
            return ()
        return tuple(self.recorder.buffer_changes(self.model) for _ in self.rank_buffers.each())

    def steps(self, small: Workload) -> tuple[Any, torch.optim.Optimizer]:
        """The optimizer steps of the check. Gives the schedule and the optimizer as they are afterwards.

        Where the norm that the user clips to is above the gradients of the first steps, those of the last step are
        scaled up.
        """
        optimizer = small.build_optimizer(self.parameters)
        if self.offload == "optimizer":
            keep_states_on_host(optimizer)
        schedule = small.build_schedule(optimizer) if small.build_schedule is not None else None
        limit, bound = small.max_grad_norm, False
        exact = [parameter.detach().clone() for parameter in self.rounded]
        for index in range(CHECK_STEPS):
            batch = small.make_batch(small.global_batch, index)
            whole = self.noisy_micro_batch or small.fixed_micro_batch or self.most_samples or small.global_batch
            loss = self.backward(batch, whole, noise_seed(small, index))
            factor, norm = 1.0, None
            if limit is not None and index == CHECK_STEPS - 1 and not bound:
                norm_now = float(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
                factor = 1.0 if norm_now == 0.0 or norm_now > limit else limit / (_CLIPPED_TO * norm_now)
            self.recorder.before_clipping(self.model, factor)
            if limit is not None:
                norm = float(nn.utils.clip_grad_norm_(self.parameters, limit))
                bound = bound or norm > limit
            self.recorder.before_optimizer(self.model, optimizer)
            for parameter, value in zip(self.rounded, exact, strict=True):  # the step is taken on what was not rounded
                parameter.data.copy_(value)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad(set_to_none=True)
            self.recorder.after_step(self.model, loss=loss, clipping_norm=norm)
            exact = self.round_parameters(self.rounded)
        return schedule, optimizer

    def own_length(
        self, config: TrainingConfig, length: int, sample_s: float, limit: TimeLimit
    ) -> tuple[PassMeasure | None, tuple[str, ...]]:
        """One forward and backward at the workload's own length, or why there was none.

        Args:
            config: The candidate's small config.
            length: Of the sequences in the steps.
            sample_s: Seconds that a sample of this length took in the steps.
            limit: The time that is left.
        """
        whole = own_length(self.workload, length)
        if whole is None:
            return None, ()
        if config.pp > 1:
            return None, (f"a forward at its own {whole} tokens: the stages of a pipeline are built for one length",)
        samples = (self.workload.fixed_micro_batch or 1) * config.dp
        if not limit.allows(sample_s * samples * whole / length):
            return None, (f"a forward and backward at its own {whole} tokens: there was no time",)
        batch = self.workload.make_batch(samples, 0)
        by_rank = self.noisy_micro_batch is not None or self.products is not None
        micro_batch = samples // config.dp if by_rank else samples
        loss = self.backward(
            batch, self.workload.fixed_micro_batch or micro_batch, noise_seed(self.workload, CHECK_STEPS)
        )
        return self._measured(OWN_LENGTH, loss, samples, whole), ()

    def lengths_that_run(self, config: TrainingConfig, length: int) -> tuple[int, int]:
        """Tokens per sequence in the steps and with dropout on: the whole sequence for a model that takes no shorter.

        Args:
            config: The candidate's small config.
            length: Wanted for the steps.
        """
        whole = self.workload.make_batch(config.micro_batch, 0)
        if self._runs(whole, min(length, DROPOUT_SEQUENCE_LENGTH)):
            return length, min(length, DROPOUT_SEQUENCE_LENGTH)
        if not self._runs(whole, length):
            length = int(whole["labels"].shape[1])
        return length, length

    def _runs(self, whole: Batch, length: int) -> bool:
        """Whether the loss runs on shorter sequences."""
        short = shorten(whole, length)
        if short is whole or short["labels"].shape == whole["labels"].shape:
            return True
        try:
            self._loss(short)
        except Exception:  # positions of a fixed number, windows, poolings: the library raises what it likes
            return False
        return True

    def _loss(self, batch: Batch) -> float:
        with buffers_kept(self.model):  # with a graph: a loss may differentiate the model by its input
            return float(self.workload.loss(self.model, move_batch(batch, self.device)).total.detach())

    def dropout_passes(self, config: TrainingConfig, length: int) -> tuple[tuple[PassMeasure, ...], dict[str, float]]:
        """A forward and backward for each of a few seeds with dropout on; nothing where seeds make no difference."""
        rates = dropout_rates(self.model)
        samples = config.micro_batch * config.dp * dropout_accumulation(config)
        batch = shorten(self.workload.make_batch(samples, 0), length)
        if not self._is_random(batch, config.micro_batch):
            return (), rates
        passes = []
        for seed in range(DROPOUT_SEEDS):
            seed_generators(self.workload.seed + 1 + seed)
            with buffers_kept(self.model):
                loss = self.backward(batch, config.micro_batch)
            passes.append(self._measured(f"{DROPOUT}{seed}", loss, samples, length))
        return tuple(passes), rates

    def _measured(self, part: str, loss: float, samples: int, length: int) -> PassMeasure:
        """Records the gradients of a pass, and drops them."""
        norms = self.recorder.gradients(part, self.model)
        for parameter in self.parameters:
            parameter.grad = None
        return PassMeasure(loss=loss, gradient_norms=norms, samples=samples, sequence_length=length)

    def _is_random(self, batch: Batch, micro_batch: int) -> bool:
        """Whether two seeds give two losses."""
        micro = next(iter(split_batch(batch, micro_batch)))
        losses = []
        for seed in range(2):
            seed_generators(self.workload.seed + 1 + seed)
            losses.append(self._loss(micro))
        return abs(losses[0] - losses[1]) > 1e-6 * abs(losses[0])


def noise_seed(workload: Workload, index: int) -> int:
    """The seed of the first micro-batch of a step, where the loss draws noise; the next ones count up from it."""
    return workload.seed + 1_000 * (index + 1)


def dropout_rates(model: nn.Module) -> dict[str, float]:
    """By dropout module of the plain model's names, the rate that is in use: 0 in evaluation mode."""
    return {
        clean_name(name): float(module.p) if module.training else 0.0
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd)
    }
