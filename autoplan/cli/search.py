"""autoplan search: finds a plan by measuring, and shows it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli import ends, output
from autoplan.cli.workloads import make_spec, named_workload
from autoplan.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoplan.planner.search.options import SearchOptions
    from autoplan.strategies.workloads.loading.settings import LoaderSpec
    from autoplan.strategies.workloads.spec import WorkloadSpec

WORKLOAD, SEARCH, OUTPUT = "What is trained", "The search", "Output"

EXAMPLES = (
    "Examples:\n\n"
    "autoplan search --model gpt2 --seq-len 512 --budget 30m\n\n"
    "autoplan search --model mine.py:workload --fix precision=bf16 --bound micro_batch=1..8\n\n"
    "autoplan search --trainer train.py:make_trainer --budget 10m -- --learning_rate 1e-4"
)


def search_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGUMENTS]",
            help="Arguments of the file.py:function: what sys.argv has while it runs.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="gpt2 or another built-in name, a config.json, a folder with one, or file.py:function.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--trainer",
            metavar="FILE.PY:FUNCTION",
            help="Instead of --model: a function that returns a Trainer of transformers or TRL. It does not train; "
            "arguments after -- are its script's.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
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
    loader: Annotated[
        str | None,
        typer.Option(
            "--loader",
            metavar="FILE.PY:FUNCTION",
            help="Measure the training's own data beside the plan's step: a function that returns a dataset or a "
            "DataLoader, or a file of tokens (.bin, .npy).",
            rich_help_panel=WORKLOAD,
        ),
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
            help="Memory that one trial may use: 8GiB, or 80% of all memory. Default: 80% of the free memory; of a "
            "GPU 95%, less what CUDA itself takes.",
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
    numerics: Annotated[
        str,
        typer.Option(
            "--numerics",
            metavar="KIND",
            help="kept, or lossy: also try parameters, states and products in fewer bits. The plan names the risk.",
            rich_help_panel=SEARCH,
        ),
    ] = "kept",
    sampler: Annotated[
        str,
        typer.Option(
            "--sampler",
            metavar="NAME",
            help="How the next trial is chosen: autoplan, or tpe or random of Optuna.",
            rich_help_panel=SEARCH,
        ),
    ] = "autoplan",
    short_trials: Annotated[
        str | None, typer.Option("--short-trials", help="Of earlier versions; it is refused.", hidden=True)
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="What the plan should be best in: throughput, memory (the least, at a floor of throughput) or cost "
            "(the least time of all ranks together).",
            rich_help_panel=SEARCH,
        ),
    ] = "throughput",
    min_throughput: Annotated[
        float | None,
        typer.Option(
            "--min-throughput",
            metavar="SHARE",
            help="With --objective memory: the floor, as a share of the best throughput. Default: 0.9.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            "--price-per-hour",
            metavar="X",
            help="Of one device: the plan says what a million tokens cost.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
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
    recheck: Annotated[
        bool,
        typer.Option(
            "--recheck",
            help="If this search has finished before, run its plan in one short trial: does it still hold?",
            rich_help_panel=SEARCH,
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
    from autoplan.cli.search_result import search_document, show_result
    from autoplan.planner.search.option_checks import refuse_short_trials
    from autoplan.planner.search.options import SearchOptions

    refuse_short_trials(short_trials)
    spec = make_spec(
        named_workload(model, trainer),
        sequence_length,
        global_batch,
        arguments,
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
        recheck=recheck,
        objective=objective,
        min_throughput=min_throughput,
        price_per_hour=price_per_hour,
        numerics=numerics,  # type: ignore[arg-type]
        dry_run=dry_run,
        seed=seed or 0,
        loader=None if loader is None else loader_of(loader, spec, arguments or ()),
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


def loader_of(text: str, spec: WorkloadSpec, arguments: Sequence[str]) -> LoaderSpec:
    """The loader that `--loader` names; a file of tokens is read in windows of the model's length."""
    from autoplan.strategies.workloads.loading.source import spec_of_text
    from autoplan.strategies.workloads.sources import vocabulary_of

    return spec_of_text(
        text, sequence_length=spec.sequence_length, vocabulary=vocabulary_of(spec), arguments=tuple(arguments)
    )


def parse_fixes(texts: list[str]) -> dict[str, Any]:
    """`knob=value` texts; UsageError for a knob that is fixed twice to different values."""
    from autoplan.strategies.knob_input import parse_knob

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
