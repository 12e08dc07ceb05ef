"""Makes the Plan of a finished search.

In: a `Session` and its verified winner. Out: a `Plan` with the measurement, the speed-up, the reason for each knob's
value, and the alternatives.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.surroundings import read_environment
from autoplan.planner.records.loading import Loading
from autoplan.planner.records.plan import Alternative, HandSetting, Measurement
from autoplan.planner.records.trials import Objective, Parity, Trial
from autoplan.planner.search.claim import compare, drift
from autoplan.planner.search.objective import order
from autoplan.planner.search.reasons import (
    NOT_PROVED,
    Against,
    against,
    barred,
    explain_choices,
    inverse,
    speed_words,
    tie_reason,
)
from autoplan.planner.search.selection import (
    CandidateRuns,
    collect_runs,
    speed_ratio,
)
from autoplan.planner.search.session import Session
from autoplan.planner.search.untried import find_untried
from autoplan.planner.trace.input_benchmark import describe_input
from autoplan.planner.trials.measure import Spread, invert
from autoplan.probes.profile import Device
from autoplan.strategies.analysis.training_facts import own_checkpointing_text
from autoplan.strategies.config import TrainingConfig

PEAK_DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}

MAX_ALTERNATIVES = 5


PLAIN_PARITY = Parity(
    passed=True,
    tolerance=0.0,
    worst_gradient_difference=0.0,
    worst_update_difference=0.0,
    worst_group="",
    loss_difference=0.0,
    global_batch=0,
    sequence_length=None,
    changes_numerics=False,
    note="the plan is the plain run, with which a parity check compares: nothing was checked",
)
"""Of a plan that is the plain run."""

UNCHECKED = PLAIN_PARITY.model_copy(update={"passed": False, "finished": False, "note": "it was not checked"})
"""Of a plan whose parity check the search had not come to."""


def make_plan(
    session: Session,
    winner: CandidateRuns,
    parity: Parity,
    baseline: Trial,
    loading: Loading | None = None,
    *,
    unverified: str | None = None,
) -> Plan:
    """The plan for a winner, or the best so far as it stands; `unverified` says why it is not verified."""
    context = session.context
    candidates = collect_runs(session.store.trials)
    winner = _runs_of(winner.first, candidates)  # with the runs of the claim
    against = session.comparison(winner)
    if against is None:
        plain = CandidateRuns(config=baseline.config, first=baseline)
        against = compare(winner, plain, session.run_spread, chosen_from=len(candidates))
    claim = against.claim
    if unverified is not None:
        claim = claim.model_copy(update={"claimed": False, "why_not": claim.why_not or "unverified: not a claim"})
    return Plan(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        study=session.store.identity,
        workload=context.spec,
        config=winner.config,
        accumulation=winner.config.accumulation(context.spec.global_batch),
        device=context.device,
        hardware=context.hardware,
        prediction=session.predict(winner.config),
        measurement=measurement_of(session, against.candidate),
        baseline=with_all_runs(session, against.reference),
        speedup=against.speedup,
        claim=claim,
        hand=_against_hand(session, winner, candidates),
        alternatives=tuple(_alternatives(session, winner, candidates, session.run_spread)),
        untried=find_untried(
            session.model,
            winner.config,
            against.candidate.step_time.median,
            drawn=session.sampler is not None,
        ),
        parity=parity,
        unverified=unverified,
        failed_parity=_failed_parity(session),
        choices=tuple(explain_choices(session, winner)),
        left_out=context.left_out,
        evidence=session.store.trials,
        ledger=session.store.ledger,
        attempts=session.store.attempts,
        notes=(
            *context.spec.notes,
            *session.notes,
            *_attempt_notes(session),
            *(_input_notes(session, winner) if loading is None or loading.setting is None else loading.notes),
            *_model_notes(session, winner),
            *([] if (drifted := drift(against)) is None else [drifted]),
            *winner.config.risks(),
        ),
        environment=read_environment(),
        training=context.facts.training,
        loading=loading,
        objective=session.objective,
    ).sealed()


def _runs_of(first: Trial, candidates: Sequence[CandidateRuns]) -> CandidateRuns:
    """A configuration with all its runs; with its first alone if one of its repeats failed."""
    found = next((candidate for candidate in candidates if candidate.config == first.config), None)
    return found or CandidateRuns(config=first.config, first=first)


def _against_hand(session: Session, winner: CandidateRuns, candidates: Sequence[CandidateRuns]) -> HandSetting | None:
    """How the plan compares with the hand setting, by their looks and pairs: a bound, if they did not run side by side.

    None if it was not looked at. A look that was stopped early has the step time of the steps that it made.
    """
    hand = session.hand
    if hand is None:
        return None
    runs = _runs_of(hand, candidates)
    against = compare(winner, runs, session.run_spread, chosen_from=max(1, len(candidates)))
    return HandSetting(
        config=runs.config,
        measurement=measurement_of(session, against.reference),
        speedup=against.speedup,
        claim=against.claim,
    )


def _failed_parity(session: Session) -> tuple[TrainingConfig, ...]:
    """The configurations whose parity check came to its end and failed."""
    parities = {trial.config: session.store.parity_of(trial.config) for trial in session.store.trials}
    return tuple(config for config, found in parities.items() if found and found.finished and not found.passed)


def measurement_of(session: Session, candidate: CandidateRuns) -> Measurement:
    """The measurement of a configuration, over all runs that count."""
    items = _items_per_step(session, candidate)
    flops = session.predict(candidate.config).model_flops
    peak, source = peak_rate(session.context.hardware.device(session.context.device), candidate.config.precision)
    step = candidate.step_time
    mfu = None
    if flops and peak:
        mfu = flops / step.median / (peak * candidate.config.world_size if session.context.device == "cuda" else peak)
    runs = candidate.runs
    return Measurement(
        step_time_s=step,
        tokens_per_s=invert(step, items),
        peak_memory_bytes=candidate.peak_memory_bytes or None,
        mfu=mfu,
        mfu_peak_source=source if mfu is not None else None,
        method=candidate.first.method or "whole_steps",
        trials=tuple(run.number for run in runs),
    )


def _items_per_step(session: Session, candidate: CandidateRuns) -> float:
    """Tokens, or samples, of a step: the mean over the runs; records of earlier versions do not have it."""
    spec = session.context.spec
    counted = [run.items_per_step for run in candidate.runs if run.items_per_step]
    return sum(counted) / len(counted) if counted else spec.global_batch * (spec.sequence_length or 1)


def _attempt_notes(session: Session) -> list[str]:
    """The runs that something outside ended, of this and earlier calls of the search."""
    return [f"something outside ended {one.describe()}; it does not count" for one in session.store.attempts]


def _model_notes(session: Session, winner: CandidateRuns) -> list[str]:
    """Sentences on what the plan does otherwise than the model was set to."""
    training = session.context.facts.training
    own = training is not None and training.own_checkpointing
    return [own_checkpointing_text(winner.config.checkpointing)] if own else []


def _input_notes(session: Session, winner: CandidateRuns) -> list[str]:
    """A sentence on the time of making batches, if it is long enough to matter for the step; trials do not time it."""
    load_s = session.predict(winner.config).time_parts_s.get("input", 0.0)
    ranks = winner.config.dp
    sentence = describe_input(load_s, winner.step_time.median, session.context.spec.global_batch // ranks, ranks)
    return [] if sentence is None else [sentence]


def peak_rate(device: Device, precision: str) -> tuple[float | None, str | None]:
    """The dense peak in FLOP/s that MFU is a share of, and its source: the datasheet, else measured here."""
    dtype = PEAK_DTYPES[precision]
    sheet = device.datasheet_peak_flops_per_s.get(dtype)
    if sheet is not None and sheet.value:
        return sheet.value, f"datasheet of {device.datasheet_name}, {dtype}, dense"
    measured = device.peak_flops_per_s.get(dtype)
    if measured is not None and measured.value:
        return measured.value, f"best {dtype} matmul measured on this machine"
    return None, None


def with_all_runs(session: Session, candidate: CandidateRuns) -> Trial:
    """A candidate's first trial with the figures of all its runs that count, which the speed-up is calculated from."""
    measured = measurement_of(session, candidate)
    return candidate.first.model_copy(
        update={"step_time_s": measured.step_time_s, "tokens_per_s": measured.tokens_per_s}
    )


def _alternatives(
    session: Session, winner: CandidateRuns, candidates: Sequence[CandidateRuns], spread: Spread
) -> list[Alternative]:
    """The next best configurations, how they compare with the plan, and why they are not the plan."""
    found = []
    for candidate in order(session.objective, candidates, spread):
        if candidate.config == winner.config:
            continue
        beside = against(session, winner, candidate)
        if beside is None:
            ratio, lost = speed_ratio(candidate, winner, spread), "other work disturbed its run or the plan's"
        else:
            candidate, ratio = beside.other, inverse(beside.ratio)
            lost = _why_lost(session.objective, beside, winner)
        why = barred(session, candidate.config) or lost
        measurement = measurement_of(session, candidate)
        found.append(Alternative(config=candidate.config, measurement=measurement, speed_ratio=ratio, why=why))
    return found[:MAX_ALTERNATIVES]


def _why_lost(objective: Objective, beside: Against, winner: CandidateRuns) -> str:
    """Why a configuration that may be the plan is not; where throughput alone does not decide, what it trades."""
    speed, other = 1 / beside.ratio.median, beside.other
    if objective.name == "cost":
        cost = other.config.world_size / winner.config.world_size / speed
        return f"{speed_words(speed)}, at {cost:.2f} times the cost"
    if objective.name == "memory":
        memory = other.peak_memory_bytes / max(1, winner.peak_memory_bytes)
        return f"{speed_words(speed)}, with {memory:.2f} times the memory"
    if beside.ratio.high < 1.0:
        return f"{speed_words(speed)}, {beside.how}; {NOT_PROVED}"
    if beside.ratio.low <= 1.0:
        return f"no measurable difference in speed; {tie_reason(winner, other)}"
    return speed_words(speed)
