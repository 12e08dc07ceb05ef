"""autoplan search: finds a plan by measuring, and shows it."""

from __future__ import annotations

import inspect
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
    from autoplan.planner.search.options import Flag

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
    from autoplan.cli.search_result import search_document, show_result
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
            output.console().print(text, markup=False, soft_wrap=True)
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
