"""From what the ranks measured, or the cache has, to the profile: figures into the devices, and what disturbed them.

In: `Measured` records or a file of the cache, and a profile of what was read. Out: devices with their measured figures,
and sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import platformdirs
from pydantic import ValidationError

from autoplan.files import read_regular, replace_file
from autoplan.probes.nvml import SLOWDOWNS
from autoplan.probes.profile import Device, HardwareProfile, Host, OperationReading
from autoplan.probes.worker import Measured
from autoplan.record import Reading

# raise it when what is measured, or how, changes: older files of the cache are then not found
PROBES_VERSION = 5
# Above this share of busy cores (load over cores) or of GPU utilisation, rates are not this machine's best.
BUSY_SHARE = 0.5
# torch.utils.benchmark calls an interquartile range over 25 % of the median severe
SEVERE_SPREAD = 0.25
# Other processes on a tenth of the cores lower a rate by about a tenth: more than the differences a search decides by.
SEVERE_OTHERS_SHARE = 0.10
# What `merge_measured` gives a device.
MEASURED = (
    "operations",
    "kernel_launch_s",
    "context_bytes",
    "peak_flops_per_s",
    "memory_bandwidth_bytes_per_s",
    "host_to_device_bytes_per_s",
    "device_to_host_bytes_per_s",
)


def widened(measured: Measured, spread: float) -> Measured:
    """The measured rates with spreads of at least so much: the samples alone do not show how far off a rate may be."""

    def wider(reading: Reading) -> Reading:
        return reading.model_copy(update={"spread": max(reading.spread or 0.0, spread)})

    def both(reading: OperationReading) -> OperationReading:
        return reading.model_copy(update={"seconds": wider(reading.seconds), "rate": wider(reading.rate)})

    launch = measured.kernel_launch_s
    return measured.model_copy(
        update={
            "operations": tuple(map(both, measured.operations)),
            "kernel_launch_s": None if launch is None else wider(launch),
        }
    )


def merge_measured(device: Device, measured: Iterable[Measured]) -> Device:
    """The device with what was measured on it; as it is where nothing was."""
    for found in measured:
        if (found.type, found.index) == (device.type, device.index):
            return device.model_copy(
                update={
                    "operations": found.operations,
                    "kernel_launch_s": found.kernel_launch_s,
                    "context_bytes": found.context_bytes,
                    "peak_flops_per_s": _peaks(found.operations),
                    "memory_bandwidth_bytes_per_s": _best(found.operations, ("copy", "add")),
                    "host_to_device_bytes_per_s": _transfers(found.operations, "host_to_device"),
                    "device_to_host_bytes_per_s": _transfers(found.operations, "device_to_host"),
                }
            )
    return device


def _peaks(operations: Sequence[OperationReading]) -> dict[str, Reading]:
    dtypes = dict.fromkeys(o.dtype for o in operations if o.kind == "matmul")
    best = {dtype: _best([o for o in operations if o.dtype == dtype], ("matmul",)) for dtype in dtypes}
    return {dtype: reading for dtype, reading in best.items() if reading is not None}


def _transfers(operations: Sequence[OperationReading], way: str) -> dict[str, Reading]:
    best = {kind: _best(operations, (f"{way}_{kind}",)) for kind in ("pinned", "pageable")}
    return {kind: reading for kind, reading in best.items() if reading is not None}


def _best(operations: Sequence[OperationReading], kinds: Sequence[str]) -> Reading | None:
    """The highest rate among the operations of these kinds."""
    known = [o for o in operations if o.kind in kinds and o.rate.value is not None]
    if not known:
        return None
    best = max(known, key=lambda o: o.rate.value or 0.0)
    shape = "x".join(map(str, best.shape))
    source = f"best of {len(known)}: {best.kind} {shape}, {best.rate.source}"
    return best.rate.model_copy(update={"source": source})


def is_busy(host: Host) -> bool:
    """Whether so much runs on the machine now that rates would be lower than it can do."""
    load = host.load_average.value
    return load is not None and load > BUSY_SHARE * host.cores_usable


def busy_notes(host: Host, devices: Sequence[Device]) -> list[str]:
    """Notes on what lowers the rates before anything is measured: load, utilisation, throttling."""
    notes = []
    if is_busy(host):
        load = f"load {host.load_average.value:.1f} on {host.cores_usable} cores"
        notes.append(f"the machine was busy ({load}): rates may be lower than it can do")
    for device in devices:
        use = _busy_share(device)
        if use is not None:
            notes.append(f"cuda:{device.index} was busy ({use:.0%} utilisation): rates may be lower than it can do")
        slowed = SLOWDOWNS.intersection(device.throttle_reasons)
        if slowed:
            notes.append(f"the clock of cuda:{device.index} was limited: {', '.join(sorted(slowed))}")
    return notes


def _busy_share(device: Device) -> float | None:
    """How much of a GPU was in use when it was read, where that is much; else None."""
    use = device.state["utilisation"].value if "utilisation" in device.state else None
    return use if use is not None and use > BUSY_SHARE else None


def spread_notes(measured: Sequence[Measured]) -> list[str]:
    """A sentence where many samples vary."""
    operations = [o for m in measured for o in m.operations]
    noisy = [o for o in operations if o.rate.spread is not None and o.rate.spread > SEVERE_SPREAD]
    if len(noisy) <= len(operations) // 4:
        return []
    return [
        f"{len(noisy)} of {len(operations)} measurements vary by over {SEVERE_SPREAD:.0%}: "
        "something else used the machine; measure again when it is idle"
    ]


LATE_SHARE = 0.2
"""Of the time that an idle GPU waits, at most, for a host whose cores others use. Assumed."""


def load_sentence(profile: HardwareProfile, kind: str, others_cpu_share: float) -> str | None:
    """A sentence on what others did with the device while it was measured; None: nothing that matters.

    If a container has only a share of a host's cores, the others' share of all the cores says little: then it does
    not count.
    """
    quota = profile.host.cgroup_cpu_limit.value
    shares_host = quota is not None and quota < (profile.host.cores_logical or profile.host.cores_usable)
    why = None
    if others_cpu_share > SEVERE_OTHERS_SHARE and not shares_host:
        why = f"other work took {others_cpu_share:.0%} of the CPU time while this machine was measured"
    for device in profile.devices if kind == "cuda" else ():
        use = _busy_share(device)
        if use is not None:
            why = f"other work used {use:.0%} of cuda:{device.index} before it was measured"
    if why is None:
        return None
    return f"{why}: its rates are taken as less certain; autoplan probe --fresh measures again"


def load_spread(profile: HardwareProfile, kind: str, others_cpu_share: float) -> float:
    """How far off rates may be that were taken beside other work: its time over what was left.

    Of a GPU that was in use, half of the time is taken to have been others'; one that was not shares no cores, but its
    kernels may be launched late: at most LATE_SHARE.
    """
    if kind == "cuda":
        in_use = any(_busy_share(device) is not None for device in profile.devices)
        share = 0.5 if in_use else min(others_cpu_share, LATE_SHARE)
    else:
        share = min(others_cpu_share, 0.66)
    return share / (1 - share)


# The cache: a profile per machine and kind of device, so that a second run does not measure again.


def cache_path(fingerprint: str, device: str, cache_dir: Path | None = None) -> Path:
    """Where the profile of a machine is kept.

    Args:
        fingerprint: Of the machine (`HardwareProfile.fingerprint`).
        device: Which kind of device was measured: "cuda" or "cpu".
        cache_dir: None takes the user's cache folder.
    """
    folder = cache_dir or Path(platformdirs.user_cache_dir("autoplan")) / "probes"
    return folder / f"{fingerprint}-{device}-v{PROBES_VERSION}.json"


def load_cached(path: Path) -> tuple[HardwareProfile | None, str | None]:
    """Read a file of the cache.

    Returns:
        The profile and None; None and None where there is no file; None and a sentence where it is unusable.
    """
    try:
        return HardwareProfile.model_validate_json(read_regular(path)), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"the cached profile {path} cannot be read ({error}); measured again"
    except ValidationError:
        return None, f"the cached profile {path} is damaged or of another version; measured again"


def save_cached(path: Path, profile: HardwareProfile) -> str | None:
    """Write a file of the cache as a whole; returns why it could not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, profile.model_dump_json(indent=1))
    except OSError as error:
        return f"the profile could not be kept in {path.parent} ({error}): the next run measures again"
    return None


def refresh(now: HardwareProfile, cached: HardwareProfile, path: Path) -> HardwareProfile:
    """A cached profile's measured figures, with what is read now (free memory, clocks, load)."""
    known = {(d.type, d.index): {name: getattr(d, name) for name in MEASURED} for d in cached.devices if d.operations}
    notes = [f"measured at {cached.created}, kept in {path}"]
    notes += [note for note in cached.notes if note not in now.notes]
    return now.model_copy(
        update={
            "devices": tuple(d.model_copy(update=known.get((d.type, d.index), {})) for d in now.devices),
            "collectives": cached.collectives,
            "disturbed": cached.disturbed,
            "others_cpu_share": cached.others_cpu_share,
            "probed_s": cached.probed_s,
            "notes": (*now.notes, *notes),
        }
    )
