"""The library's front door: search, probe, load_plan, export. Loads torch only where a call needs it.

    import autoplan

    plan = autoplan.search(model=build_model, make_batch=make_batch, loss=loss, optimizer=build_optimizer,
                           global_batch=64, budget="10m")
    run = plan.prepare(model, optimizer, loss)
    for batch in loader:              # run.local_batch samples a step
        result = run.step(batch)

Works from a plain script without a main guard, from a notebook and from a closure: trials run in processes that
never import the caller's main module again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from autoplan.errors import (
    AutoplanError,
    BudgetEndedError,
    DidNotRunError,
    InterruptedSearchError,
    NoFeasiblePlanError,
    UsageError,
    as_keywords,
)
from autoplan.planner.export.run import Exported, export_plan
from autoplan.planner.plan.hardware import found_elsewhere
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trust import secrets_note
from autoplan.planner.search.options import DeviceName, SearchKeywords, SearchObserver, SearchOptions, SearchResult
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.workloads.frameworks import MODULES, framework_of, is_one_of
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.text import right_name
from autoplan.trainings import allowed_precisions, read_training

if TYPE_CHECKING:
    from autoplan.strategies.workloads.loops.mean_loss import LossMean
    from autoplan.strategies.workloads.loops.schedules import ScheduleInterval
    from autoplan.strategies.workloads.workload import Workload

ENDINGS: Mapping[str, type[AutoplanError]] = {
    kind.code: kind for kind in (NoFeasiblePlanError, DidNotRunError, BudgetEndedError, InterruptedSearchError)
}
OPTIONS_LINE = "        **options: What the search is asked for: the fields of SearchOptions, each with its default.\n"
"""The line of a docstring in whose place the options are named."""


P = ParamSpec("P")
R = TypeVar("R")


def _with_options(call: Callable[P, R]) -> Callable[P, R]:
    """Gives `**options` of a call their names, defaults and descriptions, in its signature and in its docstring."""
    flags, fields = SearchOptions.flags(), SearchOptions.model_fields
    own = inspect.signature(call)
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=fields[name].get_default(call_default_factory=True),
            annotation=SearchKeywords.__annotations__[name],
        )
        for name in SearchKeywords.__annotations__
    ]
    signature = own.replace(parameters=[*list(own.parameters.values())[:-1], *options])

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - signature.parameters.keys():
            near = right_name(name, signature.parameters)
            raise TypeError(
                f"autoplan.{call.__name__}() got an unexpected keyword argument {name!r}"
                + (f"; did you mean {near}?" if near else "")
            )
        try:
            return call(*args, **kwargs)
        except AutoplanError as error:
            raise error.with_traceback(None) from error.__cause__  # the frames inside say nothing of what was given

    texts = {name: as_keywords(f"{fields[name].description} {flags[name].in_python}".strip()) for name in flags}
    lines = [
        textwrap.fill(f"{option.name}: {texts[option.name]}", 110, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for option in options
    ]
    before, line, after = (call.__doc__ or "").partition(OPTIONS_LINE)
    checked.__doc__ = before + "\n".join(lines) + "\n" + after if line else call.__doc__
    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


@_with_options
def search(
    workload: Workload | str | Path | Any | None = None,
    optimizer: Any = None,
    dataloader: Any = None,
    loss: Callable[..., Any] | None = None,
    *,
    model: Any = None,
    make_batch: Callable[[int, int], Any] | None = None,
    schedule: Callable[[Any], Any] | None = None,
    schedule_interval: ScheduleInterval = "step",
    max_grad_norm: float | None = None,
    loss_mean: LossMean | None = None,
    accelerator: Any = None,
    trainer: Any = None,
    step: Callable[[], Callable[[int], Any]] | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    name: str | None = None,
    observer: SearchObserver | None = None,
    quiet: bool = False,
    **options: Unpack[SearchKeywords],
) -> Plan:
    """Searches for the fastest way to run a workload on this machine, and returns the verified plan.

    Calling it again with the same workload resumes what an earlier call left, or answers from its record.

    Args:
        workload: A Workload; or a Trainer of transformers or TRL (apply the plan with `plan.apply_to(trainer)`); or the
            text that `--model` takes: gpt2, a config.json, a folder, `file.py:function`; or the model of a training
            loop, or a LightningModule (docs/loops.md).
        optimizer: A function that makes the optimizer from the model's parameters; with a model, an optimizer over it.
            After a LightningModule: its datamodule or DataLoader.
        dataloader: The torch DataLoader of a training loop, whose batches are measured; a prepared one too.
        loss: `loss(model, batch)` gives the summed loss and the count of its items. With a dataloader also a scalar
            mean, or a loss of torch for batches of (inputs, targets); None: `model(**batch).loss`.
        model: Instead of a workload: a function that builds the model, or a model.
        make_batch: `make_batch(num_samples, index)` gives a batch on the CPU, as large as the worst that comes.
        schedule: Makes the learning-rate schedule from the optimizer; with a dataloader also the loop's own schedule.
        schedule_interval: With a dataloader, "epoch" where the loop steps its schedule once an epoch.
        max_grad_norm: Clip the gradients' norm to this before each optimizer step.
        loss_mean: With a dataloader, over what a scalar loss averages: "samples", "tokens", "batches". None: measured.
        accelerator: The Accelerator of a loop, for its accumulation. None: it is found in what it prepared.
        trainer: With a LightningModule, the lightning.Trainer whose accumulation, clipping and precision are read.
        step: Instead of all of these: make_step(), which sets a training up and returns step(index) -> loss. Only
            threads, the allocator and, where `bound` or `fix` allow it, precision are tried around it (docs/loops.md).
        global_batch: Samples per optimizer step; no plan changes it. Default: the workload's own, or 32.
        sequence_length: Tokens per sample. Default: the model's own length; None for samples that are no sequences.
        name: How screens and the plan call the workload.
        observer: Its methods are called with what happens. Default: progress on stderr.
        quiet: No progress on stderr.
        **options: What the search is asked for: the fields of SearchOptions, each with its default.

    Raises:
        UsageError: an argument is wrong (WorkloadError, ConfigError, StoreError among them).
        NoFeasiblePlanError: nothing fits or runs.
        DeviceError: the device is missing, or another search measures on it (DeviceBusyError).
        DidNotRunError: something outside ended it each time, and nothing is known of it; the same call tries it again.
        BudgetEndedError: the budget ended before a verified plan.
        InterruptedSearchError: Ctrl-C; the same call resumes.
    """
    if workload is None and model is None and framework_of(trainer) is not None:  # a Trainer by its name
        workload, trainer = trainer, None
    has_batches = make_batch is not None and dataloader is None and model is None
    if has_batches and is_one_of(workload, MODULES) and framework_of(workload) is None:  # a model first
        workload, model = None, workload
    spec = make_workload_spec(
        workload,
        parts={
            "model": model,
            "make_batch": make_batch,
            "loss": loss,
            "optimizer": optimizer,
            "schedule": schedule,
            "max_grad_norm": max_grad_norm,
            "name": name,
            "dataloader": dataloader,
            "loss_mean": loss_mean,
            "schedule_interval": None if schedule_interval == "step" else schedule_interval,
            "accelerator": accelerator,
            "trainer": trainer,
            "step": step,
            "precisions": None if step is None else allowed_precisions(options.get("fix"), options.get("bound")),
        },
        global_batch=global_batch,
        sequence_length=sequence_length,
        seed=options.get("seed", 0),
    )
    asked = SearchOptions.model_validate({"spec": spec, **options})
    with _off_the_device(model if workload is None else workload):
        result = run(asked, observer=observer, quiet=quiet)
    if result.plan is not None:
        return result.plan
    ending = ENDINGS.get(result.status, AutoplanError)
    raise ending(result.reason or f"the search ended without a plan: {result.status}", hint=result.hint)


@contextlib.contextmanager
def _off_the_device(training: Any) -> Iterator[None]:
    """Keeps the models of a training in host memory while trials use the GPU, and puts them back."""
    is_model = is_one_of(training, MODULES)
    if not is_model and framework_of(training) is None:
        yield
        return
    from autoplan.strategies.workloads.devices import on_the_host

    with on_the_host(SimpleNamespace(model=training) if is_model else training):
        yield


def run(
    options: SearchOptions, *, observer: SearchObserver | None = None, quiet: bool = False, verbose: bool = False
) -> SearchResult:
    """Runs a search with its progress on stderr, unless an observer takes it or it is to be quiet.

    Args:
        options: What it is asked for.
        observer: Takes what happens in place of stderr.
        quiet: No progress.
        verbose: A line for each event on a terminal too, as in a log.
    """
    from autoplan.planner.search.run import run_search

    said = secrets_note(options.spec)
    if said is not None:
        sys.stderr.write(f"note: {said}\n")
    if observer is not None or quiet:
        return run_search(options, observer=observer)
    from autoplan.report.progress import LiveProgress, PlainProgress
    from autoplan.report.screen import make_console

    console = make_console(sys.stderr)
    if verbose or not console.is_terminal:
        return run_search(options, observer=PlainProgress(console, options.spec.unit))
    with LiveProgress(console, options.spec.unit) as live:
        return run_search(options, observer=live)


def make_workload_spec(
    workload: Any,
    *,
    parts: Mapping[str, Any] = MappingProxyType({}),
    global_batch: int | None,
    sequence_length: int | None,
    seed: int = 0,
) -> WorkloadSpec:
    """The spec of what `search` was given: a text by reference, objects by cloudpickle.

    Args:
        workload: A Workload, a text, or the first part of a training.
        parts: Of a workload, or of a training as it stands.
        global_batch, sequence_length, seed: As given.
    """
    from autoplan.strategies.workloads import sources

    given = {name: value for name, value in parts.items() if value is not None}
    if isinstance(workload, WorkloadSpec):
        return workload
    if isinstance(workload, (str, Path)):
        if others := given.keys() - {"max_grad_norm"}:
            raise UsageError(
                f"the workload is {str(workload)!r}, and {', '.join(sorted(others))} was given too",
                hint="Give either the name of a workload or its parts.",
            )
        options = given | ({"seed": seed} if seed else {})
        return sources.make_spec(
            model=str(workload), global_batch=global_batch, sequence_length=sequence_length, options=options
        )
    holder = parts.get("model") if workload is None else workload
    settings = {"global_batch": global_batch, "sequence_length": sequence_length, "seed": seed}
    if (taken_over := read_training(workload, given, settings)) is not None:
        workload, given = taken_over, {name: value for name, value in given.items() if name == "name"}
    with _off_the_device(holder):  # a model travels from host memory
        return sources.spec_from_objects(
            workload, global_batch=global_batch, sequence_length=sequence_length, seed=seed, **given
        )


def probe(*, device: DeviceName | None = None, fresh: bool = False) -> HardwareProfile:
    """Measures what this machine can do, or answers from the cache if it was measured before.

    Raises:
        DeviceError: there is no such device.
    """
    from autoplan.probes.run import run_probes

    return run_probes(device=device, fresh=fresh)


def load_plan(path: str | Path) -> Plan:
    """Reads a plan file. A plan is data: loading one never runs code.

    Raises:
        PlanError: no such file, not a plan, or of a newer schema.
    """
    plan = Plan.load(path)
    for note in (*plan.load_notes, found_elsewhere(plan)):
        if note:
            sys.stderr.write(f"note: {note}\n")
    return plan


def export(
    plan: Plan | str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    budget: str | float | None = None,
    memory_limit: str | int | None = None,
    unverified_ok: bool = False,
    changed_ok: bool = False,
    workload: str | Path | None = None,
    force: bool = False,
) -> Exported:
    """Writes a plan for another trainer; `autoplan export --help` lists the targets.

    Args:
        plan: A plan, or the file of one.
        to: The target.
        out: The file to write; None: `plan-<target>` in the current folder.
        budget: Time for building the workload's model, where the target needs it, like `"2m"`. Default: 5 minutes.
        memory_limit: What that may take, like `"8GiB"` or `"80%"`. Default: 80 % of what is available.
        unverified_ok: Export it although it is unverified: the best so far of a search that ended before its proof.
        changed_ok: Export it although the plan was edited, or the workload's code changed.
        workload: What the plan is of, as you name it: a text as `--model` takes it. Not needed where you searched it.
        force: Overwrite files that are there already; without it that is refused, and nothing is written.

    Raises:
        UsageError: no such target, or a file is there already.
        PlanError: the plan was edited, its code changed, or it alone names that code.
        ExportError: the target cannot carry the plan, or the export failed its own check.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    said = secrets_note(loaded.workload)
    if said is not None:
        warnings.warn(said, stacklevel=2)
    return export_plan(
        loaded.accepted(unverified_ok),
        to,
        out,
        budget=budget,
        memory_limit=memory_limit,
        changed_ok=changed_ok,
        workload=workload,
        force=force,
    )
