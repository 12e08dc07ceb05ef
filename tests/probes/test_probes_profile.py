"""The records: they read back equal, and a machine keeps its fingerprint."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from autoplan.probes.gpu import read_gpus
from autoplan.probes.host import read_cpu_device, read_host
from autoplan.probes.merge import SEVERE_SPREAD, load_spread
from autoplan.probes.profile import Device, HardwareProfile, OperationReading
from autoplan.record import Reading
from tests.probes.fake_nvml import FakeGpu, FakeNvml


def operation(rate: float, dtype: str = "float32") -> OperationReading:
    seconds = Reading(value=1e-3, unit="s", provenance="measured", spread=0.01)
    return OperationReading(
        kind="matmul",
        dtype=dtype,
        shape=(8, 8, 8),
        seconds=seconds,
        rate=Reading(value=rate, unit="flop/s", provenance="measured"),
    )


def make_profile(gpu: FakeGpu | None = None) -> HardwareProfile:
    gpus = read_gpus(FakeNvml([gpu or FakeGpu()]), environ={})
    host = read_host(driver=gpus.driver)
    cpu = read_cpu_device(host).model_copy(update={"operations": (operation(2e9), operation(3e9))})
    return HardwareProfile(
        created="2026-01-01T00:00:00+00:00",
        seconds_spent=1.0,
        host=host,
        devices=(*gpus.devices, cpu),
        links=gpus.links,
        notes=("a note",),
    )


def test_a_profile_reads_back_equal() -> None:
    profile = make_profile()
    text = profile.model_dump_json()
    again = HardwareProfile.model_validate_json(text)
    assert again == profile
    assert again.model_dump_json() == text
    assert again.fingerprint == profile.fingerprint


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError):
        HardwareProfile.model_validate(make_profile().model_dump() | {"surprise": 1})


def test_what_moves_from_run_to_run_is_not_in_the_fingerprint() -> None:
    profile = make_profile()
    moved = make_profile(FakeGpu(free=1, events=0x40))
    host = moved.host.model_copy(
        update={
            "memory_available_bytes": Reading.driver(1.0, "bytes", "x"),
            "shared_memory_bytes": Reading.driver(1.0, "bytes", "x"),
            "load_average": Reading.driver(99.0, "1", "x"),
        }
    )
    devices = tuple(device.model_copy(update={"operations": ()}) for device in moved.devices)
    moved = moved.model_copy(update={"host": host, "devices": devices, "notes": (), "seconds_spent": 9.0})
    assert moved.fingerprint == profile.fingerprint


def test_a_kernel_that_leaves_some_pages_more_is_the_same_machine() -> None:
    """An update of it, or a balloon of the hypervisor: every search would begin anew."""

    def with_memory(size_bytes: float) -> HardwareProfile:
        profile = make_profile()
        total = Reading.driver(size_bytes, "bytes", "/proc/meminfo MemTotal")
        host = profile.host.model_copy(update={"memory_total_bytes": total})
        gpu = profile.devices[0]
        return profile.model_copy(update={"host": host, "devices": (gpu, read_cpu_device(host))})

    before, after, more = (with_memory(size) for size in (33.1 * 2**30, 33.1 * 2**30 + 4096, 66 * 2**30))
    assert after.fingerprint == before.fingerprint != more.fingerprint
    assert after.kind == before.kind != more.kind


@pytest.mark.parametrize("gpu", [FakeGpu(uuid="GPU-other"), FakeGpu(total=1 << 34), FakeGpu(name="Other")])
def test_another_gpu_is_another_machine(gpu: FakeGpu) -> None:
    assert make_profile(gpu).fingerprint != make_profile().fingerprint


@pytest.mark.parametrize("change", [{"torch": "0.0"}, {"driver": "1"}, {"cores_usable": 999}, {"cuda": "99.9"}])
def test_other_software_or_limits_are_another_machine(change: dict[str, object]) -> None:
    profile = make_profile()
    changed = profile.model_copy(update={"host": profile.host.model_copy(update=change)})
    assert changed.fingerprint != profile.fingerprint


def test_work_on_the_cpu_says_little_of_the_rates_of_an_idle_gpu() -> None:
    idle, used = make_profile(), make_profile(FakeGpu(use=90))
    assert load_spread(idle, "cuda", 0.12) == load_spread(used, "cpu", 0.12) < SEVERE_SPREAD
    assert load_spread(used, "cuda", 0.12) == 1.0
    assert load_spread(idle, "cuda", 0.6) < 0.3 < load_spread(used, "cpu", 0.6), "an idle GPU has cores of its own"


def test_devices_are_found_by_type_and_rates_by_kind() -> None:
    profile = make_profile()
    assert profile.device("cuda").name == "NVIDIA H100 80GB HBM3"
    cpu: Device = profile.device("cpu")
    assert cpu.best_rate("matmul", "float32") == 3e9
    assert cpu.best_rate("matmul", "bfloat16") is None
    with pytest.raises(KeyError):
        profile.device("tpu")


def test_an_unknown_reading_has_a_reason_and_no_value() -> None:
    reading = Reading.unknown("bytes", "nobody says")
    assert (reading.value, reading.provenance, reading.reason) == (None, "unknown", "nobody says")
