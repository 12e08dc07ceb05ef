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

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import (
    AutoplanError,
    BudgetEndedError,
    DidNotRunError,
    InterruptedSearchError,
    NoFeasiblePlanError,
    UsageError,
)
from autoplan.planner.export.run import Exported, export_plan
from autoplan.planner.plan import Plan
from autoplan.planner.search.options import DeviceName, SamplerName, SearchObserver, SearchOptions, SearchResult
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    import optuna

    from autoplan.strategies.workloads.workload import Workload

ENDINGS: Mapping[str, type[AutoplanError]] = {
    "no_feasible_plan": NoFeasiblePlanError,
    "did_not_run": DidNotRunError,
    "budget_ended": BudgetEndedError,
    "interrupted": InterruptedSearchError,
}


def search(
    workload: Workload | str | Path | None = None,
    *,
    model: Any = None,
    make_batch: Callable[[int, int], Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = None,
    schedule: Callable[[Any], Any] | None = None,
    max_grad_norm: float | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    name: str | None = None,
    seed: int = 0,
    budget: str | float | None = None,
    max_trials: int | None = None,
    fix: Mapping[str, Any] | None = None,
    bound: Mapping[str, Any] | None = None,
    device: DeviceName | None = None,
    memory_limit: str | int | None = None,
    nproc: int | None = None,
    sampler: SamplerName | optuna.samplers.BaseSampler = "autoplan",
    out: str | Path | None = None,
    store: str | Path | None = None,
    fresh: bool = False,
    wait: bool = False,
    observer: SearchObserver | None = None,
    quiet: bool = False,
) -> Plan:
    """Searches for the fastest way to run a workload on this machine, and returns the verified plan.

    Calling it again with the same workload resumes what an earlier call left, or answers from its record.

    Args:
        workload: A Workload; or the text that `--model` takes: gpt2, a config.json, a folder, `file.py:function`.
        model: Instead of a workload: a function that builds the model, or a model.
        make_batch: `make_batch(num_samples, index)` gives a batch on the CPU, as large as the worst that comes.
        loss: `loss(model, batch)` gives the summed loss and the count of its items.
        optimizer: A function that makes the optimizer from the model's parameters; with a model, an optimizer over it.
        schedule: A function that makes the learning-rate schedule from the optimizer.
        max_grad_norm: Clip the gradients' norm to this before each optimizer step.
        global_batch: Samples per optimizer step; no plan changes it. Default: the workload's own, or 32.
        sequence_length: Tokens per sample. Default: the model's own length; None for samples that are no sequences.
        name: How screens and the plan call the workload.
        seed: Of weights, batches and the search.
        budget: Time for the search over all its calls, like `"10m"`, or seconds. Default: 10 minutes.
        max_trials: At most so many trials.
        fix: Knobs to keep at one value, like `{"precision": "bf16"}`.
        bound: Knobs to keep within bounds, like `{"micro_batch": (1, 8), "precision": ["fp32", "bf16"]}`.
        device: "cuda" or "cpu". Default: CUDA where there is one.
        memory_limit: What a trial may take, like `"8GiB"` or `"80%"`. Default: 80 % of what is available;
            of a GPU 95 %, less what a process takes there before any tensor.
        nproc: The largest number of ranks. Default: all visible GPUs; 1 on CPU.
        sampler: Which configuration is tried next: "autoplan", Optuna's "tpe" or "random", or a sampler object of
            Optuna, whose illegal points are drawn again at no trial's cost.
        out: A file to write the plan to, too.
        store: The folder of the searches' records; each search has a folder of its own in it. Default: the user's
            state folder.
        fresh: Start over instead of resuming; what the store has of this search is moved aside, not deleted.
        wait: Wait where another search measures on this device; the wait costs no budget. Default: an error.
        observer: Its methods are called with what happens. Default: progress on stderr.
        quiet: No progress on stderr.

    Raises:
        UsageError: an argument is wrong (WorkloadError, ConfigError, StoreError among them).
        NoFeasiblePlanError: nothing fits or runs.
        DeviceError: the device is missing, or another search measures on it (DeviceBusyError).
        DidNotRunError: something outside ended it each time, and nothing is known of it; the same call tries it again.
        BudgetEndedError: the budget ended before a verified plan.
        InterruptedSearchError: Ctrl-C; the same call resumes.
    """
    spec = _make_spec(
        workload,
        parts={
            "model": model,
            "make_batch": make_batch,
            "loss": loss,
            "optimizer": optimizer,
            "schedule": schedule,
            "max_grad_norm": max_grad_norm,
            "name": name,
        },
        global_batch=global_batch,
        sequence_length=sequence_length,
        seed=seed,
    )
    options = SearchOptions(
        spec=spec,
        budget=budget,
        max_trials=max_trials,
        fix=fix or {},
        bound=bound or {},
        device=device,
        memory_limit=memory_limit,
        nproc=nproc,
        sampler=sampler,
        out=out,
        store=store,
        fresh=fresh,
        wait=wait,
        seed=seed,
    )
    result = run(options, observer=observer, quiet=quiet)
    if result.plan is not None:
        return result.plan
    ending = ENDINGS.get(result.status, AutoplanError)
    raise ending(result.reason or f"the search ended without a plan: {result.status}", hint=result.hint)


def run(options: SearchOptions, *, observer: SearchObserver | None = None, quiet: bool = False) -> SearchResult:
    """Runs a search with its progress on stderr, unless an observer takes it or it is to be quiet."""
    from autoplan.planner.search.run import run_search

    if observer is not None or quiet:
        return run_search(options, observer=observer)
    from autoplan.report.progress import LiveProgress, PlainProgress
    from autoplan.report.screen import make_console

    console = make_console(sys.stderr)
    if not console.is_terminal:
        return run_search(options, observer=PlainProgress(console, options.spec.unit))
    with LiveProgress(console, options.spec.unit) as live:
        return run_search(options, observer=live)


def _make_spec(
    workload: Any, *, parts: dict[str, Any], global_batch: int | None, sequence_length: int | None, seed: int
) -> WorkloadSpec:
    """The spec of what `search` was given: a text by reference, objects by cloudpickle."""
    from autoplan.strategies.workloads import sources

    given = {name: value for name, value in parts.items() if value is not None}
    if isinstance(workload, WorkloadSpec):
        return workload
    if isinstance(workload, (str, Path)):
        if set(given) - {"max_grad_norm"}:
            raise UsageError(
                f"the workload is {str(workload)!r}, and {', '.join(sorted(given))} was given too",
                hint="Give either the name of a workload or its parts.",
            )
        options = given | ({"seed": seed} if seed else {})
        return sources.make_spec(
            model=str(workload), global_batch=global_batch, sequence_length=sequence_length, options=options
        )
    return sources.spec_from_objects(
        workload, global_batch=global_batch, sequence_length=sequence_length, seed=seed, **given
    )


def probe(*, device: DeviceName | None = None, fresh: bool = False) -> HardwareProfile:
    """What this machine can do: measured, or from the cache where it was measured before.

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
    for note in plan.load_notes:
        sys.stderr.write(f"note: {note}\n")
    other = found_elsewhere(plan)
    if other:
        sys.stderr.write(f"note: {other}\n")
    return plan


def export(
    plan: Plan | str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    budget: str | float | None = None,
    memory_limit: str | int | None = None,
    changed_ok: bool = False,
    trust_code: bool = False,
    workload: str | Path | None = None,
) -> Exported:
    """Writes a plan for another trainer: json, yaml, pytorch or transformers.

    Args:
        plan: A plan, or the file of one.
        to: The target.
        out: The file to write; None: `plan-<target>` in the current folder.
        budget: Time for building the workload's model, where the target needs it, like `"2m"`. Default: 5 minutes.
        memory_limit: What that may take, like `"8GiB"` or `"80%"`. Default: 80 % of what is available.
        changed_ok: Export it although the plan was edited, or the workload's code changed.
        trust_code: Run the file that the plan names, whoever made the plan.
        workload: The plan's file, named again: where it is now. It is trusted then.

    Raises:
        UsageError: no such target.
        PlanError: the plan was edited, its code changed, or it names code that nobody vouches for.
        ExportError: the target cannot carry the plan, or the export failed its own check.
    """
    return export_plan(
        plan if isinstance(plan, Plan) else Plan.load(plan),
        to,
        out,
        budget=budget,
        memory_limit=memory_limit,
        changed_ok=changed_ok,
        trust_code=trust_code,
        workload=workload,
    )


def found_elsewhere(plan: Plan) -> str | None:
    """A sentence where the plan was found on other hardware than this; None where it is the same.

    A plan loads anywhere; what it says was measured where it was found.
    """
    from autoplan.probes.run import read_host_profile

    try:
        here = read_host_profile()
    except AutoplanError as error:
        return f"this machine could not be read: {error.message}; the plan's figures are from where it was found"
    if here.fingerprint == plan.hardware.fingerprint:
        return None
    names = [", ".join(f"{d.name} ({d.type})" for d in profile.devices) for profile in (plan.hardware, here)]
    what = f"{names[0]} there, {names[1]} here" if names[0] != names[1] else "other limits or versions of the same"
    return f"this plan was found on other hardware than this machine: {what}. autoplan verify measures it here"
