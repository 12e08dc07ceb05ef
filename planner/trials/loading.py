"""Measures the loader of a training beside the plan's step. Runs in the ranks of the plan.

In: a `LoadingRequest`: the workload, the plan's configuration, the user's dataset. Out: a `LoadingAnswer`: for each
setting how many samples a second the step gets through, and the share of the time in which it waits. The step and the
loader's workers share the cores, as they will in the training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from autoplan.errors import AutoplanError, WorkloadError
from autoplan.planner.loading import LoaderTrial
from autoplan.planner.trials.loader_batches import LoaderBatches, LoadingError, Place, is_of_loader, last_line
from autoplan.planner.trials.ranks import RankSync, join_ranks, pick_device
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loading.settings import LoaderSetting, LoaderSpec
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext
    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.loading.named import NamedBatch
    from autoplan.strategies.workloads.loading.source import LoaderSource

WORKERS = (0, 1, 2, 4, 8, 16, 32)
LEAST_MOST_WORKERS = 4
"""Up to so many workers are tried on any machine, and up to the cores of a rank; more while they still help much."""

HELPS_MUCH = 1.3
"""Workers that get through so many times the samples when doubled wait for what is no core: a disk, a network."""

NO_WAIT = 0.01
"""A step that waits for a smaller share of the time waits for nothing: no further setting is tried."""

GAIN = 0.02
"""A setting is better only if it gets through more samples by this share: step times are not known more accurately."""

SETTING_SHARE = 1 / 7
"""Of the time, for one setting."""

WORKERS_UNTIL, AHEAD_UNTIL = 0.8, 1.25
"""Shares of the time, after which no further number of workers is begun, and no setting that goes further ahead: there
are two of these at most, and the measurement may take twice its time."""

UNITS_PER_SETTING = 8
LEAST_UNITS = 3
WARM_SHARE = 0.4
"""Of a setting's time, at most, for the batches that were made ahead before the step began."""


class LoadingRequest(Record):
    """What is measured, and for how long."""

    spec: WorkloadSpec
    config: TrainingConfig
    device: Literal["cuda", "cpu"]
    loader: LoaderSpec
    step_s: float = Field(description="seconds of a whole step, as the trials measured it")
    time_s: float = Field(description="for all settings together, after the run was built")
    cores: int = Field(default=1, description="usable by all ranks")


class LoadingAnswer(Record):
    """What one rank found; the times are those of the slowest rank."""

    own_samples_per_s: float | None = None
    batches: Literal["dataset", "make_batch"] = "dataset"
    tried: tuple[LoaderTrial, ...] = ()
    notes: tuple[str, ...] = ()


def run_loading(context: RankContext, request: LoadingRequest) -> LoadingAnswer:
    """Measures the settings, the fewest workers first; what is known by then is reported after each."""
    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.loading.source import open_source
    from autoplan.strategies.workloads.sources import load_workload

    context.phase("init")
    device = pick_device(context, request.device)
    join_ranks(context, request.device)
    ranks = RankSync(context.world_size, device)
    workload = load_workload(request.spec)
    context.phase("build")
    run = prepare(workload, request.config, device=device)
    context.phase("loader")
    source = open_source(request.loader)
    context.phase("measure")
    measurement = LoaderMeasurement(context=context, request=request, run=run, ranks=ranks, source=source)
    measurement.measure()
    context.phase("done")
    answer = measurement.answer()
    context.report(answer)
    return answer


@dataclass(kw_only=True)
class LoaderMeasurement:
    """The settings of one loader, one after another, beside one run.

    Attributes:
        unit_samples: Samples of this rank that are loaded and trained together: a step's, or those of some
            micro-steps where a step takes too long.
    """

    context: RankContext
    request: LoadingRequest
    run: TrainingRun
    ranks: RankSync
    source: LoaderSource
    tried: list[LoaderTrial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unit_samples: int = 0
    own_unit_s: float | None = None
    _batches: Literal["dataset", "make_batch"] = "dataset"
    _own_batch: Any = None
    _micro_steps_done: int = 0
    _first_shapes: Any = None

    def answer(self) -> LoadingAnswer:
        """What is known by now."""
        own = None if self.own_unit_s is None else self.unit_samples * self.run.config.dp / self.own_unit_s
        return LoadingAnswer(
            own_samples_per_s=own, batches=self._batches, tried=tuple(self.tried), notes=tuple(self.notes)
        )

    def measure(self) -> None:
        """Measures settings until the step waits no more, or none is left, or the time is over."""
        began = time.monotonic()
        self._choose_unit()
        self._measure_own()
        time_s = self.request.time_s
        if self._try_all(self._worker_settings(), until=began + WORKERS_UNTIL * time_s):
            self._try_all(self._further_settings(), until=began + AHEAD_UNTIL * time_s)

    def _try_all(self, settings: Iterator[LoaderSetting], *, until: float) -> bool:
        """Measures settings one after another, none after a moment; returns False once the step waits no more."""
        for setting in settings:
            if self.ranks.any(time.monotonic() > until):
                self.notes.append(f"the time was over before {setting.describe()} could be measured")
                break
            trial = self._measure_setting(setting)
            self.tried.append(trial)
            self.context.report(self.answer())
            if trial.waiting_share is not None and trial.waiting_share < NO_WAIT:
                return False
        return True

    # The settings.

    def _worker_settings(self) -> Iterator[LoaderSetting]:
        """Fewest workers first, on CUDA in pinned memory; none after two in a row that gain nothing."""
        most = max(LEAST_MOST_WORKERS, self.request.cores // max(1, self.ranks.world_size))
        worse = 0
        for workers in WORKERS:
            if worse >= 2 or (workers > most and not self._helped_much()):
                return
            before = self._best()
            prefetch = 2 if workers else None
            yield LoaderSetting(workers=workers, prefetch_factor=prefetch, pin_memory=self.run.device.type == "cuda")
            worse = 0 if self._best() is not before else worse + 1

    def _further_settings(self) -> Iterator[LoaderSetting]:
        """The best number of workers, further ahead; the best by then without pinned memory."""
        best = self._best()
        if best is not None and best.setting.workers:
            yield best.setting.model_copy(update={"prefetch_factor": 4})
        best = self._best()
        if best is not None and best.setting.pin_memory:
            yield best.setting.model_copy(update={"pin_memory": False})

    def _helped_much(self) -> bool:
        """Whether the last setting got through many more samples than the one before."""
        rates = [trial.samples_per_s or 0.0 for trial in self.tried[-2:]]
        return len(rates) == 2 and rates[1] >= HELPS_MUCH * rates[0] > 0

    def _best(self) -> LoaderTrial | None:
        return best_trial(self.tried)

    # What the step runs on.

    def _choose_unit(self) -> None:
        """A whole step where several fit into a setting's time; else as many micro-steps as do."""
        run, request = self.run, self.request
        unit_s = SETTING_SHARE * request.time_s / UNITS_PER_SETTING
        micro_steps = run.accumulation
        if request.step_s > unit_s and request.config.pp == 1:
            micro_steps = max(1, math.floor(unit_s / request.step_s * run.accumulation))
        self.unit_samples = micro_steps * run.config.micro_batch
        self._own_batch = run.workload.make_batch(self.unit_samples, 0)

    def _measure_own(self) -> None:
        """The unit alone: its batch is at hand."""
        self._train(self._own_batch)  # compiles, and makes the optimizer's state
        self._synchronize()
        limit_s, count, began = self.request.time_s / 6, 0, time.perf_counter()
        while count < UNITS_PER_SETTING:
            self._train(self._own_batch)
            count += 1
            is_late = self.ranks.any(time.perf_counter() - began > limit_s)  # all ranks end at the same count
            if is_late and count >= LEAST_UNITS:
                break
        self._synchronize()
        self.own_unit_s = self.ranks.largest([(time.perf_counter() - began) / count])[0]

    def _train(self, batch: Any) -> None:
        """The unit's micro-steps, and the optimizer's step where the step is whole by then."""
        run = self.run
        if self.unit_samples == run.local_batch:
            run.step(batch)
            return
        divisor = run.loss_divisor(batch)
        total = torch.zeros((), device=run.device)
        count = torch.zeros((), device=run.device)
        for micro in run.micro_batches(batch):
            self._micro_steps_done += 1
            whole = self._micro_steps_done >= run.accumulation
            micro_total, micro_count = run.micro_step(micro, divisor, sync=whole)
            total += micro_total
            count += micro_count
            if whole:
                run.optimizer_step(total, count, divisor)
                self._micro_steps_done = 0

    def _pick_batches(self, batch: Any) -> None:
        """Whether the step can run on the dataset's batches: they are made as make_batch's are."""
        from autoplan.strategies.workloads.loading.named import describe_shapes, kinds_of, shapes_of
        from autoplan.strategies.workloads.samples import SampleBatch

        own = self._own_batch
        same = kinds_of(own) == kinds_of(batch) and not isinstance(own, SampleBatch)
        if same and shapes_of(own) != shapes_of(batch) and self.run.config.compile != "off":
            same = False  # each other shape would be compiled anew
        if not same:
            self._batches = "make_batch"
            self.notes.append(
                f"the loader's batches ({describe_shapes(shapes_of(batch))}) are not made as make_batch's are "
                f"({describe_shapes(shapes_of(own))}): the step ran on those of make_batch, beside the loader"
            )

    # One setting.

    def _measure_setting(self, setting: LoaderSetting) -> LoaderTrial:
        problem: str | None = None
        figures: dict[str, Any] = {}
        try:
            figures = self._time_setting(setting)
        except LoadingError as error:
            problem = str(error)
        except AutoplanError as error:
            problem = error.flag_message
        except Exception as error:
            if not is_of_loader(error):
                raise
            problem = last_line(error)
        if problem is None:
            return LoaderTrial(setting=setting, **figures)
        text = " ".join(problem.split())[:500]
        if self.ranks.world_size > 1:  # the other ranks wait for this one
            raise WorkloadError(text)
        return LoaderTrial(setting=setting, samples_per_s=None, problem=text)

    def _time_setting(self, setting: LoaderSetting) -> dict[str, Any]:
        from autoplan.strategies.techniques.mesh import data_position
        from autoplan.strategies.workloads.loading.source import make_loader

        rank, ranks = data_position(self.run.mesh)
        loader = make_loader(
            self.source,
            setting,
            batch_size=self.unit_samples,
            rank=rank,
            ranks=ranks,
            seed=self.run.workload.seed,
            named=True,
            timeout_s=max(30.0, 2 * self.request.time_s),
        )
        batches = LoaderBatches(loader, on_batch=self._look_at, samples=self.unit_samples)
        try:
            began = time.perf_counter()
            first = batches.next()
            first_s = time.perf_counter() - began
            if self._first_shapes is None:
                self._pick_batches(first)
            self._remember_shapes(first)
            return self._time_units(setting, batches, first) | {"first_batch_s": self.ranks.largest([first_s])[0]}
        finally:
            batches.close()

    def _time_units(self, setting: LoaderSetting, batches: LoaderBatches, first: Any) -> dict[str, Any]:
        """Warm-up until the batches that were made ahead are used up, then the units that count."""
        share_s = SETTING_SHARE * self.request.time_s
        ahead = setting.workers * (setting.prefetch_factor or 0)
        self._consume(first)
        self._run_units(batches, most=ahead, limit_s=WARM_SHARE * share_s)
        batches.waited_s = 0.0
        count, seconds = self._run_units(batches, most=200, limit_s=share_s, least=LEAST_UNITS)
        seconds, waited = self.ranks.largest([seconds, batches.waited_s])
        waiting = waited / seconds
        if self.run.device.type == "cuda" and self.own_unit_s is not None:
            waiting = max(0.0, 1 - count * self.own_unit_s / seconds)  # the host may wait while the GPU works
        rate = count * self.unit_samples * self.run.config.dp / seconds
        return {"samples_per_s": rate, "waiting_share": min(1.0, waiting), "steps": count}

    def _run_units(self, batches: LoaderBatches, *, most: int, limit_s: float, least: int = 0) -> tuple[int, float]:
        """Runs units; returns how many, and the seconds that they took together."""
        began, count = time.perf_counter(), 0
        while count < most:
            if count >= least and self.ranks.any(time.perf_counter() - began > limit_s):
                break
            self._consume(batches.next())
            count += 1
        self._synchronize()
        return count, time.perf_counter() - began

    def _consume(self, batch: Any) -> None:
        self._train(batch if self._batches == "dataset" else self._own_batch)

    # What the dataset gives.

    def _remember_shapes(self, batch: Any) -> None:
        from autoplan.strategies.workloads.loading.named import shapes_of

        if self._first_shapes is None:
            self._first_shapes = shapes_of(batch)

    def _look_at(self, named: NamedBatch, place: Place) -> None:
        """Says once that batches change their shape, and which does, with its samples."""
        from autoplan.strategies.workloads.loading.named import describe_samples, describe_shapes, shapes_of

        if self._first_shapes is None or any("change shape" in note for note in self.notes):
            return
        shapes = shapes_of(named.batch)
        if shapes == self._first_shapes:
            return
        self.notes.append(
            f"the loader's batches change shape: {place.describe()} ({describe_samples(named.indices)}) has "
            f"{describe_shapes(shapes)}, batch 0 {describe_shapes(self._first_shapes)}; "
            "steps take as long as their batches are large"
        )
        if self._batches == "dataset" and self.run.config.compile != "off":
            self._batches = "make_batch"

    def _synchronize(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)


def best_trial(tried: list[LoaderTrial] | tuple[LoaderTrial, ...]) -> LoaderTrial | None:
    """The setting with the most samples a second; of those within GAIN of each other the first, which is simplest."""
    best: LoaderTrial | None = None
    for trial in tried:
        if trial.samples_per_s is None:
            continue
        if best is None or best.samples_per_s is None or trial.samples_per_s > (1 + GAIN) * best.samples_per_s:
            best = trial
    return best


# Before any trial.


def check_loading(context: RankContext, loader: LoaderSpec, samples: int) -> tuple[str, str | None] | None:
    """Opens the dataset, makes a batch of its first samples, and looks at its last: what is wrong is said at once.

    Args:
        context: This rank.
        loader: Where the dataset comes from.
        samples: Of a global batch.

    Returns:
        What is wrong, with the index of the sample, and what to do; None: nothing.
    """
    from autoplan.strategies.workloads.loading.first_look import first_and_last
    from autoplan.strategies.workloads.loading.source import open_source

    context.phase("loader")
    try:
        failure = first_and_last(open_source(loader), samples)
    except AutoplanError as error:
        return error.flag_message, error.flag_hint
    return None if failure is None else (failure.text, "Repair the dataset, or search without --loader.")
