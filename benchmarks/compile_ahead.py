"""Compiled candidates measured in a time: each compiled in its own trial, or several side by side before.

    python -m benchmarks.compile_ahead

The replay (benchmarks/replay.py) has 10 minutes and candidates that take COLD_S to compile on CORES cores, WARM_S with
their kernels in the cache, and START_S to start a process. Step times are drawn around the predictions for the model of
a recorded table; the search does not have these predictions, so that all candidates stay hopeful. Several that are
compiled side by side take what Amdahl's law says with SERIAL_SHARE of a compilation in one thread. Both ways decide by
themselves (`next_work`); printed is how many compiled candidates have been measured, and how good the plan is.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoplan.planner.cost.traced.estimator import CostTable, Estimator
from autoplan.planner.records.trials import Compiled, CompiledAhead, Interval, Outcome, Trial
from autoplan.planner.search.compile_ahead import Choice, CompileAhead, Machine, Waiting, slowdown
from autoplan.planner.search.next_work import Option
from autoplan.planner.search.session import Session
from autoplan.planner.search.trial_cost import what_is_compiled
from autoplan.strategies.config import TrainingConfig
from benchmarks.recorded import Recorded, read_table
from benchmarks.replay import make_estimator, open_session, run_session
from benchmarks.search_tables import TABLES

WAYS = ("one by one", "side by side")

CORES, COLD_S, WARM_S, START_S, BUDGET_S = 16, 60.0, 8.0, 4.0, 600.0
"""Of the replay: a GPU and 16 cores. WARM_S is the share of COLD_S that was measured on a CPU (3.6 s of 27); START_S is
assumed."""

SERIAL_SHARE = 0.6
"""Assumed, as in a search: no GPU has shown it."""

COMPILED_FASTER, SCATTER = 1.5, 0.15
"""How many times as fast a compiled candidate is, and how steps scatter around their prediction (a standard deviation
of the logarithm), so that many candidates may be the best. Chosen."""

FLAT_FACTOR = 3.0
"""Half the width of a 90 % interval, as a factor, of what the search expects of each candidate. Chosen."""

TABLE, WANTED = "gpt-1", 15


class FlatEstimator(Estimator):
    """No cost model: every configuration is expected to be like the mean of the trials, within FLAT_FACTOR.

    All candidates stay hopeful so, and the time is what limits how many are looked at.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[float, float]] = []

    def observe(self, trial: Trial) -> None:
        """Keeps the logarithms of the time and the peak of what ran."""
        if trial.step_time_s is not None and trial.peak_memory_bytes:
            self.seen.append((math.log(trial.step_time_s.median), math.log(trial.peak_memory_bytes)))

    def table(self, configs: Sequence[TrainingConfig]) -> CostTable:
        """The same for each."""
        seconds, peak = np.exp(np.mean(self.seen or [(0.0, math.log(2**30))], axis=0))
        ones = np.ones(len(configs))
        return replace(
            super().table(configs),
            step_time_s=ones * seconds,
            step_time_low_s=ones * seconds / FLAT_FACTOR,
            step_time_high_s=ones * seconds * FLAT_FACTOR,
            peak_memory_bytes=ones * peak,
            peak_memory_low_bytes=ones * peak / FLAT_FACTOR,
            peak_memory_high_bytes=ones * peak * FLAT_FACTOR,
        )


class ReplayedAhead(CompileAhead):
    """Compiles ahead in a replay: the clock goes forward by what the processes side by side would take."""

    def _machine(self) -> Machine:
        return replace(super()._machine(), cores=CORES, serial_share=SERIAL_SHARE, host_limit_bytes=2.0**37)

    def _run(self, waiting: Sequence[Waiting], choice: Choice) -> None:
        session = self.session
        self._tried.update(one.config for one in waiting)
        seconds = START_S + COLD_S * slowdown(len(waiting), CORES, SERIAL_SHARE)
        session.store.spent_s += seconds  # type: ignore[misc]
        for one in waiting:
            session.runner.compiled.add(what_is_compiled(one.config))  # type: ignore[attr-defined]
            session.model.observe_ahead(one.config, COLD_S)
        group = tuple(Compiled(config=one.config, compile_s=COLD_S) for one in waiting)
        expected = {"expected_s": choice.seconds, "expected_saving_s": choice.saving_s}
        session.store.add_compiled_ahead(CompiledAhead(compiled=group, seconds=seconds, **expected))


class NoneAhead(CompileAhead):
    """Each is compiled in its own trial."""

    def option(self) -> Option | None:
        return None


def gpu_table(recorded: Recorded, seed: int) -> Recorded:
    """A table of bf16 candidates with a GPU's times: eager ones, and compiled ones around them.

    A step takes what is predicted of it, of compiled ones faster by COMPILED_FASTER, times a factor that is drawn.
    """
    rng = random.Random(seed)
    like = next(trial for trial in recorded.rounds[0] if trial.step_time_s is not None)
    knobs = {name: sorted({getattr(c, name) for c in recorded.candidates}) for name in ("attention", "loss")}
    bf16 = [TrainingConfig.model_validate({"precision": "bf16", "micro_batch": size}) for size in (2, 4, 8, 16)]
    varied = [dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values())]
    eager = recorded.plain + [config.model_copy(update=one) for config in bf16 for one in varied]
    configs = [config.model_copy(update={"compile": scope}) for config in eager for scope in ("off", "block", "model")]
    estimator = make_estimator(recorded)
    rounds: tuple[list[Trial], list[Trial]] = ([], [])
    for config, seconds in zip(configs, estimator.table(configs).step_time_s, strict=True):
        factor = rng.lognormvariate(0.0, SCATTER) / (1.0 if config.compile == "off" else COMPILED_FASTER)
        for trials, compiling_s in zip(rounds, (COLD_S, WARM_S), strict=True):
            step_s = float(seconds) * factor * rng.lognormvariate(0.0, 0.01)
            trials.append(gpu_trial(like, config, step_s, 0.0 if config.compile == "off" else compiling_s))
    return replace(recorded, rounds=rounds, planned=len(configs))


def gpu_trial(like: Trial, config: TrainingConfig, step_s: float, compiling_s: float) -> Trial:
    """A look at a configuration with a GPU's times."""
    phases = {"start": START_S, "warmup": step_s, "measure": max(0.8, 5 * step_s)}
    said = ()
    if compiling_s:
        phases["compile"] = compiling_s
        hits, misses = (9, 0) if compiling_s == WARM_S else (0, 9)
        said = (f"compile cache: {hits} hit(s), {misses} miss(es)",)
    step = Interval(median=step_s, low=0.99 * step_s, high=1.01 * step_s, samples=5)
    update = {"config": config, "step_time_s": step, "phase_seconds": phases, "seconds_spent": sum(phases.values())}
    return like.model_copy(update=update | {"warnings": said, "window": None})


def replayed(recorded: Recorded, seed: int, kind: type[CompileAhead]) -> tuple[int, float]:
    """How many compiled candidates one search has measured, and the speed of its plan, of the best there is."""
    table = gpu_table(recorded, seed)
    flat = make_estimator(table, kind=FlatEstimator)
    session: Session = open_session(table, "autoplan", seed, BUDGET_S, estimator=flat)
    *_, last = run_session(session, kind(session))
    truth = dict(zip(table.candidates, table.seconds.tolist(), strict=True))
    ran = {t.config for t in last.trials if t.config.compile != "off" and t.outcome in (Outcome.OK, Outcome.PRUNED)}
    return len(ran), min(truth.values()) / truth[last.leader] if last.leader else 0.0


def show_replays(seeds: int) -> str:
    """Both ways over some seeds: medians, and the range of the compiled candidates."""
    recorded = read_table(TABLES / TABLE)
    rows = [
        "| way | compiled candidates in 10 m | lowest to highest | plan, of the best | aim |",
        "|---|---|---|---|---|",
    ]
    for way, kind in zip(WAYS, (NoneAhead, ReplayedAhead), strict=True):
        found = [replayed(recorded, seed, kind) for seed in range(seeds)]
        counts = [count for count, _ in found]
        middle = statistics.median(counts)
        word = "" if kind is NoneAhead else f"{WANTED}: {'met' if middle >= WANTED else 'NOT met'}"
        share = statistics.median(share for _, share in found)
        rows.append(f"| {way} | {middle:g} | {min(counts)} to {max(counts)} | {share:.1%} | {word} |")
    return "\n".join(rows)


def main() -> None:
    """Replays."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=9)
    print(show_replays(parser.parse_args().seeds))


if __name__ == "__main__":
    main()
