"""Whether a compiled configuration runs as fast in a later trial as in its first one, and what makes runs differ.

    python -m benchmarks.compiled_runs --rounds 6 --minutes 8

A vision transformer once ran at 362 samples/s in its trial and at 303 as a finalist minutes later. In each round every
case runs once, in a fresh process, in an order that is drawn: compiled with an empty cache (as a first trial is),
compiled from the cache (as a finalist is), both with the C library's allocator as it is and with one that keeps its
memory, and the same uncompiled. Printed are each case's median rate with its spread between runs, and the ratios of
pairs within the rounds. The runs are added to benchmarks/results/compiled_runs.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from autoplan.planner.search.preload import PRELOAD
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec

FILE = Path(__file__).parent / "data" / "vision.py"
RESULTS = Path(__file__).parent / "results" / "compiled_runs.jsonl"

EAGER = TrainingConfig(micro_batch=32)
COMPILED = EAGER.model_copy(update={"compile": "model"})
CASES = {
    "eager": ("warm", EAGER),
    "compiled, empty cache": ("cold", COMPILED),
    "compiled, from the cache": ("warm", COMPILED),
    "compiled, empty cache, keep": ("cold", COMPILED.model_copy(update={"allocator": "keep"})),
    "compiled, from the cache, keep": ("warm", COMPILED.model_copy(update={"allocator": "keep"})),
}
PAIRS = (
    ("compiled, empty cache", "compiled, from the cache"),
    ("compiled, empty cache, keep", "compiled, from the cache, keep"),
    ("compiled, from the cache, keep", "compiled, from the cache"),
    ("compiled, from the cache", "eager"),
)


def run_rounds(rounds: int, minutes: float) -> list[dict[str, Any]]:
    """One line for each run: round, case, samples/s, and what others took of the cores."""
    ends_at = time.monotonic() + 60 * minutes
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="compiled-runs-") as folder:
        os.environ["EMPTY_CACHES"] = folder
        with Zygote(preload=(*PRELOAD, "transformers")) as zygote:
            makers = {
                name: TrialRunner(
                    zygote,
                    make_spec(model=f"{FILE}:{name}"),
                    device="cpu",
                    memory_limit_bytes=6 << 30,
                    host_limit_bytes=6 << 30,
                    directory=Path(folder, name),
                )
                for name in ("warm", "cold")
            }
            number = 0
            for round_number in range(-1, rounds):  # -1 fills the cache
                order = list(CASES)
                random.Random(round_number).shuffle(order)
                for case in order:
                    if time.monotonic() > ends_at:
                        return lines
                    name, config = CASES[case]
                    trial = makers[name].run(
                        TrialOrder(
                            number=number, purpose="search", config=config, prediction=None,
                            deadline_s=180.0, method="whole_steps", round=None,
                        )
                    )  # fmt: skip
                    number += 1
                    assert trial.step_time_s is not None, trial.reason
                    line = {
                        "round": round_number,
                        "case": case,
                        "samples_per_s": 32 / trial.step_time_s.median,
                        "seconds": trial.seconds_spent,
                        "window": trial.window.model_dump() if trial.window is not None else None,
                    }
                    print(f"round {round_number} {case}: {line['samples_per_s']:.1f} samples/s", flush=True)
                    if round_number >= 0:
                        lines.append(line)
    return lines


def summary(lines: list[dict[str, Any]]) -> str:
    """Medians and spreads of the cases, and the ratios of the pairs."""
    rates: dict[str, dict[int, float]] = {}
    for line in lines:
        rates.setdefault(line["case"], {})[line["round"]] = line["samples_per_s"]
    texts = ["| case | median samples/s | spread between runs (sd of the logarithm) | runs |", "|---|---|---|---|"]
    for case, found in rates.items():
        logs = [math.log(rate) for rate in found.values()]
        spread = f"{statistics.stdev(logs):.1%}" if len(logs) > 1 else "unknown"
        texts.append(f"| {case} | {statistics.median(found.values()):.1f} | {spread} | {len(logs)} |")
    texts += ["", "| pair | median ratio | lowest to highest |", "|---|---|---|"]
    for one, other in PAIRS:
        ratios = [rates[one][n] / rates[other][n] for n in rates.get(one, {}) if n in rates.get(other, {})]
        if ratios:
            median = statistics.median(ratios)
            texts.append(f"| {one} over {other} | {median:.3f} | {min(ratios):.3f} to {max(ratios):.3f} |")
    return "\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=8.0)
    options = parser.parse_args()
    lines = run_rounds(options.rounds, options.minutes)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    print(summary(lines))


if __name__ == "__main__":
    main()
