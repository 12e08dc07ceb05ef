"""What a rank holds under DDP, FSDP2, tensor and pipeline parallelism: resident memory against what is expected.

    python -m benchmarks.sharding_memory

GPT-2 (124 M parameters), 64 tokens, one sequence per rank, fp32 with AdamW on CPU over gloo, after two steps and a
malloc_trim. Expected is what lasts between steps: 12 bytes per parameter that the rank holds (the parameter and Adam's
two moments; step() clears gradients), and 4 more under DDP, whose buckets keep the gradients' memory.

Then what `gradient_sync` does to the peak of a step of four micro-steps under FSDP2: of 16 blocks of 3.2 M parameters
with little outside them and SGD, above what is resident between steps. Expected of gradients is 4 bytes per parameter
(last), or half of that and two whole blocks on their way (every); gathered units and activations come on top of both.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

from autoplan.processes import RankContext, Task, Zygote
from autoplan.strategies.config import TrainingConfig
from tests.strategies.parallel.test_parallel_gradient_sync import peak_of_a_step

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
    from autoplan.strategies.workloads.sources import load_workload, make_spec

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


def run(zygote: Zygote, target: Any, config: TrainingConfig) -> list[dict[str, float]]:
    """What each of two ranks found."""
    report = zygote.run(
        Task(target=target, args=(config,), ranks=2, deadlines_s={"*": 300.0}, env={"OMP_NUM_THREADS": "1"})
    )
    assert report.first_failure is None, report.first_failure
    return [rank.result for rank in report.ranks]


def main() -> None:
    rows, peaks = [], []
    with Zygote() as zygote:
        for name, knobs in WAYS.items():
            config = TrainingConfig(**({"micro_batch": 1} | knobs))
            rows.append({"way": name, "ranks": run(zygote, measure, config)})
        for sync in ("last", "every"):
            config = TrainingConfig.model_validate({"micro_batch": 1, "dp_shard": 2, "gradient_sync": sync})
            peaks.append({"gradient_sync": sync, "ranks": run(zygote, peak_of_a_step, config)})
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
    print(f"\n{'gradient_sync':13} {'rank':>4} {'parameters':>12} {'peak':>12} {'gradients':>12}")
    for row in peaks:
        for number, rank in enumerate(row["ranks"]):
            elements = rank["elements"]
            kept = elements if row["gradient_sync"] == "last" else elements / 2 + 2 * rank["in_block"]
            print(
                f"{row['gradient_sync']:13} {number:4} {elements:12,.0f} {rank['peak'] / 2**20:8.0f} MiB "
                f"{4 * kept / 2**20:8.0f} MiB"
            )
    RESULTS.write_text(json.dumps(rows + peaks, indent=1) + "\n")


if __name__ == "__main__":
    main()
