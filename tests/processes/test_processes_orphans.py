"""The planner, the zygote or a rank is killed: no process is left 5 seconds later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoplan.processes import Task, Zygote, linux
from autoplan.processes.owner import sweep_abandoned
from tests.cases import some
from tests.processes.helpers import survivors, wait_until

pytestmark = pytest.mark.alone

Planners = list[subprocess.Popen[str]]

GONE_WITHIN_S = 5.0

PLANNER = """
import json, sys
from pathlib import Path
from autoplan.processes import Task, Zygote

directory, token, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with Zygote(preload=(), env={"PROCESS_TEST_TOKEN": token}) as zygote:
    (directory / "zygote").write_text(str(zygote.pid))
    target = "tests.processes.process_targets:stay_with_grandchildren"
    task = Task(target=target, ranks=2, directory=directory / "task", independent=kind == "independent")
    report = zygote.run(task)
    print(json.dumps([report.ended, report.failed_rank, report.ranks[1].signal]))
"""


class Planner:
    """A planner in a process of its own, with two ranks that have grandchildren in sessions of their own."""

    def __init__(self, directory: Path, token: str, kind: str, planners: Planners) -> None:
        self._directory = directory
        arguments = [str(directory), token, kind]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PLANNER, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        planners.append(self.process)
        assert wait_until(lambda: all(self._phase(rank) == "stay" for rank in (0, 1)), 60.0), "the ranks never ran"

    def pid_of(self, victim: str) -> int:
        if victim == "planner":
            return self.process.pid
        if victim == "guard":
            return linux.parent_of(self.pid_of("zygote")) or 0
        if victim == "zygote":
            return int((self._directory / "zygote").read_text())
        return int(self._beat(1)["pid"])

    def grandchildren(self) -> list[int]:
        return [pid for rank in (0, 1) for pid in self._beat(rank)["facts"]["grandchildren"]]

    def _phase(self, rank: int) -> str | None:
        beat = self._beat(rank)
        return beat["phases"][-1][0] if beat else None

    def _beat(self, rank: int) -> dict:
        path = self._directory / "task" / f"rank{rank}.heartbeat.json"
        return json.loads(path.read_text()) if path.exists() else {}


VICTIMS = ["planner", "zygote", "rank", "guard"]


@pytest.mark.parametrize(
    ("victim", "kind"),
    some(
        [(victim, kind) for victim in VICTIMS for kind in ("together", "independent")],
        [*((victim, "together") for victim in VICTIMS), ("planner", "independent"), ("guard", "independent")],
    ),
)
def test_nobody_is_left(victim: str, kind: str, tmp_path: Path, token: str, planners: Planners) -> None:
    planner = Planner(tmp_path, token, kind, planners)
    grandchildren = planner.grandchildren()
    assert len(grandchildren) == 4 and all(linux.start_ticks(pid) for pid in grandchildren)
    # The guard, the zygote, two ranks and four grandchildren, all of which carry the mark.
    assert wait_until(lambda: len(survivors(token)) == 8, 5.0), "a new process shows its environment a moment later"
    lost = linux.parent_of(grandchildren[1])  # the double fork's survivor was adopted
    assert lost == planner.pid_of("zygote")

    os.kill(planner.pid_of(victim), signal.SIGKILL)

    # After a rank's death the zygote stays, until the planner is through with it.
    assert wait_until(lambda: not any(linux.start_ticks(pid) for pid in grandchildren), GONE_WITHIN_S)
    assert wait_until(lambda: not survivors(token), GONE_WITHIN_S)
    output, _ = planner.process.communicate(timeout=30)
    if victim == "rank":
        assert json.loads(output) == ["rank_failed", 1, signal.SIGKILL]
    elif victim in ("zygote", "guard"):
        assert json.loads(output)[0] == "zygote_lost"
    else:
        assert planner.process.returncode == -signal.SIGKILL


def test_a_planner_killed_while_the_zygote_imports(tmp_path: Path, token: str, planners: Planners) -> None:
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(120)\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from autoplan.processes import Zygote;"
        "Zygote(preload=('slow_import',), env={'PROCESS_TEST_TOKEN': sys.argv[2]}).start()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path), token]
    planner = subprocess.Popen(arguments, text=True, cwd=Path(__file__).parents[2])
    planners.append(planner)
    assert wait_until(lambda: len(survivors(token)) == 2, 30.0)
    time.sleep(0.5)  # until it is in the import: before that it looks by itself
    planner.kill()
    planner.wait()
    assert wait_until(lambda: not survivors(token), GONE_WITHIN_S)


FORKING_PLANNER = """
import os, sys, time
from pathlib import Path
from autoplan.processes import Task, Zygote

zygote = Zygote(preload=(), env={"PROCESS_TEST_TOKEN": sys.argv[2]})
zygote.start()
child = os.fork()  # as a loader worker of the user would be: it holds a copy of every connection
if child == 0:
    time.sleep(600)
Path(sys.argv[1], "child").write_text(str(child))
if sys.argv[3] == "close":
    zygote.close()
else:
    zygote.run(Task(target="tests.processes.process_targets:stay_with_grandchildren"))
print("closed", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_fork_of_the_planner_keeps_nothing_alive(end: str, tmp_path: Path, token: str, planners: Planners) -> None:
    arguments = [sys.executable, "-c", FORKING_PLANNER, str(tmp_path), token, end]
    planner = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    planners.append(planner)
    try:
        assert planner.stdout is not None
        if end == "close":
            assert planner.stdout.readline() == "closed\n"
        else:
            assert wait_until(lambda: len(survivors(token)) == 5, 30.0)
            planner.kill()
        assert wait_until(lambda: not survivors(token), GONE_WITHIN_S)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_planner_and_zygote_killed_at_once_leave_nobody(tmp_path: Path, token: str, planners: Planners) -> None:
    planner = Planner(tmp_path, token, "together", planners)
    zygote_pid = planner.pid_of("zygote")
    os.kill(planner.process.pid, signal.SIGSTOP)  # neither may act on the other's death
    os.kill(zygote_pid, signal.SIGKILL)
    os.kill(planner.process.pid, signal.SIGKILL)
    planner.process.communicate(timeout=30)
    assert wait_until(lambda: not survivors(token), GONE_WITHIN_S), "the guard ends the ranks and their daemons"


@pytest.mark.parametrize("others", [("zygote",), ("zygote", "planner")], ids="-".join)
def test_the_guard_may_be_killed_too(others: tuple[str, ...], tmp_path: Path, token: str, planners: Planners) -> None:
    planner = Planner(tmp_path, token, "together", planners)
    zygote_pid = planner.pid_of("zygote")
    guard_pid = linux.parent_of(zygote_pid)
    assert guard_pid is not None and guard_pid != planner.process.pid
    victims = [guard_pid, *(planner.pid_of(name) for name in others)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, number)
    if "planner" in others:  # nobody is left who could act: the next start does
        planner.process.communicate(timeout=30)
        # At most, since any other Zygote that starts on this machine at the same time sweeps too.
        assert wait_until(lambda: len(survivors(token)) <= 4, GONE_WITHIN_S), "the ranks die with the zygote"
        sweep_abandoned()
    assert wait_until(lambda: not survivors(token), GONE_WITHIN_S)


def test_sweeping_spares_the_zygotes_of_living_planners(warm_zygote: Zygote) -> None:
    sweep_abandoned()
    assert warm_zygote.alive


def test_ctrl_c_ends_the_task_and_the_zygote_stays_of_use(tmp_path: Path, token: str, planners: Planners) -> None:
    code = """
import sys
from autoplan.processes import Task, Zygote

with Zygote(preload=(), env={"PROCESS_TEST_TOKEN": sys.argv[1]}) as zygote:
    pid = zygote.pid
    try:
        zygote.run(Task(target="tests.processes.process_targets:stay_with_grandchildren"),
                   on_progress=lambda progress: print(progress.phase, flush=True))
    except KeyboardInterrupt:
        again = zygote.run(Task(target="tests.processes.process_targets:give", args=(5,)))
        print("interrupted", again.results, zygote.pid == pid)
"""
    planner = subprocess.Popen(
        [sys.executable, "-c", code, token],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    planners.append(planner)
    assert planner.stdout is not None
    while planner.stdout.readline() != "stay\n":
        assert planner.poll() is None
    planner.send_signal(signal.SIGINT)
    output, _ = planner.communicate(timeout=60)
    assert output.splitlines()[-1] == "interrupted (5,) True"
    assert survivors(token) == set()


def test_close_leaves_nobody(token: str) -> None:
    zygote = Zygote(preload=(), env={"PROCESS_TEST_TOKEN": token})
    assert not zygote.alive and zygote.pid is None
    assert zygote.run(Task(target="json:dumps")).ended == "rank_failed"  # a context is not JSON; run() starts it
    assert len(survivors(token)) == 2  # the guard and the zygote
    zygote.close()
    zygote.close()
    assert survivors(token) == set()
