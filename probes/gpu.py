"""The CUDA GPUs that this process may use, as the driver describes them. No CUDA context is made.

`CUDA_VISIBLE_DEVICES` is followed as CUDA follows it: indices, UUIDs or their beginnings, MIG instances; the
list ends at the first entry that names no device. Of MIG instances a CUDA process sees one, and no GPU beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autoplan.probes import catalog
from autoplan.probes.nvml import CLOCK_EVENTS, POWER_CAP, Nvml, open_nvml
from autoplan.probes.profile import Device, Link
from autoplan.probes.topology import bus_id, read_links
from autoplan.record import Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """Everything the driver says, and in `notes` what it does not say."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    driver: str | None = None
    notes: tuple[str, ...] = ()


def read_gpus(api: Any = None, *, environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> GpuReading:
    """Read the GPUs that are visible to this process.

    Args:
        api: Anything shaped like the `pynvml` module; None takes the real one.
        environ: Where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are looked up; None takes os.environ.
        root: The folder to read as `/`, for /sys.
    """
    nvml, why = open_nvml(api)
    if nvml is None:
        return GpuReading(notes=(f"no GPU was read: {why}",))
    try:
        return _read(nvml, os.environ if environ is None else environ, root)
    finally:
        nvml.close()


def _read(nvml: Nvml, environ: Mapping[str, str], root: Path) -> GpuReading:
    driver = nvml.query("nvmlSystemGetDriverVersion").value
    count = nvml.query("nvmlDeviceGetCount")
    if count.reason is not None:
        return GpuReading(driver=driver, notes=(f"no GPU was read: {count.reason}",))
    handles, notes = _visible_handles(nvml, count.value, environ)
    devices = tuple(_read_device(nvml, index, handle, root) for index, handle in enumerate(handles))
    names = {device.name for device in devices}
    if len(names) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "the GPUs differ and CUDA numbers the fastest first, the driver by PCI slot: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID so that both mean the same GPU"
        )
    return GpuReading(
        devices=devices,
        links=read_links(nvml, handles),
        driver=driver,
        notes=tuple(notes),
    )


def _visible_handles(nvml: Nvml, count: int, environ: Mapping[str, str]) -> tuple[list[Any], list[str]]:
    """The handles in CUDA's order, and what could not be opened."""
    notes: list[str] = []
    physical: list[Any] = []
    for index in range(count):
        answer = nvml.query("nvmlDeviceGetHandleByIndex", index)
        if answer.reason is not None:
            notes.append(f"GPU {index} cannot be opened: {answer.reason}")
        physical.append(answer.value)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return _as_seen_by_cuda(nvml, [h for h in physical if h is not None], notes), notes
    handles: list[Any] = []
    for entry in (part.strip() for part in wanted.split(",")):
        handle = _find_handle(nvml, physical, entry)
        if handle is None:
            if entry not in ("", "-1", "NoDevFiles"):
                notes.append(f"CUDA_VISIBLE_DEVICES={wanted}: {entry!r} names no GPU; CUDA stops there")
            break
        handles.append(handle)
    return _as_seen_by_cuda(nvml, handles, notes), notes


def _find_handle(nvml: Nvml, physical: list[Any], entry: str) -> Any:
    """The handle that one entry of CUDA_VISIBLE_DEVICES names, or None."""
    if entry.isdigit():
        return physical[int(entry)] if int(entry) < len(physical) else None
    if entry.startswith("MIG-"):
        return nvml.query("nvmlDeviceGetHandleByUUID", entry).value
    if entry.startswith("GPU-"):
        found = [
            handle
            for handle in physical
            if handle is not None and str(nvml.query("nvmlDeviceGetUUID", handle).value or "").startswith(entry)
        ]
        return found[0] if len(found) == 1 else None  # a beginning that fits two GPUs is refused by CUDA
    return None


def _as_seen_by_cuda(nvml: Nvml, handles: list[Any], notes: list[str]) -> list[Any]:
    """The first MIG instance alone, where there is one: a GPU in MIG mode stands for its first instance.

    Source: NVIDIA's MIG User Guide, "CUDA Device Enumeration": CUDA can only enumerate a single compute instance, and
    then enumerates no GPU that is not in MIG mode.
    """
    whole, instances = [], []
    for handle in handles:
        mode = nvml.query("nvmlDeviceGetMigMode", handle)
        if str(nvml.query("nvmlDeviceGetUUID", handle).value or "").startswith("MIG-"):
            instances.append(handle)
        elif mode.reason is not None or mode.value[0] != 1:
            whole.append(handle)
        else:
            instance = nvml.query("nvmlDeviceGetMigDeviceHandleByIndex", handle, 0)
            if instance.reason is not None:
                notes.append(f"a GPU is in MIG mode and has no instance to use: {instance.reason}")
                continue
            notes.append("a GPU is in MIG mode: its first instance is used; CUDA_VISIBLE_DEVICES picks another")
            instances.append(instance.value)
    if instances and len(whole) + len(instances) > 1:
        notes.append("a CUDA process sees one MIG instance and no GPU beside it: the first instance is used alone")
    return instances[:1] or whole


def _read_device(nvml: Nvml, index: int, handle: Any, root: Path) -> Device:
    name = str(nvml.query("nvmlDeviceGetName", handle).value or "unknown GPU")
    memory = nvml.query("nvmlDeviceGetMemoryInfo", handle)
    total = available = Reading.unknown("bytes", memory.reason or "", "nvmlDeviceGetMemoryInfo")
    if memory.reason is None:
        total = Reading.driver(memory.value.total, "bytes", "nvmlDeviceGetMemoryInfo total")
        available = Reading.driver(memory.value.free, "bytes", "nvmlDeviceGetMemoryInfo free")
    mig = nvml.query("nvmlDeviceGetMigMode", handle)
    uuid = nvml.query("nvmlDeviceGetUUID", handle).value
    sheet = catalog.find(name)
    return Device(
        index=index,
        type="cuda",
        name=name,
        uuid=uuid,
        memory_total_bytes=total,
        memory_available_bytes=available,
        numa_node=_numa_node(nvml, handle, root),
        datasheet_name=sheet.name if sheet else None,
        datasheet_peak_flops_per_s={
            dtype: sheet.reading(figure, "flop/s") for dtype, figure in sheet.peak_flops_per_s.items()
        }
        if sheet
        else {},
        datasheet_memory_bandwidth_bytes_per_s=sheet.reading(sheet.memory_bandwidth_bytes_per_s, "bytes/s")
        if sheet
        else None,
        state=read_state(nvml, handle),
        throttle_reasons=tuple(event for event in read_clock_events(nvml, handle) if event != POWER_CAP),
        mig=(uuid or "").startswith("MIG-") or (mig.value[0] == 1 if mig.reason is None else None),
        other_processes=_read_processes(nvml, handle),
    )


def read_state(nvml: Nvml, handle: Any) -> dict[str, Reading]:
    """Clocks, power, temperature and utilisation at this moment; each figure by itself known or not."""
    utilisation = nvml.query("nvmlDeviceGetUtilizationRates", handle)
    return {
        "sm_clock": nvml.reading("Hz", 1e6, "nvmlDeviceGetClockInfo", handle, 1),
        "sm_clock_max": nvml.reading("Hz", 1e6, "nvmlDeviceGetMaxClockInfo", handle, 1),
        "memory_clock": nvml.reading("Hz", 1e6, "nvmlDeviceGetClockInfo", handle, 2),
        "memory_clock_max": nvml.reading("Hz", 1e6, "nvmlDeviceGetMaxClockInfo", handle, 2),
        "power": nvml.reading("W", 1e-3, "nvmlDeviceGetPowerUsage", handle),
        "power_limit": nvml.reading("W", 1e-3, "nvmlDeviceGetEnforcedPowerLimit", handle),
        "temperature": nvml.reading("celsius", 1, "nvmlDeviceGetTemperature", handle, 0),
        "utilisation": Reading.driver(utilisation.value.gpu / 100, "1", "nvmlDeviceGetUtilizationRates")
        if utilisation.reason is None
        else Reading.unknown("1", utilisation.reason, "nvmlDeviceGetUtilizationRates"),
    }


def read_clock_events(nvml: Nvml, handle: Any) -> tuple[str, ...]:
    """Why the driver limits the clock at this moment; empty if it does not, or if it gives no reasons."""
    answer = nvml.query("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if answer.reason is not None:  # the name before driver 535
        answer = nvml.query("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if answer.reason is not None:
        return ()
    return tuple(text for bit, text in CLOCK_EVENTS.items() if answer.value & bit)


def _numa_node(nvml: Nvml, handle: Any, root: Path) -> int | None:
    """The host's NUMA node next to the GPU, from /sys; None if unknown (-1 there)."""
    address = bus_id(nvml.query("nvmlDeviceGetPciInfo", handle).value)
    if address is None:
        return None
    domain, _, rest = address.partition(":")
    try:
        node = int((root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _read_processes(nvml: Nvml, handle: Any) -> tuple[str, ...]:
    """'pid name bytes' of every other process on the GPU; in a container the driver may show none or bare pids."""
    seen: dict[int, str] = {}
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for process in nvml.query(function, handle).value or ():
            if process.pid == os.getpid():
                continue
            try:
                name = psutil.Process(process.pid).name()
            except psutil.Error:
                name = "?"
            used = "?" if process.usedGpuMemory is None else str(process.usedGpuMemory)
            seen[process.pid] = f"{process.pid} {name} {used}"
    return tuple(seen[pid] for pid in sorted(seen))
