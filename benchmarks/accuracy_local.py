"""The cost model's memory against real runs on this machine, many configurations of four families.

    python -m benchmarks.accuracy_local [--quick] [--out results.json]

Each configuration is built by prepare() in a rank of its own and runs two optimizer steps. Live bytes are the
profiler's own record of every allocation; resident bytes are the kernel's. Four families: a GPT-2, a Llama, an image
model of convolutions, an encoder-decoder, all small, so that forty runs take minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.planner.cost.traced.estimator import Estimator
from autoplan.planner.trace.model_profile import ModelProfile
from autoplan.planner.trace.trace import trace_profile
from autoplan.probes.profile import HardwareProfile
from autoplan.probes.run import run_probes
from autoplan.processes import RankContext, Task, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec

GLOBAL_BATCH = 16
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 6,
        "n_embd": 256,
        "n_head": 4,
        "vocab_size": 8192,
        "n_positions": 256,
    },
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 5,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 6000,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    "encoder_decoder": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "num_layers": 4,
        "num_decoder_layers": 4,
        "d_model": 256,
        "d_ff": 1024,
        "d_kv": 64,
        "num_heads": 4,
        "vocab_size": 8000,
        "decoder_start_token_id": 0,
    },
}
IMAGE_MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from autoplan.strategies.workloads.workload import LossSum, Workload


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(8, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.second(F.relu(self.norm(self.first(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, stride=4)
        self.blocks = nn.Sequential(*[Block(64) for _ in range(6)])
        self.head = nn.Linear(64, 100)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def make_batch(count, index):
    generator = torch.Generator().manual_seed(index)
    return {
        "images": torch.randn(count, 3, 96, 96, generator=generator),
        "labels": torch.randint(0, 100, (count,), generator=generator),
    }


def loss(model, batch):
    logits = model(batch["images"])
    return LossSum(F.cross_entropy(logits, batch["labels"], reduction="sum"), batch["labels"].numel())


def workload():
    return Workload(
        name="classifier",
        build_model=Classifier,
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=16,
    )
"""


def measure_memory(
    context: RankContext, spec: WorkloadSpec, config: TrainingConfig, *, profiled: bool
) -> dict[str, float]:
    """Live (profiled) or resident peak of two optimizer steps at up to three micro-steps, in a rank.

    One or the other: the profiler's own record of allocations is resident too.
    """
    import contextlib

    import torch
    from torch.profiler import ProfilerActivity, profile

    from autoplan.planner.trials.device_monitor import MemoryMonitor
    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.sources import load_workload

    context.phase("build")
    workload = load_workload(spec)
    watch = MemoryMonitor(torch.device("cpu"), None)
    recorded: Any = contextlib.nullcontext()
    if profiled:
        recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with recorded:
        run = prepare(workload, config, device="cpu")
        context.phase("measure")
        for step in range(2):
            batch = workload.make_batch(config.micro_batch * min(run.accumulation, 3), step)
            divisor = run.loss_divisor(batch)
            total = count = torch.zeros(())
            from autoplan.strategies.workloads.batch import split_batch

            micros = list(split_batch(batch, config.micro_batch))
            for number, micro in enumerate(micros, start=1):
                a, b = run.micro_step(micro, divisor, sync=number == len(micros))
                total, count = total + a, count + b
            run.optimizer_step(total, count, divisor)
    resident = watch.read().resident_bytes
    live = peak = 0
    for event in recorded.profiler.kineto_results.events() if profiled else ():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return {"live_bytes": float(peak), "resident_bytes": float(resident or 0)}


def specs(folder: Path) -> dict[str, WorkloadSpec]:
    """The four workloads."""
    out = {}
    for name, config in CONFIGS.items():
        path = folder / name / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(config))
        out[name] = make_spec(model=str(path), sequence_length=256, global_batch=GLOBAL_BATCH)
    path = folder / "image_model.py"
    path.write_text(IMAGE_MODEL)
    out["image"] = make_spec(model=f"{path}:workload", global_batch=GLOBAL_BATCH)
    return out


def configurations(profile: ModelProfile, count: int, seed: int) -> list[TrainingConfig]:
    """A spread of legal configurations, the plain one first."""
    keys = [variant.key for variant in profile.variants.values() if not variant.key.compiled]
    rng = random.Random(seed)
    out = [TrainingConfig(micro_batch=4)]
    while len(out) < count:
        key = rng.choice(keys)
        policy = key.checkpointing
        if policy == "full":
            policy = rng.choice(["full", "every_2"])  # type: ignore[assignment]
        config = TrainingConfig.model_validate(
            {
                "micro_batch": rng.choice([1, 2, 4, 8, 16]),
                "precision": "bf16" if key.precision == "half" else "fp32",
                "checkpointing": policy,
                "attention": key.attention,
                "loss": key.loss,
                "optimizer_step": rng.choice(["own", "for_loop", "foreach", "fused"]),
            }
        )
        if config not in out:
            out.append(config)
    return out


def memory_rows(zygote: Zygote, hardware: HardwareProfile, count: int) -> list[dict[str, Any]]:
    """Measured and predicted memory, row by row."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family, spec in specs(Path(folder)).items():
            profile = trace_profile(spec, device="cpu", zygote=zygote, cache_dir=Path(folder))
            estimator = Estimator(profile, hardware, device="cpu", global_batch=GLOBAL_BATCH, memory_limit_bytes=None)
            for config in configurations(profile, count, seed=len(family)):
                found = {}
                for profiled in (True, False):
                    target = functools.partial(measure_memory, profiled=profiled)
                    report = zygote.run(Task(target=target, args=(spec, config), deadlines_s={"*": 300.0}))
                    result = report.ranks[0].result
                    if not isinstance(result, dict):
                        failure = report.first_failure
                        print(f"{family} {config.describe()}: {failure.error if failure else report.ended}")
                        break
                    found["live_bytes" if profiled else "resident_bytes"] = result[
                        "live_bytes" if profiled else "resident_bytes"
                    ]
                if len(found) < 2:
                    continue
                table = estimator.table([config])
                rows.append(
                    {
                        "family": family,
                        "config": config.describe(),
                        "live_bytes": found["live_bytes"],
                        "predicted_live_bytes": float(table.live_bytes[0]),
                        "resident_bytes": found["resident_bytes"],
                        "predicted_resident_bytes": float(table.peak_memory_bytes[0]),
                    }
                )
    return rows


def summary(rows: list[dict[str, Any]], measured: str, predicted: str) -> str:
    """Mean, 95th percentile and bias of the relative error."""
    errors = np.array([row[predicted] / row[measured] - 1 for row in rows if row[measured]])
    mean, high = np.mean(np.abs(errors)), np.quantile(np.abs(errors), 0.95)
    return f"n={len(errors)} mean {mean:.1%} p95 {high:.1%} bias {np.mean(errors):+.1%}"


def main() -> None:
    """Runs, prints, and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three configurations a family")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    count = 4 if options.quick else 12
    with Zygote(preload=("torch", "transformers", "autoplan.strategies.prepare")) as zygote:
        hardware = run_probes(zygote, device="cpu")
        rows = memory_rows(zygote, hardware, count)
    families = sorted({row["family"] for row in rows})
    for family in [*families, "all"]:
        some = [row for row in rows if family in (row["family"], "all")]
        print(f"memory {family}: live {summary(some, 'live_bytes', 'predicted_live_bytes')}; ", end="")
        print(f"resident {summary(some, 'resident_bytes', 'predicted_resident_bytes')}")
    if options.out is not None:
        options.out.write_text(json.dumps({"memory": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
