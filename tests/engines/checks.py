"""The checks that every shared study has to pass, whatever was killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoplan.errors import StoreError
from autoplan.planner.store.database import read_record

STUDY = "0" * 16


FORKS = multiprocessing.get_context("forkserver")


class Forked:
    """A planner that is forked off a process which has imported all, with the methods of a Popen that are used here."""

    def __init__(self, arguments: Sequence[str], output: Path, errors: Path) -> None:
        FORKS.set_forkserver_preload(["tests.engines.planner"])
        asked = (list(arguments), str(output), str(errors), dict(os.environ))
        self._process = FORKS.Process(target=_be_planner, args=asked, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"a planner has not ended in {timeout} s")

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _be_planner(arguments: list[str], output: str, errors: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    from tests.engines.planner import main

    main(arguments)


class Planner:
    """A planner process (planner.py), and what it says.

    Args:
        url: Of the database.
        folder: Of its own.
        arguments: Of planner.py.
        forked: It has no command line of its own, and starts sooner.
    """

    def __init__(self, url: str, folder: Path, *arguments: str, forked: bool = False) -> None:
        given = [url, str(folder / "s"), *arguments]
        folder.mkdir(parents=True, exist_ok=True)
        self.output, self.errors = folder / "stdout", folder / "stderr"  # files: a pipe would fill up
        self.process: subprocess.Popen[bytes] | Forked
        with open(self.output, "w") as output, open(self.errors, "w") as errors:
            if forked:
                self.process = Forked(given, self.output, self.errors)
            else:
                command = [sys.executable, "-m", "tests.engines.planner", *given]
                self.process = subprocess.Popen(command, stdout=output, stderr=errors)

    @property
    def said(self) -> list[dict[str, Any]]:
        """The whole lines so far."""
        return [json.loads(line) for line in self.output.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def works(self) -> list[str]:
        """The pieces of work that it began."""
        return [said["work"] for said in self.said if "work" in said]

    def wait_for(self, work: str) -> bool:
        """Waits until it begins such a piece of work; False: it has ended without."""
        while work not in self.works:
            if self.process.poll() is not None:
                return work in self.works
            time.sleep(0.02)
        return True

    def end(self) -> dict[str, Any]:
        """The last line that it says."""
        self.process.wait(120)
        assert self.said and "status" in self.said[-1], self.errors.read_text()[-3000:]
        return self.said[-1]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def lines(url: str) -> list[dict[str, Any]]:
    try:
        return read_record(url, STUDY)
    except StoreError:  # no planner has begun it yet
        return []


def check_record(url: str, before: list[dict[str, Any]] = []) -> list[dict[str, Any]]:  # noqa: B006
    """The lines of a study, after the checks: nothing lost, nothing twice, one claim at a time."""
    found = lines(url)
    assert found[: len(before)] == before, "a line that was there is gone, or has changed"
    trials = [line["trial"] for line in found if line["kind"] == "trial"]
    twice = [number for number, times in Counter(trial["number"] for trial in trials).items() if times > 1]
    assert not twice, f"trial numbers that are there twice: {twice}"
    looks = Counter(json.dumps(t["config"]) for t in trials if t["purpose"] in ("baseline", "search", "reference"))
    assert max(looks.values(), default=1) == 1, f"looked at twice: {looks.most_common(1)}"
    checks = Counter(json.dumps(line["config"]) for line in found if line["kind"] == "parity")
    assert max(checks.values(), default=1) == 1, f"checked twice: {checks.most_common(1)}"
    claims = [line["claim"] for line in found if line["kind"] == "claim"]
    assert len({claim["number"] for claim in claims}) == len(claims), "two claims have one number"
    for purpose in ("claim", "finalist"):
        rounds = Counter(trial["round"] for trial in trials if trial["purpose"] == purpose)
        assert max(rounds.values(), default=2) <= 2, f"{purpose}: a round with more than two runs"
    return found


def check_ended(url: str, ends: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of a study that has ended: each planner has the one plan, and it rests on one claim."""
    found = check_record(url)
    plans = [json.loads(line["text"]) for line in found if line["kind"] == "plan"]
    assert [end["status"] for end in ends] == ["plan_found"] * len(ends)
    assert plans and all(end["plan"] == plans[-1] for end in ends), "the planners have other plans"
    claims = [line["claim"] for line in found if line["kind"] == "claim"]
    assert len(claims) == 1, f"{len(claims)} claims"
    runs = Counter(
        line["trial"]["round"] for line in found if line["kind"] == "trial" and line["trial"]["purpose"] == "claim"
    )
    assert sum(times == 2 for times in runs.values()) >= claims[0]["rounds"], "the claim has fewer rounds than it said"
    return found
