"""Kills searches at random, resumes them, and checks that nothing is lost, repeated or left: `make soak`.

    python -m benchmarks.soak --minutes 60 --seed 0 --counts soak.json
    python -m benchmarks.soak --minutes 10 --phases pair parity --counts late.json

Killed with SIGKILL are the planner, its zygote, both at once, a rank, and its child, in each phase of a tiny search
until each pair was hit at least LEAST times; the least hit is next. After each kill of the planner the same search is
started again. Checked after each end, by kill or not:

- lost: a line that was whole in record.jsonl is still there, at its place;
- repeated: no trial number twice, no configuration searched twice or checked for parity twice with a verdict;
- left: no process of that search lives after LEFT_S; no temporary folder of autoplan's is left by a search that ended;
- the search ends with a plan in the end, whatever was killed.

The counts are kept in a file, and the probes of the machine beside it, so that a soak can be made in pieces. The exit
status is 1 where a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from autoplan.processes import linux

LEAST = 5
LEFT_S = 10.0
RUN_S = 120.0
"""A run of the tiny search takes some 20 s; one that takes longer than this is a finding."""

BUDGET_S = 900.0
"""Of a search over all its runs. A search whose budget ends is a finding."""

MARK = "AUTOPLAN_SOAK"
PHASES = ("inspect", "trace", "baseline", "look", "pair", "parity", "claim", "write")
STAGE_OF = {"plan": "write"}  # the search's own name of the stage
VICTIMS = ("planner", "zygote", "both", "rank", "child")
WITHOUT_RANKS = ("write",)
SPAN_S = {"inspect": 0.5, "trace": 1.0, "baseline": 2.0, "look": 1.0, "pair": 1.5, "parity": 0.7, "claim": 3.0}
SPAN_S |= {"write": 0.05}
"""A kill comes at a random moment within so many seconds of the phase's beginning."""


def pairs(phases: Sequence[str] = PHASES) -> list[str]:
    """phase/victim of each pair that there is; no rank runs while the plan is written."""
    return [
        f"{phase}/{victim}"
        for phase in phases
        for victim in VICTIMS
        if not (phase in WITHOUT_RANKS and victim in ("rank", "child"))
    ]


class Soak:
    """The counts of a soak, kept in a file, and the folder of the search that is being killed.

    Args:
        counts: The file.
        seed: Of the moments and the victims.
        phases: In which it kills.
    """

    def __init__(self, counts: Path, seed: int, phases: Sequence[str] = PHASES) -> None:
        self.path = counts
        self.phases = tuple(phases)
        known: dict[str, Any] = json.loads(counts.read_text()) if counts.exists() else {}
        self.kills = Counter(dict.fromkeys(pairs(phases), 0) | known.get("kills", {}))
        self.figures = Counter(known.get("figures", {}))
        self.worst_end_s = float(known.get("worst_end_s", 0.0))
        self.findings: list[str] = known.get("findings", [])
        self.errors = Counter(known.get("errors", {}))
        self.seconds = float(known.get("seconds", 0.0))
        self.random = random.Random(f"{seed}/{self.figures['runs']}")
        self.folder = Path(tempfile.mkdtemp(prefix="soak-"))
        self.cache = counts.with_suffix(".cache").absolute()  # the machine is probed once for all pieces
        self.begin_search()

    def begin_search(self) -> None:
        """A new store for the next search."""
        self.store = self.folder / f"store{self.figures['searches']}-{uuid.uuid4().hex[:6]}"
        self.record = b""

    def save(self) -> None:
        """Writes the counts."""
        document = {"kills": self.kills, "figures": self.figures, "worst_end_s": self.worst_end_s}
        document |= {"findings": self.findings, "errors": self.errors, "seconds": self.seconds}
        self.path.write_text(json.dumps(document, indent=1))

    def finding(self, kind: str, text: str) -> None:
        """Something that must not happen."""
        self.figures[kind] += 1
        self.findings.append(f"{kind}: {text}")
        print(f"FOUND {kind}: {text}", flush=True)

    def next_victim(self, phase: str) -> str | None:
        """The least hit victim of a phase; rarely one where all were hit often enough, so that runs get further."""
        counts = {victim: self.kills[f"{phase}/{victim}"] for victim in VICTIMS if f"{phase}/{victim}" in self.kills}
        least = min(counts.values())
        if least >= LEAST and self.random.random() > 0.2:
            return None
        return self.random.choice([victim for victim, count in counts.items() if count == least])

    def line(self) -> str:
        """The figures in one line."""
        by_victim = ", ".join(
            f"{victim} {sum(count for pair, count in self.kills.items() if pair.endswith('/' + victim))}"
            for victim in VICTIMS
        )
        least = min(self.kills.values())
        figures = self.figures
        return (
            f"soak: {sum(self.kills.values())} kills in {self.seconds / 60:.0f} min ({by_victim}; at least {least} for "
            f"each of {len(self.kills)} pairs of phase and victim), {figures['runs']} runs, {figures['searches']} "
            f"searches ended with a plan, {figures['trials']} trials: {figures['lost']} lost, {figures['repeated']} "
            f"repeated, {figures['processes']} processes and {figures['folders']} folders left, "
            f"{figures['no_plan']} without a plan, {figures['hung']} hung; all gone within {self.worst_end_s:.1f} s"
        )


def main() -> int:
    """Soaks for the given time; 1 where something was found."""
    parser = argparse.ArgumentParser(description="kills searches at random, resumes them, checks what is left")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--counts", type=Path, default=Path("soak.json"), help="goes on from there if it exists")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, help="kill in these alone")
    options = parser.parse_args()
    soak = Soak(options.counts, options.seed, options.phases)
    began, before_s = time.monotonic(), soak.seconds
    try:
        while time.monotonic() - began < 60 * options.minutes:
            run_once(soak)
            soak.seconds = before_s + time.monotonic() - began
            soak.save()
    finally:
        shutil.rmtree(soak.folder, ignore_errors=True)
    print(soak.line())
    for text, count in soak.errors.most_common():
        print(f"  {count} runs ended with: {text}")
    return 1 if soak.findings else 0


def run_once(soak: Soak) -> None:
    """One run of the search, with kills on its way, and the checks after it."""
    soak.figures["runs"] += 1
    mark = uuid.uuid4().hex
    phase_file, result_file = soak.folder / "phase", soak.folder / "result.json"
    for file in (phase_file, result_file):
        file.unlink(missing_ok=True)
    temporary = soak.folder / "tmp"
    temporary.mkdir(exist_ok=True)
    if any(count < LEAST for pair, count in soak.kills.items() if pair.startswith("trace/")):  # traced again
        shutil.rmtree(soak.cache / "autoplan" / "profiles", ignore_errors=True)
    environment = os.environ | {MARK: mark, "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(soak.cache)}
    command = [sys.executable, "-m", "benchmarks.soak_search", str(soak.store), str(BUDGET_S)]
    with (soak.folder / "output").open("wb") as output:
        planner = subprocess.Popen(
            [*command, str(phase_file), str(result_file)],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        killed = kill_on_the_way(soak, planner, phase_file)
    except BaseException:  # an interrupted soak leaves no search that holds the device
        planner.kill()
        raise
    finally:
        planner.wait()
    check_end(soak, mark, killed)
    check_record(soak)
    if result_file.exists():
        take_result(soak, json.loads(result_file.read_text()), temporary, killed)
    elif not any(pair.endswith(("/planner", "/both")) for pair in killed):
        said = (soak.folder / "output").read_text(errors="replace").strip().splitlines()[-1:]
        soak.finding("no_plan", f"the planner ended by itself after {killed}: {said}")


def kill_on_the_way(soak: Soak, planner: subprocess.Popen[bytes], phase_file: Path) -> list[str]:
    """Kills at most one victim in each phase of a run; returns the pairs."""
    killed: list[str] = []
    phase, victim, due_at = "", None, 0.0
    give_up_at = time.monotonic() + RUN_S
    while planner.poll() is None:
        now = time.monotonic()
        if now > give_up_at:
            soak.finding("hung", f"in {phase or 'the start'}, after {killed}")
            planner.kill()
            return [*killed, "hung/planner"]
        current = read_phase(phase_file)
        if current != phase:
            phase = current
            victim = soak.next_victim(phase) if phase in soak.phases else None
            due_at = now + soak.random.uniform(0.0, SPAN_S.get(phase, 0.0))
        if victim is not None and now >= due_at:
            pids = pids_of(victim, planner.pid)
            if pids and read_phase(phase_file) == phase:
                for pid in pids:
                    linux.signal_quietly(pid, signal.SIGKILL)
                soak.kills[f"{phase}/{victim}"] += 1
                killed.append(f"{phase}/{victim}")
                victim = None
        time.sleep(0.01)
    return killed


def read_phase(path: Path) -> str:
    """The phase that the search is in; empty before its first."""
    try:
        name = path.read_text()
    except OSError:
        return ""
    return STAGE_OF.get(name, name)


def pids_of(victim: str, planner: int) -> list[int]:
    """The processes to kill; empty where there is none at the moment."""
    zygote = find_zygote(planner)
    if victim == "planner":
        return [planner]
    if zygote is None:
        return []
    if victim in ("zygote", "both"):
        return [zygote] if victim == "zygote" else [planner, zygote]
    ranks = [pid for pid in children_of(zygote) if group_of(pid) == pid]
    if victim == "rank":
        return ranks[:1]
    return [pid for rank in ranks for pid in children_of(rank)][:1]


def find_zygote(planner: int) -> int | None:
    """The process that forks the ranks: the last of the session leaders below the planner (a guard may be between)."""
    found = None
    parent = planner
    while True:
        leaders = [pid for pid in children_of(parent) if session_of(pid) == pid]
        if not leaders:
            return found
        found = parent = leaders[0]


def children_of(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def check_end(soak: Soak, mark: str, killed: list[str]) -> None:
    """Nobody of this run is alive within LEFT_S of its end."""
    began = time.monotonic()
    while alive := [pid for pid, value in linux.environments(MARK).items() if value == mark]:
        if time.monotonic() - began > LEFT_S:
            names = [" ".join(psutil.Process(pid).cmdline())[:80] for pid in alive if psutil.pid_exists(pid)]
            soak.finding("processes", f"{len(alive)} alive after {killed}: {names}")
            for pid in alive:
                linux.signal_quietly(pid, signal.SIGKILL)
            return
        time.sleep(0.02)
    soak.worst_end_s = max(soak.worst_end_s, time.monotonic() - began)


def check_record(soak: Soak) -> None:
    """Checks that all that was whole on disk before is there, and that nothing that finished was done again."""
    paths = list(soak.store.glob("*/record.jsonl"))
    content = paths[0].read_bytes() if paths else b""
    whole = content[: content.rfind(b"\n") + 1]
    if not whole.startswith(soak.record):
        soak.finding("lost", f"the record of {soak.store.name} lost or changed a line")
    soak.record = whole
    documents = [json.loads(line) for line in whole.splitlines()]
    trials = [document["trial"] for document in documents if document["kind"] == "trial"]
    numbers = Counter(trial["number"] for trial in trials)
    quiet = [t for t in trials if t["purpose"] == "search" and not (t.get("window") or {}).get("disturbed")]
    searched = Counter(json.dumps(trial["config"], sort_keys=True) for trial in quiet)  # a disturbed look is made again
    checked = Counter(json.dumps(line["config"], sort_keys=True) for line in documents if line["kind"] == "parity")
    for what, counts in (("trial number", numbers), ("search of", searched), ("parity check of", checked)):
        for key, count in counts.items():
            if count > 1:
                soak.finding("repeated", f"{what} {key}: {count} times in {soak.store.name}")


def take_result(soak: Soak, result: dict[str, Any], temporary: Path, killed: list[str]) -> None:
    """How a run that ended by itself ended: with a plan, or to be gone on with."""
    if result["status"] == "plan_found":
        folders = [path.name for path in temporary.glob("autoplan-*")]
        if folders:
            soak.finding("folders", f"{folders} after {killed}")
        soak.figures["searches"] += 1
        soak.figures["trials"] += result["trials"]
        shutil.rmtree(soak.store, ignore_errors=True)
        soak.begin_search()
        return
    soak.errors[f"{result['status']}: {' '.join(str(result['reason']).split())[:160]}"] += 1
    if result["status"] in ("no_feasible_plan", "budget_ended"):  # the record keeps it: no resume mends it
        soak.finding("no_plan", f"{result['reason']} after {killed}")
        soak.begin_search()


if __name__ == "__main__":
    raise SystemExit(main())
