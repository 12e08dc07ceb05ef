"""A driver library shaped like the `pynvml` module, for the port that `autoplan.probes.nvml` calls through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Record:
    """Attributes by name, like the structs of the binding."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@dataclass
class FakeGpu:
    """One GPU as the driver would describe it."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-aaaa"
    bus: str = "00000000:17:00.0"
    total: int = 85_520_809_984
    free: int = 84_000_000_000
    mig: bool = False
    instances: list[FakeGpu] = field(default_factory=list)
    processes: list[Record] = field(default_factory=list)
    events: int = 0
    use: int = 3  # %
    nvlinks: list[tuple[int, str | None]] = field(default_factory=list)  # (version enum, bus of the other end)
    unsupported: set[str] = field(default_factory=set)


ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetName": lambda gpu: gpu.name,
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetMemoryInfo": lambda gpu: Record(total=gpu.total, free=gpu.free, used=gpu.total - gpu.free),
    "nvmlDeviceGetMigMode": lambda gpu: [int(gpu.mig), int(gpu.mig)],
    "nvmlDeviceGetPciInfo": lambda gpu: Record(busId=gpu.bus),
    "nvmlDeviceGetClockInfo": lambda gpu, kind: {1: 1980, 2: 2619}[kind],
    "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: {1: 1980, 2: 2619}[kind],
    "nvmlDeviceGetPowerUsage": lambda gpu: 120_500,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
    "nvmlDeviceGetTemperature": lambda gpu, sensor: 41,
    "nvmlDeviceGetUtilizationRates": lambda gpu: Record(gpu=gpu.use, memory=1),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.events,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: gpu.events,
    "nvmlDeviceGetComputeRunningProcesses": lambda gpu: gpu.processes,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: 5,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
}
"""What is asked of one GPU: the function, and its answer."""


class FakeNvml:
    """The functions that the probes call; what a GPU lists as unsupported fails with NOT_SUPPORTED."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"code {value}")
            self.value = value

    def __init__(
        self, gpus: list[FakeGpu], *, init_error: int | None = None, topology: int = 30, nvlink: bool = False
    ) -> None:
        self.gpus, self.init_error, self.topology, self.nvlink = gpus, init_error, topology, nvlink
        self.shut_down = 0

    def _need(self, gpu: FakeGpu, function: str) -> None:
        if function in gpu.unsupported or "*" in gpu.unsupported:
            raise self.NVMLError(3)

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self.shut_down += 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.00"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            for candidate in (gpu, *gpu.instances):
                if candidate.uuid == uuid:
                    return candidate
        raise self.NVMLError(6)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.instances):
            raise self.NVMLError(6)
        return gpu.instances[index]

    def nvmlDeviceGetP2PStatus(self, a: FakeGpu, b: FakeGpu, capability: int) -> int:
        self._need(a, "nvmlDeviceGetP2PStatus")
        return 0 if self.nvlink and capability == 2 else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, a: FakeGpu, b: FakeGpu) -> int:
        self._need(a, "nvmlDeviceGetTopologyCommonAncestor")
        return self.topology

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        self._need(gpu, "nvmlDeviceGetNvLinkState")
        if link >= len(gpu.nvlinks):
            raise self.NVMLError(2)
        return 1

    def nvmlDeviceGetNvLinkVersion(self, gpu: FakeGpu, link: int) -> int:
        return gpu.nvlinks[link][0]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: FakeGpu, link: int) -> int:
        return 2 if gpu.nvlinks[link][1] is None else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: FakeGpu, link: int) -> Record:
        return Record(busId=gpu.nvlinks[link][1])

    def __getattr__(self, function: str) -> Callable[..., Any]:
        """The functions of `ANSWERS`; one that the binding lacks is an AttributeError, as of a module."""
        if function not in ANSWERS:
            raise AttributeError(function)

        def call(gpu: FakeGpu, *given: int) -> Any:
            self._need(gpu, function)
            return ANSWERS[function](gpu, *given)

        return call
