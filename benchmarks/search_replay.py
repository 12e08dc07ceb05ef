"""Replays searches over recorded tables: ours, Optuna's TPE, random; device seconds, looks, regret, a plot.

    python -m benchmarks.search_replay [--seeds 50] [--methods ours tpe random] [--plot F] [FOLDER ...]

The tables are those of benchmarks/search_tables.py: every candidate ran for real, in several processes. A search
chooses among a table's candidates alone and decides as a live one (benchmarks/replay.py): each of its runs draws one of
the recorded processes, and the time goes by what it took. How good the configuration is that it would hand over, is
judged by all processes: the geometric mean of a candidate's step times. All methods have the same pieces of work; they
differ in the candidate that is looked at next: the others are those of `autoplan search --sampler`.

The regret is that of a search whose budget is a tenth of the device time of all candidates, parity check and claim
included. It is taken against the best that is affordable in that time: whose look and parity check fit beside the plain
run, as recorded. That is what every plan needs. A claim takes more, which may put the best out of reach of a search
that keeps room for it; and a check may end past the budget, which makes a regret negative.
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

from autoplan.planner.search.next_work import Work
from autoplan.planner.search.options import SamplerName
from autoplan.planner.search.references import plain_configs
from autoplan.planner.search.state import check_s
from autoplan.planner.search.work import do
from autoplan.strategies.config import TrainingConfig
from benchmarks.recorded import EARLIER, Recorded, read
from benchmarks.replay import compile_s, open_session, replay
from benchmarks.search_plot import draw_curves
from benchmarks.search_tables import TABLES

LEVELS = (0.95, 0.98, 0.99)
METHODS: dict[str, SamplerName] = {"ours": "autoplan", "tpe": "tpe", "random": "random"}
BUDGET_SHARE = 0.1
"""Of the device time of all candidates: at which the regret is read."""

MOST_REGRET = {50: 0.02, 90: 0.05}
"""By percentile: the regret that is aimed at, beyond the table's own spread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where a search stands after a piece of work.

    Attributes:
        trials: So many configurations it has looked at.
        seconds: Device seconds that are spent.
        share: The speed of what it would hand over now, of that of the best candidate; 0: it has nothing.
    """

    trials: int
    seconds: float
    share: float


def curve(
    recorded: Recorded, sampler: SamplerName, number: int, budget_s: float, *, to_end: bool = True
) -> list[Point]:
    """One search, piece by piece; without `to_end` it ends where all LEVELS are reached."""
    truth = dict(zip(recorded.candidates, recorded.seconds.tolist(), strict=True))
    best = min(truth.values())
    points: list[Point] = []

    for moment in replay(recorded, sampler, number, budget_s=budget_s):
        share = 0.0 if moment.leader is None else best / truth[moment.leader]
        points.append(Point(trials=moment.looks, seconds=moment.seconds, share=share))
        if not to_end and all(reached(points, level) for level in LEVELS):
            break
    return points


def all_seconds(recorded: Recorded) -> float:
    """The seconds that trials of all candidates took in the first round, with nothing in the compile cache."""
    return sum(trial.seconds_spent for trial in recorded.rounds[0])


def affordable_share(recorded: Recorded, budget_s: float) -> float:
    """The speed of the best that is affordable in a time, of that of the best candidate.

    By what was recorded: the plain run and its look; and the parity check as it is predicted.
    """
    session = open_session(recorded, "autoplan", 0, math.inf)
    truth = dict(zip(recorded.candidates, recorded.seconds.tolist(), strict=True))
    looks = {config: max(trial.seconds_spent for trial in trials) for config, trials in recorded.processes.items()}
    plain_s = 0.0
    if recorded.plain:
        plain = next(c for c in plain_configs(session) if truth[c] < math.inf)
        do(session, Work(kind="baseline", config=plain))
        plain_s = looks[plain]

    def needed_s(config: TrainingConfig) -> float:
        return plain_s if config == session.plain_config else plain_s + looks[config] + check_s(session, config)

    within = [seconds for config, seconds in truth.items() if needed_s(config) <= budget_s]
    return min(truth.values()) / min(within, default=math.inf)


def reached(points: Sequence[Point], level: float) -> Point | None:
    """Where a search first has a configuration with this share of the best speed; None: nowhere."""
    return next((point for point in points if point.share >= level), None)


def regret_of(points: Sequence[Point], affordable: float) -> float:
    """How much slower than the best that was affordable is what a search handed over; infinite if it had nothing."""
    return affordable / points[-1].share - 1 if points and points[-1].share > 0 else math.inf


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent are not above; infinite ones count as any other."""
    return float(np.quantile(values, percent / 100, method="inverted_cdf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Figures from the replays of one method on one table.

    Attributes:
        name: Of the method.
        curves: One for each replay.
        to_level: By level: the median trials and device seconds until it is reached, and how many reached it. Replays
            that never did count as infinite.
        regrets: By percentile: the regret with a tenth of the time.
    """

    name: str
    curves: list[list[Point]]
    to_level: dict[float, tuple[float, float, int]]
    regrets: dict[int, float]


def score(recorded: Recorded, name: str, seeds: int) -> Score:
    """Replays one method on one table."""
    whole_s, sampler = all_seconds(recorded), METHODS[name]
    curves = [curve(recorded, sampler, seed, whole_s, to_end=sampler == "autoplan") for seed in range(seeds)]
    brief = [curve(recorded, sampler, seed, BUDGET_SHARE * whole_s) for seed in range(seeds)]
    return score_of(name, curves, brief, affordable_share(recorded, BUDGET_SHARE * whole_s))


def score_of(name: str, curves: list[list[Point]], brief: Sequence[Sequence[Point]], affordable: float) -> Score:
    """Figures from some searches; `brief`: those with a tenth of the time, which give the regret."""
    to_level = {}
    for level in LEVELS:
        found = [reached(points, level) for points in curves]
        trials = percentile([point.trials if point else math.inf for point in found], 50)
        seconds = percentile([point.seconds if point else math.inf for point in found], 50)
        to_level[level] = trials, seconds, sum(point is not None for point in found)
    regrets = [regret_of(points, affordable) for points in brief]
    return Score(
        name=name,
        curves=curves,
        to_level=to_level,
        regrets={percent: percentile(regrets, percent) for percent in MOST_REGRET},
    )


# What is printed.


def table(scores: Sequence[Score]) -> str:
    """A row for each method, in Markdown."""
    head = ["search", "replays", *(f"to {level:.0%}: looks / device s / reached" for level in LEVELS)]
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
    ours = next((one for one in scores if one.name == "ours"), None)
    if ours is None:
        return []
    said = []
    for percent, most in MOST_REGRET.items():
        value, spread = ours.regrets[percent], recorded.noise
        word = "met" if value <= most + spread else "NOT met"
        shown = f"{value:.1%}" if value < math.inf else "nothing yet"
        said.append(
            f"regret, {percent}th percentile: {shown}, aim {most:.0%} beyond the spread of {spread:.1%}: {word}"
        )
    return said


def passes(recorded: Recorded) -> str:
    """A sentence on what the table itself can tell."""
    total_s = all_seconds(recorded)
    affordable = affordable_share(recorded, BUDGET_SHARE * total_s)
    compiling_s = sum(compile_s(trial) for trial in recorded.rounds[0])
    return (
        f"all candidates take {total_s:.0f} device seconds ({compiling_s:.0f} of them compiling), a tenth is "
        f"{BUDGET_SHARE * total_s:.0f}, in which the best that is affordable has {affordable:.1%} of the best speed; "
        f"{len(recorded.rounds)} processes of each differ by {recorded.noise:.1%} (median) and "
        f"{percentile(recorded.apart.tolist(), 90):.1%} (90th percentile); "
        f"disturbed: {recorded.disturbed} of {len(recorded.rounds) * len(recorded.candidates)}"
        + (f"; NOT FINISHED: {len(recorded.candidates)} of {recorded.planned}" * (not recorded.finished))
    )


def show(folders: Sequence[Path], methods: Sequence[str], seeds: int, plots: Path | None) -> int:
    """Prints what the replays of each table show; returns how many tables there are."""
    tables = [recorded for folder in folders for recorded in read(folder)]
    for recorded in tables:
        print(f"\n{recorded.describe()}; {passes(recorded)}\n", flush=True)
        scores = [score(recorded, name, seeds) for name in methods]
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
    parser.add_argument("folders", type=Path, nargs="*", default=[EARLIER, TABLES], help="of tables")
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
