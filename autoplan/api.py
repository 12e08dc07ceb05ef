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
from typing import TYPE_CHECKING, Any, Literal

from autoplan.errors import (
    AutoplanError,
    BudgetEndedError,
    InterruptedSearchError,
    NoFeasiblePlanError,
    UsageError,
)
from autoplan.planner.export.run import Exported, export_plan
from autoplan.planner.plan import Plan
from autoplan.planner.search.options import SearchObserver, SearchOptions, SearchResult
from autoplan.planner.space.bounds import Bound
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import parse_duration_s, parse_memory_bytes

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload

DeviceName = Literal["cuda", "cpu"]
SamplerName = Literal["ours", "tpe", "random"]
ENDINGS: Mapping[str, type[AutoplanError]] = {
    "no_feasible_plan": NoFeasiblePlanError,
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
    out: str | Path | None = None,
    store: str | Path | None = None,
    fresh: bool = False,
    sampler: SamplerName = "ours",
    nproc: int | None = None,
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
        name: For screens and the plan.
        seed: Of weights, batches and the search.
        budget: Time for the search over all its calls, like `"10m"`, or seconds. Default: 10 minutes.
        max_trials: At most so many trials.
        fix: Knobs to keep at one value, like `{"precision": "bf16"}`.
        bound: Knobs to keep within bounds, like `{"micro_batch": (1, 8), "precision": ["fp32", "bf16"]}`.
        device: "cuda" or "cpu". Default: CUDA where there is one.
        memory_limit: What a trial may take, like `"8GiB"` or `"80%"`. Default: 80 % of what is available.
        out: Where to write the plan too.
        store: The folder of the search's record. Default: the user's state folder.
        fresh: Start over instead of resuming.
        sampler: "ours", or Optuna's "tpe" or "random".
        nproc: The largest number of ranks. Default: all visible GPUs; 1 on CPU.
        observer: Is told what happens. Default: progress on stderr.
        quiet: No progress on stderr.

    Raises:
        UsageError: an argument is wrong (WorkloadError, ConfigError, StoreError among them).
        NoFeasiblePlanError: nothing fits or runs.
        DeviceError: the device is missing or busy.
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
    options = make_options(
        spec,
        budget=budget,
        max_trials=max_trials,
        fix=fix,
        bound=bound,
        device=device,
        memory_limit=memory_limit,
        out=out,
        store=store,
        fresh=fresh,
        sampler=sampler,
        nproc=nproc,
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


def make_options(
    spec: WorkloadSpec,
    *,
    budget: str | float | None = None,
    max_trials: int | None = None,
    fix: Mapping[str, Any] | None = None,
    bound: Mapping[str, Any] | None = None,
    device: str | None = None,
    memory_limit: str | int | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    fresh: bool = False,
    sampler: str = "ours",
    nproc: int | None = None,
    seed: int = 0,
    dry_run: bool = False,
) -> SearchOptions:
    """What the command line and `search` hand to the planner, every value checked.

    Raises:
        UsageError: a value is wrong, and what it may be.
    """
    from autoplan.strategies.config import check_knob

    if device not in (None, "cuda", "cpu"):
        raise UsageError(f"--device is {device!r}", hint="It is cuda or cpu.")
    if sampler not in ("ours", "tpe", "random"):
        raise UsageError(f"--sampler is {sampler!r}", hint="It is ours, tpe or random.")
    for option, value in (("--max-trials", max_trials), ("--nproc", nproc)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{option} is {value!r}", hint="It is a whole number of at least 1.")
    fixed = {knob: check_knob(knob, value) for knob, value in (fix or {}).items()}
    if "micro_batch" in fixed:
        # A workload with BatchNorm or the like has no micro-batch of its own choosing: this is the user's word for it.
        spec = spec.model_copy(update={"options": spec.options | {"fixed_micro_batch": fixed["micro_batch"]}})
    return SearchOptions(
        spec=spec,
        budget_s=None if budget is None else parse_duration_s(budget),
        max_trials=max_trials,
        fixed=fixed,
        bounds={knob: _bound(knob, value) for knob, value in (bound or {}).items()},
        device="cuda" if device == "cuda" else "cpu" if device == "cpu" else None,
        memory_limit_bytes=None if memory_limit is None else _limit_bytes(memory_limit, device),
        out=None if out is None else Path(out),
        store=None if store is None else Path(store),
        fresh=fresh,
        sampler="tpe" if sampler == "tpe" else "random" if sampler == "random" else "ours",
        nproc=_visible_gpus(device) if nproc is None else nproc,
        seed=seed,
        dry_run=dry_run,
    )


def _visible_gpus(device: str | None) -> int:
    """The number of GPUs a search may use by default; 1 where it runs on CPU."""
    from autoplan.probes.run import read_host_profile

    if device == "cpu":
        return 1
    return max(1, sum(found.type == "cuda" for found in read_host_profile().devices))


def _bound(knob: str, value: Any) -> Bound:
    """A bound from `(low, high)`, a list of values, or the text `1..8` or `a,b`."""
    from autoplan.planner.space.bounds import parse_bound
    from autoplan.strategies.config import check_knob

    if isinstance(value, Bound):
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, int) for end in value):
        check_knob(knob, value[0])
        return Bound(low=value[0], high=value[1])
    if isinstance(value, (list, tuple, set, frozenset)):
        return Bound(values=tuple(check_knob(knob, one) for one in value))
    return parse_bound(f"{knob}={value}")[1]


def _limit_bytes(text: str | int, device: str | None) -> int:
    """The limit in bytes; a share is of the memory that the device, or this process's host, has in all."""
    from autoplan.probes.run import pick_device, read_host_profile

    limit = parse_memory_bytes(text)
    if isinstance(limit, int):
        return limit
    profile = read_host_profile()
    total = profile.device(pick_device(profile, device)).memory_total_bytes
    if total.value is None:
        raise UsageError(
            f"--memory-limit is {text!r}, and the memory of the device is not known: {total.reason}",
            hint="Give the limit as a size, for example 8GiB.",
        )
    return int(limit * total.value)


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
    other = found_elsewhere(plan)
    if other:
        sys.stderr.write(f"note: {other}\n")
    return plan


def export(plan: Plan | str | Path, to: str, out: str | Path | None = None) -> Exported:
    """Writes a plan for another trainer: json, yaml, pytorch or transformers.

    Raises:
        UsageError: no such target.
        ExportError: the target cannot carry the plan, or the export failed its own check.
    """
    return export_plan(plan if isinstance(plan, Plan) else Plan.load(plan), to, out)


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
