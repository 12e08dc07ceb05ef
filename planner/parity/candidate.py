"""The candidate of the parity check: the same parts as the reference, through the TrainingRun that training uses."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoplan.planner.parity.batches import small_workload
from autoplan.planner.parity.recorder import Recorder
from autoplan.planner.parity.records import (
    CHECK_MICRO_BATCH,
    CHECK_STEPS,
    DROPOUT,
    DROPOUT_SEQUENCE_LENGTH,
    LEAST_CHUNKS,
    OWN_LENGTH,
    RESUMED_AFTER,
    TWIN,
    WHOLE_STEPS,
    DropoutMeasure,
    ParityMeasurement,
    PassMeasure,
    TwinMeasure,
    dropout_accumulation,
    samples_at_once,
    step_part,
    twin_of,
)
from autoplan.planner.parity.reference import (
    Check,
    dropout_rates,
    dropout_sources,
    learning_rates,
    masks_alike,
    noise_seed,
)
from autoplan.planner.parity.replay import replay
from autoplan.planner.parity.rounded_products import product_distances
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.state import inner_optimizers, without_steps
from autoplan.strategies.step import StepResult
from autoplan.strategies.techniques.loss_kernels import limit_chunk_rows
from autoplan.strategies.techniques.mesh import data_position, local_tensor, rank_seed
from autoplan.strategies.techniques.parameters import rounded_parameters
from autoplan.strategies.techniques.rounded_steps import held_by
from autoplan.strategies.workloads.batch import Batch, batch_size, move_batch, repeat_samples, slice_batch
from autoplan.strategies.workloads.carried import buffers_kept, is_expanded, keep_buffers
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.workload import Workload

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
        self.left_out: list[str] = []  # in sentences

    def run(self) -> ParityMeasurement:
        measurement = self._steps_and_own_length()
        twin, dropout, config = self._twin(), None, twin_of(self.config)
        if self.reference.dropout is not None:
            self.check.phase("dropout")
            if twin is None or self.config.compile != "off":  # else these are its operations, in fp32
                dropout = self._dropout(self.config)
            if twin is not None and config is not None:
                twin = twin.model_copy(update={"dropout": self._dropout(config, TWIN)})
        return measurement.model_copy(
            update={"twin": twin, "dropout": dropout, "not_checked": (*measurement.not_checked, *self.left_out)}
        )

    def _has_time(self, samples: float, *, longer: float = 1.0, compiles: bool | None = None) -> bool:
        """Whether there is time for so many samples, so many times as long as in the steps, which are compiled anew."""
        sample_s = min(self.seconds[:WHOLE_STEPS]) / self.reference.global_batch
        expected_s = samples * (self.check.own_length_s(sample_s, longer) if longer > 1 else sample_s)
        if self.config.compile != "off" if compiles is None else compiles:
            expected_s += self.seconds[0]
        return self.check.limit.allows(expected_s)

    def _small(self, config: TrainingConfig) -> Workload:
        """The workload of the steps."""
        reference = self.reference
        return small_workload(
            self.workload,
            config,
            length=reference.length,
            masked=reference.labels_masked,
            accumulation=reference.accumulation,
        )

    def _watched(self, workload: Workload, config: TrainingConfig, *, seeded: bool = True) -> _WatchedRun:
        """A run, which begins at rounded parameters where the reference does.

        A loss that draws noise is seeded alike in both, but where the question is what a run draws by itself.
        """
        run = prepare(workload, config, device=self.check.device, mesh=self.recorder.mesh)
        if config.parameters != self.config.parameters:
            for parameter in rounded_parameters(run.model):
                parameter.data.copy_(parameter.data.to(torch.bfloat16))
        watched = _WatchedRun(run, self.recorder)
        if seeded and self.reference.deterministic is False:
            watched.seed_micro_steps()
        return watched

    def _steps_and_own_length(self) -> ParityMeasurement:
        """The steps with dropout off, the replay of the optimizer, and one pass at the workload's own length."""
        reference, recorder, config = self.reference, self.recorder, self.config
        small = self._small(config)
        rows = None
        if config.loss == "fused" and reference.own_length is None:  # else that pass is the one with several chunks
            rows = _rows_for_chunks(config.micro_batch * reference.length)
        watched = self._watched(small, config)
        run = watched.run
        recorder.watch_rounding(run.optimizer)
        recorder.begin(run.model, keep=reference.own_length is not None)
        self.check.phase("steps")
        with limit_chunk_rows(rows):
            buffers = self._steps(watched, small)
        measurement = ParityMeasurement(
            steps=tuple(recorder.steps),
            parameters=recorder.parameters(run.model),
            changes=recorder.changes(min(reference.trained, len(recorder.steps))),
            buffers=buffers,
            data_rank=data_position(run.mesh)[0],
            data_ranks=1 if config.batch_norm == "sync" else config.dp,  # synchronised statistics are one process's
            lost=watched.lost,
            uneven=watched.uneven,
            schedule_steps=getattr(run.schedule, "last_epoch", None),
            learning_rates=learning_rates(run.optimizer),
            replay=replay(small, reference.parameters, recorder, self.check.device),
            products=product_distances(run.model, config.fp8) if config.fp8 != "off" else {},
            chunk_rows=rows,
            micro_batch=config.micro_batch,
        )
        self.check.phase("own length")
        recorder.restore()
        update = self._own_length(watched)
        hides_nan, why_not = "", "" if config.pp == 1 else "the loss of a pipeline is made in its last stage"
        if why_not or reference.hides_nan:
            self.left_out.append(f"a step whose loss is NaN: {why_not or reference.hides_nan}")
        else:
            hides_nan = watched.hidden_nan(small.make_batch(samples_at_once(config), 0))
        recorder.release()
        return measurement.model_copy(update={**update, "hides_nan": hides_nan})

    def _steps(self, watched: _WatchedRun, small: Workload) -> dict[str, float]:
        """The optimizer steps; gives the change of the buffers over those that the reference took too."""
        reference, run, buffers = self.reference, watched.run, dict[str, float]()
        few = small.global_batch if self.config.pp > 1 else samples_at_once(self.config)
        first_seed = data_position(run.mesh)[0] * run.accumulation
        state, why_not = self._state_before(watched)
        if why_not:
            self.left_out.append(f"saving and loading between two steps: {why_not}")
        for index, step in enumerate(reference.steps):
            left = reference.steps[index:] if index == WHOLE_STEPS else ()
            if left and not self._has_time(sum(later.samples or 2 * few for later in left)):
                self.left_out.append(f"steps {index + 1} to {len(reference.steps)}: there was no time")
                break
            watched.noise_seed = noise_seed(small, index) + first_seed
            batch = small.make_batch(step.samples or few, index)
            self.seconds.append(watched.step(batch, step.gradient_factor))
            if index + 1 == reference.trained:
                buffers = self.recorder.buffer_changes(run.model)
            if index + 1 == RESUMED_AFTER and state is not None:
                has_room = self.check.limit.agree(watched.has_room_to_load())
                why_not = watched.resume(state) if has_room else "the device has no room for the state twice"
                if why_not:
                    self.left_out.append(f"saving and loading between two steps: {why_not}")
        return buffers or self.recorder.buffer_changes(run.model)

    def _state_before(self, watched: _WatchedRun) -> tuple[dict[str, Any] | None, str]:
        """The state before the first step that `resume` goes back to; or None, and why nothing is saved and loaded."""
        if self.config.optimizer_state == "8bit":
            return None, "moments in 8 bits are rounded again when they are loaded"
        try:
            return watched.kept_state(), ""
        except Exception as error:  # a schedule needs nothing but step()
            return None, f"the schedule has no state to save: {type(error).__name__}"

    def _own_length(self, watched: _WatchedRun) -> dict[str, Any]:
        """One forward and backward at the workload's own length, from the same start as the reference's.

        The fused loss takes its several chunks here.
        """
        wanted = self.reference.own_length
        if wanted is None:
            return {}
        length = wanted.sequence_length or self.reference.length
        fused = self.config.loss == "fused"
        if not self._has_time(wanted.samples, longer=length / self.reference.length):
            left_out = f"a forward and backward at its own {length} tokens"
            left_out += " and the fused loss in several chunks" if fused else ""
            self.left_out.append(f"{left_out}: there was no time")
            return {}
        rows = _rows_for_chunks(wanted.samples // self.config.dp * length) if fused else None
        watched.noise_seed = noise_seed(self.workload, CHECK_STEPS) + data_position(watched.run.mesh)[0]
        with limit_chunk_rows(rows):
            measured = watched.measure_pass(OWN_LENGTH, self.workload.make_batch(wanted.samples, 0), length)
        return {"own_length": measured, "chunk_rows": rows}

    def _twin(self) -> TwinMeasure | None:
        """The candidate's knobs in fp32, not compiled: the gradient of the first step, and of the own length.

        A large model's own length is left to the candidate: in fp32 that would cost more than all the rest.
        """
        reference, config = self.reference, twin_of(self.config)
        if config is None:
            return None
        why_not = ""
        if reference.dtypes != {"float32"}:
            why_not = f"the model is stored in {', '.join(sorted(reference.dtypes))}"
        elif self.check.own_shapes and reference.deterministic is False:
            why_not = "the loss draws noise, in micro-batches that may not fit"
        elif not self._has_time(2 * reference.global_batch, compiles=False):
            why_not = "there was no time"
        if why_not:
            self.left_out.append(f"the same knobs in fp32: {why_not}")
            return None
        self.check.phase("the same in fp32")
        small = self._small(self.config)
        fixed = self.workload.fixed_micro_batch is not None
        if self.check.own_shapes and not fixed:  # what a 16-bit candidate fits in may be too little
            config = config.model_copy(update={"micro_batch": math.gcd(config.micro_batch, CHECK_MICRO_BATCH)})
        watched = self._watched(small, config)
        first_seed = data_position(watched.run.mesh)[0] * watched.run.accumulation
        watched.noise_seed = noise_seed(small, 0) + first_seed
        batch = small.make_batch(small.global_batch, 0)
        rows = _rows_for_chunks(config.micro_batch * reference.length) if config.loss == "fused" else None
        with limit_chunk_rows(rows):
            step = watched.measure_pass(TWIN + step_part(0), batch, reference.sequence_length)
        buffers = self.recorder.buffer_changes(watched.run.model)
        own, second, wanted = None, None, reference.own_length
        if wanted is not None and reference.trained == len(reference.steps):
            length = wanted.sequence_length or reference.length
            if self._has_time(2 * wanted.samples, longer=length / reference.length, compiles=False):
                watched.noise_seed = noise_seed(self.workload, CHECK_STEPS) + data_position(watched.run.mesh)[0]
                batch = self.workload.make_batch(wanted.samples, 0)
                own = watched.measure_pass(TWIN + OWN_LENGTH, batch, length)
        if reference.trained == len(reference.steps) and self.config.parameters == self.config.optimizer_state == "own":
            for number, part in enumerate(("", TWIN + step_part(1))):  # the first step is taken now
                watched.noise_seed = noise_seed(small, number) + first_seed
                batch = small.make_batch(small.global_batch, number)
                second = watched.measure_pass(part, batch, reference.sequence_length, steps=number == 0)
        return TwinMeasure(step=step, second=second, own_length=own, buffers=buffers)

    def _dropout(self, config: TrainingConfig, prefix: str = "") -> DropoutMeasure | None:
        """A pass for each seed of the reference, and the first once more, on a run that is built with dropout on.

        Before anything seeds, one micro-batch goes again and again through two steps.
        """
        wanted = self.reference.dropout
        assert wanted is not None
        first, passes = wanted.passes[0], len(wanted.passes)
        samples, length = first.samples, first.sequence_length or min(self.reference.length, DROPOUT_SEQUENCE_LENGTH)
        if not self._has_time(samples * (passes + 3), compiles=config.compile != "off"):
            self.left_out.append("dropout: there was no time" if not prefix else "dropout in fp32: there was no time")
            return None
        accumulation = dropout_accumulation(config)
        small = small_workload(
            self.workload, config, length=length, masked=False, accumulation=accumulation, dropout=True
        )
        watched = self._watched(small, config, seeded=False)
        run, batch = watched.run, small.make_batch(samples, 0)
        micro = slice_batch(batch, 0, config.micro_batch)
        with buffers_kept(run.model):
            unseeded = watched.unseeded_losses(repeat_samples(micro, accumulation))
        found = []
        for number in (*range(passes), 0):  # the first seed twice
            with buffers_kept(run.model):
                seed = self.workload.seed + 1 + number
                found.append(watched.measure_pass(f"{prefix}{DROPOUT}{number}", batch, length, seed))
        sources, alike = dict[str, tuple[float, ...]](), tuple[str, ...]()
        if config.compile == "off" and config.pp == 1 and self.reference.dtypes == {"float32"}:
            sources = dropout_sources(run.model, lambda: watched.loss(micro), self.workload.seed)
            alike = masks_alike(run.model, lambda: watched.loss(micro))
        return DropoutMeasure(
            passes=tuple(found[:-1]),
            repeated_loss=found[-1].loss,
            rates=dropout_rates(run.model),
            unseeded=unseeded,
            alike=alike,
            sources=sources,
        )


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
        self.losses: list[float] = []  # of each micro-step
        self.lost = ""  # by loading
        self.uneven = ""  # of the steps
        self._calls = 0  # of the model, in a step
        self.factor = 1.0  # of each loss
        self._micro_step = 0
        self._module, run.module = run.module, self._watched_module
        run.observe_gradients(self._before_clipping)
        hook = run.optimizer.register_step_pre_hook(self._before_optimizer)
        hooks: Any = run.optimizer._optimizer_step_pre_hooks  # an OrderedDict, which its type does not say
        hooks.move_to_end(hook.id, last=False)  # before the user's

    def seed_micro_steps(self) -> None:
        """From now on the generators are set before each micro-step: to `noise_seed`, then counting up."""

        def seed() -> None:
            seed_generators(self.noise_seed + self._micro_step)
            self._micro_step += 1

        self.run.before_micro_steps(seed)

    def _watched_module(self, micro: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = self._module(micro)
        self._calls += 1
        if self._part == "":
            self.losses.append(float(total.detach()))
        return (total if self.factor == 1.0 else total * self.factor), count

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
        result = self._until_taken(lambda: self._train(batch))
        norm = None if result.grad_norm is None else float(result.grad_norm)
        samples = batch_size(batch)
        self.recorder.after_step(self.run.model, samples=samples, loss=float(result.loss), clipping_norm=norm)
        return time.monotonic() - began

    def _train(self, batch: Batch) -> StepResult:
        """A step on this rank's share: a whole one or a pipeline's, or else of one micro-batch of each rank."""
        rank, ranks = data_position(self.run.mesh)
        size = batch_size(batch) // ranks
        own = slice_batch(batch, rank * size, (rank + 1) * size)
        if size == self.run.local_batch:
            self._calls = 0
            result = self.run.step(own)
            if self.run.config.pp == 1 and self._calls != self.run.accumulation and not self.uneven:
                self.uneven = f"a step has {self._calls} micro-batches, not {self.run.accumulation}"
            return result
        divisor = self.run.loss_divisor(own)
        total, count = self.run.micro_step(own, divisor, sync=True)
        return self.run.optimizer_step(total, count, divisor)

    def measure_pass(
        self, part: str, batch: Batch, length: int | None, seed: int | None = None, *, steps: bool = False
    ) -> PassMeasure:
        """One forward and backward, up to where the optimizer would step: parameters stay as they are.

        Args:
            part: The name of the pass.
            batch: A whole step of a run or of a pipeline; else one micro-batch of each rank.
            length: Of its sequences, for the record.
            seed: Set before the forward.
            steps: The optimizer steps after all.
        """
        self._part = part

        def micro_step() -> StepResult:
            if seed is not None:
                seed_generators(seed if self.run.mesh is None else rank_seed(seed, self.run.mesh))
            return self._train(batch)

        with contextlib.nullcontext() if steps else _without_steps(self.run):
            result = self._until_taken(micro_step)
        self._part = None
        return PassMeasure(
            loss=float(result.loss), gradient_norms=self._norms, samples=batch_size(batch), sequence_length=length
        )

    def unseeded_losses(self, own: Batch) -> tuple[tuple[float, ...], ...]:
        """The loss of each micro-batch in two steps of this rank; of a pipeline, of each step."""
        self._part = ""
        steps = []
        with _without_steps(self.run):
            for _ in range(2):
                self.losses = []
                result = self._until_taken(lambda: self.run.step(own))
                steps.append(tuple(self.losses[-self.run.accumulation :]) or (float(result.loss),))
        self._part = None
        return tuple(steps)

    def loss(self, micro: Batch) -> float:
        """Of one micro-batch, without a backward."""
        with torch.no_grad(), buffers_kept(self.run.model):
            return float(self.run.module(move_batch(micro, self.run.device))[0])

    def hidden_nan(self, batch: Batch) -> str:
        """Takes a step whose loss is NaN; says what stayed finite, '' where nothing did. The run is lost by it."""
        self._part, self.factor = "", math.nan
        try:
            result = self._train(batch)
        except Exception:  # it is not hidden
            return ""
        finally:
            self._part, self.factor = None, 1.0
        if math.isfinite(float(result.loss)):
            return "the loss"
        if self._norms and all(map(math.isfinite, self._norms.values())):
            return "the gradients"
        if result.grad_norm is not None and math.isfinite(float(result.grad_norm)):
            return "their norm"
        trained = [local_tensor(parameter.detach()) for parameter in self.run.parameters]
        finite = all(bool(values.isfinite().all()) for values in trained)
        return "the parameters" if finite and trained and self.run.scaler is None else ""

    # Saving and loading.

    def kept_state(self) -> dict[str, Any]:
        """The state of a run besides its parameters, buffers and the optimizer's state, before its first step."""
        run = self.run
        others = {"schedule": run.schedule, "scaler": run.scaler}
        return {
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups],
            **{name: copy.deepcopy(part.state_dict()) for name, part in others.items() if part is not None},
        }

    def has_room_to_load(self) -> bool:
        """Whether a GPU has room for what loading keeps more than once: parameters and the optimizer's state."""
        if self.run.device.type != "cuda":
            return True
        states = (value for state in self.run.optimizer.state.values() for value in state.values())
        tensors = [local_tensor(value) for value in (*self.run.parameters, *states) if isinstance(value, torch.Tensor)]
        kept_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        unused = torch.cuda.memory_reserved(self.run.device) - torch.cuda.memory_allocated(self.run.device)
        return 3 * kept_bytes < torch.cuda.mem_get_info(self.run.device)[0] + unused

    @torch.no_grad()
    def resume(self, fresh: dict[str, Any]) -> str:
        """Saves the run's state, makes the run as it was before its first step, and loads the state.

        Parameters and buffers, which a resumed run has from elsewhere, are zeros in between. Gives '', or why it was
        not done; the run is then as it was.
        """
        run = self.run
        if inner_optimizers(run.optimizer):
            return "the optimizer holds others, whose state is no part of its own"
        moments, others = dict(run.optimizer.state), self.kept_state()
        torch.rand(1)  # the generators are not as they were before the first step
        self._part = ""  # torch makes a step of zeros before it saves an optimizer without state
        try:
            state = run.state_dict()
        except Exception as error:  # an optimizer that torch's functions for checkpoints do not know
            self._part = None
            self._put_back(moments, others)
            return f"the state cannot be saved: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        for part in ("model", *(("optimizer",) if run.config.offload != "none" else ())):
            # the parameters are zeroed, and states on the host lie in buffers that the run uses again
            tensors = {name: value for name, value in state[part].items() if isinstance(value, torch.Tensor)}
            state[part] = {**state[part], **{name: tensor.detach().clone() for name, tensor in tensors.items()}}
        saved = [value for value in run.model.state_dict().values() if isinstance(value, torch.Tensor)]
        written = [tensor for tensor in map(local_tensor, saved) if not is_expanded(tensor)]  # of others a load fails
        kept = [(tensor, tensor.detach().clone()) for tensor in written]
        buffers = {local_tensor(buffer).data_ptr() for buffer in run.model.buffers()}
        for tensor, _ in kept:
            tensor.zero_()
        generators = torch.get_rng_state()
        torch.rand(1)
        try:
            self._put_back({}, fresh)
            run.load_state_dict(state)
            of_buffers = [pair for pair in kept if pair[0].data_ptr() in buffers]
            if not all(torch.equal(tensor.nan_to_num(), value.nan_to_num()) for tensor, value in of_buffers):
                self.lost = "buffers"
            elif run.mesh is None and not torch.equal(generators, torch.get_rng_state()):
                self.lost = "the random state"
        except Exception as error:
            for tensor, value in kept:
                tensor.copy_(value)
            self._put_back(moments, others)
            return f"the state cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        finally:
            self._part = None
            self.recorder.forget_step()
        return ""

    def _put_back(self, moments: dict[Any, Any], others: dict[str, Any]) -> None:
        run = self.run
        run.optimizer.state.clear()
        run.optimizer.state.update(moments)
        for group, values in zip(run.optimizer.param_groups, copy.deepcopy(others["groups"]), strict=True):
            group.update(values)
        if run.schedule is not None:
            run.schedule.load_state_dict(copy.deepcopy(others["schedule"]))
        if run.scaler is not None:
            run.scaler.load_state_dict(others["scaler"])
        for parameter in held_by(run.optimizer):
            parameter.grad = None  # that of torch's step of zeros; nobody clears those that it does not hold
        self.recorder.forget_step()

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
    schedule, run.schedule = run.schedule, None
    try:
        with without_steps(run.optimizer):
            yield
    finally:
        run.schedule = schedule
