"""How a search ended, on a screen and as the one document of `--json`."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.cli import ends, output

if TYPE_CHECKING:
    from autoplan.planner.records.trials import Trial
    from autoplan.planner.search.options import SearchResult

SHOWN_CANDIDATES = 20  # of a dry run, on screen; --json has them all


def show_result(result: SearchResult, out: Path, *, whole: bool = False) -> None:
    """The end of a search for a person: the plan, or why there is none and what came nearest.

    Args:
        result: How it ended.
        out: Where the plan was to go.
        whole: Show the plan as `autoplan show` does.
    """
    from autoplan.report import facts, terminal

    narration, console = output.console(), output.console(stderr=False)
    if result.status == "dry_run":
        shown = result.candidates[:SHOWN_CANDIDATES]
        title = f"{len(result.candidates):,} configurations; the {len(shown)} that are predicted fastest"
        terminal.show_table(console, facts.candidate_rows(shown), title=title)
        terminal.show_left_out(console, result.left_out, more="--json")
        sys.stderr.write("dry run: nothing was run\n")
        return
    if result.plan is not None:
        narration.print()
        show = terminal.show_plan if whole else terminal.show_summary
        show(console, result.plan, more=command_with_more(result))
        file = str(result.plan_path or out)
        path = shlex.quote(file)
        terminal.say(narration, "plan", f"{path}; autoplan show {path} has the reasons, and what lost")
        terminal.say(narration, "next", facts.next_step(result.plan, file).words)
        return
    output.tell(f"{result.status.replace('_', ' ')}: {result.reason or 'no plan'}", result.hint)
    if result.best is not None:
        ends = [result.best] if result.baseline in (None, result.best) else [result.baseline, result.best]
        content = facts.trial_rows([trial for trial in ends if trial is not None], result.unit)
        terminal.show_table(console, content, title="Best so far, not verified")
    if result.status == "no_feasible_plan":
        terminal.show_left_out(console, result.left_out, more="--json")


def command_with_more(result: SearchResult) -> str:
    """The command that was called, with twice the time, and without what ends it early or starts over."""
    twice_s = math.ceil(2 * result.budget_s)
    more = ["--budget", f"{twice_s}s" if twice_s < 120 else f"{math.ceil(twice_s / 60)}m"]
    left_out = {"--budget", "--max-trials"}
    if result.device_hours is not None:
        more = ["--max-device-hours", f"{2 * result.device_hours:g}"]
        left_out.add("--max-device-hours")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    kept, skip = [], False
    for word in words[:end]:
        name = word.partition("=")[0]
        if not skip and name not in {*left_out, "--fresh"}:
            kept.append(word)
        skip = not skip and word in left_out
    return shlex.join(["autoplan", *kept, *more, *words[end:]])


def search_document(result: SearchResult) -> dict[str, Any]:
    """The one document of `--json`: the result, each trial with its peak as one figure; intervals are {median, low,
    high, samples}. Whether the baseline is your own setting is said beside it.
    """
    from autoplan.report.pareto import pareto_document

    def document(trial: Trial | None) -> dict[str, Any] | None:
        if trial is None:
            return None
        return trial.model_dump(mode="json") | {"peak_memory_bytes": trial.peak_memory_bytes}

    return result.model_dump(mode="json", exclude={"schema_version"}) | {
        "exit_code": ends.exit_code(result.exit_code),
        "baseline": document(result.baseline),
        "baseline_is_your_setting": result.baseline is not None and result.baseline.config == result.own_setting,
        "best": document(result.best),
        "trials": [document(trial) for trial in result.trials],
        "pareto": [] if result.plan is None else pareto_document(result.plan),
    }
