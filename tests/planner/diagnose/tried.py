"""What autoplan doctor promises, beside what the mend gives; and what it costs to be attached.

    python -m tests.planner.diagnose.tried FOLDER --out RESULTS               # again and again: it goes on
    python -m tests.planner.diagnose.tried FOLDER --out RESULTS --attach-cost

FOLDER has NAME.py, NAME.mended.py and NAME.cause.txt for each script; blind60.tar.gz beside this file holds sixty.
The doctor runs on NAME.py; then both scripts run in fresh processes side by side, in an order that is drawn, and the
seconds of their steps are compared. RESULTS keeps the doctor's document and the pairs of each script, which are not
measured again. `accepted.json` says by script which of the doctor's causes are the planted one: to judge that takes a
person; a script that is not in it is left open.

A promise agrees if it is within 10 % of what the mend gave, or if each lies in the other's interval. An estimate, and
what batches at hand give, say "up to": they agree, too, if the mend gave less and more than 1. Figures that were
measured beside other work are worth nothing; which cause was named is.

`--attach-cost`: in one process of each script the hooks are put in place and taken away, block by block of steps, and
the CPU time of the steps is compared; nothing is looked at meanwhile.
"""

from __future__ import annotations

import argparse
import builtins
import gc
import io
import json
import logging
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autoplan.planner.records.trials import Interval
from autoplan.planner.trials.measure import ratio_interval
from autoplan.report.diagnosis import AT_MOST

ACCEPTED: dict[str, list[str]] = json.loads(Path(__file__).with_name("accepted.json").read_text())
"""The doctor's causes that are the planted one, by script; none for a healthy script."""

ROUNDS, SECONDS = 3, 6.0
"""Of both scripts in fresh processes, and how long their steps are timed each."""

WARM_UP = 4
"""Steps that are not timed."""

BLOCK_S, ATTACH_SECONDS = 0.5, 40.0

CLOSE = 1.1


def named(folder: Path) -> list[str]:
    """The scripts that have a mend and a cause."""
    return sorted(path.name.removesuffix(".cause.txt") for path in folder.glob("*.cause.txt"))


# In the process of a script.


def time_steps(script: str, seconds: float) -> None:
    """Runs a script, prints the seconds of its steps, and ends it."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from autoplan.processes.script import run_as_main

    ends: list[float] = []
    first: list[torch.optim.Optimizer] = []

    def told() -> None:
        steps = len(ends) - 1 - WARM_UP
        print(json.dumps((ends[-1] - ends[WARM_UP]) / steps if steps > 0 else None), file=sys.__stdout__, flush=True)
        os._exit(0)

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        first.append(optimizer)
        if optimizer is first[0]:
            ends.append(time.perf_counter())
            if len(ends) > WARM_UP + 1 and ends[-1] - ends[WARM_UP] > seconds:
                told()

    register_optimizer_step_post_hook(stepped)
    sys.argv, sys.stdout = [script], io.StringIO()
    run_as_main(script)
    told()


def time_attached(script: str, seconds: float) -> None:
    """Runs a script, prints pairs of (CPU seconds of a step without the hooks, with them), and ends it."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader, dataloader
    from torch.utils.data._utils import fetch

    from autoplan.planner.diagnose.clock import Clock
    from autoplan.planner.diagnose.hooks import Hooks
    from autoplan.planner.diagnose.sandbox import Sandbox
    from autoplan.processes.script import run_as_main

    clock, sandbox = Clock(), Sandbox(Path(tempfile.mkdtemp(dir=Path.cwd())))
    hooks = Hooks(clock, sandbox, lambda: None)
    owners: list[Any] = [torch, torch.Tensor, torch.nn.Module, torch.nn.utils, torch.autograd, torch.optim.Optimizer]
    owners += [DataLoader, *(vars(dataloader)[name] for name in vars(dataloader) if name.endswith("LoaderIter"))]
    owners += [fetch._MapDatasetFetcher, builtins, logging.Logger, os, io, shutil]
    before = [dict(vars(owner)) for owner in owners]
    hooks.install()
    sandbox.install()
    changed = [
        (owner, name, was.get(name), now)
        for owner, was in zip(owners, before, strict=True)
        for name, now in list(vars(owner).items())
        if was.get(name) is not now and callable(now)
    ]
    thread = clock._thread

    def attach(on: bool) -> None:
        for owner, name, was, now in changed:
            if on or was is not None:
                setattr(owner, name, now if on else was)
            elif name in vars(owner):
                delattr(owner, name)
        gc.callbacks[:] = [hooks._on_gc] if on else []
        clock._thread = thread if on else -1  # then the optimizer's hooks return at once

    def course() -> Iterator[None]:
        for _ in range(WARM_UP):
            yield
        began = time.perf_counter()
        for _ in range(WARM_UP):
            yield
        steps = max(2, math.ceil(BLOCK_S * WARM_UP / (time.perf_counter() - began)))
        pairs, ends = [], time.perf_counter() + seconds
        while time.perf_counter() < ends:
            took = {}
            for on in ((True, False), (False, True))[len(pairs) % 2]:
                attach(on)
                yield
                started = time.process_time()
                for _ in range(steps):
                    yield
                took[on] = (time.process_time() - started) / steps
            pairs.append((took[False], took[True]))
        print(json.dumps(pairs), file=sys.__stdout__, flush=True)
        os._exit(0)

    running, first = course(), []
    next(running)

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        first.append(id(optimizer))
        if id(optimizer) == first[0]:
            clock.close()
            next(running)
            clock.open()

    clock.open()
    register_optimizer_step_post_hook(stepped)
    sys.argv, sys.stdout = [script], io.StringIO()
    run_as_main(script)


# In the process of the harness.


def in_process(how: str, script: Path, seconds: float) -> Any:
    """What a function of above prints in a fresh process; None where it printed nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.planner.diagnose.tried", how, str(script), "--seconds", str(seconds)]
        environment = os.environ | {"PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=20 * seconds + 120
        )
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def promised(script: Path, budget: str, kept: Path) -> dict[str, Any]:
    """The doctor's document."""
    if not kept.exists():
        command = [sys.executable, "-m", "autoplan", "doctor", str(script), "--budget", budget, "--json", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        kept.write_text(done.stdout if done.returncode == 0 else json.dumps({"headline": done.stderr.strip()[-300:]}))
    return json.loads(kept.read_text())


def given(script: Path, mended: Path, rounds: int, seconds: float, kept: Path) -> Interval | None:
    """How many times faster the mended script's steps are; None where there is no mend, or no step."""
    pairs: list[list[float | None]] = json.loads(kept.read_text()) if kept.exists() else []
    draw = random.Random(script.name)
    while len(pairs) < rounds and mended.exists():
        order = draw.sample((script, mended), 2)
        took = {one: in_process("--steps-of", one, seconds) for one in order}
        pairs.append([took[script], took[mended]])
        kept.write_text(json.dumps(pairs))
    whole = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not whole:
        return None
    as_is, without = ([_point(pair[place]) for pair in whole] for place in (0, 1))
    return ratio_interval(without, as_is)


def all_agree(findings: Sequence[dict[str, Any]], gave: Interval) -> bool:
    """Whether the promises of a script are what the mend of all of them gave.

    Of several it lies between the largest one and their sum: what one takes away may be a part of another.
    """
    whole, largest = together(findings), max(findings, key=lambda one: one["gain"]["median"])
    if agrees(whole, gave) or agrees(largest, gave):
        return True
    return bool(largest["gain"]["median"] <= gave.median <= whole["gain"]["median"])


def together(findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The promise of several findings of one script, whose mend takes all of them away: their shares of a step add."""
    gain = {}
    for side in ("median", "low", "high"):
        left = 1 - sum(1 - 1 / one["gain"][side] for one in findings)
        gain[side] = 1 / max(left, 0.01)
    samples = min(one["gain"]["samples"] for one in findings)
    cause = findings[0]["cause"] if len(findings) == 1 else "several"
    return {"cause": cause, "gain": gain | {"samples": samples}, "measured": all(one["measured"] for one in findings)}


def agrees(finding: dict[str, Any], gave: Interval) -> bool:
    """Whether a promise is what the mend gave."""
    gain = Interval.model_validate(finding["gain"])
    if (not finding["measured"] or finding.get("cause") in AT_MOST) and 1 < gave.median <= gain.median:
        return True
    close = max(gain.median / gave.median, gave.median / gain.median) <= CLOSE
    return close or (gain.low <= gave.median <= gain.high and gave.low <= gain.median <= gave.high)


def row_of(name: str, document: dict[str, Any], cause: str, gave: Interval | None) -> str:
    """A line of the table."""
    findings, accepted = document.get("findings"), ACCEPTED.get(name)
    if findings is None:
        return f"| {name} | {cause} | {document['headline']} | | | | |"
    causes = [one["cause"] for one in findings]
    if accepted is None:
        first = "open"
    elif not accepted:
        first = "none, right" if not causes else "WRONG: it is healthy"
    else:
        first = "yes" if causes[:1] and causes[0] in accepted else "later" if {*causes} & {*accepted} else "no"
    of_cause = [one for one in findings if one["cause"] in (accepted or causes)]
    whole = together(of_cause) if of_cause else None
    promise = _words(Interval.model_validate(whole["gain"])) if whole else ""
    promise += "" if whole is None or whole["measured"] else " (estimated)"
    fits = "" if gave is None or whole is None else "yes" if all_agree(of_cause, gave) else "no"
    gift = "" if gave is None else _words(gave)
    return f"| {name} | {cause} | {', '.join(causes) or 'nothing'} | {first} | {promise} | {gift} | {fits} |"


def _words(one: Interval) -> str:
    return f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})"


def _point(value: float) -> Interval:
    return Interval(median=value, low=value, high=value, samples=1)


def show_attach_cost(folder: Path, names: Sequence[str], seconds: float, out: Path) -> None:
    """A table: CPU time of steps with the hooks beside that without."""
    print("| script | CPU time with the hooks | pairs |\n| --- | --- | --- |")
    for name in names:
        kept = out / f"{name}.attach.json"
        if not kept.exists():
            kept.write_text(json.dumps(in_process("--attached", folder / f"{name}.py", seconds)))
        pairs = json.loads(kept.read_text())
        if not pairs:
            print(f"| {name} | no steps | |")
            continue
        plain, attached = ([_point(pair[place]) for pair in pairs] for place in (0, 1))
        ratio = ratio_interval(plain, attached)
        more = " to ".join(f"{100 * (value - 1):+.1f}" for value in (ratio.low, ratio.high))
        print(f"| {name} | {100 * (ratio.median - 1):+.1f} % ({more}) | {len(pairs)} |", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, help="where the results are kept; default: FOLDER/tried")
    parser.add_argument("--only", nargs="+", help="names of scripts")
    parser.add_argument("--budget", default="60s", help="of the doctor")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="0: the doctor alone")
    parser.add_argument("--seconds", type=float, help="that steps are timed in one process")
    parser.add_argument("--attach-cost", action="store_true")
    parser.add_argument("--steps-of", help=argparse.SUPPRESS)
    parser.add_argument("--attached", help=argparse.SUPPRESS)
    given_ = parser.parse_args()
    if given_.steps_of:
        time_steps(given_.steps_of, given_.seconds)
    if given_.attached:
        time_attached(given_.attached, given_.seconds)
    folder = given_.folder.absolute()
    out = given_.out or folder / "tried"
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in named(folder) if not given_.only or name in given_.only]
    if given_.attach_cost:
        show_attach_cost(folder, names, given_.seconds or ATTACH_SECONDS, out)
        return
    print("| script | planted | named | first? | promised | the mend gave | agree? |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        script, mended = folder / f"{name}.py", folder / f"{name}.mended.py"
        document = promised(script, given_.budget, out / f"{name}.json")
        gave = given(script, mended, given_.rounds, given_.seconds or SECONDS, out / f"{name}.pairs.json")
        cause = " ".join((folder / f"{name}.cause.txt").read_text().split())
        print(row_of(name, document, cause, gave), flush=True)


if __name__ == "__main__":
    main()
