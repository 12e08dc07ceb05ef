"""Writes the pages and the picture of the documentation that follow from the code and from recorded runs.

    python docs/make_pages.py     # after a change of an option, a knob, a public name or a recorded run

tests/test_docs.py fails if one of them is not what this file makes.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

import autoplan
from autoplan.cli.app import build_app
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Trial
from autoplan.strategies.knob_text import knob_table

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "results" / "gpt2_cpu_anytime" / "plan.json"
MADE = "<!-- made by docs/make_pages.py: change the code, then run it -->"


def _cell(text: str) -> str:
    """A text as one cell of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


# The command line


def cli_page() -> str:
    """Each command with its usage, what it does and its options, from the command line's own help."""
    app = typer.main.get_command(build_app())
    context = typer.Context(app, info_name="autoplan")
    lines = ["# Commands and options", "", MADE, "", "What `--json` prints, and the rest: [cli.md](../cli.md)."]
    commands = {name: app.get_command(context, name) for name in app.list_commands(context)}
    shown = {name: command for name, command in commands.items() if command is not None and not command.hidden}
    tables = {name: dict(_options(command)) for name, command in shown.items()}
    rows = [row for panels in tables.values() for table in panels.values() for row in table]
    shared = {row for row in rows if rows.count(row) >= 3}
    lines += ["", "| of several commands | |", "| --- | --- |", *sorted(shared)]
    for name, command in shown.items():
        usage = command.get_usage(typer.Context(command, info_name=f"autoplan {name}", parent=None))
        lines += ["", f"## autoplan {name}", "", f"    {usage.removeprefix('Usage: ')}", ""]
        lines += _wrapped(inspect.cleandoc(command.help or "").split("\f")[0])
        lines += [""]
        for panel, table in tables[name].items():
            own = [row for row in table if row not in shared]
            taken = sorted(re.findall(r"`(.+?)`", row)[0] for row in table if row in shared)
            lines += [f"| {panel or 'option'} | |", "| --- | --- |", *own, ""] if own else []
            lines += [*_wrapped("Besides: " + ", ".join(f"`{flag}`" for flag in taken) + "."), ""] if taken else []
        lines.pop()
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    paragraphs = re.split(r"\n\s*\n", text)
    wrap = functools.partial(textwrap.fill, width=120, break_on_hyphens=False)
    return "\n\n".join(wrap(re.sub(r"\s+", " ", one)) for one in paragraphs).splitlines()


def _options(command: Any) -> dict[str, list[str]]:
    """Rows of the options by panel, and of the arguments that have a text."""
    panels: dict[str, list[str]] = {}
    for one in command.params:
        if not getattr(one, "help", None):  # those that only --help-all shows are hidden
            continue
        is_option = one.param_type_name == "option"
        named = ", ".join(one.opts) if is_option else one.metavar or one.name.upper()
        value = f" {one.metavar or one.name.upper()}" if is_option and not getattr(one, "is_flag", False) else ""
        known = one.default if not isinstance(one.default, bool) and isinstance(one.default, str | int | Path) else None
        default = f" Default: {known}." if known is not None and "Default" not in one.help else ""
        row = f"| `{_cell(named + value)}` | {_cell(one.help + default)} |"
        panels.setdefault(getattr(one, "rich_help_panel", None) or "", []).append(row)
    return panels


# Knobs and public names


def knobs_page() -> str:
    """The table of the knobs, from the fields of TrainingConfig."""
    head = (
        "# Knobs\n\n" + MADE + "\n\n"
        "Each row is a field of `TrainingConfig`. What the techniques do, and what they cost: "
        "[techniques.md](../techniques.md);\nover several ranks: [parallelism.md](../parallelism.md).\n\n"
        'Under *numerics*, "rounding" means the same sums in another order, about 1e-6 relative in fp32. "Changes" '
        "means that\nthe plan says so, and that it passes the parity check at that precision's tolerance.\n\n"
    )
    return head + "\n".join(knob_table()) + "\n"


def python_page() -> str:
    """Every public name with the first sentence of its docstring, and the directives that make the full reference."""
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in autoplan.__all__:
        if name == "__version__":
            continue
        is_error = name.endswith("Error")
        groups["Errors" if is_error else "Classes" if inspect.isclass(getattr(autoplan, name)) else "Functions"].append(
            name
        )
    lines = [
        "# The Python API",
        "",
        MADE,
        "",
        "Every public name of `import autoplan`. Other names may change with any version. `make docs` puts signatures",
        "and docstrings in place of the lines that begin with `:::`. How to use them: [python.md](../python.md).",
    ]
    for group, names in groups.items():
        lines += ["", f"| {group.lower()} | |", "| --- | --- |"]
        lines += [f"| `{name}` | {_cell(_first_sentence(getattr(autoplan, name)))} |" for name in names]
    for group, names in groups.items():
        lines += ["", f"## {group}", *(part for name in names for part in ("", f"::: autoplan.{name}"))]
    return "\n".join(lines) + "\n"


def _first_sentence(member: Any) -> str:
    paragraph = inspect.cleandoc(member.__doc__ or "").split("\n\n")[0]
    found = re.match(r"(.+?[.])(\s|$)", paragraph, re.DOTALL)
    return found[1] if found else paragraph


# The picture of the README: a recorded search of GPT-2

WIDTH, HEIGHT = 860, 300
CSS = (
    "text{font:13px system-ui,sans-serif;fill:#57606a}.b{font-weight:600;fill:#24292f}.l{stroke:#d0d7de}"
    ".plain{fill:#8c959f}.hand{fill:#bf8700}.plan{fill:#1a7f37}.c{fill:none;stroke:#1a7f37;stroke-width:2.5}"
    ".i{stroke:#24292f;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#9198a1}.b{fill:#f0f6fc}.l{stroke:#3d444d}.plan{fill:#3fb950}"
    ".c{stroke:#3fb950}.i{stroke:#f0f6fc}}"
)


def picture() -> str:
    """Plain run, hand setting and plan with their intervals; beside them the best so far of the search."""
    plan = Plan.model_validate(json.loads(RECORDED.read_text()))
    hand = next(trial for trial in plan.evidence if trial.purpose == "reference")
    rates = [
        ("plain fp32", "plain", plan.baseline.tokens_per_s),
        ("by hand: bf16", "hand", hand.tokens_per_s),
        ("autoplan's plan", "plan", plan.measurement.tokens_per_s),
    ]
    top, floor = 60, HEIGHT - 50
    scale = (floor - top) / 450
    speedup = plan.speedup
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="GPT-2 on two '
        f'CPU cores: the plan runs {speedup.median:.2f} times as fast as the plain run"><style>{CSS}</style>',
        '<text class="b" x="10" y="22">GPT-2 on two CPU cores, tokens/s</text>',
        f'<text x="10" y="42">{speedup.median:.2f} times ({speedup.low:.2f} to {speedup.high:.2f}) as fast as '
        "plain</text>",
        f'<path class="l" d="M10 {floor}H340M430 {floor}H{WIDTH - 10}" fill="none"/>',
    ]
    for number, (name, css, rate) in enumerate(rates):
        x, y = 30 + 105 * number, floor - rate.median * scale
        parts += [
            f'<rect class="{css}" x="{x}" y="{y:.1f}" width="70" height="{floor - y:.1f}" rx="3"/>',
            f'<path class="i" d="M{x + 35} {floor - rate.low * scale:.1f}V{floor - rate.high * scale:.1f}"/>',
            f'<text class="b" x="{x + 35}" y="{floor - rate.high * scale - 7:.1f}" text-anchor="middle">'
            f"{rate.median:.0f}</text>",
            f'<text x="{x + 35}" y="{floor + 19}" text-anchor="middle">{name}</text>',
        ]
    return "".join([*parts, *_best_so_far(plan, floor, scale), "</svg>\n"])


def _best_so_far(plan: Plan, floor: float, scale: float) -> Iterator[str]:
    """Each look as a dot at its moment, and the curve of the fastest so far."""
    runs = iter(plan.evidence)
    best, path, dots, end = 0.0, "", [], 0.0
    across: Callable[[float], float] = lambda seconds: 430 + seconds / 440 * (WIDTH - 450)  # noqa: E731
    for line in plan.ledger:
        if line.kind not in ("baseline", "look", "hand setting"):
            continue
        trial: Trial = next(runs)
        assert trial.tokens_per_s is not None
        end, rate = line.began_s + line.seconds, trial.tokens_per_s.median
        css = {"baseline": "plain", "hand setting": "hand"}.get(line.kind, "plan")
        dots.append(f'<circle class="{css}" cx="{across(end):.1f}" cy="{floor - rate * scale:.1f}" r="4"/>')
        path += f"H{across(end):.1f}" if path else f"M{across(end):.1f} {floor}"
        if rate > best:
            path, best = path + f"V{floor - rate * scale:.1f}", rate
    whole = max(line.began_s + line.seconds for line in plan.ledger)
    yield '<text class="b" x="430" y="22">The best so far of that search</text>'
    yield '<text x="430" y="42">tokens/s against seconds; a dot is a look at one configuration</text>'
    yield f'<path class="c" d="{path}H{across(whole):.1f}"/>' + "".join(dots)
    for seconds in (0, 60, 120, 180, 240, 300, 360):
        yield f'<text x="{across(seconds):.1f}" y="{floor + 19}" text-anchor="middle">{seconds}</text>'
    yield f'<path class="l" d="M{across(end):.1f} {floor}V80"/>'
    yield f'<text x="{across(end) + 8:.1f}" y="{floor - 60}">then side by<tspan x="{across(end) + 8:.1f}" dy="16">'
    yield "side with plain</tspan></text>"


FILES: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli_page,
    "docs/reference/knobs.md": knobs_page,
    "docs/reference/autoplan.md": python_page,
    "docs/images/gpt2.svg": picture,
}


if __name__ == "__main__":
    for name, make in FILES.items():
        (ROOT / name).write_text(make())
        print(name)
