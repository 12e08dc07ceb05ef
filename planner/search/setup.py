"""What a search knows before its first trial: the machine, the workload's facts, the legal space, predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoplan.errors import (
    ConfigError,
    DeviceError,
)
from autoplan.planner.records import LeftOutFamily
from autoplan.planner.search.inspection import UserCodeLimits, check_loader, inspect
from autoplan.planner.search.options import DEFAULT_BUDGET_S, SearchObserver, SearchOptions
from autoplan.planner.space.failed_variants import without_failed_variants
from autoplan.planner.space.generate import Space, generate
from autoplan.planner.space.knob_values import without_lossy
from autoplan.planner.space.last_resort import held_back, needless_last_resorts, without_last_resorts
from autoplan.planner.space.prune import keep_what_may_win
from autoplan.planner.space.twins import without_twins
from autoplan.planner.store.journal import write_atomically
from autoplan.probes.profile import HardwareProfile
from autoplan.processes import ProcessReport, Zygote
from autoplan.strategies.config import RANK_COUNTS, TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.planner.cost.calibrate import Calibration
    from autoplan.planner.cost.traced.estimator import CostTable, Estimator
    from autoplan.planner.trace.model_profile import ModelProfile
    from autoplan.strategies.analysis.facts import LeftOut, WorkloadFacts

MEMORY_SHARE = 0.8
"""Share of the available host memory that a trial may take unless --memory-limit says otherwise: the system's own
out-of-memory killer must never have to act."""

CUDA_MEMORY_SHARE = 0.95
"""The same of a GPU, less what a process takes there before any tensor: running out is an exception of one process."""

CONTEXT_BYTES = 6e8
"""Of a CUDA context with its libraries, where the probes did not measure it (assumed)."""

PROBE_SHARE = 0.2
"""Of the budget, for the probes of the machine. They are made again by each search while other work disturbs them, so a
short budget would else be half gone before the first trial."""

TIMING_SHARE = 0.05
"""Of the budget, for timing the model's operations on the device: one trial or less, and it spares several."""

TRACE_SHARE = 0.1
"""Of the budget, for tracing the variants; what there is no time for is predicted roughly."""


OnAttempt = Callable[[str, ProcessReport], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a search runs, by its options and this machine.

    Attributes:
        device: cuda or cpu.
        nproc: The largest number of ranks.
        given_limit_bytes: The memory limit that the options give; None: they give none.
    """

    device: Literal["cuda", "cpu"]
    nproc: int
    given_limit_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchContext:
    """What the search knows before its first trial.

    Attributes:
        spec: The workload's spec, complete.
        hardware: The machine.
        device: cuda or cpu.
        memory_limit_bytes: Of one trial on its device.
        host_limit_bytes: Of one trial's processes in host memory together.
        facts: The workload's facts.
        space: All legal candidates.
        estimator: The cost model.
        candidates: Those worth a trial, in the space's order.
        left_out: Families never tried, by any limit.
    """

    spec: WorkloadSpec
    hardware: HardwareProfile
    device: Literal["cuda", "cpu"]
    memory_limit_bytes: int
    host_limit_bytes: int
    facts: WorkloadFacts
    space: Space
    estimator: Estimator
    candidates: tuple[TrainingConfig, ...]
    left_out: tuple[LeftOutFamily, ...]


def pick_device(hardware: HardwareProfile, wanted: str | None) -> Literal["cuda", "cpu"]:
    """The device type to search on.

    Raises:
        DeviceError: CUDA was asked for and there is none.
    """
    from autoplan.probes.run import pick_device as pick

    kind = pick(hardware, wanted)
    if kind not in ("cuda", "cpu"):
        raise DeviceError(f"autoplan does not search on {kind!r}", hint="Use --device cuda or --device cpu.")
    return "cuda" if kind == "cuda" else "cpu"


def find_target(options: SearchOptions, hardware: HardwareProfile) -> Target:
    """Where the search runs: the device, up to how many ranks (by default all visible GPUs; 1 on CPU), the limit.

    Raises:
        DeviceError: CUDA was asked for and there is none.
        UsageError: the memory limit is a share, and the memory of the device is not known.
    """
    device = pick_device(hardware, options.device)
    gpus = sum(found.type == "cuda" for found in hardware.devices) if device == "cuda" else 0
    return Target(
        device=device,
        nproc=max(1, gpus) if options.nproc is None else options.nproc,
        given_limit_bytes=options.memory_limit_bytes(hardware.device(device).memory_total_bytes.value),
    )


def prepare_search(
    options: SearchOptions,
    zygote: Zygote,
    observer: SearchObserver,
    *,
    saved: Path | None = None,
    budget_s: float | None = None,
    left_s: Callable[[], float] | None = None,
    on_attempt: OnAttempt = lambda part, report: None,
    calibration: Calibration | None = None,
) -> SearchContext:
    """Probes, inspects, traces, generates the space and predicts each candidate.

    Args:
        options: What the search is asked for.
        zygote: Where ranks are started.
        observer: Its methods are called with what happens.
        saved: Where the study keeps its hardware profile: every run of a search uses the same one.
        budget_s: Of the whole search; None: what the options say.
        left_s: How much of it is left now, in seconds; None: all of it.
        on_attempt: Is told of each run that something outside ended, with the part of the search that it was.
        calibration: Of the cost model, from earlier searches on this device; None: its own assumptions.

    Raises:
        DidNotRunError: something outside ended the inspection each time.
        AutoplanError: the device, the workload or the fixed knobs are not usable.
        BudgetEndedError: the workload was not inspected within the budget.
        NoFeasiblePlanError: inspecting it takes more memory than a trial may take.
    """
    from autoplan.planner.cost.traced.estimator import Estimator
    from autoplan.planner.trace.rough_profile import step_profile
    from autoplan.planner.trace.trace import TIMING_BUDGET_S, TraceLimits, trace_profile
    from autoplan.planner.trace.variants import variants_to_trace
    from autoplan.probes.run import read_host_profile

    now = read_host_profile()
    target = find_target(options, now)
    device = target.device
    budget_s = budget_s or options.budget_s or DEFAULT_BUDGET_S
    hardware = _probe(now, device, zygote, observer, saved, ranks=target.nproc, limit_s=PROBE_SHARE * budget_s)
    memory_limit, host_limit = limits(now, device, target.given_limit_bytes, measured=hardware)
    observer.on_hardware(hardware, memory_limit)

    allowed = UserCodeLimits(
        budget_s=budget_s, left_s=left_s or (lambda: float(budget_s)), memory_limit_bytes=host_limit
    )
    observer.on_phase("inspect", f"looking at {options.spec.name}")
    facts = inspect(
        zygote,
        options.spec,
        hardware,
        device,
        allowed=allowed,
        observer=observer,
        on_attempt=partial(on_attempt, "inspect"),
    )
    spec = facts.spec.model_copy(update={"payload": options.spec.payload})
    observer.on_workload(spec)
    for note in spec.notes:
        observer.on_note(note)
    if options.loader is not None and not options.dry_run:
        observer.on_phase("loader", f"a first look at {options.loader.reference}")
        check_loader(zygote, options.loader, spec.global_batch, left_s=allowed.left_s(), memory_limit_bytes=host_limit)
    degrees, degrees_left_out = degree_combinations(options.fix, facts, target)
    choices = facts.choices if options.numerics == "lossy" else without_lossy(facts.choices)
    named = {*options.fix, *options.bound}
    make_space = partial(
        generate,
        global_batch=spec.global_batch,
        device=hardware.device(device),
        fixed=options.fix,
        bounds=options.bound,
        degrees=degrees,
        degrees_left_out=degrees_left_out,
    )
    space = make_space(without_last_resorts(choices, named))

    observer.on_phase("trace", f"counting the operations of {spec.name}")
    profile = (
        step_profile(facts, device)
        if facts.step_s is not None
        else trace_profile(
            spec,
            device=device,
            zygote=zygote,
            hardware=hardware,
            facts=facts,
            variants=variants_to_trace(space.candidates, has_blocks=facts.num_blocks > 0),
            limits=TraceLimits(
                time_limit_s=TRACE_SHARE * budget_s,
                timing_budget_s=min(TIMING_BUDGET_S, TIMING_SHARE * budget_s),
                memory_limit_bytes=host_limit,
                left_s=allowed.left_s(),
            ),
            on_attempt=partial(on_attempt, "trace"),
        )
    )
    for note in profile.notes:
        observer.on_note(note)
    if profile.rough_variants:
        observer.on_note(_rough_note(profile, TRACE_SHARE * budget_s))
    observer.on_phase("space", f"predicting {len(space.candidates)} legal configurations")
    estimator = Estimator(
        profile,
        hardware,
        device=device,
        global_batch=spec.global_batch,
        memory_limit_bytes=memory_limit,
        calibration=calibration,
    )

    def predicted(space: Space) -> tuple[Space, CostTable]:
        space = without_twins(
            without_failed_variants(space, profile.failed_variants),
            hardware.device(device),
            named=named,
            stored_in_fp32=profile.parameter_bytes >= 4 * profile.parameters,
            launch_over_work=estimator.launch_over_work,
        )
        return space, estimator.table(space.candidates)

    space, table = predicted(space)
    held = held_back(choices, named)
    least_memory = options.objective == "memory"
    needless = None if least_memory else needless_last_resorts(held, space.candidates, table, memory_limit, device)
    if held and needless is None:
        why = "little memory is looked for" if least_memory else "nothing is sure to fit"
        observer.on_phase("space", f"{why}: {', '.join(dict(held))} enters the space")
        space, table = predicted(make_space(choices))
    kept, dropped = keep_what_may_win(
        space.candidates,
        table,
        memory_limit,
        device,
        spares_memory=not least_memory,
        host_limit_bytes=host_limit if device == "cuda" else None,
        named=named,
    )
    left_out = (*space.left_out, *(needless or ()), *dropped)
    observer.on_space(len(kept), left_out)
    return SearchContext(
        spec=spec,
        hardware=hardware,
        device=device,
        memory_limit_bytes=memory_limit,
        host_limit_bytes=host_limit,
        facts=facts,
        space=space,
        estimator=estimator,
        candidates=tuple(space.candidates[index] for index in kept),
        left_out=left_out,
    )


def _rough_note(profile: ModelProfile, limit_s: float) -> str:
    """Says how much of the space is predicted without a trace."""
    return (
        f"{len(profile.rough_variants)} of {len(profile.variants)} variants were not traced within {limit_s:.0f} s, a "
        "tenth of the budget: their predictions are rough until trials correct them"
    )


def _probe(
    now: HardwareProfile,
    device: Literal["cuda", "cpu"],
    zygote: Zygote,
    observer: SearchObserver,
    saved: Path | None,
    ranks: int,
    limit_s: float,
) -> HardwareProfile:
    """The profile this study began with, if it is of this machine, else a new one, measured for at most `limit_s`."""
    from autoplan.probes.run import default_budget_s, run_probes

    if saved is not None and saved.exists():
        try:
            earlier = HardwareProfile.model_validate_json(saved.read_text())
        except (OSError, ValueError):
            earlier = None  # of another version, or torn: measured again
        if earlier is not None and earlier.fingerprint == now.fingerprint:
            observer.on_phase("probe", "as measured when this search began")
            return earlier
    observer.on_phase("probe", f"measuring this machine's {'GPU' if device == 'cuda' else 'CPU'}")
    hardware = run_probes(
        zygote,
        device=device,
        budget_s=min(default_budget_s(device), limit_s),
        on_progress=lambda text: observer.on_phase("probe", text),
        collective_ranks=ranks,
    )
    if hardware.disturbed is not None:
        observer.on_note(hardware.disturbed)
    elif saved is not None:
        write_atomically(saved, hardware.model_dump_json(indent=1))
    return hardware


def limits(
    hardware: HardwareProfile,
    device: Literal["cuda", "cpu"],
    wanted_bytes: int | None,
    *,
    measured: HardwareProfile | None = None,
) -> tuple[int, int]:
    """What one trial may take on its device, and of host memory.

    Args:
        hardware: The machine as it is now.
        device: cuda or cpu.
        wanted_bytes: The limit that was given; None: a share of what is available.
        measured: The probed machine, which says what a CUDA context takes; None: assumed.

    Raises:
        DeviceError: the machine does not say how much is available, and no limit was given.
    """
    host = hardware.host.memory_available_bytes.value
    here = hardware.device(device).memory_available_bytes.value if device == "cuda" else host
    if here is None and wanted_bytes is None:
        raise DeviceError(
            f"how much memory is free on {hardware.device(device).name} is not known",
            hint="Say how much a trial may take with --memory-limit, for example --memory-limit 8GiB.",
        )
    host_limit = int(MEMORY_SHARE * host) if host is not None else int(wanted_bytes or here or 0)
    limit = wanted_bytes if wanted_bytes is not None else _share_bytes(here or 0, device, measured)
    return limit, (limit if device == "cpu" else host_limit)


def _share_bytes(available: float, device: Literal["cuda", "cpu"], measured: HardwareProfile | None) -> int:
    """The limit that nobody gave, in bytes."""
    if device == "cpu":
        return int(MEMORY_SHARE * available)
    return max(0, int(CUDA_MEMORY_SHARE * available - context_bytes(measured)))


def context_bytes(measured: HardwareProfile | None) -> float:
    """What a process takes of a GPU before any tensor: measured by the probes, else assumed."""
    reading = None if measured is None else measured.device("cuda").context_bytes
    return CONTEXT_BYTES if reading is None or reading.value is None else reading.value


def degree_combinations(
    fix: Mapping[str, Any], facts: WorkloadFacts, target: Target
) -> tuple[Sequence[Mapping[str, Any]], Sequence[LeftOut]]:
    """The legal degrees for up to --nproc ranks, and what was left out.

    Raises:
        ConfigError: a fixed degree that is not legal, and why.
    """
    from autoplan.strategies.techniques.degrees import explain_degree, legal_degrees

    for knob, value in fix.items():
        reason = explain_degree(facts, knob, value, target.nproc)
        if reason is not None:
            more = f"Add --nproc {value}, or leave" if knob in RANK_COUNTS and value > target.nproc else "Leave"
            raise ConfigError(reason, hint=f"{more} {knob} to the search, or fix it to a legal degree.")
    if target.nproc <= 1:
        return ({},), ()
    combinations, dropped = legal_degrees(facts, target.nproc, device=target.device)
    return [{}, *combinations], dropped
