"""Draws the speed of the best so far against seconds, as an SVG file that stands alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoplan.report.svg import WIDTH, draw_text, open_drawing

Curve = Sequence[tuple[float, float]]
"""Seconds and share of the best speed after each change of what a search has."""

COLOURS = ("#0b6e4f", "#c2571a", "#5a4fcf", "#777777", "#b0306a", "#2a7fba")
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 70, 120, 34, 50
STYLE = "<style>text{font:13px sans-serif;fill:#222}.soft{fill:#666}</style>"
POINTS = 240


def draw_curves(title: str, curves: Mapping[str, Sequence[Curve]], *, across: str = "device seconds") -> str:
    """A line for each method: the median over its searches, within a band from the 10th to the 90th percentile.

    Seconds go across, on a logarithmic scale; a search that has ended keeps what it had.
    """
    seconds = [at for searches in curves.values() for curve in searches for at, _ in curve]
    low, high = math.log(max(1e-3, min(seconds))), math.log(max(seconds))
    high = max(high, low + 0.1)
    grid = np.exp(np.linspace(low, high, POINTS))
    floor, end = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x_of(at: float) -> float:
        return LEFT + (math.log(at) - low) / (high - low) * (end - LEFT)

    def y_of(share: float) -> float:
        return floor - share * (floor - TOP)

    start = open_drawing(HEIGHT, title).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    parts = [start, STYLE, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', draw_text(LEFT, 20, title)]
    for share in (0.0, 0.25, 0.5, 0.75, 0.95, 1.0):
        y = y_of(share)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{end}" stroke="#ddd"/>')
        parts.append(draw_text(LEFT - 8, y + (10 if share == 0.95 else 4), f"{share:.0%}", anchor="end", css="soft"))
    for at in np.exp(np.linspace(low, high, 6)):
        text = f"{at:.3g}" if at < 1000 else f"{at:,.0f}"
        parts.append(draw_text(x_of(at), floor + 18, text, anchor="middle", css="soft"))
    parts.append(draw_text((LEFT + end) / 2, HEIGHT - 8, across, anchor="middle", css="soft"))
    for place, ((name, searches), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        shares = np.array([[share_at(curve, at) for at in grid] for curve in searches])
        bottom, middle, top = np.quantile(shares, [0.1, 0.5, 0.9], axis=0)
        xs = [x_of(at) for at in grid]
        around = [*zip(xs, map(y_of, top), strict=True), *reversed([*zip(xs, map(y_of, bottom), strict=True)])]
        parts.append(f'<path d="{_path(around)}Z" fill="{colour}" fill-opacity="0.12"/>')
        line = _path(list(zip(xs, map(y_of, middle), strict=True)))
        parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        key = TOP + 20 * place + 10
        parts.append(f'<path d="M{end + 12} {key}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(draw_text(end + 36, key + 4, name))
    return "".join([*parts, "</svg>\n"])


def share_at(curve: Curve, seconds: float) -> float:
    """The share that a search has reached after so many seconds; 0 before its first trial has ended."""
    return next((share for at, share in reversed(curve) if at <= seconds), 0.0)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
