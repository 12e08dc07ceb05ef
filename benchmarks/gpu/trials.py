"""Trials of given configurations, one after another, each a line of a JSONL file; a line that is there is not repeated.

    python -m benchmarks.gpu.trials --task TASK.json --out TRIALS.jsonl --seconds 500

TASK.json: {"model": ..., "sequence_length": ..., "global_batch": ..., "device": "cuda",
"deadline_s": 150.0, "predict": true, "configs": [{"micro_batch": 8, ...}, ...]}. With `predict` the model is traced,
each line has the cost model's prediction beside the trial, and the probed machine and the traced model are kept in
files beside it (hardware.json, TRIALS.profile.json), so that predictions can be made again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autoplan.errors import ConfigError
from autoplan.planner.records.trials import Prediction
from autoplan.planner.search.inspection import Means
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.preload import PRELOAD
from autoplan.planner.search.setup import SearchContext, limits, prepare_search
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.probes.gpu import read_gpus
from autoplan.probes.run import read_host_profile
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques.rules import incompatible
from autoplan.strategies.workloads.sources import make_spec

MARGIN_S = 5.0


def legal(configs: list[dict[str, Any]], global_batch: int) -> list[TrainingConfig]:
    """The configurations that any run may have, each once."""
    found: list[TrainingConfig] = []
    for knobs in configs:
        config = TrainingConfig.model_validate(knobs)
        try:
            config.accumulation(global_batch)
        except ConfigError:
            continue
        if incompatible(config, global_batch) is None and config not in found:
            found.append(config)
    return found


def run_trials(task: dict[str, Any], out: Path, seconds: float) -> None:
    """Runs what is not in the file yet, as long as the time goes; a compiled one is begun with half a minute left."""
    ends = time.monotonic() + seconds
    spec = make_spec(
        model=task["model"], sequence_length=task.get("sequence_length"), global_batch=task.get("global_batch")
    )
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {TrainingConfig.model_validate(row["trial"]["config"]) for row in known}
    todo = [config for config in legal(task["configs"], spec.global_batch) if config not in done]
    if not todo:
        return
    with tempfile.TemporaryDirectory() as scratch, Zygote(preload=PRELOAD) as zygote:
        device, context = task["device"], None
        if task.get("predict"):
            options = SearchOptions(spec=spec, device=device, budget=300.0)
            saved = out.with_name("hardware.json")
            means = Means(options=options, zygote=zygote, observer=SearchObserver(), saved=saved, budget_s=300.0)
            context = prepare_search(means)
            spec = context.spec
            profile = context.estimator.profile.model_dump_json(exclude_defaults=True)
            out.with_name(out.name.removesuffix(".jsonl") + ".profile.json").write_text(profile)
        hardware = read_host_profile()
        limit, host_limit = limits(hardware, device, None, measured=None if context is None else context.hardware)
        runner = TrialRunner(
            zygote,
            spec,
            device=device,
            memory_limit_bytes=limit,
            host_limit_bytes=host_limit,
            directory=Path(scratch),
        )
        for number, config in enumerate(todo, start=len(done)):
            left_s = ends - time.monotonic() - MARGIN_S
            if left_s < (30.0 if config.compile != "off" else 10.0):
                print(f"no time left for {len(todo) + len(done) - number} configuration(s)", file=sys.stderr)
                return
            order = TrialOrder(
                number=number,
                purpose="search",
                config=config,
                prediction=_predict(context, config),
                deadline_s=min(left_s, task.get("deadline_s", 150.0)),
            )
            trial = runner.run(order)
            row = {
                "trial": trial.model_dump(mode="json", exclude_defaults=True),
                "prediction": None if order.prediction is None else order.prediction.model_dump(mode="json"),
                "left_behind": left_behind() if device == "cuda" else None,
            }
            with open(out, "a") as file:
                file.write(json.dumps(row) + "\n")
            text = f"{trial.outcome.value} in {trial.seconds_spent:.1f} s {trial.phase_seconds}"
            print(f"{number:3d} {config.describe()}: {text}", file=sys.stderr, flush=True)


def _predict(context: SearchContext | None, config: TrainingConfig) -> Prediction | None:
    return None if context is None else context.estimator.estimate([config])[0]


def left_behind() -> dict[str, Any]:
    """The state in which a trial has left the GPUs, from the driver: free memory and processes."""
    found = read_gpus()
    return {
        f"cuda:{gpu.index}": {"free_bytes": gpu.memory_available_bytes.value, "processes": list(gpu.other_processes)}
        for gpu in found.devices
    } | {"notes": list(found.notes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500.0)
    given = parser.parse_args()
    run_trials(json.loads(given.task.read_text()), given.out, given.seconds)


if __name__ == "__main__":
    main()
