"""The entry of the trace: gives the profile of a workload, from the cache or newly traced.

In: a `WorkloadSpec`. Out: a `ModelProfile`, which is what the cost model knows of a model.

The program that is traced is the one that `prepare()` builds for training. It runs under fake tensors: without the
device, without data, in seconds. One micro-step is recorded for each variant of the knobs that change it, at two
micro-batches, so that every figure is a straight line in the samples. A model of equal blocks is recorded with two and
with three blocks, and the whole model is calculated from the difference, so that a deep model costs no more than a
shallow one. One recording of the whole model then checks that calculation.

`trace_profile` is called in the planner's own process and imports no torch; `trace_workload` runs in a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.errors import AutoplanError, WorkloadError
from autoplan.files import read_regular, replace_file
from autoplan.planner.trace.model_profile import PLAIN, PROFILE_VERSION, ModelProfile, TraceRequest, VariantKey
from autoplan.planner.trace.rough_profile import only_rough, rough_profile, with_rough_variants
from autoplan.probes.profile import HardwareProfile
from autoplan.processes import (
    Cause,
    Ended,
    ProcessReport,
    Task,
    cause_of,
    is_out_of_memory,
    limit_hit,
    machine_trouble,
    run_again,
)
from autoplan.strategies.analysis.facts import WorkloadFacts
from autoplan.strategies.workloads.digests import installed_versions
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.processes import RankContext, Zygote

DEADLINE_S = 180.0
"""Seconds that the rank may take for the trace, where the caller sets no limit."""

PLAIN_DEADLINE_FACTOR = 2.0
"""The plain variant may take this many times the limit of the whole trace, before the trace is given up."""

INPUT_PHASE, INPUT_SHARE, INPUT_LEAST_S = "input", 0.1, 5.0
"""The last phase of a trace, after its result is known: make_batch is timed. Its deadline is a share of the trace's, at
least some seconds."""

LEAST_DEADLINE_S = 8.0
"""Seconds that a trace may take however short the budget is: importing the model library takes some of them."""

TIMING_BUDGET_S = 20.0
"""Seconds for timing the operations; a search takes minutes, and better predictions save it trials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLimits:
    """The limits of a trace.

    Attributes:
        time_limit_s: Seconds for tracing the variants; those for which no time is left are estimated. None: no limit.
        timing_budget_s: Seconds for timing the operations on the device.
        memory_limit_bytes: Host memory of the rank; None: no limit.
        left_s: Seconds that are left of the search's budget: the rank is ended then, or after LEAST_DEADLINE_S if less
            is left. None: no limit.
    """

    time_limit_s: float | None = None
    timing_budget_s: float = TIMING_BUDGET_S
    memory_limit_bytes: int | None = None
    left_s: float | None = None

    @property
    def deadline_s(self) -> float:
        """Seconds after which the rank is ended."""
        if self.time_limit_s is None:
            return DEADLINE_S
        wanted_s = max(PLAIN_DEADLINE_FACTOR * self.time_limit_s, LEAST_DEADLINE_S) + self.timing_budget_s
        return wanted_s if self.left_s is None else min(wanted_s, max(self.left_s, LEAST_DEADLINE_S))


def trace_profile(
    spec: WorkloadSpec,
    *,
    device: str,
    zygote: Zygote,
    hardware: HardwareProfile | None = None,
    facts: WorkloadFacts | None = None,
    variants: tuple[VariantKey, ...] | None = None,
    known: ModelProfile | None = None,
    cache_dir: Path | None = None,
    limits: TraceLimits | None = None,
    on_attempt: Callable[[ProcessReport], None] | None = None,
) -> ModelProfile:
    """The profile of a workload, from the cache or traced in a rank.

    What is known stays, and only what is missing of the wanted variants is traced.

    Args:
        spec: What is trained.
        device: cpu or cuda; attention uses different kernels on each.
        zygote: Starts the rank.
        hardware: The machine, part of the cache's key; the operations are timed on it. None: nothing is timed.
        facts: The workload's. Where they are given, a trace that takes too long or too much memory, or whose process
            dies, gives a rough profile instead of an error.
        variants: The variants that are needed; None: every variant that the model has.
        known: What was traced before; None: what the cache has.
        cache_dir: The folder of cached profiles; None: the user's cache folder.
        limits: What the trace may take; None: TraceLimits().
        on_attempt: Is told of each run that something outside ended; it is then made again.

    Raises:
        WorkloadError: the plain program does not run; the text begins with its own error.
    """
    limits = limits or TraceLimits()
    if hardware is None:
        limits = replace(limits, timing_budget_s=0.0)
    path = cache_path(spec, device, cache_dir, hardware)
    if known is None:
        known = _read_cache(path)
    known = None if known is None or PLAIN.text() in known.rough_variants else only_rough(known, ())
    if known is not None and variants is not None:
        variants = _missing(known, variants, limits.timing_budget_s)
        if not variants:
            return known
    ends_at = None if limits.left_s is None else time.monotonic() + limits.left_s
    request = TraceRequest(
        variants=variants,
        time_limit_s=limits.time_limit_s,
        timing_budget_s=limits.timing_budget_s,
        memory_limit_bytes=limits.memory_limit_bytes,
        known=known,
    )
    left_s = None if ends_at is None else lambda: ends_at - time.monotonic()

    def run(request: TraceRequest) -> ProcessReport:
        return run_again(zygote, _task(spec, device, request, limits), on_attempt=on_attempt, left_s=left_s).report

    report = run(request)
    result = report.ranks[0].result if report.ranks else None
    if isinstance(result, dict) and (why := result.get("why_not_fake")):  # real ones failed after them in one process
        request = request.model_copy(update={"not_fake": why})
        report = run(request)
    crashed = cause_of(report) is Cause.FATAL_SIGNAL or report.ended is Ended.MEMORY_LIMIT
    if crashed and report.phase != INPUT_PHASE and request.timing_budget_s > 0:  # as an operation by itself may do
        request = request.model_copy(update={"timing_budget_s": 0.0})
        report = run(request)
    profile = _read_report(report, spec)
    if profile is not None:
        if known is not None:
            profile = _joined(known, profile)
        if report.ended is Ended.FINISHED:
            _write_cache(path, profile)
        return profile
    hit = limit_hit(report, f"the trace of {spec.name}")
    why = f"tracing {spec.name} did not end well ({report.describe()})" if hit is None else hit.text
    why += ": predictions are rough until trials correct them"
    if facts is None:
        raise WorkloadError(why, hint="Run one forward and backward of it without autoplan.")
    if known is not None:
        return with_rough_variants(known.model_copy(update={"notes": (*known.notes, why)}), variants or ())
    if report.ended is Ended.RANK_FAILED and variants != (PLAIN,):  # the plain variant by itself may go well
        alone = request.model_copy(update={"variants": (PLAIN,), "timing_budget_s": 0.0})
        plain = _read_report(zygote.run(_task(spec, device, alone, limits)), spec)
        if plain is not None:
            plain = plain.model_copy(update={"notes": (*plain.notes, why)})
            return with_rough_variants(plain, variants or ())
    return with_rough_variants(rough_profile(facts, device, why), variants or ())


def _task(spec: WorkloadSpec, device: str, request: TraceRequest, limits: TraceLimits) -> Task:
    input_deadline_s = max(INPUT_SHARE * limits.deadline_s, INPUT_LEAST_S)
    return Task(
        target="autoplan.planner.trace.trace:_trace_rank",
        args=(spec, device, request),
        deadlines_s={"*": limits.deadline_s, INPUT_PHASE: input_deadline_s},
        memory_limit_bytes=limits.memory_limit_bytes,
    )


def _read_report(report: ProcessReport, spec: WorkloadSpec) -> ModelProfile | None:
    """The profile that a rank made; None where the rank was ended or killed before it had one.

    Raises:
        WorkloadError: an exception ended it: the workload cannot be used.
    """
    result = report.ranks[0].result if report.ranks else None
    if isinstance(result, dict) and "error" in result:
        raise WorkloadError(result["error"], hint=result["hint"])
    failure = report.first_failure
    if report.phase == INPUT_PHASE and isinstance(result, dict):  # the profile was known before make_batch was timed
        profile = ModelProfile.model_validate(result)
        if report.ended is Ended.FINISHED:
            return profile
        hit = limit_hit(report, "timing the data", {INPUT_PHASE: "make_batch(num_samples, index)"})
        why = report.describe() if hit is None else hit.text
        return profile.model_copy(update={"notes": (*profile.notes, f"data loading is not estimated: {why}")})
    trouble = failure is not None and failure.error is not None and is_out_of_memory(failure.error)
    if cause_of(report) is Cause.OUTSIDE or trouble:
        return None
    if failure is not None and failure.error is not None:
        raise WorkloadError(
            f"{failure.error.type_name}: {failure.error.message}: raised while {spec.name} was traced",
            hint="Run one forward and backward of it without autoplan: make_batch, the loss, backward().",
        )
    finished = report.ended is Ended.FINISHED and isinstance(result, dict)
    return ModelProfile.model_validate(result) if finished else None


def _missing(known: ModelProfile, wanted: tuple[VariantKey, ...], timing_s: float) -> tuple[VariantKey, ...]:
    """Those of the wanted variants that are to be traced; with the known ones where operations are yet to be timed."""
    found = {*known.variants, *known.failed_variants}
    missing = tuple(key for key in wanted if key.text() not in found)
    timed = known.timing_s >= timing_s
    return missing if timed else (*missing, *(variant.key for variant in known.variants.values()))


def _joined(known: ModelProfile, new: ModelProfile) -> ModelProfile:
    """A new profile with what was known before it: a variant that was traced then, and not now, stays."""
    new = only_rough(new, [new.variants[name].key for name in new.rough_variants if name not in known.variants])
    return new.model_copy(
        update={
            "variants": known.variants | new.variants,
            "failed_variants": known.failed_variants | new.failed_variants,
            "timing_s": max(known.timing_s, new.timing_s),
            "notes": tuple(dict.fromkeys((*known.notes, *new.notes))),
        }
    )


def cache_path(
    spec: WorkloadSpec, device: str, cache_dir: Path | None = None, hardware: HardwareProfile | None = None
) -> Path:
    """The file of a cached profile, named by identity, device, machine and the versions that may change the profile."""
    import platformdirs

    folder = cache_dir or Path(platformdirs.user_cache_dir("autoplan")) / "profiles"
    installed = installed_versions()
    versions = "-".join(installed.get(name, "none") for name in ("torch", "transformers"))
    place = device if hardware is None else f"{device}-{hardware.fingerprint}"
    return folder / f"{spec.identity}-{place}-{versions}-v{PROFILE_VERSION}.json"


def _read_cache(path: Path) -> ModelProfile | None:
    try:
        return ModelProfile.model_validate_json(read_regular(path))
    except (OSError, ValueError):  # no such file, a damaged one, or another schema: traced again
        return None


def _write_cache(path: Path, profile: ModelProfile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, profile.model_dump_json())
    except OSError:
        pass  # a cache that cannot be written costs a trace next time, nothing else


def _trace_rank(context: RankContext, spec: WorkloadSpec, device: str, request: TraceRequest) -> None:
    def before_input(profile: ModelProfile) -> None:
        context.report(profile)
        context.phase(INPUT_PHASE)

    context.phase("trace")
    try:
        profile = trace_workload(spec, device, request, before_input=before_input)
    except AutoplanError as error:
        trouble = machine_trouble(error)
        if trouble is not None:
            raise trouble from None
        why = next(iter(getattr(error, "__notes__", ())), None) if request.not_fake is None else None
        context.report({"error": error.message, "hint": error.hint, "why_not_fake": why})
        return
    context.report(profile)


def trace_workload(
    spec: WorkloadSpec,
    device: str,
    request: TraceRequest | None = None,
    *,
    before_input: Callable[[ModelProfile], None] | None = None,
) -> ModelProfile:
    """Traces a workload in this process and times its make_batch. Imports torch.

    The only kernels that run are those of a tiny optimizer, and the operations if they are timed.

    Args:
        spec: What is trained.
        device: cpu or cuda.
        request: What is traced; None: every variant, without a limit, and nothing is timed.
        before_input: Is given the profile before make_batch is timed.

    Raises:
        WorkloadError: the plain program does not run; the text begins with its own error.
    """
    from autoplan.planner.trace.build_profile import profile_workload
    from autoplan.planner.trace.input_benchmark import measure_input
    from autoplan.strategies.workloads.sources import load_workload

    started = time.perf_counter()
    workload = load_workload(spec)
    profile = profile_workload(workload, device, identity=spec.identity, request=request)
    if before_input is not None:
        before_input(profile.model_copy(update={"seconds_spent": time.perf_counter() - started}))
    input_s, why_not = measure_input(workload)
    return profile.model_copy(
        update={
            "input_s_per_sample": input_s,
            "notes": profile.notes if why_not is None else (*profile.notes, why_not),
            "seconds_spent": time.perf_counter() - started,
        }
    )
