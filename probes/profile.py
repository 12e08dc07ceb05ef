"""HardwareProfile: what the machine can do, each figure with its unit and where it comes from.

Records only: nothing here measures. A profile is JSON and reads back equal
(`HardwareProfile.model_validate_json`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field

from autoplan.record import Reading, Record

SCHEMA_VERSION = 1


class OperationReading(Record):
    """The measured rate of one operation at one size, the raw material of the cost model.

    `kind` names the operation; `shape` gives its sizes (see each probe's docstring for their order).
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    seconds: Reading
    rate: Reading


class CollectiveReading(Record):
    """A collective over `group_size` ranks: seconds = latency_s + payload_bytes / algbw_bytes_per_s.

    `busbw` follows nccl-tests: algbw times 2(n-1)/n for all-reduce, (n-1)/n for all-gather, reduce-scatter
    and all-to-all, 1 for point-to-point.
    """

    operation: str
    backend: str
    group_size: int
    latency_s: Reading
    algbw_bytes_per_s: Reading
    busbw_bytes_per_s: Reading
    samples: tuple[tuple[int, float], ...] = Field(
        default=(), description="(payload bytes, median seconds) pairs that the line was fitted to"
    )


class Link(Record):
    """A link between two devices, or between a device and the host."""

    a: str
    b: str
    kind: str = Field(description="nvlink, pcie, numa, host, network")
    bandwidth_bytes_per_s: Reading
    detail: str = ""


class Device(Record):
    """One device that can train: a CUDA GPU, or the CPU with the cores and memory this process may use."""

    index: int
    type: Literal["cuda", "cpu"]
    name: str
    uuid: str | None = None
    memory_total_bytes: Reading
    memory_available_bytes: Reading
    cores: int | None = Field(default=None, description="CPU: cores this process may use (affinity and quota)")
    numa_node: int | None = None
    peak_flops_per_s: dict[str, Reading] = Field(
        default_factory=dict,
        description="measured: the best dense matmul rate per dtype: float32, tf32, bfloat16, float16",
    )
    memory_bandwidth_bytes_per_s: Reading | None = None
    datasheet_name: str | None = Field(default=None, description="the chip in the catalogue; None: not in it")
    datasheet_peak_flops_per_s: dict[str, Reading] = Field(
        default_factory=dict,
        description="dense, per dtype, from the catalogue; empty for a chip that is not in it",
    )
    datasheet_memory_bandwidth_bytes_per_s: Reading | None = None
    host_to_device_bytes_per_s: dict[str, Reading] = Field(
        default_factory=dict, description="pinned, pageable; empty on CPU"
    )
    device_to_host_bytes_per_s: dict[str, Reading] = Field(default_factory=dict)
    kernel_launch_s: Reading | None = Field(
        default=None, description="host time to launch (CUDA) or dispatch (CPU) one small operation"
    )
    context_bytes: Reading | None = Field(
        default=None, description="CUDA: memory that a process takes before any tensor: context and libraries"
    )
    state: dict[str, Reading] = Field(
        default_factory=dict, description="clocks, power, temperature, utilisation at probe time"
    )
    throttle_reasons: tuple[str, ...] = ()
    mig: bool | None = Field(default=None, description="the GPU is split by MIG; None: no GPU, or unknown")
    other_processes: tuple[str, ...] = Field(default=(), description="who else uses the device, 'pid name bytes'")
    operations: tuple[OperationReading, ...] = ()

    def readings(self, kind: str, dtype: str | None = None) -> tuple[OperationReading, ...]:
        """The measured operations of one kind (and dtype), in the order they were measured."""
        return tuple(o for o in self.operations if o.kind == kind and dtype in (None, o.dtype))

    def best_rate(self, kind: str, dtype: str) -> float | None:
        """The highest measured rate of an operation in its own unit; None if it was not measured."""
        return max((o.rate.value for o in self.readings(kind, dtype) if o.rate.value is not None), default=None)


class Host(Record):
    """The machine around the devices."""

    cpu_model: str
    cores_physical: int | None
    cores_logical: int | None
    cores_usable: int
    numa_nodes: int
    cpu_flags: tuple[str, ...] = Field(default=(), description="the vector extensions that matter: avx2, amx_bf16 ...")
    memory_total_bytes: Reading
    memory_available_bytes: Reading
    cgroup_version: int | None
    cgroup_memory_limit_bytes: Reading
    cgroup_cpu_limit: Reading
    shared_memory_bytes: Reading
    load_average: Reading
    kernel: str
    python: str
    torch: str
    driver: str | None
    cuda: str | None


class HardwareProfile(Record):
    """Everything the probes know, in one record."""

    schema_version: int = SCHEMA_VERSION
    created: str = Field(description="UTC, ISO 8601")
    seconds_spent: float
    host: Host
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    collectives: tuple[CollectiveReading, ...] = ()
    notes: tuple[str, ...] = Field(default=(), description="what could not be read and why, in sentences")
    disturbed: str | None = Field(
        default=None, description="a sentence, where it was measured under load: its spreads are wider for that"
    )
    others_cpu_share: float = Field(
        default=0.0, description="share of the CPU time that other processes took while it was measured"
    )
    probed_s: float = Field(default=0.0, description="what measuring was allowed; 0: nothing was measured")

    def device(self, kind: str) -> Device:
        """The first device of that type; raises KeyError if there is none."""
        for device in self.devices:
            if device.type == kind:
                return device
        raise KeyError(kind)

    @property
    def fingerprint(self) -> str:
        """A hash of what makes this machine this machine: not of readings that move from run to run."""
        return fingerprint(self.host, self.devices)

    @property
    def kind(self) -> str:
        """The same for all machines of one kind: without the GPUs' numbers, and all memory in whole GiB."""
        return fingerprint(self.host, self.devices, of_kind=True)


def fingerprint(host: Host, devices: tuple[Device, ...], *, of_kind: bool = False) -> str:
    """16 hex digits over the CPU, its core and memory limits, the GPUs, driver, CUDA and torch versions.

    Available memory, clocks, load and measured rates are left out: they change without the machine changing. So does
    the host's memory by some pages, with each kernel: it counts in whole GiB.
    """

    def size(reading: Reading, *, whole: bool = of_kind) -> float | None:
        return round(reading.value / 2**30) if whole and reading.value is not None else reading.value

    identity = {
        "cpu": host.cpu_model,
        "cores": host.cores_usable,
        "memory_total_bytes": size(host.memory_total_bytes, whole=True),
        "cgroup_memory_limit_bytes": size(host.cgroup_memory_limit_bytes),
        "torch": host.torch,
        "driver": host.driver,
        "cuda": host.cuda,
        "devices": [
            (d.type, d.name, None if of_kind else d.uuid, size(d.memory_total_bytes, whole=of_kind or d.type == "cpu"))
            for d in devices
        ],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
