"""How much faster the plan is, and whether that may be claimed: by runs that had no part in the choice of the plan.

In: the recorded trials, the winner, what it is compared with. Out: a `Comparison`. The same record always gives the
same answer, and `benchmarks/false_wins.py` calls the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist, fmean

from autoplan.planner.records.trials import Claim, ClaimRounds, Interval, Outcome, Trial
from autoplan.planner.search.selection import CandidateRuns, in_slices, match_rounds, speed_ratio
from autoplan.planner.trials.measure import SLICED, Spread, half_width

LEAST_ROUNDS, MOST_ROUNDS = 2, 10
"""Rounds of the claim. With one round a disturbed run could not be told from a slow configuration. The most are for
machines whose runs differ by 6 % and more, where six rounds do not show a gain of 15 %."""

SHOWN_GAIN = 0.25
"""The logarithm of a gain (28 %) whose claim the search keeps time for. Chosen: of GPT-2 on two cores searches found
1.28 to 1.9 times. Less is shown where runs differ little, or where further rounds are worth their time."""

ROUNDS_WITHOUT_HOPE = 3
"""Rounds where even the most would leave an interval wider than the gain: no claim is in sight, and a few rounds give
the interval that is shown."""

ROUNDS_AGAIN = 2
"""So many rounds in which a run was disturbed are made again."""

SLOWER = "it was measured slower"
NOT_TOLD_APART = "no win is claimed: the runs do not tell the two apart"
NO_ROUNDS = "no win is claimed: it rests on the runs that chose the plan, since no rounds were made after the choice"
FEW_ROUNDS = "no win is claimed: the time ended after one round, and a claim has two at the least"
"""Why there is no claim: the interval lies below 1, or contains it; the best of many looks is lucky; with one round a
disturbed run could not be told from a slow configuration."""

INTERVAL_SHARE = 0.25
"""Half the interval of a claim should be at most so much of the gain that the choice believed in. With a half, a small
transformer on shared cores, whose looks differed by 12 %, was believed to gain 31 %; two rounds did not show the 9 %
that it gained, and 24 of 60 seconds were left."""

WANTED_HALF_WIDTH = 0.02
"""A claim needs no narrower interval than plus and minus this share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A configuration against a reference."""

    candidate: CandidateRuns  # with the runs that were compared (`counted`)
    reference: CandidateRuns
    speedup: Interval  # tokens/s of the candidate over the reference's
    claim: Claim


def rounds_needed(spread: Spread, log_gain: float, sd: float = 0.0) -> int:
    """How many rounds show a gain of this logarithm (`sd`: its standard deviation), by INTERVAL_SHARE.

    By what is known before the first of them, so that their number does not depend on how they come out. (In slices the
    interval is that of a mean, narrower than is reckoned here: rounds there differ by more on some machines.)
    """
    wanted = max(abs(log_gain) * INTERVAL_SHARE, WANTED_HALF_WIDTH)
    if half_width(spread, MOST_ROUNDS) > max(abs(log_gain) + sd, WANTED_HALF_WIDTH):
        return ROUNDS_WITHOUT_HOPE
    for rounds in range(LEAST_ROUNDS, MOST_ROUNDS):
        if half_width(spread, rounds) <= wanted:
            return rounds
    return MOST_ROUNDS


@lru_cache(maxsize=256)
def rounds_kept(spread: Spread) -> int:
    """For how many rounds time is kept while the search goes on: the fewest that show a gain of SHOWN_GAIN.

    Two where runs differ by up to 10 % and in slices, five at 20 %: there two rounds show nothing, whatever was found.
    """
    rounds = range(LEAST_ROUNDS, MOST_ROUNDS)
    return next((r for r in rounds if half_width(spread, r, mean=spread == SLICED) <= SHOWN_GAIN), MOST_ROUNDS)


def expected_to_show(rounds: int, gain: float, sd: float = 0.0) -> float:
    """The expected logarithm of the speed-up that rounds in slices show; what they do not show is no gain.

    Args:
        rounds: How many.
        gain: What is believed of the logarithm of the speed-up.
        sd: How well that is known: one that may be twice as large is worth rounds, though it would not be as it is.
    """
    deviation, _ = SLICED.of_ratio()
    half = half_width(SLICED, rounds, squares=(rounds - 1) * deviation**2, mean=True)  # they differ as runs do
    measured = NormalDist(sigma=deviation / math.sqrt(rounds))
    gains = [max(0.0, gain + z * sd) for z in _QUANTILES]
    return fmean(one * measured.cdf(one - half) for one in gains)


_QUANTILES = tuple(NormalDist().inv_cdf((place + 0.5) / 9) for place in range(9))


def claim_progress(trials: Iterable[Trial], began: ClaimRounds) -> tuple[int, int]:
    """(rounds in which nothing was disturbed, rounds) of a claim that have a run of both."""
    good = [trial for trial in trials if trial.purpose == "claim" and trial.outcome is Outcome.OK]
    mine, plain = ([run for run in good if run.config == config] for config in (began.config, began.reference))
    both = _rounds(mine, plain, began.first_round)
    return sum(not (a.disturbed or b.disturbed) for a, b in both), len(both)


def until_next(trials: Iterable[Trial], claims: Iterable[ClaimRounds], claim: ClaimRounds) -> list[Trial]:
    """The trials without the rounds of later claims than this one."""
    ends = min((one.first_round for one in claims if one.first_round > claim.first_round), default=math.inf)
    return [trial for trial in trials if trial.purpose != "claim" or (trial.round or 0) < ends]


def is_claim_over(trials: Iterable[Trial], began: ClaimRounds) -> bool:
    """Whether a claim has its rounds; those in which a run was disturbed are made again, within limits."""
    quiet, made = claim_progress(trials, began)
    return quiet >= began.rounds or made - quiet > ROUNDS_AGAIN


def compare(
    candidate: CandidateRuns,
    reference: CandidateRuns,
    spread: Spread,
    *,
    chosen_from: int,
    claim: ClaimRounds | None = None,
    paces: tuple[float, float] = (1.0, 1.0),
) -> Comparison:
    """The speed-up of a candidate over a reference, and whether it may be claimed.

    Args:
        candidate, reference: With their runs.
        spread: Between runs on this device, `measured_spread`, where they did not share it in slices.
        chosen_from: How many configurations were measured. Without rounds of the claim the interval is that of the
            best of so many looks, and nothing is claimed.
        claim: The claim whose rounds count; None: there is none. Whoever stops as soon as a claim holds has had several
            chances: the level of the k-th is divided by k (k + 1) / 2, so that all of them together are never wrong
            more often than twice the level of one.
        paces: How many times as long a step took in the look of each for its core; side by side it is equal.
    """
    if candidate.config == reference.config:
        return _same(candidate, reference, spread)
    pairs = [] if claim is None else _rounds(candidate.claim_runs, reference.claim_runs, claim.first_round)
    if pairs and claim is not None:
        quiet = [pair for pair in pairs if not any(run.disturbed for run in pair)]
        enough = len(quiet) >= min(LEAST_ROUNDS, len(pairs))
        used = quiet if enough else pairs
        disturbed = None if enough else next(run.disturbed for pair in pairs for run in pair if run.disturbed)
        candidate = replace(candidate, counted=tuple(pair[0] for pair in used))
        reference = replace(reference, counted=tuple(pair[1] for pair in used))
        rounds, chosen_from = len(used), claim.number * (claim.number + 1) // 2
    else:
        candidate, reference = match_rounds(candidate, reference)
        runs = (*candidate.runs, *reference.runs)
        disturbed = next((run.disturbed for run in runs if run.disturbed), None)
        rounds = len(candidate.finalist_runs)
    speedup = speed_ratio(candidate, reference, spread, chosen_from=max(1, chosen_from))
    if not rounds:
        speedup = speedup.times(paces[0] / paces[1])
    spread = SLICED if in_slices(candidate, reference) else spread
    why_not = None
    if disturbed is not None:
        why_not = f"disturbed: not a claim ({disturbed} while it was measured)"
        speedup = speedup.model_copy(update={"low": min(speedup.low, 1.0), "high": max(speedup.high, 1.0)})
    elif speedup.high < 1.0:
        why_not = SLOWER
    elif speedup.low <= 1.0:
        why_not = NOT_TOLD_APART
    elif len(pairs) < LEAST_ROUNDS:
        why_not = FEW_ROUNDS if pairs else NO_ROUNDS
    return Comparison(
        candidate=candidate,
        reference=reference,
        speedup=speedup,
        claim=Claim(
            claimed=why_not is None,
            why_not=why_not,
            rounds=rounds,
            chosen_from=chosen_from,
            spread=spread.sd,
            spread_repeats=spread.freedom,
            trials=tuple(sorted(run.number for run in (*candidate.runs, *reference.runs))),
        ),
    )


def is_no_gain(comparison: Comparison) -> bool:
    """True if the rounds of a claim, undisturbed, show no gain, or if the runs that were compared were slower.

    Disturbed rounds, and runs of the choice, do not show that a gain is within noise.
    """
    within_noise = comparison.claim.why_not in (SLOWER, NOT_TOLD_APART) and bool(comparison.candidate.counted)
    return within_noise or comparison.speedup.median < 1.0


def _same(candidate: CandidateRuns, reference: CandidateRuns, spread: Spread) -> Comparison:
    """A configuration against itself: the plan is the reference."""
    runs = tuple(run for run in candidate.claim_runs if not run.disturbed) or candidate.runs
    candidate = replace(candidate, counted=runs)
    one = Interval(median=1.0, low=1.0, high=1.0, samples=len(runs))
    disturbed = next((run.disturbed for run in runs if run.disturbed), None)
    why_not = "nothing faster was found"
    if disturbed is not None:
        why_not += f"; disturbed: others may be faster ({disturbed} while it was measured)"
    claim = Claim(claimed=False, why_not=why_not, rounds=len(runs), spread=spread.sd, spread_repeats=spread.freedom)
    return Comparison(candidate=candidate, reference=candidate, speedup=one, claim=claim)


def _rounds(candidate: Sequence[Trial], reference: Sequence[Trial], first_round: int) -> list[tuple[Trial, Trial]]:
    """The runs that were made side by side, by the number of their round."""
    others = {run.round: run for run in reference}
    return [(run, others[run.round]) for run in candidate if run.round in others and (run.round or 0) >= first_round]
