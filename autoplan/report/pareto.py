"""The front of throughput and memory over a plan's measured trials: what one search says of both at once."""

from __future__ import annotations

from typing import NamedTuple

from autoplan.planner.plan.plan import Plan
from autoplan.planner.search.selection import collect_runs
from autoplan.report.facts import Rows
from autoplan.strategies.config import TrainingConfig
from autoplan.units import format_bytes, format_number


class Point(NamedTuple):
    """A configuration that no other beats in both throughput and memory.

    Attributes:
        config: The configuration.
        items_per_s: Tokens (or samples) a second: the median over its runs.
        peak_memory_bytes: The highest peak of its runs, of one rank.
        share: Of the best throughput.
        cost_per_million: What a million tokens (or samples) cost; None without a price.
    """

    config: TrainingConfig
    items_per_s: float
    peak_memory_bytes: int
    share: float
    cost_per_million: float | None


def pareto_front(plan: Plan) -> list[Point]:
    """The front, fastest first; empty where no trial has a peak.

    Left out are configurations that failed parity, and those whose loss was not the baseline's and that no check
    passed. Only the plan's own parity is known to have passed: another point is checked when a search makes it the
    plan (`--objective memory --min-throughput SHARE`).
    """
    found = []
    for runs in (one.reported for one in collect_runs(plan.evidence)):
        items = [run.items_per_step for run in runs.runs if run.items_per_step]
        rates = [run.tokens_per_s.median for run in runs.runs if run.tokens_per_s is not None]
        doubtful = runs.config != plan.config and any(run.loss_differs for run in runs.runs)
        if not rates or not runs.peak_memory_bytes or doubtful or runs.config in plan.failed_parity:
            continue
        rate = sum(items) / len(items) / runs.step_time.median if items else sorted(rates)[len(rates) // 2]
        found.append((rate, runs.peak_memory_bytes, runs.config))
    best = max((rate for rate, _, _ in found), default=0.0)
    front: list[Point] = []
    for rate, memory, config in sorted(found, key=lambda one: (-one[0], one[1])):
        if not front or memory < front[-1].peak_memory_bytes:
            cost = plan.objective.cost_per_million(rate, config.world_size)
            front.append(Point(config, rate, memory, rate / best, cost))
    return front


def pareto_rows(plan: Plan) -> Rows:
    """The front as a table."""
    unit, priced = plan.workload.unit, plan.objective.price_per_hour is not None
    rows: list[tuple[str, ...]] = [
        (
            point.config.describe() + (" (plan)" if point.config == plan.config else ""),
            format_number(point.items_per_s),
            f"{point.share:.0%}",
            format_bytes(point.peak_memory_bytes),
            *([format_number(point.cost_per_million)] if point.cost_per_million is not None else []),
        )
        for point in pareto_front(plan)
    ]
    cost = (f"cost of a million {unit}",) if priced else ()
    return Rows(("throughput against memory", f"{unit}/s", "of the best", "peak memory", *cost), rows)


def pareto_document(plan: Plan) -> list[dict[str, object]]:
    """The front for programs."""
    return [
        {
            "config": point.config.model_dump(mode="json"),
            f"{plan.workload.unit}_per_s": point.items_per_s,
            "share_of_best": point.share,
            "peak_memory_bytes": point.peak_memory_bytes,
            "cost_per_million": point.cost_per_million,
            "is_plan": point.config == plan.config,
        }
        for point in pareto_front(plan)
    ]
