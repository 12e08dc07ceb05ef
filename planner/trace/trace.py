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

import importlib.metadata
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import AutoplanError, WorkloadError
from autoplan.planner.trace.model_profile import PROFILE_VERSION, ModelProfile
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.processes import RankContext, Zygote

DEADLINE_S = 180.0
"""Seconds that the rank may take for the trace."""

TIMING_BUDGET_S = 20.0
"""Seconds for timing the operations; a search takes minutes, and better predictions save it trials."""


def trace_profile(
    spec: WorkloadSpec,
    *,
    device: str,
    zygote: Zygote,
    hardware: HardwareProfile | None = None,
    cache_dir: Path | None = None,
    fresh: bool = False,
    timing_budget_s: float = TIMING_BUDGET_S,
) -> ModelProfile:
    """The profile of a workload, from the cache or traced in a rank.

    Args:
        spec: What is trained.
        device: cpu or cuda; attention uses different kernels on each.
        zygote: Starts the rank.
        hardware: The machine, part of the cache's key; the operations are timed on it. None: nothing is timed.
        cache_dir: The folder of cached profiles; None: the user's cache folder.
        fresh: Trace again, even if the profile is in the cache.
        timing_budget_s: Seconds for timing the operations.

    Raises:
        WorkloadError: the model cannot be traced; the text says why.
    """
    from autoplan.processes import Task

    path = cache_path(spec, device, cache_dir, hardware)
    if not fresh:
        cached = _read_cache(path)
        if cached is not None:
            return cached
    budget_s = timing_budget_s if hardware is not None else 0.0
    task = Task(
        target="autoplan.planner.trace.trace:_trace_rank", args=(spec, device, budget_s), deadlines_s={"*": DEADLINE_S}
    )
    report = zygote.run(task)
    failure = report.first_failure
    result = report.ranks[0].result if report.ranks else None
    if failure is not None or not isinstance(result, dict):
        error = failure.error if failure is not None else None
        text = f"{error.type_name}: {error.message}" if error is not None else str(report.ended)
        raise WorkloadError(
            f"{spec.name} could not be traced: {text}",
            hint="The model's forward must run on fake tensors: no branch on a tensor's value, no .item(), no numpy.",
        )
    if "error" in result:
        raise WorkloadError(result["error"], hint=result["hint"])
    profile = ModelProfile.model_validate(result)
    _write_cache(path, profile)
    return profile


def cache_path(
    spec: WorkloadSpec, device: str, cache_dir: Path | None = None, hardware: HardwareProfile | None = None
) -> Path:
    """The file of a cached profile, named by identity, device, machine and the versions that may change the profile."""
    import platformdirs

    folder = cache_dir or Path(platformdirs.user_cache_dir("autoplan")) / "profiles"
    versions = "-".join(_version(name) for name in ("torch", "transformers"))
    place = device if hardware is None else f"{device}-{hardware.fingerprint}"
    return folder / f"{spec.identity}-{place}-{versions}-v{PROFILE_VERSION}.json"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _read_cache(path: Path) -> ModelProfile | None:
    try:
        return ModelProfile.model_validate_json(path.read_text())
    except (OSError, ValueError):  # no such file, a damaged one, or another schema: traced again
        return None


def _write_cache(path: Path, profile: ModelProfile) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(profile.model_dump_json())
        temporary.replace(path)
    except OSError:  # a cache that cannot be written costs a trace next time, nothing else
        temporary.unlink(missing_ok=True)


def _trace_rank(context: RankContext, spec: WorkloadSpec, device: str, timing_budget_s: float) -> dict[str, Any]:
    context.phase("trace")
    try:
        return json.loads(trace_workload(spec, device, timing_budget_s=timing_budget_s).model_dump_json())
    except AutoplanError as error:
        return {"error": error.message, "hint": error.hint}


def trace_workload(spec: WorkloadSpec, device: str, *, timing_budget_s: float = 0.0) -> ModelProfile:
    """Traces a workload in this process and times its make_batch. Imports torch.

    The only kernels that run are those of a tiny optimizer, and the operations if they are timed.

    Args:
        spec: What is trained.
        device: cpu or cuda.
        timing_budget_s: Seconds for timing the recorded operations on the device; 0: none is timed.

    Raises:
        WorkloadError: the model cannot be traced; the text names the operation that failed.
    """
    from autoplan.planner.trace.build_profile import profile_workload
    from autoplan.planner.trace.input_benchmark import measure_input
    from autoplan.strategies.workloads.sources import load_workload

    started = time.perf_counter()
    workload = load_workload(spec)
    profile = profile_workload(workload, device, identity=spec.identity, timing_budget_s=timing_budget_s)
    input_s, why_not = measure_input(workload)
    return profile.model_copy(
        update={
            "input_s_per_sample": input_s,
            "notes": profile.notes if why_not is None else (*profile.notes, why_not),
            "seconds_spent": time.perf_counter() - started,
        }
    )
