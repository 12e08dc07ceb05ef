"""Explains why each knob of a plan has its value.

In: a `Session`, the winner, all configurations that ran. Out: a `Choice` per knob: the value was fixed by the user, is
the only one, was measured against others, or is predicted to be better, and then why the others were not tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.planner.plan import Choice
from autoplan.planner.records import Outcome, Trial
from autoplan.planner.search.selection import CandidateRuns, match_rounds, speed_ratio
from autoplan.planner.search.session import Session
from autoplan.strategies.config import KNOBS, TrainingConfig
from autoplan.strategies.techniques.rules import incompatible

SAME_SPEED = 0.01
"""A predicted difference below this share is called "as fast"."""

NOT_TRIED = {
    "time": "not tried: there was no time left for it",
    "max_trials": "not tried: --max-trials was reached",
    "nothing_left": "not tried: after the trials near it, it had too little chance of being the fastest",
}


def explain_choices(session: Session, winner: CandidateRuns, candidates: Sequence[CandidateRuns]) -> list[Choice]:
    """Each knob that is not at its default, or has other legal values, with the reason for its value."""
    return [
        Choice(knob=knob, value=getattr(winner.config, knob), reason=_reason(session, winner, candidates, knob))
        for knob in KNOBS
        if knob in winner.config.knobs_off_default() or len(session.context.space.values.get(knob, ())) > 1
    ]


def _reason(session: Session, winner: CandidateRuns, candidates: Sequence[CandidateRuns], knob: str) -> str:
    """The reason for one knob: against the measured configuration that differs least, else by the cost model."""
    value = getattr(winner.config, knob)
    if knob in session.options.fix:
        return "fixed by you"
    if len(session.context.space.values.get(knob, ())) <= 1:
        return _only_reason(session, knob)
    predicted = _reason_one_by_one(session, winner, knob)
    others = [candidate for candidate in candidates if getattr(candidate.config, knob) != value]
    if not others:
        return predicted
    other = min(others, key=lambda runs: (len(_differences(runs.config, winner.config)), runs.step_time.median))
    rest = [name for name in _differences(other.config, winner.config) if name != knob]
    rival = f"{knob}={getattr(other.config, knob)} (trial {other.first.number})"
    ratio = _side_by_side(session, winner, other)
    if ratio is None and (winner.first.disturbed or other.first.disturbed):
        return f"other work disturbed the run of {rival} or of this; {predicted}"
    ratio = winner.step_time.median / other.step_time.median if ratio is None else ratio
    if rest:
        return f"{_compare(ratio)} {rival}, which differs in {', '.join(rest)} too; taken alone, {predicted}"
    if ratio > 1.02 and session.objective.name != "throughput":
        memory = winner.peak_memory_bytes / max(1, other.peak_memory_bytes)
        wanted = session.objective.describe()
        return f"{rival} is {ratio - 1:.0%} faster; this takes {memory:.2f} times its memory: {wanted}"
    if ratio > 1.02:
        return f"{rival} was faster in its single run, but not side by side, or it failed parity"
    if ratio >= 0.98:
        return f"as fast as {rival}; " + tie_reason(winner, other).partition("; ")[2]
    return f"measured: {_compare(ratio)} {rival}"


def _side_by_side(session: Session, winner: CandidateRuns, other: CandidateRuns) -> float | None:
    """The step time over the other's in the rounds of the claim or in pairs; None: they did not run side by side."""
    if other.config == session.plain_config and winner.claim_runs:
        against = session.comparison(winner)
        return None if against is None else 1 / against.speedup.median
    one, two = match_rounds(winner, other)
    return 1 / speed_ratio(one, two).median if one.finalist_runs else None


def _differences(a: TrainingConfig, b: TrainingConfig) -> list[str]:
    return [knob for knob in KNOBS if getattr(a, knob) != getattr(b, knob)]


def _compare(ratio: float) -> str:
    if ratio < 0.98:
        return f"{1 / ratio:.2f} times as fast as"
    return "as fast as" if ratio <= 1.02 else f"{1 / ratio:.2f} times as fast (one run) as"


def _only_reason(session: Session, knob: str) -> str:
    why = _left_out_reason(session, knob)
    return f"the only value here ({why})" if why else "the only value here"


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


def _reason_one_by_one(session: Session, winner: CandidateRuns, knob: str) -> str:
    """How the plan compares with each other value of the knob, all else equal: as measured, else as predicted."""
    config = winner.config
    tried = {trial.config: trial for trial in session.store.trials if not trial.is_repeat}
    sentences: list[str] = []
    values = list(session.context.space.values.get(knob, ()))
    chosen = values.index(getattr(config, knob)) if getattr(config, knob) in values else 0
    for value in sorted(values, key=lambda value: abs(values.index(value) - chosen)):
        other = config.model_copy(update={knob: value})
        if other == config or (other not in session.model.legal and other not in tried):
            continue
        sentences.append(f"{knob}={value} " + _compare_with(session, winner, other, tried.get(other)))
    if sentences:
        return ", ".join(sentences[:4])
    why = _illegal_reason(session, config, knob) or _left_out_reason(session, knob)
    return why or "no other value is legal with the rest of the plan and predicted to fit"


def _compare_with(session: Session, winner: CandidateRuns, other: TrainingConfig, trial: Trial | None) -> str:
    """What is known of one other configuration: how its trial ended, how fast it was, or what is predicted."""
    if trial is not None and trial.step_time_s is None:
        return f"ended as {trial.outcome.value} (trial {trial.number})"
    if trial is not None and trial.step_time_s is not None:
        ratio = winner.step_time.median / trial.step_time_s.median
        early = ", stopped early" if trial.outcome is Outcome.PRUNED else ""
        if trial.disturbed or winner.first.disturbed:
            return f"was measured while other work disturbed it (trial {trial.number}{early}), which says little"
        return f"was measured in one run, the plan being {_compare(ratio)} it (trial {trial.number}{early})"
    change = session.predict(other).step_time_s / session.predict(winner.config).step_time_s - 1
    if change > SAME_SPEED:
        return f"is expected to be {change:.0%} slower (cost model)"
    expected = f"{-change:.0%} faster" if change < -SAME_SPEED else "as fast"
    return f"is expected to be {expected} (cost model; {NOT_TRIED[session.ended_by]})"


def tie_reason(winner: CandidateRuns, other: CandidateRuns) -> str:
    """Why the winner was chosen in a tie."""
    text = "no measurable difference in speed; "
    difference = other.peak_memory_bytes - winner.peak_memory_bytes
    if difference > 0.05 * winner.peak_memory_bytes:
        return text + f"the plan takes {difference / 2**30:.2f} GiB less memory"
    if len(other.config.knobs_off_default()) > len(winner.config.knobs_off_default()):
        return text + "the plan is simpler"
    return text + "the plan has the better median"
