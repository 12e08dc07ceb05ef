"""Ways to choose how a training is run, live and in turn: what each chooses, how fast that is, what it costs.

    python -m benchmarks.search_live --case vision --budget 2m --rounds 3 [--memory-limit 1536MiB]
    python -m benchmarks.search_live --table

In each round every method runs once, in an order that is drawn; then all that they chose, and the best setting that is
known from earlier rounds, is measured by one trial runner, again in a drawn order. The methods: `autoplan.search`;
Optuna's TPE over the same space with the same trial runner; the power-of-two recipe (micro-batches doubled until one is
out of memory, the fastest is taken); accelerate's `find_executable_batch_size`, the Trainer's `auto_find_batch_size`,
Lightning's `BatchSizeFinder` (benchmarks/search_peers.py; all three say which batch size fits, not which is fast);
DeepSpeed's autotuner (benchmarks/search_deepspeed.py), with the global batch as its `max_train_batch_size`.
A library that is not installed is named, with the line that installs it.

The seconds are those of the method alone: for ours from the start of its process to the verified plan, for TPE only
its trials (the space is given to it), for the finders without their imports. Every method has the same memory limit.
What a finder chooses is measured as it would train: its batch size as the global batch, in one piece.

The lines are added to benchmarks/results/search_live.jsonl, one for each method and round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.search.inspection import Means
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.preload import preload_for
from autoplan.planner.search.sampler import make_sampler
from autoplan.planner.search.setup import SearchContext, prepare_search
from autoplan.planner.store.journal import RecordFile
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.units import parse_duration_s, parse_memory_bytes
from benchmarks.replay import ListedCandidates
from benchmarks.search_cases import CASES, GLOBAL_BATCHES, case_spec
from benchmarks.search_live_table import NAMES, Choice, best_known, lines_of, table
from benchmarks.whole_search import Asked, run_search

RESULTS = Path(__file__).parent / "results" / "search_live.jsonl"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
PEERS = {
    "accelerate": ("accelerate",),
    "trainer": ("accelerate",),
    "lightning": ("lightning",),
    "deepspeed": ("deepspeed", "tabulate"),
}
"""By finder: the packages that it needs besides torch and transformers."""

PEER_LIMIT_S = {"deepspeed": 1200.0}
"""Of a peer that takes longer than twice the budget: DeepSpeed builds extensions, and launches each trial anew."""


@dataclass(kw_only=True)
class Live:
    """Objects that the methods share: the case, its limits, the processes."""

    case: str
    budget_s: float
    memory_limit_bytes: int
    zygote: Zygote
    folder: Path
    context: SearchContext | None = None

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, as the user asked for them."""
        return GLOBAL_BATCHES[self.case]

    def runner(self, zygote: Zygote, name: str, global_batch: int | None = None) -> TrialRunner:
        """A runner of trials, at the case's global batch or another one."""
        return TrialRunner(
            zygote,
            case_spec(self.case, self.folder, global_batch=global_batch),
            device="cpu",
            memory_limit_bytes=self.memory_limit_bytes,
            host_limit_bytes=self.memory_limit_bytes,
            directory=self.folder / name,
        )

    def measure(self, config: TrainingConfig, global_batch: int) -> Trial:
        """One trial of what a method chose."""
        return run_trial(self.runner(self.zygote, "chosen", global_batch), config)

    @contextmanager
    def fresh_cache(self, name: str) -> Iterator[dict[str, str]]:
        """Within it, processes find an empty compile cache: a method pays for what it compiles."""
        before = os.environ.get(CACHE)
        os.environ[CACHE] = tempfile.mkdtemp(prefix=f"compiled-{name}-", dir=self.folder)
        try:
            yield {CACHE: os.environ[CACHE]}
        finally:
            del os.environ[CACHE]
            if before is not None:
                os.environ[CACHE] = before

    def space(self) -> SearchContext:
        """The space of a search under these limits; made once."""
        if self.context is None:
            options = SearchOptions(
                spec=case_spec(self.case, self.folder), device="cpu", memory_limit=self.memory_limit_bytes
            )
            self.context = prepare_search(Means(options=options, zygote=self.zygote, observer=SearchObserver()))
        return self.context

    def chosen(self, config: TrainingConfig | None, seconds: float, tried: int, why_not: str | None = None) -> Choice:
        """A choice that keeps the global batch."""
        return Choice(config=config, global_batch=self.global_batch, seconds=seconds, tried=tried, why_not=why_not)


def run_trial(runner: TrialRunner, config: TrainingConfig, *, number: int = 0, deadline_s: float = 300.0) -> Trial:
    """One trial of a configuration."""
    order = TrialOrder(
        number=number,
        purpose="search",
        config=config,
        prediction=None,
        deadline_s=max(1.0, deadline_s),
    )
    return runner.run(order)


# The methods.


def by_autoplan(live: Live, seed: int) -> Choice:
    """A search from nothing to its verified plan, as a user runs it (benchmarks/whole_search.py)."""
    spec = case_spec(live.case, live.folder)
    arguments = ["--device", "cpu", "--global-batch", str(spec.global_batch), "--seed", str(seed)]
    arguments += ["--memory-limit", f"{live.memory_limit_bytes >> 20}MiB"]
    if spec.kind == "config":
        arguments += ["--seq-len", str(spec.sequence_length)]
    line = run_search(Asked(model=spec.reference, budget=f"{live.budget_s:g}s", arguments=tuple(arguments)))
    config = None if line["config"] is None else TrainingConfig.model_validate(line["config"])
    return live.chosen(config, line["seconds"], line["ranked"], line["reason"])


def by_tpe(live: Live, seed: int) -> Choice:
    """Trials until the budget is over, at points that TPE draws; illegal points cost nothing. Takes the fastest."""
    context = live.space()
    model = ListedCandidates(context.candidates)
    sampler = make_sampler("tpe", model, seed=seed)
    trials: list[Trial] = []
    with live.fresh_cache("tpe") as env, Zygote(preload=preload_for(context.spec), env=env) as zygote:
        runner = live.runner(zygote, f"tpe-{seed}")
        began = time.monotonic()
        while (left_s := began + live.budget_s - time.monotonic()) > 0 and model.assess().untried.any():
            config = sampler.draw(left_s)
            trials.append(run_trial(runner, config, number=len(trials), deadline_s=left_s))
            model.observe(trials[-1])
    return fastest(live, trials, time.monotonic() - began)


def by_doubling(live: Live, seed: int) -> Choice:
    """Micro-batches 1, 2, 4, .. of the global batch, until one does not run; takes the fastest."""
    began = time.monotonic()
    trials: list[Trial] = []
    for size in doubled(live.global_batch):
        trials.append(live.measure(TrainingConfig(micro_batch=size), live.global_batch))
        if trials[-1].outcome is not Outcome.OK:
            break
    return fastest(live, trials, time.monotonic() - began)


def doubled(global_batch: int) -> list[int]:
    """The powers of two that divide the global batch."""
    sizes = [2**power for power in range(global_batch.bit_length())]
    return [size for size in sizes if global_batch % size == 0]


def fastest(live: Live, trials: Sequence[Trial], seconds: float) -> Choice:
    """The fastest of some trials."""
    times = {t.config: t.step_time_s.median for t in trials if t.outcome is Outcome.OK and t.step_time_s}
    if not times:
        return live.chosen(None, seconds, len(trials), "no trial ran to its end")
    return live.chosen(min(times, key=lambda config: times[config]), seconds, len(trials))


def by_finder(peer: str) -> Callable[[Live, int], Choice]:
    """A finder of another library, in a process of its own."""

    def find(live: Live, seed: int) -> Choice:
        out = live.folder / f"{peer}-{seed}.json"
        command = [sys.executable, "-m", "benchmarks.search_deepspeed"]
        if peer != "deepspeed":
            command = [sys.executable, "-m", "benchmarks.search_peers", peer]
        command += ["--case", live.case, "--memory-limit", str(live.memory_limit_bytes), "--out", str(out)]
        limit_s = max(60 + 2 * live.budget_s, PEER_LIMIT_S.get(peer, 0.0))
        began = time.monotonic()
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return live.chosen(None, time.monotonic() - began, 0, f"no answer within {limit_s:.0f} s")
        if not out.exists():
            last = (ended.stderr.strip().splitlines() or ["it says nothing"])[-1][:160]
            return live.chosen(None, time.monotonic() - began, 0, f"it ended with status {ended.returncode}: {last}")
        found = json.loads(out.read_text())
        size = found["batch_size"]
        return Choice(
            config=TrainingConfig(micro_batch=found.get("micro_batch", size)),
            global_batch=size,
            seconds=found["seconds"],
            tried=len(found["tried"]),
        )

    return find


METHODS: dict[str, Callable[[Live, int], Choice]] = {
    "autoplan": by_autoplan,
    "tpe": by_tpe,
    "doubling": by_doubling,
    **{peer: by_finder(peer) for peer in PEERS},
}


def missing(method: str) -> str | None:
    """Why a method cannot run here, with the line that installs what it needs; None: it can."""
    packages = [name for name in PEERS.get(method, ()) if importlib.util.find_spec(name) is None]
    if not packages:
        return None
    return f"{' and '.join(packages)} {'is' if len(packages) == 1 else 'are'} not installed: pip install " + " ".join(
        packages
    )


# The rounds.


def run_round(live: Live, methods: Sequence[str], number: int, known: dict[str, Any] | None) -> list[dict[str, Any]]:
    """One round: each method chooses, then what they chose is measured; a line for each method.

    Args:
        live: What is shared.
        methods: Those that can run here.
        number: Of the round; the orders are drawn from it.
        known: The line with the best rate of earlier rounds; its setting is measured too.
    """
    order = list(methods)
    random.Random(f"methods/{number}").shuffle(order)
    choices: dict[str, Choice] = {}
    for method in order:
        choices[method] = choice = METHODS[method](live, number)
        what = choice.config.describe() if choice.config else choice.why_not
        print(f"round {number + 1}, {NAMES[method]}: {choice.seconds:.0f} s, {what}", file=sys.stderr, flush=True)
    settings = {(c.config, c.global_batch) for c in choices.values() if c.config is not None}
    if known is not None:
        settings.add((TrainingConfig.model_validate(known["config"]), known["global_batch"]))
    drawn = sorted(settings, key=str)
    random.Random(f"settings/{number}").shuffle(drawn)
    trials = {setting: live.measure(*setting) for setting in drawn}
    return lines_of(live.case, live.global_batch, number, choices, trials)


def main() -> None:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="vision")
    parser.add_argument("--budget", default="2m", help="of ours and of TPE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-limit", default="1536MiB", help="of every method; a process alone takes some 400 MiB")
    parser.add_argument("--methods", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    file = RecordFile(options.out)
    reasons = {method: missing(method) for method in options.methods}
    if not options.table:
        limit, budget_s = int(parse_memory_bytes(options.memory_limit)), parse_duration_s(options.budget)
        with tempfile.TemporaryDirectory(prefix="search-live-") as folder:
            spec = case_spec(options.case, Path(folder))
            env = {CACHE: f"{folder}/compiled"}
            with Zygote(preload=preload_for(spec), env=env) as zygote:
                live = Live(
                    case=options.case,
                    budget_s=budget_s,
                    memory_limit_bytes=limit,
                    zygote=zygote,
                    folder=Path(folder),
                )
                run = [method for method, reason in reasons.items() if reason is None]
                first = 1 + max((d["round"] for d in file.documents if d["case"] == options.case), default=-1)
                for number in range(first, first + options.rounds):
                    for line in run_round(live, run, number, best_known(file.documents, options.case)):
                        file.append(line | {"budget_s": budget_s, "memory_limit_bytes": limit})
    print(table(file.documents))
    print("".join(f"\n- {NAMES[method]}: {reason}" for method, reason in reasons.items() if reason))
    file.close()


if __name__ == "__main__":
    main()
