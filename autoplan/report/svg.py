"""Two drawings of a plan's trials as inline SVG: rates in the order run, and speed against memory."""

from __future__ import annotations

from html import escape

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.units import format_bytes, format_number

WIDTH = 900


def measured_trials(plan: Plan) -> list[Trial]:
    """The trials that have a rate."""
    return [t for t in plan.evidence if t.outcome is Outcome.OK and t.tokens_per_s is not None]


def colour(plan: Plan, trial: Trial) -> str:
    """The plan's own trials, the baseline, the rest."""
    if trial.config == plan.config:
        return "var(--best)"
    return "var(--plain)" if trial.config == plan.baseline.config else "var(--other)"


def draw_rates(plan: Plan) -> str:
    """A bar per trial with its interval; the outcome of those that did not finish. Empty without trials."""
    trials = list(plan.evidence)
    highest = max((t.tokens_per_s.high for t in measured_trials(plan) if t.tokens_per_s), default=0.0)
    if not trials or highest <= 0:
        return ""
    row, left, right = 24, 330, 150
    height = row * len(trials) + 10
    scale = (WIDTH - left - right) / highest
    parts = [open_drawing(height, "Rate of every trial")]
    for number, trial in enumerate(trials):
        middle = 5 + row * number + row / 2
        name = f"{trial.number}: {trial.config.describe()}"
        parts.append(draw_text(left - 10, middle + 4, _short(name, 44), anchor="end", title=name))
        if trial.tokens_per_s is None or trial.outcome is not Outcome.OK:
            parts.append(
                draw_text(left, middle + 4, trial.outcome.value.replace("_", " "), css="soft", title=trial.reason)
            )
            continue
        rate = trial.tokens_per_s
        fill = colour(plan, trial)
        parts.append(
            f'<rect x="{left}" y="{middle - 8:.1f}" width="{rate.median * scale:.1f}" height="16" rx="3" '
            f'fill="{fill}" fill-opacity="0.8"/>'
            f'<line x1="{left + rate.low * scale:.1f}" x2="{left + rate.high * scale:.1f}" y1="{middle:.1f}" '
            f'y2="{middle:.1f}" stroke="var(--ink)" stroke-width="2"/>'
        )
        words = format_number(rate.median) + (" (plan)" if trial.config == plan.config else "")
        parts.append(draw_text(left + rate.high * scale + 8, middle + 4, words))
    return "".join([*parts, "</svg>"])


def draw_tradeoff(plan: Plan) -> str:
    """A dot per measured trial: peak memory across, rate up. Empty with fewer than three."""
    points = [
        (trial, trial.peak_memory_bytes, trial.tokens_per_s.median)
        for trial in measured_trials(plan)
        if trial.peak_memory_bytes and trial.tokens_per_s is not None
    ]
    if len(points) < 3:
        return ""
    height, left, right, top, bottom = 340, 80, 170, 16, 46
    memory_top = max(memory for _, memory, _ in points) * 1.05
    rate_top = max(rate for _, _, rate in points) * 1.08
    parts = [open_drawing(height, "Speed against memory")]
    floor, end = height - bottom, WIDTH - right
    parts.append(f'<path d="M{left} {top}V{floor}H{end}" fill="none" stroke="var(--line)"/>')
    for share in (0.0, 0.5, 1.0):
        x, y = left + share * (end - left), floor - share * (floor - top)
        parts.append(draw_text(x, floor + 18, format_bytes(memory_top * share), anchor="middle", css="soft"))
        parts.append(draw_text(left - 8, y + 4, format_number(rate_top * share), anchor="end", css="soft"))
    parts.append(draw_text((left + end) / 2, height - 6, "peak memory", anchor="middle", css="soft"))
    for trial, memory, rate in points:
        x = left + memory / memory_top * (end - left)
        y = floor - rate / rate_top * (floor - top)
        title = f"{trial.number}: {trial.config.describe()}, {format_number(rate)}, {format_bytes(memory)}"
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour(plan, trial)}"'
        parts.append(f"<circle {place}><title>{escape(title)}</title></circle>")
        if trial.config == plan.config or trial.purpose == "baseline":
            parts.append(draw_text(x + 10, y + 4, "plan" if trial.config == plan.config else "baseline"))
    return "".join([*parts, "</svg>"])


def open_drawing(height: float, title: str) -> str:
    """The start of a drawing that is WIDTH wide, for a page whose styles have the colours."""
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'


def draw_text(
    x: float, y: float, words: str, *, anchor: str = "start", css: str | None = None, title: str | None = None
) -> str:
    """A text at a place; `title` is shown where the mouse stands on it."""
    kind = f' class="{css}"' if css else ""
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}{tip}</text>'


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
