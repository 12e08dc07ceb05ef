"""A plan, or what to rent, as one page of HTML: nothing is loaded; drawings are inline SVG; one script sorts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.baseline import run_words
from autoplan.planner.records.trials import Outcome
from autoplan.planner.verify.stairs import Staircase
from autoplan.report import facts, staircase
from autoplan.report.estimate import describe_layout
from autoplan.report.svg import draw_best_so_far, draw_rent, draw_tradeoff, kind_of
from autoplan.units import format_bytes, format_number, format_seconds

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --page: #ffffff; --band: #f6f8fa;
  --best: #0b7a3e; --plain: #0a58a8; --hand: #9a6700; --other: #8a94a0; --bad: #b3261e; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa4ae; --line: #363d45;
  --page: #14181c; --band: #1c2127; --best: #4cc383; --plain: #6fb0f2; --hand: #d9a441; --other: #7d8792;
  --bad: #f2847c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .25rem 0; max-width: 60rem; } .soft { color: var(--soft); } li { max-width: 60rem; }
.whole, td[data-v] { white-space: nowrap; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1.25rem 0 0; padding: 1rem 1.25rem;
  background: var(--band); border-radius: 8px; }
.figures div { min-width: 8rem; } .figures b { display: block; font-size: 1.5rem; line-height: 1.3; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th { text-align: left; font-weight: 600; border-bottom: 2px solid var(--line); padding: .35rem .75rem .35rem 0; }
td { border-bottom: 1px solid var(--line); padding: .35rem .75rem .35rem 0; vertical-align: top; min-width: 4.5rem; }
td:first-child, .bars td { min-width: 0; } .bars td { border: 0; white-space: nowrap; }
.bars td:last-child { width: 100%; padding-right: 0; }
.bar { display: block; height: .85rem; min-width: 2px; border-radius: 3px; background: var(--other); margin: .3rem 0; }
.best { background: var(--best); } .plain { background: var(--plain); } .hand { background: var(--hand); }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--plain); }
th[aria-sort] button { text-decoration: underline; }
svg { display: block; width: 100%; min-width: 40rem; height: auto; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
code { font: .9em ui-monospace, monospace; } pre { background: var(--band); padding: 1rem; border-radius: 8px;
  overflow-x: auto; font: .85rem/1.45 ui-monospace, monospace; }
.passed { color: var(--best); } .failed { color: var(--bad); }
@media (max-width: 30rem) { svg { min-width: 0; } svg text { font-size: 24px; }
  table:not(.bars) :is(tbody, tr, td) { display: block; } thead { display: none; }
  table:not(.bars) tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  table:not(.bars) td { display: grid; grid-template-columns: 8rem 1fr; gap: 0 .75rem; border: 0; padding: .1rem 0;
    overflow-wrap: anywhere; }
  table:not(.bars) :is(td:first-child, td[data-h="configuration"]) { display: block; }
  table:not(.bars) td:first-child { font-weight: 600; } table:not(.bars) td:empty { display: none; }
  td::before { content: attr(data-h); color: var(--soft); }
  :is(td:first-child, td[data-h="configuration"])::before { content: none; }
  td[data-h="#"]::before { content: "# " !important; } td .bar { grid-column: 2; }
  pre { white-space: pre-wrap; } }
@media print { :root { color-scheme: light; }
  body { font-size: 11px; max-width: none; padding: 0; } .wide { overflow: visible; } svg { min-width: 0; }
  tr, svg, .figures { break-inside: avoid; } h2 { break-after: avoid; } .bar { print-color-adjust: exact; } }
"""

SORT = """
for (const table of document.querySelectorAll("table.sorts")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.onclick = () => {
      const down = head.ariaSort === "ascending";
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      head.ariaSort = down ? "descending" : "ascending";
      const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => key(a).localeCompare(key(b), "en", {numeric: true}));
      table.tBodies[0].append(...(down ? rows.reverse() : rows));
    };
  });
}
"""
"""The script for a click on a heading. The page says all without it; its policy runs this script alone, by its hash."""


ENDS = ("", "_low", "_high")
"""What the names of a figure, and of the ends of its interval, end in."""


def render_page(plan: Plan, stairs: Staircase | None = None, path: str = "plan.json") -> str:
    """The whole page.

    Args:
        plan: The plan.
        stairs: The staircase of the plan, where it was measured.
        path: The file of the plan, for the code and the command that use it.
    """
    colours = f"Green: the plan; blue: {facts.baseline_name(plan)}; brown: by hand."
    curve = f"Each dot is a trial; the line is the fastest so far. Time is that spent in trials. {colours}"
    points = f"Each dot is a configuration, by the number of its first trial. Up is faster, left is smaller. {colours}"
    sections = [
        _before_and_after(plan),
        "" if stairs is None else _staircase(stairs),
        _section("Baseline against plan", facts.comparison(plan)),
        _section("The plan, and why", facts.configuration(plan)),
        _parity(plan),
        _memory(plan),
        _section("The loader, measured beside the step", facts.loading(plan)),
        _drawing("The best so far", draw_best_so_far(plan), curve),
        _drawing("Speed against memory", draw_tradeoff(plan), points),
        _section("The best of both: no other is faster with less memory", facts.pareto_rows(plan)),
        _section("Next best", facts.alternatives(plan)),
        _section("Ruled out, never tried", facts.left_out_rows(plan.left_out)),
        _trials(plan),
        _section("Predicted and measured", _predictions(plan)),
        _apply(plan, path),
        _notes(plan),
    ]
    title = f"{plan.workload.name} on {plan.hardware.device(plan.device).name}"
    unverified = "" if plan.unverified is None else f'<p class="failed">UNVERIFIED: {escape(plan.unverified)}.</p>\n'
    return _page(
        title,
        unverified + f"<p>{escape(facts.headline(plan))}.</p>\n"
        f'<p class="soft">{escape(facts.workload_line(plan.workload))}. {escape(facts.hardware_line(plan))}. '
        f'Found <span class="whole">{escape(plan.created)}</span>, study <code>{escape(plan.study)}</code>.</p>\n'
        + _figures(plan)
        + "\n".join(section for section in sections if section),
    )


def render_rent(document: dict[str, Any]) -> str:
    """The page of an estimate: what to rent, time against cost, from its document with `rent`."""
    model, rent = document["model"], document["rent"]
    unit = rent["currency"] or "GPU hours"
    legend = f"Green: nothing is faster with fewer {unit}. Lines: intervals of 90 %. Left and down is better."
    headings = ("GPUs", "hours (90 %)", f"{unit} (90 %)", "peak memory", "layout", "")
    rows = []
    for option in rent["options"]:
        hours = [option[f"hours{end}"] for end in ENDS]
        spent = [option[f"cost{end}"] for end in ENDS] if rent["currency"] else [option["num_gpus"] * h for h in hours]
        figures = ["{} ({} to {})".format(*map(format_number, three)) for three in (hours, spent)]
        place = "on the front" if option["on_front"] else "fewest that hold it" if option["smallest"] else ""
        memory, layout = format_bytes(option["peak_memory_bytes"]), describe_layout(option)
        rows.append((f"{option['num_gpus']} x {option['chip']}", *figures, memory, layout, place))
    lines = [*(f"assumed: {line}" for line in document["assumed"]), document["calibration"] or "not calibrated"]
    lines += [f"{chip}: {why}" for chip, why in rent["left_out"].items()]
    return _page(
        f"What to rent for {model['name']}",
        f"<p>{rent['tokens']:,.0f} tokens, {document['global_batch']:,} sequences of {document['seq_len']:,} a step. "
        "Estimated; nothing was run.</p>\n"
        + _drawing("Time against cost", draw_rent(rent), legend)
        + _section("Every option", facts.Rows(headings, rows))
        + f"<h2>Notes</h2>\n<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>",
    )


def _page(title: str, body: str) -> str:
    """A whole page around its body."""
    script = base64.b64encode(hashlib.sha256(SORT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: autoplan</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n<script>{SORT}</script>\n</body>\n</html>\n"
    )


def render_part(plan: Plan) -> str:
    """The headline and the first two tables alone, for a notebook."""
    tables = _section("Baseline against plan", facts.comparison(plan)) + _section("The plan", facts.configuration(plan))
    return f"<div><p><b>{escape(facts.plan_line(plan))}</b></p>{tables}</div>"


def _figures(plan: Plan) -> str:
    measured = plan.measurement
    before = run_words(plan.baseline.config, plan.workload.own_setting, "the plain fp32 run")
    figures = [
        ("no gain" if facts.is_baseline(plan) else f"{plan.speedup.median:.2f} x", f"over {before}"),
        (format_number(measured.tokens_per_s.median), f"{plan.workload.unit}/s"),
        (format_seconds(measured.step_time_s.median), "an optimizer step"),
        (format_bytes(measured.peak_memory_bytes), "at the peak"),
        (facts.percent(measured.mfu), "MFU"),
    ]
    cells = "".join(f"<div><b>{escape(number)}</b>{escape(words)}</div>" for number, words in figures)
    return f'<div class="figures">{cells}</div>\n'


def _section(title: str, content: facts.Rows) -> str:
    if not content.rows:
        return ""
    rows = [zip(content.headings, row, strict=True) for row in content.rows]
    return _titled(
        title, content.headings, ["".join(_cell(heading, escape(cell)) for heading, cell in row) for row in rows]
    )


def _cell(heading: str, content: str, key: str = "") -> str:
    """A cell, which says its heading itself where a narrow screen has the cells of a row under each other."""
    return f'<td data-h="{escape(heading)}"{key}>{content}</td>'


def _titled(title: str, headings: Sequence[str], rows: Sequence[str], *, css: str = "") -> str:
    """A table under its title; `rows` are cells as HTML. Without headings it has no head."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    head = f"<thead><tr>{head}</tr></thead>\n" if head else ""
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    start = f'<h2>{escape(title)}</h2>\n<div class="wide"><table class="{css}">{head}'
    return f"{start}<tbody>\n{body}\n</tbody></table></div>"


def _bar(share: float, css: str = "") -> str:
    """A bar of a share (0 to 1) of the width of its cell."""
    return f'<span class="bar {css}" style="width:{max(0.0, min(1.0, share)):.1%}"></span>'


def _bars(title: str, bars: Sequence[tuple[str, str, float, str]]) -> str:
    """Bars under each other: of each its name, its figure as text and as a number, and its colour."""
    most = max((value for _, _, value, _ in bars), default=0.0)
    if most <= 0:
        return ""
    rows = [
        f"<td>{escape(name)}</td><td>{escape(words)}</td><td>{_bar(value / most, css)}</td>"
        for name, words, value, css in bars
    ]
    return _titled(title, (), rows, css="bars")


def _before_and_after(plan: Plan) -> str:
    """The baseline, the hand setting and the plan: their speed, then their memory."""
    named = [(facts.baseline_name(plan), "plain", facts.baseline(plan)), ("plan", "best", plan.measurement)]
    if plan.hand is not None and plan.hand.config not in (plan.config, plan.baseline.config):
        named.insert(1, ("by hand", "hand", plan.hand.measurement))
    unit = f"{plan.workload.unit}/s"
    rates = [(name, css, one.tokens_per_s.median) for name, css, one in named if one.tokens_per_s is not None]
    sizes = [(name, css, one.peak_memory_bytes) for name, css, one in named if one.peak_memory_bytes]
    speed = _bars("Before and after: speed", [(n, f"{format_number(v)} {unit}", v, css) for n, css, v in rates])
    return speed + _bars("Before and after: peak memory", [(n, format_bytes(v), float(v), css) for n, css, v in sizes])


def _staircase(found: Staircase) -> str:
    """A bar of the speed at each step, its gain and memory beside it; what is without each technique; sentences."""
    if not found.order:
        return ""
    bars = [(staircase.start_words(found), format_bytes(found.peak_memory_bytes(found.start)), 1.0, "plain")]
    for step in found.steps():
        words = f"{staircase.gain_words(step)}, {format_bytes(step.peak_memory_bytes)}"
        height = 0.0 if step.so_far is None else step.so_far.median
        bars.append((f"{staircase.sign(step)} {', '.join(step.changes)}", words, height, "other"))
    name, words, height, _ = bars[-1]
    bars[-1] = (name, words, height, "best")
    items = "".join(f"<li>{escape(line)}</li>" for line in staircase.remarks(found))
    return (
        _bars(staircase.title(found), bars)
        + f'<p class="soft">{escape(staircase.headline(found))}. {escape(staircase.LEGEND)}.</p>\n'
        + _section("Each technique alone, and the plan without it", staircase.part_rows(found))
        + f"<ul>{items}</ul>"
    )


def _memory(plan: Plan) -> str:
    """The parts of the plan's peak as the cost model predicts them, the largest first."""
    if plan.prediction is None:
        return ""
    parts = sorted(plan.prediction.memory_parts_bytes.items(), key=lambda part: -part[1])
    bars = [(name.replace("_", " "), format_bytes(size), size, "best") for name, size in parts if size > 0]
    peak = format_bytes(plan.measurement.peak_memory_bytes)
    return _bars(f"The plan's memory by part, predicted (measured in all: {peak})", bars)


def _trials(plan: Plan) -> str:
    """Every trial, with its speed as a bar; a click on a heading sorts."""
    content = facts.trial_rows(plan.evidence, plan.workload.unit)
    rates = [0.0 if trial.tokens_per_s is None else trial.tokens_per_s.median for trial in plan.evidence]
    most = max(rates, default=0.0) or 1.0
    rows = []
    for trial, cells, rate in zip(plan.evidence, content.rows, rates, strict=True):
        keys = {0: trial.number, 3: rate, 4: trial.peak_memory_bytes or 0, 5: trial.seconds_spent}
        bar = _bar(rate / most, kind_of(plan, trial)) if rate else ""
        row = ""
        for column, cell in enumerate(cells):
            key = f' data-v="{keys[column]:.3f}"' if column in keys else ""
            row += _cell(content.headings[column], f"{escape(cell)}{bar if column == 3 else ''}", key)
        rows.append(row)
    return _titled("Every trial", content.headings, rows, css="sorts") if rows else ""


def _drawing(title: str, drawing: str, legend: str) -> str:
    if not drawing:
        return ""
    return f'<h2>{escape(title)}</h2>\n<p class="soft">{escape(legend)}</p>\n<div class="wide">{drawing}</div>'


def _parity(plan: Plan) -> str:
    kind, line = "passed" if plan.parity.passed else "failed", facts.parity_words(plan.parity)
    return f'<h2>Does it still train the same thing?</h2>\n<p class="{kind}">Parity: {escape(line)}.</p>'


def _predictions(plan: Plan) -> facts.Rows:
    rows: list[tuple[str, ...]] = [
        (
            str(trial.number),
            trial.config.describe(),
            format_seconds(trial.predicted_step_time_s),
            format_seconds(trial.step_time_s.median),
            format_bytes(trial.predicted_peak_memory_bytes),
            format_bytes(trial.peak_memory_bytes),
        )
        for trial in plan.evidence
        if trial.outcome is Outcome.OK and trial.step_time_s and trial.predicted_step_time_s is not None
    ]
    return facts.Rows(("#", "configuration", "step predicted", "measured", "peak predicted", "measured"), rows)


def _apply(plan: Plan, path: str) -> str:
    step = facts.next_step(plan, path)
    if not step.code:
        return f"<h2>Apply it</h2>\n<p>{escape(step.words[0].upper() + step.words[1:])}.</p>"
    code = f"import autoplan\n\nplan = autoplan.load_plan({json.dumps(path)})\n{step.code}"
    page = f"<h2>Apply it</h2>\n<pre>{escape(code)}</pre>"
    if not step.export:
        return page
    return f"{page}\n<p>Or <code>{escape(step.export)}</code> for a program that needs no autoplan.</p>"


def _notes(plan: Plan) -> str:
    environment = plan.environment
    versions = (
        f"autoplan {environment.autoplan}, torch {environment.torch}, Python {environment.python}, "
        f"{environment.platform}" + (f", transformers {environment.transformers}" if environment.transformers else "")
    )
    lines = [versions, *(f"{topic}: {text}" for topic, text in (*facts.about(plan), *facts.remarks(plan)))]
    items = "".join(f"<li>{escape(line.removeprefix('note: '))}</li>" for line in lines)
    return f"<h2>Notes</h2>\n<ul>{items}</ul>"
