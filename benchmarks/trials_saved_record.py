"""Recording for benchmarks/trials_saved.py: candidates of a real space, run for real twice over."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.planner.records import Outcome, Trial
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.setup import PRELOAD, prepare_search
from autoplan.planner.space.bounds import parse_bound
from autoplan.planner.trace.model_profile import ModelProfile
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.probes.profile import HardwareProfile
from autoplan.probes.run import run_probes
from autoplan.processes import Zygote
from autoplan.strategies.config import KNOBS, TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from benchmarks.accuracy_local import GLOBAL_BATCH, specs

LIMIT_BYTES = 8 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounded:
    """What is recorded of one workload: bounds as `--bound` takes them, how many of its candidates, for how long."""

    bounds: tuple[str, ...]
    eager: int
    compiled: int
    minutes: float
    sequence_length: int | None = None


COMMON = (
    "checkpointing=none,full",
    "precision=fp32,bf16",
    "attention=own",
    "optimizer_step=own",
    "compile=off,block",
    "compile_mode=default",
)
SPACES = {
    "gpt2": Bounded(bounds=COMMON, eager=76, compiled=4, minutes=8.8, sequence_length=96),
    "image": Bounded(bounds=("micro_batch=1,4,16", *COMMON), eager=24, compiled=2, minutes=2.2),
}
"""What is left free: micro-batch, checkpointing, precision, loss, threads, allocator, and whether blocks compile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One workload as recorded: its profile as the search had it, and the same candidates' trials twice."""

    name: str
    bounds: tuple[str, ...]
    legal: int
    time_box_s: float
    profile: ModelProfile
    hardware: HardwareProfile
    rounds: tuple[list[Trial], list[Trial]]

    @property
    def candidates(self) -> list[TrainingConfig]:
        """The configurations, in the order in which they ran."""
        return [trial.config for trial in self.rounds[0]]

    @property
    def plain(self) -> list[TrainingConfig]:
        """The plain runs, the largest micro-batch first."""
        return sorted(filter(is_plain, self.candidates), key=lambda config: -config.micro_batch)

    @property
    def seconds(self) -> np.ndarray[Any, Any]:
        """Step time of each candidate, the geometric mean of both rounds; infinite where it did not run in both."""
        return np.sqrt(np.prod([[_seconds(trial) for trial in trials] for trials in self.rounds], axis=0))

    @property
    def peaks(self) -> np.ndarray[Any, Any]:
        """Peak memory of each candidate in bytes, the higher of both rounds."""
        return np.array([[trial.peak_memory_bytes or 0 for trial in trials] for trials in self.rounds]).max(axis=0)

    @property
    def apart(self) -> np.ndarray[Any, Any]:
        """How far the two rounds of each candidate that ran in both are apart, as shares of the second."""
        pairs = [(_seconds(a), _seconds(b)) for a, b in zip(*self.rounds, strict=True)]
        return np.array([abs(a / b - 1) for a, b in pairs if max(a, b) < math.inf])

    @property
    def noise(self) -> float:
        """The noise floor: the median of `apart`, so that a disturbed minute of the record does not raise it."""
        return float(np.median(self.apart))


def is_plain(config: TrainingConfig) -> bool:
    """Whether nothing but the micro-batch is set: what a search may begin with."""
    return set(config.knobs_off_default()) == {"micro_batch"}


def _seconds(trial: Trial) -> float:
    good = trial.outcome is Outcome.OK and trial.step_time_s is not None
    return trial.step_time_s.median if good else math.inf  # type: ignore[union-attr]


def record(folder: Path, names: Sequence[str], share: float, box_s: float) -> None:
    """Runs everything and writes one file per workload; `share` of the candidates and of the time.

    The first round compiles anew, whatever was compiled on this machine before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        Zygote(preload=PRELOAD, env={"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor"}) as zygote,
    ):
        hardware = run_probes(zygote, device="cpu", fresh=True)
        probed = Path(scratch) / "hardware.json"
        probed.write_text(hardware.model_dump_json())
        workloads = specs(Path(scratch))
        for name in names:
            bounded = SPACES[name]
            spec = workloads[name]
            if bounded.sequence_length is not None:
                spec = make_spec(
                    model=spec.reference, sequence_length=bounded.sequence_length, global_batch=GLOBAL_BATCH
                )
            options = SearchOptions(
                spec=spec,
                device="cpu",
                memory_limit=LIMIT_BYTES,
                bound=dict(parse_bound(text) for text in bounded.bounds),
            )
            context = prepare_search(options, zygote, SearchObserver(), saved=probed)
            runner = TrialRunner(
                zygote,
                context.spec,
                device="cpu",
                memory_limit_bytes=LIMIT_BYTES,
                host_limit_bytes=LIMIT_BYTES,
                directory=Path(scratch) / f"{name}-trials",
            )
            chosen = choose(context.candidates, round(share * bounded.eager), math.ceil(share * bounded.compiled))
            rounds = run_twice(runner, chosen, box_s, 60 * share * bounded.minutes)
            profile = only_used(context.estimator.profile, chosen)
            document = {
                "bounds": bounded.bounds,
                "legal": len(context.space.candidates),
                "time_box_s": box_s,
                "hardware": json.loads(hardware.model_dump_json()),
                "profile": json.loads(profile.model_dump_json(exclude_defaults=True)),
                "rounds": [[json.loads(t.model_dump_json(exclude_defaults=True)) for t in trials] for trials in rounds],
            }
            text = json.dumps(document, separators=(",", ":"))
            (folder / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
            print(f"{name}: {len(rounds[0])} of {len(chosen)} candidates recorded twice", file=sys.stderr, flush=True)


def choose(legal: Sequence[TrainingConfig], eager: int, compiled: int, seed: int = 0) -> list[TrainingConfig]:
    """The plain runs, and so many eager and compiled candidates spread over the knobs; in an order drawn by the seed.

    Each next one is that whose pairs of values were taken least so far: the pairs cover what single values leave
    confounded.
    """
    rng = random.Random(seed)
    varied = [knob for knob in KNOBS if len({getattr(config, knob) for config in legal}) > 1]

    def pairs(config: TrainingConfig) -> list[tuple[Any, ...]]:
        return list(itertools.combinations([(knob, getattr(config, knob)) for knob in varied], 2))

    taken = [config for config in legal if is_plain(config)]
    uses = Counter(pair for config in taken for pair in pairs(config))
    for scope in ("off", "block"):
        left = [config for config in legal if config.compile == scope and config not in taken]
        rng.shuffle(left)
        most = eager if scope == "off" else len(taken) + compiled
        while left and len(taken) < most:
            fewest = min(left, key=lambda config: sum(uses[pair] for pair in pairs(config)))
            left.remove(fewest)
            taken.append(fewest)
            uses.update(pairs(fewest))
    rng.shuffle(taken)
    return taken


def run_twice(
    runner: TrialRunner, configs: Sequence[TrainingConfig], box_s: float, limit_s: float
) -> tuple[list[Trial], list[Trial]]:
    """Both rounds; where the time is over, with the candidates that ran twice by then.

    The first round may take six tenths of the time: it is the one that compiles.

    Raises:
        SystemExit: none ran twice.
    """
    began = time.monotonic()
    rounds: tuple[list[Trial], list[Trial]] = ([], [])
    for number, (trials, until) in enumerate(zip(rounds, (0.6, 1.0), strict=True)):
        for i, config in enumerate(configs):
            if time.monotonic() - began > until * limit_s:
                break
            order = TrialOrder(
                number=1000 * number + i,
                purpose="search",
                config=config,
                prediction=None,
                time_box_s=box_s,
                deadline_s=120.0,
            )
            trials.append(runner.run(order))
            print(f"{number} {i:3d} {trials[-1].seconds_spent:4.1f} s", config.describe(), file=sys.stderr, flush=True)
    both = min(map(len, rounds))
    if not both:
        raise SystemExit(f"no candidate ran twice within {limit_s:.0f} s")
    return rounds[0][:both], rounds[1][:both]


def only_used(profile: ModelProfile, configs: Sequence[TrainingConfig]) -> ModelProfile:
    """The profile with the variants that predictions of these configurations may use."""
    half = {config.precision in ("bf16", "fp16") for config in configs}
    attentions, losses = {config.attention for config in configs}, {config.loss for config in configs}
    kept = {
        text: variant
        for text, variant in profile.variants.items()
        if (variant.key.precision == "half") in half
        and variant.key.attention in attentions
        and variant.key.loss in losses
    }
    return profile.model_copy(update={"variants": kept})


def read(folder: Path) -> list[Recorded]:
    """What was recorded."""
    found = []
    for path in sorted(folder.glob("*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        first, second = ([Trial.model_validate(trial) for trial in trials] for trials in document["rounds"])
        found.append(
            Recorded(
                name=path.name.removesuffix(".json.gz"),
                bounds=tuple(document["bounds"]),
                legal=document["legal"],
                time_box_s=document["time_box_s"],
                profile=ModelProfile.model_validate(document["profile"]),
                hardware=HardwareProfile.model_validate(document["hardware"]),
                rounds=(first, second),
            )
        )
    return found
