"""Which configuration won, by the recorded trials alone: the same record always gives the same answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoplan.planner.records import Interval, Outcome, Trial
from autoplan.planner.trials.measure import pool_runs, ratio_interval
from autoplan.strategies.config import TrainingConfig

TIE = 0.02
"""Configurations whose medians differ by less than this share, and whose ratio's interval holds 1, are a tie."""

MEMORY_MATTERS = 0.05
"""A tie goes to the one with less peak memory if the difference is more than this share."""

CONTENDER_MARGIN = 0.05
"""Measured again are those whose low bound is within this share of the best one's high bound."""

MAX_CONTENDERS = 3

ROUNDS_ALONE = 2
"""Interleaved runs stand alone from this many on; a single one may be hit by anything, and counts beside the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateRuns:
    """A configuration with all that was measured of it.

    Attributes:
        config: The configuration.
        first: Its first good trial.
        finalist_runs: Its interleaved runs, in order of the rounds.
    """

    config: TrainingConfig
    first: Trial
    finalist_runs: tuple[Trial, ...] = ()

    @property
    def runs(self) -> tuple[Trial, ...]:
        """The runs that count: the interleaved ones where there are two or more, else the first trial and the one."""
        return self.finalist_runs if len(self.finalist_runs) >= ROUNDS_ALONE else (self.first, *self.finalist_runs)

    @property
    def step_times(self) -> list[Interval]:
        """The step time of each run that counts."""
        return [run.step_time_s for run in self.runs if run.step_time_s is not None]

    @property
    def step_time(self) -> Interval:
        """All runs that count together."""
        return pool_runs(self.step_times)

    @property
    def peak_memory_bytes(self) -> int:
        """The highest peak of all its runs."""
        return max(run.peak_memory_bytes or 0 for run in (self.first, *self.finalist_runs))


def enter(trials: Iterable[Trial]) -> list[CandidateRuns]:
    """The configurations that ran, with their runs, fastest first.

    One whose finalist run failed is out: what failed once in a fresh process is no plan.
    """
    firsts: dict[TrainingConfig, Trial] = {}
    repeats: dict[TrainingConfig, list[Trial]] = {}
    out: set[TrainingConfig] = set()
    for trial in trials:
        if trial.purpose == "finalist":
            if trial.outcome is Outcome.OK:
                repeats.setdefault(trial.config, []).append(trial)
            elif trial.outcome is not Outcome.INTERRUPTED:
                out.add(trial.config)
        elif trial.outcome is Outcome.OK and trial.step_time_s is not None:
            firsts.setdefault(trial.config, trial)
    entries = [
        CandidateRuns(config=config, first=first, finalist_runs=tuple(repeats.get(config, ())))
        for config, first in firsts.items()
        if config not in out
    ]
    return sorted(entries, key=lambda entry: (entry.step_time.median, entry.first.number))


def match_rounds(a: CandidateRuns, b: CandidateRuns) -> tuple[CandidateRuns, CandidateRuns]:
    """Both entries with as many interleaved runs as both have, so that their i-th runs were made side by side."""
    rounds = min(len(a.finalist_runs), len(b.finalist_runs))
    return replace(a, finalist_runs=a.finalist_runs[:rounds]), replace(b, finalist_runs=b.finalist_runs[:rounds])


def speed_ratio(entry: CandidateRuns, reference: CandidateRuns) -> Interval:
    """How many times faster an entry is than the reference, by the runs that count of both."""
    entry, reference = match_rounds(entry, reference)
    return ratio_interval(entry.step_times, reference.step_times)


def contenders(entries: Sequence[CandidateRuns]) -> list[CandidateRuns]:
    """Those that may be the fastest: the best by median, and whoever's interval comes near enough."""
    if not entries:
        return []
    best = entries[0].step_time
    near = [e for e in entries if e.step_time.low <= best.high * (1 + CONTENDER_MARGIN)]
    return near[:MAX_CONTENDERS]


def rank(entries: Sequence[CandidateRuns]) -> list[CandidateRuns]:
    """Entries in the order in which they are the plan: the fastest, but a tie goes to less memory, then to fewer knobs.

    Those that were measured again come first: an interleaved run decides over a single one.
    """
    pool = [entry for entry in entries if entry.finalist_runs] or list(entries)
    rest = [entry for entry in entries if entry not in pool]
    ordered: list[CandidateRuns] = []
    while pool:
        fastest = min(pool, key=lambda entry: entry.step_time.median)
        tied = [entry for entry in pool if entry is fastest or is_tie(entry, fastest)]
        least = min(entry.peak_memory_bytes for entry in tied)
        light = [entry for entry in tied if entry.peak_memory_bytes <= least * (1 + MEMORY_MATTERS)]
        chosen = min(light, key=lambda e: (len(e.config.knobs_off_default()), e.step_time.median, e.first.number))
        ordered.append(chosen)
        pool.remove(chosen)
    return ordered + sorted(rest, key=lambda entry: entry.step_time.median)


def is_tie(entry: CandidateRuns, fastest: CandidateRuns) -> bool:
    """Whether two configurations cannot be told apart."""
    if entry.step_time.median > fastest.step_time.median * (1 + TIE):
        return False
    ratio = speed_ratio(entry, fastest)
    return ratio.low <= 1.0 <= ratio.high


def best_trial(trials: Iterable[Trial]) -> Trial | None:
    """The fastest good trial so far, repeats not counted."""
    good = [t for t in trials if t.outcome is Outcome.OK and t.step_time_s is not None and t.purpose != "finalist"]
    return min(good, key=lambda t: t.step_time_s.median, default=None)  # type: ignore[union-attr]
