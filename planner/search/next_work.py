"""The choice of what runs next: one pure function for the live search and for the replays.

    work = next_work(state, left_s)

In: a `State`, what is known now, and the seconds that are left. Out: the next piece of `Work`, with what it is expected
to cost and to gain, and what it was preferred to. Nothing else in a search decides what runs next. docs/search.md says
what each piece gains (in the natural logarithm of the plan's speed-up), and the one constraint.

If the budget has no room for a claim, looks and the parity check go on without one: a checked plan whose speed-up rests
on single looks is worth more than none. Where looks with a claim were made and the baseline leads, it is the plan: what
a last look finds could not be proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.search.claim import LEAST_ROUNDS, expected_to_show
from autoplan.strategies.config import TrainingConfig

Array = NDArray[np.float64] | np.float64

Kind = Literal["baseline", "probe", "trace", "look", "hand setting", "pair", "parity", "claim", "loader", "end"]
EndedBy = Literal["time", "max_trials", "nothing_left"]

LEAST_PAIR_GAIN = 0.003
"""A pair that is expected to gain less (as a share of the speed) is not made: the two are the same to a user."""

SPARED_LOOKS = 3.0
"""A probe, or a trace for the next candidates, is made if it costs less than so many looks, with those since the last
look. Assumed: in replays a search without timed operations needed 1 to 6 looks more."""

ALONE: Sequence[Kind] = ("baseline", "claim", "end")
"""Work during which no other planner of the study has any: what all others wait for, and what rests on all of it."""

BESIDE: Sequence[Kind] = ("look", "hand setting")
"""What may run on a part of the machine beside others of its kind (--side-by-side). All else runs alone."""

HAND_GAIN = 0.05
"""The gain of the hand setting, if its own expected gain is less: it shows how the plan compares with what a careful
person would set. With this it comes when looks gain little, and before the pairs. Chosen, not measured."""

COST_POWER = 0.75
"""With the gain per second (1) a search comes late to what is dear and good, a compilation. With its square root (0.5)
looks of 50 and 70 s at a GPT-2 on a CPU came before looks of 12 s that were worth more; 0.75 has these first. Replays
of recorded tables tell 0.5 and 1 hardly apart (benchmarks/search_replay.py)."""

UNCHECKED_RISK, CHECKED_RISK = 0.15, 0.02
"""The chance that a leader fails its parity check: where no configuration of its kind has passed one, and where one
has, or the baseline is of its kind. Assumed: in recorded searches of some hundred workloads about one leader in ten
failed. (A GPT-2 spent 70 s of ten minutes on the check of a leader that had another optimizer step and allocator than
the plain run; then no time was left for the look at what was faster.)"""


TRIED_SHARE = 0.8
"""The rounds of a claim are begun where such a share of their expected time is left: nothing else can use the time.
Chosen: rounds scatter by about as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A piece of work: one that could be next, or that is."""

    kind: Kind
    config: TrainingConfig | None = None  # None: it is not of one configuration, or the sampler draws it
    gain: float = 0.0  # expected, in the logarithm of the plan's speed
    cost_s: float = 0.0  # expected seconds
    needs_s: float = 0.0  # that its configuration needs afterwards if it leads then: its parity check and the claim
    check_s: float = 0.0  # of these, its parity check
    why: str = ""  # a clause for people, after "because"
    devices: int = 1  # how many it takes
    over: str = ""  # what it was preferred to; empty: there was nothing else
    ended_by: EndedBy = "nothing_left"  # why no further look is made, were there none after it

    @property
    def key(self) -> str | None:
        """The name under which one planner of a study claims it; None: each does it for itself, or it is not drawn."""
        kind = "look" if self.kind == "hand setting" else self.kind  # it is a look like any other
        if kind in ("look", "parity") and self.config is not None:
            return f"{kind} {self.config.model_dump_json(exclude_defaults=True)}"
        return kind if kind in (*ALONE, "pair") else None

    def describe(self) -> str:
        """`look micro_batch=2 (gain 4.1%, 23 s)`."""
        whose = "" if self.config is None else f" {self.config.describe()}"
        return f"{self.kind}{whose} (gain {math.expm1(self.gain):.1%}, {self.cost_s:.3g} s)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownGain:
    """What the rounds of the leader's claim, in slices, are expected to show, by the time that they have."""

    gain: float  # the logarithm of the leader's speed-up, as it is believed now
    round_s: float  # expected, of a round
    most: int  # so many rounds are made if there is time
    sd: float = 0.0  # of `gain`: how well it is known

    def within(self, left_s: float, more: float = 0.0) -> float:
        """The expected logarithm of the speed-up that is shown in so many seconds; what is not shown is no gain.

        `more` is added to the gain: what a piece that runs first is expected to find.
        """
        rounds = min(self.most, math.floor(left_s / max(self.round_s, 1e-9)))
        return expected_to_show(rounds, self.gain + more, self.sd) if rounds >= LEAST_ROUNDS else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The facts that are known when the next piece is chosen."""

    baseline: Work | None = None  # None: it has run, or does not run here
    looks: Sequence[Work] = ()  # untried configurations that can still win, the best score first
    sharpen: Sequence[Work] = ()  # probes and traces that the first of them waits for
    sharpened_s: float = 0.0  # what probes and traces since the last look took
    hand: Work | None = None  # None: it was made, or there is no leader to compare with it yet
    check: Work | None = None  # the leader's parity check; None: it passed, or the leader is the baseline
    pairs: Sequence[Work] = ()  # the leader beside each configuration that the bound does not put behind it
    leader_needs_s: float = 0.0  # its parity check and the rounds of the claim; 0 for the baseline
    claim: Work | None = None  # of the leader, to be made or gone on with; None: it is made, or there is none
    shown: ShownGain | None = None  # None: no claim is to be begun, or more rounds than the fewest show no more
    claim_fitted: bool = False  # enough looks were made while there was time for their claims
    plain_leads: bool = False  # the baseline is the plan if nothing else is found
    claim_began: bool = False  # nothing comes between its rounds, and nothing after them
    out_of_looks: bool = False  # --max-trials is reached
    hopeful: bool = False  # any untried configuration could still win, had it the time
    running: Sequence[Work] = ()  # on other parts of the machine; their costs are the seconds that are left of them


def next_work(state: State, left_s: float, free_devices: int = 1) -> Work:
    """The next piece of work; of the kind "end" where nothing is left to do, or nothing of it fits in the time.

    `left_s`: seconds of the budget that are left. `free_devices`: a piece that takes more is not chosen.
    """
    if state.baseline is not None:
        return _first(state.baseline, left_s)
    if state.claim_began:
        return _proof(state, left_s)
    options = [one for one in _finding(state) if _fits(one, state, left_s, free_devices)]
    options = [one for one in options if _shows_more(one, state, left_s)]
    if not options and not _holds_claim(state, left_s) and not (state.claim_fitted and state.plain_leads):
        options = [one for one in _finding(state) if _fits(one, state, left_s, free_devices, claimed=False)]
    if not options:
        return _proof(state, left_s)
    options.sort(key=lambda one: -float(score(np.float64(one.gain), np.float64(one.cost_s))))
    before = _before(options[0], state, left_s) if options[0].kind == "look" else None
    return _chosen(options[0], options[1:], state) if before is None else _chosen(before, options, state)


def _first(baseline: Work, left_s: float) -> Work:
    """The baseline; or the end, where the time does not even hold it and its check by the best that is predicted."""
    needed_s = baseline.cost_s + baseline.needs_s
    if needed_s <= left_s:
        return _chosen(baseline, (), State())
    left_s = max(left_s, 0.0)
    why = f"the baseline and a parity check are predicted to take {needed_s:.0f} s, and {left_s:.0f} s are left"
    return Work(kind="end", why=why, ended_by="time")


def _finding(state: State) -> Iterator[Work]:
    """The pieces that may improve the plan, in any order."""
    if not state.out_of_looks:
        yield from state.looks
        if state.hand is not None:
            yield state.hand
    if state.check is not None and state.check.gain > 0:
        yield state.check
    yield from (pair for pair in state.pairs if pair.gain >= LEAST_PAIR_GAIN)


def _fits(option: Work, state: State, left_s: float, free_devices: int, *, claimed: bool = True) -> bool:
    """The one constraint: what is left holds the proof that the leader then needs, with its claim if `claimed`."""
    return option.devices <= free_devices and _ends_s(option, state) + _needed_s(option, state, claimed) <= left_s


def _shows_more(option: Work, state: State, left_s: float) -> bool:
    """Whether the gain that the claim shows is expected to be no less if its time is spent on a piece first.

    Three or four rounds that show 10 % are worth more than a pair that decides between two configurations alike. A
    look needs a check of its own too, where the leader has passed one. What a sampler draws has no gain of its own, and
    the hand setting's is for the comparison.
    """
    if state.shown is None or option.kind == "parity":
        return True
    check_s = 0.0 if state.check is None else state.check.cost_s
    no_own = option.kind == "hand setting" or (option.kind == "look" and option.config is None)
    then_s = left_s - _ends_s(option, state) - max(check_s, option.check_s)
    now_s = left_s - _running_s(state) - check_s
    return state.shown.within(then_s, 0.0 if no_own else option.gain) >= state.shown.within(now_s)


def _ends_s(option: Work, state: State) -> float:
    """Seconds until a piece has ended, and what runs now: a look may run beside it, all else waits for it."""
    running_s = _running_s(state)
    return max(option.cost_s, running_s) if option.kind in BESIDE else option.cost_s + running_s


def _running_s(state: State) -> float:
    return max((one.cost_s for one in state.running), default=0.0)


def _holds_claim(state: State, left_s: float) -> bool:
    """Whether the leader's proof would be begun in the time that is left: then it is made, and not given up."""
    proof_s = state.leader_needs_s
    if state.claim is not None:
        check_s = 0.0 if state.check is None else state.check.cost_s
        proof_s = min(proof_s, check_s + TRIED_SHARE * state.claim.cost_s)
    return 0 < proof_s <= left_s


def _needed_s(option: Work, state: State, claimed: bool) -> float:
    """Seconds that a leader still needs after a piece: the leader of now, or the one that the piece may make."""
    if option.kind == "parity":  # is part of what the leader needs
        return 0.0
    may_lead = (option, *state.running)
    if claimed:
        return max(state.leader_needs_s, *(one.needs_s for one in may_lead))
    return max(0.0 if state.check is None else state.check.cost_s, *(one.check_s for one in may_lead))


def _before(look: Work, state: State, left_s: float) -> Work | None:
    """A probe or trace that the look's prediction waits for, if it is worth its time."""
    later_s = look.cost_s + _needed_s(look, state, True)
    if later_s > left_s:  # there is no room for the claim
        later_s = look.cost_s + _needed_s(look, state, False)
    for option in state.sharpen:
        both = replace(look, cost_s=option.cost_s + look.cost_s)
        fits = option.cost_s + later_s <= left_s and _shows_more(both, state, left_s)
        if fits and state.sharpened_s + option.cost_s <= SPARED_LOOKS * look.cost_s:
            return option
    return None


def _proof(state: State, left_s: float) -> Work:
    """Nothing that may better the plan fits any more: what the leader needs, and the end."""
    if state.check is not None and left_s > 0:
        return _chosen(state.check, (), state)
    if state.claim is not None and TRIED_SHARE * state.claim.cost_s <= left_s:
        return _chosen(state.claim, (), state)
    ended_by = _ended_by(state)
    return Work(kind="end", ended_by=ended_by, why=ENDS[ended_by])


def _ended_by(state: State) -> EndedBy:
    return "max_trials" if state.out_of_looks else "time" if state.hopeful else "nothing_left"


ENDS = {
    "time": "no candidate that could win fits in the time left, with what its proof would need",
    "max_trials": "--max-trials is reached",
    "nothing_left": "no untried candidate could still win: each is predicted, at its most optimistic, to be no faster "
    "than the best",
}


def _chosen(option: Work, rest: Sequence[Work], state: State) -> Work:
    return replace(option, over=rest[0].describe() if rest else "", ended_by=_ended_by(state))


# What a piece gains.


def score(gain: Array, cost_s: Array) -> Array:
    """Gain per seconds to the power of COST_POWER: what is expensive waits, and does not starve."""
    return np.asarray(gain / np.maximum(cost_s, 1.0) ** COST_POWER)


def pair_gain(difference: float, sd: float, pair_sd: float, *, ratio_sd: float) -> float:
    """The expected gain of running a configuration side by side with the leader.

    It takes the lead only if it wins. By the normal prior of two such configurations, the runs so far, and what the
    pair is expected to add to them, that is s x L(m / s), with L the unit normal linear loss (Raiffa and
    Schlaifer 1961, chapter 5), m the mean of the ratio now, and s how far the pair is expected to move it.

    Args:
        difference: How far its log step time is above the leader's; below 0: it looks faster.
        sd: Standard deviation of that difference, of the runs so far.
        pair_sd: The same of a pair.
        ratio_sd: Standard deviation of the true logarithm of their ratio, before any run: of two that differ in a knob
            of small effect it is small, and a look that was faster was lucky.
    """
    known = ratio_sd**2 / (ratio_sd**2 + sd**2)
    mean, variance = known * difference, known * sd**2
    moved = variance / math.hypot(math.sqrt(variance), pair_sd) if variance > 0 else 0.0
    if moved <= 0.0:
        return max(0.0, -mean)
    z = mean / moved
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return moved * (density - z * 0.5 * math.erfc(z / math.sqrt(2)))


def check_gain(leader_gain: float, safe_gain: float, *, kind_has_passed: bool) -> float:
    """The expected loss, a logarithm, if the leader fails its check at the end and not now.

    `leader_gain`, `safe_gain`: logarithms of the speed-up over the baseline, of the leader and of the fastest that has
    passed (0: the baseline). `kind_has_passed`: one with the same numerics has passed, or is the baseline.
    """
    risk = CHECKED_RISK if kind_has_passed else UNCHECKED_RISK
    return risk * max(0.0, leader_gain - safe_gain)
