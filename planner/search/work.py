"""Does the pieces of work that `next_work` names, one function for each kind.

In: a `Session` and a `Work`. Out: trials, pairs, rounds and verdicts in its store.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from autoplan.errors import DidNotRunError, NoFeasiblePlanError, WorkloadError
from autoplan.planner.records.baseline import YOURS, is_plain_run
from autoplan.planner.records.trials import ClaimRounds, Outcome, Parity, Prediction, Purpose, Trial
from autoplan.planner.search.claim import claim_progress
from autoplan.planner.search.next_work import BESIDE, Work
from autoplan.planner.search.objective import best_trial, to_beat
from autoplan.planner.search.references import plain_configs, what_would_fit
from autoplan.planner.search.selection import is_late
from autoplan.planner.search.session import BudgetOver, Session, leave_out_failed
from autoplan.planner.search.setup import probe_more, trace_more
from autoplan.planner.search.side_by_side import Begun, SideBySide
from autoplan.planner.search.state import NEAR_THE_FRONT, check_s, claim_size, find_leader, needs_s
from autoplan.planner.search.trial_cost import SLOW_MODE_SHARE, own_length_s, takes_own_shapes
from autoplan.planner.trials.runner import WORKLOAD, TrialLimits, load_compiler
from autoplan.processes import TaskFailedError
from autoplan.strategies.config import SLOW_COMPILE_MODES, TrainingConfig

MOST_LOST_IN_A_ROW = 2
"""After this many trials, one after the other, that something outside ended each time, the search ends."""

LOOK_FACTOR, LOOK_MORE_S = 3.0, 20.0
"""A look is ended after so many times what was expected, and these seconds: what takes so long is behind, or would cost
more than it tells."""

GROSS, GROSS_AGAIN, GROSS_SHARE = 2.0, 3, 0.5
"""A disturbed baseline is measured again if it takes so many times the high end of what was predicted, at most so
often, and while it takes no larger share of what is left: once in 24 searches of the zoo a stall made it 30 times as
slow, and nothing else fitted into the budget any more."""

CHECK_FACTOR, CHECK_MORE_S = 1.5, 5.0
"""A parity check with what a verdict can do without has so many times what was expected, and these seconds, but none of
the fewest rounds of the claim (one of a compiled GPT-2 took 200 s of 10 minutes). `autoplan verify` makes the rest."""

CHECK_LIMIT_FACTOR, CHECK_LIMIT_MORE_S, CHECK_LIMIT_SHARE = 8.0, 120.0, 0.1
"""A check is ended after so many times what was expected, and these seconds; or after this share of the budget, if that
is more: one that hangs leaves the rest. Chosen."""

DEADLINE_FACTOR, DEADLINE_LEAST_S = 4.0, 15.0
"""A further run is ended after so many times the longest good run of its configuration, and these seconds at least."""


def drawn(session: Session, work: Work) -> Work:
    """The piece of work with its configuration: of a look that `--sampler` draws, the one that it draws now."""
    if work.kind != "look" or work.config is not None:
        return work
    assert session.sampler is not None, "a look that is drawn by nobody has its configuration"
    with_claim = work.cost_s + work.needs_s <= session.left_s
    return replace(work, config=session.sampler.draw(session.left_s - (work.needs_s if with_claim else work.check_s)))


def do(session: Session, work: Work) -> None:
    """Does one piece of work; its line in the ledger is written whatever happens."""
    with session.entry(work):
        _BY_KIND[work.kind](session, work)


# The baseline.


def run_baseline(session: Session, work: Work) -> None:
    """Measures the user's own setting; where that is not known or does not run here, the plain fp32 run.

    If that runs out of memory with smaller micro-batches, then with what saves memory.

    Raises:
        WorkloadError: the workload itself cannot be used.
        DidNotRunError: something outside ended it each time.
        BudgetOver: the budget ended before it was measured.
        NoFeasiblePlanError: none of them runs, and what would fit.
    """
    own = session.own_config
    for config in plain_configs(session):
        session.observer.on_phase("baseline", f"{session.run_words(config)}, {config.describe()}")
        deadline_s = session.hard_deadline_s(0.0)
        made = [trial for trial in session.baseline_trials if trial.config == config]
        if any(not trial.budget_ended for trial in made):
            continue  # it would end as before
        if any(trial.seconds_spent >= deadline_s for trial in made):
            break  # the budget ended it, and there is no more time now
        expected = session.predict(config)
        trial = session.measure("baseline", config, deadline_s=deadline_s, deadline_of_budget=True)
        if trial.outcome is Outcome.OK:
            _repeat_gross(session, trial, expected)
            _say_what_stands_in(session, config)
            return
        if trial.did_not_run:
            raise DidNotRunError(f"{session.run_words(config)}, with which all others are compared: {trial.reason}")
        may_be_technique = config == own and not is_plain_run(config)  # the workload itself may be sound
        if trial.outcome is Outcome.CRASHED and trial.detail == WORKLOAD and not may_be_technique:
            raise WorkloadError(
                trial.reason or "the workload cannot be used", hint="Repair the workload, then search again."
            )
        too_large = trial.outcome in (Outcome.OUT_OF_MEMORY, Outcome.TIMEOUT)
        if trial.budget_ended or not (too_large or may_be_technique):
            break
    last = session.baseline_trials[-1]
    if last.budget_ended:
        raise BudgetOver("the baseline", needed_s=2 * (session.store.spent_s + session.model.cost_s(last.config)))
    hint = "Its trial in the record has its last lines. If it fails at other settings too, the workload is broken."
    if last.outcome is Outcome.OUT_OF_MEMORY:
        hint = what_would_fit(session.context)
    tried = "the plain run does not run here" if own is None else f"neither {YOURS} nor the plain run runs here"
    raise NoFeasiblePlanError(
        f"{tried}, nor with what saves memory, so that nothing can be compared with it; the last, "
        f"{last.config.describe()}: {last.outcome.value}: {last.reason}",
        hint=hint,
    )


def _say_what_stands_in(session: Session, config: TrainingConfig) -> None:
    """A note where the baseline is not the one that was wanted first: what did not run, and what stands in."""
    own = session.own_config
    if own is not None and config != own:
        failed = next(trial for trial in session.baseline_trials if trial.config == own)
        session.note(
            f"{YOURS} ({own.describe()}) does not run here ({failed.outcome.value}: {failed.reason}); all others are "
            f"compared with {session.run_words(config)}, {config.describe()}"
        )
    elif not session.is_given(config):
        session.note(f"the plain run does not fit; all others are compared with {config.describe()}")


def _repeat_gross(session: Session, trial: Trial, expected: Prediction) -> None:
    """Measures the baseline again while a stall lasts: all else would be priced by it."""
    for number in range(GROSS_AGAIN):
        step = trial.step_time_s
        gross = trial.disturbed is not None and step is not None and step.median > GROSS * expected.step_time_high_s
        if not gross or trial.seconds_spent > GROSS_SHARE * session.left_s:
            break
        if not number:
            whose = session.run_words(trial.config)
            session.note(f"other work slowed {whose} down, far beyond what was expected: it ran again")
        trial = session.measure("baseline", trial.config, deadline_s=1.5 * trial.seconds_spent)
        session.forget_void()


# Looks.


PURPOSES: dict[str, Purpose] = {"look": "search", "hand setting": "reference"}


def run_look(session: Session, work: Work) -> None:
    """A look, the hand setting's too: does it fit, and may it be faster than the leader?"""
    config = _config_of(work)
    if work.kind == "hand setting":
        if session.has_verdict(config):
            return  # the search has tried it
        session.observer.on_phase("hand setting", config.describe())
    _refuse_lost(session)
    session.measure(PURPOSES[work.kind], config, **look_limits(session, config))


def _refuse_lost(session: Session) -> None:
    if session.lost_in_a_row >= MOST_LOST_IN_A_ROW:
        raise DidNotRunError(f"{MOST_LOST_IN_A_ROW} trials, one after the other; the last: {session.did_not_run[-1]}")


def look_limits(session: Session, config: TrainingConfig) -> TrialLimits:
    """When a look at a configuration that begins now is ended."""
    expected_s = session.model.cost_s(config)
    leader = find_leader(session)
    after_s = max(needs_s(session, config), 0.0 if leader is None else needs_s(session, leader.config))
    if expected_s + after_s > session.left_s:  # there is no room for the claim
        unproved = [leader.config] if leader is not None and session.known_parity(leader.config) is None else []
        after_s = max(check_s(session, one) for one in (config, *unproved))
    budget_s, own_s = session.hard_deadline_s(after_s), LOOK_FACTOR * expected_s + LOOK_MORE_S
    if config.compile_mode in SLOW_COMPILE_MODES:
        own_s = min(own_s, SLOW_MODE_SHARE * session.budget_s)
    firsts = (runs.first for runs in session.eligible)  # none that failed its check
    paced = (trial.at_pace(session.model.pace / session.model.pace_of(trial)) for trial in firsts)
    best = best_trial(paced, session.objective)
    beaten = to_beat(session.objective, best, config, session.run_spread, session.trials_done)
    return {
        "deadline_s": min(budget_s, own_s),
        "deadline_of_budget": budget_s < own_s,
        "to_beat": beaten if session.side is None else session.side.slower(beaten),
    }


# Looks on several parts of the machine at once.


def take_turn(session: Session, work: Work) -> bool:
    """Starts a piece that may run beside others, or waits for one that runs; False: this piece runs alone now.

    What is best is next: if that runs alone, no other look is started before it, and one part after the other is idle.
    """
    side = session.side
    if side is None or (work.kind == "hand setting" and session.has_verdict(_config_of(work))):
        return False
    if work.kind in BESIDE and side.fits_a_part(work.config):
        _begin_look(session, side, work)
        return True
    if side.begun:
        await_look(session, side)
        return True
    side.rest()
    return False


def await_look(session: Session, side: SideBySide) -> None:
    """Waits until one of the looks that run has ended."""
    begun, trial = side.wait(session.plain_config)
    session.set_taken(side.keys)
    _end_look(session, begun, trial)


def _begin_look(session: Session, side: SideBySide, work: Work) -> None:
    _refuse_lost(session)
    config = _config_of(work)
    session.observer.on_work(work, session.shown_best, session.budget())
    order = session.begin_trial(PURPOSES[work.kind], config, **look_limits(session, config))
    side.begin(work, order, session.store.spent_s)
    session.set_taken(side.keys)


def _end_look(session: Session, begun: Begun, trial: Trial) -> None:
    try:
        session.end_trial(trial)
    finally:
        session.write_line(begun.work, begun.began_s, begun.part)


def keep_ended(session: Session, side: SideBySide) -> None:
    """Ends all looks, where the search is ended; those that had come to their end are kept."""
    for begun, trial in side.close():
        _end_look(session, begun, trial)


def _config_of(work: Work) -> TrainingConfig:
    assert work.config is not None, "a look has a configuration"
    return work.config


# Runs side by side.


def run_pair(session: Session, work: Work) -> None:
    """The leader and a configuration that may be as fast, once each in fresh processes, in an order that is drawn."""
    leader = find_leader(session)
    assert leader is not None, "a pair is one with the leader"
    other = next((runs for runs in session.eligible if runs.config == work.config), None)
    if other is None:
        return
    session.observer.on_phase("pair", f"{other.config.describe()} beside the leader")
    whole = _run_round(session, "finalist", [leader.first, other.first], needs_s(session, leader.config))
    if not whole or any(trial.disturbed for trial in session.store.trials[-2:]):
        session.unpaired.add(other.config)


def run_claim_round(session: Session, work: Work) -> None:
    """One round of the plan's claim: the leader and the baseline. How many there are is fixed before the first."""
    leader, plain = find_leader(session), session.baseline
    assert leader is not None and plain is not None
    began = session.claim_rounds(leader.config)
    if began is None:
        began = ClaimRounds(
            number=1 + len(session.store.claims),
            config=leader.config,
            reference=plain.config,
            first_round=_next_round(session, "claim"),
            rounds=claim_size(session, leader),
            budget_s=session.whole_budget_s,
            max_trials=session.options.max_trials,
        )
        session.store.add(began)
    quiet, _ = claim_progress(session.store.trials, began)
    session.observer.on_phase("claim", f"round {quiet + 1} of {began.rounds}")
    complete = _run_round(session, "claim", [leader.first, plain], 0.0)
    if not complete or session.first_run(plain.config) is None:  # no round would be complete
        session.ended_claims.add(began.number)


def _next_round(session: Session, purpose: Purpose) -> int:
    """A number that no such round has yet, over all runs of the search."""
    return 1 + max((t.round or 0 for t in session.store.trials if t.purpose == purpose), default=-1)


def _run_round(
    session: Session, purpose: Literal["finalist", "claim"], firsts: Sequence[Trial], after_s: float
) -> bool:
    """One run of each; returns False if one was ended from outside: no more is run.

    A round that was cut short is not completed later: its runs would not be side by side. A run that the budget ended,
    and one of the claim that is out of time, is ended from outside too: the configuration ran before.
    """
    order, number = list(firsts), _next_round(session, purpose)
    random.Random(f"{session.options.seed}/{purpose}/{number}").shuffle(order)

    def limits(first: Trial, part: float = 1.0) -> TrialLimits:
        good = [t for t in session.store.trials if t.config == first.config and t.outcome is Outcome.OK]
        longest_s = max((trial.seconds_spent for trial in good), default=first.seconds_spent)
        own_s, budget_s = max(DEADLINE_FACTOR * longest_s, DEADLINE_LEAST_S), part * session.hard_deadline_s(after_s)
        return {
            "deadline_s": min(budget_s, own_s),
            "deadline_of_budget": budget_s < own_s,
            "method": first.method,
            "round": number,
        }

    if session.in_slices(*firsts):
        made = session.measure_round(purpose, order, [limits(first, 1 / len(order)) for first in order])
        if made is not None:
            if not made:
                session.note("the runs side by side ended early: by the clock, or from outside")
            return bool(made)
    for first in order:
        trial = session.measure(purpose, first.config, **limits(first))
        if trial.outcome is Outcome.INTERRUPTED or is_late(trial):
            session.note(f"the runs side by side ended early: {trial.reason}")
            return False
    return True


# Parity.


def run_check(session: Session, work: Work) -> None:
    """The parity check of the leader. What does not come to its end says nothing, and leads no further in this run."""
    config = _config_of(work)
    session.observer.on_phase("parity", config.describe())
    parity = _check(session, config, whole=not work.over)
    if parity is not None and parity.passed:
        return
    session.model.set_back(config)
    if parity is None:
        session.unchecked.add(config)
        return
    what = "fails parity" if parity.finished else "its parity check did not come to its end"
    why = "; ".join(parity.failures) or parity.note
    session.note(f"{config.describe()} was the fastest so far, but {what}: {why}")
    leave_out_failed(session.model, session.context, session.store)


def _check_time_s(session: Session, config: TrainingConfig, whole: bool) -> float:
    """Seconds of a check in which the parts that a verdict can do without have to end.

    `whole`: no look waits for it to end, so that the pass at the workload's own length is expected too.
    """
    whole_s = expected_s = check_s(session, config)
    if whole:
        whole_s += session.model.pace * own_length_s(session.trial_cost, session.parity_cost, config)
    claim_s = max(0.0, needs_s(session, config) - expected_s)
    return max(expected_s, min(CHECK_FACTOR * whole_s + CHECK_MORE_S, session.left_s - claim_s))


def _check(session: Session, config: TrainingConfig, *, whole: bool) -> Parity | None:
    """The verdict on a configuration, put on disk; None: the clock ended its check, or something outside each time.

    `whole`: with the pass at the workload's own length, if the time allows.

    Raises:
        DidNotRunError: the plain reference did not run, without which nothing can be checked.
    """
    from autoplan.planner.parity.check import check_parity
    from autoplan.planner.parity.compare import CandidateDidNotRunError, where_ended

    trials, cost, spec = session.trial_cost, session.parity_cost, session.context.spec
    longest_s = CHECK_LIMIT_FACTOR * check_s(session, config) + CHECK_LIMIT_MORE_S
    longest_s, left_s = max(longest_s, CHECK_LIMIT_SHARE * session.budget_s), session.hard_deadline_s(0.0)
    number = len(list((session.store.folder / "trials").glob("parity*")))
    directory: Path = session.store.folder / "trials" / f"parity{number:02d}"
    directory.mkdir(parents=True, exist_ok=True)
    load_compiler(session.zygote, config)
    try:
        parity = check_parity(
            session.zygote,
            spec,
            config,
            plain=None if session.plain_config == session.own_config else session.plain_config,
            device=session.context.device,
            directory=directory,
            deadline_s=max(1.0, min(longest_s, left_s)),
            memory_limit_bytes=session.context.host_limit_bytes,
            on_attempt=lambda report: session.add_attempt("parity", report, config=config),
            time_s=None if spec.is_step else _check_time_s(session, config, whole),
            sample_s=session.model.pace * cost.sample_s,
            cache_dir=session.store.folder / "parity",
            own_shapes=not spec.is_step and trials.is_warm(config) and takes_own_shapes(trials, cost, config),
        )
    except TaskFailedError as error:  # out of time, which says nothing about the configuration
        what = f"the parity check of {config.describe()} ({where_ended(error.report)})"
        session.note(f"{what} did not end in its time; there is no verdict on it")
        if longest_s < left_s:
            session.hung.add(config)
        return None
    except CandidateDidNotRunError as error:
        session.did_not_run.append(f"parity check of {config.describe()}: {error.message}")
        session.note(
            f"{config.describe()} was the fastest left; it was not checked and is not the plan: {error.message}. "
            "The same search, called again, checks it"
        )
        return None
    finally:
        if session.left_s < 0:
            session.note(f"the parity check of {config.describe()} ended {-session.left_s:.1f} s past the budget")
    session.store.add_parity(config, parity)
    return parity


def sharpen(session: Session, work: Work) -> None:
    """Probes the machine or traces variants, for what the next candidates' predictions wait for."""
    if work.kind == "probe":
        session.take_context(probe_more(session.context))
    elif work.config is not None:
        near = session.model.ranking(session.left_s)[:NEAR_THE_FRONT]
        session.take_context(trace_more(session.context, session.context.variants(work.config, *near)))


_BY_KIND: dict[str, Callable[[Session, Work], None]] = {
    "baseline": run_baseline,
    "probe": sharpen,
    "trace": sharpen,
    "look": run_look,
    "hand setting": run_look,
    "pair": run_pair,
    "parity": run_check,
    "claim": run_claim_round,
}
