"""The candidate of the parity check: the same parts as the reference, through the TrainingRun that training uses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoplan.planner.parity.batches import small_config, small_workload
from autoplan.planner.parity.recorder import Recorder
from autoplan.planner.parity.records import (
    CHECK_STEPS,
    DROPOUT,
    DROPOUT_SEQUENCE_LENGTH,
    LEAST_CHUNKS,
    OWN_LENGTH,
    ParityMeasurement,
    PassMeasure,
    dropout_accumulation,
)
from autoplan.planner.parity.reference import dropout_rates, noise_seed
from autoplan.planner.parity.replay import replay
from autoplan.planner.parity.rounded_products import product_distances
from autoplan.planner.parity.time_limit import TimeLimit
from autoplan.strategies.analysis.additivity import buffers_kept, keep_buffers
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.run import StepResult, TrainingRun
from autoplan.strategies.techniques.loss_kernels import limit_chunk_rows
from autoplan.strategies.techniques.mesh import data_position, rank_seed
from autoplan.strategies.workloads.batch import Batch, batch_size, slice_batch
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.workload import Workload

_SAME_AS_REFERENCE = (
    "global_batch",
    "fixed_micro_batch",
    "accumulation",
    "length",
    "sequence_length",
    "own_sequence_length",
    "labels_masked",
    "has_labels",
    "max_grad_norm",
    "deterministic",
)
_MOST_SKIPPED_STEPS = 20  # the loss scale of fp16 begins at 2**16 and halves


def run_candidate(
    workload: Workload,
    config: TrainingConfig,
    reference: ParityMeasurement,
    device: torch.device,
    recorder: Recorder,
    phase: Callable[[str], None],
    limit: TimeLimit,
    *,
    own_shapes: bool = False,
) -> ParityMeasurement:
    """All parts of the candidate, as far as the reference has them.

    Args:
        workload: What is trained, as the user gave it.
        config: The candidate's, as it is.
        reference: What the reference saw.
        device: This rank's.
        recorder: Keeps what is seen.
        phase: Is told what begins.
        limit: What is not needed for a verdict is left out where it is late.
        own_shapes: With its own micro-batch and sequence length, as the reference.
    """
    config = small_config(workload, config, own_shapes=own_shapes)
    measurement, seconds = _steps_and_own_length(workload, config, reference, device, recorder, phase, limit)
    if not reference.dropout:
        return measurement
    phase("dropout")
    dropout = _dropout(workload, config, reference, device, recorder, seconds, limit)
    left_out = (*measurement.not_checked, *dropout.pop("not_checked", ()))
    return measurement.model_copy(update={**dropout, "not_checked": left_out})


def _rows_for_chunks(rows: int) -> int:
    """Rows of logits at once, so few that the fused loss takes several chunks."""
    return max(1, rows // LEAST_CHUNKS)


def _steps_and_own_length(
    workload: Workload,
    config: TrainingConfig,
    reference: ParityMeasurement,
    device: torch.device,
    recorder: Recorder,
    phase: Callable[[str], None],
    limit: TimeLimit,
) -> tuple[ParityMeasurement, list[float]]:
    """The steps with dropout off, the replay of the optimizer, and one pass at the workload's own length."""
    small = small_workload(
        workload,
        config,
        length=reference.length,
        masked=reference.labels_masked,
        accumulation=reference.accumulation,
    )
    rows = None
    if config.loss == "fused" and reference.own_length is None:  # else that pass is the one with several chunks
        rows = _rows_for_chunks(config.micro_batch * reference.length)
    watched = _WatchedRun(prepare(small, config, device=device, mesh=recorder.mesh), recorder)
    run = watched.run
    if reference.deterministic is False:
        watched.seed_micro_steps()
    recorder.watch_rounding(run.optimizer)
    recorder.begin(run.model, keep=reference.own_length is not None)
    phase("steps")
    seconds = []
    with limit_chunk_rows(rows):
        for index, step in enumerate(reference.steps):
            watched.noise_seed = noise_seed(small, index) + data_position(run.mesh)[0] * run.accumulation
            seconds.append(watched.step(small.make_batch(small.global_batch, index), step.gradient_factor))
    measurement = ParityMeasurement(
        steps=tuple(recorder.steps),
        parameters=recorder.parameters(run.model),
        changes=recorder.changes(),
        buffers=recorder.buffer_changes(run.model),
        data_rank=data_position(run.mesh)[0],
        data_ranks=1 if config.batch_norm == "sync" else config.dp,  # synchronised statistics are one process's
        schedule_steps=getattr(run.schedule, "last_epoch", None),
        learning_rates=tuple(float(group["lr"]) for group in run.optimizer.param_groups if group.get("lr") is not None),
        replay=replay(small, reference.parameters, recorder, device),
        products=product_distances(run.model, config.fp8) if config.fp8 != "off" else {},
        chunk_rows=rows,
        micro_batch=config.micro_batch,
        **{name: getattr(reference, name) for name in _SAME_AS_REFERENCE},
    )
    phase("own length")
    recorder.restore()
    update = _own_length(watched, workload, reference, seconds, limit)
    recorder.release()
    return measurement.model_copy(update=update), seconds


class _WatchedRun:
    """A TrainingRun with the check's observers."""

    def __init__(self, run: TrainingRun, recorder: Recorder) -> None:
        self.run = run
        self.recorder = recorder
        self._factor = 1.0
        self._part: str | None = None
        self._norms: dict[str, float] = {}
        self.noise_seed = 0
        self._micro_step = 0
        run.observe_gradients(self._before_clipping)
        run.optimizer.register_step_pre_hook(self._before_optimizer)

    def seed_micro_steps(self) -> None:
        """From now on the generators are set before each micro-step: to `noise_seed`, then counting up."""

        def seed() -> None:
            seed_generators(self.noise_seed + self._micro_step)
            self._micro_step += 1

        self.run.before_micro_steps(seed)

    def _before_clipping(self) -> None:
        if self._part is None:
            self.recorder.before_clipping(self.run.model, self._factor)
        else:
            self._norms = self.recorder.gradients(self._part, self.run.model)

    def _before_optimizer(self, *_: Any) -> None:
        if self._part is None:
            self.recorder.before_optimizer(self.run.model, self.run.optimizer)

    def step(self, batch: Batch, factor: float) -> float:
        """One recorded optimizer step over a global batch; the seconds it took."""
        self._factor = factor
        began = time.monotonic()
        result = self._until_taken(lambda: self.run.step(self.run.local_share(batch)))
        norm = None if result.grad_norm is None else float(result.grad_norm)
        self.recorder.after_step(self.run.model, loss=float(result.loss), clipping_norm=norm)
        return time.monotonic() - began

    def measure_pass(self, part: str, batch: Batch, length: int | None, seed: int | None = None) -> PassMeasure:
        """One forward and backward, up to where the optimizer would step: parameters stay as they are.

        Args:
            part: The name of the pass.
            batch: A whole step of a run with a single micro-batch or of a pipeline; else one micro-batch of each rank.
            length: Of its sequences, for the record.
            seed: Set before the forward.
        """
        self._part = part
        rank, ranks = data_position(self.run.mesh)
        size = batch_size(batch) // ranks
        own = slice_batch(batch, rank * size, (rank + 1) * size)

        def micro_step() -> StepResult:
            if seed is not None:
                seed_generators(seed if self.run.mesh is None else rank_seed(seed, self.run.mesh))
            if size == self.run.local_batch:
                return self.run.step(own)
            divisor = self.run.loss_divisor(own)
            total, count = self.run.micro_step(own, divisor, sync=True)
            return self.run.optimizer_step(total, count, divisor)

        with _without_steps(self.run):
            result = self._until_taken(micro_step)
        self._part = None
        return PassMeasure(
            loss=float(result.loss), gradient_norms=self._norms, samples=batch_size(batch), sequence_length=length
        )

    def _until_taken(self, step: Callable[[], StepResult]) -> StepResult:
        """Repeats a step that fp16 skipped: its loss scale begins high and halves.

        The forward of a skipped step has moved running statistics. The reference makes it once, so they are put back.
        """
        put_back = keep_buffers(self.run.model) if self.run.scaler is not None else lambda: None
        self._micro_step = 0
        result = step()
        for _ in range(_MOST_SKIPPED_STEPS):
            if not result.skipped:
                break
            self.recorder.forget_step()
            put_back()
            self._micro_step = 0
            result = step()
        return result


@contextlib.contextmanager
def _without_steps(run: TrainingRun) -> Iterator[None]:
    """Neither the optimizer nor the schedule steps."""
    before, schedule = vars(run.optimizer).get("step"), run.schedule
    run.optimizer.__dict__["step"] = lambda *args, **kwargs: None
    run.schedule = None
    try:
        yield
    finally:
        run.schedule = schedule
        del run.optimizer.__dict__["step"]
        if before is not None:
            run.optimizer.__dict__["step"] = before


def _own_length(
    watched: _WatchedRun,
    workload: Workload,
    reference: ParityMeasurement,
    seconds: list[float],
    limit: TimeLimit,
) -> dict[str, Any]:
    """One forward and backward at the workload's own length, from the same start as the reference's.

    The fused loss takes its several chunks here.
    """
    wanted, config = reference.own_length, watched.run.config
    if wanted is None:
        return {}
    length = wanted.sequence_length or reference.length
    expected_s = min(seconds) / reference.global_batch * wanted.samples * length / reference.length
    if config.compile != "off":
        expected_s += seconds[0]  # another length is compiled again
    fused = config.loss == "fused"
    if not limit.allows(expected_s):
        left_out = f"a forward and backward at its own {length} tokens"
        left_out += " and the fused loss in several chunks" if fused else ""
        return {"not_checked": (f"{left_out}: there was no time",)}
    rows = _rows_for_chunks(wanted.samples // config.dp * length) if fused else None
    watched.noise_seed = noise_seed(workload, CHECK_STEPS) + data_position(watched.run.mesh)[0]
    with limit_chunk_rows(rows):
        measured = watched.measure_pass(OWN_LENGTH, workload.make_batch(wanted.samples, 0), length)
    return {"own_length": measured, "chunk_rows": rows}


def _dropout(
    workload: Workload,
    config: TrainingConfig,
    reference: ParityMeasurement,
    device: torch.device,
    recorder: Recorder,
    seconds: list[float],
    limit: TimeLimit,
) -> dict[str, Any]:
    """One pass for each seed of the reference and the first once more, on a run that is built with dropout on."""
    samples = reference.dropout[0].samples
    length = reference.dropout[0].sequence_length or min(reference.length, DROPOUT_SEQUENCE_LENGTH)
    expected_s = min(seconds) * samples * (len(reference.dropout) + 1) / reference.global_batch
    if config.compile != "off":
        expected_s += seconds[0]
    if not limit.allows(expected_s):
        return {"not_checked": ("dropout: there was no time",)}
    accumulation = dropout_accumulation(config)
    small = small_workload(workload, config, length=length, masked=False, accumulation=accumulation, dropout=True)
    run = prepare(small, config, device=device, mesh=recorder.mesh)
    watched = _WatchedRun(run, recorder)
    batch = small.make_batch(samples, 0)
    seeds = [workload.seed + 1 + number for number in range(len(reference.dropout))]
    passes = []
    for number, seed in (*enumerate(seeds), (0, seeds[0])):  # the first seed twice
        with buffers_kept(run.model):
            passes.append(watched.measure_pass(f"{DROPOUT}{number}", batch, length, seed))
    again = passes.pop()
    return {
        "dropout": tuple(passes),
        "dropout_repeated_loss": again.loss,
        "dropout_rates": dropout_rates(run.model),
    }
