"""Step times on this machine against the cost model: recorded once, predicted again by whoever changes the model.

    python -m benchmarks.accuracy_time --record     (a quarter of an hour, with nothing else running)
    python -m benchmarks.accuracy_time --retrace    (probes and traces anew, keeps the recorded trials)
    python -m benchmarks.accuracy_time              (predicts what was recorded)

Four families (benchmarks/accuracy_local.py), a spread of configurations each, all of them run twice over, a round after
the other, so that the difference of the two rounds is the noise floor of the table. The profile with its timed
operations and the probed hardware are kept beside the trials. After the plain configuration the two trials that would
teach the most are taken (`most_informative`), and the others are predicted.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.planner.cost.calibrate import NOISE_SD, TimeFit
from autoplan.planner.cost.columns import Floats
from autoplan.planner.cost.traced.estimator import Estimator
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.trace.model_profile import ModelProfile
from autoplan.planner.trace.trace import trace_profile
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.probes.profile import HardwareProfile
from autoplan.probes.run import run_probes
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from benchmarks.accuracy_local import GLOBAL_BATCH, configurations, specs
from benchmarks.accuracy_trials import rank_correlation

RESULTS = Path(__file__).parent / "results" / "local_time"
TAUGHT = 3
COMPILED = 2
LIMIT_BYTES = 8 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The records of one workload: the traced profile, and the same trials twice."""

    name: str
    profile: ModelProfile
    rounds: tuple[list[Trial], list[Trial]]


def record(folder: Path, count: int) -> None:
    """Runs everything and writes hardware.json and one file per family."""
    folder.mkdir(parents=True, exist_ok=True)
    with Zygote(preload=("torch", "transformers", "autoplan.strategies.prepare")) as zygote:
        hardware = run_probes(zygote, device="cpu", fresh=True)
        (folder / "hardware.json").write_text(hardware.model_dump_json(indent=1) + "\n")
        with tempfile.TemporaryDirectory() as scratch:
            for name, spec in specs(Path(scratch)).items():
                profile = trace_profile(spec, device="cpu", zygote=zygote, hardware=hardware, cache_dir=Path(scratch))
                runner = TrialRunner(
                    zygote,
                    spec,
                    device="cpu",
                    memory_limit_bytes=LIMIT_BYTES,
                    host_limit_bytes=LIMIT_BYTES,
                    directory=Path(scratch) / f"{name}-trials",
                )
                spread = _spread(profile, count)
                rounds = [
                    [_trial(runner, 100 * number + i, config) for i, config in enumerate(spread)] for number in range(2)
                ]
                document = {
                    "profile": json.loads(profile.model_dump_json(exclude_defaults=True)),
                    "rounds": [
                        [json.loads(trial.model_dump_json(exclude_defaults=True)) for trial in trials]
                        for trials in rounds
                    ],
                }
                _write(folder / f"{name}.json.gz", document)
                print(f"{name}: {len(rounds[0])} configurations recorded twice", flush=True)


def retrace(folder: Path) -> None:
    """Probes and traces anew, and keeps the recorded trials: for whoever changes how either is done."""
    with Zygote(preload=("torch", "transformers", "autoplan.strategies.prepare")) as zygote:
        hardware = run_probes(zygote, device="cpu", fresh=True)
        (folder / "hardware.json").write_text(hardware.model_dump_json(indent=1) + "\n")
        with tempfile.TemporaryDirectory() as scratch:
            for name, spec in specs(Path(scratch)).items():
                profile = trace_profile(spec, device="cpu", zygote=zygote, hardware=hardware, cache_dir=Path(scratch))
                document = _read(folder / f"{name}.json.gz")
                document["profile"] = json.loads(profile.model_dump_json(exclude_defaults=True))
                _write(folder / f"{name}.json.gz", document)


def _write(path: Path, document: dict[str, Any]) -> None:
    # no time of writing inside, so that equal contents are equal files
    path.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0))


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return document


def _spread(profile: ModelProfile, count: int) -> list[TrainingConfig]:
    """The configurations of accuracy_local, and compiled blocks at two micro-batches."""
    compiled = [TrainingConfig(micro_batch=size, compile="block", optimizer_step="fused") for size in (2, 8)]
    return configurations(profile, count, seed=len(profile.variants)) + compiled[:COMPILED]


def _trial(runner: TrialRunner, number: int, config: TrainingConfig) -> Trial:
    order = TrialOrder(number=number, purpose="search", config=config, prediction=None, deadline_s=180.0)
    return runner.run(order)


def read(folder: Path) -> tuple[HardwareProfile, list[Family]]:
    """The hardware and the workloads that were recorded."""
    hardware = HardwareProfile.model_validate_json((folder / "hardware.json").read_text())
    families = []
    for path in sorted(folder.glob("*.json.gz")):
        document = _read(path)
        first, second = ([Trial.model_validate(trial) for trial in trials] for trials in document["rounds"])
        profile = ModelProfile.model_validate(document["profile"])
        families.append(Family(name=path.name.removesuffix(".json.gz"), profile=profile, rounds=(first, second)))
    return hardware, families


def most_informative(fit: TimeFit, parts: Floats, count: int, *, known: Sequence[int] = ()) -> list[int]:
    """Which trials would teach the fit most about the times of all candidates: one after another, A-optimally.

    Each is the one after which the summed variance of all predicted logarithms is least (Chaloner and Verdinelli 1995,
    section 2.2); a linear fit's variance does not depend on what the trial will measure.

    Args:
        fit: What is known so far.
        parts: Predicted parts of shape (factors, candidates).
        count: How many to name.
        known: Candidates that are tried anyway.
    """
    scaled = parts * np.exp(fit.theta)[:, None]
    slope = scaled / np.maximum(scaled.sum(axis=0), 1e-30)
    covariance = fit.covariance
    chosen: list[int] = []
    for place in range(len(known) + min(count, slope.shape[1] - len(known))):
        toward = covariance @ slope  # (factors, candidates)
        own = np.einsum("fc,fc->c", slope, toward)
        if place < len(known):
            best = known[place]
        else:
            gain = np.square(slope.T @ toward).sum(axis=0) / (own + NOISE_SD**2)
            gain[[*known, *chosen]] = -1.0
            best = int(np.argmax(gain))
            chosen.append(best)
        covariance = covariance - np.outer(toward[:, best], toward[:, best]) / (own[best] + NOISE_SD**2)
    return chosen


def score(family: Family, hardware: HardwareProfile) -> dict[str, Any]:
    """Errors before any trial and after three; a row per configuration that ran in both rounds."""
    both = [
        (a, b)
        for a, b in zip(*family.rounds, strict=True)
        if a.outcome is Outcome.OK and b.outcome is Outcome.OK and a.step_time_s and b.step_time_s
    ]
    configs = [a.config for a, _ in both]
    times = np.array([[t.step_time_s.median for t in pair if t.step_time_s] for pair in both])
    estimator = Estimator(family.profile, hardware, device="cpu", global_batch=GLOBAL_BATCH, memory_limit_bytes=None)
    before = estimator.table(configs)
    taught = [0, *most_informative(estimator.time_fit, before.parts_s, TAUGHT - 1, known=(0,))]
    for i in taught:
        estimator.observe(both[i][0])
    after = estimator.table(configs)
    held = np.array([i for i in range(len(both)) if i not in taught])
    measured = times.mean(axis=1)
    rows = [
        {
            "config": configs[i].describe(),
            "measured_s": measured[i],
            "apart": times[i, 0] / times[i, 1] - 1,
            "before": before.step_time_s[i] / measured[i] - 1,
            "after": after.step_time_s[i] / measured[i] - 1,
            "inside": bool(after.step_time_low_s[i] <= measured[i] <= after.step_time_high_s[i]),
            "taught": i in taught,
        }
        for i in range(len(both))
    ]
    return {
        "configurations": len(both),
        "noise_rank": rank_correlation(times[:, 0], times[:, 1]),
        "noise": float(np.mean(np.abs(times[:, 0] / times[:, 1] - 1))),
        "before": float(np.mean(np.abs(before.step_time_s / measured - 1))),
        "rank_before": rank_correlation(before.step_time_s, measured),
        "after": float(np.mean(np.abs(after.step_time_s[held] / measured[held] - 1))),
        "bias": float(np.mean(after.step_time_s[held] / measured[held] - 1)),
        "rank": rank_correlation(after.step_time_s[held], measured[held]),
        "inside": float(np.mean([rows[i]["inside"] for i in held])),
        "rows": rows,
    }


def show(folder: Path, *, markdown: bool, rows: bool = False) -> None:
    """Prints the table; with `rows` every configuration too."""
    hardware, families = read(folder)
    head = "step time | configurations | two rounds apart | their rank | before any trial | rank"
    head += " | after 3: mean | bias | in interval | rank correlation"
    print(f"\n| {head} |\n|" + "---|" * (head.count("|") + 1) if markdown else f"\n{head}")
    scores = [(family.name, score(family, hardware)) for family in families]
    for name, s in scores:
        cells = [name, str(s["configurations"]), f"{s['noise']:.1%}", f"{s['noise_rank']:.2f}"]
        cells += [f"{s['before']:.1%}", f"{s['rank_before']:.2f}"]
        cells += [f"{s['after']:.1%}", f"{s['bias']:+.1%}", f"{s['inside']:.0%}", f"{s['rank']:.2f}"]
        print(f"| {' | '.join(cells)} |" if markdown else " | ".join(cells))
    weights = [s["configurations"] - TAUGHT for _, s in scores]
    mean = functools.partial(np.average, weights=weights)
    cells = ["all", str(sum(weights) + TAUGHT * len(weights))]
    for name in ("noise", "noise_rank", "before", "rank_before", "after", "bias", "inside", "rank"):
        value = mean([s[name] for _, s in scores])
        cells.append(f"{value:.2f}" if "rank" in name else f"{value:.1%}")
    print(f"| {' | '.join(cells)} |" if markdown else " | ".join(cells))
    for name, s in scores if rows else ():
        print(f"\n{name}")
        for row in s["rows"]:
            mark = "*" if row["taught"] else " "
            print(f"{mark} {row['measured_s']:7.3f} s  apart {row['apart']:+6.1%}  ", end="")
            print(f"before {row['before']:+6.1%}  after {row['after']:+6.1%}  {row['config']}")


def main() -> None:
    """Records or predicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--record", action="store_true", help="run everything first; wants a quiet machine")
    parser.add_argument("--retrace", action="store_true", help="probe and trace anew, keep the recorded trials")
    parser.add_argument("--count", type=int, default=14, help="configurations per family, besides the compiled ones")
    parser.add_argument("--rows", action="store_true", help="every configuration")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if options.retrace:
        retrace(options.folder)
    if options.record:
        record(options.folder, options.count)
    show(options.folder, markdown=options.markdown, rows=options.rows)


if __name__ == "__main__":
    main()
