"""The knowledge of a search before its first trial, and the pieces of it that can wait.

`begin_search` finds out what the baseline needs: the facts of the workload, the trace of the plain variant, the space.
`probe_more` and `trace_more` give the same context with measured rates, and with traces of other variants; each can be
called at any time, and says before what it is expected to cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autoplan.errors import ConfigError, DeviceError, UsageError
from autoplan.planner.cost.columns import Bools, ConfigTable
from autoplan.planner.cost.prediction import CONTEXT_BYTES
from autoplan.planner.records.trials import LeftOutFamily
from autoplan.planner.search.inspection import Means, look_at
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.space.generate import Space, generate, without_lossy
from autoplan.planner.space.prune import (
    held_back,
    keep_what_may_win,
    needless_last_resorts,
    without_failed_variants,
    without_last_resorts,
    without_twins,
)
from autoplan.planner.store.journal import write_atomically
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.config import RANK_COUNTS, TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import format_bytes

if TYPE_CHECKING:
    from autoplan.planner.cost.traced.estimator import Estimator
    from autoplan.planner.trace.model_profile import ModelProfile, VariantKey
    from autoplan.strategies.analysis.facts import LeftOut, WorkloadFacts

PROBE_SHARE = 0.2
"""Of the budget, for the probes of the machine: a short budget would else be half gone with them."""

TIMING_SHARE = 0.05
"""Of the budget, for timing the model's operations on the device: one trial or less, and it spares several."""

LATER_TIMING = 0.25
"""Of the time for that, in a later trace: it has few operations that no variant before had. Without this limit a second
trace of a GPT-2 took 19 s for what the first had timed, all but a few."""

TRACE_SHARE = 0.1
"""Of the budget, for tracing the variants; what there is no time for is predicted roughly."""

VARIANT_SHARE = 0.3
"""Of what the plain variant's trace took, for one more variant: fewer recordings, and no check of the depth."""

MEMORY_SHARE = 0.8
"""Share of the available host memory that a trial may take unless --memory-limit says otherwise: the system's own
out-of-memory killer must never have to act."""

CUDA_MEMORY_SHARE = 0.95
"""The same of a GPU, less what a process takes there before any tensor: running out is an exception of one process."""

TIMED = "operations timed"
"""Stands among the variants that were asked for: the timing of operations."""


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """The search's knowledge of the workload and the machine: enough for the baseline, and more after each piece."""

    means: Means
    spec: WorkloadSpec  # complete
    hardware: HardwareProfile
    probed: bool  # its rates are those of the whole probes
    device: Literal["cuda", "cpu"]
    nproc: int  # the largest number of ranks
    memory_limit_bytes: int  # of one trial on its device
    host_limit_bytes: int  # of one trial's processes in host memory together
    facts: WorkloadFacts
    space: Space  # all legal candidates: no piece adds to it, and a variant that fails in its trace leaves it
    held: tuple[tuple[str, str], ...]  # (knob, value) of what is tried only where nothing else fits
    profile: ModelProfile  # the variants that were traced, and the rough ones
    plain_trace_s: float  # what the trace of the plain variant took
    candidates: tuple[TrainingConfig, ...] = ()  # those worth a trial, in the space's order
    left_out: tuple[LeftOutFamily, ...] = ()  # families never tried, by any limit
    asked: frozenset[str] = frozenset()  # texts of variants whose trace was asked for; one that did not end stays rough

    @cached_property
    def estimator(self) -> Estimator:
        """The cost model; each context has its own, which learns from the trials that it is told of."""
        from autoplan.planner.cost.traced.estimator import Estimator

        return Estimator(
            self.profile,
            self.hardware,
            device=self.device,
            global_batch=self.spec.global_batch,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    def anew(self) -> SearchContext:
        """The same, with a cost model that has learnt nothing."""
        return replace(self)

    def variants(self, *configs: TrainingConfig) -> tuple[VariantKey, ...]:
        """The variants that the predictions of these configurations read, the plain one first."""
        return _variants(self.facts, configs)

    def rough(self, config: TrainingConfig) -> bool:
        """Whether a configuration is predicted without a trace of its variant, and none was asked for."""
        missing = {*self.profile.rough_variants} - self.asked
        return any(key.text() in missing for key in self.variants(config))


def begin_search(means: Means) -> SearchContext:
    """The context that the baseline needs: the input is checked, the plain variant traced, the legal space made.

    Every other variant is predicted roughly, from the plain one.

    Raises:
        DidNotRunError: something outside ended the inspection each time.
        AutoplanError: the device, the workload or the fixed knobs are not usable.
        BudgetEndedError: the workload was not inspected within the budget.
        NoFeasiblePlanError: inspecting it takes more memory than a trial may take.
    """
    from autoplan.planner.trace.model_profile import VARIANT_KNOBS
    from autoplan.probes.run import read_host_profile

    options, observer = means.options, means.observer
    now = read_host_profile()
    target = find_target(options, now)
    _, host_limit = limits(now, target.device, target.given_limit_bytes, parts=options.parts)
    facts = look_at(means, now, target.device, target.nproc, host_limit)
    degrees, degrees_left_out = degree_combinations(options.fix, facts, target)
    choices = facts.choices if options.numerics == "lossy" else without_lossy(facts.choices)
    named = {*options.fix, *options.bound}
    make_space = partial(
        generate,
        global_batch=facts.spec.global_batch,
        fixed=options.fix,
        bounds=options.bound,
        degrees=degrees,
        degrees_left_out=degrees_left_out,
    )
    space = make_space(without_last_resorts(choices, named))
    hardware, probed = _first_rates(means, now, target.device, target.nproc)
    memory_limit, host_limit = limits(
        now, target.device, target.given_limit_bytes, ranks=target.nproc, measured=hardware, parts=options.parts
    )
    if target.device == "cpu":  # of all ranks together; each node holds its own to host_limit
        memory_limit *= options.layout[0]
    observer.on_hardware(hardware, memory_limit)
    profile = _trace(means, hardware, target.device, facts, host_limit, _variants(facts, space.candidates))
    context = SearchContext(
        means=means,
        spec=facts.spec.model_copy(
            update={"find_unused_parameters": facts.spec.find_unused_parameters or profile.unused_parameters}
        ),
        hardware=hardware,
        probed=probed,
        device=target.device,
        nproc=target.nproc,
        memory_limit_bytes=memory_limit,
        host_limit_bytes=host_limit,
        facts=facts,
        space=space,
        held=held_back(choices, named),
        profile=profile,
        plain_trace_s=profile.seconds_spent,
    )
    first, kind = space.candidates.kinds(*VARIANT_KNOBS)
    traced = np.array([not context.rough(space.candidates[int(place)]) for place in first])[kind]
    if context.held and _needless(context, space.candidates.take(traced)) is None:
        why = "little memory is looked for" if options.objective == "memory" else "nothing is sure to fit"
        observer.on_phase("space", f"{why}: {', '.join(dict(context.held))} enters the space")
        space = make_space(choices)
    return _predicted(_without_twins(replace(context, space=space)))


def _without_twins(context: SearchContext) -> SearchContext:
    """The context without candidates that others beat by the rates that it has, nor the rough variants of these."""
    from autoplan.planner.trace.rough_profile import only_rough

    options, profile = context.means.options, context.profile
    space = without_twins(
        context.space,
        context.hardware.device(context.device),
        named={*options.fix, *options.bound},
        stored_in_fp32=profile.parameter_bytes >= 4 * profile.parameters,
        sequence_length=profile.sequence_length,
        launch_over_work=context.estimator.launch_over_work,
    )
    return replace(context, space=space, profile=only_rough(profile, _variants(context.facts, space.candidates)))


def prepare_search(means: Means) -> SearchContext:
    """All that can be known before the first trial."""
    return trace_more(probe_more(begin_search(means)))


def probe_cost_s(context: SearchContext) -> float:
    """Seconds that `probe_more` is expected to take; 0: it would change nothing."""
    from autoplan.probes.run import COLLECTIVES_S

    if context.probed:
        return 0.0
    return _probe_limit_s(context.means, context.device) + (COLLECTIVES_S if context.nproc > 1 else 0.0)


def probe_more(context: SearchContext) -> SearchContext:
    """The context with the rates of the whole probes."""
    from autoplan.probes.run import run_probes

    if context.probed:
        return context
    means, observer = context.means, context.means.observer
    observer.on_phase("probe", f"measuring this machine's {'GPU' if context.device == 'cuda' else 'CPU'}")
    hardware = run_probes(
        means.zygote,
        device=context.device,
        budget_s=_probe_limit_s(means, context.device),
        fresh=context.hardware.disturbed is not None,
        on_progress=lambda text: observer.on_phase("probe", text),
        collective_ranks=context.nproc,
    )
    if hardware.disturbed is not None:
        observer.on_note(hardware.disturbed)
    if means.saved is not None:
        write_atomically(means.saved, hardware.model_dump_json(indent=1))
    return _predicted(_without_twins(replace(context, hardware=hardware, probed=True)))


def trace_cost_s(context: SearchContext, variants: Sequence[VariantKey] | None = None) -> float:
    """Seconds that `trace_more` is expected to take for these variants; 0: it would change nothing."""
    wanted, (untimed, timing_s) = _rough(context, variants), _timing(context)
    if not wanted and not untimed:
        return 0.0
    plain_s, known = context.plain_trace_s, context.profile
    again = max(len(known.variants) - len(known.rough_variants) - 1, 0) if untimed else 0  # to be timed
    more_s = min(VARIANT_SHARE * plain_s * (len(wanted) + again), TRACE_SHARE * context.means.budget_s)
    return plain_s + more_s + timing_s


def trace_more(context: SearchContext, variants: Sequence[VariantKey] | None = None) -> SearchContext:
    """The context with these variants traced, those of them that are rough; None: all of its space.

    What there is no time for stays rough. Operations are timed on the device.
    """
    wanted, (untimed, timing_s) = _rough(context, variants), _timing(context)
    if not wanted and not untimed:
        return context
    means, everything = context.means, _variants(context.facts, context.space.candidates)
    profile = _trace(
        means,
        context.hardware,
        context.device,
        context.facts,
        context.host_limit_bytes,
        everything,
        more=wanted,
        known=context.profile,
        timing_s=timing_s,
    )
    return _predicted(replace(context, profile=profile, asked=context.asked | {key.text() for key in wanted} | {TIMED}))


def _variants(facts: WorkloadFacts, configs: Sequence[TrainingConfig]) -> tuple[VariantKey, ...]:
    from autoplan.planner.trace.model_profile import VARIANT_KNOBS, variants_to_trace

    first, _ = ConfigTable.of(configs).kinds(*VARIANT_KNOBS)
    some = [configs[int(place)] for place in first]
    return () if facts.step_s is not None else variants_to_trace(some, has_blocks=facts.num_blocks > 0)


def _rough(context: SearchContext, variants: Sequence[VariantKey] | None) -> tuple[VariantKey, ...]:
    """Which of some variants, or of all, are rough, and were not asked for yet."""
    known = context.profile
    wanted = [known.variants[name].key for name in known.rough_variants] if variants is None else variants
    missing = {*known.rough_variants} - context.asked
    return tuple(key for key in wanted if key.text() in missing)


def _timing(context: SearchContext) -> tuple[bool, float]:
    """Whether no operation was timed yet, and the seconds that the next trace may time some for."""
    from autoplan.planner.trace.trace import TIMING_BUDGET_S

    whole_s = min(TIMING_BUDGET_S, TIMING_SHARE * context.means.budget_s)
    untimed = context.facts.step_s is None and TIMED not in context.asked and context.profile.timing_s < whole_s
    return untimed, whole_s if untimed else LATER_TIMING * whole_s


def _trace(
    means: Means,
    hardware: HardwareProfile,
    device: Literal["cuda", "cpu"],
    facts: WorkloadFacts,
    host_limit_bytes: int,
    everything: Sequence[VariantKey],
    *,
    more: Sequence[VariantKey] = (),
    known: ModelProfile | None = None,
    timing_s: float = 0.0,
) -> ModelProfile:
    """The profile with the plain variant and `more`; what else there is of `everything` is rough."""
    from autoplan.planner.trace.model_profile import PLAIN
    from autoplan.planner.trace.rough_profile import step_profile, with_rough_variants
    from autoplan.planner.trace.trace import TraceLimits, trace_profile

    if facts.step_s is not None:
        return step_profile(facts, device)
    what = "" if known is None else f" in {len(more) or 1} variants"
    means.observer.on_phase("trace", f"counting the operations of {facts.spec.name}{what}")
    profile = trace_profile(
        facts.spec,
        device=device,
        zygote=means.zygote,
        hardware=hardware,
        facts=facts,
        variants=(PLAIN, *more),
        known=known,
        limits=TraceLimits(
            time_limit_s=TRACE_SHARE * means.budget_s,
            timing_budget_s=timing_s,
            memory_limit_bytes=host_limit_bytes,
            left_s=means.time_s,
        ),
        on_attempt=partial(means.on_attempt, "trace"),
    )
    late = len(set(profile.rough_variants) & {key.text() for key in more})
    said = known.notes if known is not None else ()
    for note in profile.notes:
        if note not in said:
            means.observer.on_note(note)
    if late:
        means.observer.on_note(
            f"{late} of {len(everything)} variants were not traced in the time ({TRACE_SHARE * means.budget_s:.0f} s, "
            "a tenth of the budget) or the memory for it: their predictions are rough until trials correct them"
        )
    return with_rough_variants(profile, everything)


def _needless(context: SearchContext, configs: ConfigTable) -> list[LeftOutFamily] | None:
    """The last resorts that no trial needs, since some of these configurations are sure to fit; None: none of them."""
    if not context.held:
        return []
    ordinary = configs.take(~_resorts(context, configs))
    if not ordinary or context.means.options.objective == "memory":
        return None
    outlook = context.estimator.outlook(ordinary)
    return needless_last_resorts(context.held, ordinary, outlook, context.memory_limit_bytes, context.device)


def _resorts(context: SearchContext, configs: ConfigTable) -> Bools:
    """Where a configuration is one of those held back."""
    resorts = np.zeros(len(configs), dtype=np.bool_)
    for knob, value in context.held:
        resorts |= configs.has(knob, value)
    return resorts


def _predicted(context: SearchContext) -> SearchContext:
    """The context with new predictions, and what is worth a trial by them."""
    options, device = context.means.options, context.device
    space = without_failed_variants(context.space, context.profile.failed_variants)
    context.means.observer.on_phase("space", f"predicting {len(space.candidates)} legal configurations")
    context = replace(context, space=space)
    needless = _needless(context, space.candidates)
    candidates = space.candidates if needless is None else space.candidates.take(~_resorts(context, space.candidates))
    kept, dropped = keep_what_may_win(
        candidates,
        context.estimator.outlook(candidates),
        context.memory_limit_bytes,
        device,
        spares_memory=options.objective != "memory",
        host_limit_bytes=context.host_limit_bytes if device == "cuda" else None,
        named={*options.fix, *options.bound},
    )
    left_out = (*space.left_out, *(needless or ()), *dropped)
    context.means.observer.on_space(len(kept), left_out)
    return replace(context, candidates=tuple(candidates[index] for index in kept), left_out=left_out)


def _probe_limit_s(means: Means, device: Literal["cuda", "cpu"]) -> float:
    """The most seconds that the probes may take."""
    from autoplan.probes.run import default_budget_s

    return min(default_budget_s(device), PROBE_SHARE * means.budget_s)


def _first_rates(
    means: Means, now: HardwareProfile, device: Literal["cuda", "cpu"], ranks: int
) -> tuple[HardwareProfile, bool]:
    """The rates that are known at once, and whether whole probes would not better them.

    They are those that this study began with, or what the cache has, or a second of measuring. Whole ones that were
    taken under load are bettered as soon as the load is over.
    """
    from autoplan.probes.merge import is_busy
    from autoplan.probes.run import most_ranks, run_probes

    known = None
    if means.saved is not None:
        with suppress(OSError, ValueError):  # there is none, or it is of another version, or torn: measured again
            known = HardwareProfile.model_validate_json(means.saved.read_text())
    if known is None or known.fingerprint != now.fingerprint:
        means.observer.on_phase("probe", f"a first look at this machine's {'GPU' if device == 'cuda' else 'CPU'}")
        known = run_probes(means.zygote, device=device, brief=True)
    if known.disturbed is not None:
        means.observer.on_note(known.disturbed)
    whole = known.probed_s >= _probe_limit_s(means, device) and (ranks < 2 or most_ranks(known) >= ranks)
    return known, whole and (known.disturbed is None or is_busy(now.host))


# Where a search runs: the device, how many ranks, and what a trial may take there.


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a search runs, by its options and this machine."""

    device: Literal["cuda", "cpu"]
    nproc: int  # the largest number of ranks
    given_limit_bytes: int | None  # the memory limit that the options give
    ranks_per_node: int | None = None  # of --nodes; None: all ranks run on this machine


def find_target(options: SearchOptions, hardware: HardwareProfile) -> Target:
    """Where the search runs: the device, up to how many ranks (by default all visible GPUs; 1 on CPU), the limit.

    Raises:
        DeviceError: CUDA was asked for and there is none.
        UsageError: there are fewer GPUs than ranks were asked for; or the memory limit is a share, and the memory of
            the device is not known.
    """
    from autoplan.probes.run import pick_device

    device = pick_device(hardware, options.device)
    gpus = sum(found.type == "cuda" for found in hardware.devices) if device == "cuda" else 0
    nodes, ranks = options.layout
    here = max(1, gpus) if options.nodes is None else nodes * ranks
    if device == "cuda" and options.nodes is None and options.nproc is not None and options.nproc > gpus:
        raise UsageError(
            f"--nproc is {options.nproc}, and {gpus} GPU(s) can be used",
            hint="Each rank has a GPU of its own: give as many ranks as GPUs, or fewer.",
        )
    nproc = here if options.nproc is None else options.nproc
    limit = options.memory_limit_bytes(_least(hardware, device, nproc, "memory_total_bytes"))
    ranks_per_node = None if options.nodes is None else ranks
    return Target(device=device, nproc=nproc, given_limit_bytes=limit, ranks_per_node=ranks_per_node)


def _least(hardware: HardwareProfile, device: str, ranks: int, name: str) -> float | None:
    """The least of a reading over the devices of the ranks: one limit holds for all of them."""
    devices = [found for found in hardware.devices if found.type == device][:ranks]
    known = [value for found in devices if (value := getattr(found, name).value) is not None]
    return min(known, default=None)


def limits(
    hardware: HardwareProfile,
    device: Literal["cuda", "cpu"],
    wanted_bytes: int | None,
    *,
    ranks: int = 1,
    measured: HardwareProfile | None = None,
    parts: int = 1,
) -> tuple[int, int]:
    """The most memory that one trial may take, in bytes: on its device, and of the host.

    `wanted_bytes` is the limit that was given; None: a share of what is available now, on CUDA on the one of the
    `ranks`' GPUs that has the least, without what a process takes there (`measured` by the probes, else assumed).
    `parts` trials run at once; on CPU they share the memory.

    Raises:
        DeviceError: the machine does not say how much is available, and no limit was given.
        UsageError: so many trials of the limit that was given take more than is available.
    """
    host = hardware.host.memory_available_bytes.value
    if device == "cpu" and parts > 1 and host is not None:
        if wanted_bytes is not None and parts * wanted_bytes > host:
            raise UsageError(
                f"--memory-limit is {format_bytes(wanted_bytes)} for one trial, and {parts} run at once: "
                f"{format_bytes(host)} are available",
                hint=f"Give at most {format_bytes(host / parts)}, or fewer with --side-by-side.",
            )
        host /= parts
    here = _least(hardware, device, ranks, "memory_available_bytes") if device == "cuda" else host
    if here is None and wanted_bytes is None:
        raise DeviceError(
            f"how much memory is free on {hardware.device(device).name} is not known",
            hint="Say how much a trial may take with --memory-limit, for example --memory-limit 8GiB.",
        )
    host_limit = int(MEMORY_SHARE * host) if host is not None else int(wanted_bytes or here or 0)
    share = MEMORY_SHARE * (here or 0)
    if device == "cuda":
        share = max(0.0, CUDA_MEMORY_SHARE * (here or 0) - context_bytes(measured))
    limit = int(share) if wanted_bytes is None else wanted_bytes
    return limit, (limit if device == "cpu" else host_limit)


def context_bytes(measured: HardwareProfile | None) -> float:
    """Bytes of a GPU that a process takes before any tensor: measured by the probes, else assumed."""
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
        reason = explain_degree(facts, knob, value, target.nproc, ranks_per_node=target.ranks_per_node)
        if reason is not None:
            more = f"Add --nproc {value}, or leave" if knob in RANK_COUNTS and value > target.nproc else "Leave"
            raise ConfigError(reason, hint=f"{more} {knob} to the search, or fix it to a legal degree.")
    if target.nproc <= 1:
        return ({},), ()
    combinations, dropped = legal_degrees(
        facts, target.nproc, device=target.device, ranks_per_node=target.ranks_per_node
    )
    return [{}, *combinations], dropped
