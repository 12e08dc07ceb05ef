"""Many planners at once as clients of one database: how many claims and finished trials a second it bears.

    python -m tests.engines.clients --clients 1000 --seconds 20

Each client does what a planner does of a trial, with nothing between: it reads what is new, claims a configuration that
nobody has, takes a number, adds the trial's line and the ledger's, and gives the claim back. Afterwards the record is
checked: each configuration once, nothing lost. The clients are threads of some processes, each with a connection for
its calls and one for its signs of life. What a client that was silent for too long writes is refused, and counted; any
other error of a client ends the program with status 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from autoplan.planner.store import database
from autoplan.planner.store.database import SharedRecord, read_record
from autoplan.planner.store.journal import LeaseLostError
from tests.engines.cluster import running_cluster

HEAD = {"kind": "study", "schema": 1, "identity": "many", "summary": {}}
LINE = "x" * 4_000
"""About as long as the line of a trial."""

PROCESSES = 20
"""More threads in one process wait for each other rather than for the database."""

SWITCH_S = 0.05
"""Each thread that waits for its process wakes so often."""


class Client(threading.Thread):
    def __init__(self, url: str, name: str, study: str, begin: threading.Event, seconds: float, pause_s: float) -> None:
        super().__init__(daemon=True)
        self.record = SharedRecord(url, study, HEAD)
        self._begin, self._seconds, self._name, self._pause_s = begin, seconds, name, pause_s
        self.done, self.refused, self.lost, self.slowest_s = 0, 0, 0, 0.0
        self.error: Exception | None = None

    def run(self) -> None:
        self._begin.wait()
        try:
            self._work()
        except Exception as error:  # the main thread says it
            self.error = error

    def _work(self) -> None:
        ends, number, known = time.monotonic() + self._seconds, 0, set[str]()
        while time.monotonic() < ends:
            began = time.monotonic()
            # two clients want each configuration: one of them is refused
            key = f"look {self._name.rstrip('ab')}/{number}"
            number += 1
            known.update(line["trial"]["key"] for line in self.record.news() if line["kind"] == "trial")
            if key in known or not self.record.claim(key):
                self.refused += 1
                continue
            trial = {"kind": "trial", "trial": {"number": self.record.take_number(0), "key": key, "text": LINE}}
            try:
                self.record.append(trial, key=key)
                self.done += 1
                self.record.append({"kind": "work", "key": key}, key=key)
            except LeaseLostError:
                self.lost += 1
            self.record.release(key)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            time.sleep(self._pause_s)


def run_process(url: str, first: int, clients: int, studies: int, seconds: float, pause_s: float) -> None:
    sys.setswitchinterval(SWITCH_S)
    begin = threading.Event()
    names = [(number // 2, "ab"[number % 2]) for number in range(first, first + clients)]
    threads = [
        Client(url, f"{number}{side}", f"study{number % studies}", begin, seconds, pause_s) for number, side in names
    ]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.readline()
    begin.set()
    for thread in threads:
        thread.join()
    if errors := [thread.error for thread in threads if thread.error is not None]:
        raise errors[0]
    counts = [sum(getattr(thread, name) for thread in threads) for name in ("done", "refused", "lost")]
    print(json.dumps([*counts, max(thread.slowest_s for thread in threads)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--studies", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two trials of a client")
    parser.add_argument("--url")
    parser.add_argument("--first", type=int)
    given = parser.parse_args()
    database.BEAT_S = 10.0
    if given.url is not None:
        run_process(given.url, given.first, given.clients, given.studies, given.seconds, given.pause)
        return
    connections = 2 * given.clients + 50
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder), connections=connections) as cluster:
        url, share = cluster.make("many"), -(-given.clients // PROCESSES)
        SharedRecord(url, "study0", HEAD).close()
        command = [sys.executable, "-m", "tests.engines.clients", "--url", url, "--studies", str(given.studies)]
        command += ["--seconds", str(given.seconds), "--pause", str(given.pause)]
        processes = []
        for first in range(0, given.clients, share):
            own = ["--first", str(first), "--clients", str(min(share, given.clients - first))]
            processes.append(
                subprocess.Popen([*command, *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        began = time.monotonic()
        outputs = [process.communicate()[0] for process in processes]
        took_s = time.monotonic() - began
        if any(process.returncode for process in processes):
            sys.exit("a client ended with an error, see above")
        found = [json.loads(output) for output in outputs]
        done, refused, lost = (sum(one[field] for one in found) for field in range(3))
        check(url, given.studies, done)
        (size,) = cluster.query("many", "SELECT pg_database_size('many')")[0]
        text = (
            f"{given.clients} clients, {given.studies} studies: {done} trials in {took_s:.0f} s, "
            f"{done / took_s:.0f} a second, {refused} claims refused, {lost} lost; the slowest trial took "
            f"{max(one[3] for one in found):.2f} s; {size / max(1, done) / 1e3:.1f} kB a trial in the database"
        )
        print(text)


def check(url: str, studies: int, done: int) -> None:
    """Nothing was lost or made twice."""
    trials = [
        line["trial"]
        for study in range(studies)
        for line in read_record(url, f"study{study}")
        if line["kind"] == "trial"
    ]
    assert len(trials) == done, f"{done} trials were made, and {len(trials)} are there"
    assert max(Counter(trial["key"] for trial in trials).values()) == 1, "a configuration was measured twice"


if __name__ == "__main__":
    main()
