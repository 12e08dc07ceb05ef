"""Speed of the best so far against seconds from the start of the process: whole searches, run as a user runs them.

    python -m benchmarks.anytime --main --runs 5 [--also 40m tpe random]       # GPT-2; about 10 minutes a run
    python -m benchmarks.anytime --zoo --against FOLDER                        # 24 workloads, about 3 minutes each
    python -m benchmarks.anytime --brief                                       # at most 20 minutes in all
    python -m benchmarks.anytime --table [--plot FILE]                         # of what was run so far

Each search is a process of its own with no caches and no record. `--main`: `autoplan search --model gpt2` at its
defaults, so many times, the last of them beside a process that keeps a core busy; `--also` adds one with 40 minutes,
and one of TPE and of random with 10. Then all their plans, the plain run, and what was the best so far at 5 minutes run
side by side in fresh processes; each is shown as a share of the fastest of all. `--zoo`: ZOO at 60 s; our plan, that of
the checkout in FOLDER (`git worktree add FOLDER 0785fd9`) and the plain run are measured side by side.

Each search and each round is a line of benchmarks/results/anytime.jsonl, with machine, load and versions. An ended
benchmark goes on where it was: give the same command again. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.planner.store.journal import RecordFile
from autoplan.strategies.config import TrainingConfig
from autoplan.units import parse_duration_s
from benchmarks.anytime_table import (
    MODEL,
    Lines,
    configs_of,
    curve_table,
    drawing,
    in_words,
    key,
    main_table,
    rounds_with,
    zoo_table,
)  # fmt: skip
from benchmarks.whole_search import Asked, measure, run_search, spec_of
from tests.zoo.catalogue import BY_NAME

RESULTS = Path(__file__).parent / "results" / "anytime.jsonl"
MAIN_BUDGET, LONG_BUDGET, ZOO_BUDGET = "10m", "40m", "60s"
ZOO = (
    "gpt2", "llama", "gemma2", "qwen3-moe", "plain-experts", "bert", "deberta", "t5", "whisper", "vit", "swin",
    "convnext", "resnet", "wav2vec2", "unet", "vae", "mamba", "lstm", "gru", "lora-plain", "dpo", "nanogpt", "graph",
    "recommender",
)  # fmt: skip
"""Named before any of them was measured: small ones of every kind, whose searches end in 60 s."""

BRIEF = ("llama", "t5", "resnet", "lstm", "lora-plain", "graph")
BRIEF_LIMIT_S = 19 * 60.0
BRIEF_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A search of the benchmark: which line is its result, and how it is run."""

    form: str
    name: str
    who: str
    asked: Asked

    def is_done(self, lines: Lines) -> bool:
        """Whether its line is there."""
        return any(key(line) == (self.form, self.name, self.who) for line in lines if line["kind"] == "search")


def main_jobs(runs: int, also: Sequence[str]) -> list[Job]:
    """GPT-2 so many times, the last one beside a busy process; then what is asked for beside them."""

    def job(who: str, budget: str = MAIN_BUDGET, *, busy: bool = False, sampler: str | None = None) -> Job:
        arguments = () if sampler is None else ("--sampler", sampler)
        asked = Asked(model=MODEL, budget=budget, busy=busy, arguments=arguments)
        return Job(form="main", name=MODEL, who=who, asked=asked)

    jobs = [job(f"ours {number}") for number in range(1, runs)] + [
        job(f"ours {runs}, beside a busy process", busy=True)
    ]
    for what in also:
        jobs.append(job(f"ours, {what}", what) if what[0].isdigit() else job(what, sampler=what))
    return jobs


def zoo_jobs(names: Sequence[str], against: Path | None, form: str = "zoo") -> list[Job]:
    """Each workload with our code, and with that of the other checkout; who is first is drawn by the name."""
    jobs = []
    for name in names:
        entry = BY_NAME[name]
        fixed = tuple(word for knob, value in entry.fix.items() for word in ("--fix", f"{knob}={value}"))
        mine = Asked(model=entry.reference, budget=ZOO_BUDGET, arguments=fixed)
        both = [Job(form=form, name=name, who="ours", asked=mine)]
        if against is not None:
            theirs = Asked(model=entry.reference, budget=ZOO_BUDGET, arguments=fixed, root=against.resolve())
            both.append(Job(form=form, name=name, who="against", asked=theirs))
        random.Random(name).shuffle(both)
        jobs += both
    return jobs


class Bench:
    """The file of results, and what is still to be run.

    Args:
        path: The file.
        search, side_by_side: What runs searches, and rounds.
    """

    def __init__(
        self,
        path: Path,
        search: Callable[[Asked], dict[str, Any]] = run_search,
        side_by_side: Callable[..., Iterator[dict[str, Any]]] = measure,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = RecordFile(path)
        self._search, self._side_by_side = search, side_by_side
        self.lines: list[dict[str, Any]] = list(self._file.documents)

    def add(self, line: dict[str, Any]) -> None:
        """Puts a line on disk."""
        self._file.append(line)
        self.lines.append(line)

    def run(self, job: Job) -> None:
        """Runs a search that has no line yet."""
        if job.is_done(self.lines):
            return
        line = {"kind": "search", "form": job.form, "name": job.name, "who": job.who}
        self.add(line | self._search(job.asked))
        _say(f"{job.form} {job.name}, {job.who}: {in_words(self.lines[-1])}")

    def measure(self, form: str, name: str, rounds: int) -> None:
        """Runs the rounds that are left of what the searches of a workload chose."""
        searches = [line for line in self.lines if line["kind"] == "search" and key(line)[:2] == (form, name)]
        wanted = configs_of(searches)
        if not wanted:
            return
        known = next(line for line in searches if line["workload"])
        done = len(rounds_with(self.lines, form, name, wanted))
        first = sum(line["kind"] == "round" and (line["form"], line["name"]) == (form, name) for line in self.lines)
        configs = [TrainingConfig.model_validate(config) for config in wanted]
        for line in self._side_by_side(spec_of(known), known["device"], configs, range(first, first + rounds - done)):
            self.add({"kind": "round", "form": form, "name": name} | line)
            _say(f"{form} {name}: round with {len(configs)} configurations, {line['load']}")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def brief(bench: Bench) -> None:
    """One search of GPT-2 and some of the zoo, beside the plain run; nothing begins after BRIEF_LIMIT_S."""
    began = time.monotonic()
    asked = Asked(model=MODEL, budget=MAIN_BUDGET)
    bench.run(Job(form="brief", name=MODEL, who="ours", asked=asked))
    print(curve_table(bench.lines[-1]), flush=True)
    for job in zoo_jobs(BRIEF, None, "brief"):
        most_s = 1.5 * parse_duration_s(ZOO_BUDGET)
        if time.monotonic() - began + most_s > BRIEF_LIMIT_S:
            _say(f"no time left for {job.name}")
            continue
        bench.run(job)
        bench.measure("brief", job.name, BRIEF_ROUNDS)
    print(zoo_table([line for line in bench.lines if line["name"] != MODEL], "brief"))


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--main", action="store_true", help="GPT-2 at the defaults")
    parser.add_argument("--zoo", nargs="*", metavar="WORKLOAD", help="at 60 s; all of ZOO where none is named")
    parser.add_argument("--brief", action="store_true", help="one GPT-2 and six workloads, at most 20 minutes")
    parser.add_argument("--runs", type=int, default=5, help="of --main")
    parser.add_argument("--also", nargs="*", default=[], metavar="WHAT", help=f"{LONG_BUDGET}, tpe, random")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of another revision, for --zoo")
    parser.add_argument("--rounds", type=int, default=3, help="side by side, of each workload")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves of --main there")
    options = parser.parse_args()
    path = options.out
    if options.brief:  # each call is new
        path = path.with_name("anytime-brief.jsonl")
        path.unlink(missing_ok=True)
    bench = Bench(path)
    if options.brief:
        brief(bench)
    if options.main:
        for job in main_jobs(options.runs, options.also):
            bench.run(job)
        bench.measure("main", MODEL, options.rounds)
    if options.zoo is not None:
        for name in options.zoo or ZOO:
            for job in zoo_jobs([name], options.against):
                bench.run(job)
            bench.measure("zoo", name, options.rounds)
    for form, shown in (("main", main_table), ("zoo", zoo_table)):
        if any(line["form"] == form for line in bench.lines):
            print(f"\n{shown(bench.lines)}")
    if options.plot is not None:
        options.plot.write_text(drawing(bench.lines))
    bench.close()


if __name__ == "__main__":
    main()
