"""What watching a training costs: the time of watch.step(batch), and of the end of a window.

    python -m benchmarks.watch_overhead

The batch is one of 8 sequences of 1,024 tokens with a padding mask, on the CPU.
"""

from __future__ import annotations

import statistics
import time

import torch

import autoplan
from autoplan.strategies.workloads.spec import Counted
from tests.recorded import make_plan

STEPS, WINDOWS = 20_000, 20


def main() -> None:
    """Prints microseconds of a step, milliseconds of a window's end, and the share of a window of 30 s."""
    plan = make_plan()
    counted = Counted(unit="tokens", by="fields", fields=("input_ids",), without_padding=("input_ids",))
    plan = plan.model_copy(update={"workload": plan.workload.model_copy(update={"counted": counted})})
    batch = {name: torch.ones(8, 1024, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    figures = {}
    for name, given in (
        ("a step with its items given", {"items": 8192.0}),
        ("a step with its batch", {"batch": batch}),
    ):
        with autoplan.watch(plan, window_s=1e9) as watch:
            began = time.perf_counter()
            for _ in range(STEPS):
                watch.step(**given)
            figures[name] = (time.perf_counter() - began) / STEPS
    ends = []
    with autoplan.watch(plan, window_s=1e-9) as watch:
        for _ in range(WINDOWS * 5):
            before = watch.figures
            began = time.perf_counter()
            watch.step(items=1e12)
            if watch.figures is not before:
                ends.append(time.perf_counter() - began)
    for name, seconds in figures.items():
        print(f"{name}: {seconds * 1e6:.1f} us")
    end_s = statistics.median(ends)
    print(f"the end of a window: {end_s * 1e3:.1f} ms, {end_s / 30:.4%} of 30 s")


if __name__ == "__main__":
    main()
