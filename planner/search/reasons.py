"""Explains why each knob of a plan has its value, and how the plan compares with what lost.

In: a `Session`, the winner. Out: a `Choice` per knob: the value was fixed by the user, is the only one, was measured
against others with all else equal, or is predicted to be better, and then why the others were not tried. Only
undisturbed runs are compared: those of the claim's rounds before pairs, pairs before looks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoplan.planner.records.plan import Choice
from autoplan.planner.records.trials import Interval, Outcome, Trial
from autoplan.planner.search.selection import CandidateRuns, collect_runs, match_rounds
from autoplan.planner.search.session import Session
from autoplan.planner.trials.measure import ratio_interval
from autoplan.strategies.config import KNOBS, TrainingConfig
from autoplan.strategies.techniques.rules import incompatible

SAME_SPEED = 0.01
"""A predicted difference below this share is called "as fast"."""

MOST_VALUES = 4
"""So many other values of a knob are named."""

NOT_TRIED = {
    "time": "not tried: there was no time left for it",
    "max_trials": "not tried: --max-trials was reached",
    "nothing_left": "not tried: after the trials near it, it had too little chance of being the fastest",
}


def explain_choices(session: Session, winner: CandidateRuns) -> list[Choice]:
    """Each knob that is not at its default, or has other legal values, with the reason for its value."""
    return [
        Choice(knob=knob, value=getattr(winner.config, knob), reason=_reason(session, winner, knob))
        for knob in KNOBS
        if knob in winner.config.knobs_off_default() or len(session.context.space.values.get(knob, ())) > 1
    ]


def _reason(session: Session, winner: CandidateRuns, knob: str) -> str:
    """The reason for one knob: how the plan compares with each other value of it, all else equal, tried ones first."""
    config, values = winner.config, list(session.context.space.values.get(knob, ()))
    if knob in session.options.fix:
        return "fixed by you"
    if len(values) <= 1:
        why = _left_out_reason(session, knob)
        return f"the only value here ({why})" if why else "the only value here"
    tried = {trial.config: trial for trial in session.store.trials if not trial.is_repeat}  # the last look at each
    chosen = values.index(getattr(config, knob)) if getattr(config, knob) in values else 0
    others = [
        config.model_copy(update={knob: value}) for value in sorted(values, key=lambda v: abs(values.index(v) - chosen))
    ]
    known = [other for other in others if other != config and (other in session.model.legal or other in tried)]
    known.sort(key=lambda other: other not in tried)
    if not known:
        why = _illegal_reason(session, config, knob) or _left_out_reason(session, knob)
        return why or "no other value is legal with the rest of the plan and predicted to fit"
    named = ((f"{knob}={getattr(other, knob)}", other) for other in known[:MOST_VALUES])
    return "; ".join(_compare_with(session, winner, name, other, tried.get(other)) for name, other in named)


def _compare_with(
    session: Session, winner: CandidateRuns, name: str, other: TrainingConfig, trial: Trial | None
) -> str:
    """Words on another value: how its trial ended, how fast it was, or what speed is predicted."""
    if trial is None:
        ratio = session.predict(winner.config).step_time_s / session.predict(other).step_time_s
        why = "" if ratio < 1 - SAME_SPEED else f"; {NOT_TRIED[session.ended_by]}"
        return f"{name} is expected to be {speed_words(ratio)} (cost model{why})"
    if trial.budget_ended:
        return f"{name} had no time to be measured (trial {trial.number})"
    if trial.step_time_s is None:
        return f"{name} ended as {trial.outcome.value} (trial {trial.number})"
    runs = next((one for one in collect_runs(session.store.trials) if one.config == other), None)
    found = against(session, winner, runs or CandidateRuns(config=other, first=trial))
    if found is None:
        return f"{name} ran while other work disturbed it or the plan (trial {trial.number})"
    if trial.outcome is Outcome.PRUNED:
        speed = 1 / found.ratio.median
        return f"{name} ran at {speed:.2f} times the plan's speed, when it was stopped (trial {trial.number})"
    return _measured(session, found, winner, f"{name} (trial {trial.number})")


def _measured(session: Session, found: Against, winner: CandidateRuns, rival: str) -> str:
    """How the plan did against a configuration, in words."""
    ratio, other = found.ratio, found.other
    if ratio.low > 1.0:
        return f"{ratio.median:.2f} times as fast as {rival}, {found.how}"
    if ratio.high >= 1.0:
        return f"not told apart from {rival}, {found.how}: {tie_reason(winner, other)}"
    faster = f"{rival} is {speed_words(1 / ratio.median)}, {found.how}"
    if session.objective.name != "throughput":
        memory = winner.peak_memory_bytes / max(1, other.peak_memory_bytes)
        return f"{faster}; this takes {memory:.2f} times its memory: {session.objective.describe()}"
    return f"{faster}; {barred(session, other.config) or NOT_PROVED}"


NOT_PROVED = "it was not proved to be"
"""Why a configuration that ran faster, and may be the plan, is not."""


def barred(session: Session, config: TrainingConfig) -> str | None:
    """Why a configuration may not be the plan, however fast it is; None: it may."""
    parity = session.store.parity_of(config)
    if parity is not None and not parity.passed:
        if not parity.finished:
            return f"its parity check did not come to its end: {parity.note}"
        return "it fails parity: it would not train the same thing"
    return None if session.options.allows(config) else "it does not keep what was fixed or bounded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Against:
    """The plan against another configuration, by the best runs that there are.

    Attributes:
        ratio: The plan's speed over the other's.
        side_by_side: In the rounds of the claim, or in pairs; else a look of the other one.
        other: The other one, with the runs that counted.
    """

    ratio: Interval
    side_by_side: bool
    other: CandidateRuns

    @property
    def how(self) -> str:
        """How the two were compared."""
        return "side by side" if self.side_by_side else "one run each"


def against(session: Session, winner: CandidateRuns, other: CandidateRuns) -> Against | None:
    """How the plan compares with another configuration; None: other work disturbed the runs."""
    if session.plain_config in (winner.config, other.config):
        plain_won = winner.config == session.plain_config
        rounds = session.comparison(other if plain_won else winner)
        if rounds is not None and rounds.candidate.counted:
            if rounds.claim.why_not is not None and rounds.claim.why_not.startswith("disturbed"):
                return None
            ratio = inverse(rounds.speedup) if plain_won else rounds.speedup
            return Against(ratio=ratio, side_by_side=True, other=rounds.candidate if plain_won else rounds.reference)
    one, two = match_rounds(winner, other)
    pairs = list(zip(one.finalist_runs, two.finalist_runs, strict=True))
    side_by_side = bool(pairs)
    quiet = [(a, b) for a, b in pairs or [(winner.first, other.first)] if not (a.disturbed or b.disturbed)]
    if not quiet:
        return None
    mine = [run.step_time_s for run, _ in quiet if run.step_time_s is not None]
    theirs = [run.step_time_s for _, run in quiet if run.step_time_s is not None]
    if winner.reported.counted and not side_by_side:  # not the look that it was chosen by
        mine = [winner.reported.step_time]
    ratio = ratio_interval(mine, theirs, session.run_spread)
    return Against(ratio=ratio, side_by_side=side_by_side, other=replace(other, counted=tuple(b for _, b in quiet)))


def inverse(ratio: Interval) -> Interval:
    """The same comparison seen from the other side."""
    return Interval(median=1 / ratio.median, low=1 / ratio.high, high=1 / ratio.low, samples=ratio.samples)


def speed_words(ratio: float) -> str:
    """`25% slower`: at 0.75 times the speed; `as fast`. On all screens it is the speed that these words compare."""
    if abs(ratio - 1) <= SAME_SPEED:
        return "as fast"
    return f"{ratio - 1:.0%} faster" if ratio > 1 else f"{1 - ratio:.0%} slower"


def _left_out_reason(session: Session, knob: str) -> str | None:
    for family in session.context.left_out:
        if family.family.startswith(f"{knob}="):
            return f"{family.family} left out: {family.limit}"
    return None


def _illegal_reason(session: Session, config: TrainingConfig, knob: str) -> str | None:
    """Which rules forbid the other values of a knob with the rest of the plan; None if one of them is allowed."""
    others = (value for value in session.context.space.values.get(knob, ()) if value != getattr(config, knob))
    batch = session.context.spec.global_batch
    found = [incompatible(config.model_copy(update={knob: value}), batch) for value in others]
    return "; ".join(reason for reason in found if reason) if all(found) else None


def tie_reason(winner: CandidateRuns, other: CandidateRuns) -> str:
    """Why the winner was chosen in a tie."""
    difference = other.peak_memory_bytes - winner.peak_memory_bytes
    if difference > 0.05 * winner.peak_memory_bytes:
        return f"the plan takes {difference / 2**30:.2f} GiB less memory"
    if len(other.config.knobs_off_default()) > len(winner.config.knobs_off_default()):
        return "the plan is simpler"
    if winner.step_time.median <= other.step_time.median:
        return "the plan has the better median"
    return "more runs would tell"
