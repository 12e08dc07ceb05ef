"""Compiled candidates measured per minute: each compiled in its own trial, or several side by side before.

    python -m benchmarks.compile_ahead --rounds 3 --number 4

The candidates are a GPT-2 of four layers (width 256, 128 tokens) at different micro-batches. In each round both ways
run once, in an order that is drawn, each with an empty compile cache and a zygote that has started. Printed are
candidates per minute with medians and spread, what the trials found in the cache, and what 16 cores would do, by
arithmetic from the CPU time of the compilations (Amdahl's law, `planner/search/compile_choice.py`). The rounds are
added to benchmarks/results/compile_ahead.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from autoplan.planner.search.compile_choice import compile_share, slowdown

from autoplan.planner.search.compile_ahead import compile_task
from autoplan.planner.search.preload import preload_for
from autoplan.planner.search.trial_cost import was_warm
from autoplan.planner.trials.request import CompileAnswer, CompileRequest
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec

RESULTS = Path(__file__).parent / "results" / "compile_ahead.jsonl"
MODEL = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 4, "n_embd": 256, "n_head": 4,
    "n_positions": 128, "vocab_size": 2048,
}  # fmt: skip
LIMIT_BYTES = 6 << 30
WAYS = ("one by one", "side by side")
ARITHMETIC_CORES, ARITHMETIC_MOST, BUDGET_S = 16, 8, 600.0


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
    """Candidates per minute of both ways, and the arithmetic for more cores."""
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
    return "\n".join([*texts, arithmetic(lines)])


def arithmetic(lines: list[dict[str, Any]]) -> str:
    """What 16 cores would do in 10 minutes, from what was measured here; no measurement."""
    beside = [line for line in lines if line["way"] == WAYS[1]]
    cpu = [pair for line in beside for pair in line["cpu_s"]]
    one_core_s = statistics.median(own + children for own, children in cpu)
    serial = statistics.median(own / (own + children) for own, children in cpu)
    alone_s = one_core_s * compile_share(ARITHMETIC_CORES, serial)
    # other work makes all of it longer here: by what the cold ones in their own trials took over their CPU time
    cold_s = statistics.median(s for line in lines if line["way"] == WAYS[0] for s in line["compile_s"])
    busy = cold_s / (one_core_s * compile_share(beside[0]["cores"], serial))
    warm_s = statistics.median(s for line in beside for s in line["compile_s"]) / busy
    rest_s = statistics.median(
        total - compiling
        for line in beside
        for total, compiling in zip(line["trial_s"], line["compile_s"], strict=True)
    )
    together_s = alone_s * slowdown(ARITHMETIC_MOST, ARITHMETIC_CORES, serial)
    before = BUDGET_S / (rest_s + alone_s)
    after = BUDGET_S / (rest_s + warm_s + together_s / ARITHMETIC_MOST)
    return (
        f"A compilation took {one_core_s:.1f} s of CPU time, {serial:.0%} of it in one thread; other work made "
        f"compilations {busy:.1f} times as long here. By arithmetic, not measured: alone on {ARITHMETIC_CORES} cores "
        f"{alone_s:.1f} s, {ARITHMETIC_MOST} side by side {together_s:.1f} s. With trials of {rest_s:.1f} s and "
        f"{warm_s:.1f} s of compiling from the cache, 10 minutes would have {before:.0f} candidates one by one and "
        f"{after:.0f} side by side."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--number", type=int, default=4, help="candidates, all compiled at once in the second way")
    parser.add_argument("--compile", choices=("block", "model"), default="block")
    options = parser.parse_args()
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
