"""Results from the lines of benchmarks/anytime.py: shares of the fastest, ratios, tables, curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from autoplan.strategies.config import TrainingConfig
from autoplan.units import parse_duration_s
from benchmarks.search_plot import draw_curves

MODEL = "gpt2"
HALF_S, WANTED, WANTED_AT_HALF = 300.0, 0.95, 0.9
"""The share of the fastest that a plan, and the best so far after HALF_S, is to reach."""

ZOO_WANTED, ZOO_RANKED = 1.15, 8
"""Our plans' speed over the other revision's in the geometric mean, and the looks that rank, at the median."""

Lines = Sequence[dict[str, Any]]


def key(line: dict[str, Any]) -> tuple[str, str, str]:
    """Of a search: the form, the workload, who searched."""
    return line["form"], line["name"], line["who"]


def configs_of(searches: Lines) -> list[dict[str, Any]]:
    """Configurations to measure side by side: plans, plain runs, and the best of each GPT-2 search at half its time."""
    found: list[dict[str, Any]] = []
    for line in searches:
        if line["workload"] is not None:
            found += [line["config"], line["plain"]]
        if line["form"] == "main" and at_half(line) is not None:
            found.append(at_half(line) or {})
    return [config for place, config in enumerate(found) if config not in found[:place]]


def at_half(line: dict[str, Any]) -> dict[str, Any] | None:
    """The best so far after HALF_S seconds of the process; None: there was none."""
    known = [point["config"] for point in line["curve"] if point["seconds"] <= HALF_S]
    config: dict[str, Any] | None = known[-1] if known else None
    return config


def rounds_with(lines: Lines, form: str, name: str, wanted: Lines) -> list[dict[str, Any]]:
    """The rounds in which all of these configurations ran beside each other."""
    rounds = [line for line in lines if line["kind"] == "round" and (line["form"], line["name"]) == (form, name)]
    return [line for line in rounds if all(any(run["config"] == c for run in line["runs"]) for c in wanted)]


def speeds(rounds: Lines) -> Callable[[dict[str, Any] | None], float]:
    """The speed of a configuration as a share of that of all of a round: the geometric mean over the rounds.

    0 where it did not run in all of them, or is none.
    """

    def of(config: dict[str, Any] | None) -> float:
        shares = []
        for line in rounds:
            own = [run["step_s"] for run in line["runs"] if run["config"] == config]
            if not own or None in own:
                return 0.0
            shares.append(_middle([run["step_s"] for run in line["runs"]]) / _middle(own))
        return statistics.geometric_mean(shares) if shares else 0.0

    return of


def _middle(steps_s: Sequence[float | None]) -> float:
    return statistics.geometric_mean([s for s in steps_s if s is not None])


# GPT-2.


def shares(lines: Lines) -> list[dict[str, Any]]:
    """For each search of GPT-2: the speed of its plan, of its best at half the time, and of its curve, as shares.

    Of the fastest configuration of all. A search that ended without a plan leaves the plain run. Points of a curve that
    did not run side by side are taken relative to the last one of the same search, by what that search measured.
    """
    searches = [line for line in lines if line["kind"] == "search" and line["form"] == "main"]
    rounds = rounds_with(lines, "main", MODEL, configs_of(searches))
    speed = speeds(rounds)
    fastest = max((speed(config) for config in configs_of(searches)), default=0.0) if rounds else 0.0
    plain = next((line["plain"] for line in searches if line["workload"]), None)
    found = []
    for line in searches:
        curve = line["curve"]
        last = curve[-1] if curve else None
        end = speed(last["config"]) if last else 0.0
        points = [
            (point["seconds"], (speed(point["config"]) or end * last["step_s"] / point["step_s"]) / fastest)
            for point in curve
            if fastest and last
        ]
        found.append(
            {
                "who": line["who"],
                "plan": speed(line["config"] if line["workload"] else plain) / fastest if fastest else None,
                "at_half": speed(at_half(line)) / fastest if fastest else None,
                "curve": points,
                "line": line,
            }
        )
    return found


def main_table(lines: Lines) -> str:
    """A row for each search of GPT-2, and whether what is aimed at was met."""
    found = shares(lines)
    rows = [
        "| search | plan, of the fastest | best so far at 5 m | first better than plain, s | looks that ranked "
        "| ended, s | speed-up | other work | plan |",
        "|" + "---|" * 9,
    ]
    for one in found:
        line = one["line"]
        better = line["curve"][1]["seconds"] if len(line["curve"]) > 1 else None
        cells = [one["who"], _share(one["plan"]), _share(one["at_half"]), "-" if better is None else f"{better:.0f}"]
        cells += [str(line["ranked"]), f"{line['seconds']:.0f}", _speedup(line), line["load"], _chose(line)]
        rows.append(f"| {' | '.join(cells)} |")
    ours = [one for one in found if one["who"].startswith("ours ") and one["plan"] is not None]
    if ours:
        good = sum(one["plan"] >= WANTED and one["at_half"] >= WANTED_AT_HALF for one in ours)
        rows.append(f"\nat least {WANTED} at the end and {WANTED_AT_HALF} at 5 m: {good} of {len(ours)} runs")
    return "\n".join(rows)


# The zoo.


def zoo_rows(lines: Lines, form: str = "zoo") -> list[dict[str, Any]]:
    """For each workload: our plan's speed over the plain run's and over the other plan's.

    A search that ended without a plan leaves its user the plain run.
    """
    found = []
    searches = [line for line in lines if line["kind"] == "search" and line["form"] == form]
    for name in dict.fromkeys(line["name"] for line in searches):
        by = {line["who"]: line for line in searches if line["name"] == name}
        rounds = rounds_with(lines, form, name, configs_of(list(by.values())))
        speed = speeds(rounds)
        mine, other = by.get("ours"), by.get("against")
        plain = next((line["plain"] for line in by.values() if line["workload"]), None)
        row: dict[str, Any] = {"name": name, "ours": mine, "against": other, "over_plain": None, "over_other": None}
        if rounds and plain is not None and mine is not None and speed(plain):
            own = speed(mine["config"] if mine["workload"] else plain)
            row["over_plain"] = own / speed(plain)
            theirs = 0.0 if other is None else speed(other["config"] if other["workload"] else plain)
            row["over_other"] = own / theirs if theirs else None
        found.append(row)
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Of ratios."""
    return math.exp(statistics.fmean(map(math.log, values)))


def zoo_table(lines: Lines, form: str = "zoo") -> str:
    """A row for each workload, and what is aimed at."""
    found = zoo_rows(lines, form)
    rows = ["| workload | ours over plain | ours over the other revision | looks that ranked | ours | the other |"]
    rows.append("|" + "---|" * 6)
    for row in found:
        mine = row["ours"]
        cells = [
            row["name"],
            _share(row["over_plain"]),
            _share(row["over_other"]),
            str(mine["ranked"] if mine else "-"),
        ]
        cells += [_chose(mine), _chose(row["against"])]
        rows.append(f"| {' | '.join(cells)} |")
    over = [row["over_other"] for row in found if row["over_other"] is not None]
    plain = [row["over_plain"] for row in found if row["over_plain"] is not None]
    ranked = [row["ours"]["ranked"] for row in found if row["ours"] is not None]
    if over:
        rows.append(
            f"\nover the other revision's plans, geometric mean of {len(over)}: {geometric_mean(over):.3f} "
            f"(aim {ZOO_WANTED})"
        )
    if plain:
        rows.append(f"\nover the plain run, the least of {len(plain)}: {min(plain):.3f} (aim 1)")
    if ranked:
        rows.append(f"\nlooks that ranked, median: {statistics.median(ranked):g} (aim {ZOO_RANKED})")
    return "\n".join(rows)


# Words.


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _speedup(line: dict[str, Any]) -> str:
    if not line["workload"]:
        return "-"
    median, low, high = line["speedup"]
    return f"{median:.2f} ({low:.2f} to {high:.2f})" + ("" if line["claimed"] else ", no claim")


def _chose(line: dict[str, Any] | None) -> str:
    if line is None:
        return "-"
    if not line["workload"]:
        return f"no plan ({line['status']})"
    return TrainingConfig.model_validate(line["config"]).describe()


def in_words(line: dict[str, Any]) -> str:
    return f"{line['seconds']:.0f} s, {_chose(line)}, speed-up {_speedup(line)}, {line['ranked']} looks, {line['load']}"


def curve_table(line: dict[str, Any]) -> str:
    """Each best so far of one search with its moment, and where the time went."""
    rows = ["| seconds from the start | best so far | times as fast as the first |", "|---|---|---|"]
    for point in line["curve"]:
        ratio = line["curve"][0]["step_s"] / point["step_s"]
        config = TrainingConfig.model_validate(point["config"]).describe()
        rows.append(f"| {point['seconds']:.0f} | {config} | {ratio:.2f} |")
    spent: dict[str, float] = {}
    for one in line["ledger"]:
        spent[one["kind"]] = spent.get(one["kind"], 0.0) + one["seconds"]
    return "\n".join([*rows, "", "; ".join(f"{kind} {seconds:.0f} s" for kind, seconds in spent.items())])


def drawing(lines: Lines) -> str:
    """The curves of the searches of GPT-2, ours together."""
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for one in shares(lines):
        if one["curve"]:
            name = "ours" if one["who"].startswith("ours ") else one["who"]
            end = parse_duration_s(one["line"]["budget"]), one["curve"][-1][1]
            curves.setdefault(name, []).append([*one["curve"], end])
    return draw_curves("GPT-2: speed of the best so far", curves, across="seconds from the start") if curves else ""
