"""Pieces of work of a search, in words: the next one while it runs, and where the time went at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoplan.planner.records.baseline import YOURS, run_words
from autoplan.planner.records.trials import Trial, WorkLine, seconds_of
from autoplan.strategies.config import TrainingConfig
from autoplan.units import format_number, format_seconds

if TYPE_CHECKING:
    from autoplan.planner.search.next_work import Work

WORK = {
    "probe": "probing this machine",
    "trace": "tracing the model for ",
    "look": "a look at ",
    "hand setting": "the hand setting, ",
    "pair": "a pair, the best so far beside ",
    "parity": "the parity check of ",
    "claim": "the claim of ",
}
"""Kinds of work, in words that go on with the configuration."""


def work_words(work: Work, own: TrainingConfig | None = None) -> str:
    """`a look at micro_batch=2 (expected gain 4.1 %, about 23 s), rather than ...`; `own` is the user's setting."""
    whose = "" if work.config is None else work.config.describe()
    named = WORK.get(work.kind, f"{work.kind} ")
    if work.kind == "baseline" and work.config is not None:
        named = f"{run_words(work.config, own)}, "
    what = named + (whose or ("what the sampler draws" if work.kind == "look" else ""))
    gains = work.kind in ("look", "pair") and bool(whose)  # what other pieces count as gaining makes no plan faster
    gain = f"expected gain {math.expm1(work.gain) * 100:.1f} %, " if gains else ""
    cost = f"about {format_seconds(work.cost_s)}" if work.cost_s else "it was measured"
    why = f"rather than {work.over}" if work.kind == "look" and work.over else f"because {work.why}"
    return f"{what.rstrip(', ')} ({gain}{cost}), {why}"


def best_words(
    best: Trial | None, plain: Trial | None, unit: str, own: TrainingConfig | None = None, gain: float | None = None
) -> str:
    """`best so far 195 tokens/s, 2.11 times the plain run`, by the looks; `gain`: so many times (`BudgetState`)."""
    if best is None or best.tokens_per_s is None:
        return "nothing measured yet"
    text = f"best so far {format_number(best.tokens_per_s.median)} {unit}/s"
    if plain is None or plain.tokens_per_s is None:
        return text
    whose = run_words(plain.config, own)
    if plain.config == best.config:
        return f"{text}, {whose}"
    return f"{text}, {gain or best.tokens_per_s.median / plain.tokens_per_s.median:.2f} times {whose}"


PIECES = {
    "baseline": ("plain run", "{} plain runs"),
    YOURS: (YOURS, f"{{}} runs of {YOURS}"),
    "probe": ("probes", "probes"),
    "trace": ("trace", "{} traces"),
    "look": ("1 look", "{} looks"),
    "pair": ("1 pair", "{} pairs"),
    "parity": ("parity", "{} parity checks"),
    "claim": ("claim 1 round", "claim {} rounds"),
}
"""Kinds of work in a ledger, as one piece and as several."""


def time_words(ledger: Sequence[WorkLine], own: TrainingConfig | None = None, *, most: int | None = None) -> str | None:
    """`setup 15 s, plain run 47 s, 9 looks 235 s`: where the time went, by kind of work; None: no ledger was kept.

    Args:
        ledger: Of a search.
        own: The setting that the training had, which then is the baseline; None: it is not known.
        most: So many kinds that took the most, and the others together; None: all.
    """
    if not ledger:
        return None
    spent: dict[str, list[float]] = {}
    if ledger[0].kind not in ("imports", "setup"):
        spent["setup"] = [ledger[0].began_s]
    for line, seconds_spent in seconds_of(ledger):
        kind = YOURS if line.kind == "baseline" and line.config is not None and line.config == own else line.kind
        spent.setdefault(kind, []).append(seconds_spent)
    words = []
    if most is not None and len(spent) > most + 1:
        longest = sorted(spent, key=lambda kind: -sum(spent[kind]))[:most]
        rest = sum(sum(seconds) for kind, seconds in spent.items() if kind not in longest)
        spent = {kind: spent[kind] for kind in longest} | {"other": [rest]}
    for kind, seconds in spent.items():
        one, many = PIECES.get(kind, (kind, kind))
        if sum(seconds) >= 0.1:  # a hand setting that the search had tried takes none
            took = f"{sum(seconds):.0f} s" if sum(seconds) >= 1 else f"{sum(seconds):.1f} s"
            words.append(f"{one if len(seconds) == 1 else many.format(len(seconds))} {took}")
    return ", ".join(words) or None


def ledger_end_s(ledger: Sequence[WorkLine]) -> float:
    """Seconds of the budget that were spent when the last piece of work ended; 0: no ledger was kept."""
    return max((line.began_s + line.seconds for line in ledger), default=0.0)


def minutes(seconds: float) -> str:
    """`10 m`, or `45 s`: a time as a budget is given."""
    return f"{seconds / 60:.0f} m" if seconds >= 90 else f"{seconds:.0f} s"
