"""What others take of the CPU and of the GPU: the kernel's and the driver's figures, and what counts as disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.planner.trials import device_monitor, load
from autoplan.planner.trials.device_monitor import GpuMonitor
from autoplan.planner.trials.load import LoadMonitor, cpu_problem
from autoplan.probes.cgroup import cpu_stat_path
from autoplan.probes.cpu import CpuTimes, read_idle, read_pressure, read_throttling
from autoplan.probes.nvml import open_nvml
from tests.probes.fake_nvml import FakeGpu, FakeNvml, Record

CPU = torch.device("cpu")


def times(at_s: float, **facts: Any) -> CpuTimes:
    known: dict[str, Any] = {"idle_s": 0.0, "steal_s": 0.0, "own_s": 0.0, "waited_s": {}, "pressure_s": None}
    return CpuTimes(at_s=at_s, throttled_s=0.0, throttled_periods=0, **(known | facts))


def problem_of(only_if_full: bool = False, **facts: Any) -> str | None:
    """Of a second on two cores."""
    return cpu_problem(times(0.0, waited_s={1: 5.0}), times(1.0, **facts), 2, only_if_full=only_if_full)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"idle_s": 1.0, "own_s": 1.0}, None),
        ({"idle_s": 0.95, "own_s": 1.0}, None),
        ({"idle_s": 0.0, "own_s": 1.0}, "other work took 50% of the CPU time"),
        ({"idle_s": 0.0, "own_s": 1.0, "steal_s": 1.0}, "other work took 50% of the CPU time, with what the hyper"),
        ({"idle_s": 0.0, "own_s": 2.0, "waited_s": {1: 5.9}}, None),  # more threads than cores: its own doing
        ({"idle_s": 0.93, "own_s": 1.0, "waited_s": {1: 5.3}}, "other work kept the trial waiting for a core for 30%"),
        ({"idle_s": None}, None),  # no /proc/stat: nothing is known
    ],
)
def test_what_others_took_is_what_is_neither_idle_nor_ours(facts: dict[str, Any], problem: str | None):
    found = problem_of(**facts)
    assert (found is None) if problem is None else str(found).startswith(problem)


def test_with_a_quota_of_a_hosts_cores_others_count_where_the_host_is_full():
    assert problem_of(idle_s=1.0, own_s=0.1, only_if_full=True) is None
    assert problem_of(idle_s=1.0, own_s=0.1) is not None
    assert problem_of(idle_s=0.1, own_s=0.1, only_if_full=True) is not None


def test_the_kernels_files_are_read(tmp_path: Path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 0 2 300 50 0 0 7 0 0\ncpu1 1 0 2 400 0 0 0 1 0 0\nintr 1\n")
    assert read_idle({0}, stat) == (3.5, 0.07)
    assert read_idle({0, 1}, stat) == (7.5, 0.08)
    assert read_idle({0}, tmp_path / "none") == (None, 0.0)
    stat.write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n")
    assert read_idle({0, 1}, stat) == (None, 0.0), "gVisor counts nothing there"
    pressure = tmp_path / "pressure"
    pressure.write_text("some avg10=1.00 avg60=0.50 avg300=0.10 total=2500000\nfull avg10=0.00 total=0\n")
    assert read_pressure(pressure) == 2.5
    assert read_pressure(tmp_path / "none") is None
    v1, v2 = tmp_path / "v1", tmp_path / "v2"
    v1.write_text("nr_periods 10\nnr_throttled 4\nthrottled_time 3000000000\n")
    v2.write_text("usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 3000000\n")
    assert read_throttling(v1) == read_throttling(v2) == (4, 3.0)
    assert read_throttling(None) == (0, 0.0)


def test_the_cgroups_own_file_is_found(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "proc/self/mountinfo").write_text("1 0 0:1 / /cg rw - cgroup2 none rw\n")
    (tmp_path / "cg/job").mkdir(parents=True)
    assert cpu_stat_path(tmp_path) is None
    (tmp_path / "cg/job/cpu.stat").write_text("nr_throttled 0\n")
    assert cpu_stat_path(tmp_path) == tmp_path / "cg/job/cpu.stat"


@pytest.mark.parametrize(("device", "disturbed"), [("cpu", True), ("cuda", False)])
def test_others_on_free_cores_do_not_disturb_a_trial_on_a_gpu(
    device: str, disturbed: bool, monkeypatch: pytest.MonkeyPatch
):
    """Half of 16 cores are idle, others take seven of the rest: only a trial on the CPU would have used them."""
    readings = [times(0.0), times(1.0, idle_s=8.0, own_s=1.0, waited_s={1: 0.0})]
    monitor = LoadMonitor(device=CPU, root_pid=os.getpid(), cores=frozenset(range(16)))
    monitor.device = torch.device(device)
    monkeypatch.setattr(LoadMonitor, "_read", lambda self: readings.pop(0))
    monkeypatch.setattr(LoadMonitor, "is_long_enough", True)
    monitor._shares_host = False
    monitor.begin()
    assert (monitor.end() is not None) is disturbed


def test_the_speed_of_the_core_is_read_within_a_long_stretch_too(monkeypatch):
    monitor = LoadMonitor(device=CPU, root_pid=os.getpid(), gauge=True)
    monitor.watch_core()  # nothing has begun
    monitor.begin()
    monitor.watch_core()  # too soon after the reading at the beginning
    monkeypatch.setattr(load, "CORE_EVERY_S", 0.0)
    monitor.watch_core()
    monitor.end()
    assert (found := monitor.window(None)) is not None and found.core_readings == 3


def test_the_speed_of_the_core_is_read_at_the_ends_of_each_stretch():
    monitor = LoadMonitor(device=CPU, root_pid=os.getpid(), gauge=True)
    for _ in range(3):
        monitor.begin()
        monitor.end()
    window = monitor.window(None)
    assert window is not None and window.core_readings == 4 and 1e-5 < (window.core_s or 0.0) < 1.0
    monitor.restart()
    monitor.begin()
    monitor.end()
    again = monitor.window(None)
    assert again is not None and again.core_readings == 2
    plain = LoadMonitor(device=CPU, root_pid=os.getpid())
    plain.begin()
    plain.end()
    assert (found := plain.window(None)) is not None and found.core_s is None


BURN = "import time\nend = time.monotonic() + 1.2\nwhile time.monotonic() < end: pass"


@pytest.mark.timing
def test_a_busy_process_is_other_work_and_the_trials_own_children_are_not():
    """Real processes: what burns below the root is the trial's; the same beside it is other work."""
    monitor = LoadMonitor(device=CPU, root_pid=os.getpid())
    with subprocess.Popen([sys.executable, "-c", BURN]) as child:
        time.sleep(0.3)
        monitor.begin()
        time.sleep(0.7)
        monitor.end()
    own = monitor.window(None)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9)"]) as bystander:
        monitor = LoadMonitor(device=CPU, root_pid=bystander.pid)  # a trial that does nothing
        with subprocess.Popen([sys.executable, "-c", BURN]):
            time.sleep(0.3)
            monitor.begin()
            time.sleep(0.7)
            problem = monitor.end()
        bystander.kill()
    other = monitor.window(problem)
    assert child.returncode == 0 and own is not None and other is not None
    assert own.others_cpu_share is not None and other.others_cpu_share is not None
    assert other.others_cpu_share > own.others_cpu_share + 0.5 / len(monitor.cores)
    assert problem is not None and problem.startswith("other work took")
    assert other.disturbed == problem and 0.6 < other.seconds < 2.0


# The GPU, through a driver library that tells what a test says.


@dataclass
class UsedGpu(FakeGpu):
    users: list[Record] = field(default_factory=list)


class Nvml(FakeNvml):
    def nvmlDeviceGetProcessUtilization(self, gpu: Any, since_us: int) -> list[Record]:
        return list(gpu.users)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[UsedGpu, GpuMonitor]]:
    """A monitor of a card that this process runs on."""
    card = UsedGpu(processes=[Record(pid=os.getpid(), usedGpuMemory=1)])
    monitor = GpuMonitor(CPU)
    monitor._gpu.nvml, _ = open_nvml(Nvml([card]))
    monitor._gpu.handle = card
    monkeypatch.setattr(device_monitor, "SAMPLE_PERIOD_S", 0.0)
    monitor.start()
    yield card, monitor


def used(pid: int, percent: int, moment: int = 0) -> Record:
    return Record(pid=pid, smUtil=percent, timeStamp=10**16 + moment)


def test_throttling_disturbs_and_a_power_cap_does_not(gpu: tuple[UsedGpu, GpuMonitor]):
    card, monitor = gpu
    card.events = 0x4 | 0x2
    monitor.sample()
    assert monitor.problem(0.05) is None
    assert monitor.clocks_hz == [1.98e9]
    assert monitor.events == {"software power cap", "clocks set by an application"}
    card.events = 0x40
    monitor.sample()
    assert monitor.problem(0.05) == "the GPU was throttled (hardware thermal slowdown)"
    assert "hardware thermal slowdown" in monitor.events
    monitor.start()
    card.events = 0
    monitor.sample()
    assert monitor.problem(0.05) is None, "each stretch is judged by itself"


def test_an_idle_card_is_asked_only_where_no_busy_one_was(gpu: tuple[UsedGpu, GpuMonitor]):
    card, monitor = gpu
    card.events = 0x4
    monitor.sample()
    card.events = 0x40  # after the work
    monitor.end()
    assert monitor.problem(0.05) is None and len(monitor.clocks_hz) == 1
    monitor.start()
    monitor.end()
    assert monitor.problem(0.05) is not None and len(monitor.clocks_hz) == 2


def test_other_processes_on_the_gpu_disturb(gpu: tuple[UsedGpu, GpuMonitor]):
    card, monitor = gpu
    card.users = [used(os.getpid(), 90)]
    monitor.end()
    assert monitor.problem(0.05) is None and monitor.others_share == 0.0
    card.users = [used(os.getpid(), 90, moment) for moment in range(5)] + [used(1, 6, 3)]
    monitor.end()
    assert monitor.problem(0.05) is None, "a compositor that reaches 6 % once is no other work"
    card.users = [used(os.getpid(), 60), used(os.getpid(), 60, 1), used(1, 20), used(1, 30, 1), used(2, 20, 1)]
    monitor.end()
    assert monitor.problem(0.05) == "other processes took 35% of the GPU"
    assert monitor.others_share == pytest.approx(0.35)


def test_pids_of_another_namespace_say_nothing(gpu: tuple[UsedGpu, GpuMonitor]):
    card, monitor = gpu
    card.processes, card.users = [Record(pid=1, usedGpuMemory=1)], [used(1, 90)]
    monitor.end()
    assert monitor.problem(0.05) is None and monitor.others_share is None


def test_without_a_gpu_nothing_is_asked():
    monitor = GpuMonitor(CPU)
    monitor.start()
    monitor.sample()
    monitor.end()
    assert monitor.problem(0.0) is None and monitor.clocks_hz == []


def test_the_peak_of_a_run_is_not_that_of_other_processes(monkeypatch: pytest.MonkeyPatch):
    """Two others take 11 GiB of the card while this process takes 2."""
    card = UsedGpu(processes=[Record(pid=os.getpid(), usedGpuMemory=1 << 30)])
    memory = {"free": 70 << 30, "reserved": 1 << 30}

    def opened(self: Any, device: torch.device) -> None:
        self.nvml, _ = open_nvml(Nvml([card]))
        self.handle = card

    monkeypatch.setattr(device_monitor._Gpu, "__init__", opened)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory["free"], 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    for name in ("max_memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: memory["reserved"])
    monitor = device_monitor.MemoryMonitor(torch.device("cuda"), None)
    memory["free"] = 57 << 30
    card.processes = [Record(pid=os.getpid(), usedGpuMemory=3 << 30), Record(pid=1, usedGpuMemory=11 << 30)]
    assert monitor.read().driver_bytes == 2 << 30
    card.processes = []  # a container, whose processes the driver does not show
    assert monitor.read().driver_bytes == 13 << 30
