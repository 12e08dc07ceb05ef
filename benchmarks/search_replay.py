"""Replays searches over recorded tables: ours, Optuna's TPE and GP, random; device seconds, trials, regret, a plot.

    python -m benchmarks.search_replay [--seeds 50] [--methods ours tpe gp random] [--plot FOLDER] [FOLDER ...]

The tables are those of benchmarks/search_tables.py (every candidate of a table ran for real, twice); a search chooses
among a table's candidates alone, and each trial is answered with what was recorded (benchmarks/trials_saved.py). After
each trial a search would hand over the fastest that it has seen, in the one pass that it sees. How good that is, is
judged by both passes: the geometric mean of a candidate's step times. A trial costs what it took in the first pass,
where nothing was in the compile cache. The other samplers have no cost model; they choose among what is left of the
table (benchmarks/replay_samplers.py). Ours draws nothing, so its starts and passes are all the replays there are of it.

The regret at a tenth of the device time of all candidates is that of a search which is told that time, as any search of
ours is. The others cannot make use of it: they do not know what a trial will cost.

Not in a replay: the probes and the trace (some seconds of each search of ours), the finalists' runs, parity, the claim.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna

from benchmarks.search_plot import draw_curves
from benchmarks.search_tables import TABLES
from benchmarks.trials_saved import RESULTS, SearchMethod, about, walk
from benchmarks.trials_saved_record import Recorded, read

LEVELS = (0.95, 0.98, 0.99)
METHODS = {
    "ours": SearchMethod(name="ours", sampler="autoplan"),
    "tpe": SearchMethod(name="tpe", sampler="tpe", drops=False),
    "gp": SearchMethod(name="gp", sampler="gp", drops=False),
    "random": SearchMethod(name="random", sampler="random", drops=False),
}
BUDGET_SHARE = 0.1
"""Of the device time of all candidates: at which the regret is read."""

MOST_REGRET = {50: 0.02, 90: 0.05}
"""By percentile: the regret that is aimed at, beyond the table's own spread."""

TIMES_LESS = 5.0
"""How many times less device time than TPE and random need to 95 % is aimed at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where a search stands after a trial.

    Attributes:
        trials: So many it has run.
        seconds: Device seconds that they took.
        share: The speed of what it would hand over now, of that of the best candidate; 0: it has nothing.
    """

    trials: int
    seconds: float
    share: float


def curve(recorded: Recorded, way: SearchMethod, number: int, *, known_s: float = math.inf) -> list[Point]:
    """One search, trial by trial; it ends where nothing that is counted could change any more.

    `number` is its seed, and says the plain run it starts with and the pass that it sees. `known_s`: the time that it
    is told to have.
    """
    truth = dict(zip(recorded.candidates, recorded.seconds.tolist(), strict=True))
    cost = first_seconds(recorded)
    best, budget_s = min(truth.values()), BUDGET_SHARE * sum(cost.values())
    points: list[Point] = []
    spent, fastest, share = 0.0, math.inf, 0.0

    def left_s() -> float:
        return known_s - (points[-1].seconds if points else 0.0)

    for seen, trial in walk(recorded, way, number, left_s=left_s):
        spent += cost[trial.config]
        if seen.step_time_s is not None and seen.outcome == "ok" and seen.step_time_s.median < fastest:
            fastest, share = seen.step_time_s.median, best / truth[trial.config]
        points.append(Point(trials=len(points) + 1, seconds=spent, share=share))
        if spent > budget_s and all(reached(points, level) for level in LEVELS) and way.sampler != "autoplan":
            break
    return points


def first_seconds(recorded: Recorded) -> dict[object, float]:
    """By candidate: the seconds that its trial of the first pass took."""
    return {trial.config: trial.seconds_spent for trial in recorded.rounds[0]}


def reached(points: Sequence[Point], level: float) -> Point | None:
    """Where a search first has a configuration with this share of the best speed; None: nowhere."""
    return next((point for point in points if point.share >= level), None)


def regret_at(points: Sequence[Point], budget_s: float) -> float:
    """How much slower than the best is what a search would hand over after so many device seconds.

    Infinite, where no trial had ended by then.
    """
    done = [point.share for point in points if point.seconds <= budget_s]
    return 1 / done[-1] - 1 if done and done[-1] > 0 else math.inf


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent are not above; infinite ones count as any other."""
    return float(np.quantile(values, percent / 100, method="inverted_cdf"))


def one_pass_regret(recorded: Recorded) -> float:
    """The regret of who tries every candidate once and takes the fastest: chance alone; the worse of both passes."""
    truth = recorded.seconds
    seen = [[t.step_time_s.median if t.step_time_s else math.inf for t in trials] for trials in recorded.rounds]
    return max(float(truth[int(np.argmin(times))] / truth.min() - 1) for times in seen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What the replays of one method on one table show.

    Attributes:
        name: Of the method.
        curves: One for each replay.
        to_level: By level: the median trials and device seconds until it is reached, and how many reached it. Replays
            that never did count as infinite.
        regrets: By percentile: the regret at the budget.
    """

    name: str
    curves: list[list[Point]]
    to_level: dict[float, tuple[float, float, int]]
    regrets: dict[int, float]


def score(recorded: Recorded, way: SearchMethod, seeds: int) -> Score:
    """Replays one method on one table."""
    count = min(seeds, 2 * max(1, len(recorded.plain))) if way.sampler == "autoplan" else seeds
    curves = [curve(recorded, way, number) for number in range(count)]
    budget_s = BUDGET_SHARE * sum(first_seconds(recorded).values())
    within = None
    if way.sampler == "autoplan":  # as any search of ours, it knows the time that it has
        within = [curve(recorded, way, number, known_s=budget_s) for number in range(count)]
    return score_of(way.name, curves, budget_s, within)


def score_of(
    name: str, curves: list[list[Point]], budget_s: float, within: Sequence[Sequence[Point]] | None = None
) -> Score:
    """What some searches show. `within`: the searches that the regret is read from, where they are others."""
    to_level = {}
    for level in LEVELS:
        found = [reached(points, level) for points in curves]
        trials = percentile([point.trials if point else math.inf for point in found], 50)
        seconds = percentile([point.seconds if point else math.inf for point in found], 50)
        to_level[level] = trials, seconds, sum(point is not None for point in found)
    regrets = [regret_at(points, budget_s) for points in within or curves]
    return Score(
        name=name,
        curves=curves,
        to_level=to_level,
        regrets={percent: percentile(regrets, percent) for percent in MOST_REGRET},
    )


# What is printed.


def table(scores: Sequence[Score]) -> str:
    """A row for each method, in Markdown."""
    head = ["search", "replays", *(f"to {level:.0%}: trials / device s / reached" for level in LEVELS)]
    head += [f"regret at a tenth: {percent}th percentile" for percent in MOST_REGRET]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for one in scores:
        cells = [one.name, str(len(one.curves))]
        for trials, seconds, count in one.to_level.values():
            cells.append(f"{figure(trials)} / {figure(seconds)} / {count}")
        cells += [f"{value:.1%}" if value < math.inf else "nothing yet" for value in one.regrets.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(value: float) -> str:
    """A count or seconds; what was never reached is a dash."""
    return f"{value:.0f}" if value < math.inf else "-"


def verdicts(recorded: Recorded, scores: Sequence[Score]) -> list[str]:
    """Sentences: what was aimed at, and whether it was met."""
    by_name = {one.name: one for one in scores}
    if "ours" not in by_name:
        return []
    ours, spread = by_name["ours"], recorded.noise
    said = []
    for percent, most in MOST_REGRET.items():
        value = ours.regrets[percent]
        word = "met" if value <= most + spread else "NOT met"
        shown = f"{value:.1%}" if value < math.inf else "nothing yet"
        said.append(
            f"regret, {percent}th percentile: {shown}, aim {most:.0%} beyond the spread of {spread:.1%}: {word}"
        )
    for other in ("tpe", "random"):
        if other in by_name:
            mine, theirs = ours.to_level[0.95][1], by_name[other].to_level[0.95][1]
            ratio = theirs / mine if mine < math.inf else 0.0
            word = "met" if ratio >= TIMES_LESS else "NOT met"
            said.append(f"95 % of the best with {ratio:.1f} times less device time than {other}, aim 5: {word}")
    return said


def passes(recorded: Recorded) -> str:
    """A sentence on what the table itself can tell."""
    total = sum(first_seconds(recorded).values())
    return (
        f"all candidates take {total:.0f} device seconds, a tenth is {BUDGET_SHARE * total:.0f}; "
        f"the two passes differ by {recorded.noise:.1%} (median) and "
        f"{percentile(recorded.apart.tolist(), 90):.1%} (90th percentile); who tries all once and takes the fastest is "
        f"up to {one_pass_regret(recorded):.1%} off; disturbed: {recorded.disturbed} of {2 * len(recorded.candidates)}"
        + (f"; NOT FINISHED: {len(recorded.candidates)} of {recorded.planned}" * (not recorded.finished))
    )


def show(folders: Sequence[Path], methods: Sequence[str], seeds: int, plots: Path | None) -> int:
    """Prints what the replays of each table show; returns how many tables there are."""
    tables = [recorded for folder in folders for recorded in read(folder)]
    for recorded in tables:
        print(f"\n{about(recorded)}; {passes(recorded)}\n", flush=True)
        scores = [score(recorded, METHODS[name], seeds) for name in methods]
        print(table(scores))
        print("".join(f"\n- {said}" for said in verdicts(recorded, scores)), flush=True)
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
            path = plots / f"{recorded.name}.svg"
            curves = {one.name: [[(p.seconds, p.share) for p in points] for points in one.curves] for one in scores}
            path.write_text(draw_curves(f"{recorded.name}: speed of the best so far", curves))
            print(f"\nplot: {path}")
    return len(tables)


def main() -> None:
    """Replays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", default=[RESULTS, TABLES], help="of tables")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write a drawing of each table there")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    if not show(options.folders, options.methods, options.seeds, options.plot):
        print("no table is recorded here; record one with: python -m benchmarks.search_tables --case gpt --ranks 1")


if __name__ == "__main__":
    main()
