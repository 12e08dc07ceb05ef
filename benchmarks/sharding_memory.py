"""What a rank holds under DDP, FSDP2 and tensor parallelism: resident memory against what is expected.

    python -m benchmarks.sharding_memory

GPT-2 (124 M parameters), 64 tokens, one sequence per rank, fp32 with AdamW on CPU over gloo, after two steps and a
malloc_trim. Expected is what lasts between steps: 12 bytes per parameter that the rank holds (the parameter and Adam's
two moments; step() clears gradients), and 4 more under DDP, whose buckets keep the gradients' memory.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

from autoplan.processes import RankContext, Task, Zygote
from autoplan.strategies.config import TrainingConfig

RESULTS = Path(__file__).parent / "results" / "sharding_memory.json"
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2},
    "tp": {"tp": 2, "micro_batch": 2},
    "pp": {"pp": 2, "pp_microbatches": 2},
}


def measure(context: RankContext, config: TrainingConfig) -> dict[str, float]:
    """Resident bytes above those before the build: between steps, and at the peak."""
    import gc

    import psutil
    import torch

    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.sources import load_workload, make_spec

    torch.set_num_threads(1)
    context.init_process_group("gloo", 100.0)
    workload = load_workload(make_spec(model="gpt2", sequence_length=64, global_batch=2))
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = psutil.Process().memory_info().rss
    run = prepare(workload, config, device="cpu")
    batch = run.local_share(workload.make_batch(workload.global_batch, 0))
    for _ in range(2):
        run.step(batch)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    elements = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in run.model.parameters())
    return {"resident": psutil.Process().memory_info().rss - before, "elements": elements}


def main() -> None:
    rows = []
    with Zygote() as zygote:
        for name, knobs in WAYS.items():
            config = TrainingConfig(**({"micro_batch": 1} | knobs))
            report = zygote.run(
                Task(target=measure, args=(config,), ranks=2, deadlines_s={"*": 300.0}, env={"OMP_NUM_THREADS": "1"})
            )
            assert report.first_failure is None, report.first_failure
            rows.append({"way": name, "ranks": [rank.result for rank in report.ranks]})
    whole = rows[0]["ranks"][0]
    print(f"{'way':6} {'rank':>4} {'parameters':>12} {'resident':>12} {'expected':>12} {'of DDP':>7} {'expected':>9}")
    for row in rows:
        for number, rank in enumerate(row["ranks"]):
            expected = rank["elements"] * (16 if row["way"] == "ddp" else 12)
            print(
                f"{row['way']:6} {number:4} {rank['elements']:12,.0f} {rank['resident'] / 2**20:8.0f} MiB "
                f"{expected / 2**20:8.0f} MiB {rank['resident'] / whole['resident']:7.2f} "
                f"{expected / whole['elements'] / 16:9.2f}"
            )
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
