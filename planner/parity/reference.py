"""The reference of the parity check: a plain loop in one process, in the workload's own precision.

It shares no line with TrainingRun or with any technique. A step takes the whole batch at once, or the micro-batches
that the user fixed. Gradients of summed losses add up and are divided by the count of the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoplan.planner.parity.batches import (
    can_mask_labels,
    check_length,
    interleaved,
    labels_of,
    own_length,
    small_workload,
)
from autoplan.planner.parity.recorder import Recorder
from autoplan.planner.parity.records import (
    AGAIN,
    CHECK_MICRO_BATCH,
    CHECK_STEPS,
    DROPOUT,
    DROPOUT_SEEDS,
    DROPOUT_SEQUENCE_LENGTH,
    LARGE_MODEL_STEPS,
    MASKS,
    MOST_STEPS_S,
    NOISE,
    OWN_LENGTH,
    SMALL_MODEL_PARAMETERS,
    SOURCE_SEEDS,
    WHOLE_STEPS,
    DropoutMeasure,
    ParityMeasurement,
    PassMeasure,
    Rung,
    check_accumulation,
    dropout_accumulation,
    samples_at_once,
)
from autoplan.planner.parity.rounded_products import RoundedProducts
from autoplan.planner.parity.tolerances import SAME_MASK, TOLERANCES
from autoplan.planner.trace.variant_tracer import truncate_model
from autoplan.strategies.analysis.additivity import check_additivity, shorten
from autoplan.strategies.analysis.structure import clean_name, disable_dropout, find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques.fp8 import selected_linears
from autoplan.strategies.techniques.host_memory import HostActivations, keep_states_on_host
from autoplan.strategies.techniques.mesh import local_tensor
from autoplan.strategies.techniques.parameters import rounded_parameters
from autoplan.strategies.techniques.precision import set_matmul_tf32
from autoplan.strategies.workloads.batch import Batch, move_batch, split_batch
from autoplan.strategies.workloads.carried import buffers_kept, keep_buffers
from autoplan.strategies.workloads.randomness import seed_generators, seeded_build
from autoplan.strategies.workloads.training_mode import caching_configs, enter_training_mode
from autoplan.strategies.workloads.workload import Workload

_CLIPPED_TO = 0.25  # of their norm, where gradients are scaled up so that clipping has something to do
_DROPPED = 16  # elements that two masks drop alike: by chance, once in 10**16 pairs of a rate of 0.1
_MOST_KINDS = 8  # of dropout that are tried one by one
_DIVERGED = 4.0  # a loss that is so many times the first one: what follows is sensitive to every rounding
_SAFETY = 1.5  # a part is begun where this many times its expected time is left


class TimeLimit:
    """The time of one run of the check: parts that a verdict does not need are left out where it is short.

    Args:
        time_s: Seconds from now; None: no limit.
        mesh: The mesh of the run; all its ranks decide alike.
    """

    def __init__(self, time_s: float | None = None, mesh: Any = None) -> None:
        self._end = None if time_s is None else time.monotonic() + time_s
        self._mesh = mesh

    def allows(self, expected_s: float) -> bool:
        """Whether a part that takes so many seconds should be begun; on several ranks, whether all of them say so."""
        return self.agree(self._end is None or time.monotonic() + _SAFETY * expected_s < self._end)

    def agree(self, allowed: bool) -> bool:
        """Whether all ranks allow something."""
        if self._mesh is None:
            return allowed
        votes = torch.tensor(float(allowed), device=self._mesh.device_type)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        return bool(votes.item())


@dataclass(frozen=True, kw_only=True)
class Check:
    """The input of a rank for its run of the check.

    Attributes:
        workload: What is trained, as the user gave it.
        config: The candidate's, as it is. Of it, the reference uses the sizes, and what the numbers are rounded to.
        device: This rank's.
        recorder: Keeps what is seen.
        phase: Is told what begins.
        limit: If it is late, the parts that no verdict needs are left out.
        own_shapes: With the candidate's own micro-batch and sequence length. The plain loop takes fewer samples at
            once: what a checkpointed or 16-bit candidate fits in may be too little for it.
        rung: Which plain run fits at the workload's own length, so that a pass of that length can be compared.
        sample_s: Seconds of a plain forward and backward of a sample of that length; None: not known.
    """

    workload: Workload
    config: TrainingConfig
    device: torch.device
    recorder: Recorder
    phase: Callable[[str], None] = lambda name: None
    limit: TimeLimit = field(default_factory=TimeLimit)
    own_shapes: bool = False
    rung: Rung = "plain"
    sample_s: float | None = None

    def own_length_s(self, sample_s: float, longer: float) -> float:
        """Expected seconds of a sample of the workload's own length.

        It is not in proportion where it is known: a sample of 16 tokens waits for the weights.

        Args:
            sample_s: Seconds of a sample in the steps.
            longer: How many times as long the workload's own samples are.
        """
        return min(sample_s * longer, math.inf if self.sample_s is None else max(sample_s, self.sample_s))

    @property
    def small_config(self) -> TrainingConfig:
        """The config with a small micro-batch; one that the user fixed stays as it is, and so does any own shape."""
        if self.own_shapes or self.workload.fixed_micro_batch is not None:
            return self.config
        return self.config.model_copy(update={"micro_batch": min(self.config.micro_batch, CHECK_MICRO_BATCH)})


def run_reference(check: Check) -> ParityMeasurement:
    """All parts of the reference."""
    set_matmul_tf32(False)
    reference = _Reference(check)
    workload, recorder, model, config = check.workload, check.recorder, reference.model, reference.config
    recorder.begin(model)
    masked = can_mask_labels(workload, model, check.device, config.micro_batch)
    recorder.restore()

    size = sum(parameter.numel() for parameter in reference.parameters)
    length, dropout_length = reference.lengths_that_run(check_length(workload, size, own_shapes=check.own_shapes))

    check.phase("dropout")
    dropout = reference.dropout_passes(dropout_length)
    disable_dropout(model)
    recorder.restore()

    accumulation = check_accumulation(config)
    small = small_workload(workload, config, length=length, masked=masked, accumulation=accumulation)
    check.phase("additivity")
    with reference.plain_products():
        additive, deterministic = check_additivity(small, model, check.device)
    if not deterministic:  # noise in the loss: the same draws, in micro-batches of the same size
        reference.noisy_micro_batch = config.micro_batch
    recorder.restore()
    check.phase("steps")
    began = time.monotonic()
    if config.dp > 1 and config.batch_norm == "own" and workload.fixed_micro_batch is not None:
        reference.rank_buffers = RankBuffers(model, config.dp, accumulation)
    ranks = reference.rank_buffers
    large = True if check.own_shapes or size > SMALL_MODEL_PARAMETERS else None
    schedule, optimizer = reference.steps(small, large=large)
    steps_s = time.monotonic() - began
    sample_s = steps_s / sum(step.samples for step in recorder.steps)
    measurement = ParityMeasurement(
        steps=tuple(recorder.steps),
        parameters=recorder.parameters(model),
        changes=recorder.changes(len(recorder.stepped)),
        buffers=recorder.buffer_changes(model),
        first_buffers=reference.first_buffers,
        rank_buffers=() if ranks is None else tuple(recorder.buffer_changes(model) for _ in ranks.each()),
        schedule_steps=getattr(schedule, "last_epoch", None),
        learning_rates=learning_rates(optimizer),
        dropout=dropout,
        global_batch=small.global_batch,
        micro_batch=config.micro_batch,
        fixed_micro_batch=workload.fixed_micro_batch,
        accumulation=accumulation,
        length=length,
        sequence_length=None if workload.sequence_length is None else length,
        labels_masked=masked,
        has_labels=labels_of(workload.make_batch(1, 0)) is not None,
        max_grad_norm=workload.max_grad_norm,
        additive=additive,
        deterministic=deterministic,
    )
    reference.rank_buffers = None
    reference.steps_again(small, steps_s)
    recorder.restore()
    del schedule, optimizer  # whose state leaves its room to the own length
    check.phase("own length")
    own, left_out = reference.own_length(length, sample_s)
    not_checked = (*reference.left_out, *left_out)
    return measurement.model_copy(
        update={
            "own_length": own,
            "unproved": reference.unproved,
            "hides_nan": reference.hides_nan(small),
            "not_checked": not_checked,
        }
    )


class RankBuffers:
    """The buffers of each data-parallel rank, in the one process of the reference.

    A rank keeps the running statistics of its own micro-batches. The reference runs the micro-batches of all ranks one
    after another, each rank's with that rank's buffers in place.

    Args:
        model: Whose buffers they are.
        ranks: Data-parallel ranks.
        accumulation: Micro-batches of a step on one of them; the first ones are rank 0's.
    """

    def __init__(self, model: nn.Module, ranks: int, accumulation: int) -> None:
        self._model = model
        self._put_back = [keep_buffers(model)] * ranks
        self._accumulation = accumulation
        self._rank = 0

    def before(self, micro_batch: int) -> None:
        """Puts the buffers in place that see this micro-batch, counted within the step."""
        rank = micro_batch // self._accumulation
        if rank != self._rank:
            self._put_back[self._rank] = keep_buffers(self._model)
            self._put_back[rank]()
            self._rank = rank

    def each(self) -> Iterator[int]:
        """Each rank, with its buffers in place; rank 0's are there afterwards."""
        for rank in range(len(self._put_back)):
            self.before(rank * self._accumulation)
            yield rank
        self.before(0)


class _Reference:
    """The plain loop over one model."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.workload, self.device, self.recorder = check.workload, check.device, check.recorder
        self.config = config = check.small_config
        with torch.device(self.device), seeded_build(self.workload.seed):
            self.model = self.workload.build_model()
        enter_training_mode(self.model.to(self.device))
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # at once, of which a batch is a multiple; None: the whole batch
        self.most_samples = math.gcd(config.micro_batch, CHECK_MICRO_BATCH) if check.own_shapes else None
        self.normalised_ranks = config.dp if config.batch_norm == "sync" else 1
        self.rank_buffers: RankBuffers | None = None  # set during the steps, where ranks have buffers of their own
        self.rounded: list[nn.Parameter] = []  # those that the candidate keeps in bf16
        self.left_out: tuple[str, ...] = ()  # of the steps
        self.unproved = ""  # what is wrong with checkpointing, where it stands for the plain run
        self.noise = 0.0  # of each gradient, as a share
        self.first_buffers: dict[str, float] = {}  # the changes of the first step
        self.products: RoundedProducts | None = None  # those that the candidate makes in fp8
        self.noisy_micro_batch: int | None = None  # set where the loss draws noise: each micro-batch is then seeded
        if config.parameters != "own":
            self.round_parameters(rounded_parameters(self.model))
        if config.fp8 != "off":
            self.round_products(config)

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
            # what the candidate moves, where nothing else fits: the plain numbers are the same
            with HostActivations() if self.config.offload == "activations" else contextlib.nullcontext():
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

    def steps(self, small: Workload, *, large: bool | None) -> tuple[Any, torch.optim.Optimizer]:
        """The optimizer steps of the check. Gives the schedule and the optimizer as they are afterwards.

        Where the norm that the user clips to is above the gradients of the first steps, those of step WHOLE_STEPS are
        scaled up.

        Args:
            small: The workload of the check.
            large: Take the first steps alone, and go on with the schedule; None: where all of them would take more than
                MOST_STEPS_S.
        """
        began, steps = time.thread_time(), CHECK_STEPS
        optimizer = small.build_optimizer(self.parameters)
        if self.config.offload == "optimizer":
            keep_states_on_host(optimizer)
        schedule = small.build_schedule(optimizer) if small.build_schedule is not None else None
        limit, bound = small.max_grad_norm, False
        exact = [parameter.detach().clone() for parameter in self.rounded]
        first_loss = 0.0
        for index in range(CHECK_STEPS):
            if index == WHOLE_STEPS:
                if large is None:
                    large = (time.thread_time() - began) * CHECK_STEPS / WHOLE_STEPS > MOST_STEPS_S
                steps = LARGE_MODEL_STEPS if large else CHECK_STEPS
            if index >= steps:
                break
            if large and index >= WHOLE_STEPS:
                self.recorder.note_groups(self.model, optimizer)
                if schedule is not None:
                    schedule.step()
                continue
            batch = small.make_batch(small.global_batch, index)
            whole = self.noisy_micro_batch or small.fixed_micro_batch or self.most_samples or small.global_batch
            loss = self.backward(batch, whole, noise_seed(small, index))
            first_loss = first_loss or abs(loss)
            if index >= WHOLE_STEPS and not abs(loss) <= _DIVERGED * first_loss:
                self.left_out = (f"steps {index + 1} to {steps}: the plain run diverges on so few samples",)
                optimizer.zero_grad(set_to_none=True)
                break
            factor, norm = 1.0, None
            if limit is not None and index == WHOLE_STEPS - 1 and not bound:
                norm_now = float(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
                factor = 1.0 if norm_now == 0.0 or norm_now > limit else limit / (_CLIPPED_TO * norm_now)
            self.recorder.before_clipping(self.model, factor)
            for gradient in [p.grad for p in self.parameters if self.noise and p.grad is not None]:
                if gradient.layout != torch.strided:
                    continue
                there = gradient != 0  # rows of an embedding that no sample has stay as they are
                size = gradient.norm() / there.sum().clamp(min=1) ** 0.5
                gradient.add_(self.noise * size * torch.randn_like(gradient) * there)
            if limit is not None:
                norm = float(nn.utils.clip_grad_norm_(self.parameters, limit))
                bound = bound or norm > limit
            self.recorder.before_optimizer(self.model, optimizer)
            for parameter, value in zip(self.rounded, exact, strict=True):  # the step is taken on what was not rounded
                if parameter.requires_grad:  # a frozen one is as the forward left it
                    parameter.data.copy_(value)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad(set_to_none=True)
            self.recorder.after_step(self.model, samples=small.global_batch, loss=loss, clipping_norm=norm)
            exact = self.round_parameters(self.rounded)
            if index == 0:
                self.first_buffers = self.recorder.buffer_changes(self.model)
        return schedule, optimizer

    def steps_again(self, small: Workload, seconds: float) -> None:
        """The steps once more, each gradient off by a share as rounding is: they show how sensitive a training is.

        Left out where a few steps alone were taken, which amplify little, and where there is no time for so many
        seconds.
        """
        first, left_out = self.recorder, self.left_out
        if len(first.stepped) <= WHOLE_STEPS or not self.check.limit.allows(seconds):
            return
        first.restore()
        self.recorder, self.noise = Recorder(), NOISE
        self.recorder.begin(self.model, keep=False)
        self.steps(small, large=False)
        first.add_steps(AGAIN, self.recorder)
        self.recorder, self.noise, self.left_out = first, 0.0, left_out

    def own_length(self, length: int, sample_s: float) -> tuple[PassMeasure | None, tuple[str, ...]]:
        """One forward and backward at the workload's own length, or why there was none.

        Args:
            length: Of the sequences in the steps.
            sample_s: Seconds that a sample of this length took in the steps.
        """
        whole = own_length(self.workload, length)
        if whole is None:
            return None, ()
        if self.config.pp > 1:
            return None, (f"a forward at its own {whole} tokens: the stages of a pipeline are built for one length",)
        if self.check.rung == "none":
            return None, (f"a forward and backward at its own {whole} tokens: the plain run does not fit",)
        samples = (self.workload.fixed_micro_batch or 1) * self.config.dp
        if not self.check.limit.allows(samples * self.check.own_length_s(sample_s, whole / length)):
            return None, (f"a forward and backward at its own {whole} tokens: there was no time",)
        if self.check.rung == "checkpointing" and (why_not := self.climb(whole)):
            return None, (f"a forward and backward at its own {whole} tokens: {why_not}",)
        batch = self.workload.make_batch(samples, 0)
        by_rank = self.noisy_micro_batch is not None or self.products is not None or self.check.rung != "plain"
        micro_batch = samples // self.config.dp if by_rank else samples
        loss = self.backward(
            batch, self.workload.fixed_micro_batch or micro_batch, noise_seed(self.workload, CHECK_STEPS)
        )
        return self._measured(OWN_LENGTH, loss, samples, whole), ()

    def climb(self, whole: int) -> str:
        """Has the blocks checkpointed, as in the plain run that fits; gives '', or why that cannot be the reference.

        It is proved first, at the same length, on the first two blocks of each stack: what is wrong with it would be
        wrong in the candidate too. The model has all its blocks again afterwards.
        """
        size, found = self.workload.fixed_micro_batch or 1, list[list[torch.Tensor]]()
        batch = self.workload.make_batch(size, 0)
        settings = getattr(getattr(self.model, "config", None), "__dict__", {})
        kept, stacks = dict(settings), find_structure(self.model).stacks
        lists: list[Any] = [self.model.get_submodule(stack[0][0].rpartition(".")[0]) for stack in stacks]
        left = [list(blocks) for blocks in lists]
        try:
            truncate_model(self.model, 2)
            for rung in ("plain", "checkpointing"):
                if rung == "checkpointing":
                    for config in caching_configs(self.model):
                        config.use_cache = kept["use_cache"] = False
                    for block in itertools.chain(*left):
                        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
                self.backward(batch, size, noise_seed(self.workload, CHECK_STEPS))
                found.append([parameter.grad for parameter in self.parameters if parameter.grad is not None])
                for parameter in self.parameters:
                    parameter.grad = None
            norms = [float((one - other).norm()) for one, other in zip(*found, strict=True)]
            apart = math.hypot(*norms) / math.hypot(*(float(gradient.norm()) for gradient in found[0]))
        except Exception as error:  # blocks in no list, a model that needs them all
            return f"two of the model's blocks alone do not run with checkpointing: {type(error).__name__}: {error}"
        finally:
            settings.update(kept)
            for blocks, all_of_them in zip(lists, left, strict=True):
                blocks.extend(all_of_them[2:])
        if apart > TOLERANCES["fp32"].whole:
            self.unproved = f"full checkpointing changes the gradient of two blocks at {whole} tokens by {apart:.2g}"
        return self.unproved

    def hides_nan(self, small: Workload) -> str:
        """Why the candidate takes no step whose loss is NaN; '' where it does. The model is lost by this.

        An optimizer that goes by signs (Lion), and a hook on gradients, hide NaN in the plain loop too.
        """
        if self.config.offload != "none":
            return "the plain loop has no room for another optimizer"
        if not self.check.limit.allows(1.0):
            return "there was no time"
        for parameter in self.parameters:
            parameter.grad = None
        try:
            optimizer = small.build_optimizer(self.parameters)
            samples = min(self.config.micro_batch, self.most_samples or self.config.micro_batch)
            batch = move_batch(small.make_batch(samples, 0), self.device)
            loss, _ = self.workload.loss(self.model, batch)
            (loss * math.nan).backward()
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            if all(bool(gradient.isfinite().all()) for gradient in gradients):
                return "the plain loop leaves the gradients finite"
            optimizer.step()
        except Exception as error:  # it is the user's; what a step of NaN raises is not asked of the candidate
            return f"the plain loop raises {type(error).__name__}"
        finite = all(bool(parameter.detach().isfinite().all()) for parameter in self.parameters)
        return "the plain loop leaves the parameters finite" if finite else ""

    def lengths_that_run(self, length: int) -> tuple[int, int]:
        """Tokens per sequence in the steps and with dropout on: the whole sequence for a model that takes no shorter.

        Args:
            length: Wanted for the steps.
        """
        whole = self.workload.make_batch(self.config.micro_batch, 0)
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

    def dropout_passes(self, length: int) -> DropoutMeasure | None:
        """A forward and backward for each of a few seeds with dropout on; nothing where the loss is not random."""
        config = self.config
        samples = samples_at_once(config)
        batch = shorten(self.workload.make_batch(samples, 0), length)
        micro = next(iter(split_batch(batch, config.micro_batch)))
        unseeded = tuple(tuple(self._loss(micro) for _ in range(dropout_accumulation(config))) for _ in range(2))
        losses = [loss for step in unseeded for loss in step]
        if max(losses) - min(losses) <= SAME_MASK * abs(losses[0]):
            return None
        passes = []
        for seed in range(DROPOUT_SEEDS):
            seed_generators(self.workload.seed + 1 + seed)
            with buffers_kept(self.model):
                loss = self.backward(batch, config.micro_batch)
            passes.append(self._measured(f"{DROPOUT}{seed}", loss, samples, length))
        return DropoutMeasure(
            passes=tuple(passes),
            rates=dropout_rates(self.model),
            unseeded=unseeded,
            alike=masks_alike(self.model, lambda: self._loss(micro)),
            sources=dropout_sources(self.model, lambda: self._loss(micro), self.workload.seed),
        )

    def _measured(self, part: str, loss: float, samples: int, length: int) -> PassMeasure:
        """Records the gradients of a pass, and drops them."""
        norms = self.recorder.gradients(part, self.model)
        for parameter in self.parameters:
            parameter.grad = None
        return PassMeasure(loss=loss, gradient_norms=norms, samples=samples, sequence_length=length)


def learning_rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """By group."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None)


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


def dropout_sources(model: nn.Module, loss: Callable[[], float], seed: int) -> dict[str, tuple[float, ...]]:
    """The losses where one kind of dropout alone is on, by kind: without it and with it, of one seed.

    Modules of the same name in each block are one kind. '' is what no dropout module draws, of two seeds: its rate is
    a number that the model passes to a function. Rates are put back.

    Args:
        model: Its dropout is on.
        loss: Of the same samples each time.
        seed: Of the first loss.
    """
    modules = {
        clean_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd)
    }
    rates = {name: module.p for name, module in modules.items()}
    found: dict[str, tuple[float, ...]] = {}
    for kind in ["", *dict.fromkeys(map(_kind, modules))][:_MOST_KINDS]:
        for name, module in modules.items():
            module.p = rates[name] if _kind(name) == kind else 0.0
        losses = [found[""][0]] if found else []
        for number in range(SOURCE_SEEDS - len(losses)):
            seed_generators(seed + number)
            losses.append(loss())
        found[kind] = tuple(losses)
    for name, module in modules.items():
        module.p = rates[name]
    return found


def masks_alike(model: nn.Module, loss: Callable[[], float]) -> tuple[str, ...]:
    """Which MASKS are the same in one forward: those of two samples, or of two dropout modules one after the other.

    An element is dropped that is zero behind a module and not before it. Two masks that drop the same _DROPPED or more
    are the same.

    Args:
        model: Its dropout is on.
        loss: Runs it once.
    """
    alike: set[str] = set()
    before: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
        dropped, both = one[0] & other[0], one[1] & other[1]
        return int(dropped.sum()) >= _DROPPED and not bool(((one[0] ^ other[0]) & both).any())

    def look(module: nn.Module, given: Any, found: Any) -> None:
        value, result = local_tensor((*given, found)[0]), local_tensor(found)
        if value.dim() < 2 or value.is_nested or result.shape != value.shape:
            return
        mask = (result == 0) & (value != 0), value != 0
        if len(value) > 1 and same((mask[0][0], mask[1][0]), (mask[0][1], mask[1][1])):
            alike.add("samples")
        if value.shape in before and same(before[value.shape], mask):
            alike.add("places")
        before[value.shape] = mask

    hooks = [module.register_forward_hook(look) for module in model.modules() if isinstance(module, nn.Dropout)]
    loss()
    for hook in hooks:
        hook.remove()
    return tuple(name for name in MASKS if name in alike)


def _kind(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
