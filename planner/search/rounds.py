"""The rounds after the trials: those that choose among the finalists, and those that the plan's speed-up rests on.

In: a `Session`. Out: trials of the purposes "finalist" and "claim" in its store. In a round each configuration runs
once, in a fresh process; the order is drawn for each round, so that none always runs first. The choice and the claim
have different runs: the best of several is the one that chance favoured too, and its own runs would say too much.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

from autoplan.planner.records import Outcome, Purpose, Trial
from autoplan.planner.search.claim import ROUNDS_AGAIN, rounds_needed
from autoplan.planner.search.objective import finalists as pick_finalists
from autoplan.planner.search.selection import (
    CandidateRuns,
    collect_runs,
    is_late,
    is_tie,
    measured_spread,
    shared_rounds,
)
from autoplan.planner.search.session import Session
from autoplan.strategies.config import TrainingConfig

MOST_CHOICE_ROUNDS = 2
"""How often each finalist is measured before the choice."""

DEADLINE_FACTOR, DEADLINE_LEAST_S = 4.0, 15.0
"""A repeat is ended after so many times the longest good run of its configuration, and these seconds at least."""

REPEAT_SHARE = 0.05
"""At most this share of the time spent goes into repeats of the reference, which measure the spread between runs."""

MOST_REPEATS = 6
"""More repeats would not make the intervals much narrower (Student's t at 6 degrees of freedom is 2.45, at most 1.96
in the end)."""


# The choice.


def run_finalists(session: Session) -> None:
    """Measures the best few again, in turn, where the trials leave open which of them is the fastest."""
    finalists = pick_finalists(session.objective, eligible(session), session.run_spread)
    if len(finalists) < 2:
        return
    session.observer.on_phase("finalists", f"{len(finalists)} configurations that may be the fastest")
    while True:
        finalists = with_new_runs(session, finalists)
        if len(finalists) < 2:
            return
        rounds_done = len(shared_rounds(finalists))
        if rounds_done >= MOST_CHOICE_ROUNDS or (rounds_done and _is_decided(session, finalists)):
            return
        while len(finalists) > 1 and not _affordable(session, finalists, reserve_s=session.claim_reserve_s):
            # They are about equally fast: to measure the others more often is worth more.
            finalists.remove(max(finalists, key=lambda candidate: session.trial_cost.repeat_s(candidate.first)))
        if len(finalists) < 2:
            session.note(
                f"the finalists were measured in {rounds_done} round(s); the budget had no time for another round"
                if rounds_done
                else "the budget had no time to measure the finalists again: the choice is based on single trials"
            )
            return
        if not _run_round(session, "finalist", [candidate.first for candidate in finalists]):
            return


def _is_decided(session: Session, finalists: Sequence[CandidateRuns]) -> bool:
    """Whether the fastest is told apart from each other one."""
    spread = session.run_spread
    fastest = min(finalists, key=lambda candidate: candidate.step_time.median)
    return not any(is_tie(other, fastest, spread) for other in finalists if other is not fastest)


def eligible(session: Session) -> list[CandidateRuns]:
    """The configurations that may become the plan, fastest first: those that ran and keep what the user fixed."""
    return [runs for runs in collect_runs(session.store.trials) if session.options.allows(runs.config)]


def with_new_runs(session: Session, finalists: Sequence[CandidateRuns]) -> list[CandidateRuns]:
    """The finalists with all their runs up to now, without those that failed in a round."""
    by_config = {runs.config: runs for runs in collect_runs(session.store.trials)}
    return [by_config[finalist.config] for finalist in finalists if finalist.config in by_config]


# The claim.


def run_claim(session: Session, winner: TrainingConfig) -> bool:
    """Measures the winner, the baseline and the hand setting side by side; returns False if the winner failed in it.

    How many rounds there are is fixed before the first: by the spread between runs, and by the gain as the choice saw
    it. Rounds in which a run was disturbed are made again, within limits.
    """
    wanted = _claim_rounds(session, winner)
    while True:
        by_config = {runs.config: runs for runs in collect_runs(session.store.trials)}
        if winner not in by_config:
            return False
        compared = [by_config[config] for config in (winner, *compared_with(session, winner)) if config in by_config]
        if len(compared) < 2:
            return True
        quiet, made = _count_rounds(by_config[winner], compared)
        if quiet >= wanted or made - quiet > ROUNDS_AGAIN:
            return True
        firsts = [runs.first for runs in compared]
        if not _affordable_s(session, firsts):
            if len(compared) > 2 and not by_config[winner].claim_runs:
                session.hand_left_out = True
                continue
            session.note("the budget had no time for all rounds of the plan against the baseline")
            return True
        session.observer.on_phase("claim", f"round {made + 1}")
        if not _run_round(session, "claim", firsts):
            return True


def compared_with(session: Session, winner: TrainingConfig) -> list[TrainingConfig]:
    """What the winner is measured beside, each once: the baseline and the hand setting, where it is neither."""
    configs = [] if session.baseline is None else [session.baseline.config]
    hand = session.hand
    if hand is not None and not session.hand_left_out:
        configs.append(hand.config)
    return [config for config in dict.fromkeys(configs) if config != winner]


def _claim_rounds(session: Session, winner: TrainingConfig) -> int:
    """How many rounds, by what was known before the first of them."""
    before = [trial for trial in session.store.trials if trial.purpose != "claim"]
    by_config = {runs.config: runs for runs in collect_runs(before)}
    base = session.baseline
    gain = 0.0
    if base is not None and base.step_time_s is not None and winner in by_config:
        gain = math.log(base.step_time_s.median / by_config[winner].step_time.median)
    return rounds_needed(measured_spread(before, session.taken_over.assumed_spread), gain)


def _count_rounds(winner: CandidateRuns, compared: Sequence[CandidateRuns]) -> tuple[int, int]:
    """(rounds in which nothing was disturbed, rounds) that have a run of each."""
    quiet = made = 0
    for run in winner.claim_runs:
        side_by_side = [other for runs in compared for other in runs.claim_runs if other.round == run.round]
        if len(side_by_side) == len(compared):
            made += 1
            quiet += not any(other.disturbed for other in side_by_side)
    return quiet, made


def _next_round(session: Session, purpose: Purpose) -> int:
    """A number that no such round has yet, over all runs of the search."""
    return 1 + max((t.round or 0 for t in session.store.trials if t.purpose == purpose), default=-1)


def _run_round(session: Session, purpose: Literal["finalist", "claim"], firsts: Sequence[Trial]) -> bool:
    """One run of each, in an order that is drawn; returns False if one was ended from outside: no more is run.

    A round that was cut short is not completed later: its runs would not be side by side. A run that the budget ended,
    and one of the claim that is out of time, is ended from outside too: the configuration ran before.
    """
    order, number = list(firsts), _next_round(session, purpose)
    random.Random(f"{session.options.seed}/{purpose}/{number}").shuffle(order)
    reserve_s = session.parity_reserve_s if purpose == "finalist" else 0.0
    for first in order:
        trial = _measure_again(session, purpose, first, reserve_s, number)
        if trial.outcome is Outcome.INTERRUPTED or is_late(trial):
            session.note(f"the rounds ended early: {trial.reason}")
            return False
    return True


def _measure_again(
    session: Session, purpose: Purpose, first: Trial, reserve_s: float, round: int | None = None
) -> Trial:
    """Runs a configuration that ran before; ended at the budget's end, with the reserve, or when it takes too long."""
    good = [t for t in session.store.trials if t.config == first.config and t.outcome is Outcome.OK]
    longest_s = max((trial.seconds_spent for trial in good), default=first.seconds_spent)
    own_s = max(DEADLINE_FACTOR * longest_s, DEADLINE_LEAST_S)
    budget_s = session.hard_deadline_s(reserve_s)
    return session.measure(
        purpose,
        first.config,
        deadline_s=min(budget_s, own_s),
        deadline_of_budget=budget_s < own_s,
        method=first.method,
        round=round,
    )


def _affordable(session: Session, candidates: Sequence[CandidateRuns], *, reserve_s: float) -> bool:
    costs = [session.trial_cost.repeat_s(candidate.first) for candidate in candidates]
    return sum(costs) <= session.left_s - session.parity_reserve_s - reserve_s


def _affordable_s(session: Session, firsts: Sequence[Trial]) -> bool:
    return sum(map(session.trial_cost.repeat_s, firsts)) <= session.left_s


# The spread between runs.


def repeat_if_due(session: Session) -> None:
    """Runs the reference configuration again, now and then: its runs are this device's spread between runs."""
    reference = _reference(session)
    if reference is None:
        return
    repeats = [trial for trial in session.store.trials if trial.purpose == "repeat"]
    cost_s = session.trial_cost.repeat_s(reference)
    spent_s = sum(trial.seconds_spent for trial in repeats) + cost_s
    due = spent_s <= REPEAT_SHARE * session.store.spent_s and len(repeats) < MOST_REPEATS
    if due and cost_s <= session.search_left_s:
        _measure_again(session, "repeat", reference, session.parity_reserve_s)


def _reference(session: Session) -> Trial | None:
    """What is repeated: what was repeated before, else the cheapest of the baseline and the hand settings."""
    good = [trial for trial in session.store.trials if trial.outcome is Outcome.OK and trial.step_time_s is not None]
    repeated = next((trial.config for trial in good if trial.purpose == "repeat"), None)
    firsts = [trial for trial in good if trial.purpose in ("baseline", "reference") and trial.disturbed is None]
    same = [trial for trial in firsts if trial.config == repeated]
    return min(same or firsts, key=session.trial_cost.repeat_s, default=None)
