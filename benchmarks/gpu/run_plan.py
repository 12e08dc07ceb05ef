"""Times whole optimizer steps of a plan, or of its plain fp32 baseline, through plan.prepare: as JSON.

python -m benchmarks.gpu.run_plan PLAN.json [--baseline] [--seconds 10]
"""

from __future__ import annotations

import argparse
import json
import time

import torch

import autoplan

WARM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--baseline", action="store_true", help="the plain fp32 run that the plan is compared with")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timed steps")
    given = parser.parse_args()
    began = time.perf_counter()
    plan = autoplan.load_plan(given.plan)
    if given.baseline:
        plan = plan.model_copy(update={"config": plan.baseline.config})
    run = plan.prepare()
    samples: list[float] = []
    batches = [run.workload.make_batch(run.local_batch, number) for number in range(2)]
    warm = 1 if given.baseline else WARM_STEPS  # nothing compiles, and a step of it takes seconds
    for number in range(warm):
        result = run.step(batches[number % 2])
    _wait(run.device)
    prepared_s = time.perf_counter() - began
    while len(samples) < 3 or sum(samples) < given.seconds:
        started = time.perf_counter()
        result = run.step(batches[len(samples) % 2])
        _wait(run.device)
        samples.append(time.perf_counter() - started)
    middle = sorted(samples)[len(samples) // 2]
    spec = plan.workload
    print(
        json.dumps(
            {
                "what": "baseline" if given.baseline else "plan",
                "config": plan.config.knobs_off_default(),
                "step_s": samples,
                "tokens_per_s": spec.global_batch * (spec.sequence_length or 1) / middle,
                "prepared_s": prepared_s,
                "peak_allocated_bytes": torch.cuda.max_memory_allocated() if run.device.type == "cuda" else None,
                "loss": float(result.loss),
            }
        )
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
