"""The state of a running search that `next_work` is told: pieces of work with their costs and gains.

In: a `Session`. Out: a `State`. Nothing runs here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from autoplan.planner.records.trials import Trial
from autoplan.planner.search.candidate_model import next_looks, ordered
from autoplan.planner.search.claim import LEAST_ROUNDS, rounds_kept, rounds_needed
from autoplan.planner.search.next_work import HAND_GAIN, TRIED_SHARE, ShownGain, State, Work, check_gain, pair_gain
from autoplan.planner.search.objective import devices_of
from autoplan.planner.search.references import hand_setting, plain_configs
from autoplan.planner.search.selection import (
    MOST_PAIRS,
    CandidateRuns,
    in_slices,
    is_decided,
    is_under_load,
    match_rounds,
    shared_rounds,
    speed_ratio,
)
from autoplan.planner.search.setup import probe_cost_s, trace_cost_s
from autoplan.planner.search.trial_cost import first_steps_s, own_length_s, parity_parts_s, parity_s
from autoplan.planner.trials.measure import RUN_SPREAD, SLICED, Spread
from autoplan.strategies.config import TrainingConfig

if TYPE_CHECKING:
    from autoplan.planner.search.session import Session

MOST_LOOKS = 200
"""So many of the best-scored candidates are priced one by one, and of those that are not compiled; of thousands, the
rest is never next."""

NEAR_THE_FRONT = 12
"""So many of the next candidates have their variants traced together."""

FIRST_PAIR_GAIN = 0.01
"""The least gain of the first pair of a leader that shares the machine in slices with the next best: on shared cores
the luckiest look may seem out of reach (looks at a small transformer differed by 10 to 14 %, where the cores' readings
said 5 %). Chosen: a pair comes before claims, and after looks that gain more."""

SLOW_MOMENTS = 1.15
"""The factor on the expected time of the rounds of a claim: one of them may meet a slow moment. Assumed."""

LEAST_CHECK_S = 2.0
"""Of any check: two processes, and the comparison of their records (2.1 s were measured of a model of 200 kB)."""

CHECK_FACTORS = (0.3, 8.0)
"""The limits of what the checks so far change: one that was disturbed, or ended early, says little of the next."""

UNKNOWN_CHECK_S = 2.0
"""A check is taken to cost so many seconds more than its parts are predicted to, until one was made here. The first
ones of 24 searches of the zoo took 1.2 s more (median; nine in ten at most 3.2 s); of a GPT-2, whose check takes a
minute or two, nine of ten took less than predicted."""


def read_state(session: Session) -> State:
    """The state now."""
    if not session.plain_is_known:
        return State(baseline=_baseline(session))
    plain = session.baseline
    if plain is not None and session.known_parity(plain.config) is None and plain.config not in session.unchecked:
        return State(check=_check_of(session, plain.config, gain=1.0, why="it stands for the plain run"))
    leader = find_leader(session)
    claim = None if leader is None else _claim(session, leader)
    most = session.options.max_trials
    out_of_looks = most is not None and session.trials_done + len(session.elsewhere) >= most
    looks = [] if out_of_looks else list(_looks(session))
    began = leader is not None and session.claim_rounds(leader.config) is not None
    sharpened = takewhile(lambda line: line.kind in ("probe", "trace"), reversed(session.store.ledger))
    return State(
        looks=looks,
        sharpen=list(_sharpening(session, looks)) if looks else (),
        sharpened_s=sum(line.seconds for line in sharpened),
        hand=None if leader is None else _hand(session, leader),
        check=None if leader is None else _check(session, leader),
        pairs=[] if leader is None else list(_pairs(session, leader)),
        leader_needs_s=0.0 if leader is None else needs_s(session, leader.config),
        claim=claim,
        shown=None if leader is None or claim is None or began else shown_gain(session, leader),
        claim_fitted=session.claim_fitted,
        plain_leads=leader is not None and leader.config == session.plain_config,
        claim_began=began,
        out_of_looks=out_of_looks,
        hopeful=bool((session.model.hopeful() if session.sampler is None else session.model.assess().untried).any()),
        running=() if session.side is None else session.side.running(session.store.spent_s),
    )


def _baseline(session: Session) -> Work:
    """The baseline, at the low ends of what is predicted: a budget is refused only if it is sure to be too small."""
    config = plain_configs(session)[0]
    prediction = session.predict(config)
    optimism = prediction.step_time_low_s / prediction.step_time_s
    fixed_s = session.trial_cost.fixed_s
    return Work(
        kind="baseline",
        config=config,
        cost_s=fixed_s + optimism * max(0.0, session.model.cost_s(config) - fixed_s),
        needs_s=optimism * first_steps_s(session.trial_cost, session.parity_cost, config),
        why="all others are compared with it",
    )


def plain_needs_s(session: Session) -> float:
    """Seconds that the baseline and a check of it are expected to take."""
    config = plain_configs(session)[0]
    return session.model.cost_s(config) + parity_s(session.trial_cost, session.parity_cost, config)


# Finding.


def _looks(session: Session) -> Iterator[Work]:
    """The untried candidates that can still win and whose look fits in the time, the best score first."""
    if session.sampler is not None:
        yield from _drawn_look(session)
        return
    model = session.model
    now = model.assess()
    gain, wanted = next_looks(now)
    ranked = ordered(now, gain, wanted & (now.cost_s <= session.left_s))
    eager = [index for index in ranked if model.candidates[index].compile == "off"]
    front = {*ranked[:MOST_LOOKS], *eager[:MOST_LOOKS]}  # near the end there may be time to prove those alone
    for index in filter(front.__contains__, ranked):
        config, step_s = model.candidates[index], model.pace * math.exp(float(now.posterior.log_time[index]))
        yield Work(
            kind="look",
            config=config,
            gain=float(gain[index]),
            cost_s=float(now.cost_s[index]),
            needs_s=needs_s(session, config, step_s),
            check_s=check_s(session, config),
            why="it has the largest expected gain for its cost",
            devices=config.world_size,
        )


def _drawn_look(session: Session) -> Iterator[Work]:
    """A look at the candidate that another sampler is going to draw; none where nothing untried fits in the time."""
    model = session.model
    now = model.assess()
    drawn = next((config for config in model.candidates if config != session.plain_config), model.candidates[0])
    all_s, checked_s = needs_s(session, drawn), check_s(session, drawn)
    wanted = now.untried & (now.cost_s <= session.left_s - checked_s)
    if wanted.any():
        cost_s = float(np.median(now.cost_s[wanted]))
        why = f"--sampler {session.options.sampler} draws it"
        yield Work(kind="look", gain=1.0, cost_s=cost_s, needs_s=all_s, check_s=checked_s, why=why)


def _sharpening(session: Session, looks: Sequence[Work]) -> Iterator[Work]:
    """The probe and the trace that the predictions of the next candidates wait for."""
    context = session.context
    probe_s = probe_cost_s(context)
    if probe_s > 0:
        yield Work(kind="probe", cost_s=probe_s, why="rates that are assumed rank all that is not tried")
    near = [look.config for look in looks[:NEAR_THE_FRONT] if look.config is not None]
    rough = [config for config in near if context.rough(config)]
    trace_s = trace_cost_s(context, context.variants(*rough)) if near and rough[:1] == near[:1] else 0.0
    if trace_s > 0:
        yield Work(kind="trace", config=near[0], cost_s=trace_s, why="the next ones are predicted without a trace")


def _hand(session: Session, leader: CandidateRuns) -> Work | None:
    """The look at the hand setting, once there is a leader to compare with it.

    None where the baseline is the user's own setting: that is the one that a person chose.
    """
    chosen = session.hand_config
    if chosen is not None and (session.has_verdict(chosen) or chosen in session.model.out_of_turn):
        return None  # it was looked at, or something outside ended each run of it
    if session.plain_config in (leader.config, session.own_config):
        return None
    if session.side is not None and any(begun.work.kind == "hand setting" for begun in session.side.begun.values()):
        return None  # the ledger has it when it ends
    config = chosen or hand_setting(session)
    if config is None or config in session.elsewhere:
        return None
    tried = session.has_verdict(config)
    return Work(
        kind="hand setting",
        config=config,
        gain=max(HAND_GAIN, session.model.gain_of(config)),
        cost_s=0.0 if tried else session.model.cost_s(config),
        needs_s=needs_s(session, config),
        check_s=check_s(session, config),
        why="the plan is compared with what a careful person would set",
        devices=config.world_size,
    )


def _pairs(session: Session, leader: CandidateRuns) -> Iterator[Work]:
    """The leader beside each configuration that may be as fast: two fresh processes, in an order that is drawn."""
    spread, cost = session.run_spread, session.trial_cost
    if "pair" in session.taken:  # rounds are numbered one after the other
        return
    others, runner_up = session.contenders(leader), _runner_up(session, leader)
    if runner_up is not None and all(other.config != runner_up.config for other in others):
        others = [runner_up, *others]
    thirds = [runs for runs in session.eligible if runs.finalist_runs] if leader.finalist_runs else []
    for other in others:
        made = len(shared_rounds((leader, other)))
        if other.config in session.unpaired or made >= MOST_PAIRS or (made and is_decided(leader, other, spread)):
            continue
        unlike = other.look_is_unlike or leader.look_is_unlike
        one, best = match_rounds(other, leader) if unlike else (other, leader)
        paced = not made  # side by side both had the same moments
        difference = math.log(_counted_s(session, one, paced=paced) / _counted_s(session, best, paced=paced))
        sliced = session.in_slices(leader.first, other.first)
        pair_sd = math.sqrt(2) * (SLICED if sliced else spread).sd
        sd = pair_sd / math.sqrt(made) if made and unlike else spread.sd * math.sqrt(2 / (1 + made))
        if not made and (found := _by_others(thirds, leader, other)) is not None:
            difference, sd = found
        elif not made:
            sd = math.hypot(sd, max(0.0, other.first.disturbed_sd - leader.first.disturbed_sd))
        gain = pair_gain(difference, sd, pair_sd, ratio_sd=session.model.ratio_sd(leader.config, other.config))
        if runner_up is not None and other.config == runner_up.config:
            gain = max(gain, FIRST_PAIR_GAIN)
        yield Work(
            kind="pair",
            config=other.config,
            gain=gain,
            cost_s=cost.round_s(leader.first, other.first, sliced=sliced, slower=_slower(session)),
            needs_s=needs_s(session, other.config),
            check_s=check_s(session, other.config),
            why="single runs do not tell it from the leader",
            devices=max(leader.config.world_size, other.config.world_size),
        )


def _by_others(
    thirds: Sequence[CandidateRuns], leader: CandidateRuns, other: CandidateRuns
) -> tuple[float, float] | None:
    """How far the log step time of a configuration lies above the leader's, and its standard deviation.

    By pairs in slices of both with third ones: what lost to an earlier leader has lost to one that won against that.
    None: there are no such pairs.
    """
    deviation, _ = SLICED.of_ratio()
    found = []
    for third in thirds:
        links = [match_rounds(other, third), match_rounds(third, leader)]
        rounds = [len(shared_rounds(link)) for link in links]
        if all(rounds) and in_slices(*links[0], *links[1]):
            difference = sum(math.log(a.step_time.median / b.step_time.median) for a, b in links)
            found.append((difference, deviation**2 * sum(1 / number for number in rounds)))
    if not found:
        return None
    weight = sum(1 / variance for _, variance in found)
    return sum(difference / variance for difference, variance in found) / weight, weight**-0.5


def _runner_up(session: Session, leader: CandidateRuns) -> CandidateRuns | None:
    """The next best of a leader that has no pair: where pairs are in slices, it is to win one before its claim."""
    if leader.finalist_runs or leader.config == session.plain_config or session.objective.name != "throughput":
        return None
    barred = {leader.config, session.plain_config, *session.unpaired}
    found = next((runs for runs in session.ranked(session.eligible) if runs.config not in barred), None)
    return found if found is not None and session.in_slices(leader.first, found.first) else None


def _counted_s(session: Session, runs: CandidateRuns, *, paced: bool) -> float:
    """Its step time (where cost is looked for, of all its ranks together); `paced`: if all cores had been as fast."""
    pace = statistics.geometric_mean(session.model.pace_of(run) for run in runs.runs) if paced else 1.0
    return runs.step_time.median * devices_of(session.objective, runs.config) / pace


# Proving.

CHECK_WORTH = 0.01
"""A leader that has passed its check is worth so much more than one that has not, where runs are not seen to differ by
more. Chosen: a check takes the time of some looks."""

PROOF_WORTH = 0.05
"""A leader that can still be proved in the time that is left is worth so much more (a share of the speed) than one that
cannot. Chosen. Two looks at a GPT-2 differed by less; the one that compiled led, its check took the time of the rounds,
and nothing was claimed, though the other could have had both."""


def find_leader(session: Session) -> CandidateRuns | None:
    """The best so far, by all runs that the choice may rest on; None: nothing that may be the plan has run.

    Of those within PROOF_WORTH of the fastest, the first whose proof fits in the time that is left: its parity check
    and its claim; else its check. Of these one that has passed its check leads before one that is faster by less than
    two runs of one configuration differ: the other's check would take the time of looks. From the first round of a
    claim on its configuration leads: what is known of the spread changes with each round, and another would have no
    time for a claim of its own.
    """
    best_first = session.ranked(session.eligible)
    if not best_first:
        return None
    claimed = next((runs for runs in best_first if session.claim_rounds(runs.config) is not None), None)
    first = best_first[0]
    if claimed is not None or first.config == session.plain_config or session.objective.name != "throughput":
        return claimed or first
    untold = _untold(session.run_spread)

    def times_first(one: CandidateRuns) -> float:
        """Its step time over that of the first; what ran side by side is compared there."""
        if shared_rounds((one, first)):
            return speed_ratio(first, one).median
        return at_plain_pace_s(session, one) / at_plain_pace_s(session, first)

    near = [one for one in best_first if one.config != session.plain_config and times_first(one) <= 1 + PROOF_WORTH]

    def worth(one: CandidateRuns) -> tuple[int, bool]:
        is_checked = session.store.parity_of(one.config) is not None  # what failed is not among them
        return _provable(session, one), is_checked and times_first(one) <= 1 + untold

    return max(near, key=worth)


def _untold(spread: Spread) -> float:
    """By how much a look may be faster and say nothing, as a share: what was seen here, not what is assumed."""
    seen = spread.freedom > 0 or spread.sd > RUN_SPREAD  # more than is assumed: the cores themselves vary
    return min(PROOF_WORTH, math.sqrt(2) * spread.sd) if seen else CHECK_WORTH


def _provable(session: Session, runs: CandidateRuns) -> int:
    """2: its parity check and its claim fit in the time that is left, or are made; 1: the check does; 0: nothing."""
    left_s, claim = session.left_s - check_s(session, runs.config), _claim(session, runs)
    if session.store.parity_of(runs.config) is None and left_s < 0:
        return 0
    return 2 if claim is None or TRIED_SHARE * claim.cost_s <= left_s else 1


def needs_s(session: Session, config: TrainingConfig, step_s: float | None = None) -> float:
    """Seconds that a configuration needs if it leads: its parity check and the fewest rounds of a claim.

    While other work disturbs each trial, the check alone: rounds that could claim nothing left a GPT-2 one look in ten
    minutes. `step_s`: what its step is expected to take; None: it is predicted here, which takes some 10 ms.
    """
    plain = session.baseline
    if plain is None or config == plain.config:
        return 0.0
    if is_under_load(session.store.trials):  # no claim holds beside other work
        return check_s(session, config)
    rounds = rounds_kept(_round_spread(session, config))
    return check_s(session, config) + SLOW_MOMENTS * rounds * round_s(session, config, step_s)


def shown_gain(session: Session, leader: CandidateRuns) -> ShownGain | None:
    """What the rounds of its claim are expected to show: they compete with looks and pairs for the time.

    Once four rounds were kept for a leader by 1.08 times, before any look: then a GPT-2 was looked at once in ten
    minutes, though a further look promised a quarter more. Once looks that promised 1 % left two rounds, which did not
    show a gain of 1.19 times; and once five to seven pairs between an optimizer's forms left two for 1.1 times.
    """
    if session.objective.name != "throughput" or not _is_sliced(session, leader.config):
        return None
    if is_under_load(session.store.trials):  # beside other work no claim holds
        return None
    (gain, sd), each_s = believed_gain(session, leader), SLOW_MOMENTS * round_s(session, leader.config)
    most = rounds_needed(SLICED, gain, sd)
    return ShownGain(gain=gain, sd=sd, round_s=each_s, most=most) if most > rounds_kept(SLICED) else None


GAIN_SD = 0.15
"""Of the logarithms of the gains that searches look at: the prior beside which the leader's is judged. In the zoo and
of GPT-2 on CPUs they are mostly 0 to 0.3 (benchmarks/results/anytime.jsonl). Without it claims had two rounds where
three or four show the gain: 7 of 23 searches of the zoo showed one, with it 19 of the same."""


def believed_gain(session: Session, leader: CandidateRuns) -> tuple[float, float]:
    """The logarithm of the leader's speed-up, less what it owes to chance, and its standard deviation.

    That is the posterior of a normal prior with GAIN_SD, the looks, and pairs with the baseline in slices. Where runs
    differ by 20 %, a look at 1.6 times the baseline's speed speaks for 1.1.
    """
    plain = session.baseline
    assert plain is not None and plain.step_time_s is not None
    run_sd, _ = session.run_spread.of_ratio()
    known = [(max(0.0, math.log(plain.step_time_s.median / at_plain_pace_s(session, leader))), run_sd)]
    beside = next((runs for runs in session.eligible if runs.config == plain.config), None)
    if beside is not None and in_slices(*(pair := match_rounds(leader, beside))) and (rounds := shared_rounds(pair)):
        pair_sd, _ = SLICED.of_ratio()
        known.append((math.log(speed_ratio(*pair).median), pair_sd / math.sqrt(len(rounds))))
    weight = 1 / GAIN_SD**2 + sum(1 / sd**2 for _, sd in known)
    return sum(seen / sd**2 for seen, sd in known) / weight, weight**-0.5


def at_plain_pace_s(session: Session, runs: CandidateRuns) -> float:
    """Its step time as the baseline's is compared with it: if its cores had been as fast as there."""
    believed_s = session.model.believed_s(runs.config) if runs.look_is_unlike else runs.believed_s
    if believed_s is not None:
        return replace(runs, believed_s=believed_s).single_s
    counted = [runs.first] if runs.look_is_unlike else runs.runs
    return runs.look_s / statistics.geometric_mean(session.model.pace_of(run) for run in counted)


def check_s(session: Session, config: TrainingConfig) -> float:
    """Expected seconds of its parity check; 0 where it has passed one."""
    if session.store.parity_of(config) is not None:
        return 0.0
    running_s, compiling_s = parity_parts_s(session.trial_cost, session.parity_cost, config)
    factor = _check_factor(session)
    expected_s = session.model.pace * running_s + UNKNOWN_CHECK_S if factor is None else running_s * factor
    return max(expected_s + compiling_s, LEAST_CHECK_S)


def _check_factor(session: Session) -> float | None:
    """How many times what is expected, compiling apart, the checks of this search took; None before one."""
    made = []
    for line in session.store.ledger:
        if line.kind == "parity" and line.config is not None:
            running_s, compiling_s = parity_parts_s(session.trial_cost, session.parity_cost, line.config)
            parity = session.store.parity_of(line.config)
            if parity is None or not parity.finished:
                continue  # it was ended
            if any(check.name.endswith("own length") for check in parity.checks):
                running_s += own_length_s(session.trial_cost, session.parity_cost, line.config)
            made.append((line.seconds - compiling_s) / running_s)
    least, most = CHECK_FACTORS
    return min(max(float(np.median(made)), least), most) if made else None


def round_s(session: Session, config: TrainingConfig, step_s: float | None = None) -> float:
    """Expected seconds of one round of the claim: a run of the configuration and one of the baseline."""
    plain, cost, model = session.baseline, session.trial_cost, session.model
    assert plain is not None
    first, sliced, slower = session.first_run(config), _is_sliced(session, config), _slower(session)
    if first is not None:
        return cost.round_s(first, plain, sliced=sliced, slower=slower)
    own_s = cost.warm_s(config, model.step_s(config) if step_s is None else step_s)
    twice_s = cost.round_s(plain, plain, sliced=False, slower=slower)
    return own_s + cost.round_s(plain, plain, sliced=sliced, slower=slower) - twice_s / 2


def _slower(session: Session) -> Callable[[Trial], float]:
    """How many times as long a step takes on the cores of now as on those of a trial."""
    return lambda trial: session.model.pace / session.model.pace_of(trial)


def _is_sliced(session: Session, config: TrainingConfig) -> bool:
    """Whether its rounds with the baseline are in slices; of what has not run, as the baseline beside itself."""
    plain, first = session.baseline, session.first_run(config)
    assert plain is not None
    return session.in_slices(first or plain, plain) and config.world_size == 1


def _round_spread(session: Session, config: TrainingConfig) -> Spread:
    """Between the runs of a round with the baseline."""
    return SLICED if _is_sliced(session, config) else session.run_spread


def _check(session: Session, leader: CandidateRuns) -> Work | None:
    if session.known_parity(leader.config) is not None:
        return None
    passed = [c for c in session.eligible if (found := session.store.parity_of(c.config)) is not None and found.passed]
    plain = session.baseline
    known = {numerics_of(candidate.config) for candidate in (*passed, *(() if plain is None else (plain,)))}
    gain = 0.0
    if plain is not None and plain.step_time_s is not None:
        base_s = plain.step_time_s.median
        safe_s = min((at_plain_pace_s(session, candidate) for candidate in passed), default=base_s)
        gain = check_gain(
            math.log(base_s / at_plain_pace_s(session, leader)),
            max(0.0, math.log(base_s / safe_s)),
            kind_has_passed=numerics_of(leader.config) in known,
        )
    option = _check_of(session, leader.config, gain, "it leads, and is the plan only if it trains the same")
    return None if option.key in session.taken else option


def _check_of(session: Session, config: TrainingConfig, gain: float, why: str) -> Work:
    return Work(kind="parity", config=config, gain=gain, cost_s=check_s(session, config), why=why)


def numerics_of(config: TrainingConfig) -> tuple[object, ...]:
    """The knobs that change what is computed: configurations that share them pass or fail a check together, mostly."""
    return tuple(getattr(config, knob) for knob in NUMERICS)


NUMERICS = (
    "precision", "fp8", "compile", "attention", "loss", "kernels", "optimizer_state", "parameters", "tp", "pp",
)  # fmt: skip


def _claim(session: Session, leader: CandidateRuns) -> Work | None:
    """The fewest rounds of the claim, or its next one once it began; None: nothing to claim, or all are made."""
    plain = session.baseline
    if plain is None or leader.config == plain.config or session.claim_is_over(leader.config):
        return None
    rounds = LEAST_ROUNDS if session.claim_rounds(leader.config) is None else 1
    return Work(
        kind="claim",
        config=leader.config,
        cost_s=rounds * round_s(session, leader.config),
        why="the speed-up rests on runs that had no part in the choice",
    )


def claim_size(session: Session, leader: CandidateRuns) -> int:
    """How many rounds the claim has, fixed before the first: what shows the gain, as far as the time goes.

    The last is counted where it would be begun. If the time ends before it, those that are complete count.
    """
    affordable = math.floor(session.left_s / max(round_s(session, leader.config), 1e-9) + 1 - TRIED_SHARE)
    wanted = rounds_needed(_round_spread(session, leader.config), *believed_gain(session, leader))
    return max(LEAST_ROUNDS, min(wanted, affordable))
