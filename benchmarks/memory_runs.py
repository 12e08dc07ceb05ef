"""Small models run here under a memory limit: how often a verdict "fits" was wrong.

    python -m benchmarks.accuracy_memory --runs 500 [--seed 0] [--out benchmarks/results/memory_runs.json]

Eight small models (two sizes of each family of accuracy_local), predicted as a search does it before any trial, and
once more after its first trial, the plain run. Of many legal configurations those are run whose limit is near: each has
a limit of its own, drawn within 0.9 to 1.5 of its predicted peak, which is where a verdict can be wrong. The limit is
kept by the same watch as in a trial: what goes past it is killed. The other question needs no drawn limit: a limit at
the upper end of the interval is the least one that is called "fits", so a peak above that end is a wrong verdict at
the worst limit.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.planner.cost.prediction import verdicts
from autoplan.planner.cost.traced.estimator import Estimator
from autoplan.planner.trace.model_profile import VariantKey
from autoplan.planner.trace.trace import trace_profile
from autoplan.probes.run import read_host_profile
from autoplan.processes import Ended, Task, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec
from benchmarks.accuracy_local import CONFIGS, GLOBAL_BATCH, IMAGE_MODEL, configurations, measure_memory

NEAR = (0.9, 1.5)
"""The drawn limit as a multiple of the predicted peak."""

SIZES: dict[str, tuple[dict[str, Any], ...]] = {
    "gpt2": ({"n_layer": 4, "n_embd": 128, "vocab_size": 4096}, {"n_layer": 2, "n_embd": 128, "vocab_size": 12288}),
    "llama": (
        {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 352},
        {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 352, "vocab_size": 12000},
    ),
    "encoder_decoder": (
        {"num_layers": 2, "num_decoder_layers": 2, "d_model": 128, "d_ff": 512, "d_kv": 32},
        {"num_layers": 1, "num_decoder_layers": 2, "d_model": 128, "d_ff": 512, "d_kv": 32, "vocab_size": 12000},
    ),
}
VARIANTS = tuple(
    VariantKey.model_validate({"precision": precision, "checkpointing": policy, "loss": loss})
    for precision, policy, loss in (
        ("fp32", "none", "full"),
        ("half", "none", "full"),
        ("fp32", "full", "full"),
        ("half", "full", "full"),
        ("half", "selective", "full"),
        ("fp32", "none", "fused"),
        ("half", "full", "fused"),
    )
)
"""Those that are traced: every value of each knob occurs, so that a trace takes seconds."""

LENGTHS = (128, 96)  # tokens of a sample in the first and the second size
IMAGE_SIDES = (48, 64)  # pixels


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One run: what was said of it before, and what came of it."""

    model: str
    config: str
    limit_bytes: int
    live_bytes: float
    said: str
    high_bytes: float
    said_after: str
    high_after_bytes: float
    base_after_bytes: float
    peak_bytes: int | None
    killed: bool
    seconds: float

    @property
    def ran_out(self) -> bool:
        """It was killed at the limit, or its peak was above it."""
        return self.killed or (self.peak_bytes or 0) > self.limit_bytes


def specs(folder: Path) -> dict[str, WorkloadSpec]:
    """The models, small enough that a run takes about a second."""
    out = {}
    for family, changes in SIZES.items():
        for number, change in enumerate(changes):
            path = folder / f"{family}-{number}" / "config.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(CONFIGS[family] | change))
            length = LENGTHS[number]
            out[path.parent.name] = make_spec(model=str(path), sequence_length=length, global_batch=GLOBAL_BATCH)
    for number, side in enumerate(IMAGE_SIDES):
        path = folder / f"image_{number}.py"
        path.write_text(IMAGE_MODEL.replace("3, 96, 96", f"3, {side}, {side}"))
        out[f"image-{number}"] = make_spec(model=f"{path}:workload", global_batch=GLOBAL_BATCH)
    return out


def verdict_runs(zygote: Zygote, runs: int, seed: int, folder: Path) -> Iterator[Verdict]:
    """Runs, the models in turn, each in a rank of its own under a limit of its own."""
    rng = random.Random(seed)
    models = specs(folder)
    count = -(-runs // len(models))
    waiting = []
    for place, (name, spec) in enumerate(models.items()):
        profile = trace_profile(spec, device="cpu", zygote=zygote, variants=VARIANTS, cache_dir=folder)
        print(f"{name}: {len(profile.variants)} variants traced in {profile.seconds_spent:.0f} s", flush=True)
        before = Estimator(
            profile, read_host_profile(), device="cpu", global_batch=GLOBAL_BATCH, memory_limit_bytes=None
        )
        after = copy.deepcopy(before)
        configs = _kept_memory(configurations(profile, 1 + count, seed=seed + place), rng)
        plain = _run(zygote, spec, configs[0], None)
        if plain.ranks[0].result is not None:
            live = float(before.table([configs[0]]).live_bytes[0])
            after.memory_fit.observe(live, plain.ranks[0].result["resident_bytes"])
        waiting.append([(name, spec, before, after, config) for config in configs[1:]])
    for name, spec, before, after, config in [one for turn in zip(*waiting, strict=True) for one in turn][:runs]:
        first, second = before.table([config]), after.table([config])
        limit = int(rng.uniform(*NEAR) * float(second.peak_memory_bytes[0]))
        said, said_after = (
            str(verdicts(table.peak_memory_low_bytes, table.peak_memory_high_bytes, limit)[0])
            for table in (first, second)
        )
        began = time.monotonic()
        report = _run(zygote, spec, config, limit)
        killed = report.ended is Ended.MEMORY_LIMIT
        result = report.ranks[0].result if report.ranks else None
        if result is None and not killed:  # which is no question of memory
            print(f"{name} {config.describe()} did not run: {report.describe()}", flush=True)
            continue
        yield Verdict(
            model=name,
            config=config.describe(),
            limit_bytes=limit,
            live_bytes=float(first.live_bytes[0]),
            said=said,
            high_bytes=float(first.peak_memory_high_bytes[0]),
            said_after=said_after,
            high_after_bytes=float(second.peak_memory_high_bytes[0]),
            base_after_bytes=after.memory_fit.base_bytes,
            peak_bytes=None if result is None else int(result["resident_bytes"]),
            killed=killed,
            seconds=time.monotonic() - began,
        )


def _kept_memory(configs: list[TrainingConfig], rng: random.Random) -> list[TrainingConfig]:
    """The first as it is; of the others some keep freed memory."""
    some = [config.model_copy(update={"allocator": rng.choice(["own", "own", "keep"])}) for config in configs]
    return [configs[0], *some[1:]]


def _run(zygote: Zygote, spec: WorkloadSpec, config: TrainingConfig, limit_bytes: int | None) -> Any:
    target = functools.partial(measure_memory, profiled=False)
    task = Task(target=target, args=(spec, config), deadlines_s={"*": 120.0}, memory_limit_bytes=limit_bytes)
    return zygote.run(task)


def summarize(found: list[Verdict]) -> dict[str, Any]:
    """Counts of verdicts by outcome, and of peaks above the interval; predicted before any trial, and after one."""
    out: dict[str, Any] = {
        "runs": len(found),
        "ran_out": sum(one.ran_out for one in found),
        "seconds_each_median": float(np.median([one.seconds for one in found])),
    }
    for when, said, high in (("before", "said", "high_bytes"), ("after_plain_run", "said_after", "high_after_bytes")):
        counts = {
            verdict: {
                "fitted": sum(getattr(one, said) == verdict and not one.ran_out for one in found),
                "ran_out": sum(getattr(one, said) == verdict and one.ran_out for one in found),
            }
            for verdict in ("fits", "too_close", "does_not_fit")
        }
        measured = [one for one in found if one.peak_bytes is not None]
        above = [one for one in measured if (one.peak_bytes or 0) > getattr(one, high)]
        cut = [one for one in found if one.peak_bytes is None and one.limit_bytes >= getattr(one, high)]
        out[when] = {
            "verdicts": counts,
            "wrong_fits": counts["fits"]["ran_out"],
            "peaks_above_interval": len(above) + len(cut),
            "peaks_measured": len(measured) + len(cut),
            "above": sorted(
                (
                    f"{one.model} {one.config}: {(one.peak_bytes or one.limit_bytes) / getattr(one, high) - 1:+.1%}"
                    for one in (*above, *cut)
                ),
            ),
        }
    return out


def run_here(runs: int, seed: int, out: Path | None) -> None:
    """Runs, prints, and keeps the summary."""
    found: list[Verdict] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Zygote(preload=("torch", "transformers", "autoplan.strategies.prepare")) as zygote,
    ):
        for one in verdict_runs(zygote, runs, seed, Path(folder)):
            found.append(one)
            if len(found) % 10 == 0:
                wrong = sum(one.said == "fits" and one.ran_out for one in found)
                print(f"{len(found)} runs, {wrong} wrong 'fits', {one.seconds:.1f} s the last", flush=True)
                _keep(found, seed, out)
    print(json.dumps(_keep(found, seed, out), indent=1))


def _keep(found: list[Verdict], seed: int, out: Path | None) -> dict[str, Any]:
    """The summary so far; a file has every run too."""
    document = {"seed": seed, **summarize(found)}
    if out is not None:
        out.write_text(json.dumps(document | {"rows": [vars(one) for one in found]}, indent=1) + "\n")
    return document
