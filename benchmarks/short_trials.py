"""Short trials: how well they extrapolate, what they cost, and how many more candidates a search measures with them.

    python -m benchmarks.short_trials agreement --case gpt12 [--rounds 3] [--box 4s]
    python -m benchmarks.short_trials search --case gpt12 --budget 10m [--rounds 2]

`agreement` runs a set of configurations whole, cut to 2 blocks and cut to 4, in an order that is drawn for each round.
It prints for each the extrapolated over the whole step time: by the cost model's ratios from 2 blocks, with the level
of the other configurations (leave one out), which is what a search does; and by the straight line through 2 and 4
blocks. Beside it, how far apart whole runs of one configuration are, and the seconds of each kind of trial.

`search` runs the same search with short trials and without, in turn, each from nothing, and prints the candidates that
each measured in a minute of trials (the plain baseline and the hand settings are no candidates), whole and short; and
what each chose, by its own claim.

Both say how busy the machine was. Cases: a GPT of 12 blocks (256 wide, 8,192 tokens in the vocabulary), one of 24
blocks, one of 32 narrow blocks (128 wide, 2,048 tokens), and gpt2, which is the 124M model at 128 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from autoplan.planner.records import Outcome, ShortTrial, Trial
from autoplan.planner.search.extrapolation import Extrapolation
from autoplan.planner.search.options import SearchObserver, SearchOptions, SearchResult
from autoplan.planner.search.preload import preload_for
from autoplan.planner.search.run import run_search
from autoplan.planner.search.setup import SearchContext, prepare_search
from autoplan.planner.search.short_trials import DEPTH, LEAST_BOX_S, Cut
from autoplan.planner.trials.measure import Spread
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.knob_input import parse_knob
from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import parse_duration_s

SEQUENCE_LENGTH, GLOBAL_BATCH = 128, 16
SECOND_DEPTH = 4
BLOCKS = {"gpt12": 12, "gpt24": 24, "narrow32": 32}
NARROW = {"n_embd": 128, "vocab_size": 2048}
"""Of a deep model with little outside its blocks, of which a cut leaves a tenth."""
GPT = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 256,
    "n_head": 4,
    "vocab_size": 8192,
    "n_positions": SEQUENCE_LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIGS: tuple[TrainingConfig, ...] = tuple(
    TrainingConfig.model_validate(knobs)
    for knobs in (
        {"micro_batch": 4},
        {"micro_batch": 16, "optimizer_step": "fused"},
        {"micro_batch": 4, "precision": "bf16"},
        {"micro_batch": 8, "precision": "bf16", "optimizer_step": "fused"},
        {"micro_batch": 8, "loss": "fused", "optimizer_step": "foreach"},
        {"micro_batch": 8, "checkpointing": "full"},
        {"micro_batch": 4, "allocator": "keep", "optimizer_step": "fused"},
        {"micro_batch": 2, "attention": "eager", "checkpointing": "every_2"},
    )
)


def case_spec(case: str, folder: Path) -> WorkloadSpec:
    """What is trained in a case."""
    if case == "gpt2":
        return make_spec(model="gpt2", sequence_length=SEQUENCE_LENGTH, global_batch=GLOBAL_BATCH)
    path = folder / case / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(GPT | (NARROW if case == "narrow32" else {}) | {"n_layer": BLOCKS[case]}))
    return make_spec(model=str(path), sequence_length=SEQUENCE_LENGTH, global_batch=GLOBAL_BATCH)


# Agreement.


@dataclass(kw_only=True)
class Measured:
    """The trials of one configuration, by the number of blocks; None: the whole model."""

    config: TrainingConfig
    trials: dict[int | None, list[Trial]] = field(default_factory=dict)

    def step_s(self, depth: int | None) -> float:
        """The median over the rounds."""
        return median(t.step_time_s.median for t in self.trials.get(depth, ()) if t.step_time_s is not None)

    def spent_s(self, depth: int | None) -> float:
        """Seconds of a trial: the median over the rounds."""
        return median(t.seconds_spent for t in self.trials.get(depth, ()))

    @property
    def complete(self) -> bool:
        """Whether all its trials ran."""
        runs = [trial for trials in self.trials.values() for trial in trials]
        return all(t.outcome is Outcome.OK and t.step_time_s is not None for t in runs)


def measure_agreement(case: str, rounds: int, box_s: float, seed: int) -> dict[str, Any]:
    """The document of `agreement`."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        spec = case_spec(case, Path(scratch))
        with Zygote(preload=preload_for(spec)) as zygote:
            context = prepare_search(SearchOptions(spec=spec, device="cpu"), zygote, SearchObserver())
            cut = Cut(whole=context.estimator, cut=context.estimator.at_depth(DEPTH))
            runner = TrialRunner(
                zygote,
                context.spec,
                device="cpu",
                memory_limit_bytes=context.memory_limit_bytes,
                host_limit_bytes=context.host_limit_bytes,
                directory=Path(scratch) / "trials",
            )
            found = [Measured(config=config) for config in CONFIGS]
            order = [(one, depth) for one in found for depth in (None, DEPTH, SECOND_DEPTH)]
            for number in range(rounds):
                rng.shuffle(order)
                for place, (one, depth) in enumerate(order):
                    trial = _run(runner, context, number * len(order) + place, one.config, depth, box_s)
                    one.trials.setdefault(depth, []).append(trial)
                    _say(number, one.config, depth, trial)
                if number == 0:  # a search knows its whole trials, the baseline first
                    for one in found[:1]:
                        context.estimator.observe(one.trials[None][0])
            return {"case": case, "blocks": cut.blocks, "box_s": box_s, "rounds": rounds, **_scores(found, cut)}


def _run(
    runner: TrialRunner, context: SearchContext, number: int, config: TrainingConfig, depth: int | None, box_s: float
) -> Trial:
    """One trial; of a cut model with as much of the time box as it has of the step."""
    share = 1.0
    if depth is not None:
        one = context.estimator.at_depth(depth).table([config]).step_time_s[0]
        share = float(one / context.estimator.table([config]).step_time_s[0])
    order = TrialOrder(
        number=number,
        purpose="search" if depth is None else "short",
        config=config,
        prediction=None,
        time_box_s=max(LEAST_BOX_S, share * box_s),
        deadline_s=600.0,
        depth=depth,
    )
    return runner.run(order)


def _say(number: int, config: TrainingConfig, depth: int | None, trial: Trial) -> None:
    what = "whole" if depth is None else f"{depth} blocks"
    step = trial.outcome.value if trial.step_time_s is None else f"{trial.step_time_s.median:.3f} s a step"
    sys.stderr.write(f"round {number}, {what}: {config.describe()}: {step}, took {trial.seconds_spent:.1f} s\n")


def _scores(found: Sequence[Measured], cut: Cut) -> dict[str, Any]:
    """Ratios of extrapolated and whole step times, and seconds."""
    good = [one for one in found if one.complete]
    by_ratios = [math.log(_by_ratios(one, cut) / one.step_s(None)) for one in good]
    rows = []
    for index, one in enumerate(good):
        others = [place for place in range(len(good)) if place != index]
        known = Extrapolation(
            configs=tuple(good[place].config for place in others),
            errors=tuple(-by_ratios[place] for place in others),
            run_sd=Spread().of_ratio()[0],
            checks=(),
        )
        two, four, whole = one.step_s(DEPTH), one.step_s(SECOND_DEPTH), one.step_s(None)
        line = two + (cut.blocks - DEPTH) / (SECOND_DEPTH - DEPTH) * (four - two)
        wholes = [math.log(t.step_time_s.median) for t in one.trials[None] if t.step_time_s is not None]
        rows.append(
            {
                "config": one.config.describe(),
                "whole_s": whole,
                "by_ratios": math.exp(by_ratios[index]),
                "with_level": math.exp(by_ratios[index] + known.level(one.config)),
                "by_line": line / whole if line > 0 else 0.0,
                "apart": math.exp(max(wholes) - min(wholes)),
                "seconds": {str(depth or "whole"): one.spent_s(depth) for depth in (None, DEPTH, SECOND_DEPTH)},
            }
        )
    return {
        "rows": rows,
        "left_out": [one.config.describe() for one in found if not one.complete],
        "with_level": _spread([row["with_level"] for row in rows]),
        "by_line": _spread([row["by_line"] for row in rows]),
        "whole_runs_apart": median(row["apart"] for row in rows) if rows else None,
        "seconds_whole_over_short": median(r["seconds"]["whole"] / r["seconds"][str(DEPTH)] for r in rows)
        if rows
        else None,
        "disturbed": sum(t.disturbed is not None for one in good for runs in one.trials.values() for t in runs),
    }


def _by_ratios(one: Measured, cut: Cut) -> float:
    """The step time of the whole model by the cost model's ratios: the median over the rounds."""
    micro, optimizer = cut.ratios(one.config)
    times = []
    for trial in one.trials[DEPTH]:
        short = ShortTrial(trial=trial, depth=DEPTH, blocks=cut.blocks, micro_ratio=micro, optimizer_ratio=optimizer)
        if short.whole_s is not None:
            times.append(short.whole_s)
    return median(times)


def _spread(ratios: Sequence[float]) -> dict[str, float] | None:
    """Median, extremes, and the root mean square of the logarithms."""
    good = [ratio for ratio in ratios if ratio > 0]
    if not good:
        return None
    square = math.sqrt(mean(math.log(ratio) ** 2 for ratio in good))
    return {"median": median(good), "low": min(good), "high": max(good), "log_rms": square}


# Searches.


class Notes(SearchObserver):
    """Prints what a search has to say."""

    def on_note(self, text: str) -> None:
        sys.stderr.write(f"  note: {text}\n")


def measure_searches(case: str, budget_s: float, rounds: int, seed: int, fix: dict[str, Any]) -> dict[str, Any]:
    """The document of `search`."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        kinds = ["auto", "off"]
        rng.shuffle(kinds)
        for kind in kinds:
            with tempfile.TemporaryDirectory() as scratch:
                spec = case_spec(case, Path(scratch))
                began = time.monotonic()
                result = run_search(
                    SearchOptions(
                        spec=spec,
                        budget=budget_s,
                        device="cpu",
                        fix=fix,
                        store=Path(scratch) / "store",
                        short_trials=kind,  # type: ignore[arg-type]
                    ),
                    observer=Notes(),
                )
                rows.append(_row(number, kind, result, time.monotonic() - began))
                sys.stderr.write(json.dumps(rows[-1]) + "\n")
    rates = {k: [row["candidates_per_minute"] for row in rows if row["short_trials"] == k] for k in ("auto", "off")}
    return {"case": case, "budget_s": budget_s, "rows": rows, "candidates_per_minute": rates}


def _row(number: int, kind: str, result: SearchResult, seconds: float) -> dict[str, Any]:
    """What one search measured: a candidate counts once, whole or short; repeats of any are no candidates."""
    whole = [t for t in result.trials if t.purpose == "search" and t.step_time_s is not None]
    shorts = [] if result.short_trials is None else [s.trial for s in result.short_trials.trials]
    anchors = {t.config for t in result.trials if t.purpose in ("baseline", "reference")}
    timed = {t.config for t in (*whole, *shorts) if t.step_time_s is not None} - anchors
    spent_s = sum(t.seconds_spent for t in (*(t for t in result.trials if t.purpose == "search"), *shorts))
    plan = result.plan
    return {
        "round": number,
        "short_trials": kind,
        "status": result.status,
        "candidates": len(timed),
        "whole": len(whole),
        "short": len(shorts),
        "seconds_of_them": spent_s,
        "candidates_per_minute": 60 * len(timed) / spent_s if spent_s else 0.0,
        "agreement": None if result.short_trials is None else result.short_trials.describe(),
        "plan_s": None if plan is None else plan.measurement.step_time_s.median,
        "speedup": None if plan is None else plan.speedup.median,
        "config": None if plan is None else plan.config.describe(),
        "seconds": seconds,
    }


def main() -> None:
    """Measures and prints one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("agreement", "search"))
    parser.add_argument("--case", choices=(*BLOCKS, "gpt2"), default="gpt12")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--box", default="4s", help="time box of a whole trial (agreement)")
    parser.add_argument("--budget", default="10m", help="of each search")
    parser.add_argument("--fix", action="append", default=[], metavar="KNOB=VALUE", help="as autoplan search has it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    before = os.getloadavg()[0]
    if given.what == "agreement":
        document = measure_agreement(given.case, given.rounds, parse_duration_s(given.box), given.seed)
    else:
        fix = dict(parse_knob(text) for text in given.fix)
        document = measure_searches(given.case, parse_duration_s(given.budget), given.rounds, given.seed, fix)
    document |= {"cores": len(os.sched_getaffinity(0)), "load_average": [before, os.getloadavg()[0]]}
    text = json.dumps(document, indent=2)
    sys.stdout.write(text + "\n")
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
