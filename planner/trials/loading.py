"""Measures the loader of a training beside the plan's step. Runs in the ranks of the plan.

In: a `LoadingRequest`: the workload, the plan's configuration, the user's dataset. Out: a `LoadingAnswer`: for each
setting how many samples a second the step gets through, and the share of the time in which it waits. The step and the
loader's workers share the cores, as they will in the training.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch.utils.data import default_collate

from autoplan.errors import AutoplanError, WorkloadError
from autoplan.planner.records.loading import LoaderTrial
from autoplan.planner.trials.ranks import RankSync, join_ranks, pick_device
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques.mesh import data_position
from autoplan.strategies.workloads.loading.settings import LoaderSetting, LoaderSpec
from autoplan.strategies.workloads.loading.source import LoaderSource, make_loader, make_order, open_source, samples_of
from autoplan.strategies.workloads.loading.wrapped import (
    Failure,
    NamedCollate,
    NamedSamples,
    NamedStream,
    Shapes,
    describe_shapes,
    kinds_of,
    shapes_of,
)
from autoplan.strategies.workloads.samples import SampleBatch
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext
    from autoplan.strategies.run import TrainingRun

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
"""Of the time, for one setting; none is begun after the whole time, so that all take less than twice of it."""

UNITS_PER_SETTING = 8
LEAST_UNITS = 3
WARM_SHARE = 0.4
"""Of a setting's time, at most, for the batches that were made ahead before the step began."""


class LoadingRequest(Record):
    """The measurement to make, and the time for it."""

    spec: WorkloadSpec
    config: TrainingConfig
    device: Literal["cuda", "cpu"]
    loader: LoaderSpec
    step_s: float = Field(description="seconds of a whole step, as the trials measured it")
    time_s: float = Field(description="for all settings together, after the run was built")
    cores: int = Field(default=1, description="usable by all ranks")


class LoadingAnswer(Record):
    """The findings of one rank; the times are those of the slowest rank."""

    own_samples_per_s: float | None = None
    batches: Literal["dataset", "make_batch"] = "dataset"
    tried: tuple[LoaderTrial, ...] = ()
    notes: tuple[str, ...] = ()


class LoadingError(Exception):
    """The dataset, its collate_fn or a worker failed; the text says on which sample."""


def run_loading(context: RankContext, request: LoadingRequest) -> LoadingAnswer:
    """Measures the settings, the fewest workers first; what is known by then is reported after each."""
    from autoplan.strategies.prepare import prepare
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
    measurement = LoaderMeasurement(request=request, run=run, ranks=ranks, source=source)
    for answer in measurement.answers():
        context.report(answer)
    context.phase("done")
    return measurement.answer()


@dataclass(kw_only=True)
class LoaderMeasurement:
    """The settings of one loader, one after another, beside one run.

    Attributes:
        unit_samples: Samples of this rank that are loaded and trained together: a step's, or those of some
            micro-steps where a step takes too long.
        own_unit_s: Seconds of a unit whose batch is at hand.
    """

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
    _first_shapes: Shapes | None = None

    def answer(self) -> LoadingAnswer:
        """The answer, as far as it is known by now."""
        own = None if self.own_unit_s is None else self.unit_samples * self.run.config.dp / self.own_unit_s
        return LoadingAnswer(
            own_samples_per_s=own, batches=self._batches, tried=tuple(self.tried), notes=tuple(self.notes)
        )

    def answers(self) -> Iterator[LoadingAnswer]:
        """Measures settings until the step waits no more, none is left, or the time is over; an answer after each."""
        until = time.monotonic() + self.request.time_s
        self._measure_own()
        for setting in self.settings():
            if self.ranks.any(time.monotonic() > until):
                self.notes.append(f"the time was over before {setting.describe()} could be measured")
                return
            self.tried.append(self._measure_setting(setting))
            yield self.answer()
            waiting = self.tried[-1].waiting_share
            if waiting is not None and waiting < NO_WAIT:
                return

    def settings(self) -> Iterator[LoaderSetting]:
        """The settings to measure next, by what `tried` has so far.

        The fewest workers first, on CUDA in pinned memory; none after two in a row that gain nothing. Then the best
        number of them further ahead, and the best by then without pinned memory.
        """
        pin_memory = self.run.device.type == "cuda"
        most = max(LEAST_MOST_WORKERS, self.request.cores // max(1, self.ranks.world_size))
        worse = 0
        for workers in WORKERS:
            if worse >= 2 or (workers > most and not self._helped_much()):
                break
            before = best_trial(self.tried)
            yield LoaderSetting(workers=workers, prefetch_factor=2 if workers else None, pin_memory=pin_memory)
            worse = 0 if best_trial(self.tried) is not before else worse + 1
        for further, worth_it in (({"prefetch_factor": 4}, "workers"), ({"pin_memory": False}, "pin_memory")):
            best = best_trial(self.tried)
            if best is not None and getattr(best.setting, worth_it):
                yield best.setting.model_copy(update=further)

    def _helped_much(self) -> bool:
        """Whether the last setting got through many more samples than the one before."""
        rates = [trial.samples_per_s or 0.0 for trial in self.tried[-2:]]
        return len(rates) == 2 and rates[1] >= HELPS_MUCH * rates[0] > 0

    # What the step runs on.

    def _measure_own(self) -> None:
        """The unit alone: its batch is at hand. It is a whole step, or as many micro-steps as fit several times."""
        run, request = self.run, self.request
        unit_s = SETTING_SHARE * request.time_s / UNITS_PER_SETTING
        micro_steps = run.accumulation
        if request.step_s > unit_s and request.config.pp == 1:
            micro_steps = max(1, math.floor(unit_s / request.step_s * run.accumulation))
        self.unit_samples = micro_steps * run.config.micro_batch
        self._own_batch = run.workload.make_batch(self.unit_samples, 0)
        own = itertools.repeat(self._own_batch)
        self._run_units(own, most=1)  # compiles, and makes the optimizer's state
        count, seconds = self._run_units(
            own, most=UNITS_PER_SETTING, limit_s=self.request.time_s / 6, least=LEAST_UNITS
        )
        self.own_unit_s = self.ranks.largest([seconds / count])[0]

    def _run_units(
        self, batches: Iterator[Any], *, most: int, limit_s: float = math.inf, least: int = 0
    ) -> tuple[int, float]:
        """Runs units, on all ranks as many; returns how many, and the seconds that they took together."""
        began, count = time.perf_counter(), 0
        while count < most:
            if self.ranks.any(time.perf_counter() - began > limit_s) and count >= least:
                break
            batch = next(batches)
            self._train(batch if self._batches == "dataset" else self._own_batch)
            count += 1
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)
        return count, time.perf_counter() - began

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

    # One setting.

    def _measure_setting(self, setting: LoaderSetting) -> LoaderTrial:
        try:
            return self._time_setting(setting)
        except LoadingError as error:
            problem = str(error)
        except AutoplanError as error:
            problem = error.flag_message
        text = " ".join(problem.split())[:500]
        if self.ranks.world_size > 1:  # the other ranks wait for this one
            raise WorkloadError(text)
        return LoaderTrial(setting=setting, samples_per_s=None, problem=text)

    def _time_setting(self, setting: LoaderSetting) -> LoaderTrial:
        """The first batch, the batches that were made ahead of it, then the units that count."""
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
        batches = LoaderBatches(loader, samples=self.unit_samples)
        share_s = SETTING_SHARE * self.request.time_s
        ahead = setting.workers * (setting.prefetch_factor or 0)
        try:
            first = next(batches)
            first_s = batches.waited_s
            self._look_at(first)
            looked_at = (batch for batch in batches if self._look_at(batch))
            self._run_units(itertools.chain([first], looked_at), most=1 + ahead, limit_s=WARM_SHARE * share_s, least=1)
            batches.waited_s = 0.0
            count, seconds = self._run_units(looked_at, most=200, limit_s=share_s, least=LEAST_UNITS)
        finally:
            batches.close()
        first_s, seconds, waited_s = self.ranks.largest([first_s, seconds, batches.waited_s])
        waiting = waited_s / seconds
        if self.run.device.type == "cuda" and self.own_unit_s is not None:
            waiting = max(0.0, 1 - count * self.own_unit_s / seconds)  # the host may wait while the GPU works
        rate = count * self.unit_samples * self.run.config.dp / seconds
        return LoaderTrial(
            setting=setting,
            samples_per_s=rate,
            waiting_share=min(1.0, waiting),
            first_batch_s=first_s,
            steps=count,
        )

    def _look_at(self, batch: Any) -> Literal[True]:
        """Whether the step can run on the dataset's batches: they are made as make_batch's are; always True.

        A compiled plan takes no batches of other shapes, each of which would be compiled anew.
        """
        shapes, own = shapes_of(batch), self._own_batch
        compiled = self.run.config.compile != "off"
        if self._first_shapes is None:
            self._first_shapes = shapes
            alike = kinds_of(own) == kinds_of(batch) and not isinstance(own, SampleBatch)
            if not alike or (compiled and shapes_of(own) != shapes):
                self._batches = "make_batch"
                self.notes.append(
                    f"the loader's batches ({describe_shapes(shapes)}) are not made as make_batch's are "
                    f"({describe_shapes(shapes_of(own))}): the step ran on those of make_batch, beside the loader"
                )
        elif shapes != self._first_shapes and not any("change shape" in note for note in self.notes):
            self.notes.append(
                f"the loader's batches change shape: one has {describe_shapes(shapes)}, the first one "
                f"{describe_shapes(self._first_shapes)}; steps take as long as their batches are large"
            )
            if compiled:
                self._batches = "make_batch"
        return True


class LoaderBatches(Iterator[Any]):
    """The batches of a loader, epoch after epoch, and the seconds that were spent waiting for them.

    Args:
        loader: Made with `named=True`.
        samples: Of a batch.

    Going over it raises LoadingError where a batch could not be made, and says on which sample; or where an epoch has
    no whole batch.
    """

    def __init__(self, loader: Any, *, samples: int) -> None:
        self.loader, self.waited_s = loader, 0.0
        self._iterator: Any = None
        self._batches = self._over_and_over(samples)

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except LoadingError:
            raise
        except Exception as error:  # of the DataLoader, or of a worker: with the worker's whole traceback
            lines = [line for line in str(error).splitlines() if line.strip()]
            text = lines[-1].strip() if lines else "no text"
            kind = type(error).__name__
            raise LoadingError(text if text.startswith(kind) else f"{kind}: {text}") from error
        self.waited_s += time.perf_counter() - began
        if isinstance(batch, Failure):
            raise LoadingError(batch.text)
        return batch

    def _over_and_over(self, samples: int) -> Generator[Any, None, None]:
        why = f"the dataset ends before it has given one whole batch of {samples} samples"
        while True:
            self._iterator, found = iter(self.loader), False
            for batch in self._iterator:
                if batch is None:  # a collate_fn that gives nothing
                    break
                found = True
                yield batch
            if not found:
                raise LoadingError(why)
            why = "the dataset gives nothing when it is gone over again: it is used up"

    def close(self) -> None:
        """Ends the workers."""
        shutdown = getattr(self._iterator, "_shutdown_workers", None)
        self._iterator = None
        self._batches.close()
        self.loader._iterator = None  # where workers stay between epochs
        if shutdown is not None:
            shutdown()


def best_trial(tried: Sequence[LoaderTrial]) -> LoaderTrial | None:
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
    context.phase("loader")
    try:
        failure = first_and_last(open_source(loader), samples)
    except AutoplanError as error:
        return error.flag_message, error.flag_hint
    return None if failure is None else (failure.text, "Repair the dataset, or search without --loader.")


def first_and_last(source: LoaderSource, samples: int) -> Failure | None:
    """The failure of the first samples of a dataset, of a batch of them, or of its last sample; None: there is none.

    If a sampler of the user's own gives the order, the last sample is the last one of its first step.

    Args:
        source: The dataset.
        samples: Of a global batch, which the dataset, or the sampler, should have at least.

    Raises:
        WorkloadError: fewer samples than that, by the sampler; or nothing says how many there are.
    """
    indices: Sequence[Any]
    if source.streams:
        named = list(itertools.islice(NamedStream(source.dataset), samples))
        found = samples if any(isinstance(sample, Failure) for _, sample in named) else len(named)
    else:
        if source.sampler is None:
            indices = range(samples_of(source))
            found = len(indices)
        else:
            step = max(samples // source.split_over, 1)  # a sampler that is split gives one rank's share
            indices = list(itertools.islice(make_order(source, batch_size=step), step))
            found = samples
        dataset = NamedSamples(source.dataset)
        places = (-1, 0, min(1, len(indices) - 1)) if found >= samples else ()
        named = [dataset[indices[place]] for place in places]
        if named and not isinstance(named[0][1], Failure):
            named = named[1:]  # a last sample may well be shorter
    if found < samples:
        return Failure(
            f"the dataset ends after {found} samples, and a step takes {samples}: no whole batch can be made"
        )
    batch = NamedCollate(source.collate_fn or default_collate)(named)
    return batch if isinstance(batch, Failure) else None
