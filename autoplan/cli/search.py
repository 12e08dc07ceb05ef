"""autoplan search: finds a plan by measuring, and shows it."""

from __future__ import annotations

import inspect
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from autoplan.cli import ends, output
from autoplan.cli.help import show_all
from autoplan.errors import UsageError
from autoplan.planner.search.options import GOAL, LIMITS, RECORD, SEARCH, WORKLOAD, SearchOptions, flag_name
from autoplan.strategies.config import KNOBS, knob_values
from autoplan.strategies.workloads.registry import list_models

if TYPE_CHECKING:
    from autoplan.planner.records.trials import Trial
    from autoplan.planner.search.options import Flag, SearchResult

SHOWN_CANDIDATES = 20  # of a dry run, on screen; --json has them all

PANELS = (WORKLOAD, SEARCH, GOAL, LIMITS, RECORD)
"""Of the help, the everyday ones first."""

EXAMPLES = (
    "autoplan knobs lists the knobs of --fix and --bound.\n\n"
    "Examples:\n\n"
    "autoplan search --model gpt2 --seq-len 512 --budget 30m\n\n"
    "autoplan search --model mine.py:workload --fix precision=bf16 --bound micro_batch=1..8\n\n"
    "autoplan search --trainer train.py:make_trainer --budget 10m -- --learning_rate 1e-4"
)


def with_search_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `**options` of a command the options of a search: typer reads them of its signature."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "options"]
    every = [*own, *(_parameter(name, flag) for name, flag in SearchOptions.flags().items())]
    options = [one for one in every if isinstance(one.annotation.__metadata__[0], typer.models.OptionInfo)]
    options.sort(key=lambda one: PANELS.index(one.annotation.__metadata__[0].rich_help_panel))
    every = [*(one for one in every if one not in options), *options]
    command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    return command


def _parameter(name: str, flag: Flag) -> inspect.Parameter:
    """One option of a search as typer takes it. None: it was not given, and the options have their own default."""
    field = SearchOptions.model_fields[name]
    repeated = " Repeat it for more knobs." if flag.kind is list else ""
    option = typer.Option(
        flag_name(name),
        metavar=flag.metavar or None,
        help=f"{field.description}{repeated}",
        rich_help_panel=flag.panel,
        hidden=not flag.everyday,
        autocompletion=complete_knob if flag.kind is list else _choices(field.annotation),
    )
    kind = bool if flag.kind is bool else (list[str] if flag.kind is list else flag.kind) | None
    default = field.default if isinstance(field.default, bool | str) else flag.default
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, option]
    )


def _choices(annotation: Any) -> Callable[[str], list[str]] | None:
    """The shell completion of an option's value: the words of its Literal; None: it has none."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is Literal]
    return (lambda incomplete: [str(word) for kind in kinds for word in get_args(kind)]) if kinds else None


def complete_knob(incomplete: str) -> list[str]:
    """`precision=` for a knob that is begun, then each of its values."""
    knob, equals, _ = incomplete.partition("=")
    if equals and knob in KNOBS:
        return [f"{knob}={value}" for value in knob_values(knob) or ()]
    return [f"{one}=" for one in KNOBS]


def _of_workload(metavar: str, text: str, *names: str, everyday: bool = True, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=WORKLOAD, hidden=not everyday, **more)


def _of_output(text: str, *names: str, everyday: bool = False, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=RECORD, hidden=not everyday, **more)


@with_search_options
def search_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGUMENTS]",
            help="Arguments of the file.py:function: what sys.argv has while it runs.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        _of_workload(
            "MODEL",
            "gpt2 or another built-in name, a config.json, a folder with one, or file.py:function.",
            "--model",
            autocompletion=lambda incomplete: list(list_models()),
        ),
    ] = None,
    trainer: Annotated[
        str | None,
        _of_workload(
            "FILE.PY:FUNCTION",
            "Instead of --model: a function that returns a Trainer of transformers or TRL. It does not train; "
            "arguments after -- are its script's.",
            "--trainer",
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        _of_workload("N", "Tokens per sequence. Default: the model's own length.", "--seq-len"),
    ] = None,
    global_batch: Annotated[
        int | None,
        _of_workload("N", "Samples per optimizer step. No plan changes this number. Default: 32.", "--global-batch"),
    ] = None,
    learning_rate: Annotated[
        float | None, _of_workload("X", "Learning rate of the optimizer.", "--learning-rate", everyday=False)
    ] = None,
    weight_decay: Annotated[
        float | None, _of_workload("X", "Weight decay of the optimizer.", "--weight-decay", everyday=False)
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        _of_workload("X", "Clip the norm of the gradients to this. 0: no clipping.", "--max-grad-norm", everyday=False),
    ] = None,
    json_output: Annotated[bool, _of_output(output.JSON_HELP, "--json", everyday=True)] = False,
    quiet: Annotated[bool, _of_output("No progress on stderr; errors and the result stay.", "--quiet")] = False,
    verbose: Annotated[
        bool, _of_output("A line for each piece of work, and the whole plan at the end.", "--verbose")
    ] = False,
    help_all: Annotated[
        bool,
        _of_output("Show every option and exit.", "--help-all", everyday=True, callback=show_all, is_eager=True),
    ] = False,
    **options: Any,
) -> None:
    """Search for the fastest plan on this machine.

    It measures many ways to run the training job, checks that the fastest one trains the same thing, and writes it as
    a plan. The same command again resumes the search. If the search has ended, it answers from the record.
    """
    from autoplan import api
    from autoplan.report import facts
    from autoplan.strategies.workloads import sources

    given = {name: value for name, value in options.items() if value is not None}
    if quiet and verbose:
        raise UsageError("--quiet and --verbose were given", hint="Give one of them.")
    loose = [text for text in (*given.get("fix", ()), *given.get("bound", ())) if "=" not in text]
    if loose and arguments:
        raise UsageError(
            f"a knob is given without its value: {loose[0]}", hint=f"In one word: {loose[0]}={arguments[0]}"
        )
    named = named_workload(model, trainer)
    said = {"learning_rate": learning_rate, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
    said = {name: value for name, value in {**said, "seed": given.get("seed")}.items() if value is not None}
    if max_grad_norm == 0:
        said["max_grad_norm"] = None  # how a spec says: no clipping
    sizes: Any = {"sequence_length": sequence_length, "global_batch": global_batch}
    spec = sources.make_spec(model=named, **sizes, options=said, arguments=arguments or ())
    asked = SearchOptions(spec=spec, **given)
    if not quiet:  # nothing shrinks in silence
        defaults = (f"  default: {text}" for text in asked.spec.defaults_used)
        for text in (f"workload: {facts.workload_line(asked.spec)}", *defaults):
            output.say(text)
    result = api.run(asked, quiet=quiet, verbose=verbose)
    if json_output:
        output.print_json(search_document(result))
    else:
        show_result(result, Path(given["out"]), whole=verbose)
    if result.status == "interrupted":
        ends.said.append(result.status)
    raise typer.Exit(ends.exit_code(result.exit_code))


def named_workload(model: str | None, trainer: str | None) -> str:
    """The workload that --model or --trainer names; UsageError if neither or both are given."""
    if model is not None and trainer is not None:
        raise UsageError("--model and --trainer were given", hint="Give one of them.")
    from autoplan.strategies.workloads.function_file import NAMED

    if trainer is not None and not NAMED.fullmatch(trainer):
        raise UsageError(
            f"--trainer is {trainer!r}; it is file.py:function", hint="For example: --trainer train.py:make_trainer"
        )
    named = model if trainer is None else trainer
    if named is None:
        raise UsageError("no workload was named", hint="For example: --model gpt2, or --trainer train.py:make_trainer")
    return named


# How a search ended.


def show_result(result: SearchResult, out: Path, *, whole: bool = False) -> None:
    """The end of a search for a person: the plan, or why there is none and what came nearest.

    Args:
        result: How it ended.
        out: Where the plan was to go.
        whole: Show the plan as `autoplan show` does.
    """
    from autoplan.report import facts, pieces, terminal

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
        both = [result.best] if result.baseline in (None, result.best) else [result.baseline, result.best]
        content = facts.trial_rows([trial for trial in both if trial is not None], result.unit)
        terminal.show_table(console, content, title="Best so far, not verified")
    if (time := pieces.time_words(result.ledger, result.own_setting)) is not None:
        terminal.say(console, "time", time)
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
    from autoplan.report import facts

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
        "pareto": [] if result.plan is None else facts.pareto_document(result.plan),
    }
