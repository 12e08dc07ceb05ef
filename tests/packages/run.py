"""Runs the trainings of packages: each is inspected, or searched; prints a table and counts.

    python -m tests.packages.run --inspect              # all, looked at alone: some minutes
    python -m tests.packages.run fno timm --budget 20s  # by name or package, searched
    python -m tests.packages.run --budget 20s --keep FOLDER

What is refused with the advice to fix the micro-batch, or to say what a loss averages over, is tried again with it:
`after the advice`. Exits with 1 where a
training ended neither with a plan nor with a refusal that has a hint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ADVICE, MICRO_BATCH = "micro_batch", 8
LIMIT_BUDGETS, LIMIT_MORE_S = 4.0, 90.0
"""The time limit of a training: so many budgets of its search, and time for starting."""

TRIALS = 3
"""Enough for a plan."""

ENDS = ("plan", "after the advice", "refused", "failed")


def end_of(name: str, budget_s: float | None, folder: Path) -> dict[str, Any]:
    """How a training ends, in this process: one of ENDS, the plan or the error, and the hint.

    Args:
        name: Of the training.
        budget_s: Of its search; None: it is inspected alone.
        folder: For stores.
    """
    from autoplan.errors import AutoplanError, UsageError

    followed, fix = False, {}
    while True:
        try:
            said = _inspect(name, fix) if budget_s is None else _search(name, fix, budget_s, folder)
            return {"end": "after the advice" if followed else "plan", "said": said, "hint": ""}
        except AutoplanError as error:
            hint = error.hint or ""
            end = "refused" if hint else "failed"
            found = {"end": end, "said": f"{type(error).__name__}: {error.message}", "hint": hint}
            mean = re.search(r'loss_mean="(\w+)"', hint)
            if followed or not (mean or ADVICE in hint) or not isinstance(error, UsageError):
                return found
            followed = True
            if mean:
                os.environ["LOSS_MEAN"] = mean.group(1)
            else:
                fix = {ADVICE: MICRO_BATCH}
        except Exception:
            return {"end": "failed", "said": traceback.format_exc(limit=-4), "hint": ""}


def _inspect(name: str, fix: dict[str, int]) -> str:
    from autoplan.errors import WorkloadError
    from autoplan.probes.run import read_host_profile
    from autoplan.strategies.inspect import inspect_workload
    from autoplan.strategies.workloads.sources import make_spec

    spec = make_spec(model=f"{ROOT}/tests/packages/trainings.py:{name.replace('-', '_')}")
    if fix:
        spec = spec.model_copy(update={"options": dict(spec.options) | {"fixed_micro_batch": fix[ADVICE]}})
    facts = inspect_workload(spec, read_host_profile(), "cpu")
    if not facts.knob(ADVICE).values:
        found = facts.micro_batch_dependent[0]
        raise WorkloadError(f"{found.module} ({found.kind}) {found.why}", hint=f"Fix the micro-batch: {ADVICE}=N.")
    return f"{facts.num_blocks} blocks, {facts.parameters:,} parameters, {facts.optimizer}"


def _search(name: str, fix: dict[str, int], budget_s: float, folder: Path) -> str:
    import autoplan

    plan = autoplan.search(
        f"{ROOT}/tests/packages/trainings.py:{name.replace('-', '_')}",
        budget=budget_s,
        fix=dict(fix),
        device="cpu",
        max_trials=TRIALS,
        store=folder / f"{name}.store",
        quiet=True,
    )
    return f"{plan.speedup.median:.2f} x: {plan.config.describe()}"


def run_one(name: str, budget_s: float | None, folder: Path) -> dict[str, Any]:
    """How a training ends, in a process of its own with a time limit."""
    limit_s = LIMIT_BUDGETS * (budget_s or 0.0) + LIMIT_MORE_S
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.packages.run", "--one", name, "--keep", str(folder)]
    with (folder / f"{name}.log").open("w") as log:
        child = subprocess.Popen(
            command + ([] if budget_s is None else ["--budget", f"{budget_s}s"]),
            cwd=ROOT,
            env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = child.communicate(timeout=limit_s)
            found = json.loads(out.strip().splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            found = {"end": "failed", "said": f"no answer ({type(error).__name__})", "hint": ""}
    return found | {"name": name, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Runs what the command line names; 0 where none failed."""
    from autoplan.units import parse_duration_s
    from tests.packages.trainings import TRAININGS

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="names or packages; all where none is given")
    parser.add_argument("--budget", help="of each search; none: each is inspected alone")
    parser.add_argument("--inspect", action="store_true", help="the same as no --budget")
    parser.add_argument("--keep", type=Path, help="a folder for stores, logs and results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    budget_s = None if chosen.inspect or chosen.budget is None else parse_duration_s(chosen.budget)
    if chosen.one:
        print(json.dumps(end_of(chosen.one, budget_s, chosen.keep)))
        return 0
    picked = [name for name, (package, _) in TRAININGS.items() if not chosen.names or {name, package} & {*chosen.names}]
    with contextlib.ExitStack() as stack:
        folder = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="packages-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        ends: Counter[str] = Counter()
        for name in picked:
            found = run_one(name, budget_s, folder)
            (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
            ends[found["end"]] += 1
            first = (found["said"].strip().splitlines() or [""])[-1 if found["end"] == "failed" else 0]
            package = TRAININGS[name][0]
            print(f"{name:20} {package:28} {found['end']:17} {found['seconds']:6.1f} s  {first[:150]}", flush=True)
    packages = len({TRAININGS[name][0] for name in picked})
    print(f"{len(picked)} trainings of {packages} packages: " + ", ".join(f"{ends[end]} {end}" for end in ENDS))
    return 1 if ends["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
