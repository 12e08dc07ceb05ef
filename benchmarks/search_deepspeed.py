"""DeepSpeed's autotuner as it stands, on a workload: `deepspeed --autotuning tune`, which starts this file again.

    python -m benchmarks.search_deepspeed --case vision --memory-limit 1.5GiB --out FILE

benchmarks/search_live.py starts it. It tunes ZeRO's stage and the micro-batch on one rank; the global batch is given as
its `max_train_batch_size`, which it keeps where the micro-batch divides it. Its own rules apply: a trial is a launch of
the whole script, a few steps are timed, and a trial with "error" in its stderr has failed. FILE gets a line of JSON:
the batch size of a step and of a micro-step, the seconds of the command, and how many settings were run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoplan.strategies.workloads.sources import load_workload
from autoplan.units import parse_memory_bytes
from benchmarks.search_cases import CASES, case_spec
from benchmarks.search_peers import WithLoss, limit_memory

RESULTS = "autotuning_results"
MOST_STEPS = 100
"""The tuner ends a trial by itself after a few optimizer steps."""


def tuner_config(global_batch: int) -> dict[str, Any]:
    """The settings that a user writes for the tuner: the tuner chooses everything else."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_allow_untested_optimizer": True,
        "autotuning": {
            "enabled": True,
            "max_train_batch_size": global_batch,
            "results_dir": RESULTS,
            "exps_dir": "autotuning_exps",
        },
    }


def train(case: str, memory_limit_bytes: int, config: str) -> None:
    """A trial: steps of the workload in DeepSpeed's engine, which ends the process when it has measured."""
    import deepspeed

    with tempfile.TemporaryDirectory(prefix="search-deepspeed-") as folder:
        workload = load_workload(case_spec(case, Path(folder)))
        model = WithLoss(workload)
        optimizer = workload.build_optimizer([p for p in model.parameters() if p.requires_grad])
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        limit_memory(memory_limit_bytes)
        samples = engine.train_micro_batch_size_per_gpu()
        for index in range(MOST_STEPS * engine.gradient_accumulation_steps()):
            loss = engine(**workload.make_batch(samples, index))["loss"]
            engine.backward(loss)
            engine.step()


def tune(case: str, memory_limit: str, folder: Path) -> dict[str, Any]:
    """Runs the tuner in a folder; returns what it chose.

    Raises:
        RuntimeError: it chose nothing; the text has its last lines.
    """
    workload = load_workload(case_spec(case, folder))
    (folder / "tuner.json").write_text(json.dumps(tuner_config(workload.global_batch)))
    bin_folder = Path(sys.executable).parent
    command = [bin_folder / "deepspeed", "--autotuning", "tune", "--num_gpus", "1"]
    command += [__file__, "--case", case, "--memory-limit", memory_limit]
    command += ["--deepspeed_config", folder / "tuner.json"]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{folder}:{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    # After each trial it ends what runs on other machines through pdsh; there are none.
    (folder / "pdsh").write_text("#!/bin/sh\n")
    (folder / "pdsh").chmod(0o755)
    began = time.monotonic()
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    optimal = folder / RESULTS / "ds_config_optimal.json"
    if not optimal.exists():
        last = "\n".join((ended.stdout + ended.stderr).splitlines()[-20:])
        raise RuntimeError(f"the tuner chose nothing, status {ended.returncode}:\n{last}")
    chosen = json.loads(optimal.read_text())
    tried = sorted(path.parent.name for path in (folder / RESULTS).glob("*/exp.json"))
    return {
        "batch_size": chosen["train_batch_size"],
        "micro_batch": chosen["train_micro_batch_size_per_gpu"],
        "seconds": round(seconds, 2),
        "tried": tried,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the tuner, or one of its trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--memory-limit", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--deepspeed_config", help="of a trial: given by the tuner")
    parser.add_argument("--local_rank", help="of a trial: given by the launcher")
    options = parser.parse_args(arguments)
    if options.deepspeed_config is not None:
        train(options.case, int(parse_memory_bytes(options.memory_limit)), options.deepspeed_config)
        return
    with tempfile.TemporaryDirectory(prefix="search-deepspeed-") as folder:
        found = tune(options.case, options.memory_limit, Path(folder))
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
