"""Kills planners, connections and the database at random while planners share a study, and counts what was hit.

    python -m tests.engines.soak --kills 100 --seed 0

Two planners work on each study, by drawn runs (planner.py); a killed one is started again. Hit are: a planner (SIGKILL)
in each phase, the connections of all planners, the server (at once, or with a restart), its network for a second, its
disk, which is full for a second.
After each hit the record is checked (checks.py), and at the end of each study that its planners have one plan. The
last line is the tally; the exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.engines.checks import Planner, check_ended, check_record
from tests.engines.cluster import Proxy, running_cluster

VICTIMS = ("planner", "planner", "planner", "connections", "server", "network", "disk")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=200.0, help="no further study is begun after these")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, tally, studies, began = random.Random(given.seed), Counter[str](), 0, time.monotonic()
    folder = Path(tempfile.mkdtemp())
    with running_cluster(folder, disk_mb=400) as cluster:
        proxy = Proxy(cluster.port)
        while sum(tally.values()) < given.kills and time.monotonic() - began < given.seconds:
            name, studies = f"soak{studies}", studies + 1
            url = cluster.make(name)
            arguments = ("--lease", "1.5", "--run", "0.15", "--seed", str(studies))

            def start(number: int, url: str = cluster.url(name, proxy.port), name: str = name) -> Planner:
                own = folder / name / f"{number}-{time.monotonic_ns()}"
                return Planner(url, own, *arguments, forked=True)  # noqa: B023

            planners, seen = [start(0), start(1)], []
            while all(planner.process.poll() is None for planner in planners):
                time.sleep(draw.uniform(0.3, 1.5))
                # a planner that finds no server as it starts says so and ends: only those at work meet it away
                at_work = all(planner.works for planner in planners)
                if not at_work and draw.random() > 0.1:
                    continue
                victim = draw.choice(VICTIMS) if at_work else "planner"
                if victim == "planner":
                    number = draw.randrange(2)
                    if planners[number].process.poll() is None:
                        planners[number].kill()
                        phase = (planners[number].works or ["start"])[-1]
                        planners[number] = start(number)
                        tally[f"planner in {phase}"] += 1
                elif victim == "connections":
                    tally["connections"] += bool(cluster.terminate())
                elif victim == "server":
                    cluster.restart(draw.choice(["immediate", "fast"]))
                    tally["server"] += 1
                elif victim == "network":
                    proxy.cut(1.0)
                    tally["network"] += 1
                else:
                    cluster.fill_disk(1.0)
                    tally["disk"] += 1
                seen = check_record(url, seen)
            check_ended(url, [planner.end() for planner in planners])
            cluster.query("postgres", f'DROP DATABASE "{name}" WITH (FORCE)')  # the disk is small
            print(f"study {studies}: {sum(tally.values())} kills", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(tally.values())} kills in {studies} studies, nothing lost or repeated: {dict(sorted(tally.items()))}")


if __name__ == "__main__":
    main()
