"""Runs whole searches as a user does: the command line, a process of its own, no caches; and measures what they chose.

`run_search` gives a line of JSON: how the search ended, and when each best so far was known, in seconds from the start
of the process. It reads the record of the search while it grows, so it needs nothing of the search but its record.
`measure` runs some configurations side by side: rounds of fresh processes, in an order that is drawn anew each time.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.search.objective import THROUGHPUT
from autoplan.planner.search.objective import order as ordered
from autoplan.planner.search.preload import preload_for
from autoplan.planner.search.selection import collect_runs, measured_spread
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.probes.run import read_host_profile
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.digests import installed_versions
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import parse_duration_s

ROOT = Path(__file__).resolve().parents[1]
HERE = "{checkout}"
"""Stands for ROOT in the results."""

BUSY = "while True: pass"
POLL_S = 0.2
LIMIT_BUDGETS, LIMIT_MORE_S = 2.0, 120.0
"""A search is killed after so many budgets, and these seconds."""

DEADLINE_S = 600.0
"""Of a run side by side."""

MEMORY_SHARE = 0.8
"""Of the free memory: as a search has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A search to run.

    Attributes:
        model: What `--model` takes.
        budget: As the command line has it.
        arguments: Further ones.
        busy: Beside a process that keeps one core busy.
        root: The checkout whose code runs.
    """

    model: str
    budget: str
    arguments: tuple[str, ...] = ()
    busy: bool = False
    root: Path = ROOT


def run_search(asked: Asked) -> dict[str, Any]:
    """Runs a search in a process of its own, with folders for its caches and records that are new and then deleted."""
    with tempfile.TemporaryDirectory(prefix="whole-search-") as scratch, busy_process(asked.busy):
        folder = Path(scratch)
        command = [sys.executable, "-m", "autoplan", "search", "--model", asked.model, "--budget", asked.budget]
        command += ["--json", "--out", str(folder / "plan.json"), *asked.arguments]
        load = Load()
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            began = time.monotonic()
            child = subprocess.Popen(
                command, cwd=asked.root, env=_environment(asked.root, folder), stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
            watch = RecordWatch(folder / "state", began)
            try:
                child.wait(LIMIT_BUDGETS * parse_duration_s(asked.budget) + LIMIT_MORE_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            seconds = time.monotonic() - began
        lines = watch.stop()
        line = {"budget": asked.budget, "arguments": list(asked.arguments), "busy": asked.busy}
        line |= {"seconds": round(seconds, 1), "load": load.describe()} | machine()
        line |= _ending((folder / "out").read_text(), (folder / "err").read_text())
        return with_plan_at_the_end(line | what_was_known(lines))


def _environment(root: Path, folder: Path) -> dict[str, str]:
    caches = {"XDG_CACHE_HOME": "cache", "XDG_STATE_HOME": "state", "TORCHINDUCTOR_CACHE_DIR": "compiled"}
    caches |= {"TRITON_CACHE_DIR": "triton"}
    own = {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {name: str(folder / place) for name, place in caches.items()}


def _ending(out: str, err: str) -> dict[str, Any]:
    """The result in the one document of --json; if there is none (a crash, a kill), the end of what was printed."""
    try:
        document = json.loads(out)
    except ValueError:
        last = (err.strip().splitlines() or ["it says nothing"])[-1]
        return {"status": "failed", "reason": last[:200], "config": None, "workload": None}
    plan = document["plan"]
    known = {"status": document["status"], "reason": document["reason"], "config": None, "workload": None}
    if plan is None:
        return known
    return known | {
        "config": short(TrainingConfig.model_validate(plan["config"])),
        "plain": short(TrainingConfig.model_validate(plan["baseline"]["config"])),
        "step_s": plan["measurement"]["step_time_s"]["median"],
        "workload": json.loads(json.dumps(plan["workload"] | {"sources": {}}).replace(str(ROOT), HERE)),
        "device": plan["device"],
        "speedup": [plan["speedup"][name] for name in ("median", "low", "high")],
        "claimed": bool((plan["claim"] or {}).get("claimed")),
    }


def with_plan_at_the_end(line: dict[str, Any]) -> dict[str, Any]:
    """The line with its plan as the last point of the curve: the claim may have put the best so far behind."""
    curve = line["curve"]
    if line["workload"] is None or (curve and curve[-1]["config"] == line["config"]):
        return line
    point = {"seconds": line["seconds"], "config": line["config"], "step_s": round(line["step_s"], 5)}
    return line | {"curve": [*curve, point]}


def spec_of(line: dict[str, Any]) -> WorkloadSpec:
    """The workload of a search that found a plan."""
    return WorkloadSpec.model_validate_json(json.dumps(line["workload"]).replace(HERE, str(ROOT)))


def short(config: TrainingConfig) -> dict[str, Any]:
    """The knobs of a configuration that are not as in the plain run."""
    found: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    return found


class RecordWatch:
    """Reads the record of the one search below a folder as it grows, and keeps when each line came.

    Args:
        state: The state folder of the search.
        began: time.monotonic() when its process was started.
    """

    def __init__(self, state: Path, began: float) -> None:
        self._state, self._began = state, began
        self._lines: list[tuple[float, dict[str, Any]]] = []
        self._read = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[float, dict[str, Any]]]:
        """The lines, each with the seconds from the start of the process after which it was there."""
        self._ended.set()
        self._thread.join()
        self._look()
        return self._lines

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        for path in self._state.glob("autoplan/studies/*/record.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if line.endswith(b"\n"):
                        self._read += len(line)
                        self._lines.append((time.monotonic() - self._began, json.loads(line)))


def what_was_known(lines: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """From a record: each best so far with its moment, the ledger, and how many looks ranked a candidate."""
    trials: list[Trial] = []
    failed: set[TrainingConfig] = set()
    curve: list[dict[str, Any]] = []
    ledger: list[dict[str, Any]] = []
    for at_s, line in lines:
        if line["kind"] == "work":
            work = line["work"]
            ledger.append({name: work[name] for name in ("kind", "began_s", "seconds", "predicted_s", "gain")})
            continue
        if line["kind"] == "trial":
            trials.append(Trial.model_validate(line["trial"]))
        elif line["kind"] == "parity" and not line["parity"]["passed"]:
            failed.add(TrainingConfig.model_validate(line["config"]))
        else:
            continue
        runs = [one for one in collect_runs(trials) if one.config not in failed]
        if not runs:
            continue
        leader = ordered(THROUGHPUT, runs, measured_spread(trials))[0]
        if not curve or curve[-1]["config"] != short(leader.config):
            step_s = leader.step_time.median
            curve.append({"seconds": round(at_s, 1), "config": short(leader.config), "step_s": round(step_s, 5)})
    return {
        "curve": curve,
        "ledger": [one | {name: round(one[name], 3) for name in one if name != "kind"} for one in ledger],
        "ranked": looks_that_ranked(trials),
    }


def looks_that_ranked(trials: Sequence[Trial]) -> int:
    """How many candidates have a look that says how fast they are, or that they are behind."""
    ranked = (Outcome.OK, Outcome.PRUNED)
    return len({t.config for t in trials if t.purpose in ("search", "reference") and t.outcome in ranked})


# The machine.


def machine() -> dict[str, Any]:
    """Where it ran, and with what."""
    host = read_host_profile().host
    versions = installed_versions() | {"python": ".".join(map(str, sys.version_info[:3]))}
    cores = len(os.sched_getaffinity(0))
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"cpu": host.cpu_model, "cores": cores, "versions": versions, "ended": when}


class Load:
    """The use of the cores by others, from here on until all of our own processes were waited for."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._others_s = self._now()

    @staticmethod
    def _now() -> float:
        """CPU time of all, less what this process and those that it has waited for took."""
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return float(sum(times[:8])) - idle_s - sum(used.ru_utime + used.ru_stime for used in own)

    def describe(self) -> str:
        """`others 3 % of the cores, load 1.2`."""
        seconds = max(time.monotonic() - self._began, 1e-9) * (psutil.cpu_count() or 1)
        share = max(0.0, self._now() - self._others_s) / seconds
        return f"others {share:.0%} of the cores, load {os.getloadavg()[0]:.1f}"


@contextlib.contextmanager
def busy_process(wanted: bool) -> Iterator[None]:
    """A second process that keeps a core busy."""
    other = subprocess.Popen([sys.executable, "-c", BUSY]) if wanted else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


# Side by side.


def measure(
    spec: WorkloadSpec, device: str, configs: Sequence[TrainingConfig], numbers: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Runs each configuration once a round in a fresh process, in an order drawn by the round's number.

    On a CPU those of a round share the machine in slices of time: in groups, if its memory does not hold them all.

    Yields a line for each round: the step time of each configuration, None where it did not run, and what disturbed it.
    """
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as folder, Zygote(preload=preload_for(spec)) as zygote:
        limit = int(MEMORY_SHARE * psutil.virtual_memory().available)
        runner = TrialRunner(
            zygote,
            spec,
            device="cuda" if device == "cuda" else "cpu",
            memory_limit_bytes=_device_bytes() if device == "cuda" else limit,
            host_limit_bytes=limit,
            directory=Path(folder),
        )
        for number in numbers:
            order = list(configs)
            random.Random(f"round/{number}").shuffle(order)
            orders = [
                TrialOrder(
                    number=100 * number + place, purpose="claim", config=config, prediction=None, round=number,
                    deadline_s=DEADLINE_S,
                )
                for place, config in enumerate(order)
            ]  # fmt: skip
            sliced = device == "cpu" and all(config.world_size == 1 for config in order)
            trials = _in_slices(runner, orders) if sliced else []
            runs = [
                {
                    "config": short(trial.config),
                    "step_s": None if trial.step_time_s is None else trial.step_time_s.median,
                    "disturbed": trial.disturbed,
                    "pauses": trial.pauses,
                }
                for trial in trials or map(runner.run, orders)
            ]
            yield {"round": number, "runs": runs, "load": f"load {os.getloadavg()[0]:.1f}"} | machine()


def _in_slices(runner: TrialRunner, orders: Sequence[TrialOrder]) -> list[Trial]:
    """A round in slices; if it fails, in two groups that share its first run, by which their times are related.

    Empty if two runs alone fail.
    """
    trials = runner.run_round(orders).trials
    if trials or len(orders) <= 2:
        return list(trials)
    first, rest = orders[0], orders[1:]
    half = (len(rest) + 1) // 2
    one, two = (_in_slices(runner, [first, *group]) for group in (rest[:half], rest[half:]))
    if not (one and two):
        return []
    times = [trials[0].step_time_s for trials in (one, two)]
    if times[0] is None or times[1] is None:
        return []
    return one + [_scaled(trial, times[0].median / times[1].median) for trial in two[1:]]


def _scaled(trial: Trial, factor: float) -> Trial:
    step = trial.step_time_s
    if step is None:
        return trial
    changed = {name: factor * getattr(step, name) for name in ("median", "low", "high")}
    return trial.model_copy(update={"step_time_s": step.model_copy(update=changed)})


def _device_bytes() -> int:
    """95 % of a GPU's memory, in a process of its own: this one does not initialise CUDA."""
    code = "import torch; print(int(0.95 * torch.cuda.get_device_properties(0).total_memory))"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
