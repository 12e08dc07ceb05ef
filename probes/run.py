"""All probes in order: what can be read at once, then what must be measured, in a rank and within a budget.

In: a zygote, which device, a budget. Out: a `HardwareProfile`, from the cache where this machine was measured before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoplan.errors import DeviceError, UsageError
from autoplan.probes import catalog
from autoplan.probes.gpu import read_gpus
from autoplan.probes.host import read_cpu_device, read_host, read_last_level_cache_bytes
from autoplan.probes.merge import (
    busy_notes,
    cache_path,
    load_cached,
    load_sentence,
    load_spread,
    merge_measured,
    refresh,
    save_cached,
    spread_notes,
    widened,
)
from autoplan.probes.profile import Device, HardwareProfile, Host
from autoplan.probes.worker import Measured, ProbeRequest

if TYPE_CHECKING:
    from autoplan.processes import ProcessReport, Zygote

DEFAULT_BUDGET_S = 12.0
# A GPU has four formats and the larger shapes: 52 products, for which 12 s leave 80 ms each.
CUDA_BUDGET_S = 20.0
# The first rates of a search, before the plain run: the largest single calls decide how long they take.
BRIEF_BUDGET_S = 1.0
# Interquartile range over the median that is taken for rates of so few samples of small operations. Assumed.
BRIEF_SPREAD = 0.5
# All collectives together; a sweep over two ranks takes about half of it.
COLLECTIVES_S = 5.0
# More ranks than this on one CPU share cores that the collective itself needs.
MOST_CPU_RANKS = 4

_OF_NODES: ContextVar[HardwareProfile | None] = ContextVar("_OF_NODES", default=None)


@contextmanager
def machine_is(profile: HardwareProfile) -> Iterator[None]:
    """Until its end `read_host_profile` gives this one: the ranks run on such nodes, and this machine is none."""
    token = _OF_NODES.set(profile)
    try:
        yield
    finally:
        _OF_NODES.reset(token)


def read_host_profile(*, api: Any = None) -> HardwareProfile:
    """The facts that can be read without measuring: it takes milliseconds, no torch, no CUDA context.

    Args:
        api: Anything shaped like the `pynvml` module; None takes the real one.
    """
    if (of_nodes := _OF_NODES.get()) is not None:
        return of_nodes
    started = time.perf_counter()
    gpus = read_gpus(api)
    host = read_host(driver=gpus.driver)
    notes = list(gpus.notes)
    devices = gpus.devices
    if devices and host.cuda is None:
        names = ", ".join(device.name for device in devices)
        notes.append(f"this torch ({host.torch}) was built without CUDA: it cannot use {names}")
        devices = ()
    notes += busy_notes(host, devices)
    return HardwareProfile(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds_spent=time.perf_counter() - started,
        host=host,
        devices=(*devices, read_cpu_device(host)),
        links=gpus.links if devices else (),
        notes=tuple(notes),
    )


def run_probes(
    zygote: Zygote | None = None,
    *,
    device: str | None = None,
    budget_s: float | None = None,
    fresh: bool = False,
    cache_dir: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
    collective_ranks: int | None = None,
    brief: bool = False,
) -> HardwareProfile:
    """Everything the probes can find out about this machine, from the cache where it was measured before.

    What was measured while other work ran is kept too, with wider spreads (`disturbed` says so).

    Args:
        zygote: Starts the rank that measures; None: one is made for this call and closed.
        device: "cuda" or "cpu": what is measured; None measures the GPUs if there are any, else the CPU.
        budget_s: How long it may take, the start of the rank included; None: 12 s on a CPU, 20 s on a GPU.
        fresh: Measure again even if the cache has this machine.
        cache_dir: None takes the user's cache folder.
        on_progress: Called with the name of what is measured, each time that it changes.
        collective_ranks: The largest group of ranks for collectives; None: all GPUs, or the CPU's cores up to
            MOST_CPU_RANKS; 1: no collectives.
        brief: The first rates will do, and no collectives: what the cache has, else a second or two of measuring.

    Raises:
        UsageError: `device` is neither "cuda" nor "cpu".
        DeviceError: There is no such device, or nothing could be measured on it.
    """
    started = time.perf_counter()
    profile = read_host_profile()
    kind = pick_device(profile, device)
    if budget_s is None or brief:
        budget_s = BRIEF_BUDGET_S if brief else default_budget_s(kind)
    layout = "" if zygote is None or not zygote.layout else f"-{zygote.layout}"  # of nodes: collectives are others
    path = cache_path(profile.fingerprint + layout, kind, cache_dir)
    ranks = 1 if brief else collective_ranks or default_ranks(profile, kind)
    cached, problem = load_cached(path)
    if not fresh and cached is not None and cached.probed_s >= budget_s:
        kept = refresh(profile, cached, path)
        if ranks > most_ranks(kept):
            with _own_or_given(zygote) as running:
                kept = with_collectives(running, kept, kind, ranks, on_progress)
            save_cached(path, kept)
        return kept
    if problem is not None and not fresh:
        profile = _with_notes(profile, [problem])
    with _own_or_given(zygote) as running:
        spent = time.perf_counter() - started
        # a slow start of the interpreter must not leave nothing for the measuring
        measure_s = max(budget_s - spent, 0.4 * budget_s)
        measured, notes = _measure(running, profile, kind, measure_s, on_progress, brief=brief)
        profile = with_collectives(running, profile, kind, ranks, on_progress)
    others = max(m.others_cpu_share for m in measured)
    disturbed = load_sentence(profile, kind, others)
    spread = max(0.0 if disturbed is None else load_spread(profile, kind, others), BRIEF_SPREAD if brief else 0.0)
    found = [widened(one, spread) for one in measured] if spread else measured
    profile = profile.model_copy(
        update={
            "devices": tuple(merge_measured(d, found) for d in profile.devices),
            "seconds_spent": time.perf_counter() - started,
            "disturbed": disturbed,
            "others_cpu_share": others,
            "probed_s": budget_s,
        }
    )
    profile = _with_notes(profile, [*notes, *(spread_notes(measured) if disturbed is None else ())])
    as_long = cached if cached is not None and cached.probed_s >= budget_s else None
    quieter = as_long is not None and (as_long.disturbed is None or as_long.others_cpu_share < others)
    if (quieter and disturbed is not None) or not _came_to_their_end(measured, profile, kind):
        return profile  # the cache has better ones, or a later call measures what is missing, and more
    problem = save_cached(path, profile)
    return profile if problem is None else _with_notes(profile, [problem])


def default_budget_s(kind: str) -> float:
    """Seconds that the probes of a device take where nobody says otherwise."""
    return CUDA_BUDGET_S if kind == "cuda" else DEFAULT_BUDGET_S


def default_ranks(profile: HardwareProfile, kind: str) -> int:
    """The largest group of ranks for collectives: all GPUs, or the usable cores up to MOST_CPU_RANKS."""
    if kind == "cuda":
        return sum(device.type == "cuda" for device in profile.devices)
    return min(profile.host.cores_usable, MOST_CPU_RANKS)


def most_ranks(profile: HardwareProfile) -> int:
    """The largest group that a profile has a collective of; 1 for none."""
    return max((reading.group_size for reading in profile.collectives), default=1)


def with_collectives(
    zygote: Zygote,
    profile: HardwareProfile,
    kind: str,
    ranks: int,
    on_progress: Callable[[str], None] | None = None,
) -> HardwareProfile:
    """The profile with collectives measured over up to that many ranks."""
    if ranks < 2:
        return profile
    from autoplan.probes.collectives import probe_collectives

    if on_progress is not None:
        on_progress(f"collectives over {ranks} ranks")
    readings, notes = probe_collectives(
        zygote,
        device=kind,
        ranks=ranks,
        budget_s=COLLECTIVES_S,
        memory_limit_bytes=host_limit_bytes(profile.host),
    )
    return _with_notes(profile.model_copy(update={"collectives": readings or profile.collectives}), list(notes))


def pick_device(profile: HardwareProfile, wanted: str | None) -> Literal["cuda", "cpu"]:
    """The kind of device to use: the one asked for, else "cuda" where there is a GPU.

    Raises:
        UsageError: `wanted` is neither "cuda" nor "cpu".
        DeviceError: "cuda" is wanted and there is none.
    """
    has_gpu = any(d.type == "cuda" for d in profile.devices)
    if wanted is None:
        return "cuda" if has_gpu else "cpu"
    if wanted not in ("cuda", "cpu"):
        raise UsageError(f"the device {wanted!r} is not known", hint="give cuda or cpu")
    if wanted == "cpu":
        return "cpu"
    if not has_gpu:
        why = "; ".join(n for n in profile.notes if "GPU" in n or "CUDA" in n) or "no GPU is visible to this process"
        raise DeviceError(
            f"the device cuda was asked for, and there is none to use: {why}",
            hint="check nvidia-smi, CUDA_VISIBLE_DEVICES and that torch was installed with CUDA, or use cpu",
        )
    return "cuda"


def choose_threads(host: Host) -> int:
    """Threads for torch on the CPU: one per physical core this process may use."""
    physical = host.cores_physical or host.cores_usable
    return max(1, min(host.cores_usable, physical))


def _measure(
    zygote: Zygote,
    profile: HardwareProfile,
    kind: str,
    measure_s: float,
    on_progress: Callable[[str], None] | None,
    *,
    brief: bool = False,
) -> tuple[list[Measured], list[str]]:
    """The measurements of a rank, and notes on what is missing; `brief`: the first rates alone."""
    from autoplan.processes import Task, run_again

    targets = one_of_each_model([d for d in profile.devices if d.type == kind])
    requests = [make_request(profile, device, measure_s / len(targets), brief=brief) for device in targets]
    task = Task(
        target="autoplan.probes.worker:probe_devices",
        args=(requests,),
        deadlines_s={"*": 3 * measure_s + 30},
        total_deadline_s=3 * measure_s + 90,  # a first CUDA context can take tens of seconds
        memory_limit_bytes=host_limit_bytes(profile.host),
    )
    report = run_again(zygote, task, on_progress=progress_reporter(on_progress)).report
    result = report.ranks[0].result if report.ranks else None
    measured = [Measured.model_validate(item) for item in result or ()]
    if not measured:
        raise _device_error(kind, report)
    notes = [note for m in measured for note in m.notes]
    measured = for_all_alike(measured, profile.devices)
    if not _came_to_their_end(measured, profile, kind):
        notes.append(f"the probes did not come to their end: {report.describe()}")
    return measured, notes


def make_request(profile: HardwareProfile, device: Device, budget_s: float, *, brief: bool = False) -> ProbeRequest:
    """What a rank is asked for to measure a device of this machine.

    Tensors take a quarter of the host's free memory at the most; of a GPU, the rank asks what is free.
    """
    limit_bytes: float | None = None
    cache_bytes: int | None = None
    if device.type == "cpu":
        available = device.memory_available_bytes.value
        limit_bytes, cache_bytes = 0.25 * available if available else None, read_last_level_cache_bytes()
    elif (sheet := catalog.find(device.name)) is not None and sheet.last_level_cache_bytes is not None:
        cache_bytes = int(sheet.last_level_cache_bytes.value)
    return ProbeRequest(
        type=device.type,
        index=device.index,
        budget_s=budget_s,
        threads=choose_threads(profile.host),
        memory_limit_bytes=limit_bytes,
        cache_bytes=cache_bytes,
        brief=brief,
    )


def one_of_each_model(devices: Sequence[Device]) -> list[Device]:
    """The first device of each model: the time for measuring is not divided by the number of those that are alike."""
    first: dict[tuple[str, str, float | None], Device] = {}
    for device in devices:
        first.setdefault(_model(device), device)
    return list(first.values())


def for_all_alike(measured: Sequence[Measured], devices: Sequence[Device]) -> list[Measured]:
    """The measurements on one device of each model, given to every device of that model."""
    by_index = {(device.type, device.index): device for device in devices}
    by_model = {_model(by_index[found.type, found.index]): found for found in measured}
    alike = [(device, by_model[_model(device)]) for device in devices if _model(device) in by_model]
    return [found.model_copy(update={"index": device.index}) for device, found in alike]


def _model(device: Device) -> tuple[str, str, float | None]:
    return device.type, device.name, device.memory_total_bytes.value


def _came_to_their_end(measured: Sequence[Measured], profile: HardwareProfile, kind: str) -> bool:
    """Whether each device was measured, with all series of it."""
    return len(measured) == sum(d.type == kind for d in profile.devices) and all(m.complete for m in measured)


def progress_reporter(on_progress: Callable[[str], None] | None) -> Callable[[Any], None] | None:
    """For `Zygote.run`: tells what the first rank does, each time that it changes."""
    if on_progress is None:
        return None
    last = ""

    def report_progress(progress: Any) -> None:
        nonlocal last
        doing = str(progress.facts[0].get("doing", "")) if progress.facts else ""
        if doing and doing != last:
            last = doing
            on_progress(doing)

    return report_progress


def host_limit_bytes(host: Host) -> int | None:
    """Bytes of the host's memory that the processes of a probe may take together: 80 % of what is free."""
    available = host.memory_available_bytes.value
    return int(0.8 * available) if available else None


def _own_or_given(zygote: Zygote | None) -> AbstractContextManager[Zygote]:
    from autoplan.processes import Zygote

    return Zygote(preload=("torch",)) if zygote is None else nullcontext(zygote)


def _device_error(kind: str, report: ProcessReport) -> DeviceError:
    tail = report.ranks[0].stderr_tail.strip().splitlines()[-1:] if report.ranks else []
    last = f"; last line: {tail[0]}" if tail else ""
    return DeviceError(
        f"nothing could be measured on {kind}: {report.describe()}{last}",
        hint="check that `python -c \"import torch; torch.ones(1, device='" + kind + "')\"` works on this machine",
    )


def _with_notes(profile: HardwareProfile, notes: Sequence[str]) -> HardwareProfile:
    return profile.model_copy(update={"notes": (*profile.notes, *notes)})
