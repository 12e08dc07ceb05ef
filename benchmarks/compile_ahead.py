"""Compiled candidates measured in a time: each compiled in its own trial, or several side by side before.

    python -m benchmarks.compile_ahead                                    # a replay with a GPU's compile times
    python -m benchmarks.compile_ahead --live --rounds 3 --number 4       # for real, on this machine

The replay (benchmarks/replay.py) has 10 minutes and candidates that take COLD_S to compile on CORES cores, WARM_S with
their kernels in the cache, and START_S to start a process. Step times are drawn around the predictions for the model of
a recorded table; the search does not have these predictions, so that all candidates stay hopeful. Several that are
compiled side by side take what Amdahl's law says with SERIAL_SHARE of a compilation in one thread. Both ways decide by
themselves (`next_work`); printed is how many compiled candidates have been measured, and how good the plan is.

Live, the candidates are a GPT-2 of four layers (width 256, 128 tokens) at different micro-batches. In each round both
ways run once, in an order that is drawn, each with an empty compile cache and a zygote that has started. The rounds are
added to benchmarks/results/compile_ahead.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoplan.planner.records.trials import Compiled, CompiledAhead, Interval, Outcome, Trial
from autoplan.planner.search.compile_ahead import Choice, CompileAhead, Machine, Waiting, compile_task, slowdown
from autoplan.planner.search.next_work import Option
from autoplan.planner.search.preload import preload_for
from autoplan.planner.search.session import Session
from autoplan.planner.search.trial_cost import was_warm, what_is_compiled
from autoplan.planner.trials.request import CompileAnswer, CompileRequest
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec
from benchmarks.replay import SearchMethod, make_estimator, open_session, run_session
from benchmarks.search_tables import TABLES
from benchmarks.trials_saved_record import LIMIT_BYTES as TABLE_LIMIT_BYTES
from benchmarks.trials_saved_record import Recorded, read_table

RESULTS = Path(__file__).parent / "results" / "compile_ahead.jsonl"
MODEL = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 4, "n_embd": 256, "n_head": 4,
    "n_positions": 128, "vocab_size": 2048,
}  # fmt: skip
LIMIT_BYTES = 6 << 30
WAYS = ("one by one", "side by side")

CORES, COLD_S, WARM_S, START_S, BUDGET_S = 16, 60.0, 8.0, 4.0, 600.0
"""Of the replay: a GPU and 16 cores. WARM_S is the share of COLD_S that was measured on a CPU (3.6 s of 27); START_S is
assumed."""

SERIAL_SHARE = 0.6
"""Assumed, as in a search: no GPU has shown it."""

COMPILED_FASTER, SCATTER = 1.5, 0.15
"""How many times as fast a compiled candidate is, and how steps scatter around their prediction (a standard deviation
of the logarithm), so that many candidates may be the best. Chosen."""

METHOD = SearchMethod(name="ours, no cost model", sampler="autoplan", model="none", drops=False)
"""Without a cost model all candidates stay hopeful, so that the time is what limits how many are looked at."""

TABLE, WANTED = "gpt-1", 15


def run_way(way: str, spec: WorkloadSpec, configs: list[TrainingConfig], folder: Path) -> dict[str, Any]:
    """Measures all candidates once, with an empty cache; seconds, and what the compilations took."""
    with Zygote(preload=preload_for(spec), env={"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}) as zygote:
        runner = TrialRunner(
            zygote, spec, device="cpu", memory_limit_bytes=LIMIT_BYTES, host_limit_bytes=LIMIT_BYTES, directory=folder
        )
        answers: list[CompileAnswer] = []
        began = time.monotonic()
        if way == "side by side":
            requests = tuple(CompileRequest(spec=spec, config=config, device="cpu") for config in configs)
            task = compile_task(requests, directory=folder / "ahead", deadline_s=900.0, memory_limit_bytes=LIMIT_BYTES)
            answers = [CompileAnswer.model_validate(result) for result in zygote.run(task).check().results]
        ahead_s = time.monotonic() - began
        trials = [
            runner.run(TrialOrder(number=number, purpose="search", config=config, prediction=None, deadline_s=600.0))
            for number, config in enumerate(configs)
        ]
        seconds = time.monotonic() - began
    assert all(trial.step_time_s is not None for trial in trials), [trial.reason for trial in trials]
    return {
        "seconds": seconds,
        "ahead_s": ahead_s,
        "per_minute": 60 * len(configs) / seconds,
        "compile_s": [trial.phase_seconds["compile"] for trial in trials],
        "trial_s": [trial.seconds_spent for trial in trials],
        "warm": [was_warm(trial) for trial in trials],
        "cpu_s": [(answer.own_cpu_s, answer.children_cpu_s) for answer in answers],
    }


def summary(lines: list[dict[str, Any]]) -> str:
    """Candidates per minute of both ways."""
    texts = [
        "| way | candidates per minute, median | lowest to highest | compile phase of a trial, median s | rounds |",
        "|---|---|---|---|---|",
    ]
    for way in WAYS:
        found = [line for line in lines if line["way"] == way]
        rates = [line["per_minute"] for line in found]
        compiling = statistics.median(s for line in found for s in line["compile_s"])
        texts.append(
            f"| {way} | {statistics.median(rates):.2f} | {min(rates):.2f} to {max(rates):.2f} | {compiling:.1f} "
            f"| {len(rates)} |"
        )
    pairs = {n: {x["way"]: x["per_minute"] for x in lines if x["round"] == n} for n in {x["round"] for x in lines}}
    ratios = [pair[WAYS[1]] / pair[WAYS[0]] for pair in pairs.values() if len(pair) == 2]
    texts.append(
        f"side by side over one by one: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    beside = [line for line in lines if line["way"] == WAYS[1]]
    warm = [hit for line in beside for hit in line["warm"]]
    texts.append(f"from the cache, after compiling ahead: {sum(warm)} of {len(warm)} trials")
    return "\n".join(texts)


# The replay.


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
    estimator = make_estimator(recorded, "search", TABLE_LIMIT_BYTES)
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
    session: Session = open_session(table, METHOD, seed, BUDGET_S)
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
    """Replays, or runs the rounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--live", action="store_true", help="compile for real")
    parser.add_argument("--seeds", type=int, default=9, help="of the replay")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--number", type=int, default=4, help="candidates, all compiled at once in the second way")
    parser.add_argument("--compile", choices=("block", "model"), default="block")
    options = parser.parse_args()
    if not options.live:
        print(show_replays(options.seeds))
        return
    configs = [
        TrainingConfig.model_validate({"micro_batch": 2**power, "compile": options.compile})
        for power in range(options.number)
    ]
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="compile-ahead-") as folder:
        model = Path(folder, "config.json")
        model.write_text(json.dumps(MODEL))
        spec = make_spec(model=str(model), sequence_length=128, global_batch=2**options.number)
        for number in range(options.rounds):
            order = list(WAYS)
            random.Random(number).shuffle(order)
            for way in order:
                place = Path(folder, f"{number}-{way.replace(' ', '-')}")
                found = run_way(way, spec, configs, place)
                lines.append({"round": number, "way": way, "cores": len(os.sched_getaffinity(0))} | found)
                print(f"round {number} {way}: {found['per_minute']:.2f} a minute, {found['seconds']:.0f} s", flush=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    print(summary(lines))


if __name__ == "__main__":
    main()
