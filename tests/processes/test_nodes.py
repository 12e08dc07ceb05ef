"""Tasks whose ranks are on two nodes: here each node is an agent of its own on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from autoplan.errors import DeviceError, UsageError
from autoplan.processes import Cause, Ended, ProcessReport, StopTask, Task, cause_of, run_again
from autoplan.processes import nodes as nodes_module
from autoplan.processes.agent import SENT_AWAY, RefusedError, connect, decode, encode
from autoplan.processes.engines import child_environment
from autoplan.processes.nodes import Nodes, Wanted
from autoplan.processes.task import Progress
from tests.cases import some
from tests.processes.node_targets import NAME

PRELOAD = ("torch", "torch.distributed", "tests.processes.node_targets")
GIVEN = Progress(seconds=1.0, phase="given", phase_seconds=0.5, facts=(), memory_bytes=3)


class Here:
    """Starts the agents as processes of this machine."""

    name, here, others = "here", True, False

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[bytes]] = []
        self.wanted = 1
        self.left = False
        self.ends_with = 0

    def address(self) -> str:
        return "127.0.0.1"

    def ensure(self, wanted: Wanted) -> None:
        self.running = [process for process in self.running if process.poll() is None]
        while len(self.running) < self.wanted:
            environment = child_environment(wanted.planner, wanted.token) | {"NODE": "second", "SLURM_PROCID": "1"}
            command = [sys.executable, "-P", "-m", "autoplan.processes.agent"]
            self.running.append(subprocess.Popen(command, env=environment))

    def close(self) -> None:
        for process in self.running:
            assert process.wait(30) == self.ends_with

    def leave(self, *, ok: bool) -> None:
        self.left = ok


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes(Here(), nodes=2, ranks_per_node=1, preload=PRELOAD, env={"OMP_NUM_THREADS": "1"}) as launcher:
        yield launcher


def run(nodes: Nodes, folder: Path, target: str, *args: Any, **limits: Any) -> ProcessReport:
    task = Task(target=f"{NAME}:{target}", args=args, ranks=2, directory=folder, **limits)
    report = nodes.run(task)
    assert not ranks_left(), "no rank is left"
    assert report.left_behind == 0
    assert [rank.rank for rank in report.ranks] == [0, 1]
    return report


def ranks_left() -> list[psutil.Process]:
    """Guard, zygote and rank are forks of each other, with one command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if [one.cmdline() for one in process.parents()[:2]] == [process.cmdline()] * 2:
                found.append(process)
    return found


def test_two_nodes_are_one_world(nodes: Nodes, tmp_path: Path) -> None:
    """Ranks meet over the network; records, results, files and output travel; a rank has its own node's place."""
    report = run(nodes, tmp_path, "meet", GIVEN, (4, 5))
    assert report.ended is Ended.FINISHED, [report.describe(), *(rank.stderr_tail for rank in report.ranks)]
    first, second = report.results
    assert first["total"] == second["total"] == 3
    assert first["place"] == ["0", "0", "2", "1", "lo", None]
    assert second["place"] == ["1", "0", "2", "1", "lo", None], "the token is in no rank's environment"
    assert first["given"] == second["given"] == ["given", [4, 5]]
    assert (first["node"], second["node"]) == ("first", "second")
    for rank in (0, 1):
        assert (tmp_path / f"left.{rank}.bin").read_bytes() == b"\0" * 9 + bytes([rank])
        assert f"line of {rank}" in (tmp_path / f"rank{rank}.stdout").read_text()
        assert f"line of {rank}" in report.ranks[rank].stdout_tail
    assert report.startup_s is not None and report.peak_memory_bytes > 0


ENDS = (
    ("raise", 1, Ended.RANK_FAILED, Cause.PROGRAM),
    ("kill", 1, Ended.RANK_FAILED, Cause.OUTSIDE),
    ("fault", 0, Ended.RANK_FAILED, Cause.FATAL_SIGNAL),
    ("hang", 1, Ended.DEADLINE, Cause.LIMIT),
    ("fill", 1, Ended.MEMORY_LIMIT, Cause.LIMIT),
)


@pytest.mark.parametrize(("how", "rank", "ended", "cause"), some(ENDS, in_make_test=ENDS[1:2]))
def test_the_cause_is_named_where_it_was(
    nodes: Nodes, tmp_path: Path, how: str, rank: int, ended: Ended, cause: Cause
) -> None:
    """What one node's rank does is no fault of the other node, whose rank fails with it."""
    limits = {"deadlines_s": {"build": 3.0}} if how == "hang" else {}
    limits |= {"memory_limit_bytes": 1 << 30} if how == "fill" else {}
    report = run(nodes, tmp_path, "end", how, rank, **limits)
    assert (report.ended, cause_of(report)) == (ended, cause), report.describe()
    if how != "hang":  # there both are over the deadline
        assert report.failed_rank == rank, report.describe()
    assert report.phase == "build"


def test_a_node_that_is_lost_is_no_verdict(nodes: Nodes, tmp_path: Path) -> None:
    """The task is tried again on an agent that took its place."""
    task = Task(target=f"{NAME}:twice", args=(str(tmp_path / "marker"),), ranks=2, directory=tmp_path / "task")
    runs = run_again(nodes, task)
    assert [lost.ended for lost in runs.lost] == [Ended.NODE_LOST], runs
    assert cause_of(runs.lost[0]) is Cause.OUTSIDE and "was lost" in runs.lost[0].describe()
    assert runs.settled and runs.report.results == (0, 1)


def test_the_caller_ends_it(nodes: Nodes, tmp_path: Path) -> None:
    """The ranks of both nodes are ended, and the agent stays for the next task."""

    def stop(progress: Progress) -> None:
        if progress.phase == "build":
            raise StopTask

    task = Task(target=f"{NAME}:end", args=("hang", 1), ranks=2, directory=tmp_path)
    assert nodes.run(task, on_progress=stop).ended is Ended.CANCELLED
    assert run(nodes, tmp_path, "meet", GIVEN, ()).ended is Ended.FINISHED


def test_what_fits_on_one_node_runs_here(nodes: Nodes) -> None:
    """As without nodes: closures too."""
    assert nodes.run(Task(target=lambda context: os.environ.get("NODE", "first"))).results == ("first",)


def test_no_pickle_travels(nodes: Nodes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        nodes.run(Task(target=f"{NAME}:meet", args=(object(),), ranks=2, directory=tmp_path))
    with pytest.raises(RefusedError, match="record of os"):
        decode({"record": "os:system", "fields": {}})
    with pytest.raises(RefusedError, match="no record"):
        decode({"record": "autoplan.processes.agent:serve", "fields": {}})
    assert decode(encode([GIVEN, {"a": (1, None)}])) == [GIVEN, {"a": [1, None]}]


def test_strangers_are_sent_away(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another token, nor a port scan, nor silence disturbs a search."""
    monkeypatch.setattr(nodes_module, "PROVE_S", 1.0)  # what the silent one is waited for
    nodes.start()
    address = nodes._address
    host, _, port = address.rpartition(":")
    with (
        ThreadPoolExecutor(1) as pool,
        socket.create_connection((host, int(port))) as stranger,
        socket.create_connection((host, int(port))),
    ):
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 64)
        other = pool.submit(connect, address, "another token")
        assert run(nodes, tmp_path, "meet", GIVEN, ()).ended is Ended.FINISHED
        with pytest.raises((RefusedError, ConnectionError)):
            other.result()


@pytest.mark.exhaustive
def test_a_node_of_another_kind_is_refused(tmp_path: Path) -> None:
    engine = Here()
    engine.ends_with = SENT_AWAY
    launcher = Nodes(
        engine, nodes=2, ranks_per_node=1, preload=("tests.processes.node_targets",),
        describe="autoplan.planner.search.nodes:describe_node", check=lambda its: f"its torch is {its['torch']}",
    )  # fmt: skip
    with launcher, pytest.raises(DeviceError, match=r"its torch is \d"):
        launcher.run(Task(target=f"{NAME}:meet", args=(GIVEN, ()), ranks=2, directory=tmp_path))


@pytest.mark.exhaustive
def test_another_node_is_taken_where_the_engine_has_one(tmp_path: Path) -> None:
    engine, notes, seen = Here(), list[str](), list[Any]()
    engine.others = True

    def check(its: Any) -> str | None:
        seen.append(its)
        return "it is slow" if len(seen) == 1 else None

    launcher = Nodes(
        engine, nodes=2, ranks_per_node=1, preload=("tests.processes.node_targets",), on_note=notes.append,
        describe="autoplan.planner.search.nodes:describe_node", check=check,
    )  # fmt: skip
    with launcher:
        report = launcher.run(Task(target=f"{NAME}:add", args=(3,), ranks=2, directory=tmp_path))
        assert report.results == ([3, 33], [3, 33])
    assert len(seen) == 2
    assert any("cannot be used: it is slow" in note for note in notes), notes


@pytest.mark.exhaustive
def test_the_agent_ends_with_the_planner() -> None:
    """The planner is killed; its agent and all that it started are gone soon."""
    code = (
        "import os, time; from tests.processes.test_nodes import Here; from autoplan.processes.nodes import Nodes\n"
        "launcher = Nodes(Here(), nodes=2, ranks_per_node=1, preload=()); launcher.start()\n"
        "launcher._gather(1); print(launcher._engine.running[0].pid, flush=True); time.sleep(600)"
    )
    planner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert planner.stdout is not None
    agent = psutil.Process(int(planner.stdout.readline()))
    give_up_at = time.monotonic() + 20.0
    while not (started := agent.children(recursive=True)) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    planner.kill()
    planner.wait()
    _, alive = psutil.wait_procs([agent, *started], timeout=20.0)
    assert started and not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


class Apart(Here):
    """Here no node is the planner's own: all have agents."""

    here = False

    def ensure(self, wanted: Wanted) -> None:
        self.wanted = wanted.agents
        super().ensure(wanted)


@pytest.fixture(scope="module")
def apart() -> Iterator[Nodes]:
    with Nodes(Apart(), nodes=2, ranks_per_node=1, preload=PRELOAD, env={"OMP_NUM_THREADS": "1"}) as launcher:
        yield launcher


def test_where_the_planner_is_no_node_all_ranks_are_on_agents(apart: Nodes, tmp_path: Path) -> None:
    assert not apart.alive, "there is no zygote here"
    report = run(apart, tmp_path, "meet", GIVEN, (4, 5))
    assert report.ended is Ended.FINISHED, [report.describe(), *(rank.stderr_tail for rank in report.ranks)]
    assert [one["node"] for one in report.results] == ["second", "second"]
    assert [one["place"][:4] for one in report.results] == [["0", "0", "2", "1"], ["1", "0", "2", "1"]]
    assert all((tmp_path / f"left.{rank}.bin").exists() for rank in (0, 1))
    assert "line of 0" in (tmp_path / "rank0.stdout").read_text()
    alone = apart.run(Task(target=f"{NAME}:say_place", directory=tmp_path / "alone"))
    assert alone.results == (["second", 0, 1],) and not apart.alive
    with pytest.raises(UsageError, match="no name"):
        apart.run(Task(target=lambda context: 1))


def test_there_too_the_caller_is_told_how_far_it_is_and_ends_it(apart: Nodes, tmp_path: Path) -> None:
    told = list[str]()

    def stop(progress: Progress) -> None:
        told.append(progress.phase)
        if progress.phase == "build":
            raise StopTask

    task = Task(target=f"{NAME}:end", args=("hang", 1), ranks=2, directory=tmp_path)
    assert apart.run(task, on_progress=stop).ended is Ended.CANCELLED and told[-1] == "build"

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apart.run(Task(target=f"{NAME}:end", args=("hang", 0), directory=tmp_path), on_progress=interrupt)
    assert run(apart, tmp_path, "meet", GIVEN, ()).ended is Ended.FINISHED


@pytest.mark.parametrize(("how", "rank", "ended", "cause"), some(ENDS, in_make_test=ENDS[:1]))
def test_there_too_the_cause_is_named(
    apart: Nodes, tmp_path: Path, how: str, rank: int, ended: Ended, cause: Cause
) -> None:
    test_the_cause_is_named_where_it_was(apart, tmp_path, how, rank, ended, cause)


def test_there_too_a_lost_node_is_no_verdict(apart: Nodes, tmp_path: Path) -> None:
    test_a_node_that_is_lost_is_no_verdict(apart, tmp_path)
