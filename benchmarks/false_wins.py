"""How often a win is claimed that is none: the same against itself, and a planted gain of 15 %.

    python -m benchmarks.false_wins --case same --pairs 200 --minutes 4       # again and again: it goes on
    python -m benchmarks.false_wins --case same --pairs 200 --busy --minutes 4
    python -m benchmarks.false_wins --case planted --pairs 60 --minutes 4
    python -m benchmarks.false_wins --searches 60 [--side-by-side 2] [--minutes 4]
    python -m benchmarks.false_wins --table
    python -m benchmarks.false_wins --core-speed                              # 70 s: what slices of time cancel

A pair is what a search does for its plan: a first run of each side, then the rounds of the claim (how many is fixed
before the first, by the gain that the first runs show; the order in a round is drawn), each run a trial in a fresh
process and the two of a round in slices of time; `planner/search/claim.py` decides. `--busy` keeps one more busy.

`--searches`: whole searches, each from nothing, of a space of two values that are the same thing: on a CPU
`optimizer_step=own` is the loop over the parameters that `for_loop` asks for. They run on one core, where no number of
threads is offered. With `--side-by-side 2` they run on two, and each look on one of them.

`--core-speed` records the speed of one core, and says by that record how much two equal runs differ: one after the
other, and in slices. It is what SLICE_S rests on; measure.SLICED rests on the rounds of pairs (column `a round`).

Each pair and each search is a line of benchmarks/results/false_wins.jsonl. The intervals are exact (Clopper and Pearson
1934); the upper end is to be at most 5 %.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.planner.records.trials import ClaimRounds, Outcome, Purpose, Trial
from autoplan.planner.search.claim import Comparison, compare, is_claim_over, rounds_needed
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.preload import PRELOAD
from autoplan.planner.search.run import run_search
from autoplan.planner.search.selection import collect_runs, has_lasting_load, measured_spread
from autoplan.planner.search.session import REMEASURE
from autoplan.planner.space.bounds import parse_bound
from autoplan.planner.trials.measure import SLICED
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.probes.cpu import time_core
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from benchmarks.whole_search import busy_process

FILE = Path(__file__).parent / "data" / "steady_work.py"
RESULTS = Path(__file__).parent / "results" / "false_wins.jsonl"
RAN = TrainingConfig(micro_batch=1, threads=1)
SIDES = {"candidate": RAN, "reference": RAN.model_copy(update={"micro_batch": 2})}
"""Under which configuration the runs of each side are kept; both ran as RAN."""

FIXED = {"precision": "fp32", "compile": "off", "checkpointing": "none", "allocator": "own", "micro_batch": 1}
EQUALS = "optimizer_step=own,for_loop"
SEARCH_BUDGET_S = 30.0
"""Most of them end before: a run takes some 2 s."""

SEARCHES = ("searches", "searches side by side")

MOST_CLAIMED = 0.05
"""The upper end of the interval of false claims that is aimed at."""


@dataclass(kw_only=True)
class Pair:
    """Two sides that are measured against each other, as a winner and its baseline are."""

    runners: dict[str, TrialRunner]
    seed: int
    history: list[Trial]
    trials: list[Trial] = field(default_factory=list)

    def measure(self) -> Comparison:
        """First runs, then the rounds of a claim, as many as are wanted before the first of them."""
        self._run("candidate", "search")
        self._run("reference", "baseline")
        first = {trial.config: trial.step_time_s for trial in self.trials if trial.step_time_s is not None}
        spread = measured_spread([*self.history, *self.trials])
        gain = math.log(first[SIDES["reference"]].median / first[SIDES["candidate"]].median)
        began = ClaimRounds(
            number=1,
            config=SIDES["candidate"],
            reference=SIDES["reference"],
            first_round=0,
            rounds=rounds_needed(SLICED, gain),
            budget_s=1.0,
        )
        number = 0
        while not is_claim_over(self.trials, began):
            order = list(SIDES)
            random.Random(f"{self.seed}/claim/{number}").shuffle(order)
            first, second = (self._order("claim", number) for _ in order)
            made = self.runners[order[0]].run_round((first, second), runners=[self.runners[side] for side in order])
            assert made.trials, made.report.describe()
            for side, trial in zip(order, made.trials, strict=True):
                self._keep(side, trial)
            number += 1
        by_config = {runs.config: runs for runs in collect_runs(self.trials)}
        sides = [by_config[config] for config in SIDES.values()]
        return compare(sides[0], sides[1], spread, chosen_from=2, claim=began)

    def _run(self, side: str, purpose: Purpose) -> None:
        self._keep(side, self.runners[side].run(self._order(purpose, None)))

    def _order(self, purpose: Purpose, number: int | None) -> TrialOrder:
        return TrialOrder(
            number=len(self.trials),
            purpose=purpose,
            config=RAN,
            prediction=None,
            deadline_s=60.0,
            method="whole_steps",
            round=number,
            remeasure=0.0 if has_lasting_load([*self.history, *self.trials]) else REMEASURE,
        )

    def _keep(self, side: str, trial: Trial) -> None:
        assert trial.outcome is Outcome.OK, f"{trial.outcome}: {trial.reason}"
        self.trials.append(trial.model_copy(update={"config": SIDES[side]}))


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
                "log_ratios": log_ratios(pair.trials),
                "spread": round(found.claim.spread, 4),
                "disturbed_runs": sum(trial.disturbed is not None for trial in pair.trials),
                "runs": len(pair.trials),
                "seconds": round(time.monotonic() - began, 2),
            }


def run_searches(count: int, *, first: int = 0, minutes: float = math.inf, parts: int = 1) -> Iterator[dict[str, Any]]:
    """Runs whole searches of two equal values, each with a store of its own, and yields how each ended.

    Args:
        count: How many.
        first: The seed of the first.
        minutes: None begins after them.
        parts: So many looks at once, each on a core.
    """
    ends_at = time.monotonic() + 60 * minutes
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:parts])
    try:
        for seed in range(first, first + count):
            if seed > first and time.monotonic() > ends_at:
                return
            with tempfile.TemporaryDirectory(prefix="equal-values-") as folder:
                yield one_search(seed, folder, parts)
    finally:
        os.sched_setaffinity(0, cores)


def one_search(seed: int, store: str, parts: int = 1) -> dict[str, Any]:
    """One search of two equal values, and whether it claims a gain."""
    began = time.monotonic()
    options = SearchOptions(
        spec=make_spec(model=f"{FILE}:steady"),
        budget=SEARCH_BUDGET_S,
        device="cpu",
        store=store,
        seed=seed,
        fix=FIXED,
        bound=dict([parse_bound(EQUALS)]),
        side_by_side=parts,
    )
    result = run_search(options)
    claim = None if result.plan is None else result.plan.claim
    speedup = None if result.plan is None else result.plan.speedup
    return {
        "case": SEARCHES[parts > 1],
        "busy": False,
        "status": result.status,
        "looks": sum(not trial.is_repeat for trial in result.trials),
        "claimed": claim is not None and claim.claimed,
        "why_not": None if claim is None else claim.why_not,
        "speedup": None if speedup is None else [round(v, 4) for v in (speedup.median, speedup.low, speedup.high)],
        "rounds": len({trial.round for trial in result.trials if trial.purpose == "claim"}),
        "log_ratios": log_ratios(result.trials),
        "disturbed_runs": sum(trial.disturbed is not None for trial in result.trials),
        "runs": len(result.trials),
        "seconds": round(time.monotonic() - began, 2),
    }


def log_ratios(trials: Sequence[Trial]) -> list[float]:
    """Of each undisturbed round in slices: the logarithm of one side's step time over the other's."""
    sides: dict[tuple[str, int | None], dict[str, float]] = {}
    for trial in trials:
        if trial.pauses and trial.step_time_s is not None and not trial.disturbed:
            sides.setdefault((trial.purpose, trial.round), {})[repr(trial.config)] = trial.step_time_s.median
    pairs = [[both[name] for name in sorted(both)] for both in sides.values()]
    return [round(math.log(two[0] / two[1]), 4) for two in pairs if len(two) == 2]


def record_core(seconds: float) -> list[float]:
    """Seconds of a fixed calculation (`time_core`), again and again on one core; it takes the fastest of three."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    record, ends_at = [], time.monotonic() + seconds
    while time.monotonic() < ends_at:
        record.append(time_core())
    return record


def core_table(record: Sequence[float], seconds: float) -> str:
    """How much two equal runs differ by a record of a core's speed, and for how long the core keeps it.

    Args:
        record: Seconds of the same calculation, one after the other.
        seconds: All of it took.
    """
    logs, every_s, draw = np.log(np.array(record)), seconds / len(record), np.random.default_rng(0)
    lines = [f"{len(record)} readings, standard deviation of the logarithm {logs.std():.3f}"]
    for lag_s in (0.005, 0.04, 0.2, 1.5):
        lag = max(1, round(lag_s / every_s))
        lines.append(f"correlation after {lag * every_s:.3f} s: {np.corrcoef(logs[:-lag], logs[lag:])[0, 1]:.2f}")
    own_s = 2.0
    for slice_s in (0.02, 0.05, 0.25, own_s):
        one, several = max(1, round(slice_s / every_s)), max(1, round(own_s / slice_s))
        begins = draw.integers(0, max(1, len(record) - 2 * one * several), 500)
        parts = [np.exp(logs[b : b + 2 * one * several]).reshape(2 * several, one).sum(1) for b in begins]
        ratios = [math.log(part[1::2].sum() / part[::2].sum()) for part in parts]
        how = "one after the other" if slice_s == own_s else f"in slices of {slice_s:g} s"
        lines.append(f"two runs of {own_s:g} s each {how} differ by {np.sqrt(np.mean(np.square(ratios))):.1%}")
    return "\n".join(lines)


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
    """The pairs and the searches, by case and load."""
    head = (
        "what",
        "second process",
        "claimed",
        "share (95 % exact)",
        "disturbed, so no claim",
        "rounds",
        "a round",
        "seconds each",
    )
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    said: list[str] = []
    cases = {"same": "A against A", "planted": "A against A with 15 % more work", "searches": "search of equal values"}
    cases[SEARCHES[1]] = "search of equal values, looks side by side"
    for case, words in cases.items():
        for busy in (False, True):
            of = [pair for pair in pairs if (pair["case"], pair["busy"]) == (case, busy)]
            if not of:
                continue
            hits = sum(pair["claimed"] for pair in of)
            low, high = exact_interval(hits, len(of))
            loud = sum((pair["why_not"] or "").startswith("disturbed") for pair in of)
            seconds = sum(pair["seconds"] for pair in of) / len(of)
            rounds = sum(pair["rounds"] for pair in of) / len(of)
            logs = [ratio for pair in of for ratio in pair.get("log_ratios", ())]
            spread = "-" if len(logs) < 2 else f"{np.std(logs, ddof=1):.1%}"
            lines.append(
                f"| {len(of)} x {words} | {'busy' if busy else 'none'} | {hits} | {hits / len(of):.1%} "
                f"({low:.1%} to {high:.1%}) | {loud} | {rounds:.1f} | {spread} | {seconds:.1f} |"
            )
            if case in SEARCHES:
                most = 1 - 0.05 ** (1 / len(of))
                word = "NOT met" if hits else f"on one side at most {most:.1%}: met"
                said.append(f"{words}: {hits} of {len(of)} claimed, aim 0; {word}")
            elif case == "same":
                word = "met" if high <= MOST_CLAIMED else "NOT met"
                said.append(f"{words}, upper end {high:.1%}, aim {MOST_CLAIMED:.0%}: {word}")
    return "\n".join([*lines, *("\n" + one for one in said)])


def main() -> None:
    """Measures what is left, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("same", "planted"), default="same")
    parser.add_argument("--pairs", type=int, default=200, help="in all, those measured before included")
    parser.add_argument("--searches", type=int, help="whole searches in all, those made before included; no pairs")
    parser.add_argument("--side-by-side", type=int, default=1, help="with --searches: so many looks at once")
    parser.add_argument("--busy", action="store_true", help="with a second busy process")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time; run it again to go on")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--core-speed", action="store_true", help="only record a core's speed, for 70 s")
    asked = parser.parse_args()
    if asked.core_speed:
        began = time.monotonic()
        print(core_table(record_core(70.0), time.monotonic() - began))
        return
    if not asked.table:
        case, busy = (SEARCHES[asked.side_by_side > 1], False) if asked.searches else (asked.case, asked.busy)
        done = sum((line["case"], line["busy"]) == (case, busy) for line in load())
        left = max(0, (asked.searches or asked.pairs) - done)
        RESULTS.parent.mkdir(exist_ok=True)
        if asked.searches:
            lines = run_searches(left, first=done, minutes=asked.minutes, parts=asked.side_by_side)
        else:
            lines = run_pairs(case, left, busy=busy, first=done, minutes=asked.minutes)
        for line in lines:
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(table(load()))


if __name__ == "__main__":
    main()
