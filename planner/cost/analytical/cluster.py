"""Clusters: nodes of equal chips with two tiers of links, from `256x8xH100` or a file; and chips by people's names.

A chip's name ("H100", "a100_sxm4-80gb") is looked up in the catalogue, with shorthands for those sold in forms. A name
that may mean several chips is an error that names them all.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from autoplan.errors import UsageError
from autoplan.planner.cost.columns import DTYPES, PRECISIONS
from autoplan.probes import catalog
from autoplan.probes.catalog import ChipSheet
from autoplan.probes.profile import Device, HardwareProfile, Host, Link
from autoplan.record import Reading, Record

# The form that a name without one is taken for (docs/probes.md, "Datasheets"), said on screen as an assumption: the one
# that fills eight-GPU servers. Keys as `catalog.normalise` writes them. The A10G, which AWS alone has, is an A10 with
# another power limit and without a datasheet.
DEFAULT_FORMS = {
    "h100": "H100 SXM 80GB",
    "h10080gb": "H100 SXM 80GB",
    "a100": "A100 SXM 80GB",
    "a10080gb": "A100 SXM 80GB",
    "a10040gb": "A100 SXM 40GB",
    "v100": "V100 SXM2 32GB",
    "a10g": "A10 24GB",
}
PCIE_LANES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A chip as the closed form needs it.

    Attributes:
        sheet: Its datasheet.
        intra_bytes_per_s: Bandwidth between GPUs of a node, per GPU and direction.
        assumed: What was assumed, in sentences.
    """

    sheet: ChipSheet
    intra_bytes_per_s: float
    assumed: tuple[str, ...]

    def peak(self, precision: str) -> float | None:
        """Dense FLOP/s in a precision; None where the datasheet gives none."""
        figure = self.sheet.peak_flops_per_s.get(DTYPES[PRECISIONS.index(precision)])
        return None if figure is None else figure.value


@functools.cache
def find_chip(name: str) -> Chip:
    """The chip of a name: a whole name, a default form, or part of a name that only one chip has.

    Raises:
        UsageError: not in the catalogue, or several chips have the name; the text or the hint says how to write each.
    """
    sheet, assumed = _find_sheet(name)
    if sheet.gpu_link is not None and sheet.gpu_links:
        intra = catalog.link_reading(sheet.gpu_link, sheet.gpu_links)
    else:
        intra = catalog.link_reading(sheet.pcie or "PCIe 3", PCIE_LANES)
    assert intra.value is not None, f"{sheet.name} names a link that the catalogue has"
    return Chip(sheet=sheet, intra_bytes_per_s=intra.value, assumed=assumed)


def _find_sheet(name: str) -> tuple[ChipSheet, tuple[str, ...]]:
    """The datasheet of a name, and what was assumed to find it."""
    exact = catalog.find(name)
    if exact is not None:
        return exact, ()
    default = DEFAULT_FORMS.get(catalog.normalise(name))
    matching = catalog.matching(default if default is not None else name)
    if len(matching) == 1:
        return matching[0], (f"{name} is taken as the {matching[0].name}",)
    if matching:
        raise UsageError(
            f"the chip {name!r} is ambiguous: the catalogue has {len(matching)} of this name",
            hint=f"Write {' or '.join(repr(sheet.short_name) for sheet in matching)}.",
        )
    near = catalog.near_names(name)
    known = ", ".join(sorted(sheet.short_name for sheet in catalog.chips().values()))
    raise UsageError(
        f"no chip is called {name!r}",
        hint=f"Did you mean {' or '.join(near)}?" if near else f"Known are: {known}.",
    )


# What servers of these chips are sold with, one port per GPU: HDR for A100 (DGX A100), NDR for Hopper (DGX H100),
# EDR for V100 (four ports for eight GPUs in a DGX-1), 400 Gbit/s for DGX B200. Said as an assumption where used.
USUAL_GBITS_PER_GPU = {"Volta": 50.0, "Ampere": 200.0, "Hopper": 400.0, "Blackwell": 400.0}


class Cluster(Record):
    """A cluster. Bandwidths per GPU and direction; the input pipeline per node."""

    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    chip: str
    intra_gbytes_per_s: float | None = Field(default=None, gt=0, description="None: the chip's own NVLink or PCIe")
    inter_gbits_per_s_per_gpu: float | None = Field(default=None, gt=0)
    input_tokens_per_s: float | None = Field(
        default=None, gt=0, description="what all loader workers of a node deliver together; None: no limit"
    )

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return self.nodes * self.gpus_per_node

    def of(self, num_gpus: int) -> Cluster:
        """The same hardware with so many GPUs: whole nodes, or part of one, which keeps the loaders of all of it."""
        per_node = min(num_gpus, self.gpus_per_node)
        return self.model_copy(update={"nodes": -(-num_gpus // per_node), "gpus_per_node": per_node})


_FORM = re.compile(r"^(?:(\d+)\s*[xX]\s*)?(?:(\d+)\s*[xX]\s*)?(.+)$")


def parse_cluster(text: str, **links: float | None) -> tuple[Cluster, tuple[str, ...]]:
    """Reads `nodes x GPUs x chip`, `GPUs x chip`, a chip alone, or a JSON file with Cluster's fields.

    Args:
        text: As the user gave it.
        links: Bandwidths and the input of Cluster's fields; None: as the text has it.

    Returns:
        The cluster, and what was assumed, in sentences.

    Raises:
        UsageError: a cluster that cannot be: no GPU, an unknown chip, several nodes and no link between them.
    """
    given = _read_file(Path(text)) if text.endswith(".json") else _read_text(text)
    given |= {name: value for name, value in links.items() if value is not None}
    try:
        cluster = Cluster.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        size = first["loc"][:1] in (("nodes",), ("gpus_per_node",))
        raise UsageError(
            f"the cluster {text!r} cannot be: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            hint="For example: --cluster 4x8xA100 is four nodes of eight GPUs each."
            if size
            else f"A cluster file has {', '.join(Cluster.model_fields)}; what GPUs cost goes with --prices."
            if first["type"] == "extra_forbidden"
            else "nodes, gpus_per_node and chip must be given; what is not known is left out (docs/estimate.md).",
        ) from None
    return with_links(cluster, usual=not text.endswith(".json"))


def with_links(cluster: Cluster, *, usual: bool) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with the links that its servers are usually sold with, where it does not say them.

    Args:
        cluster: As it was given.
        usual: Whether a link between nodes may be assumed; who writes a file is asked to say it.

    Returns:
        The cluster, and what was assumed, in sentences.

    Raises:
        UsageError: an unknown chip, or several nodes and no link between them.
    """
    chip = find_chip(cluster.chip)
    assumed = list(chip.assumed)
    if cluster.intra_gbytes_per_s is None:
        rate = chip.intra_bytes_per_s / 1e9
        kind = chip.sheet.gpu_link if chip.sheet.gpu_links else f"{chip.sheet.pcie} x16"
        assumed.append(f"inside a node: {kind}, {rate:.0f} GB/s per GPU and direction")
    if cluster.inter_gbits_per_s_per_gpu is not None:
        return cluster, tuple(assumed)
    sold = USUAL_GBITS_PER_GPU.get(chip.sheet.architecture) if usual and chip.sheet.gpu_links else None
    if sold is None and cluster.nodes > 1:
        raise UsageError(
            f"{cluster.nodes} nodes of {chip.sheet.name}, and no link between them is given",
            hint="Give --inter-gbits-per-gpu (25, 100, 400), or inter_gbits_per_s_per_gpu in the cluster file.",
        )
    if sold is not None:
        cluster = cluster.model_copy(update={"inter_gbits_per_s_per_gpu": sold})
        where = "between nodes" if cluster.nodes > 1 else "between nodes, where more than this one are estimated"
        assumed.append(f"{where}: {sold:.0f} Gbit/s per GPU, as such servers are sold")
    return cluster, tuple(assumed)


def _read_text(text: str) -> dict[str, Any]:
    match = _FORM.match(text.strip())
    if match is None or not match.group(3).strip():
        raise UsageError(f"{text!r} is no cluster", hint="Write nodes x GPUs x chip: 256x8xH100.")
    *counts, chip = match.groups()
    nodes, per_node = [1, 1, *(int(count) for count in counts if count is not None)][-2:]
    return {"nodes": nodes, "gpus_per_node": per_node, "chip": chip.strip()}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="Or write 256x8xH100.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", hint="docs/estimate.md shows a cluster file.") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} has no object in it", hint="docs/estimate.md shows a cluster file.")
    return document


def cluster_hardware(cluster: Cluster, host: Host) -> HardwareProfile:
    """The hardware profile of one node of a cluster that is not here: from datasheets, and from what was given.

    Args:
        cluster: Its links between nodes are given, or it has one node.
        host: Of any machine; nothing is read of it for a GPU.
    """
    chip = find_chip(cluster.chip)
    sheet = chip.sheet
    memory = sheet.reading(sheet.memory_bytes, "bytes")
    gpu = Device(
        index=0,
        type="cuda",
        name=sheet.name,
        memory_total_bytes=memory,
        memory_available_bytes=memory,
        datasheet_name=sheet.name,
        datasheet_peak_flops_per_s={
            dtype: sheet.reading(figure, "flop/s") for dtype, figure in sheet.peak_flops_per_s.items()
        },
        datasheet_memory_bandwidth_bytes_per_s=sheet.reading(sheet.memory_bandwidth_bytes_per_s, "bytes/s"),
    )
    inside = 1e9 * cluster.intra_gbytes_per_s if cluster.intra_gbytes_per_s else chip.intra_bytes_per_s
    links = [_link("nvlink" if sheet.gpu_links else "pcie", inside)]
    if cluster.inter_gbits_per_s_per_gpu is not None:
        links.append(_link("network", 1e9 / 8 * cluster.inter_gbits_per_s_per_gpu))
    return HardwareProfile(
        created="",
        seconds_spent=0.0,
        host=host,
        devices=tuple(gpu.model_copy(update={"index": index}) for index in range(cluster.gpus_per_node)),
        links=tuple(links),
    )


def _link(kind: str, rate: float) -> Link:
    return Link(
        a="cuda", b=kind, kind=kind, bandwidth_bytes_per_s=Reading(value=rate, unit="bytes/s", provenance="datasheet")
    )
