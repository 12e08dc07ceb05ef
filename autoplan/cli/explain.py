"""autoplan explain: why each knob has its value, and what was ruled out, by which limit and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli import output, plans
from autoplan.errors import UsageError
from autoplan.units import format_number

if TYPE_CHECKING:
    from autoplan.planner.plan.plan import Plan


def explain_command(
    plan: plans.PlanArgument = plans.DEFAULT_PLAN,
    knob: Annotated[
        str | None,
        typer.Option("--knob", metavar="NAME", help="Only this knob: its value, and the trials of each of its values."),
    ] = None,
    staircase: Annotated[
        bool,
        typer.Option(
            "--staircase",
            help="What each technique gives: measured a step at a time from the baseline to the plan, and kept beside "
            "the plan. The options below go with it.",
        ),
    ] = False,
    time_box: Annotated[
        str | None,
        typer.Option("--budget", metavar="TIME", help="Time for all measuring; with more it goes on. Default: 5m."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew, whatever was kept.")] = False,
    memory_limit: plans.MemoryOption = None,
    wait: plans.WaitOption = False,
    unverified_ok: plans.UnverifiedOption = False,
    changed_ok: plans.ChangedOption = False,
    model: plans.ModelOption = None,
    quiet: plans.QuietOption = False,
    json_output: output.JsonOption = False,
) -> None:
    """Explain each choice of a plan.

    The value of each knob and its reason, which trials failed, and what was never tried and why.
    """
    if staircase:
        from autoplan.planner.verify.climb import staircase as climb
        from autoplan.report.staircase import document, show_staircase

        plans.load_plan(plan, unverified_ok)  # says what is to be known of the file
        with output.progress("starting", quiet=quiet) as tell:
            found = climb(
                plan,
                budget=time_box,
                fresh=fresh,
                memory_limit=memory_limit,
                unverified_ok=unverified_ok,
                changed_ok=changed_ok,
                workload=model,
                wait=wait,
                on_progress=tell,
            )
        if json_output:
            output.print_json({"status": "ok", "staircase": document(found)})
        else:
            show_staircase(output.console(stderr=False), found)
        return
    if time_box is not None or fresh:
        raise UsageError("--budget and --fresh go with --staircase: nothing else is measured", hint="Add --staircase.")
    loaded = plans.load_plan(plan)
    knobs = list(explain_knobs(loaded, knob))
    if json_output:
        output.print_json(
            {
                "status": "ok",
                "knobs": knobs,
                "left_out": [family.model_dump(mode="json") for family in loaded.left_out],
                "failed_trials": [t.model_dump(mode="json") for t in loaded.evidence if t.outcome.value != "ok"],
                "nodes": None if loaded.nodes is None else loaded.nodes.model_dump(mode="json"),
                "notes": list(loaded.notes),
            }
        )
        return
    _print(loaded, knobs, everything=knob is None)


def explain_knobs(plan: Plan, only: str | None) -> Iterator[dict[str, Any]]:
    """Per knob: the value, the reason, and the best measured trial of each value that was tried.

    Raises:
        ConfigError: `only` is not a knob.
    """
    from autoplan.strategies.config import KNOBS, knob_values

    if only is not None:
        only = only.replace("-", "_")
        knob_values(only)
    reasons = {choice.knob: choice.reason for choice in plan.choices}
    for knob in KNOBS:
        tried = _tried(plan, knob)
        if only == knob or (only is None and (len(tried) > 1 or knob in reasons)):
            value = getattr(plan.config, knob)
            yield {"knob": knob, "value": value, "reason": reasons.get(knob), "tried": tried}


def _tried(plan: Plan, knob: str) -> list[dict[str, Any]]:
    """The values of a knob that trials had: how many trials, the best rate, and how the others ended."""
    from statistics import median

    from autoplan.planner.search.selection import collect_runs

    groups: dict[Any, list[Any]] = {}
    for trial in plan.evidence:
        groups.setdefault(getattr(trial.config, knob), []).append(trial)
    rates: dict[Any, list[float]] = {}
    for one in collect_runs(plan.evidence):
        timed = [run.tokens_per_s.median for run in one.as_look.runs if run.tokens_per_s is not None]
        rates.setdefault(getattr(one.config, knob), []).extend([median(timed)] if timed else [])
    tried = []
    for value, trials in groups.items():
        ends = sorted({t.outcome.value for t in trials if t.outcome.value != "ok"})
        best = max(rates.get(value, []), default=None)
        tried.append({"value": value, "trials": len(trials), "best_tokens_per_s": best, "other_ends": ends})
    return sorted(tried, key=lambda entry: -(entry["best_tokens_per_s"] or 0.0))


def _ends_words(tried: dict[str, Any], unit: str) -> str:
    """`1,234 tokens/s; others: pruned`, or how all of them ended."""
    ends = ", ".join(tried["other_ends"])
    if tried["best_tokens_per_s"] is None:
        return ends
    return f"{format_number(tried['best_tokens_per_s'])} {unit}/s" + (f" (others: {ends})" if ends else "")


def _print(plan: Plan, knobs: list[dict[str, Any]], *, everything: bool) -> None:
    from autoplan.report import facts, terminal

    console = output.console(stderr=False)
    terminal.say_unverified(console, plan)
    unit = plan.workload.unit
    rows: list[tuple[str, ...]] = []
    for entry in knobs:
        tried = "; ".join(f"{facts.value_words(one['value'])}: {_ends_words(one, unit)}" for one in entry["tried"])
        reason = entry["reason"] or "its plain value: the search had no other value to choose from"
        rows.append((entry["knob"], facts.value_words(entry["value"]), reason, tried))
    headings = ("knob", "value", "why", "the best of each value tried")
    terminal.show_table(console, facts.Rows(headings, rows), title="Choices")
    if everything:
        failed = [trial for trial in plan.evidence if trial.outcome.value != "ok"]
        terminal.show_table(console, facts.trial_rows(failed, unit), title="Trials that did not run to their end")
        terminal.show_table(console, facts.alternatives(plan), title="Next best")
        terminal.show_table(console, facts.left_out_rows(plan.left_out), title="Ruled out, never tried")
        terminal.say(console, "hardware", facts.hardware_line(plan))
        terminal.say(console, "parity", facts.parity_words(plan.parity))
        for note in plan.notes:
            terminal.say(console, "note", note)
