"""The lines that benchmarks/search_live.py keeps of its rounds, and the table that is made of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.planner.records.trials import Outcome, Trial
from autoplan.strategies.config import TrainingConfig

NAMES = {
    "autoplan": "autoplan.search",
    "tpe": "Optuna TPE, same trials",
    "doubling": "power-of-two recipe",
    "accelerate": "accelerate find_executable_batch_size",
    "trainer": "Trainer auto_find_batch_size",
    "lightning": "Lightning BatchSizeFinder",
    "deepspeed": "DeepSpeed autotuning",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The choice of a method; `config` is None if it gave no answer, and `why_not` says why."""

    config: TrainingConfig | None
    global_batch: int
    seconds: float
    tried: int
    why_not: str | None = None


def lines_of(
    case: str,
    asked: int,
    number: int,
    choices: Mapping[str, Choice],
    trials: Mapping[tuple[TrainingConfig, int], Trial],
) -> list[dict[str, Any]]:
    """The lines of a round. `share` is the rate of the choice, of the highest that was measured in this round."""
    rates = {s: t.tokens_per_s.median for s, t in trials.items() if t.outcome is Outcome.OK and t.tokens_per_s}
    best = max(rates.values(), default=math.nan)
    lines = []
    for method, choice in choices.items():
        trial = None if choice.config is None else trials[choice.config, choice.global_batch]
        rate = None if choice.config is None else rates.get((choice.config, choice.global_batch))
        lines.append(
            {
                "case": case,
                "round": number,
                "method": method,
                "config": None
                if choice.config is None
                else choice.config.model_dump(mode="json", exclude_defaults=True),
                "global_batch": choice.global_batch,
                "asked_global_batch": asked,
                "seconds": round(choice.seconds, 1),
                "tried": choice.tried,
                "rate": rate,
                "share": None if rate is None else round(rate / best, 4),
                "disturbed": None if trial is None else trial.disturbed,
                "why_not": choice.why_not or (None if trial is None or rate is not None else trial.reason),
            }
        )
    return lines


def best_known(lines: Sequence[dict[str, Any]], case: str) -> dict[str, Any] | None:
    """The line with the highest rate of a case."""
    measured = [line for line in lines if line["case"] == case and line["rate"] is not None]
    return max(measured, key=lambda line: line["rate"], default=None)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each case and method: medians over its rounds, in Markdown."""
    rows = [
        "| case | method | rounds | share of the best known | seconds | configurations tried | global batch | chose |"
    ]
    rows.append("|" + "---|" * 8)
    for case, method in dict.fromkeys((line["case"], line["method"]) for line in lines):
        of = [line for line in lines if (line["case"], line["method"]) == (case, method)]
        shares = [line["share"] for line in of if line["share"] is not None]
        answers = {(line["global_batch"], line["asked_global_batch"]) for line in of if line["config"] is not None}
        batch = ", ".join("kept" if a == b else f"{b} -> {a}" for a, b in sorted(answers)) or "-"
        last = of[-1]
        chose = TrainingConfig.model_validate(last["config"]).describe() if last["config"] else "nothing"
        if last["why_not"]:
            chose += f" ({' '.join(last['why_not'].split())[:120]})"
        share = "-"
        if shares:
            share = (
                f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%}; {len(shares)} of {len(of)})"
            )
        seconds, tried = (statistics.median(line[name] for line in of) for name in ("seconds", "tried"))
        rows.append(
            f"| {case} | {NAMES[method]} | {len(of)} | {share} | {seconds:.0f} | {tried:g} | {batch} | {chose} |"
        )
    return "\n".join(rows)
