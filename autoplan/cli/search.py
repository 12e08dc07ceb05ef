"""autoplan search: finds a plan by measuring, and shows it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli import ends, output
from autoplan.errors import UsageError
from autoplan.text import printable

if TYPE_CHECKING:
    from autoplan.planner.records import LeftOutFamily, Trial
    from autoplan.planner.search.options import Candidate, SearchOptions, SearchResult
    from autoplan.strategies.workloads.spec import WorkloadSpec

SHOWN_CANDIDATES = 20  # of a dry run, on screen; --json has them all
WORKLOAD, SEARCH, OUTPUT = "What is trained", "The search", "Output"

EXAMPLES = (
    "Examples:\n\n"
    "autoplan search --model gpt2 --seq-len 512 --budget 30m\n\n"
    "autoplan search --model mine.py:workload --fix precision=bf16 --bound micro_batch=1..8"
)


def search_command(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="gpt2 or another built-in name, a config.json, a folder with one, or file.py:function.",
            rich_help_panel=WORKLOAD,
        ),
    ],
    sequence_length: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            metavar="N",
            help="Tokens per sequence. Default: the model's own length.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            metavar="N",
            help="Samples per optimizer step. No plan changes this number. Default: 32.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option("--learning-rate", metavar="X", help="Learning rate of the optimizer.", rich_help_panel=WORKLOAD),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option("--weight-decay", metavar="X", help="Weight decay of the optimizer.", rich_help_panel=WORKLOAD),
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(
            "--max-grad-norm",
            metavar="X",
            help="Clip the norm of the gradients to this. 0: no clipping.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Seed of the weights, the batches and the search. Default: 0.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="Time for the whole search: 90s, 10m, 1h30m. A larger one extends an earlier search. Default: 10m.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option("--max-trials", metavar="N", help="Run at most this number of trials.", rich_help_panel=SEARCH),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(
            "--fix",
            metavar="KNOB=VALUE",
            help="Keep a knob at one value, for example precision=bf16. Repeat it for more knobs.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    bound: Annotated[
        list[str] | None,
        typer.Option(
            "--bound",
            metavar="KNOB=VALUES",
            help="Keep a knob in a range (micro_batch=1..8) or a list (precision=fp32,bf16). Repeat it for more knobs.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cuda or cpu. Default: cuda if the machine has a GPU.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit",
            metavar="SIZE",
            help="Memory that one trial may use: 8GiB, or 80% of all memory. Default: 80% of the free memory.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            metavar="N",
            help="Use at most this number of processes (ranks). Default: the number of visible GPUs; 1 on CPU.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    sampler: Annotated[
        str,
        typer.Option(
            "--sampler",
            metavar="NAME",
            help="How the next trial is chosen: autoplan, or tpe or random of Optuna.",
            rich_help_panel=SEARCH,
        ),
    ] = "autoplan",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="List the configurations with their predicted memory and time. Run no trial.",
            rich_help_panel=SEARCH,
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The plan file to write.", rich_help_panel=OUTPUT)
    ] = Path("plan.json"),
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="DIR",
            help="Folder for the records of searches; each search has a folder of its own in it. "
            "Default: a folder in the user's state folder.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Start this search from zero. Its earlier record is moved aside, not deleted.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait while another search uses the device. Default: end with exit code 4.",
            rich_help_panel=SEARCH,
        ),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help=output.JSON_HELP, rich_help_panel=OUTPUT)] = False,
) -> None:
    """Search for the fastest plan on this machine.

    It measures many ways to run the training job, checks that the fastest one trains the same thing, and writes it as
    a plan. The same command again resumes the search. If the search has ended, it answers from the record.
    """
    from autoplan import api
    from autoplan.planner.search.options import SearchOptions

    spec = make_spec(
        model,
        sequence_length,
        global_batch,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        seed=seed,
    )
    options = SearchOptions(
        spec=spec,
        budget=budget,
        max_trials=max_trials,
        fix=parse_fixes(fix or []),
        bound=parse_bounds(bound or []),
        device=device,  # type: ignore[arg-type]  # any text: the options check it
        memory_limit=memory_limit,
        nproc=nproc,
        sampler=sampler,  # type: ignore[arg-type]
        out=out,
        store=store,
        fresh=fresh,
        wait=wait,
        dry_run=dry_run,
        seed=seed or 0,
    )
    say_what_is_searched(options)
    result = api.run(options)
    if json_output:
        output.print_json(search_document(result))
    else:
        show_result(result, out, spec.unit)
    if result.status == "interrupted":
        ends.said.append(result.status)
    raise typer.Exit(ends.exit_code(result.exit_code))


def make_spec(model: str, sequence_length: int | None, global_batch: int | None, **options: Any) -> WorkloadSpec:
    """The workload that the options name; WorkloadError says what is wrong with them."""
    from autoplan.strategies.workloads import sources

    given = {name: value for name, value in options.items() if value is not None}
    if given.get("max_grad_norm") == 0:
        given["max_grad_norm"] = None  # how a spec says: no clipping
    return sources.make_spec(model=model, sequence_length=sequence_length, global_batch=global_batch, options=given)


def parse_fixes(texts: list[str]) -> dict[str, Any]:
    """`knob=value` texts; UsageError for a knob that is fixed twice to different values."""
    from autoplan.strategies.config import parse_knob

    fixed: dict[str, Any] = {}
    for text in texts:
        knob, value = parse_knob(text)
        if knob in fixed and fixed[knob] != value:
            raise UsageError(
                f"--fix {knob} is given twice, as {fixed[knob]} and as {value}",
                hint=f"Fix it once, or give --bound {knob}={fixed[knob]},{value}.",
            )
        fixed[knob] = value
    return fixed


def parse_bounds(texts: list[str]) -> dict[str, Any]:
    """`knob=low..high` and `knob=a,b` texts; UsageError for a knob that is bounded twice to different values."""
    from autoplan.planner.space.bounds import parse_bound

    bounds: dict[str, Any] = {}
    for text in texts:
        knob, bound = parse_bound(text)
        if knob in bounds and bounds[knob] != bound:
            raise UsageError(
                f"--bound {knob} is given twice, as {bounds[knob].describe()} and as {bound.describe()}",
                hint="Bound it once: a range (1..8), or all its values in one list (1,2,8).",
            )
        bounds[knob] = bound
    return bounds


def say_what_is_searched(options: SearchOptions) -> None:
    """The workload and what was not given, on stderr: nothing shrinks in silence."""
    from autoplan.report import facts

    console = output.console()
    console.print(f"workload: {facts.workload_line(options.spec)}", markup=False, soft_wrap=True)
    for text in options.spec.defaults_used:
        console.print(f"  default: {text}", markup=False, soft_wrap=True)


def show_result(result: SearchResult, out: Path, unit: str) -> None:
    """The end of a search for a person: the plan, or why there is none and what came nearest."""
    from autoplan.report import facts, terminal

    narration, console = output.console(), output.console(stderr=False)
    if result.status == "dry_run":
        show_dry_run(result)
        return
    if result.plan is not None:
        console.print()
        terminal.show_plan(console, result.plan)
        if result.from_record:
            terminal.say(narration, "note", "this search had finished: its record answers (--fresh starts over)")
        place = result.plan_path or out
        terminal.say(narration, "plan", f"{place}; apply it with plan.prepare(), autoplan export or autoplan run")
        return
    if result.best is not None:
        ends = [result.best] if result.baseline in (None, result.best) else [result.baseline, result.best]
        content = facts.trial_rows([trial for trial in ends if trial is not None], unit)
        terminal.show_table(console, content, title="Best so far, not verified")
    terminal.show_left_out(console, result.left_out, more="--json")
    sys.stderr.write(printable(f"{result.status.replace('_', ' ')}: {result.reason or 'no plan'}\n"))
    if result.hint:
        sys.stderr.write(f"  {result.hint}\n")


def show_dry_run(result: SearchResult) -> None:
    """The space, the fastest predictions first."""
    from autoplan.report import facts, terminal

    console = output.console(stderr=False)
    shown = result.candidates[:SHOWN_CANDIDATES]
    title = f"{len(result.candidates):,} configurations; the {len(shown)} that are predicted fastest"
    terminal.show_table(console, facts.candidate_rows(shown), title=title)
    terminal.show_left_out(console, result.left_out, more="--json")
    sys.stderr.write("dry run: nothing was run\n")


def search_document(result: SearchResult) -> dict[str, Any]:
    """The one document of `--json`."""
    return {
        "status": result.status,
        "reason": result.reason,
        "hint": result.hint,
        "exit_code": ends.exit_code(result.exit_code),
        "baseline": None if result.baseline is None else trial_document(result.baseline),
        "plan": None if result.plan is None else result.plan.model_dump(mode="json"),
        "plan_path": result.plan_path,
        "best": None if result.best is None else trial_document(result.best),
        "trials": [trial_document(trial) for trial in result.trials],
        "attempts": [attempt.model_dump(mode="json") for attempt in result.attempts],
        "left_out": [left_out_document(family) for family in result.left_out],
        "candidates": [candidate_document(candidate) for candidate in result.candidates],
        "from_record": result.from_record,
        "resumed_trials": result.resumed_trials,
        "budget_s": result.budget_s,
        "spent_s": result.spent_s,
        "study": result.study,
        "store": result.store,
        "notes": list(result.notes),
    }


def trial_document(trial: Trial) -> dict[str, Any]:
    """A trial, with its peak as one figure; intervals are {median, low, high, samples}."""
    return trial.model_dump(mode="json") | {"peak_memory_bytes": trial.peak_memory_bytes}


def left_out_document(family: LeftOutFamily) -> dict[str, Any]:
    """A family that was never tried: which limit, by how much."""
    return family.model_dump(mode="json")


def candidate_document(candidate: Candidate) -> dict[str, Any]:
    """A candidate of a dry run."""
    return candidate.model_dump(mode="json")
