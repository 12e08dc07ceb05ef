"""From what the ranks measured to the profile: figures into the devices, and notes on what disturbed them.

In: `Measured` records and a profile of what was read. Out: devices with their measured figures, and sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from autoplan.probes.nvml import SLOWDOWNS
from autoplan.probes.profile import Device, HardwareProfile, Host, OperationReading
from autoplan.probes.worker import Measured
from autoplan.record import Reading

# Above this share of busy cores (load over cores) or of GPU utilisation, rates are not this machine's best.
BUSY_SHARE = 0.5
# torch.utils.benchmark calls an interquartile range over 25 % of the median severe
SEVERE_SPREAD = 0.25
# Other processes on a tenth of the cores lower a rate by about a tenth: more than the differences a search decides by.
SEVERE_OTHERS_SHARE = 0.10


def widened(measured: Measured, spread: float) -> Measured:
    """What was measured, with spreads of at least so much: the samples alone do not show how far off it may be."""

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


def refresh(now: HardwareProfile, cached: HardwareProfile, path: Path) -> HardwareProfile:
    """A cached profile's measured figures, with what is read now (free memory, clocks, load)."""
    measured = [
        Measured(
            type=d.type,
            index=d.index,
            operations=d.operations,
            kernel_launch_s=d.kernel_launch_s,
            context_bytes=d.context_bytes,
            complete=True,
        )
        for d in cached.devices
        if d.operations
    ]
    notes = [f"measured at {cached.created}, kept in {path}"]
    notes += [note for note in cached.notes if note not in now.notes]
    return now.model_copy(
        update={
            "devices": tuple(merge_measured(d, measured) for d in now.devices),
            "collectives": cached.collectives,
            "disturbed": cached.disturbed,
            "probed_s": cached.probed_s,
            "notes": (*now.notes, *notes),
        }
    )


def is_busy(host: Host) -> bool:
    """Whether so much runs on the machine now that rates would be lower than it can do."""
    load = host.load_average.value
    return load is not None and load > BUSY_SHARE * host.cores_usable


def busy_notes(host: Host, devices: Sequence[Device]) -> list[str]:
    """What makes rates lower than the machine can do before anything is measured: load, utilisation, throttling."""
    notes = []
    if is_busy(host):
        load = f"load {host.load_average.value:.1f} on {host.cores_usable} cores"
        notes.append(f"the machine was busy ({load}): rates may be lower than it can do")
    for device in devices:
        use = device.state["utilisation"].value if "utilisation" in device.state else None
        if use is not None and use > BUSY_SHARE:
            notes.append(f"cuda:{device.index} was busy ({use:.0%} utilisation): rates may be lower than it can do")
        slowed = SLOWDOWNS.intersection(device.throttle_reasons)
        if slowed:
            notes.append(f"the clock of cuda:{device.index} was limited: {', '.join(sorted(slowed))}")
    return notes


def contention_notes(measured: Sequence[Measured]) -> list[str]:
    """What other processes did to the measurements: their CPU time, and the spread of the samples."""
    notes = [
        f"other processes took {m.others_cpu_share:.0%} of the CPU time while {m.type}:{m.index} was measured: "
        "rates may be lower than it can do; measure again when the machine is idle"
        for m in measured
        if m.others_cpu_share > SEVERE_OTHERS_SHARE
    ]
    return notes or _spread_notes(measured)


def _spread_notes(measured: Sequence[Measured]) -> list[str]:
    operations = [o for m in measured for o in m.operations]
    noisy = [o for o in operations if o.rate.spread is not None and o.rate.spread > SEVERE_SPREAD]
    if len(noisy) <= len(operations) // 4:
        return []
    return [
        f"{len(noisy)} of {len(operations)} measurements vary by over {SEVERE_SPREAD:.0%}: "
        "something else used the machine; measure again when it is idle"
    ]
