"""Measures how long the processes of a trial take to start: `python -m benchmarks.process_startup` prints JSON.

- warm: a rank forked from a zygote that has imported torch and GPT-2's module;
- cold: a new interpreter with the same supervision, until it has imported the same modules.

`startup` is from `Zygote.run` to the first line of the target (warm) or to the end of its imports (cold). `overhead` is
the whole `run` of a target that does nothing.
"""

from __future__ import annotations

import json
import os
import statistics
from typing import Any

from autoplan.processes import RankContext, Task, Zygote

MODEL_MODULE = "transformers.models.gpt2.modeling_gpt2"
WARM_REPEATS = 30
COLD_REPEATS = 3


def do_nothing(context: RankContext) -> float:
    return context.seconds_since_request


def import_model(context: RankContext) -> float:
    import importlib

    importlib.import_module("torch")
    importlib.import_module(MODEL_MODULE)
    return context.seconds_since_request


def summarise(seconds: list[float]) -> dict[str, float]:
    return {"median_s": round(statistics.median(seconds), 4), "worst_s": round(max(seconds), 4)}


def measure_startup() -> dict[str, Any]:
    with Zygote(preload=("torch", MODEL_MODULE)) as zygote:
        results: dict[str, Any] = {"cpus": os.cpu_count(), "zygote_start_s": round(zygote.start_seconds, 2)}
        for ranks in (1, 4):
            reports = [zygote.run(Task(target=do_nothing, ranks=ranks)).check() for _ in range(WARM_REPEATS)]
            results[f"warm_{ranks}_ranks"] = {
                "startup": summarise([report.startup_s or 0.0 for report in reports]),
                "overhead": summarise([report.seconds for report in reports]),
            }
        cold = [zygote.run(Task(target=import_model, cold=True)).check() for _ in range(COLD_REPEATS)]
        results["cold_1_rank"] = {"startup": summarise([report.results[0] for report in cold])}
    return results


if __name__ == "__main__":
    print(json.dumps(measure_startup(), indent=2))
