"""One task in a healthy zygote: what comes back, and what a rank finds around it."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest
from pydantic import BaseModel

from autoplan.errors import UsageError
from autoplan.processes import Ended, Progress, RankContext, StopTask, Task, Zygote
from tests.processes import process_targets as targets


class Answer(BaseModel):
    number: int


def test_a_result_comes_back_with_its_phases_and_facts(warm_zygote: Zygote) -> None:
    report = warm_zygote.run(Task(target=targets.give, args=({"a": [1, 2.5, None]},)))
    assert report.ended is Ended.FINISHED
    (rank,) = report.ranks
    assert rank.result == {"a": [1, 2.5, None]}
    assert (rank.exit_code, rank.signal, rank.error, rank.phase) == (0, None, None, "measure")
    assert rank.facts == {"step": 7}
    assert set(report.phase_seconds) == {"start", "measure"}
    assert report.startup_s is not None and 0 < report.startup_s < report.seconds
    assert report.first_failure is None and report.check() is report


def test_a_model_is_a_result_and_report_wins_over_the_return_value(warm_zygote: Zygote) -> None:
    def both(context: RankContext) -> Answer:
        context.report({"first": Answer(number=1)})
        return Answer(number=2)

    def returned(context: RankContext) -> Answer:
        return Answer(number=2)

    assert warm_zygote.run(Task(target=both)).results == ({"first": {"number": 1}},)
    assert warm_zygote.run(Task(target=returned)).results == ({"number": 2},)


def test_a_target_by_name(warm_zygote: Zygote) -> None:
    assert warm_zygote.run(Task(target="tests.processes.process_targets:give", args=(5,))).results == (5,)


def test_a_closure_over_local_state(warm_zygote: Zygote) -> None:
    base = 40

    def add(context: RankContext, more: int) -> int:
        return base + more + context.rank

    assert warm_zygote.run(Task(target=add, args=(1,), ranks=2)).results == (41, 42)


def test_a_rank_is_a_process_of_its_own(warm_zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = warm_zygote.run(Task(target=targets.describe_self, env={"CHOSEN": "yes"})).results[0]
    assert found["ppid"] == warm_zygote.pid
    assert found["group"] == found["pid"]
    assert found["oom_score_adj"] > 0
    assert Path(found["cwd"]) == tmp_path
    assert found["rank"] == [None, None] and found["chosen"] == "yes"
    assert found["torch_loaded"], "by the zygote, before the fork"
    # Only the store's listening socket: none of the zygote's own connections, which would hide its death.
    assert len(found["sockets"]) == 1


def test_forked_ranks_can_use_several_threads(warm_zygote: Zygote) -> None:
    task = Task(target=targets.multiply, args=(2,), total_deadline_s=60.0)
    assert warm_zygote.run(task).check().results[0] == pytest.approx([700.0**3, 700.0**3], rel=1e-5)


def test_forked_ranks_do_not_share_their_random_state(warm_zygote: Zygote) -> None:
    def draw(context: RankContext) -> list[float]:
        import random

        import numpy as np
        import torch

        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    first, second = warm_zygote.run(Task(target=draw, ranks=2)).check().results
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_ranks_meet_in_a_process_group(warm_zygote: Zygote) -> None:
    task = Task(target=targets.sum_of_ranks, ranks=2, total_deadline_s=90.0)
    assert warm_zygote.run(task).check().results == (3.0, 3.0)


def test_progress_is_told_and_can_end_the_task(warm_zygote: Zygote) -> None:
    seen: list[Progress] = []

    def stop_at_compile(progress: Progress) -> None:
        seen.append(progress)
        if progress.phase == "compile":
            raise StopTask

    report = warm_zygote.run(Task(target=targets.hang), on_progress=stop_at_compile)
    assert report.ended is Ended.CANCELLED
    assert report.ranks[0].signal is not None
    assert seen[-1].memory_bytes > 0 and seen[-1].seconds > 0


@pytest.mark.parametrize("error", [KeyError("mine"), OSError("mine"), EOFError("mine")])
def test_an_error_of_the_callback_ends_the_task_and_is_raised(warm_zygote: Zygote, error: Exception) -> None:
    def fail(progress: Progress) -> None:
        raise error

    pid = warm_zygote.pid
    with pytest.raises(type(error), match="mine"):
        warm_zygote.run(Task(target=targets.sleep, args=(60.0,)), on_progress=fail)
    assert warm_zygote.run(Task(target=targets.give, args=(1,))).results == (1,)
    assert warm_zygote.pid == pid


def test_a_directory_of_the_caller_is_kept_and_cleared_of_an_earlier_task(warm_zygote: Zygote, tmp_path: Path) -> None:
    directory = tmp_path / "new" / "task"
    warm_zygote.run(Task(target=targets.give, args=(1,), directory=directory))
    assert (directory / "rank0.result.json").exists()
    report = warm_zygote.run(Task(target=targets.return_nothing, directory=directory))
    assert report.ended is Ended.FINISHED and report.results == (None,)


def test_a_temporary_directory_is_removed(warm_zygote: Zygote) -> None:
    def where(context: RankContext) -> str:
        return str(context.directory)

    assert not Path(warm_zygote.run(Task(target=where)).results[0]).exists()


def test_task_after_task_leaves_no_descriptor_open(warm_zygote: Zygote) -> None:
    def open_files(pid: int | None) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    warm_zygote.run(Task(target=targets.give, args=(1,)))
    before = open_files(warm_zygote.pid), open_files(os.getpid())
    for number in range(3):
        warm_zygote.run(Task(target=targets.give, args=(number,), ranks=2))
    assert (open_files(warm_zygote.pid), open_files(os.getpid())) == before


def test_a_planner_with_many_open_files_starts_a_zygote() -> None:
    """Descriptors keep their numbers in the zygote, and select(2) takes none from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("the hard limit on open files is lower")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Zygote(preload=()) as zygote:
            assert zygote.run(Task(target=targets.give, args=(3,))).check().results == (3,)
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_large_argument_travels(warm_zygote: Zygote) -> None:
    def size(context: RankContext, data: bytes) -> int:
        return len(data)

    assert warm_zygote.run(Task(target=size, args=(b"x" * 20_000_000,))).check().results == (20_000_000,)


def test_what_cannot_be_sent_is_refused_with_a_hint(warm_zygote: Zygote) -> None:
    with pytest.raises(UsageError, match="cannot be sent") as caught:
        warm_zygote.run(Task(target=targets.give, args=(threading.Lock(),)))
    assert caught.value.hint


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"target": "no_colon"}])
def test_an_impossible_task_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Task(**{"target": targets.give, **wrong})  # type: ignore[arg-type]


def one_each(context: RankContext, requests: tuple[str, ...]) -> dict[str, object]:
    """What the request of this process asks for: to fail, to stay, or to say what it sees."""
    match requests[context.rank]:
        case "raise":
            raise ArithmeticError("this one has had enough")
        case "hang":
            targets.sleep(context, 600.0)
    return targets.describe_self(context) | {"world": context.world_size, "device": context.local_rank}


def test_independent_processes_are_plain_ones(warm_zygote: Zygote) -> None:
    report = warm_zygote.run(Task(target=one_each, args=(("say", "say"),), ranks=2, independent=True))
    assert report.ended is Ended.FINISHED
    for rank in report.ranks:
        assert (rank.exit_code, rank.result["world"], rank.result["device"]) == (0, 1, 0)
        assert rank.result["rank"] == [None, None], "each looks for no other"
        assert rank.result["sockets"] == [], "and none serves a store"


def test_an_independent_process_that_fails_ends_the_others(warm_zygote: Zygote) -> None:
    report = warm_zygote.run(Task(target=one_each, args=(("hang", "raise"),), ranks=2, independent=True))
    assert report.ended is Ended.RANK_FAILED and report.failed_rank == 1
    failed = report.ranks[1].error
    assert failed is not None and failed.is_a("ArithmeticError")


def test_a_deadline_ends_those_of_independent_processes_that_still_run(warm_zygote: Zygote) -> None:
    task = Task(target=one_each, args=(("say", "hang"),), ranks=2, independent=True, total_deadline_s=2.0)
    report = warm_zygote.run(task)
    assert report.ended is Ended.DEADLINE and report.failed_rank == 1
    assert report.ranks[0].exit_code == 0 and report.ranks[0].result is not None
