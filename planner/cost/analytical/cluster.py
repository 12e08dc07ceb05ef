"""Clusters: nodes of equal chips with two tiers of links, from `256x8xH100` or a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from autoplan.errors import UsageError
from autoplan.planner.cost.analytical.chips import find_chip
from autoplan.record import Record

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
    price_per_gpu_hour: float | None = Field(default=None, ge=0)

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return self.nodes * self.gpus_per_node

    def of(self, num_gpus: int) -> Cluster:
        """The same hardware with so many GPUs: whole nodes, or part of one, which keeps the loaders of all of it."""
        per_node = min(num_gpus, self.gpus_per_node)
        return self.model_copy(update={"nodes": -(-num_gpus // per_node), "gpus_per_node": per_node})


_FORM = re.compile(r"^(?:(\d+)\s*[xX]\s*)?(?:(\d+)\s*[xX]\s*)?(.+)$")


def parse_cluster(
    text: str,
    *,
    inter_gbits_per_s_per_gpu: float | None = None,
    intra_gbytes_per_s: float | None = None,
    input_tokens_per_s: float | None = None,
) -> tuple[Cluster, tuple[str, ...]]:
    """Reads `nodes x GPUs x chip`, `GPUs x chip`, a chip alone, or a JSON file with Cluster's fields.

    Returns:
        The cluster, and what was assumed, in sentences.

    Raises:
        UsageError: a cluster that cannot be: no GPU, an unknown chip, several nodes and no link between them.
    """
    given = _read_file(Path(text)) if text.endswith(".json") else _read_text(text)
    links = {
        "inter_gbits_per_s_per_gpu": inter_gbits_per_s_per_gpu,
        "intra_gbytes_per_s": intra_gbytes_per_s,
        "input_tokens_per_s": input_tokens_per_s,
    }
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
    first, second, chip = match.groups()
    if first is None:
        nodes, per_node = 1, 1
    elif second is None:
        nodes, per_node = 1, int(first)
    else:
        nodes, per_node = int(first), int(second)
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
