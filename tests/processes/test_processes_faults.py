"""Every way in which a rank can end badly has its own report, and the zygote goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoplan.processes import Ended, RankReport, Task, TaskFailedError, Zygote, linux
from tests.processes import process_targets as targets
from tests.processes.helpers import survivors, wait_until

pytestmark = pytest.mark.alone

MIB = 2**20


@pytest.fixture
def zygote(warm_zygote: Zygote) -> Iterator[Zygote]:
    """The shared zygote; after the test it must be the same one, without children, and able to work."""
    pid = warm_zygote.pid
    yield warm_zygote
    assert warm_zygote.pid == pid and warm_zygote.alive
    assert linux.descendants(pid or 0) == set()
    assert warm_zygote.run(Task(target=targets.give, args=("alive",))).results == ("alive",)


def _run_failing(zygote: Zygote, task: Task) -> RankReport:
    report = zygote.run(task)
    assert report.ended is Ended.RANK_FAILED
    assert report.first_failure is not None
    with pytest.raises(TaskFailedError) as caught:
        report.check()
    assert caught.value.report is report
    return report.first_failure


def test_an_exception(zygote: Zygote) -> None:
    rank = _run_failing(zygote, Task(target=targets.raise_error))
    assert rank.error is not None
    assert rank.error.type_name == "FileNotFoundError"
    assert rank.error.is_a("OSError") and not rank.error.is_a("ValueError")
    assert rank.error.message == "the file of the test"
    assert "raise_error" in rank.error.traceback and "the file of the test" in rank.stderr_tail
    assert (rank.exit_code, rank.phase, rank.started) == (1, "build", True)
    assert rank.failed_after_s is not None


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (targets.return_unwritable, "TypeError"),
        (targets.raise_unspeakable, "UnspeakableError"),
        ("tests.processes.process_targets:nobody", "AttributeError"),
    ],
)
def test_other_exceptions(zygote: Zygote, target: Any, kind: str) -> None:
    rank = _run_failing(zygote, Task(target=target))
    assert rank.error is not None and rank.error.is_a(kind)
    assert rank.started == callable(target)


def test_an_exit_status(zygote: Zygote) -> None:
    rank = _run_failing(zygote, Task(target=targets.exit_with, args=(3,)))
    assert (rank.exit_code, rank.signal, rank.error, rank.result) == (3, None, None, None)


def test_exit_zero_without_a_result_is_visible(zygote: Zygote) -> None:
    for task in (Task(target=targets.exit_with, args=(0,)), Task(target=targets.return_nothing)):
        report = zygote.run(task)
        assert report.ended is Ended.FINISHED
        assert (report.ranks[0].result, report.ranks[0].error, report.ranks[0].exit_code) == (None, None, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_a_signal(zygote: Zygote, number: signal.Signals) -> None:
    rank = _run_failing(zygote, Task(target=targets.kill_self, args=(int(number),)))
    assert (rank.exit_code, rank.signal, rank.phase) == (None, number, "warmup")


def test_a_real_segmentation_fault_leaves_a_traceback(zygote: Zygote) -> None:
    rank = _run_failing(zygote, Task(target=targets.read_address_zero))
    assert rank.signal == signal.SIGSEGV
    assert "read_address_zero" in rank.stderr_tail


def test_a_hang_that_ignores_sigterm(zygote: Zygote) -> None:
    report = zygote.run(Task(target=targets.hang, deadlines_s={"*": 60.0, "compile": 0.5}))
    assert report.ended is Ended.DEADLINE
    assert (report.phase, report.phase_deadline_s, report.failed_rank) == ("compile", 0.5, 0)
    assert report.ranks[0].signal == signal.SIGKILL
    assert report.ranks[0].failed_after_s is None
    assert report.phase_seconds["compile"] >= 0.5


def test_the_default_deadline_and_that_of_the_whole_task(zygote: Zygote) -> None:
    by_default = zygote.run(Task(target=targets.hang, deadlines_s={"*": 0.3, "start": 60.0}))
    assert (by_default.ended, by_default.phase_deadline_s) == (Ended.DEADLINE, 0.3)
    in_total = zygote.run(Task(target=targets.sleep, args=(60.0,), total_deadline_s=0.4))
    assert (in_total.ended, in_total.phase, in_total.phase_deadline_s) == (Ended.DEADLINE, "start", 0.4)


def test_output_without_an_end_does_not_fill_the_disk(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(target=targets.write_much, args=(40_000, 0.5), directory=tmp_path)
    rank = _run_failing(zygote, task)
    assert (tmp_path / "rank0.stderr").stat().st_size < 20 * MIB  # it wrote 40
    assert "the last line" in rank.stderr_tail and "after the noise" in rank.stderr_tail


@pytest.mark.parametrize("ended", [Ended.FINISHED, Ended.RANK_FAILED, Ended.DEADLINE])
def test_a_task_that_ended_leaves_the_last_part_of_its_output(zygote: Zygote, tmp_path: Path, ended: Ended) -> None:
    """A rank prints 40 MB faster than anybody looks, and a search has hundreds of tasks."""
    late = ended is Ended.DEADLINE
    task = Task(
        target=targets.write_much,
        args=(40_000, 60.0 if late else 0.0, ended is not Ended.FINISHED),
        deadlines_s={"rest": 0.5} if late else {},
        total_deadline_s=120.0,
        directory=tmp_path,
    )
    report = zygote.run(task)
    assert report.ended is ended and "the last line" in report.ranks[0].stderr_tail
    assert len(report.ranks[0].stderr_tail) < 100_000
    assert (tmp_path / "rank0.stderr").stat().st_size <= MIB // 4
    assert "the last line" in (tmp_path / "rank0.stderr").read_text()


def test_memory_beyond_the_limit(zygote: Zygote) -> None:
    limit = 500 * MIB
    report = zygote.run(Task(target=targets.take_memory, args=(1500 * MIB,), memory_limit_bytes=limit))
    assert report.ended is Ended.MEMORY_LIMIT
    assert (report.phase, report.failed_rank) == ("measure", 0)
    assert limit < report.peak_memory_bytes < 2 * limit
    assert report.kernel_oom_kills == 0


def test_memory_within_the_limit_is_counted(zygote: Zygote) -> None:
    report = zygote.run(Task(target=targets.take_memory, args=(200 * MIB,), memory_limit_bytes=800 * MIB))
    assert report.ended is Ended.FINISHED
    assert 200 * MIB < report.peak_memory_bytes < 600 * MIB


def test_memory_of_all_ranks_counts_together(zygote: Zygote) -> None:
    task = Task(target=targets.take_memory, args=(300 * MIB,), ranks=2, memory_limit_bytes=650 * MIB)
    assert zygote.run(task).ended is Ended.MEMORY_LIMIT


def test_pages_that_ranks_share_with_the_zygote_count_once(zygote: Zygote) -> None:
    # Each rank shows torch's pages, some 160 MiB, as its own; nearly all of them are still the zygote's.
    limit = 300 * MIB
    report = zygote.run(Task(target=targets.sleep, args=(0.6,), ranks=4, memory_limit_bytes=limit))
    assert report.ended is Ended.FINISHED
    assert 0 < report.peak_memory_bytes < limit


def test_one_allocation_faster_than_any_poll_meets_the_hard_limit(zygote: Zygote) -> None:
    task = Task(
        target=targets.map_memory,
        args=(8 * 2**30,),
        memory_limit_bytes=500 * MIB,
        env={"CUDA_VISIBLE_DEVICES": ""},  # where CUDA may be used there is no such limit
    )
    report = zygote.run(task)
    assert report.ended is Ended.RANK_FAILED
    assert report.data_limit_bytes is not None and report.peak_memory_bytes < 2**30
    assert report.ranks[0].error is not None and report.ranks[0].error.is_a("MemoryError")


def test_grandchildren_in_sessions_of_their_own_are_swept(zygote: Zygote) -> None:
    report = zygote.run(Task(target=targets.leave_grandchildren, args=(False,)))
    assert report.ended is Ended.FINISHED
    assert report.swept == 2 and report.left_behind == 0
    assert not any(linux.start_ticks(pid) for pid in report.results[0])


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_one_of_two_ranks_that_dies_ends_the_task_with_its_reason(zygote: Zygote, how: str) -> None:
    # The collective itself would wait for 300 s.
    task = Task(target=targets.die_in_the_group, args=(how,), ranks=2, total_deadline_s=120.0)
    report = zygote.run(task)
    assert report.ended is Ended.RANK_FAILED
    assert report.failed_rank == 1
    failure = report.first_failure
    assert failure is not None
    if how == "raise":
        assert failure.error is not None and failure.error.is_a("ArithmeticError")
    else:
        assert failure.signal == signal.SIGKILL


def test_a_lost_zygote_is_reported_and_replaced(token: str, tmp_path: Path) -> None:
    with Zygote(preload=(), env={"PROCESS_TEST_TOKEN": token}) as zygote:

        def kill_the_zygote(context: object) -> None:
            import os
            import time

            os.write(1, b"x" * 2**20)
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)

        report = zygote.run(Task(target=kill_the_zygote, total_deadline_s=60.0, directory=tmp_path))
        assert report.ended is Ended.ZYGOTE_LOST
        assert 0 < (tmp_path / "rank0.stdout").stat().st_size <= MIB // 4
        assert wait_until(lambda: not survivors(token), 5.0)
        assert zygote.run(Task(target=targets.give, args=("again",))).results == ("again",)
    assert survivors(token) == set()


def test_a_zygote_that_dies_between_tasks_is_replaced(token: str) -> None:
    with Zygote(preload=(), env={"PROCESS_TEST_TOKEN": token}) as zygote:
        first = zygote.pid
        assert first is not None
        linux.signal_quietly(first, signal.SIGKILL)
        assert wait_until(lambda: not zygote.alive, 5.0)
        assert zygote.run(Task(target=targets.give, args=(2,))).results == (2,)
        assert zygote.pid != first


def test_an_import_that_fails_is_listed() -> None:
    with Zygote(preload=("json", "no_such_module_here")) as zygote:
        assert set(zygote.preload_errors) == {"no_such_module_here"}
        assert "ModuleNotFoundError" in zygote.preload_errors["no_such_module_here"]
        assert zygote.run(Task(target=targets.give, args=(1,))).results == (1,)
