"""Decides which configuration won.

In: the recorded trials. Out: configurations with their runs, and their rank. The same record always gives the same
answer. How much faster the winner is, is decided by other runs (claim.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoplan.planner.records.trials import RECOMPILED, Interval, Outcome, Trial
from autoplan.planner.trials.measure import ASSUMED, SLICED, Spread, core_spread, pool_runs, ratio_interval
from autoplan.strategies.config import TrainingConfig

TIE = 0.02
"""Two configurations tie if their medians differ by less than this share and the interval of their ratio contains 1."""

MEMORY_MATTERS = 0.05
"""Of a tie, the configuration with less peak memory wins if the difference is more than this share."""

MOST_CONTENDERS = 2
"""So many configurations besides the leader are run side by side with it."""

MOST_PAIRS = 2
"""So often is a configuration run side by side with the leader."""

ENOUGH_PAIRS = 2
"""With this many runs side by side the first look no longer counts: it ran at another time."""

BESIDE_SD = 0.05
"""Standard deviation of the logarithm of the step time between looks beside others, since their load is never quite the
same. It counts twice, of the ratio of two looks, where they alone say that a configuration is behind. Assumed."""

LASTING_LOAD = 3
"""After so many disturbed trials in a row the load is taken to last."""


@dataclass(frozen=True, kw_only=True)
class CandidateRuns:
    """A configuration and all good runs of it."""

    config: TrainingConfig
    first: Trial  # its first good trial
    finalist_runs: tuple[Trial, ...] = ()  # its interleaved runs, in the order of the rounds
    claim_runs: tuple[Trial, ...] = ()  # what its speed-up is calculated from; they have no part in the choice
    counted: tuple[Trial, ...] = ()  # the runs that count, where a comparison has picked them (claim.py)
    weight: int = 1  # a second counts so many times: where cost is looked for, once for each rank
    believed_s: float | None = None
    """The step time by what all trials say of it (the surrogate), where it has a single look: of several looks the best
    is the luckiest too. None: that of its runs."""

    @property
    def runs(self) -> tuple[Trial, ...]:
        """The runs that count: the interleaved ones if there are ENOUGH_PAIRS, else the look too, if it is alike."""
        if self.counted:
            return self.counted
        pairs = self.finalist_runs
        enough = len(pairs) >= (1 if self.look_is_unlike else ENOUGH_PAIRS)
        return pairs if enough else (self.first, *pairs)

    @property
    def look_is_unlike(self) -> bool:
        """Whether its look and its further runs were made under unlike conditions, so that they do not compare.

        A look ran beside others; or further runs were in slices, where each slice begins with cold caches: steps of a
        small transformer took 4 to 7 % longer there (twelve runs of each).
        """
        return self.first.beside > 0 or any(run.pauses for run in (*self.finalist_runs, *self.counted))

    @property
    def reported(self) -> CandidateRuns:
        """With the undisturbed runs of the claim as those that count, if it has any: what a plan reports."""
        quiet = tuple(run for run in self.claim_runs if not run.disturbed)
        return replace(self, counted=quiet) if quiet else self

    @property
    def as_look(self) -> CandidateRuns:
        """The same, or with its look alone where the other runs do not compare with other configurations' looks."""
        shown = self.reported
        return replace(self, counted=(self.first,)) if shown.look_is_unlike else shown

    @property
    def step_times(self) -> list[Interval]:
        """The step time of each run that counts, times the weight."""
        return [run.step_time_s.times(self.weight) for run in self.runs if run.step_time_s is not None]

    @cached_property
    def step_time(self) -> Interval:
        """The runs that count, pooled."""
        return pool_runs(self.step_times, mean=in_slices(self))

    @property
    def look_s(self) -> float:
        """Its median step time, as it compares with those that have no pairs: its look's, if that is unlike them."""
        look = self.first.step_time_s
        return self.weight * look.median if self.look_is_unlike and look is not None else self.step_time.median

    @property
    def single_s(self) -> float:
        """The step time by which it is ranked among those that have no pairs in common."""
        return self.step_time.median if self.believed_s is None else self.weight * self.believed_s

    @property
    def peak_memory_bytes(self) -> int:
        """The highest peak of all its runs."""
        return max(run.peak_memory_bytes or 0 for run in (self.first, *self.finalist_runs, *self.claim_runs))


def collect_runs(trials: Iterable[Trial]) -> list[CandidateRuns]:
    """The configurations that ran, with their runs, fastest first.

    A configuration of which a further run failed is left out: it failed once in a fresh process, so it may fail again.
    A pair of which a run was disturbed is void; under a load that lasts all are, and they count. One that was cut short
    is void too: its run was beside none.
    """
    trials = without_void(trials)
    pairs = [trial for trial in trials if trial.purpose == "finalist" and trial.outcome is Outcome.OK]
    disturbed = {trial.round for trial in pairs if trial.disturbed}
    made = Counter(trial.round for trial in pairs if trial.step_time_s is not None)
    void = {number for number in made if made[number] < 2} | (set() if has_lasting_load(trials) else disturbed)
    firsts: dict[TrainingConfig, Trial] = {}
    repeats: dict[tuple[str, TrainingConfig], list[Trial]] = {}
    failed: set[TrainingConfig] = set()
    for trial in trials:
        if trial.is_repeat:
            if trial.outcome is Outcome.OK and trial.step_time_s is not None:
                if trial.purpose == "finalist" and trial.round in void:
                    continue
                repeats.setdefault((trial.purpose, trial.config), []).append(trial)
            elif trial.outcome is not Outcome.INTERRUPTED and not is_late(trial):
                failed.add(trial.config)
        elif trial.outcome is Outcome.OK and trial.step_time_s is not None:
            before = firsts.get(trial.config)
            if before is None or (before.disturbed and not trial.disturbed):
                firsts[trial.config] = trial
    candidates = [
        CandidateRuns(
            config=config,
            first=first,
            finalist_runs=tuple(repeats.get(("finalist", config), ())),
            claim_runs=tuple(repeats.get(("claim", config), ())),
        )
        for config, first in firsts.items()
        if config not in failed
    ]
    return sorted(candidates, key=lambda candidate: (candidate.step_time.median, candidate.first.number))


def without_void(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """The trials without runs of the baseline that other work disturbed grossly: again, one took half the time."""
    trials = tuple(trials)
    plain = [(trial, trial.step_time_s.median) for trial in trials if trial.purpose == "baseline" and trial.step_time_s]
    void = [
        trial
        for trial, seconds in plain
        if trial.disturbed is not None
        and any(2 * other_s < seconds for other, other_s in plain if other.config == trial.config)
    ]
    return tuple(trial for trial in trials if trial not in void) if void else trials


def has_lasting_load(trials: Sequence[Trial]) -> bool:
    """Whether other work has disturbed the last LASTING_LOAD trials that were measured, all of them."""
    last = [trial for trial in trials if trial.window is not None][-LASTING_LOAD:]
    return len(last) == LASTING_LOAD and all(trial.disturbed for trial in last)


def is_under_load(trials: Sequence[Trial]) -> bool:
    """Whether other work has disturbed each of the last trials that were measured, LASTING_LOAD of them at most."""
    last = [trial for trial in trials if trial.window is not None][-LASTING_LOAD:]
    return bool(last) and all(is_beside_work(trial) for trial in last)


def is_beside_work(trial: Trial) -> bool:
    """Whether other work disturbed a trial; one that compiled again disturbed itself."""
    return trial.disturbed is not None and not trial.disturbed.startswith(RECOMPILED)


def is_late(trial: Trial) -> bool:
    """Whether a run was ended by the clock, which says nothing against a configuration that ran before.

    Any run by the budget's end; one of the claim by its own deadline too, in a slow moment of the machine.
    """
    return trial.outcome is Outcome.TIMEOUT and (trial.budget_ended or trial.purpose == "claim")


def shared_rounds(candidates: Sequence[CandidateRuns]) -> set[int | None]:
    """The rounds of the choice in which each of the candidates ran."""
    return set.intersection(*({run.round for run in candidate.finalist_runs} for candidate in candidates))


def match_rounds(a: CandidateRuns, b: CandidateRuns) -> tuple[CandidateRuns, CandidateRuns]:
    """Both with the interleaved runs of the rounds that both have, so that their i-th runs were made side by side."""
    shared = shared_rounds((a, b))

    def matched(runs: CandidateRuns) -> CandidateRuns:
        return replace(runs, finalist_runs=tuple(run for run in runs.finalist_runs if run.round in shared))

    return matched(a), matched(b)


def measured_spread(trials: Iterable[Trial]) -> Spread:
    """How much runs of one configuration differ on this device, from all that ran again undisturbed.

    The runs of the claim are left out: they are what this figure is used for; and those in slices, which differ less.
    How fast the cores were counts from all.
    """
    trials = tuple(trials)
    runs: dict[tuple[TrainingConfig, str | None, int], list[float]] = {}
    for trial in trials:
        counts = trial.outcome is Outcome.OK and trial.purpose != "claim" and not (trial.disturbed or trial.pauses)
        if counts and (step := trial.step_time_s) is not None:
            runs.setdefault((trial.config, trial.method, trial.beside), []).append(step.median)
    return Spread.of(runs.values(), core_spread(trial.window for trial in trials))


def in_slices(*candidates: CandidateRuns) -> bool:
    """Whether all their runs that count shared the machine in slices with the other one of their round."""
    return all(run.pauses for candidate in candidates for run in candidate.runs)


def speed_ratio(
    candidate: CandidateRuns, reference: CandidateRuns, spread: Spread = ASSUMED, *, chosen_from: int = 1
) -> Interval:
    """How many times faster a candidate is than the reference, by the runs that count; of pairs, by shared rounds.

    `spread` is between runs that did not share the machine in slices; `chosen_from` is as in `ratio_interval`.
    """
    candidate, reference = match_rounds(candidate, reference)
    sliced = in_slices(candidate, reference)
    return ratio_interval(
        candidate.step_times,
        reference.step_times,
        SLICED if sliced else spread,
        chosen_from=chosen_from,
        sliced=sliced,
    )


def contenders(
    candidates: Sequence[CandidateRuns], leader: CandidateRuns, spread: Spread = ASSUMED
) -> list[CandidateRuns]:
    """The candidates that may be as fast as the leader, fastest first, without it.

    Left out is who a bound puts behind the leader: its level is divided by the number of candidates (Bonferroni), since
    each of them is compared, and each may be looked at more than once.
    """
    near = [one for one in candidates if one.config != leader.config and not is_behind(one, leader, spread, candidates)]
    return sorted(near, key=lambda one: one.look_s)[:MOST_CONTENDERS]


def is_behind(candidate: CandidateRuns, leader: CandidateRuns, spread: Spread, among: Sequence[CandidateRuns]) -> bool:
    """Whether the runs show that a candidate is slower than the leader."""
    ratio = speed_ratio(candidate, leader, spread, chosen_from=len(among) * MOST_PAIRS)
    if shared_rounds((candidate, leader)):
        return ratio.high < 1.0
    beside = math.sqrt(2) * BESIDE_SD if candidate.first.beside else 0.0
    disturbed = max(0.0, candidate.first.disturbed_sd - leader.first.disturbed_sd)  # a load on both compares
    half = math.hypot(math.log(ratio.high / ratio.median), 2 * beside, 2 * disturbed)
    return ratio.median * math.exp(half) < 1.0


def is_decided(leader: CandidateRuns, other: CandidateRuns, spread: Spread) -> bool:
    """Whether their runs side by side tell the two apart."""
    fast, slow = sorted((leader, other), key=lambda runs: runs.step_time.median)
    return not is_tie(slow, fast, spread)


def rank(candidates: Sequence[CandidateRuns], spread: Spread = ASSUMED) -> list[CandidateRuns]:
    """The candidates, best first: the fastest; of a tie, the one with less memory, then the one with fewer knobs set.

    Candidates that ran side by side come before the others, because a single look says less: a leader needs a pair that
    it won. Before them come those that are ahead of each of them by more than runs differ (`spread`).
    """
    again = [candidate for candidate in candidates if candidate.finalist_runs]
    once = [candidate for candidate in candidates if not candidate.finalist_runs]
    ahead = [one for one in once if all(is_behind(other, one, spread, candidates) for other in again)]
    rest = [candidate for candidate in once if candidate not in ahead]
    ordered = _by_speed(ahead, spread) + _by_speed(again, spread)
    return ordered + sorted(rest, key=lambda candidate: candidate.single_s)


def _by_speed(candidates: Sequence[CandidateRuns], spread: Spread) -> list[CandidateRuns]:
    pool, ordered = list(candidates), []
    most = max(pool, key=lambda candidate: len(candidate.finalist_runs), default=None)

    def seconds(candidate: CandidateRuns) -> float:
        """Its step time, by the rounds that it shares with the one that has most of them."""
        assert most is not None
        if not shared_rounds((candidate, most)):
            return candidate.single_s
        return most.step_time.median / speed_ratio(candidate, most).median

    while pool:
        fastest = min(pool, key=seconds)
        near_s = (1 + TIE) * seconds(fastest)
        tied = [c for c in pool if c is fastest or (is_tie(c, fastest, spread) and seconds(c) <= near_s)]
        least_bytes = min(candidate.peak_memory_bytes for candidate in tied)
        small = [c for c in tied if c.peak_memory_bytes <= least_bytes * (1 + MEMORY_MATTERS)]
        chosen = min(small, key=lambda c: (len(c.config.knobs_off_default()), seconds(c), c.first.number))
        ordered.append(chosen)
        pool.remove(chosen)
    return ordered


def is_tie(candidate: CandidateRuns, fastest: CandidateRuns, spread: Spread = ASSUMED) -> bool:
    """Whether the measurements do not show which of the two is faster."""
    ratio = speed_ratio(candidate, fastest, spread)
    if ratio.median * (1 + TIE) < 1.0:
        return False
    return ratio.low <= 1.0 <= ratio.high
