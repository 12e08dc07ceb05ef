"""Drawings as inline SVG: a plan's best so far, its speed against memory, and time against cost of what to rent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.report.estimate import describe_option
from autoplan.report.facts import baseline_name
from autoplan.strategies.config import TrainingConfig
from autoplan.units import format_bytes, format_number, format_seconds

WIDTH = 900
LEFT = 92
"""Where the upward axis is: a figure has room beside it in the larger letters that a narrow screen gets."""

LETTER = 14
"""The width of a letter there."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


def kind_of(plan: Plan, trial: Trial) -> str:
    """`best` of the plan's own trials, `plain` of the baseline's, `hand` of the hand setting's; `other`."""
    if trial.config == plan.config:
        return "best"
    if trial.config == plan.baseline.config:
        return "plain"
    return "hand" if plan.hand is not None and trial.config == plan.hand.config else "other"


def draw_best_so_far(plan: Plan) -> str:
    """A dot for the rate of each measured trial at its end, and the fastest so far as a line. Empty without two."""
    dots, clock = [], 0.0
    for trial in plan.evidence:
        clock += trial.seconds_spent
        if trial.outcome is Outcome.OK and trial.tokens_per_s is not None:
            dots.append((clock, trial.tokens_per_s.median, trial))
    if len(dots) < 2:
        return ""
    chart = Chart("The best so far", max(at for at, _, _ in dots), max(rate for _, rate, _ in dots), 280)
    best, path = 0.0, ""
    for at, rate, _ in dots:
        x = chart.x(at)
        path += f"H{x:.1f}" if path else f"M{x:.1f} {chart.y(0):.1f}"
        if rate > best:
            best, path = rate, f"{path}V{chart.y(rate):.1f}"
    parts = [*chart.axes(format_seconds, f"{plan.workload.unit}/s, over time in trials")]
    parts.append(f'<path d="{path}" fill="none" stroke="var(--best)" stroke-width="2"/>')
    parts += [chart.dot(plan, trial, at, rate) for at, rate, trial in dots]
    return "".join([*parts, "</svg>"])


def draw_tradeoff(plan: Plan) -> str:
    """A dot per configuration: peak memory across, rate up, the median of its trials. Empty with fewer than three."""
    runs: dict[TrainingConfig, list[Trial]] = {}
    for trial in plan.evidence:
        if trial.outcome is Outcome.OK and trial.tokens_per_s is not None and trial.peak_memory_bytes:
            runs.setdefault(trial.config, []).append(trial)
    points = [
        (
            median(one.peak_memory_bytes or 0 for one in same),
            median(one.tokens_per_s.median for one in same if one.tokens_per_s is not None),
            same[0],
        )
        for same in runs.values()
    ]
    if len(points) < 3:
        return ""
    chart = Chart("Speed against memory", max(memory for memory, _, _ in points), max(r for _, r, _ in points), 340)
    parts = [*chart.axes(format_bytes, f"{plan.workload.unit}/s, over peak memory")]
    parts += [chart.dot(plan, trial, memory, rate) for memory, rate, trial in points]
    places = [(chart.x(memory), chart.y(rate)) for memory, rate, _ in points]
    names = {"best": " plan", "plain": f" {baseline_name(plan)}", "hand": " by hand", "other": ""}
    words = [f"{trial.number}{names[kind_of(plan, trial)]}" for _, _, trial in points]
    return "".join([*parts, *draw_labels(places, words), "</svg>"])


def draw_rent(rent: dict[str, Any]) -> str:
    """A dot per option of `autoplan estimate`, with its interval: cost (or GPU hours) across, hours up by their
    logarithm. Empty with fewer than two."""
    spent, unit = ("gpu_hours", "GPU hours") if rent["currency"] is None else ("cost", rent["currency"])
    options = rent["options"]
    if len(options) < 2:
        return ""
    least, most = (end(o[f"hours_{name}"] for o in options) for end, name in ((min, "low"), (max, "high")))

    def up(hours: float) -> float:
        return chart.y(math.log(hours / least))

    dearest = max(option[spent] for option in options)
    chart = Chart(
        "Time against cost", dearest, math.log(most / least), 420, lambda y: format_number(least * math.exp(y))
    )
    parts = [*chart.axes(lambda value: f"{format_number(value)} {unit}", f"hours, over {unit}")]
    front = [(chart.x(o[spent]), up(o["hours"])) for o in options if o["on_front"]]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in front)
    parts.append(f'<path d="{path}" fill="none" stroke="var(--best)"/>')
    places = [(chart.x(option[spent]), up(option["hours"])) for option in options]
    for (x, y), option in zip(places, options, strict=True):
        colour = "best" if option["on_front"] else "other"
        ends = f"M{x:.1f} {up(option['hours_low']):.1f}V{up(option['hours_high']):.1f}"
        parts.append(f'<path d="{ends}" stroke="var(--{colour})"/>')
        title = escape(describe_option(option, rent["currency"]))
        circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="var(--{colour})">'
        parts.append(f"{circle}<title>{title}</title></circle>")
    words = [f"{o['num_gpus']} x {o['chip']}" if o["on_front"] or o["smallest"] else "" for o in options]
    return "".join([*parts, *draw_labels(places, words), "</svg>"])


def draw_labels(dots: Sequence[tuple[float, float]], labels: Sequence[str]) -> Iterator[str]:
    """The labels of dots, each beside, over or under its own, where nothing is yet; as large as on a narrow screen."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
    for (x, y), words in zip(dots, labels, strict=True):
        if not words:
            continue
        width = LETTER * len(words)
        anchors = {"start": (10.0, 10.0), "end": (-10.0, -10.0 - width), "middle": (0.0, -width / 2)}
        tried = [(anchor, y + 5) for anchor in ("start", "end")]
        tried += [(anchor, y + 5 + rows * 22) for rows in (-1, 1, -2, 2, 3) for anchor in ("middle", "start", "end")]
        places = []
        for anchor, baseline in tried:
            left = x + anchors[anchor][1]
            if left >= LEFT and left + width <= WIDTH:
                box = (left, baseline - 16, left + width, baseline + 3)
                places.append((box, draw_text(x + anchors[anchor][0], baseline, words, anchor=anchor)))
        box, text = next((one for one in places if not any(overlap(one[0], other) for other in taken)), places[0])
        taken.append(box)
        yield text


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share a place."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with a rate upwards and something else across, both from zero.

    Attributes:
        title: For who cannot see it.
        across, up: The largest figures.
        height: Of the drawing, in its own units; it is WIDTH wide.
        words: For a figure of the upward axis.
    """

    title: str
    across: float
    up: float
    height: int
    words: Callable[[float], str] = format_number

    def x(self, value: float) -> float:
        """Where a figure is, across."""
        return LEFT + value / (self.across * 1.02) * (WIDTH - LEFT - 80)

    def y(self, rate: float) -> float:
        """Where a rate is, upwards."""
        return self.height - 40 - rate / (self.up * 1.08) * (self.height - 70)

    def axes(self, words: Callable[[float], str], legend: str) -> list[str]:
        """The start of the drawing: axes with three figures each, and what they are."""
        end = self.x(self.across)
        parts = [open_drawing(self.height, self.title), draw_text(8, 20, legend, css="soft")]
        parts.append(f'<path d="M{LEFT} 30V{self.y(0):.1f}H{end:.1f}" fill="none" stroke="var(--line)"/>')
        for share in (0.0, 0.5, 1.0):
            x, y = self.x(share * self.across), self.y(share * self.up)
            figure = words(share * self.across) if share else "0"
            parts.append(draw_text(x, self.y(0) + 27, figure, anchor="middle", css="soft"))
            parts.append(draw_text(LEFT - 8, y + 4, self.words(share * self.up), anchor="end", css="soft"))
        return parts

    def dot(self, plan: Plan, trial: Trial, across: float, rate: float) -> str:
        """A trial, which is named where the mouse stands on it."""
        memory = format_bytes(trial.peak_memory_bytes)
        title = f"{trial.number}: {trial.config.describe()}, {format_number(rate)} {plan.workload.unit}/s, {memory}"
        place = f'cx="{self.x(across):.1f}" cy="{self.y(rate):.1f}" r="5" fill="var(--{kind_of(plan, trial)})"'
        return f"<circle {place}><title>{escape(title)}</title></circle>"


def open_drawing(height: float, title: str) -> str:
    """The start of a drawing that is WIDTH wide, for a page whose styles have the colours."""
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'


def draw_text(x: float, y: float, words: str, *, anchor: str = "start", css: str | None = None) -> str:
    """A text at a place."""
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'
