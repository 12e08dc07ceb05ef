"""One search at a time on a device: who gets the lock, who is told, and what the kernel releases."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoplan.errors import DeviceBusyError, StoreError
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.run import run_search
from autoplan.planner.store import locks
from autoplan.planner.store.locks import DeviceLock, device_names, lock_folder
from autoplan.probes.run import read_host_profile
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_hardware

HOLD = """
import sys, time
from pathlib import Path
from autoplan.planner.store.locks import DeviceLock
with DeviceLock(sys.argv[2:], folder=Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def hold(folder: Path, *names: str) -> subprocess.Popen[str]:
    """Another process that holds locks."""
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *names], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    return other


def end(other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()


def test_a_second_search_is_told_which_process_has_the_device(folder: Path):
    other = hold(folder, "cpu-0123abcd-0", "cpu-0123abcd-1")
    try:
        with pytest.raises(DeviceBusyError, match=f"core 1 of the CPU.*process {other.pid}") as caught:
            DeviceLock(["cpu-0123abcd-1", "cpu-0123abcd-2"], folder=folder)
        assert caught.value.exit_code == 4
        assert "--wait" in (caught.value.flag_hint or "")
        with DeviceLock(["cpu-0123abcd-2", "GPU-1"], folder=folder):  # what failed kept nothing
            pass
    finally:
        end(other)


def test_who_waits_gets_the_device_when_it_is_free_and_says_once_what_it_waits_for(folder: Path):
    """The kernel releases what a killed process had."""
    other = hold(folder, "GPU-1")
    said: list[str] = []

    def release(text: str) -> None:
        said.append(text)
        end(other)

    began = time.monotonic()
    with DeviceLock(["GPU-1"], wait=True, on_wait=release, folder=folder):
        assert time.monotonic() - began < 10
    assert said == [f"waiting: the GPU GPU-1 is in use by another search, process {other.pid}"]


def test_two_searches_in_one_process_are_two_searches(folder: Path):
    with DeviceLock(["GPU-1"], folder=folder), pytest.raises(DeviceBusyError, match=str(os.getpid())):
        DeviceLock(["GPU-1"], folder=folder)
    DeviceLock(["GPU-1"], folder=folder).close()


def test_a_planted_link_is_not_followed(folder: Path):
    victim = folder / "victim"
    victim.write_text("mine")
    (folder / "GPU-1").symlink_to(victim)
    with pytest.raises(StoreError, match="cannot be used.*GPU-1"):
        DeviceLock(["GPU-1"], folder=folder)
    assert victim.read_text() == "mine"


def test_the_files_are_the_users_own(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with DeviceLock(["GPU-1"]):
        assert lock_folder() == folder / "autoplan" / "devices"
        assert (lock_folder().stat().st_mode & 0o777, (lock_folder() / "GPU-1").stat().st_mode & 0o777) == (
            0o700,
            0o600,
        )
    lock_folder().chmod(0o777)
    assert lock_folder().stat().st_mode & 0o777 == 0o700, "what others could write to is closed"


ANYWHERE = """
import sys, time
from pathlib import Path
from autoplan.planner.store import locks
locks.SHARED = Path(sys.argv[1])
with locks.DeviceLock(["GPU-1"]):
    print("held", flush=True)
    time.sleep(60 if "hold" in sys.argv else 0)
"""


def test_searches_of_one_user_meet_whatever_folders_they_were_given(folder: Path):
    """Without a runtime folder, as in a container; each with a state, cache and temporary folder of its own."""
    shared = folder / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    nobodys = {"XDG_RUNTIME_DIR": str(folder / "none")}
    others = [
        {name: str(folder / place) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "TMPDIR", "HOME")}
        for place in ("one", "two")
    ]
    command = [sys.executable, "-c", ANYWHERE, str(shared)]
    first = subprocess.Popen(
        [*command, "hold"], env={**os.environ, **nobodys, **others[0]}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        second = subprocess.run(command, env={**os.environ, **nobodys, **others[1]}, capture_output=True, text=True)
        assert f"DeviceBusyError: the GPU GPU-1 is in use by another search, process {first.pid}" in second.stderr
    finally:
        end(first)
    assert (shared / f"autoplan-{os.getuid()}").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_that_somebody_else_planted_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "none"))
    monkeypatch.setattr(locks, "SHARED", folder)
    place = folder / f"autoplan-{os.getuid()}"
    (folder / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(folder / "elsewhere")
    os.lchown(place, 12345, -1)
    with pytest.raises(StoreError, match="belongs to the user with the number 12345") as caught:
        lock_folder()
    assert "XDG_RUNTIME_DIR" in (caught.value.flag_hint or "") and not list(place.iterdir())


def test_a_runtime_folder_that_others_can_write_to_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    monkeypatch.setattr(locks, "SHARED", folder)
    assert lock_folder() == folder / f"autoplan-{os.getuid()}" / "devices"


def test_a_search_locks_its_own_cores_or_its_first_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(locks.os, "sched_getaffinity", lambda pid: {3, 1})
    machine = locks.machine_name()
    hardware = make_hardware(gpu=True)
    assert device_names(hardware, "cpu", 1) == (f"cpu-{machine}-1", f"cpu-{machine}-3")
    assert device_names(hardware, "cuda", 1) == ("GPU-0",)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_search_on_a_busy_device_ends_at_once_with_the_pid(tmp_path: Path, dry_run: bool):
    spec = make_spec(model=f"{Path(__file__).parents[1] / 'data' / 'faulty.py'}:make_sound")
    options = SearchOptions(spec=spec, device="cpu", store=tmp_path / "store", dry_run=dry_run)
    with DeviceLock(device_names(read_host_profile(), "cpu", 1)):
        with pytest.raises(DeviceBusyError, match=f"process {os.getpid()}") as caught:
            run_search(options)
        assert caught.value.exit_code == 4 and "wait" in str(caught.value.hint)
    assert not list(tmp_path.rglob("trials/0000"))


def test_a_wait_for_the_device_that_is_interrupted_costs_no_budget(tmp_path: Path):
    class Impatient(SearchObserver):
        waited = False

        def on_note(self, text: str) -> None:
            self.waited = text.startswith("waiting: ")
            time.sleep(0.2)
            raise KeyboardInterrupt

    spec = make_spec(model=f"{Path(__file__).parents[1] / 'data' / 'faulty.py'}:make_sound")
    options, observer = SearchOptions(spec=spec, device="cpu", store=tmp_path, wait=True), Impatient()
    with DeviceLock(device_names(read_host_profile(), "cpu", 1)):
        result = run_search(options, observer=observer)
    assert observer.waited and result.status == "interrupted" and result.spent_s == 0.0
    assert '"spent_s": 0.0' in (tmp_path / result.study / "clock.json").read_text()
