"""Measures how well the fitted curves of collectives predict sizes that were not fitted.

    python -m benchmarks.collectives_accuracy

Sizes between the fitted ones (twice and three times each) are measured in the same ranks, in turn with the fitted ones,
so that other load on the machine affects both. Reported per operation: the median and the largest relative error of the
curve (`estimate_collective_s`) and of the straight line alone. The target is 15 % at the median of the curve.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

from autoplan.probes.collectives import CPU_SIZES_BYTES, OPERATIONS, estimate_collective_s, make_reading
from autoplan.processes import RankContext, Task, Zygote

RESULTS = Path(__file__).parent / "results" / "collectives_accuracy.json"
BETWEEN = tuple(factor * size for size in CPU_SIZES_BYTES[:-1] for factor in (2, 3))
ROUNDS = 7


def measure(context: RankContext) -> dict[str, dict[int, float]]:
    """Seconds of every size by operation: the lower quartile over the rounds, because other load only adds time."""
    import torch
    import torch.distributed as dist

    from autoplan.probes.collectives import make_operation, time_collective

    torch.set_num_threads(1)
    context.init_process_group("gloo", 60.0)
    group, place = dist.group.WORLD, torch.device("cpu")
    found: dict[str, dict[int, float]] = {}
    for operation in OPERATIONS:
        times: dict[int, list[float]] = {}
        for _ in range(ROUNDS):
            for size in sorted((*CPU_SIZES_BYTES, *BETWEEN)):
                run = make_operation(operation, group, context.world_size, size, place)
                seconds, _ = time_collective(run, group, place)
                times.setdefault(size, []).append(seconds)
        found[operation] = {size: sorted(values)[ROUNDS // 4] for size, values in times.items()}
    return found


def main() -> None:
    with Zygote(preload=("torch",)) as zygote:
        report = zygote.run(Task(target=measure, ranks=2, deadlines_s={"*": 300.0}, env={"OMP_NUM_THREADS": "1"}))
    measured = report.ranks[0].result
    rows, all_curve = [], []
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; gloo, 2 ranks")
    print(f"{'operation':15} {'curve median':>12} {'curve worst':>12} {'line median':>12} {'line worst':>11}")
    for operation, times in measured.items():
        by_size = {int(size): seconds for size, seconds in times.items()}
        entry: dict[str, Any] = {"operation": operation, "backend": "gloo", "group_size": 2, "spread": 0.0}
        reading = make_reading(entry | {"samples": [(s, by_size[s]) for s in CPU_SIZES_BYTES]}, "cpu", ())
        latency, bandwidth = reading.latency_s.value or 0.0, reading.algbw_bytes_per_s.value or float("inf")
        curve = [abs(estimate_collective_s(reading, size) / by_size[size] - 1) for size in BETWEEN]
        line = [abs((latency + size / bandwidth) / by_size[size] - 1) for size in BETWEEN]
        all_curve += curve
        row = {"operation": operation, "curve_median": statistics.median(curve), "curve_worst": max(curve)}
        rows.append(row | {"line_median": statistics.median(line), "line_worst": max(line)})
        print(
            f"{operation:15} {statistics.median(curve):12.1%} {max(curve):12.1%} "
            f"{statistics.median(line):12.1%} {max(line):11.1%}"
        )
    print(f"all: {statistics.median(all_curve):.1%} at the median of {len(all_curve)} sizes that were not fitted")
    RESULTS.write_text(json.dumps({"load": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
