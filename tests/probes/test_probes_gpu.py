"""The GPU readings, through a fake driver that knows little, refuses everything or is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoplan.probes.gpu import read_gpus
from autoplan.probes.nvml import Nvml, open_nvml
from tests.probes.fake_nvml import FakeGpu, FakeNvml, Record


def two_gpus() -> list[FakeGpu]:
    return [FakeGpu(), FakeGpu(uuid="GPU-aabb", bus="00000000:65:00.0")]


def test_a_gpu_is_read_with_units(tmp_path: Path) -> None:
    node = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    node.mkdir(parents=True)
    (node / "numa_node").write_text("1\n")
    api = FakeNvml([FakeGpu(events=0x4 | 0x40)])
    reading = read_gpus(api, environ={}, root=tmp_path)
    (gpu,) = reading.devices
    assert (gpu.name, gpu.uuid, gpu.index, gpu.type) == ("NVIDIA H100 80GB HBM3", "GPU-aaaa", 0, "cuda")
    assert gpu.memory_total_bytes.value == 85_520_809_984
    assert gpu.memory_available_bytes.value == 84_000_000_000
    assert gpu.numa_node == 1
    assert gpu.state["sm_clock"].value == 1.98e9 and gpu.state["sm_clock"].unit == "Hz"
    assert gpu.state["power"].value == pytest.approx(120.5) and gpu.state["power_limit"].value == 700
    assert gpu.state["temperature"].value == 41 and gpu.state["utilisation"].value == 0.03
    assert gpu.throttle_reasons == ("hardware thermal slowdown",), "a GPU at its power limit is no slower than usual"
    assert gpu.mig is False
    assert gpu.datasheet_name == "NVIDIA H100 SXM 80GB"
    assert gpu.datasheet_peak_flops_per_s["bfloat16"].value == 989.4e12
    assert gpu.datasheet_peak_flops_per_s["bfloat16"].provenance == "datasheet"
    assert reading.driver == "570.00"
    assert api.shut_down == 1


def test_a_driver_that_supports_nothing_gives_reasons_and_no_numbers() -> None:
    reading = read_gpus(FakeNvml([FakeGpu(unsupported={"*"}), FakeGpu(unsupported={"*"})]), environ={})
    assert len(reading.devices) == 2
    for gpu in reading.devices:
        assert gpu.name == "unknown GPU" and gpu.uuid is None and gpu.mig is None
        assert gpu.datasheet_name is None and gpu.datasheet_peak_flops_per_s == {}
        for figure in (gpu.memory_total_bytes, gpu.memory_available_bytes, *gpu.state.values()):
            assert figure.value is None and figure.provenance == "unknown"
            assert figure.reason is not None and "not supported" in figure.reason
    assert [link.bandwidth_bytes_per_s.value for link in reading.links] == [None] * 3


def test_one_missing_call_does_not_cost_the_others() -> None:
    reading = read_gpus(FakeNvml([FakeGpu(unsupported={"nvmlDeviceGetPowerUsage"})]), environ={})
    state = reading.devices[0].state
    assert state["power"].value is None and state["power_limit"].value == 700


@pytest.mark.parametrize("code, words", [(9, "is not loaded"), (12, "not installed"), (18, "different versions")])
def test_a_missing_driver_is_a_note(code: int, words: str) -> None:
    reading = read_gpus(FakeNvml([FakeGpu()], init_error=code), environ={})
    assert reading.devices == () and reading.driver is None
    assert words in reading.notes[0]


def test_a_function_that_the_binding_lacks_is_a_reason() -> None:
    nvml, reason = open_nvml(FakeNvml([FakeGpu()]))
    assert nvml is not None and reason is None
    answer = nvml.query("nvmlDeviceGetSomethingNew", 0)
    assert answer.value is None and "does not have it" in (answer.reason or "")


def test_a_broken_library_is_a_reason_too() -> None:
    def explode() -> None:
        raise OSError("cannot load")

    api = SimpleNamespace(NVMLError=FakeNvml.NVMLError, nvmlInit=explode)
    assert "cannot load" in (Nvml(api).query("nvmlInit").reason or "")


@pytest.mark.parametrize(
    "visible, expected",
    [
        (None, ["GPU-aaaa", "GPU-aabb"]),
        ("", []),
        ("-1", []),
        ("1", ["GPU-aabb"]),
        ("1,0", ["GPU-aabb", "GPU-aaaa"]),
        ("0,-1,1", ["GPU-aaaa"]),
        ("0,7,1", ["GPU-aaaa"]),
        ("GPU-aabb", ["GPU-aabb"]),
        ("GPU-aab", ["GPU-aabb"]),
        ("GPU-aa", []),
        ("GPU-zz", []),
    ],
)
def test_visible_devices_are_followed_as_cuda_does(visible: str | None, expected: list[str]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    reading = read_gpus(FakeNvml(two_gpus()), environ=environ)
    assert [gpu.uuid for gpu in reading.devices] == expected
    assert [gpu.index for gpu in reading.devices] == list(range(len(expected)))


def test_an_entry_that_names_no_gpu_is_noted() -> None:
    reading = read_gpus(FakeNvml(two_gpus()), environ={"CUDA_VISIBLE_DEVICES": "0,7"})
    assert any("'7' names no GPU" in note for note in reading.notes)


def test_mig_instances() -> None:
    slices = [FakeGpu(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid=f"MIG-{n}", total=5 << 30) for n in (1, 2)]
    parent = FakeGpu(name="NVIDIA A100-SXM4-40GB", mig=True, instances=slices)
    first = read_gpus(FakeNvml([parent]), environ={})
    assert [gpu.uuid for gpu in first.devices] == ["MIG-1"]
    for visible in ("MIG-1,MIG-2", "0"):
        reading = read_gpus(FakeNvml([parent]), environ={"CUDA_VISIBLE_DEVICES": visible})
        assert [(gpu.uuid, gpu.memory_total_bytes.value) for gpu in reading.devices] == [("MIG-1", 5 << 30)], visible
    two = read_gpus(FakeNvml([parent, dataclasses.replace(parent, uuid="GPU-aabb")]), environ={})
    assert len(two.devices) == 1 and any("sees one MIG instance" in note for note in two.notes)
    second = read_gpus(FakeNvml([parent]), environ={"CUDA_VISIBLE_DEVICES": "MIG-2"})
    (gpu,) = second.devices
    assert gpu.uuid == "MIG-2" and gpu.mig is True and gpu.memory_total_bytes.value == 5 << 30
    assert gpu.datasheet_name is None, "a slice has not the peaks of the whole chip"


def test_a_gpu_in_mig_mode_without_an_instance_is_no_device() -> None:
    reading = read_gpus(FakeNvml([FakeGpu(mig=True)]), environ={})
    assert reading.devices == () and any("no instance" in note for note in reading.notes)


def test_other_processes_are_listed() -> None:
    gpu = FakeGpu(processes=[Record(pid=2**22 + 1, usedGpuMemory=1 << 30), Record(pid=2**22 + 2, usedGpuMemory=None)])
    (device,) = read_gpus(FakeNvml([gpu]), environ={}).devices
    assert device.other_processes == (f"{2**22 + 1} ? {1 << 30}", f"{2**22 + 2} ? ?")


def test_nvlink_through_a_switch_uses_all_links() -> None:
    gpus = two_gpus()
    for gpu in gpus:
        gpu.nvlinks = [(6, None)] * 18
    links = read_gpus(FakeNvml(gpus, nvlink=True), environ={}).links
    (pair,) = [link for link in links if link.b != "host"]
    assert (pair.kind, pair.detail) == ("nvlink", "18 x NVLink 4 through a switch")
    assert pair.bandwidth_bytes_per_s.value == 450e9


def test_direct_nvlinks_count_only_those_to_the_other_gpu() -> None:
    gpus = [*two_gpus(), FakeGpu(uuid="GPU-cc", bus="00000000:B5:00.0")]
    gpus[0].nvlinks = [(4, gpus[1].bus)] * 4 + [(4, gpus[2].bus)] * 2
    links = read_gpus(FakeNvml(gpus, nvlink=True), environ={}).links
    found = {(link.a, link.b): link for link in links}
    assert found["cuda:0", "cuda:1"].bandwidth_bytes_per_s.value == 100e9
    assert found["cuda:0", "cuda:2"].detail == "2 x NVLink 3"
    assert found["cuda:1", "cuda:2"].bandwidth_bytes_per_s.value is None


@pytest.mark.parametrize("level, kind, known", [(10, "pcie", True), (40, "pcie", True), (50, "numa", False)])
def test_pcie_and_numa_pairs(level: int, kind: str, known: bool) -> None:
    links = read_gpus(FakeNvml(two_gpus(), topology=level), environ={}).links
    (pair,) = [link for link in links if link.b != "host"]
    assert pair.kind == kind and (pair.bandwidth_bytes_per_s.value is not None) is known
    host = links[0]
    assert host.detail == "PCIe 5 x16" and host.bandwidth_bytes_per_s.value == pytest.approx(63.0e9, rel=0.001)


def test_different_gpus_without_a_device_order_are_noted() -> None:
    gpus = [FakeGpu(), FakeGpu(name="NVIDIA GeForce RTX 4090", uuid="GPU-bb")]
    assert any("CUDA_DEVICE_ORDER" in note for note in read_gpus(FakeNvml(gpus), environ={}).notes)
    ordered = read_gpus(FakeNvml(gpus), environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert not any("CUDA_DEVICE_ORDER" in note for note in ordered.notes)
