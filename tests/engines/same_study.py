"""The same study on each engine: does it end in the same plan, and what does a trial cost beside its own work?

    python -m tests.engines.same_study --candidates 40

A tiny model on two ranks: of this machine (local), or one on each of two nodes: two torchruns, a cluster of Ray, an
allocation of SLURM (srun), and a job that the search makes itself (sbatch). All nodes are this machine, so all trials
run on the same cores, and only what starts them differs. Each search measures so many candidates, has its parity check
and its claim. They are drawn, by default (`--sampler random`, the same ones in each search): what autoplan chooses
itself depends on what was measured before, and ends as soon as nothing more could win, mostly after some ten. On stdout
a table; the exit status is 1 if a plan is another one by more than noise, or fewer candidates were drawn than asked.

The overhead of a trial is what it took (from the planner's request to its record) less the phases of its own work:
build, compile, warm-up, measuring. So it holds starting the ranks, their rendezvous, and sending and ending them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Trial
from autoplan.strategies.config import TrainingConfig
from tests.engines.slurm import running_slurm
from tests.engines.ways import (
    ROOT,
    WayError,
    as_text,
    logs,
    ray_cluster,
    run_at_login,
    run_here,
    run_in_job,
    run_torchruns,
)

MODEL = f"{ROOT / 'tests' / 'planner' / 'data' / 'faulty.py'}:make_sound"
FIXED = ("dp_replicate=2", "compile=off", "threads=1")
OWN_WORK = ("build", "compile", "warmup", "measure")
LOOKS = ("baseline", "search", "reference")
TIME_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search on one engine came to."""

    plan: Plan
    seconds: float

    @property
    def looks(self) -> list[Trial]:
        """The first measurement of each candidate."""
        return [trial for trial in self.plan.evidence if trial.purpose in LOOKS and not trial.is_repeat]

    @property
    def overheads_s(self) -> list[float]:
        """Of its undisturbed ends: seconds of a trial outside of its own work."""
        good = [trial for trial in self.plan.evidence if trial.outcome == "ok"]
        return [one.seconds_spent - sum(one.phase_seconds.get(name, 0.0) for name in OWN_WORK) for one in good]


def search(engine: str, candidates: int, sampler: str, folder: Path) -> Found:
    """Runs the search.

    Raises:
        WayError: it ended without a plan; the text is what it said.
    """
    folder.mkdir()
    command = ["-m", "tests.time_box", "search", "--model", MODEL, "--device", "cpu", "--budget", f"{TIME_S:.0f}s"]
    command += [part for fixed in FIXED for part in ("--fix", fixed)]
    command += [
        "--sampler",
        sampler,
        "--max-trials",
        str(candidates),
        "--store",
        str(folder / "store"),
        "--out",
        str(folder / "plan.json"),
    ]
    launcher = {"local": None, "torchrun": "elastic", "sbatch": "slurm"}.get(engine, engine)
    command += ["--nproc", "2"] if launcher is None else ["--launcher", launcher, "--nodes", "2x1"]
    began = time.monotonic()
    WAYS[engine](folder, command)
    return Found(plan=Plan.load(folder / "plan.json"), seconds=time.monotonic() - began)


def on_torchrun(folder: Path, command: Sequence[str]) -> None:
    if any(run_torchruns(folder, command, time_s=TIME_S)):
        raise WayError(logs(folder))


def on_ray(folder: Path, command: Sequence[str]) -> None:
    with ray_cluster(2) as more:
        run_here(command, time_s=TIME_S, **more)


def on_slurm(where: Callable[..., None]) -> Callable[[Path, Sequence[str]], None]:
    def run(folder: Path, command: Sequence[str]) -> None:
        own = folder / "slurm"
        own.mkdir()
        with running_slurm(own) as slurm:
            where(slurm, as_text(command), time_s=TIME_S)

    return run


WAYS: dict[str, Callable[[Path, Sequence[str]], None]] = {
    "local": lambda folder, command: run_here(command, time_s=TIME_S),
    "torchrun": on_torchrun,
    "ray": on_ray,
    "slurm": on_slurm(run_in_job),
    "sbatch": on_slurm(run_at_login),
}


def step_s(looks: Sequence[Trial], config: TrainingConfig) -> float | None:
    """What a search measured of a configuration, by all its trials; None: it has not tried it."""
    known = [one.step_time_s.median for one in looks if one.config == config and one.step_time_s is not None]
    return statistics.median(known) if known else None


def compare(first: Found, other: Found) -> tuple[bool, str]:
    """Whether two searches have the same plan within noise, and in words.

    Two configurations are the same within noise if in one of the searches, which measured both, their step times differ
    by no more than two standard deviations of the difference of two runs (`claim.spread` is that of one run).
    """
    if first.plan.config == other.plan.config:
        return True, "the same"
    text = "measured in none of both"
    for found in (first, other):
        times = [step_s(found.plan.evidence, one.plan.config) for one in (first, other)]
        spread = max(one.plan.claim.spread for one in (first, other) if one.plan.claim is not None)
        if times[0] is not None and times[1] is not None:
            apart, noise = abs(math.log(times[0] / times[1])), 2 * math.sqrt(2) * spread
            text = f"{apart:.1%} apart, noise {noise:.1%}"
            if apart <= noise:
                return True, f"within noise: {text}"
    return False, f"ANOTHER: {text}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--candidates", type=int, default=40)
    parser.add_argument("--sampler", default="random")
    parser.add_argument("--engines", nargs="+", choices=list(WAYS), default=list(WAYS))
    given = parser.parse_args()
    wrong, first = False, None
    print(f"{'engine':<10} {'candidates':>10} {'seconds':>8} {'overhead per trial':>19}  plan")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # SLURM's daemons read in it
        os.environ |= {"XDG_CACHE_HOME": f"{name}/cache", "XDG_STATE_HOME": f"{name}/state"}
        run_here(["-m", "autoplan", "probe", "--json"])  # its cache spares the first search that
        for engine in given.engines:
            found = search(engine, given.candidates, given.sampler, Path(name, engine))
            same, text = (True, "") if first is None else compare(first, found)
            few = given.sampler == "random" and len(found.looks) < given.candidates
            first, wrong = first or found, wrong or not same or few
            over = statistics.median(found.overheads_s)
            plan = found.plan.config.describe() + (f" ({text})" if text else "")
            print(f"{engine:<10} {len(found.looks):>10} {found.seconds:>8.0f} {over:>17.2f} s  {plan}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
