"""What ended a task, and which tasks are run again. Every kill is a real one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoplan.errors import DeviceError, WorkloadError
from autoplan.processes import (
    Cause,
    Ended,
    ErrorReport,
    ProcessReport,
    RankContext,
    Task,
    Zygote,
    ZygoteError,
    cause,
    cause_of,
    linux,
    run_again,
)
from tests.cases import some
from tests.processes import process_targets as targets


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(preload=()) as one:
        yield one


def fail_at_first(context: RankContext, folder: Path, times: int, how: int | str) -> str:
    """Ends badly so many times, then well."""
    context.phase("measure")
    before = len(list(folder.glob("run*")))
    (folder / f"run{before}").touch()
    if before < times:
        if how == "zygote":
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        elif isinstance(how, int):
            os.kill(os.getpid(), how)
        else:
            raise OSError(how)
    return "ran"


def run(zygote: Zygote, folder: Path, times: int, how: int | str, **limits: object) -> tuple[cause.Runs, int]:
    runs = run_again(zygote, Task(target=fail_at_first, args=(folder, times, how)), **limits)  # type: ignore[arg-type]
    return runs, len(list(folder.glob("run*")))


@pytest.mark.parametrize("how", [int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGHUP), "zygote"])
def test_what_something_outside_ended_is_run_again(zygote: Zygote, tmp_path: Path, how: int | str) -> None:
    told: list[ProcessReport] = []
    runs, made = run(zygote, tmp_path, 2, how, on_attempt=told.append)
    assert (runs.settled, runs.report.results, made) == (True, ("ran",), 3)
    assert [cause_of(report) for report in runs.lost] == [Cause.OUTSIDE, Cause.OUTSIDE] and told == list(runs.lost)


def load_library(context: RankContext, path: str) -> str:
    """Loads a library where there is one, as a compiler's cache does; else it would build it."""
    if not os.path.exists(path):
        return "built"
    import ctypes

    ctypes.CDLL(path)
    return "loaded"


@pytest.mark.parametrize(
    ("folder", "content"),
    [("compiled/ab", b""), ("compiled/ab", b"part" * 500), ("elsewhere", b"")],
    ids=["empty", "no ELF", "of another folder"],
)
def test_a_library_that_a_killed_compiler_left_is_built_again(
    zygote: Zygote, tmp_path: Path, folder: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    path = tmp_path / folder / "kernel.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    runs = run_again(zygote, Task(target=load_library, args=(str(path),)))
    if folder == "elsewhere":
        assert not runs.settled and path.exists(), "not ours to remove"
    else:
        assert runs.settled and len(runs.lost) == 1 and runs.report.ranks[0].result == "built"


@pytest.mark.parametrize("how", [int(signal.SIGKILL), "No space left on device"])
def test_at_most_twice(zygote: Zygote, tmp_path: Path, how: int | str) -> None:
    runs, made = run(zygote, tmp_path, 9, how)
    assert (runs.settled, len(runs.lost), made) == (False, 3, 3)


@pytest.mark.parametrize("number", some([signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT], [signal.SIGSEGV]))
def test_a_fatal_signal_is_run_again_once(zygote: Zygote, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "once").mkdir()
    runs, made = run(zygote, tmp_path / "once", 1, int(number))
    assert (runs.settled, runs.report.ended, made) == (True, Ended.FINISHED, 2)
    (tmp_path / "ever").mkdir()
    runs, made = run(zygote, tmp_path / "ever", 9, int(number))
    assert (runs.settled, cause_of(runs.report), made) == (True, Cause.FATAL_SIGNAL, 2)


def load_with_worker(context: RankContext, folder: Path, times: int) -> int:
    """Takes a batch from a loader, whose worker ends without a word so many times."""
    import torch

    class Rows(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            before = len(list(folder.glob("run*")))
            (folder / f"run{before}").touch()
            if before < times:
                os._exit(1)
            return index

    return len(next(iter(torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1))))


@pytest.mark.parametrize("times", [1, 9])
def test_a_loaders_worker_that_is_gone_is_run_again_once(training_zygote: Zygote, tmp_path: Path, times: int) -> None:
    runs = run_again(training_zygote, Task(target=load_with_worker, args=(tmp_path, times)))
    assert runs.settled and [cause_of(one) for one in runs.lost] == [Cause.FATAL_SIGNAL]
    if times == 1:
        assert runs.report.ranks[0].result == 2
    else:
        error = runs.report.ranks[0].error
        assert cause_of(runs.report) is Cause.FATAL_SIGNAL and error is not None and "exited unex" in error.message


def test_an_exception_an_exit_status_and_a_deadline_are_not_run_again(zygote: Zygote) -> None:
    for task, ended in (
        (Task(target=targets.raise_error), Ended.RANK_FAILED),
        (Task(target=targets.exit_with, args=(3,)), Ended.RANK_FAILED),
        (Task(target=targets.sleep, args=(9.0,), total_deadline_s=0.5), Ended.DEADLINE),
        (Task(target=targets.kill_self, args=(int(signal.SIGXCPU),)), Ended.RANK_FAILED),
    ):
        runs = run_again(zygote, task)
        assert (runs.settled, runs.lost, runs.report.ended) == (True, (), ended)


def test_without_time_nothing_is_run_again(zygote: Zygote, tmp_path: Path) -> None:
    runs, made = run(zygote, tmp_path, 1, int(signal.SIGKILL), left_s=lambda: 1.0)
    assert (runs.settled, made) == (False, 1)


def kill_then_sleep(context: RankContext, folder: Path) -> None:
    if not list(folder.glob("*")):
        (folder / "first").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_deadline_that_another_run_made_shorter_is_no_verdict(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cause, "LEAST_LEFT_S", 0.5)
    task = Task(target=kill_then_sleep, args=(tmp_path,), total_deadline_s=60.0)
    runs = run_again(zygote, task, left_s=lambda: 1.5)
    assert not runs.settled and runs.report.first_failure is not None
    assert runs.report.first_failure.signal == signal.SIGKILL


def test_the_kernels_out_of_memory_killer_is_a_limit(zygote: Zygote) -> None:
    report = zygote.run(Task(target=targets.kill_self, args=(int(signal.SIGKILL),)))
    assert cause_of(report) is Cause.OUTSIDE
    assert cause_of(report.model_copy(update={"kernel_oom_kills": 1})) is Cause.LIMIT
    lost = report.model_copy(update={"ended": Ended.ZYGOTE_LOST, "failed_rank": None, "kernel_oom_kills": 1})
    assert cause_of(lost) is Cause.LIMIT


def test_the_kernels_counter_is_that_of_our_cgroup_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 5\noom_kill 4\noom_group_kill 0\n")
    monkeypatch.setattr(linux, "_oom_counters", lambda: [tmp_path / "none", tmp_path / "memory.events"])
    assert linux.kernel_oom_kills() == 4
    monkeypatch.setattr(linux, "_oom_counters", lambda: [])
    assert linux.kernel_oom_kills() == int(Path("/proc/vmstat").read_text().split("oom_kill ")[1].split()[0])


def test_texts_of_a_machine_in_trouble() -> None:
    def error(kind: str, text: str) -> ErrorReport:
        return ErrorReport(type_name=kind, type_names=(kind,), message=text, traceback="")

    shm = "unable to allocate shared memory(shm) for file </torch_1_2_0>: Success (0)"
    assert cause.is_from_outside(error("RuntimeError", shm))
    assert cause.is_from_outside(error("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. "))
    assert cause.is_from_outside(error("KeyboardInterrupt", ""))
    assert not cause.is_from_outside(error("RuntimeError", "shapes differ"))
    killed = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. \n\nThe above exception was ..."
    exited = error("RuntimeError", "DataLoader worker (pid(s) 7) exited unexpectedly")
    assert cause.is_from_outside(exited.model_copy(update={"traceback": killed}))
    assert not cause.is_from_outside(exited.model_copy(update={"traceback": "    # " + killed})), "a line of source"


def test_the_trouble_behind_an_error_is_found_in_its_causes() -> None:
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    ours = WorkloadError("make_batch raised RuntimeError: exited unexpectedly")
    ours.__cause__ = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    assert cause.machine_trouble(ours) is None
    ours.__cause__.__cause__ = killed
    assert cause.machine_trouble(ours) is killed and cause.raised_from_outside(ours) is killed
    full = MemoryError()
    ours.__cause__ = full
    assert cause.machine_trouble(ours) is full and cause.raised_from_outside(ours) is None


FAILING_FORK = """
import os
from pathlib import Path

real, place = os.fork, Path(os.environ["FAILING_FORK"])

def fork():
    left = int(place.read_text())
    if left:
        place.write_text(str(left - 1))
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()

os.fork = fork
"""


def test_a_failing_fork_ends_neither_the_zygote_nor_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_fork.py").write_text(FAILING_FORK)
    (tmp_path / "left").write_text("0")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with Zygote(preload=("failing_fork",), env={"FAILING_FORK": str(tmp_path / "left")}) as zygote:
        assert not zygote.preload_errors
        (tmp_path / "left").write_text("1")
        pid = zygote.pid
        report = zygote.run(Task(target=targets.give, args=(1,), ranks=2))
        assert (report.ended, cause_of(report), zygote.pid) == (Ended.NOT_STARTED, Cause.OUTSIDE, pid)
        assert "Resource temporarily unavailable" in report.describe()
        (tmp_path / "left").write_text("2")
        runs = run_again(zygote, Task(target=targets.give, args=(1,), ranks=2))
        assert runs.settled and runs.report.results == (1, 1) and len(runs.lost) == 2


def test_a_zygote_that_cannot_start_is_an_error_of_the_device() -> None:
    error = ZygoteError("no process", transient=True)
    assert isinstance(error, DeviceError) and error.exit_code == 4 and error.transient
