"""How the GPUs of this machine are joined to each other and to the host, as the driver describes it.

Bandwidths here are datasheet figures for one direction (generation times width); the collectives probe
measures what is left of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from autoplan.probes import catalog
from autoplan.probes.nvml import Nvml
from autoplan.probes.profile import Link
from autoplan.record import Reading

# nvml.h: nvmlNvLinkVersion_t values to generations, most links of any GPU, nvmlGpuP2PCapsIndex_t NVLINK, OK
NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}
MAX_NVLINKS = 36
P2P_CAPS_NVLINK = 2
P2P_STATUS_OK = 0
NVLINK_REMOTE_SWITCH = 2

# nvml.h, nvmlGpuTopologyLevel_t: what two GPUs have in common on the way to each other
TOPOLOGY = {
    0: ("pcie", "same board"),
    10: ("pcie", "one PCIe switch"),
    20: ("pcie", "several PCIe switches"),
    30: ("pcie", "one PCIe host bridge"),
    40: ("pcie", "several host bridges of one NUMA node"),
    50: ("numa", "between NUMA nodes"),
}


NvLink = tuple[int | None, str | None]
"""Of an active one: its generation, and the PCI address of the other end; None for a switch or unknown."""


def read_links(nvml: Nvml, handles: Sequence[Any]) -> tuple[Link, ...]:
    """The link of each GPU with the host, and of each pair of GPUs.

    Args:
        nvml: The open driver library.
        handles: The GPUs in CUDA's order; link ends are named "cuda:0" and so on.
    """
    pcie = [_pcie(nvml, handle) for handle in handles]
    nvlinks = [_active_nvlinks(nvml, handle) for handle in handles]
    links = [
        Link(a=f"cuda:{i}", b="host", kind="host", bandwidth_bytes_per_s=reading, detail=detail)
        for i, (reading, detail) in enumerate(pcie)
    ]
    for i, j in combinations(range(len(handles)), 2):
        kind, reading, detail = _pair(nvml, handles[i], handles[j], nvlinks[i], (pcie[i][0], pcie[j][0]))
        links.append(Link(a=f"cuda:{i}", b=f"cuda:{j}", kind=kind, bandwidth_bytes_per_s=reading, detail=detail))
    return tuple(links)


def _pair(
    nvml: Nvml, one: Any, other: Any, nvlinks: Sequence[NvLink], pcie: tuple[Reading, Reading]
) -> tuple[str, Reading, str]:
    """(kind, bandwidth, detail) of the way between two GPUs; `nvlinks` are those of the first."""
    status = nvml.query("nvmlDeviceGetP2PStatus", one, other, P2P_CAPS_NVLINK)
    if status.reason is None and status.value == P2P_STATUS_OK:
        return "nvlink", *_nvlink_bandwidth(nvml, other, nvlinks)
    level = nvml.query("nvmlDeviceGetTopologyCommonAncestor", one, other)
    if level.reason is not None or level.value not in TOPOLOGY:
        why = level.reason or f"unknown topology level {level.value}"
        return "pcie", Reading.unknown("bytes/s", why), why
    kind, detail = TOPOLOGY[level.value]
    if kind == "numa":
        unknown = Reading.unknown("bytes/s", "no datasheet figure for the way between the NUMA nodes")
        return kind, unknown, detail
    known = [reading for reading in pcie if reading.value is not None]
    slower = min(known, key=lambda r: r.value or 0.0) if len(known) == 2 else pcie[0]
    return kind, slower, detail


def _nvlink_bandwidth(nvml: Nvml, other: Any, mine: Sequence[NvLink]) -> tuple[Reading, str]:
    """One direction: the links that end at the other GPU, or all of them where they end at an NVSwitch."""
    address = bus_id(nvml.query("nvmlDeviceGetPciInfo", other).value)
    direct = [generation for generation, remote in mine if remote is not None and remote == address]
    usable = direct or [generation for generation, _ in mine]
    generations = {generation for generation in usable if generation is not None}
    if not usable or len(generations) != 1:
        why = "the driver does not say how many NVLinks of which generation there are"
        return Reading.unknown("bytes/s", why), why
    generation = generations.pop()
    detail = f"{len(usable)} x NVLink {generation}" + ("" if direct else " through a switch")
    return catalog.link_reading(f"NVLink {generation}", len(usable)), detail


def _active_nvlinks(nvml: Nvml, handle: Any) -> list[NvLink]:
    active: list[NvLink] = []
    for link in range(MAX_NVLINKS):
        state = nvml.query("nvmlDeviceGetNvLinkState", handle, link)
        if state.reason is not None:
            break  # past the last link, or no NVLink at all
        if state.value != 1:
            continue
        version = nvml.query("nvmlDeviceGetNvLinkVersion", handle, link).value
        kind = nvml.query("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link).value
        remote = None
        if kind != NVLINK_REMOTE_SWITCH:
            remote = bus_id(nvml.query("nvmlDeviceGetNvLinkRemotePciInfo", handle, link).value)
        active.append((NVLINK_GENERATIONS.get(version), remote))
    return active


def bus_id(pci: Any) -> str | None:
    """The PCI address that the driver says, in lower case; None: it says none."""
    if pci is None:
        return None
    return (pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)).lower()


def _pcie(nvml: Nvml, handle: Any) -> tuple[Reading, str]:
    """The PCIe link of a GPU. The widest generation both ends have: an idle GPU runs its link slower."""
    generation = nvml.query("nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = nvml.query("nvmlDeviceGetCurrPcieLinkWidth", handle)
    if generation.reason is not None or width.reason is not None:
        why = generation.reason or width.reason or ""
        return Reading.unknown("bytes/s", why), why
    name = f"PCIe {generation.value}"
    return catalog.link_reading(name, width.value), f"{name} x{width.value}"
