"""Threads and places: the threads knob (CPU: over how many threads an operation is spread), and where a rank runs.

One of several ranks runs on the CPUs near its GPU, or on its share of the NUMA nodes, with its share of the threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from autoplan.probes.host import parse_id_list
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.workloads.workload import Workload


class ThreadsStrategy:
    """None leaves torch's own number; a number is set for the whole process."""

    name = "threads"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """On CPU every power of two up to the usable cores, and the cores themselves."""
        if device != "cpu":
            reason = "the work runs on the GPU; the CPU only launches it"
            return offer(self.name, (None,), {"1..": reason})
        cores = hardware.host.cores_usable
        own = torch.get_num_threads()
        counts = sorted({2**power for power in range(cores.bit_length())} | {cores})
        others = (count for count in counts if count != own)
        return offer(self.name, (None, *others), {own: f"None stands for it: torch's own number is {own} here"})

    def apply(self, build: Build) -> None:
        """Sets torch's intra-operation threads; this holds for the process, not only for the run."""
        if build.config.threads is not None and build.device.type == "cpu":
            torch.set_num_threads(build.config.threads)


def place_rank(device: torch.device) -> None:
    """Places this process, which is one of several ranks; the setting is the process's and stays.

    A rank on a GPU runs on the CPUs of the GPU's NUMA node. Ranks on the CPU share the nodes out, in order, where
    there is more than one node; and each takes its share of the cores as threads, unless OMP_NUM_THREADS is set
    (torchrun sets it to 1).
    """
    local_ranks, local_rank = local_position(os.environ)
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    nodes = read_node_cpus(Path("/"))
    if device.type == "cuda":
        cpus = near_gpu(device, nodes, allowed)
    else:
        cpus = share_of_nodes(nodes, allowed, local_ranks, local_rank)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(allowed) // local_ranks))
    if cpus:
        os.sched_setaffinity(0, cpus)


def local_position(environment: Mapping[str, str]) -> tuple[int, int]:
    """(ranks on this node, which of them this is): as torchrun says, else all ranks are here."""
    if "LOCAL_WORLD_SIZE" in environment and "LOCAL_RANK" in environment:
        return int(environment["LOCAL_WORLD_SIZE"]), int(environment["LOCAL_RANK"])
    return dist.get_world_size(), dist.get_rank()


def share_of_nodes(
    nodes: Mapping[int, tuple[int, ...]], allowed: tuple[int, ...], local_ranks: int, local_rank: int
) -> tuple[int, ...] | None:
    """The CPUs of this rank's share of the NUMA nodes; None where there is one node, or ranks do not divide evenly.

    With as many nodes as ranks or more each gets whole nodes; with fewer, ranks share a node evenly.
    """
    usable = [cpus for node in sorted(nodes) if (cpus := tuple(cpu for cpu in nodes[node] if cpu in allowed))]
    if len(usable) < 2:
        return None
    if len(usable) % local_ranks == 0:
        per_rank = len(usable) // local_ranks
        mine = usable[local_rank * per_rank : (local_rank + 1) * per_rank]
        return tuple(cpu for cpus in mine for cpu in cpus)
    if local_ranks % len(usable) == 0:
        return usable[local_rank * len(usable) // local_ranks]
    return None


def near_gpu(
    device: torch.device, nodes: Mapping[int, tuple[int, ...]], allowed: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The allowed CPUs of a GPU's NUMA node; None where the node is not known or none of its CPUs is allowed."""
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return None
    node = read_gpu_node(Path("/"), f"{domain:04x}:{bus:02x}:{slot:02x}.0")
    cpus = tuple(cpu for cpu in nodes.get(node, ()) if cpu in allowed) if node is not None else ()
    return cpus or None


def read_gpu_node(root: Path, address: str) -> int | None:
    """The NUMA node of a PCI device; None where the kernel names none (it writes -1)."""
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def read_node_cpus(root: Path) -> dict[int, tuple[int, ...]]:
    """The CPUs of each NUMA node, from the kernel's lists (`0-3,8-11`)."""
    lists = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return {int(path.parent.name.removeprefix("node")): parse_id_list(path.read_text()) for path in lists}
