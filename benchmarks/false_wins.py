"""How often a plan claims a win that is none, live: the same configuration against itself, and a planted gain of 15 %.

    python -m benchmarks.false_wins --case same --pairs 200 --minutes 4       # again and again: it goes on
    python -m benchmarks.false_wins --case same --pairs 200 --busy --minutes 4
    python -m benchmarks.false_wins --case planted --pairs 60 --minutes 4
    python -m benchmarks.false_wins --table

A pair is what a search does for its plan: a first run of each side, then the rounds of the claim (how many, by the
spread between runs and the gain that the first runs show; the order in a round is drawn), each run a trial in a fresh
process, and `planner/search/claim.py` decides. `--busy` keeps a second process busy meanwhile. The pairs are kept in
benchmarks/results/false_wins.jsonl. The intervals are exact (Clopper and Pearson 1934).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoplan.planner.records import Outcome, Purpose, Trial
from autoplan.planner.search.claim import ROUNDS_AGAIN, Comparison, compare, rounds_needed
from autoplan.planner.search.preload import PRELOAD
from autoplan.planner.search.selection import collect_runs, measured_spread
from autoplan.planner.search.session import remeasure_boxes
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec

FILE = Path(__file__).parent / "data" / "steady_work.py"
RESULTS = Path(__file__).parent / "results" / "false_wins.jsonl"
RAN = TrainingConfig(micro_batch=1, threads=1)
SIDES = {"candidate": RAN, "reference": RAN.model_copy(update={"micro_batch": 2})}
"""Under which configuration the runs of each side are kept; both ran as RAN."""

BUSY = "while True: pass"


@dataclass(kw_only=True)
class Pair:
    """Two sides that are measured against each other, as a winner and its baseline are."""

    runners: dict[str, TrialRunner]
    seed: int
    history: list[Trial]
    trials: list[Trial] = field(default_factory=list)

    def measure(self) -> Comparison:
        """First runs, then rounds until as many as wanted are quiet."""
        self._run("candidate", "search", None)
        self._run("reference", "baseline", None)
        first = {trial.config: trial.step_time_s for trial in self.trials if trial.step_time_s is not None}
        spread = measured_spread([*self.history, *self.trials])
        gain = math.log(first[SIDES["reference"]].median / first[SIDES["candidate"]].median)
        wanted = rounds_needed(spread, gain)
        number = quiet = 0
        while quiet < wanted and number - quiet <= ROUNDS_AGAIN:
            order = list(SIDES)
            random.Random(f"{self.seed}/claim/{number}").shuffle(order)
            runs = [self._run(side, "claim", number) for side in order]
            quiet += not any(run.disturbed for run in runs)
            number += 1
        by_config = {runs.config: runs for runs in collect_runs(self.trials)}
        sides = [by_config[config] for config in SIDES.values()]
        return compare(sides[0], sides[1], spread, chosen_from=2)

    def _run(self, side: str, purpose: Purpose, number: int | None) -> Trial:
        order = TrialOrder(
            number=len(self.trials),
            purpose=purpose,
            config=RAN,
            prediction=None,
            deadline_s=60.0,
            method="whole_steps",
            round=number,
            remeasure=remeasure_boxes([*self.history, *self.trials]),
        )
        trial = self.runners[side].run(order)
        assert trial.outcome is Outcome.OK, f"{trial.outcome}: {trial.reason}"
        self.trials.append(trial.model_copy(update={"config": SIDES[side]}))
        return trial


@contextmanager
def runners(case: str) -> Iterator[dict[str, TrialRunner]]:
    """A runner for each side, on one zygote."""
    names = {"candidate": "steady", "reference": "steady" if case == "same" else "more"}
    with tempfile.TemporaryDirectory(prefix="false-wins-") as folder, Zygote(preload=PRELOAD) as zygote:
        yield {
            side: TrialRunner(
                zygote,
                make_spec(model=f"{FILE}:{name}"),
                device="cpu",
                memory_limit_bytes=4 << 30,
                host_limit_bytes=4 << 30,
                directory=Path(folder, side),
            )
            for side, name in names.items()
        }


@contextmanager
def busy_process(wanted: bool) -> Iterator[None]:
    """A second process that keeps a core busy."""
    other = subprocess.Popen([sys.executable, "-c", BUSY]) if wanted else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def run_pairs(
    case: str, count: int, *, busy: bool, first: int = 0, minutes: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Measures pairs, and yields what each showed; the repeats of earlier pairs are the device's spread."""
    ends_at = time.monotonic() + 60 * minutes
    history: list[Trial] = []
    with busy_process(busy), runners(case) as made:
        for seed in range(first, first + count):
            if seed > first and time.monotonic() > ends_at:  # the first may have waited for its processes
                return
            began = time.monotonic()
            pair = Pair(runners=made, seed=seed, history=history)
            found = pair.measure()
            history += [trial for trial in pair.trials if trial.purpose != "claim"]
            del history[:-8]  # a search has a few repeats, not hundreds
            speedup = found.speedup
            yield {
                "case": case,
                "busy": busy,
                "claimed": found.claim.claimed,
                "why_not": found.claim.why_not,
                "speedup": [round(value, 4) for value in (speedup.median, speedup.low, speedup.high)],
                "rounds": found.claim.rounds,
                "spread": round(found.claim.spread, 4),
                "disturbed_runs": sum(trial.disturbed is not None for trial in pair.trials),
                "runs": len(pair.trials),
                "seconds": round(time.monotonic() - began, 2),
            }


def exact_interval(hits: int, cases: int) -> tuple[float, float]:
    """The 95 % interval of a share (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    low = float(beta.ppf(0.025, hits, cases - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, cases - hits)) if hits < cases else 1.0
    return low, high


def load() -> list[dict[str, Any]]:
    """The pairs that were measured so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table(pairs: list[dict[str, Any]]) -> str:
    """The pairs, by case and load."""
    lines = ["| pairs | second process | claimed | share (95 % exact) | disturbed, so no claim | seconds a pair |"]
    lines.append("|---|---|---|---|---|---|")
    for case, words in (("same", "A against A"), ("planted", "A against A with 15 % more work")):
        for busy in (False, True):
            of = [pair for pair in pairs if (pair["case"], pair["busy"]) == (case, busy)]
            if not of:
                continue
            hits = sum(pair["claimed"] for pair in of)
            low, high = exact_interval(hits, len(of))
            loud = sum((pair["why_not"] or "").startswith("disturbed") for pair in of)
            seconds = sum(pair["seconds"] for pair in of) / len(of)
            lines.append(
                f"| {len(of)} x {words} | {'busy' if busy else 'none'} | {hits} | {hits / len(of):.1%} "
                f"({low:.1%} to {high:.1%}) | {loud} | {seconds:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("same", "planted"), default="same")
    parser.add_argument("--pairs", type=int, default=200, help="in all, those measured before included")
    parser.add_argument("--busy", action="store_true", help="with a second busy process")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time; run it again to go on")
    parser.add_argument("--table", action="store_true", help="only print the table")
    asked = parser.parse_args()
    if not asked.table:
        done = sum((pair["case"], pair["busy"]) == (asked.case, asked.busy) for pair in load())
        RESULTS.parent.mkdir(exist_ok=True)
        left = max(0, asked.pairs - done)
        for pair in run_pairs(asked.case, left, busy=asked.busy, first=done, minutes=asked.minutes):
            with RESULTS.open("a") as file:
                file.write(json.dumps(pair) + "\n")
    print(table(load()))


if __name__ == "__main__":
    main()
