"""Kills planners, agents, zygotes, ranks and Ray's actors at random while tasks run over two nodes, on each engine.

    python -m tests.engines.soak_nodes --kills 100 --engines torchrun ray slurm

A planner (node_planner.py) does task after task, each with a rank on both nodes. Each hit is a SIGKILL, of a process
that is drawn among those of its kind; of SLURM's job also scancel. What starts a planner again is torchrun, else this
program. Checked after each hit: no task that was done is lost or done twice, and both ranks had the right result. At
the end of each engine: tasks are still done, the planner ends well when it is told to, and nothing of it is left. The
last line is the tally; the exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from tests.engines.node_planner import read_done
from tests.engines.slurm import Slurm, running_slurm
from tests.engines.ways import (
    ROOT,
    are_gone,
    environment,
    ours,
    ray_cluster,
    slurm_environment,
    start_torchruns,
)

PLANNER = "tests.engines.node_planner"
DONE_S = 120.0
"""A task is done within so long after any hit."""

SHARES = {"torchrun": 1, "ray": 2, "slurm": 2}
"""Of the kills: torchrun takes some 20 s to start both sides again."""


class Under:
    """The planner on one engine, and what can be hit of it.

    Args:
        folder: Where its record is.
        start: Starts it, or what starts it.
        slurm: Its job can be cancelled.
    """

    def __init__(
        self, folder: Path, start: Callable[[], list[subprocess.Popen[bytes]]], slurm: Slurm | None = None
    ) -> None:
        self.folder, self.slurm, self._start = folder, slurm, start
        self.running = start()
        self.seen: list[object] = []

    def victims(self) -> dict[str, list[psutil.Process]]:
        """The processes that can be hit, by kind."""
        found: dict[str, list[psutil.Process]] = {}
        for process in {*ours(), *ours(PLANNER), *actors()}:
            with contextlib.suppress(psutil.Error):
                if (kind := kind_of(process)) is not None:
                    found.setdefault(kind, []).append(process)
        return found

    def keep_up(self) -> None:
        """A planner that was killed is started again."""
        if all(process.poll() is not None for process in self.running):
            self.running = self._start()

    def check(self) -> None:
        """Nothing is lost, nothing done twice, all results are right."""
        done = read_done(self.folder)
        assert done[: len(self.seen)] == self.seen, "a task that was done is gone, or has changed"
        for number, (own, results) in enumerate(done):
            assert own == number, f"task {own} was done in place of {number}: lost, or done twice"
            assert results == [[number, 11 * number]] * 2, f"task {number}: {results}"
        self.seen = list(done)

    def await_more(self) -> None:
        """Tasks are still done."""
        before, give_up_at = len(self.seen), time.monotonic() + DONE_S
        while len(self.seen) <= before:
            assert time.monotonic() < give_up_at, f"no task was done in {DONE_S:.0f} s: {self.victims()}"
            time.sleep(0.2)
            self.keep_up()
            self.check()

    def end(self) -> None:
        """The planner ends well, and with it all that it started."""
        (self.folder / "stop").touch()
        codes = [process.wait(DONE_S) for process in self.running]
        assert not any(codes), f"it ended with {codes}"
        assert are_gone(), f"left running: {ours()}"
        assert self.slurm is None or not self.slurm.jobs(), "a job of SLURM is left"
        self.check()


def actors() -> list[psutil.Process]:
    """Ray's name for the process of an actor is its method; it takes the place of its command line."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.name().startswith("ray::RayNode"):
                found.append(one)
    return found


def kind_of(process: psutil.Process) -> str | None:
    """planner, agent, actor, zygote or rank; None: something else, such as torchrun or srun."""
    line = process.cmdline()
    if process.name().startswith("ray::"):
        return "actor"
    if PLANNER in line:
        if "torch.distributed.run" in line:
            return None
        return "agent" if process.environ().get("RANK", "0") != "0" else "planner"
    if "autoplan.processes.agent" in line and line[1:2] == ["-P"]:
        return "agent"
    if "-c" in line:
        alike = [one.cmdline() == line for one in process.parents()[:2]]  # guard, zygote and rank are forks
        return {(True, True): "rank", (True, False): "zygote"}.get((alike[0], alike[1])) if len(alike) == 2 else None
    return None


@contextlib.contextmanager
def started(engine: str, folder: Path) -> Iterator[Under]:
    """The planner on an engine; what is left of it afterwards is killed."""
    folder.mkdir()
    launcher = {"torchrun": "elastic"}.get(engine, engine)
    command = ["-m", PLANNER, launcher, str(folder)]
    with contextlib.ExitStack() as stack:
        slurm = None
        if engine == "torchrun":

            def start() -> list[subprocess.Popen[bytes]]:
                return start_torchruns(folder, command, restarts=1000)
        else:
            if engine == "ray":
                more = environment(**stack.enter_context(ray_cluster(2)))
            else:
                own = folder / "slurm"
                own.mkdir()
                slurm = stack.enter_context(running_slurm(own))
                more = slurm_environment(slurm)

            def start() -> list[subprocess.Popen[bytes]]:
                with (folder / "planner.log").open("ab") as log:
                    asked = [sys.executable, *command]
                    return [subprocess.Popen(asked, env=more, cwd=ROOT, stdout=log, stderr=log)]

        under = Under(folder, start, slurm)
        try:
            yield under
        finally:
            for process in under.running:
                if process.poll() is None:
                    process.terminate()


def soak(under: Under, kills: int, until: float, draw: random.Random, tally: Counter[str]) -> int:
    """So many hits, or as many as there is time for; returns how many."""
    under.await_more()
    done = 0
    while done < kills and time.monotonic() < until:
        time.sleep(draw.uniform(0.1, 0.8))
        under.keep_up()
        known = under.victims()
        kinds = [*known, *(["job"] if under.slurm is not None else [])]
        if not kinds:
            continue
        kind = draw.choice(sorted(kinds))
        if kind == "job":
            assert under.slurm is not None
            under.slurm.run("scancel", f"--user={getpass.getuser()}")
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                draw.choice(known[kind]).kill()
        tally[kind] += 1
        done += 1
        under.check()
        if draw.random() < 0.5:  # else the next hit comes while it mends the last
            under.await_more()
    under.await_more()
    under.end()
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--engines", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--seconds", type=float, default=300.0, help="no further hit after these")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    draw, tally, tasks = random.Random(given.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        for engine in given.engines:
            share = SHARES[engine] / sum(SHARES[one] for one in given.engines)
            with started(engine, Path(name, engine)) as under:
                until = time.monotonic() + share * given.seconds
                done = soak(under, math.ceil(share * given.kills), until, draw, tally)
            tasks += len(under.seen)
            print(f"{engine}: {done} kills, {len(under.seen)} tasks", file=sys.stderr, flush=True)
    total = sum(tally.values())
    print(
        f"{total} kills over {', '.join(given.engines)} and {tasks} tasks, nothing lost, repeated or left running: "
        f"{dict(sorted(tally.items()))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
