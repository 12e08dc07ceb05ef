"""How many trials the cost model saves a search: tables of recorded trials, replayed by the search's own samplers.

    python -m benchmarks.trials_saved [--markdown] [folder]

benchmarks/search_tables.py records tables: candidates of a real space that were run for real, in several processes
each, so that their difference is the noise floor. The tables in results/trials_saved are of an earlier form of it: they
are bounded to a few knobs, and few of their candidates compile.

Replaying trains nothing (benchmarks/replay.py). Counted are the looks until one was at a configuration within the
tolerance of the best recorded, and until the search ends by itself. With a memory limit, a recorded peak above it
counts as out of memory. benchmarks/search_replay.py has regret and device seconds of the same replays.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna

from benchmarks.replay import SearchMethod, kept, make_estimator, replay
from benchmarks.trials_saved_record import LIMIT_BYTES, Recorded, read

RESULTS = Path(__file__).parent / "results" / "trials_saved"
TOLERANCE = 0.02

WAYS = (
    SearchMethod(name="ours", sampler="autoplan"),
    SearchMethod(name="ours, operations not timed", sampler="autoplan", model="untimed"),
    SearchMethod(name="ours, no cost model", sampler="autoplan", model="none", drops=False),
    SearchMethod(name="tpe", sampler="tpe"),
    SearchMethod(name="random", sampler="random"),
    SearchMethod(name="random, nothing dropped", sampler="random", drops=False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """How one replay went. Trials and seconds until the target is reached (None: it was not), and until the end.

    `regret`: how much slower than the best recorded the best of all its trials is.
    """

    to_target: int | None
    seconds_to_target: float | None
    trials: int
    seconds: float
    regret: float


def replay_trials(
    recorded: Recorded, way: SearchMethod, number: int, *, limit_bytes: int = LIMIT_BYTES, to_end: bool = True
) -> Replay:
    """One search over what was recorded (`replay`), with all the time; without `to_end` it ends at the target."""
    seconds = np.where(recorded.peaks <= limit_bytes, recorded.seconds, math.inf)
    truth = dict(zip(recorded.candidates, seconds.tolist(), strict=True))
    goal = min(truth.values()) * (1 + tolerance(recorded))
    whole_s = 10 * sum(trial.seconds_spent for trial in recorded.rounds[0])
    reached: tuple[int, float] | None = None
    looks, spent, regret = 0, 0.0, math.inf
    for moment in replay(recorded, way, number, budget_s=whole_s, limit_bytes=limit_bytes):
        looks, spent = moment.looks, moment.seconds
        tried = min(truth[trial.config] for trial in moment.trials)
        regret = tried / min(truth.values()) - 1
        if reached is None and tried <= goal:
            reached = looks, spent
            if not to_end:
                break
    return Replay(
        to_target=reached[0] if reached else None,
        seconds_to_target=reached[1] if reached else None,
        trials=looks,
        seconds=spent,
        regret=regret,
    )


def tolerance(recorded: Recorded) -> float:
    """How near to the best is near enough: 2 %, or the noise floor of the record."""
    return max(TOLERANCE, recorded.noise)


def replays(recorded: Recorded, way: SearchMethod, draws: int, limit_bytes: int = LIMIT_BYTES) -> list[Replay]:
    """As many as there are draws. Only ours ends by itself before nothing is left, so the others end at the target."""
    ours = way.sampler == "autoplan"
    return [replay_trials(recorded, way, number, limit_bytes=limit_bytes, to_end=ours) for number in range(draws)]


# Tables.


def limits(recorded: Recorded) -> list[int]:
    """Three memory limits: the measured peaks' quarter, half and three quarters."""
    return [int(limit) for limit in np.quantile(recorded.peaks, [0.25, 0.5, 0.75])]


def middle(values: Sequence[float | None]) -> str:
    """Median and range; what is None is above all others."""
    numbers = [math.inf if value is None else value for value in values]
    marks = np.quantile(numbers, [0, 0.5, 1], method="lower")
    low, half, high = (f"{value:.0f}" if value < math.inf else "-" for value in marks)
    return f"{half} ({low} to {high})"


def show(folder: Path, *, draws: int, markdown: bool) -> None:
    """Prints both tables of each workload."""

    def line(cells: Sequence[str], *, head: bool = False) -> None:
        print(f"| {' | '.join(cells)} |" if markdown else " | ".join(cells), flush=True)
        if head and markdown:
            print("|" + "---|" * len(cells))

    found = read(folder)
    if not found:
        print(f"nothing is recorded in {folder}: python -m benchmarks.search_tables records tables")
    for recorded in found:
        near = tolerance(recorded)
        print(f"\n{about(recorded)}\n")
        head = ["search", "memory limit", "candidates", "found", f"trials to within {near:.1%}", "seconds until then"]
        line([*head, "trials until it ends", "seconds", "regret then"], head=True)
        for limit in (LIMIT_BYTES, limits(recorded)[1]):
            for way in WAYS:
                if limit < LIMIT_BYTES or way.name != "random, nothing dropped":
                    line(_row(recorded, way, limit, draws))
        print()
        head = ["memory limit", "dropped", "of these over", "fits: ran", "over", "too close: ran", "over"]
        line([*head, "does not fit: ran", "over"], head=True)
        for limit in limits(recorded):
            line(_confusion(recorded, limit))


def about(recorded: Recorded) -> str:
    """A paragraph on what was recorded."""
    best, near = recorded.seconds.min(), tolerance(recorded)
    compiled = sum(config.compile != "off" for config in recorded.candidates)
    within = f" within {' '.join(recorded.bounds)}" if recorded.bounds else ""
    return (
        f"{recorded.name}: {len(recorded.candidates)} candidates ({compiled} compiled) of {recorded.legal}{within}; "
        f"its processes are {recorded.noise:.1%} apart (median; more than 25 %: "
        f"{np.sum(recorded.apart > 0.25)} of {len(recorded.apart)}); the best takes {best:.3f} s, "
        f"{np.sum(recorded.seconds <= best * (1 + near))} are within {near:.1%} of it"
    )


def _row(recorded: Recorded, way: SearchMethod, limit: int, draws: int) -> list[str]:
    done = replays(recorded, way, draws, limit)
    estimator = make_estimator(recorded, way.model, limit)
    count = len(kept(recorded, estimator, limit) if way.drops else recorded.candidates)
    found = sum(one.to_target is not None for one in done)
    cells = [way.name, "none" if limit == LIMIT_BYTES else f"{limit >> 20} MiB", str(count), f"{found} of {len(done)}"]
    cells += [middle([one.to_target for one in done]), middle([one.seconds_to_target for one in done])]
    if way.sampler != "autoplan":
        return [*cells, f"{count} (all)", "-", "-"]
    worst = max(one.regret for one in done)
    return [*cells, middle([one.trials for one in done]), middle([one.seconds for one in done]), f"at most {worst:.1%}"]


def _confusion(recorded: Recorded, limit: int) -> list[str]:
    """A row of what a search's model says of the candidates before a first trial, beside the measured peaks."""
    estimator = make_estimator(recorded, "search", limit)
    verdicts = [prediction.verdict for prediction in estimator.estimate(recorded.candidates)]
    over = recorded.peaks > limit
    counts = Counter(zip(verdicts, over.tolist(), strict=True))
    stays = set(kept(recorded, estimator, limit))
    dropped = [config not in stays for config in recorded.candidates]
    cells = [f"{limit >> 20} MiB", str(sum(dropped)), str(int(np.sum(over & dropped)))]
    for verdict in ("fits", "too_close", "does_not_fit"):
        cells += [str(counts[verdict, False]), str(counts[verdict, True])]
    return cells


def main() -> None:
    """Replays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--draws", type=int, default=20, help="replays of each sampler that draws")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    show(options.folder, draws=options.draws, markdown=options.markdown)


if __name__ == "__main__":
    main()
