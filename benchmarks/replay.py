"""Replays a search over a recorded table: the live search's own state, decisions and pieces of work, with no training.

    for moment in replay(recorded, "autoplan", seed, budget_s=60.0):
        print(moment.seconds, moment.work.kind, moment.leader)

A replay is a `Session` whose runner answers from the table, and whose store is in memory with a clock that goes forward
by what each run took when it was recorded. `next_work` names the pieces and `work.do` does them, as in a live search:
looks, pairs side by side, the parity check, the rounds of the claim. A run draws one of the processes of its
configuration, and then its steps out of that process's steps. A look that the bound puts behind the leader ends early
(tables with each step's time). Rounds of one rank on a CPU run in slices of time, as live: a run of such a round has
the mean of its configuration's good processes, times a draw of the spread that a search assumes of runs in slices
(SLICED), so replays do not test that figure. It takes as long as two looks; a live round takes some 1 s less.

A configuration that compiles takes its time with an empty cache the first time that its graph is compiled in the
replay. The parity check takes what is predicted of it, and passes. Not in a replay: probes, traces, imports. The hand
setting is looked at where the table has it; a table that has no plain run is as one where it does not run.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np

from autoplan.planner.cost.traced.estimator import Estimator
from autoplan.planner.records.trials import ClaimRounds, Outcome, Parity, Trial, WorkLine
from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.claim import is_no_gain
from autoplan.planner.search.next_work import Work, next_work
from autoplan.planner.search.options import SamplerName, SearchObserver, SearchOptions
from autoplan.planner.search.references import hand_setting
from autoplan.planner.search.sampler import make_sampler
from autoplan.planner.search.session import BudgetOver, Session
from autoplan.planner.search.state import find_leader, read_state
from autoplan.planner.search.trial_cost import SLOW_MODE_SHARE, TrialCost, what_is_compiled
from autoplan.planner.search.work import do, drawn
from autoplan.planner.space.prune import keep_what_may_win
from autoplan.planner.store.optuna_study import choices_of
from autoplan.planner.trials.measure import (
    SLICED,
    ToBeat,
    compare,
    invert,
    median_interval,
    step_terms,
    sum_interval,
)
from autoplan.planner.trials.request import FEWEST_SAMPLES
from autoplan.planner.trials.runner import SLICES_BYTES, RoundOf, TrialOrder
from autoplan.processes import Ended
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec
from benchmarks.recorded import LIMIT_BYTES, Recorded

STEP = "step"
PASSED = Parity(
    passed=True, tolerance=1.0, worst_gradient_difference=0.0, worst_update_difference=0.0, worst_group="",
    loss_difference=0.0, global_batch=1, sequence_length=None, changes_numerics=False,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Where a replay stands after a piece of work.

    Attributes:
        seconds: Of the budget that are spent.
        work: The piece.
        leader: What would be handed over now; None: nothing has run.
        trials: Of it, in order.
    """

    seconds: float
    work: Work
    leader: TrainingConfig | None
    trials: Sequence[Trial]

    @property
    def looks(self) -> int:
        """How many runs were made that measure no configuration again."""
        return sum(not trial.is_repeat for trial in self.trials)


def replay(recorded: Recorded, sampler: SamplerName, number: int, *, budget_s: float) -> Iterator[Moment]:
    """One search over what was recorded, piece by piece.

    Args:
        recorded: The table.
        sampler: As `--sampler` takes it.
        number: Its seed.
        budget_s: Seconds that it may take.
    """
    session = open_session(recorded, sampler, number, budget_s)
    while True:  # as the loop of a live search (planner/search/run.py)
        work = drawn(session, next_work(read_state(session), session.left_s, session.context.nproc))
        if work.kind == "end":
            return
        if work.kind == "parity" and work.config is not None:
            with session.entry(work):
                cast(MemoryStore, session.store).spent_s += work.cost_s
                session.store.add_parity(work.config, PASSED)
        else:
            try:
                do(session, work)
            except BudgetOver:
                return
        yield Moment(
            seconds=session.store.spent_s, work=work, leader=plan_now(session), trials=tuple(session.store.trials)
        )


def plan_now(session: Session) -> TrainingConfig | None:
    """The plan that the search would hand over: the leader, or the plain run if the leader's claim shows no gain."""
    leader = find_leader(session)
    if leader is None:
        return None
    against = session.comparison(leader) if session.claim_is_over(leader.config) else None
    return session.plain_config if against is not None and is_no_gain(against) else leader.config


# What stands in the place of a store and of the device.


@dataclass(kw_only=True)
class MemoryStore:
    """The part of a store that a `Session` asks for, in memory; `spent_s` is the clock of the replay."""

    found: dict[type[Any], list[Any]] = field(default_factory=lambda: defaultdict(list))
    parities: dict[TrainingConfig, Parity] = field(default_factory=dict)
    spent_s: float = 0.0
    trials = property(lambda self: self.found[Trial])
    claims = property(lambda self: self.found[ClaimRounds])
    ledger = property(lambda self: tuple(self.found[WorkLine]))

    def take_number(self) -> int:
        """The number of the next trial."""
        return len(self.trials)

    def parity_of(self, config: TrainingConfig) -> Parity | None:
        """The verdict on a configuration, if there is one."""
        return self.parities.get(config)

    def add(self, record: Any) -> None:
        """Keeps a trial, a line of the ledger, or a claim that was begun."""
        self.found[type(record)].append(record)

    def add_parity(self, config: TrainingConfig, parity: Parity) -> None:
        """Keeps a verdict."""
        self.parities[config] = parity

    def tick(self, *, force: bool = False) -> None:
        """Nothing is on disk."""


class TableRunner:
    """Answers trials from a table, and puts the store's clock forward by what they took.

    Args:
        recorded: The table.
        store: Of the replay.
        seed: Of the draws.
        limit_bytes: A peak above it is out of memory.
    """

    def __init__(self, recorded: Recorded, store: MemoryStore, seed: int, limit_bytes: int) -> None:
        self._processes, self._device = recorded.processes, recorded.profile.device
        self._store, self._limit_bytes = store, limit_bytes
        self._global_batch = recorded.global_batch
        self._random = random.Random(seed)
        self._compiled: set[TrainingConfig] = set()
        self._cold: dict[TrainingConfig, Trial] = {}
        for trials in self._processes.values():
            for trial in trials:
                graph = what_is_compiled(trial.config)
                if trial.config.compile != "off" and compile_s(trial) >= compile_s(self._cold.get(graph)):
                    self._cold[graph] = trial

    def run(self, order: TrialOrder, **others: Any) -> Trial:
        """The trial that is ordered, as one of its recorded processes ended."""
        trials = self._processes[order.config]
        trial = answer(self._random.choice(trials), order.number, self._limit_bytes)
        trial = with_drawn_steps(self._with_compilation(trial, trials), self._random, self._global_batch)
        if order.to_beat is not None:
            trial = ended_early(trial, order.to_beat)
        late = trial.seconds_spent > order.deadline_s
        if late:
            over = {"outcome": Outcome.TIMEOUT, "step_time_s": None, "seconds_spent": order.deadline_s}
            trial = trial.model_copy(update=over | {"budget_ended": order.deadline_of_budget})
        self._store.spent_s += trial.seconds_spent
        return trial.model_copy(update={"purpose": order.purpose, "round": order.round})

    def may_slice(self, runs: Sequence[Trial]) -> bool:
        """As on a CPU whose memory holds them all."""
        together = sum(run.peak_memory_bytes or 0 for run in runs) + SLICES_BYTES
        alone = all(run.config.world_size == 1 for run in runs)
        return self._device == "cpu" and alone and together <= self._limit_bytes

    def run_round(self, orders: Sequence[TrialOrder], **others: Any) -> RoundOf:
        """The trials that are ordered, in slices: what changes the speed of the cores changes all of them alike."""
        trials = [self._sliced(order) for order in orders]
        spent_s, deadline_s = (sum(of) for of in ([t.seconds_spent for t in trials], [o.deadline_s for o in orders]))
        self._store.spent_s += min(spent_s, deadline_s)
        report: Any = SimpleNamespace(ended=Ended.DEADLINE if spent_s > deadline_s else Ended.FINISHED)
        return RoundOf(trials=tuple(trials) if spent_s <= deadline_s else (), report=report)

    def _sliced(self, order: TrialOrder) -> Trial:
        answers = [answer(one, order.number, self._limit_bytes) for one in self._processes[order.config]]
        good = [one for one in answers if one.outcome is Outcome.OK]  # it ran before, so there is one
        drawn = self._with_compilation(self._random.choice(good), good)
        trial = with_drawn_steps(drawn, self._random, self._global_batch)
        mean_s = math.exp(np.mean([math.log(_median_s(one)) for one in good]) + self._random.gauss(0.0, SLICED.sd))
        return trial.at_pace(mean_s / _median_s(trial)).model_copy(
            update={"purpose": order.purpose, "round": order.round, "pauses": 1}
        )

    def _with_compilation(self, trial: Trial, trials: Sequence[Trial]) -> Trial:
        """With the seconds of its compilation as the cache is in this replay, and the warning that says what it had."""
        if trial.config.compile == "off" or not compile_s(trial):
            return trial
        graph = what_is_compiled(trial.config)
        as_now = min(trials, key=compile_s) if graph in self._compiled else self._cold[graph]
        self._compiled.add(graph)
        phases = trial.phase_seconds | {"compile": compile_s(as_now)}
        spent_s = trial.seconds_spent - compile_s(trial) + compile_s(as_now)
        return trial.model_copy(update={"phase_seconds": phases, "seconds_spent": spent_s, "warnings": as_now.warnings})


def _median_s(trial: Trial) -> float:
    assert trial.step_time_s is not None, "what runs in a round ran before"
    return trial.step_time_s.median


def compile_s(trial: Trial | None) -> float:
    """Seconds that a trial compiled; 0 of none."""
    return 0.0 if trial is None else trial.phase_seconds.get("compile", 0.0)


def answer(trial: Trial, number: int, limit_bytes: int) -> Trial:
    """How a search would have seen the trial end: the recorded trial, or that its peak is above the limit."""
    peak = trial.peak_memory_bytes or 0
    if trial.outcome is not Outcome.OK or peak <= limit_bytes:
        return trial.model_copy(update={"number": number})
    capped = trial.peak_memory.model_copy(update={"resident_bytes": limit_bytes})
    over = {"outcome": Outcome.OUT_OF_MEMORY, "detail": "host", "step_time_s": None, "peak_memory": capped}
    return trial.model_copy(update=over | {"number": number})


def with_drawn_steps(trial: Trial, rng: random.Random, global_batch: int) -> Trial:
    """The trial with as many steps drawn out of its own; of a table without each step's time, as it was recorded."""
    if trial.step_time_s is None or not trial.samples_s:
        return trial
    drawn = {part: tuple(rng.choices(samples, k=len(samples))) for part, samples in trial.samples_s.items() if samples}
    if STEP in drawn:
        interval = median_interval(drawn[STEP])
    else:
        interval = sum_interval(step_terms(drawn, trial.config.accumulation(global_batch)))
    return trial.model_copy(
        update={
            "samples_s": drawn,
            "step_time_s": interval,
            "tokens_per_s": invert(interval, trial.items_per_step) if trial.items_per_step else trial.tokens_per_s,
        }
    )


def ended_early(trial: Trial, to_beat: ToBeat) -> Trial:
    """The look as it ends once its samples are behind the leader; one that has all its samples is not dropped."""
    if trial.step_time_s is None or not trial.samples_s:
        return trial
    part = max(trial.samples_s.values(), key=sum)
    middle = float(np.median(part))
    steps_s = [trial.step_time_s.median * seconds / middle for seconds in part]
    for count in range(FEWEST_SAMPLES, len(steps_s)):
        at_least_s = compare(steps_s[:count], to_beat)
        if at_least_s is not None:
            saved_s = trial.phase_seconds.get("measure", 0.0) * (1 - count / len(steps_s))
            update = {"outcome": Outcome.PRUNED, "step_time_s": None, "at_least_s": at_least_s}
            return trial.model_copy(update=update | {"seconds_spent": trial.seconds_spent - saved_s})
    return trial


# What a session is opened with.


class ReplaySession(Session):
    """A session whose plain run is measured, and its hand setting looked at, only where they were recorded."""

    @property
    def plain_is_known(self) -> bool:
        """A table without the plain run needs none."""
        return super().plain_is_known or not self.context.space.values["micro_batch"]

    def forget_void(self) -> None:
        """What a table holds is no stall of now."""

    @property
    def hand_config(self) -> TrainingConfig | None:
        """Any other counts as looked at."""
        return super().hand_config or (None if hand_setting(self) in self.model.legal else self.plain_config)


def open_session(recorded: Recorded, sampler: SamplerName, number: int, budget_s: float) -> Session:
    """A session at its start; a recorded peak above LIMIT_BYTES is answered as out of memory."""
    estimator = make_estimator(recorded, LIMIT_BYTES)
    candidates = kept(recorded, estimator, LIMIT_BYTES)
    profile = recorded.profile
    spec = WorkloadSpec(
        kind="model", reference=recorded.name, name=recorded.name, identity=recorded.name,
        sequence_length=profile.sequence_length, global_batch=recorded.global_batch,
    )  # fmt: skip
    options = SearchOptions(spec=spec, sampler=sampler, seed=number)
    cost = TrialCost(
        candidates, global_batch=recorded.global_batch, num_blocks=profile.num_blocks, device="cpu",
    )  # fmt: skip
    model = CandidateModel(
        candidates, estimator, cost, memory_limit_bytes=LIMIT_BYTES, device="cpu",
        slow_mode_limit_s=SLOW_MODE_SHARE * budget_s,
    )  # fmt: skip
    values = choices_of((*candidates, *recorded.plain))
    store = MemoryStore()
    known = {
        "spec": spec, "hardware": recorded.hardware, "device": "cpu", "nproc": 64, "probed": True, "profile": profile,
        "memory_limit_bytes": LIMIT_BYTES, "host_limit_bytes": LIMIT_BYTES, "estimator": estimator,
        "candidates": tuple(candidates), "facts": SimpleNamespace(training=None, step_s=None),
        "space": SimpleNamespace(values=values | {"micro_batch": [config.micro_batch for config in recorded.plain]}),
        "rough": lambda config: False, "variants": lambda *configs: (),
    }  # fmt: skip
    stands_in: dict[str, Any] = {
        "store": store,
        "zygote": None,
        "context": SimpleNamespace(**known),
        "runner": TableRunner(recorded, store, number, LIMIT_BYTES),
    }
    return ReplaySession(
        options=options,
        observer=SearchObserver(),
        budget_s=budget_s,
        model=model,
        sampler=None if sampler == "autoplan" else make_sampler(sampler, model, seed=number),
        **stands_in,
    )


def make_estimator(recorded: Recorded, limit_bytes: int = LIMIT_BYTES) -> Estimator:
    """The cost model before its first trial."""
    device: Literal["cuda", "cpu"] = "cuda" if recorded.profile.device == "cuda" else "cpu"
    return Estimator(
        recorded.profile,
        recorded.hardware,
        device=device,
        global_batch=recorded.global_batch,
        memory_limit_bytes=limit_bytes,
    )


def kept(recorded: Recorded, estimator: Estimator, limit_bytes: int) -> list[TrainingConfig]:
    """The candidates that a search keeps under this memory limit, before its first trial."""
    configs = recorded.candidates
    places, _ = keep_what_may_win(configs, estimator.table(configs), limit_bytes, recorded.profile.device)
    return [configs[place] for place in places]
