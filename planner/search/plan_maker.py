"""Makes the Plan of a finished search.

In: a `Session` and its verified winner. Out: a `Plan` with the measurement, the speed-up, the alternatives, and a
`Choice` per knob: its value was fixed by the user, is the only one, was measured against others with all else equal, or
is predicted to be better, and then why the others were not tried.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.surroundings import read_environment
from autoplan.planner.records.loading import Loading
from autoplan.planner.records.plan import DISTURBED, Alternative, Choice, HandSetting, Measurement, PlanNodes
from autoplan.planner.records.trials import Interval, Objective, Outcome, Parity, Trial
from autoplan.planner.search.candidate_model import find_untried
from autoplan.planner.search.claim import Comparison, compare
from autoplan.planner.search.device_hours import describe_used
from autoplan.planner.search.objective import order
from autoplan.planner.search.selection import CandidateRuns, collect_runs, in_slices, match_rounds, speed_ratio
from autoplan.planner.search.session import PLAIN_PARITY, Session, failed_parity
from autoplan.planner.search.state import at_plain_pace_s
from autoplan.planner.trace.input_benchmark import describe_input
from autoplan.planner.trials.measure import core_spread, invert, ratio_interval
from autoplan.probes.profile import Device
from autoplan.strategies.analysis.training_facts import own_checkpointing_text
from autoplan.strategies.config import KNOBS, TrainingConfig
from autoplan.strategies.techniques.rules import incompatible

PEAK_DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}

MAX_ALTERNATIVES = 5

SAME_SPEED = 0.01
"""A predicted difference below this share is called "as fast"."""

MOST_CORE_SPREAD = 0.05
"""Cores whose speed differs by more from run to run are said; what a quiet machine shows is about half of that."""

MOST_VALUES = 4
"""So many other values of a knob are named."""

NOT_TRIED = {
    "time": "not tried: there was no time left for it",
    "max_trials": "not tried: --max-trials was reached",
    "nothing_left": "not tried: after the trials near it, it had too little chance of being the fastest",
}


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
    compared = session.comparison(winner)
    if compared is None:
        plain = CandidateRuns(config=baseline.config, first=baseline)
        compared = compare(winner, plain, session.run_spread, chosen_from=len(candidates))
    claim = compared.claim
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
        nodes=_nodes_of(session, winner.config),
        prediction=session.predict(winner.config),
        measurement=measurement_of(session, compared.candidate),
        baseline=with_all_runs(session, compared.reference),
        speedup=compared.speedup,
        claim=claim,
        hand=_against_hand(session, winner, candidates),
        alternatives=tuple(_alternatives(session, winner, candidates)),
        untried=find_untried(
            session.model,
            winner.config,
            at_plain_pace_s(session, compared.candidate),
            drawn=session.sampler is not None,
        ),
        parity=parity,
        unverified=unverified,
        failed_parity=tuple(c for c, found in session.store.parities.items() if found.finished and not found.passed),
        choices=tuple(explain_choices(session, winner)),
        left_out=context.left_out,
        evidence=session.store.trials,
        ledger=session.store.ledger,
        attempts=session.store.attempts,
        notes=tuple(_notes(session, winner, compared, loading)),
        environment=read_environment(),
        training=context.facts.training,
        loading=loading,
        objective=session.objective,
    ).sealed()


def _notes(session: Session, winner: CandidateRuns, compared: Comparison, loading: Loading | None) -> Iterator[str]:
    """Sentences on how the plan was found, and on what it does otherwise than the training did."""
    context, training = session.context, session.context.facts.training
    yield from context.spec.notes
    yield from session.notes
    for one in session.store.attempts:  # of this and earlier calls of the search
        yield f"something outside ended {one.describe()}; it does not count"
    if session.options.max_device_hours is not None:
        yield describe_used(session.store.ledger, session.options)
    if loading is not None and loading.setting is not None:
        yield from loading.notes
    else:  # trials do not time how batches are made
        load_s, ranks = session.predict(winner.config).time_parts_s.get("input", 0.0), winner.config.dp
        said = describe_input(load_s, winner.step_time.median, context.spec.global_batch // ranks, ranks)
        if said is not None:
            yield said
    if training is not None and training.own_checkpointing:
        yield own_checkpointing_text(winner.config.checkpointing)
    spread = core_spread(trial.window for trial in session.store.trials)
    if spread > MOST_CORE_SPREAD:
        yield (
            f"the speed of this machine's cores changes by itself, by {spread:.0%} from run to run (others may share "
            "them): a gain that is smaller shows only in many rounds, with a larger --budget or on a quieter machine"
        )
    yield from winner.config.risks()


def _nodes_of(session: Session, config: TrainingConfig) -> PlanNodes | None:
    """The nodes that its ranks were on; None: on this machine alone."""
    per_node = session.options.layout[1]
    count = -(-config.world_size // per_node)
    if session.options.nodes is None or count == 1:
        return None
    return PlanNodes(
        count=count, ranks_per_node=per_node, launcher=session.options.launcher, kind=session.context.hardware.kind
    )


def _runs_of(first: Trial, candidates: Sequence[CandidateRuns]) -> CandidateRuns:
    """A configuration with all its runs; with its first alone if one of its repeats failed."""
    found = next((candidate for candidate in candidates if candidate.config == first.config), None)
    return found or CandidateRuns(config=first.config, first=first)


def _against_hand(session: Session, winner: CandidateRuns, candidates: Sequence[CandidateRuns]) -> HandSetting | None:
    """How the plan compares with the hand setting, by their looks and pairs: a bound, if they did not run side by side.

    None if it was not looked at. Of a look that was stopped early the bound is what its steps took at the least.
    """
    hand = session.hand
    if hand is None:
        return None
    runs = _runs_of(hand, candidates)
    against = compare(winner, runs, session.run_spread, chosen_from=max(1, len(candidates)))
    speedup = against.speedup
    if hand.at_least_s is not None and not against.candidate.finalist_runs:
        low = min(speedup.low, hand.at_least_s / against.candidate.step_time.median)
        speedup = speedup.model_copy(update={"low": low})
    return HandSetting(
        config=runs.config,
        measurement=measurement_of(session, against.reference),
        speedup=speedup,
        claim=against.claim,
    )


def measurement_of(session: Session, candidate: CandidateRuns) -> Measurement:
    """The measurement of a configuration, over all runs that count."""
    spec = session.context.spec
    counted = [run.items_per_step for run in candidate.runs if run.items_per_step]  # earlier versions had none
    items = sum(counted) / len(counted) if counted else spec.global_batch * (spec.sequence_length or 1)
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


def _alternatives(session: Session, winner: CandidateRuns, candidates: Sequence[CandidateRuns]) -> list[Alternative]:
    """The next best configurations, how they compare with the plan, and why they are not the plan."""
    found = []
    for candidate in order(session.objective, candidates, session.run_spread):
        if candidate.config == winner.config:
            continue
        beside = against(session, winner, candidate)
        if beside is None:
            ratio = speed_ratio(candidate, winner, session.run_spread)
            lost = f"{DISTURBED} its run or the plan's"
        else:
            candidate, ratio = beside.other, invert(beside.ratio, 1.0)
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


# Why each knob of a plan has its value, and how the plan compares with what lost. Only undisturbed runs are compared:
# those of the claim's rounds before pairs, pairs before looks.


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
    found = against(session, winner, _runs_of(trial, collect_runs(session.store.trials)))
    if found is None:
        return f"{name} ran while other work disturbed it or the plan (trial {trial.number})"
    if trial.outcome is Outcome.PRUNED:
        speed = 1 / found.ratio.median
        return f"{name} ran at {speed:.2f} times the plan's speed, when it was stopped (trial {trial.number})"
    rival, gain = f"{name} (trial {trial.number})", found.ratio
    if gain.low > 1.0:
        return f"{gain.median:.2f} times as fast as {rival}, {found.how}"
    if gain.high >= 1.0:
        return f"not told apart from {rival}, {found.how}: {tie_reason(winner, found.other)}"
    faster = f"{rival} is {speed_words(1 / gain.median)}, {found.how}"
    if session.objective.name == "cost":
        cost = winner.config.world_size / other.world_size / gain.median
        return f"{faster}; this has {cost:.2f} times its cost: {session.objective.describe()}"
    if session.objective.name == "memory":
        memory = winner.peak_memory_bytes / max(1, found.other.peak_memory_bytes)
        return f"{faster}; this takes {memory:.2f} times its memory: {session.objective.describe()}"
    return f"{faster}; {barred(session, other) or NOT_PROVED}"


NOT_PROVED = "it was not proved to be"
"""Why a configuration that ran faster, and may be the plan, is not."""


def barred(session: Session, config: TrainingConfig) -> str | None:
    """Why a configuration may not be the plan, however fast it is; None: it may."""
    parity = session.store.parity_of(config)
    if parity is not None and not parity.passed:
        if not parity.finished:
            return f"its parity check did not come to its end: {parity.note}"
        return "it fails parity: it would not train the same thing"
    if parity is None and failed_parity(session.store, config):
        return "one whose check is the same failed parity"
    return None if session.options.allows(config) else "it does not keep what was fixed or bounded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Against:
    """The plan against another configuration, by the best runs that there are."""

    ratio: Interval  # the plan's speed over the other's
    how: str  # "side by side": rounds of the claim, or pairs; else "one run each"
    other: CandidateRuns  # with the runs that counted


def against(session: Session, winner: CandidateRuns, other: CandidateRuns) -> Against | None:
    """How the plan compares with another configuration; None: other work disturbed the runs."""
    if session.plain_config in (winner.config, other.config):
        plain_won = winner.config == session.plain_config
        rounds = session.comparison(other if plain_won else winner)
        if rounds is not None and rounds.candidate.counted:
            if rounds.claim.why_not is not None and rounds.claim.why_not.startswith("disturbed"):
                return None
            ratio = invert(rounds.speedup, 1.0) if plain_won else rounds.speedup
            other = rounds.candidate if plain_won else rounds.reference
            return Against(ratio=ratio, how="side by side", other=other)
    one, two = match_rounds(winner, other)
    pairs = list(zip(one.finalist_runs, two.finalist_runs, strict=True))
    quiet = [(a, b) for a, b in pairs or [(winner.first, other.first)] if not (a.disturbed or b.disturbed)]
    if not quiet:
        return None
    mine = [run.step_time_s for run, _ in quiet if run.step_time_s is not None]
    theirs = [run.step_time_s for _, run in quiet if run.step_time_s is not None]
    if winner.reported.counted and not (pairs or other.first.beside):  # not the look that it was chosen by
        mine = [_outside_slices(session, winner.reported)]
    ratio = ratio_interval(mine, theirs, session.run_spread)
    how = "side by side" if pairs else "one run each"
    return Against(ratio=ratio, how=how, other=replace(other, counted=tuple(b for _, b in quiet)))


def _outside_slices(session: Session, winner: CandidateRuns) -> Interval:
    """The step time of the plan's rounds beside looks: in slices steps take longer, and so did the baseline's."""
    rounds = session.comparison(winner) if in_slices(winner) else None
    look = None if rounds is None or not rounds.reference.counted else rounds.reference.first.step_time_s
    if rounds is None or look is None:
        return winner.step_time
    return winner.step_time.times(look.median / rounds.reference.step_time.median)


def speed_words(ratio: float) -> str:
    """`25% slower`: at 0.75 times the speed; `as fast`. On all screens it is the speed that these words compare."""
    if abs(ratio - 1) <= SAME_SPEED:
        return "as fast"
    return f"{ratio - 1:.0%} faster" if ratio > 1 else f"{1 - ratio:.0%} slower"


def _left_out_reason(session: Session, knob: str) -> str | None:
    ours = (one for one in session.context.left_out if one.family.startswith(f"{knob}="))
    return next((f"{one.family} left out: {one.limit}" for one in ours), None)


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
