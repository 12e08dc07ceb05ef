"""Whole searches without processes: the real loop, store, study, model and plan, over runs that are drawn.

A `World` says how long a step of each configuration takes, and what goes wrong. The clock is that of the store, moved
on by what a run would have taken. What trains is tested elsewhere; here it is what a search makes of its runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoplan.planner.parity import check as parity_check
from autoplan.planner.records.trials import (
    Interval,
    Outcome,
    Parity,
    ParityCheck,
    PeakMemory,
    Prediction,
    Trial,
    Window,
)
from autoplan.planner.search import answer
from autoplan.planner.search import run as search_run
from autoplan.planner.search.answer import SearchRun
from autoplan.planner.search.candidate_model import FOLLOWS_CORE, CandidateModel
from autoplan.planner.search.next_work import Work
from autoplan.planner.search.options import SearchObserver, SearchOptions, SearchResult
from autoplan.planner.search.session import Session
from autoplan.planner.store.store import Store
from autoplan.planner.trials import measure
from autoplan.planner.trials.request import look_s
from autoplan.planner.trials.runner import TrialOrder
from autoplan.processes import Ended, TaskFailedError
from autoplan.strategies.config import KNOBS, TrainingConfig
from tests.recorded import make_hardware, make_plan

GLOBAL_BATCH = 16
FIXED_S = 1.0
LOAD = "other work took 48% of the CPU time"
LIMIT_BYTES = 8 << 30
MOST_WORKS = 200

PLAIN = TrainingConfig(micro_batch=16)
"""The plain run of a `World` with its own candidates: the largest micro-batch that fits."""

CANDIDATES = tuple(
    TrainingConfig.model_validate({"micro_batch": size, "precision": precision, "optimizer_step": step})
    for size in (1, 2, 4, 8, 16)
    for precision in ("fp32", "bf16")
    for step in ("own", "fused")
)


class Killed(BaseException):
    """The planner was killed here: nothing of it runs any more."""


def usual_s(config: TrainingConfig) -> float:
    """bf16 is half of fp32, a larger micro-batch and a fused optimizer are a little faster."""
    step_s = 0.4 * (1.0 + 0.5 / config.micro_batch) * (0.5 if config.precision == "bf16" else 1.0)
    return step_s * (0.95 if config.optimizer_step == "fused" else 1.0) * (0.9 if config.compile != "off" else 1.0)


class FlatEstimates:
    """A cost model that expects of each configuration the mean of the trials so far, within a factor of three."""

    def __init__(self) -> None:
        self.logs: tuple[list[float], list[float]] = [], []  # of step times, of peaks

    def observe(self, trial: Trial) -> None:
        seconds = None if trial.step_time_s is None else trial.step_time_s.median
        for logs, value in zip(self.logs, (seconds, trial.peak_memory_bytes), strict=True):
            logs += [math.log(value)] if value else []

    def table(self, configs: Sequence[TrainingConfig]) -> Any:
        columns: dict[str, Any] = {}
        for name, logs, first in zip(("step_time", "peak_memory"), self.logs, (1.0, 2.0**30), strict=True):
            unit = "s" if name == "step_time" else "bytes"
            mean = np.full(len(configs), math.exp(np.mean(logs or [math.log(first)])))
            columns |= {f"{name}_{unit}": mean, f"{name}_low_{unit}": mean / 3, f"{name}_high_{unit}": mean * 3}
        return SimpleNamespace(**columns)


class ASecondEach:
    """Costs of trials: a second each, nothing of it for a compilation."""

    def observe(self, trial: Trial) -> None:
        pass

    def all_s(self, step_time_s: Any) -> Any:
        return np.ones(len(step_time_s))

    def compile_s(self, config: TrainingConfig) -> float:
        return 0.0


def flat_model(candidates: Sequence[TrainingConfig], cost: Any = None, **given: Any) -> CandidateModel:
    """A model of candidates of which nothing is known before the first trial."""
    estimates: Any = FlatEstimates()
    return CandidateModel(candidates, estimates, cost or ASecondEach(), **given)


@dataclass(kw_only=True)
class World:
    """What would be measured.

    Attributes:
        seconds: Of a step of each configuration.
        predicted: What the cost model says of it.
        candidates: Of the search.
        sd: Between runs of one configuration.
        width: The predictions' interval of 90 %, as a factor.
        check_s: Of a parity check. The search expects 15 s of one in this world, and it takes a third longer.
        own: The setting that the training has now; None: it is not known.
        compile_s: Of a compilation with an empty cache.
        input_s: Of the data of a step, which runs do not wait for.
        passes: The verdict of a parity check; None: it does not come to its end.
        failed: The name of the comparison of those that do not pass.
        fate: What becomes of a run: fields of its `Trial`, by its order and the runs before; None: it is good.
        core_slower: How many times as long a core takes, by the number of the run.
        made: The runs that were made, in order: purpose, configuration, round.
        checked: The configurations whose check was begun.
        rungs: For each: the plain run that is taken to fit at the workload's own length.
        check_times: For each: the seconds until its deadline, and those for parts that a verdict can do without.
        orders: What was asked of each run.
    """

    seconds: Callable[[TrainingConfig], float] = usual_s
    predicted: Callable[[TrainingConfig], float] | None = None
    candidates: Sequence[TrainingConfig] = CANDIDATES
    sd: float = 0.004
    width: float = 1.3
    check_s: float = 20.0
    own: TrainingConfig | None = None
    compile_s: float = 20.0
    input_s: float = 0.0
    passes: Callable[[TrainingConfig], bool | None] = lambda config: True
    failed: str = ""
    fate: Callable[[TrialOrder, int], dict[str, Any] | None] = lambda order, before: None
    core_slower: Callable[[int], float] = lambda number: 1.0
    seed: int = 0
    made: list[tuple[str, TrainingConfig, int | None]] = field(default_factory=list)
    checked: list[TrainingConfig] = field(default_factory=list)
    rungs: list[str] = field(default_factory=list)
    check_times: list[tuple[float, float]] = field(default_factory=list)
    orders: list[TrialOrder] = field(default_factory=list)
    compiled: set[TrainingConfig] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def purposes(self) -> list[str]:
        """Of the runs that were made."""
        return [purpose for purpose, _, _ in self.made]

    def run(self, order: TrialOrder) -> Trial:
        """One run: drawn, stopped early where the real rule stops it, ended by its deadline."""
        config, before = order.config, sum(config == order.config for _, config, _ in self.made)
        core = self.core_slower(len(self.made))
        self.made.append((order.purpose, config, order.round))
        self.orders.append(order)
        fate = self.fate(order, before) or {}
        step_s = self.seconds(config) * math.exp(self.random.normal(0.0, self.sd)) * fate.pop("slower", 1.0)
        step_s *= core**FOLLOWS_CORE
        steps = step_s * np.exp(self.random.normal(0.0, 0.002, 5))
        compiling_s = 0.0
        warnings: tuple[str, ...] = ()
        if config.compile != "off":
            warm = config in self.compiled
            compiling_s = 0.15 * self.compile_s if warm else self.compile_s
            self.compiled.add(config)
            warnings = (f"compile cache: {2 * warm} hit(s), {2 * (not warm)} miss(es)",)
        accumulation = np.array([float(config.accumulation(GLOBAL_BATCH))])
        measuring_s = float(look_s(np.array([step_s]), accumulation)[0])
        facts: dict[str, Any] = {"outcome": Outcome.OK, "method": "whole_steps", "warnings": warnings}
        disturbed = fate.pop("disturbed", None)
        facts["window"] = Window(seconds=measuring_s, disturbed=disturbed, core_s=1e-3 * core, core_readings=9)
        if order.to_beat is not None and facts["window"].disturbed is None:
            for number in range(3, 6):
                at_least_s = measure.compare(steps[:number], order.to_beat)
                if at_least_s is not None:
                    steps, measuring_s = steps[:number], 0.6 * measuring_s
                    facts |= {"outcome": Outcome.PRUNED, "at_least_s": at_least_s, "reason": "slower"}
                    break
        median = float(np.median(steps))
        spent_s = FIXED_S + compiling_s + measuring_s
        phases = {"start": 0.2, "build": 0.6, "done": 0.2, "warmup": 0.4 * measuring_s, "measure": 0.6 * measuring_s}
        facts |= {"step_time_s": Interval(median=median, low=0.998 * median, high=1.002 * median, samples=len(steps))}
        tokens = 1024 / median
        facts["tokens_per_s"] = Interval(median=tokens, low=0.998 * tokens, high=1.002 * tokens, samples=len(steps))
        facts |= {"seconds_spent": spent_s, "phase_seconds": phases | {"compile": compiling_s}}
        facts |= {"peak_memory": PeakMemory(resident_bytes=peak_of(config), limit_bytes=LIMIT_BYTES)}
        if spent_s > order.deadline_s:
            fate = {"outcome": Outcome.TIMEOUT, "reason": "late", "budget_ended": order.deadline_of_budget} | fate
            facts["seconds_spent"] = order.deadline_s
        facts |= fate
        if facts["outcome"] not in (Outcome.OK, Outcome.PRUNED):
            facts |= {"step_time_s": None, "tokens_per_s": None, "window": None}
        return Trial(
            number=order.number,
            purpose=order.purpose,
            round=order.round,
            config=config,
            phase="done",
            items_per_step=1024,
            **facts,
        )

    def estimates(self) -> Any:
        """The cost model; it does not learn."""
        return Estimates(self.predicted or self.seconds, self.width, self.input_s)


def peak_of(config: TrainingConfig) -> int:
    """Grows with the micro-batch."""
    return (1 << 30) + config.micro_batch * (1 << 26)


class Estimates:
    """As much of an estimator as a search asks for."""

    def __init__(self, seconds: Callable[[TrainingConfig], float], width: float, input_s: float) -> None:
        self._seconds, self._width, self._parts = seconds, width, {"input": input_s}
        self.profile = SimpleNamespace(
            parameters=1e6, trainable=1e6, rough_variants=(), timing_s=1e9, seconds_spent=1.0
        )

    def table(self, configs: Sequence[TrainingConfig]) -> Any:
        times = np.array([self._seconds(config) for config in configs])
        peaks = np.array([float(peak_of(config)) for config in configs])
        return SimpleNamespace(
            step_time_s=times,
            step_time_low_s=times / self._width,
            step_time_high_s=times * self._width,
            peak_memory_bytes=peaks,
            peak_memory_low_bytes=peaks / 1.1,
            peak_memory_high_bytes=peaks * 1.1,
            memory=SimpleNamespace(activations=peaks / 2, gradients=peaks / 8, optimizer=peaks / 4),
        )

    outlook = table

    def estimate(self, configs: Sequence[TrainingConfig]) -> list[Prediction]:
        table = self.table(configs)
        columns = ("step_time_s", "step_time_low_s", "step_time_high_s", "peak_memory_bytes")
        columns += ("peak_memory_low_bytes", "peak_memory_high_bytes")  # type: ignore[assignment]
        rows = ({name: float(getattr(table, name)[i]) for name in columns} for i in range(len(configs)))
        return [Prediction(verdict="fits", bound="compute", time_parts_s=self._parts, **row) for row in rows]

    def observe(self, trial: Trial) -> None:
        pass


class ClockedStore(Store):
    """A store whose clock is moved on by what runs, and does not run by itself."""

    moved_s = 0.0

    @property
    def spent_s(self) -> float:
        return self._spent_before_s + self.moved_s

    def refresh(self) -> tuple[Trial, ...]:
        trials = super().refresh()
        self.moved_s = 0.0  # it is in what was spent before
        return trials


def context_of(world: World) -> Any:
    """What the setup found: all is traced, and the machine is probed."""
    values = {knob: tuple(dict.fromkeys(getattr(config, knob) for config in world.candidates)) for knob in KNOBS}
    estimator = world.estimates()
    return SimpleNamespace(
        spec=make_plan().workload.model_copy(update={"global_batch": GLOBAL_BATCH, "own_setting": world.own}),
        hardware=make_hardware(),
        device="cpu",
        nproc=max(config.world_size for config in world.candidates),
        probed=True,
        memory_limit_bytes=LIMIT_BYTES,
        host_limit_bytes=LIMIT_BYTES,
        facts=SimpleNamespace(num_blocks=2, step_s=None, training=None),
        space=SimpleNamespace(values=values, candidates=tuple(world.candidates)),
        candidates=tuple(world.candidates),
        left_out=(),
        estimator=estimator,
        profile=estimator.profile,
        rough=lambda config: False,
        variants=lambda *configs: (),
        anew=lambda: context_of(world),
    )


class Observer(SearchObserver):
    """Keeps what it is told; it kills the planner before a piece of work, where one is to be killed."""

    def __init__(self, *, die_before: int | None = None) -> None:
        self.works: list[Work] = []
        self.notes: list[str] = []
        self.phases: list[str] = []
        self.die_before = die_before

    def on_work(self, work: Work, best: Trial | None, budget: Any) -> None:
        if len(self.works) == self.die_before:
            raise Killed
        assert len(self.works) < MOST_WORKS, f"it does not end; the last: {self.works[-1].describe()}"
        self.works.append(work)

    def on_phase(self, name: str, detail: str = "") -> None:
        self.phases.append(name)

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def kinds(self) -> list[str]:
        return [work.kind for work in self.works]


@dataclass(kw_only=True)
class Searched:
    """A search that has ended.

    Attributes:
        result: As `run_search` gives it.
        session: Its state at the end.
        observer: What it was told.
    """

    result: SearchResult
    session: Session
    observer: Observer


class Searches:
    """Runs searches in one folder.

    Args:
        folder: Of the study.
        monkeypatch: For the runner, and the parity check.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def open(self, world: World, *, observer: Observer | None = None, **options: Any) -> SearchRun:
        """A run with an open store and session; the caller closes the store."""
        given = {"spec": make_plan().workload, "budget": 120.0, "device": "cpu"} | options
        settings = SearchOptions(**given)
        store = ClockedStore(self.folder, "0" * 16, summary={}, storage=settings.storage)
        budget_s = settings.budget_s or 120.0
        store.set_budget(budget_s)
        run = SearchRun(
            options=settings,
            observer=observer or Observer(),
            store=store,
            budget_s=budget_s,
        )
        self._plant(world, store)
        context = context_of(world)
        run.context = context
        run.session = search_run._open_session(run, context, SimpleNamespace(load=lambda modules: None))  # type: ignore[arg-type]
        run.session.apart = True  # a run of the world is one by itself
        return run

    def search(
        self, world: World, *, die_before: int | None = None, observer: Observer | None = None, **options: Any
    ) -> Searched:
        """From the plain run to the plan."""
        observer = observer or Observer(die_before=die_before)
        run = self.open(world, observer=observer, **options)
        session = run.session
        assert session is not None
        with run.store:
            if die_before is None and (before := answer.finished_before(run)) is not None:
                return Searched(result=before, session=session, observer=observer)
            result = search_run._to_its_end(run, lambda: search_run._find(run, session))
        return Searched(result=result, session=session, observer=observer)

    def _plant(self, world: World, store: ClockedStore) -> None:
        def make_runner(*given: Any, **more: Any) -> Any:
            def run(order: TrialOrder, **hooks: Any) -> Trial:
                trial = world.run(order)
                store.moved_s += trial.seconds_spent
                return trial

            return SimpleNamespace(run=run)

        def check(zygote: Any, spec: Any, config: TrainingConfig, *, deadline_s: float, **rest: Any) -> Parity:
            world.checked.append(config)
            world.rungs.append(parity_check.rung_of(rest["plain"]))
            world.check_times.append((deadline_s, rest["time_s"]))
            passed = world.passes(config)
            store.moved_s += deadline_s if passed is None else min(world.check_s, deadline_s)
            if passed is None or world.check_s > deadline_s:
                report: Any = SimpleNamespace(
                    describe=lambda: "the deadline passed", ended=Ended.CANCELLED, phase="", first_failure=None
                )
                raise TaskFailedError(report)
            return verdict(passed, world.failed)

        self.monkeypatch.setattr(search_run, "TrialRunner", make_runner)
        self.monkeypatch.setattr(parity_check, "check_parity", check)


def verdict(passed: bool, failed: str = "") -> Parity:
    """Of a parity check that came to its end; where it did not pass, the name of the comparison that failed."""
    return Parity(
        passed=passed,
        tolerance=1e-3,
        worst_gradient_difference=0.0,
        worst_update_difference=0.0,
        worst_group="",
        loss_difference=0.0,
        global_batch=8,
        sequence_length=None,
        changes_numerics=False,
        failures=() if passed else ("the gradients of blocks.0 differ by 40 %",),
        checks=() if passed or not failed else (ParityCheck(name=failed, difference=0.4, allowed=0.1),),
    )


@pytest.fixture
def searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Searches]:
    """Searches of one study."""
    yield Searches(tmp_path / "s", monkeypatch)
