"""The candidate of the parity check: the same parts as the reference, through the TrainingRun that training uses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from autoplan.planner.parity.batches import small_workload
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
from autoplan.planner.parity.reference import Check, dropout_rates, learning_rates, noise_seed
from autoplan.planner.parity.replay import replay
from autoplan.planner.parity.rounded_products import product_distances
from autoplan.strategies.prepare import prepare
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.step import StepResult
from autoplan.strategies.techniques.loss_kernels import limit_chunk_rows
from autoplan.strategies.techniques.mesh import data_position, rank_seed
from autoplan.strategies.workloads.batch import Batch, batch_size, slice_batch
from autoplan.strategies.workloads.carried import buffers_kept, keep_buffers
from autoplan.strategies.workloads.randomness import seed_generators

_SAME_AS_REFERENCE = (
    "global_batch",
    "fixed_micro_batch",
    "accumulation",
    "length",
    "sequence_length",
    "labels_masked",
    "has_labels",
    "max_grad_norm",
    "deterministic",
)
_MOST_SKIPPED_STEPS = 20  # the loss scale of fp16 begins at 2**16 and halves


def run_candidate(check: Check, reference: ParityMeasurement) -> ParityMeasurement:
    """All parts of the candidate, as far as the reference has them.

    Args:
        check: What this rank is given.
        reference: What the reference saw.
    """
    return _Candidate(check, reference).run()


class _Candidate:
    """The parts of the candidate, one after another."""

    def __init__(self, check: Check, reference: ParityMeasurement) -> None:
        self.check, self.reference = check, reference
        self.workload, self.recorder = check.workload, check.recorder
        self.config = check.small_config
        self.seconds: list[float] = []  # that each step took

    def run(self) -> ParityMeasurement:
        measurement = self._steps_and_own_length()
        if not self.reference.dropout:
            return measurement
        self.check.phase("dropout")
        dropout = self._dropout()
        left_out = (*measurement.not_checked, *dropout.pop("not_checked", ()))
        return measurement.model_copy(update={**dropout, "not_checked": left_out})

    def _has_time(self, samples: float) -> bool:
        """Whether there is time for so many samples of the steps' length, in shapes that are compiled anew."""
        expected_s = min(self.seconds) * samples / self.reference.global_batch
        if self.config.compile != "off":
            expected_s += self.seconds[0]
        return self.check.limit.allows(expected_s)

    def _steps_and_own_length(self) -> ParityMeasurement:
        """The steps with dropout off, the replay of the optimizer, and one pass at the workload's own length."""
        reference, recorder, config = self.reference, self.recorder, self.config
        small = small_workload(
            self.workload,
            config,
            length=reference.length,
            masked=reference.labels_masked,
            accumulation=reference.accumulation,
        )
        rows = None
        if config.loss == "fused" and reference.own_length is None:  # else that pass is the one with several chunks
            rows = _rows_for_chunks(config.micro_batch * reference.length)
        watched = _WatchedRun(prepare(small, config, device=self.check.device, mesh=recorder.mesh), recorder)
        run = watched.run
        if reference.deterministic is False:
            watched.seed_micro_steps()
        recorder.watch_rounding(run.optimizer)
        recorder.begin(run.model, keep=reference.own_length is not None)
        self.check.phase("steps")
        data_rank = data_position(run.mesh)[0]
        with limit_chunk_rows(rows):
            for index, step in enumerate(reference.steps):
                watched.noise_seed = noise_seed(small, index) + data_rank * run.accumulation
                batch = small.make_batch(small.global_batch, index)
                self.seconds.append(watched.step(batch, step.gradient_factor))
        measurement = ParityMeasurement(
            steps=tuple(recorder.steps),
            parameters=recorder.parameters(run.model),
            changes=recorder.changes(),
            buffers=recorder.buffer_changes(run.model),
            data_rank=data_rank,
            data_ranks=1 if config.batch_norm == "sync" else config.dp,  # synchronised statistics are one process's
            schedule_steps=getattr(run.schedule, "last_epoch", None),
            learning_rates=learning_rates(run.optimizer),
            replay=replay(small, reference.parameters, recorder, self.check.device),
            products=product_distances(run.model, config.fp8) if config.fp8 != "off" else {},
            chunk_rows=rows,
            micro_batch=config.micro_batch,
            **{name: getattr(reference, name) for name in _SAME_AS_REFERENCE},
        )
        self.check.phase("own length")
        recorder.restore()
        update = self._own_length(watched)
        recorder.release()
        return measurement.model_copy(update=update)

    def _own_length(self, watched: _WatchedRun) -> dict[str, Any]:
        """One forward and backward at the workload's own length, from the same start as the reference's.

        The fused loss takes its several chunks here.
        """
        wanted = self.reference.own_length
        if wanted is None:
            return {}
        length = wanted.sequence_length or self.reference.length
        fused = self.config.loss == "fused"
        if not self._has_time(wanted.samples * length / self.reference.length):
            left_out = f"a forward and backward at its own {length} tokens"
            left_out += " and the fused loss in several chunks" if fused else ""
            return {"not_checked": (f"{left_out}: there was no time",)}
        rows = _rows_for_chunks(wanted.samples // self.config.dp * length) if fused else None
        watched.noise_seed = noise_seed(self.workload, CHECK_STEPS) + data_position(watched.run.mesh)[0]
        with limit_chunk_rows(rows):
            measured = watched.measure_pass(OWN_LENGTH, self.workload.make_batch(wanted.samples, 0), length)
        return {"own_length": measured, "chunk_rows": rows}

    def _dropout(self) -> dict[str, Any]:
        """A pass for each seed of the reference, and the first once more, on a run that is built with dropout on."""
        first, passes = self.reference.dropout[0], len(self.reference.dropout)
        samples, length = first.samples, first.sequence_length or min(self.reference.length, DROPOUT_SEQUENCE_LENGTH)
        if not self._has_time(samples * (passes + 1)):
            return {"not_checked": ("dropout: there was no time",)}
        accumulation = dropout_accumulation(self.config)
        small = small_workload(
            self.workload, self.config, length=length, masked=False, accumulation=accumulation, dropout=True
        )
        run = prepare(small, self.config, device=self.check.device, mesh=self.recorder.mesh)
        watched, batch = _WatchedRun(run, self.recorder), small.make_batch(samples, 0)
        found = []
        for number in (*range(passes), 0):  # the first seed twice
            with buffers_kept(run.model):
                seed = self.workload.seed + 1 + number
                found.append(watched.measure_pass(f"{DROPOUT}{number}", batch, length, seed))
        return {
            "dropout": tuple(found[:-1]),
            "dropout_repeated_loss": found[-1].loss,
            "dropout_rates": dropout_rates(run.model),
        }


def _rows_for_chunks(rows: int) -> int:
    """Rows of logits at once, so few that the fused loss takes several chunks."""
    return max(1, rows // LEAST_CHUNKS)


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
