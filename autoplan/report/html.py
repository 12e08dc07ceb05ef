"""A plan as one page of HTML: no scripts, no network, readable as plain tables; drawings are inline SVG."""

from __future__ import annotations

from html import escape

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.report import facts
from autoplan.report.pareto import pareto_rows
from autoplan.report.svg import draw_rates, draw_tradeoff
from autoplan.units import format_bytes, format_number, format_seconds

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --page: #ffffff; --band: #f6f8fa;
  --best: #0b7a3e; --plain: #0a58a8; --other: #8a94a0; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa4ae; --line: #363d45; --page: #14181c;
  --band: #1c2127; --best: #4cc383; --plain: #6fb0f2; --other: #7d8792; --bad: #f2847c; } }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .25rem 0; max-width: 60rem; } .soft { color: var(--soft); }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1.25rem 0 0; padding: 1rem 1.25rem;
  background: var(--band); border-radius: 8px; }
.figures div { min-width: 8rem; } .figures b { display: block; font-size: 1.5rem; line-height: 1.3; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th { text-align: left; font-weight: 600; border-bottom: 2px solid var(--line); padding: .35rem .75rem .35rem 0; }
td { border-bottom: 1px solid var(--line); padding: .35rem .75rem .35rem 0; vertical-align: top; }
td, th { overflow-wrap: break-word; } svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
code { font: .9em ui-monospace, monospace; } pre { background: var(--band); padding: 1rem; border-radius: 8px;
  overflow-x: auto; font: .85rem/1.45 ui-monospace, monospace; }
.passed { color: var(--best); } .failed { color: var(--bad); }
"""


def render_page(plan: Plan) -> str:
    """The whole page."""
    unit = plan.workload.unit
    sections = [
        _section("Baseline against plan", facts.comparison(plan)),
        _section("The plan, and why", facts.configuration(plan)),
        _parity(plan),
        _section("The loader, measured beside the step", facts.loading(plan)),
        _drawing("How fast each trial was", draw_rates(plan), f"Median {unit}/s with its interval, in the order run."),
        _drawing("Speed against memory", draw_tradeoff(plan), "Up is faster, left takes less memory."),
        _section("The best of both: no other is faster with less memory", pareto_rows(plan)),
        _section("Next best", facts.alternatives(plan)),
        _section("Ruled out, never tried", facts.left_out_rows(plan.left_out)),
        _section("Every trial", facts.trial_rows(plan.evidence, unit)),
        _section("Predicted and measured", _predictions(plan)),
        _apply(plan),
        _notes(plan),
    ]
    title = f"{plan.workload.name} on {plan.hardware.device(plan.device).name}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: autoplan</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        + ("" if plan.unverified is None else f'<p class="failed">UNVERIFIED: {escape(plan.unverified)}.</p>\n')
        + f"<p>{escape(facts.headline(plan))}.</p>\n"
        f'<p class="soft">{escape(facts.workload_line(plan.workload))}. {escape(facts.hardware_line(plan))}. '
        f"Found {escape(plan.created)}, study <code>{escape(plan.study)}</code>.</p>\n"
        + _figures(plan)
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def render_part(plan: Plan) -> str:
    """The headline and the first two tables alone, for a notebook."""
    tables = _section("Baseline against plan", facts.comparison(plan)) + _section("The plan", facts.configuration(plan))
    return f"<div><p><b>{escape(facts.plan_line(plan))}</b></p>{tables}</div>"


def _figures(plan: Plan) -> str:
    measured = plan.measurement
    figures = [
        ("no gain" if facts.is_plain(plan) else f"{plan.speedup.median:.2f} x", "over the plain fp32 run"),
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
    head = "".join(f"<th>{escape(heading)}</th>" for heading in content.headings)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in content.rows)
    return (
        f'<h2>{escape(title)}</h2>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _drawing(title: str, drawing: str, legend: str) -> str:
    if not drawing:
        return ""
    return f'<h2>{escape(title)}</h2>\n<p class="soft">{escape(legend)}</p>\n<div class="wide">{drawing}</div>'


def _parity(plan: Plan) -> str:
    kind, line = "passed" if plan.parity.passed else "failed", facts.parity_words(plan.parity)
    return f'<h2>Does it still train the same thing?</h2>\n<p class="{kind}">Parity: {escape(line)}.</p>'


def _predictions(plan: Plan) -> facts.Rows:
    rows: list[tuple[str, ...]] = [row for trial in plan.evidence if (row := _predicted_row(trial)) is not None]
    return facts.Rows(("#", "configuration", "step predicted", "measured", "peak predicted", "measured"), rows)


def _predicted_row(trial: Trial) -> tuple[str, ...] | None:
    if trial.outcome is not Outcome.OK or trial.step_time_s is None or trial.predicted_step_time_s is None:
        return None
    return (
        str(trial.number),
        trial.config.describe(),
        format_seconds(trial.predicted_step_time_s),
        format_seconds(trial.step_time_s.median),
        format_bytes(trial.predicted_peak_memory_bytes),
        format_bytes(trial.peak_memory_bytes),
    )


def _apply(plan: Plan) -> str:
    code = (
        "import autoplan\n\n"
        'plan = autoplan.load_plan("plan.json")\n'
        "run = plan.prepare(model, optimizer, loss)\n"
        "for batch in loader:            # "
        f"{plan.config.micro_batch * plan.accumulation} samples on each data-parallel rank\n"
        "    result = run.step(batch)\n"
    )
    return (
        f"<h2>Apply it</h2>\n<pre>{escape(code)}</pre>\n"
        "<p>Or <code>autoplan export plan.json --to pytorch</code> for a script that needs no autoplan.</p>"
    )


def _notes(plan: Plan) -> str:
    environment = plan.environment
    versions = (
        f"autoplan {environment.autoplan}, torch {environment.torch}, Python {environment.python}, "
        f"{environment.platform}" + (f", transformers {environment.transformers}" if environment.transformers else "")
    )
    lines = [versions, *(f"{topic}: {text}" for topic, text in (*facts.about(plan), *facts.remarks(plan)))]
    items = "".join(f"<li>{escape(line.removeprefix('note: '))}</li>" for line in lines)
    return f"<h2>Notes</h2>\n<ul>{items}</ul>"
