"""How many candidates two parts of a machine look at in the time in which one part does.

    python -m benchmarks.side_by_side --pairs 3               # again and again: it goes on
    python -m benchmarks.side_by_side --table

A pair is two searches of the same training with the same budget, each from nothing, in an order that is drawn: one on a
part of the cores, one look after the other; and one on as many such parts as `--side-by-side` has. Nothing is compiled:
in a minute that would be one look. Looks are counted up to the moment at which the first of the two made its last one,
from the end of the plain run on. The setup and the plain run before it, and pairs, parity and claim after it, are alike
in both.

Each pair is a line of benchmarks/results/side_by_side.jsonl. It says little if other work runs on the cores:
`disturbed` is how many runs had some.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from autoplan.planner.search.options import SearchOptions, SearchResult
from autoplan.planner.search.run import run_search
from autoplan.planner.trials.parts import by_place, equal_shares
from autoplan.probes.run import read_host_profile
from benchmarks.search_cases import CASES, case_spec

RESULTS = Path(__file__).parent / "results" / "side_by_side.jsonl"
BUDGET_S = 120.0
FIX = {"compile": "off"}
AIM = 1.7
"""Times as many looks on two parts."""


def one_search(case: str, folder: Path, cores: list[int], *, parts: int, budget_s: float, seed: int) -> SearchResult:
    """A search of a case on some cores, with a store of its own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return run_search(
            SearchOptions(
                spec=case_spec(case, folder),
                budget=budget_s,
                device="cpu",
                fix=FIX,
                store=folder / f"store-{parts}",
                seed=seed,
                side_by_side=parts,
            )
        )
    finally:
        os.sched_setaffinity(0, before)


def ends_of_looks(result: SearchResult) -> list[float]:
    """When each look ended, in seconds from the end of the plain run on."""
    began_s = max(line.began_s + line.seconds for line in result.ledger if line.kind == "baseline")
    return sorted(line.began_s + line.seconds - began_s for line in result.ledger if line.kind == "look")


def run_pair(case: str, parts: int, *, budget_s: float, seed: int) -> dict[str, Any]:
    """Both searches of a pair, and what they made."""
    cores = by_place(os.sched_getaffinity(0))
    share = list(equal_shares(cores, parts)[0])
    order = [1, parts]
    random.Random(seed).shuffle(order)
    found: dict[int, SearchResult] = {}
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as scratch:
        for count in order:
            on = share if count == 1 else cores
            found[count] = one_search(case, Path(scratch), on, parts=count, budget_s=budget_s, seed=seed)
    ends = {count: ends_of_looks(result) for count, result in found.items()}
    until_s = min((made[-1] for made in ends.values() if made), default=0.0)
    looks = {count: sum(end_s <= until_s for end_s in made) for count, made in ends.items()}
    return {
        "case": case,
        "parts": parts,
        "cores": len(share),
        "cpu": read_host_profile().host.cpu_model,
        "budget_s": budget_s,
        "until_s": round(until_s, 1),
        "looks": [looks[1], looks[parts]],
        "all_looks": [len(ends[1]), len(ends[parts])],
        "ratio": round(looks[parts] / max(1, looks[1]), 3),
        "slower_beside": round(_plain_s(found[parts]) / _plain_s(found[1]), 3),
        "speedups": [None if r.plan is None else round(r.plan.speedup.median, 3) for r in (found[1], found[parts])],
        "disturbed": [sum(t.disturbed is not None for t in r.trials) for r in (found[1], found[parts])],
        "seconds": [round(r.spent_s, 1) for r in (found[1], found[parts])],
    }


def _plain_s(result: SearchResult) -> float:
    step = None if result.baseline is None else result.baseline.step_time_s
    return float("nan") if step is None else step.median


def load() -> list[dict[str, Any]]:
    """The pairs that were measured so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table(pairs: list[dict[str, Any]]) -> str:
    """The pairs, and whether the aim is met."""
    head = ("case", "parts", "looks one after the other", "side by side", "ratio", "a plain step beside its copies")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [
        f"| {one['case']} | {one['parts']} x {one['cores']} core(s) | {one['looks'][0]} in {one['until_s']} s "
        f"| {one['looks'][1]} | {one['ratio']:.2f} | {one['slower_beside']:.2f} times |"
        for one in pairs
    ]
    ratios = [one["ratio"] for one in pairs if one["parts"] == 2]
    if ratios:
        middle = statistics.median(ratios)
        lines.append(f"\nmedian {middle:.2f}, aim {AIM}: {'met' if middle >= AIM else 'NOT met'}")
    return "\n".join(lines)


def main() -> None:
    """Measures what is left, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="gpt")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3, help="in all, those measured before included")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of each search")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time; run it again")
    parser.add_argument("--table", action="store_true", help="only print the table")
    asked = parser.parse_args()
    ends_at = time.monotonic() + 60 * asked.minutes
    same = [one for one in load() if all(one[name] == getattr(asked, name) for name in ("case", "parts"))]
    for seed in range(len(same), 0 if asked.table else asked.pairs):
        if time.monotonic() > ends_at:
            break
        line = run_pair(asked.case, asked.parts, budget_s=asked.budget, seed=seed)
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print(table(load()))


if __name__ == "__main__":
    main()
