"""Runs the trainings of packages: each is inspected, or searched; prints a table and counts.

    python -m tests.packages.run --inspect              # all, looked at alone: some minutes
    python -m tests.packages.run fno timm --budget 20s  # by name or package, searched
    python -m tests.packages.run --budget 20s --keep FOLDER

What is refused with the advice to fix the micro-batch, or to say what a loss averages over, is tried again with it:
`after the advice`. Exits with 1 where a
training ended neither with a plan nor with a refusal that has a hint.

The searches of one call share the process that ranks are forked from (torch is imported once), unless a training was
killed or needs another environment. Names that have a result in --keep are not run again, unless given by name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
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
            if mean and os.environ.get("LOSS_MEAN") is None and budget_s is not None:
                return {"end": "mean", "said": mean.group(1), "hint": hint}
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


class Child:
    """A process that answers with the end of one training after another."""

    def __init__(self, budget_s: float | None, folder: Path, **variables: str) -> None:
        state = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
        with (folder / "child.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.packages.run", "--serve", "--keep", str(folder)]
                + ([] if budget_s is None else ["--budget", f"{budget_s}s"]),
                cwd=ROOT,
                env=os.environ | state | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._limit_s = LIMIT_BUDGETS * (budget_s or 0.0) + LIMIT_MORE_S

    def end_of(self, name: str) -> dict[str, Any] | None:
        """How a training ends; None: no answer within its time limit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        answer, deadline = b"", time.monotonic() + self._limit_s
        try:
            self._process.stdin.write(f"{name}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                return None
            answer += part
        found: dict[str, Any] = json.loads(answer.splitlines()[-1])
        return found

    def close(self) -> None:
        """Ends it, with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def serve(budget_s: float | None, folder: Path) -> None:
    """Answers with the end of each training whose name comes in."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    with shared_zygote() if budget_s is not None else contextlib.nullcontext():
        for line in sys.stdin:
            answers.write(json.dumps(end_of(line.strip(), budget_s, folder)) + "\n")
            answers.flush()


@contextlib.contextmanager
def shared_zygote() -> Iterator[None]:
    """Searches in this process start their ranks from one zygote."""
    from autoplan.planner.search import nodes
    from autoplan.planner.search.preload import PRELOAD
    from autoplan.processes.client import Zygote

    with Zygote(preload=(*PRELOAD, "transformers")) as zygote:

        @contextlib.contextmanager
        def same(**_: Any) -> Iterator[Zygote]:
            zygote.start()  # does nothing if it runs
            yield zygote

        own, nodes.Zygote = nodes.Zygote, same  # type: ignore[misc, assignment]
        try:
            yield
        finally:
            nodes.Zygote = own  # type: ignore[misc]


class Runner:
    """Runs trainings in a child, and in another one after the advice to say what a loss averages over."""

    def __init__(self, budget_s: float | None, folder: Path) -> None:
        self._budget_s, self._folder = budget_s, folder
        self._child: Child | None = None

    def run(self, name: str) -> dict[str, Any]:
        """How a training ends, and after how many seconds."""
        began = time.monotonic()
        self._child = self._child or Child(self._budget_s, self._folder)
        found = self._child.end_of(name)
        if found is None or self._budget_s is None:
            self.close()
        if found is not None and found["end"] == "mean":
            advised = Child(self._budget_s, self._folder, LOSS_MEAN=found["said"])
            found = advised.end_of(name)
            advised.close()
            if found is not None and found["end"] == "plan":
                found["end"] = "after the advice"
        found = found or {"end": "failed", "said": "no answer", "hint": ""}
        return found | {"name": name, "seconds": round(time.monotonic() - began, 1)}

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.close()
        self._child = None


def main() -> int:
    """Runs what the command line names; 0 where none failed."""
    from autoplan.units import parse_duration_s
    from tests.packages.trainings import TRAININGS

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="names or packages; all where none is given")
    parser.add_argument("--budget", help="of each search; none: each is inspected alone")
    parser.add_argument("--inspect", action="store_true", help="the same as no --budget")
    parser.add_argument("--keep", type=Path, help="a folder for stores, logs and results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    budget_s = None if chosen.inspect or chosen.budget is None else parse_duration_s(chosen.budget)
    if chosen.serve:
        serve(budget_s, chosen.keep)
        return 0
    picked = [name for name, (package, _) in TRAININGS.items() if not chosen.names or {name, package} & {*chosen.names}]
    with contextlib.ExitStack() as stack:
        folder = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="packages-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        ends: Counter[str] = Counter()
        runner = Runner(budget_s, folder)
        stack.callback(runner.close)
        for name in picked:
            result = folder / f"{name}.json"
            if result.exists() and not chosen.names:
                found = json.loads(result.read_text())
            else:
                found = runner.run(name)
                result.write_text(json.dumps(found, indent=1))
            ends[found["end"]] += 1
            first = (found["said"].strip().splitlines() or [""])[-1 if found["end"] == "failed" else 0]
            package = TRAININGS[name][0]
            print(f"{name:20} {package:28} {found['end']:17} {found['seconds']:6.1f} s  {first[:150]}", flush=True)
    packages = len({TRAININGS[name][0] for name in picked})
    print(f"{len(picked)} trainings of {packages} packages: " + ", ".join(f"{ends[end]} {end}" for end in ENDS))
    return 1 if ends["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
