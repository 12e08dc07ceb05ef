"""Runs the zoo: each workload is searched, checked for parity, and its plan applied; prints a table and counts.

    python -m tests.zoo.run                            # all
    python -m tests.zoo.run llama vision --budget 20s  # by name or kind
    python -m tests.zoo.run --markdown > zoo.md

Each workload has a process and a time limit of its own: whatever one does, the others run. Plans, stores, full errors
and the lines of stderr stay in --keep FOLDER, where it is given. Exits with 1 where one did not end as expected.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from autoplan.units import parse_duration_s
from tests.zoo.catalogue import BY_NAME, Entry, pick
from tests.zoo.one import Ending, read

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGET = "20s"
LIMIT_BUDGETS, LIMIT_MORE_S = 4.0, 90.0
"""The time limit of a workload: so many budgets, and time for starting and for applying the plan."""


def run_one(entry: Entry, budget_s: float, folder: Path, max_trials: int | None = None) -> Ending:
    """How one workload ends, in a process of its own with a time limit.

    Args:
        entry: The workload.
        budget_s: Of the search.
        folder: For all that it writes; also the cache of hardware profiles.
        max_trials: At most so many; None: what the budget allows.
    """
    if entry.missing:
        return Ending(name=entry.name, ended="skipped", error=f"{', '.join(entry.missing)} is not installed")
    trials = [] if max_trials is None else [str(max_trials)]
    limit_s = LIMIT_BUDGETS * budget_s + LIMIT_MORE_S
    began = time.monotonic()
    with (folder / f"{entry.name}.stderr").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.zoo.one", entry.name, str(budget_s), str(folder), *trials],
            cwd=ROOT,
            env=_environment(folder),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            child.wait(limit_s)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        _end(child)
    ending = read(entry.name, folder)
    if late or not ending.seconds:
        ending.seconds = round(time.monotonic() - began, 1)
        ending.ended = "failed"
        ending.error = f"killed after {limit_s:.0f} s" if late else f"the process ended with {child.returncode}"
    return ending


def _environment(folder: Path) -> dict[str, str]:
    """One thread, nothing from the network, a cache that no earlier version of autoplan has filled."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_STATE_HOME": str(folder / "state"),
    }


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the process; its ranks end with it, they hold a pipe to it."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def probe(folder: Path) -> None:
    """Measures the machine once, so that no workload's time has it."""
    code = "import autoplan; autoplan.probe(device='cpu')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=_environment(folder), check=True, capture_output=True)


def run_all(entries: list[Entry], budget_s: float, folder: Path, jobs: int) -> Iterator[Ending]:
    """The endings in the order of the entries, `jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(partial(run_one, budget_s=budget_s, folder=folder), entries)


# The table.


def row(ending: Ending, *, markdown: bool) -> str:
    """One line of the table."""
    entry = BY_NAME[ending.name]
    ended = ending.in_words if ending.as_expected else f"{ending.in_words} (!)"
    speedup = "" if ending.speedup is None else f"{ending.speedup:.2f} x: "
    said = f"{speedup}{ending.config}" if ending.ended == "plan" else (ending.error.splitlines() or [""])[0]
    if markdown:
        cells = (ending.name, entry.kind, ended, said.replace("|", "/"), f"{ending.seconds:.0f}")
        return f"| {' | '.join(cells)} |"
    return f"{ending.name:18} {entry.kind:16} {ended:24} {ending.seconds:5.0f} s  {said}"


def head(*, markdown: bool) -> str:
    """The lines above the table."""
    if markdown:
        columns = ("workload", "kind", "ended as", "the plan, or the error's first line", "seconds")
        return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"
    return f"{'workload':18} {'kind':16} {'ended as':24} {'took':>7}  the plan, or the error's first line"


def counts(endings: list[Ending]) -> str:
    """How many ended how, and how many of them as expected."""
    kinds = Counter(ending.in_words for ending in endings)
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    ran = [ending for ending in endings if ending.ended != "skipped"]
    return f"{sum(e.as_expected for e in ran)} of {len(ran)} as expected: {words}"


def main() -> int:
    """Runs what the command line names; 0 where all ended as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="names or kinds; all where none is given")
    parser.add_argument("--budget", default=BUDGET, help=f"of each search (default {BUDGET})")
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time (default 1)")
    parser.add_argument("--keep", type=Path, help="a folder for plans, stores, full errors")
    parser.add_argument("--markdown", action="store_true", help="the table in Markdown")
    chosen = parser.parse_args()
    entries, budget_s = pick(chosen.names), parse_duration_s(chosen.budget)
    with contextlib.ExitStack() as stack:
        folder = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zoo-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        probe(folder)
        print(head(markdown=chosen.markdown), flush=True)
        endings = []
        for ending in run_all(entries, budget_s, folder, chosen.jobs):
            endings.append(ending)
            print(row(ending, markdown=chosen.markdown), flush=True)
    print(("\n" if chosen.markdown else "") + counts(endings))
    return 0 if all(ending.as_expected for ending in endings) else 1


if __name__ == "__main__":
    sys.exit(main())
