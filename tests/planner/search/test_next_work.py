"""What runs next, case by case, and for some thousand states that are drawn: the one constraint, and an end."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from autoplan.planner.search.next_work import (
    ENDS,
    LEAST_PAIR_GAIN,
    SPARED_LOOKS,
    TRIED_SHARE,
    ShownGain,
    State,
    Work,
    check_gain,
    next_work,
    pair_gain,
    score,
)
from autoplan.strategies.config import TrainingConfig

A, B, C = (TrainingConfig(micro_batch=size) for size in (1, 2, 4))


def look(config: TrainingConfig = A, gain: float = 0.1, cost_s: float = 10.0, **more: Any) -> Work:
    return Work(kind="look", config=config, gain=gain, cost_s=cost_s, why="a look", **more)


def option(kind: Any, cost_s: float = 10.0, **more: Any) -> Work:
    return Work(kind=kind, cost_s=cost_s, **more)


# The plain run.


def test_a_budget_that_cannot_hold_the_plain_run_and_a_check_is_refused():
    plain = State(baseline=option("baseline", 20.0, needs_s=15.0))
    refused = next_work(plain, 30.0)
    assert (refused.kind, refused.ended_by) == ("end", "time")
    assert "35 s" in refused.why and "30 s are left" in refused.why
    assert next_work(plain, 35.0).kind == "baseline", "the budget that it named will do"
    assert "0 s are left" in next_work(plain, -3.0).why


def test_the_plain_run_comes_first_of_all():
    everything = State(baseline=option("baseline"), looks=[look(gain=9.0)], check=option("parity", gain=9.0))
    assert next_work(everything, 100.0).kind == "baseline"


# The one constraint.


def test_a_look_leaves_what_the_leader_still_needs():
    state = State(looks=[look(cost_s=10.0, needs_s=5.0)], leader_needs_s=30.0)
    assert next_work(state, 40.0).kind == "look"
    assert next_work(state, 39.9).kind == "end"


def test_a_look_leaves_its_own_proof_too():
    state = State(looks=[look(cost_s=10.0, needs_s=35.0)], leader_needs_s=30.0)
    assert next_work(state, 45.0).kind == "look"
    assert next_work(state, 44.9).kind == "end"


def test_a_leader_that_is_the_plain_run_needs_nothing():
    assert next_work(State(looks=[look(cost_s=10.0)]), 10.0).kind == "look"


def test_a_budget_that_holds_no_claim_still_finds_and_checks():
    """A checked plan whose speed-up is not claimed is worth more than none; without its check it is none."""
    state = State(looks=[look(cost_s=10.0, needs_s=30.0, check_s=12.0)])
    assert next_work(state, 22.0).kind == "look"
    assert next_work(state, 21.9).kind == "end"
    leads = replace(state, check=option("parity", 15.0), leader_needs_s=40.0)
    assert next_work(leads, 25.0).kind == "look"
    assert next_work(leads, 24.9).kind == "parity", "the leader's check is longer than the candidate's"


def test_no_look_is_made_that_could_not_be_proved_after_others_were_with_their_claim():
    state = State(looks=[look(cost_s=2.0, needs_s=10.0, check_s=3.0)], claim_fitted=True, plain_leads=True)
    assert next_work(state, 12.0).kind == "look"
    assert next_work(state, 11.9).kind == "end", "the plain run leads, and is the plan"
    assert next_work(replace(state, plain_leads=False), 11.9).kind == "look", "without it there is no plan"
    assert next_work(replace(state, claim_fitted=False), 11.9).kind == "look"


def test_the_claim_is_not_given_up_for_looks_where_the_budget_holds_it():
    state = State(looks=[look(cost_s=1.0, needs_s=25.0, check_s=2.0)], leader_needs_s=20.0, claim=option("claim", 20.0))
    assert next_work(state, 20.5).kind == "claim"
    assert next_work(replace(state, claim=None, leader_needs_s=0.0), 20.5).kind == "look", "there is none to give up"
    slow = replace(state, leader_needs_s=23.0)  # with the reserve for slow moments
    assert next_work(slow, 20.5).kind == "claim", "a check that took longer than expected ate the reserve alone"
    assert next_work(slow, 20.0 * TRIED_SHARE).kind == "claim", "where its rounds would be begun, they are"
    assert next_work(slow, 20.0 * TRIED_SHARE - 0.1).kind == "look"
    assert next_work(replace(slow, check=option("parity", 15.0)), 30.0).kind == "look", "with its check it does not fit"


def test_a_piece_is_made_if_the_claim_shows_no_less_after_it():
    """One that gains more than the rounds do whose time it takes; of others, what leaves their time."""
    rounds = ShownGain(gain=0.1, round_s=10.0, most=5)
    at = [rounds.within(seconds) for seconds in (19.0, 20.0, 30.0, 40.0, 50.0, 60.0)]
    assert at[0] == 0.0 and sorted(set(at)) == at[:-1] and at[-1] == at[-2] < 0.1, "the fewest are two, the most five"
    assert rounds.within(20.0, more=0.1) > 0.1 + rounds.within(20.0), "a large gain is shown by few"

    state = State(leader_needs_s=20.0, claim=option("claim", 20.0), shown=rounds)
    good, little = option("pair", gain=0.03), option("pair", gain=0.01)

    def next_kind(pair: Work, left_s: float, **facts: Any) -> str:
        return next_work(replace(state, pairs=[pair], **facts), left_s).kind

    assert [next_kind(good, left_s) for left_s in (29.0, 39.0, 49.0)] == ["claim", "pair", "pair"]
    assert [next_kind(little, left_s) for left_s in (29.0, 39.0, 60.0)] == ["claim", "claim", "pair"]
    check = option("parity", 15.0)
    assert next_kind(little, 50.0, check=check, leader_needs_s=35.0) == "parity", "its check takes some of the time"
    assert next_kind(little, 60.0, check=check, leader_needs_s=35.0) == "pair"
    assert next_kind(little, 39.0, shown=None) == "pair", "more rounds would show no more"

    looks = replace(state, looks=[look(gain=0.2, cost_s=10.0)])
    assert next_work(looks, 31.0).kind == "look", "what gains much is shown by the fewest rounds"
    assert next_work(replace(looks, looks=[look(gain=0.03, check_s=30.0)]), 60.0).kind == "claim", (
        "it needs a check too"
    )
    hand = replace(state, hand=option("hand setting", 10.0, gain=0.2))
    assert [next_work(hand, left_s).kind for left_s in (59.0, 60.0)] == ["claim", "hand setting"], "it is to compare"
    drawn = replace(looks, looks=[replace(look(gain=1.0, cost_s=10.0), config=None)])
    assert [next_work(drawn, left_s).kind for left_s in (59.0, 60.0)] == ["claim", "look"], "its gain is not known"
    sharper = replace(looks, looks=[look(gain=0.01, cost_s=10.0)], sharpen=[option("probe", 20.0)])
    assert next_work(sharper, 65.0).kind == "look", "a probe does not take the time of the rounds either"
    assert next_work(sharper, 80.0).kind == "probe"


def test_the_next_best_that_fits_is_taken_where_the_best_does_not():
    state = State(looks=[look(A, gain=0.9, cost_s=50.0), look(B, gain=0.1, cost_s=5.0)])
    assert next_work(state, 100.0).config == A
    assert next_work(state, 20.0).config == B


@pytest.mark.parametrize("kind", ["pair", "hand setting"])
def test_pairs_and_the_hand_setting_are_under_the_same_constraint(kind: Any):
    one = option(kind, 10.0, gain=0.1, needs_s=20.0, check_s=8.0)
    state = State(pairs=[one]) if kind == "pair" else State(hand=one)
    leads = replace(state, leader_needs_s=15.0)
    assert next_work(leads, 30.0).kind == kind
    assert next_work(leads, 29.9).kind == "end"
    assert next_work(replace(leads, leader_needs_s=25.0), 34.9).kind == "end"


# Parity.


def test_the_check_of_a_leader_is_never_dropped():
    check = option("parity", 50.0, gain=0.2)
    for left_s in (100.0, 10.0, 0.1):
        assert next_work(State(check=check, leader_needs_s=80.0, out_of_looks=True), left_s).kind == "parity"
    assert next_work(State(check=replace(check, gain=0.0)), 1.0).kind == "parity", "also one that is sure to pass"
    assert next_work(State(check=check), 0.0).kind == "end", "it would be ended at once"


def test_a_check_does_not_count_twice_in_what_the_leader_needs():
    """The leader's needs have the check in them: with 60 s left the check (50 s) fits, and is weighed with looks."""
    state = State(check=option("parity", 50.0, gain=0.3), looks=[look(gain=0.001)], leader_needs_s=55.0)
    assert next_work(state, 60.0).kind == "parity"


def test_a_check_waits_behind_looks_that_gain_more_for_their_time():
    check = option("parity", 10.0, gain=0.05)
    assert next_work(State(looks=[look(gain=0.5)], check=check), 1000.0).kind == "look"
    assert next_work(State(looks=[look(gain=0.01)], check=check), 1000.0).kind == "parity"


def test_the_check_comes_before_the_claim():
    state = State(check=option("parity"), claim=option("claim"))
    assert next_work(state, 100.0).kind == "parity"


# What comes before a look.


def test_a_probe_or_a_trace_comes_before_a_look_if_it_costs_less_than_what_it_spares():
    for kind in ("probe", "trace"):
        cheap: Work = option(kind, 10.0 * SPARED_LOOKS)
        state = State(looks=[look(cost_s=10.0)], sharpen=[cheap])
        assert next_work(state, 1000.0).kind == kind
        dear = replace(state, sharpen=[replace(cheap, cost_s=10.0 * SPARED_LOOKS + 0.1)])
        assert next_work(dear, 1000.0).kind == "look"
        assert next_work(replace(state, sharpened_s=0.1), 1000.0).kind == "look", "with those before it, it is as dear"


def test_a_probe_is_left_out_where_the_look_would_not_fit_after_it():
    state = State(looks=[look(cost_s=10.0, needs_s=20.0, check_s=5.0)], sharpen=[option("probe", 15.0)])
    assert next_work(state, 45.0).kind == "probe"
    assert next_work(state, 44.9).kind == "look"
    assert next_work(state, 29.9).kind == "look", "nor without a claim"


def test_without_a_claim_a_probe_leaves_the_check_of_the_leader():
    state = State(looks=[look(cost_s=10.0, needs_s=90.0)], sharpen=[option("probe", 10.0)], leader_needs_s=90.0)
    checked = replace(state, check=option("parity", 15.0))
    assert next_work(checked, 35.0).kind == "probe"
    assert next_work(checked, 34.9).kind == "look"


def test_a_probe_is_for_looks_alone():
    pair = option("pair", gain=0.5)
    state = State(looks=[look(gain=0.01)], pairs=[pair], sharpen=[option("probe", 1.0)])
    assert next_work(state, 1000.0).kind == "pair"


# Proving.


def test_the_rounds_of_a_claim_are_not_interrupted():
    """Whatever came up meanwhile: stopping them where they look good, or going on, would choose among claims."""
    state = State(claim=option("claim", 20.0), claim_began=True, looks=[look(gain=9.0)], pairs=[option("pair", gain=9)])
    assert next_work(state, 1000.0).kind == "claim"
    assert next_work(replace(state, claim=None), 1000.0).kind == "end", "and nothing comes after them"
    assert next_work(state, TRIED_SHARE * 20.0).kind == "claim", "without it those before are lost"
    assert next_work(state, 0.99 * TRIED_SHARE * 20.0).kind == "end", "a round that does not fit is not begun"
    first = replace(state, claim_began=False, looks=[], pairs=[])
    assert [next_work(first, share * 20.0).kind for share in (TRIED_SHARE, 0.99 * TRIED_SHARE)] == ["claim", "end"]


def test_the_claim_comes_when_nothing_that_betters_the_plan_is_left():
    state = State(claim=option("claim", 20.0), leader_needs_s=20.0)
    assert next_work(state, 20.0).kind == "claim"
    assert next_work(replace(state, looks=[look(cost_s=10.0)]), 30.0).kind == "look"
    assert next_work(replace(state, looks=[look(cost_s=10.0)]), 29.0).kind == "claim"


def test_a_pair_that_gains_next_to_nothing_is_not_made():
    state = State(pairs=[option("pair", gain=0.9 * LEAST_PAIR_GAIN)])
    assert next_work(state, 1000.0).kind == "end"


# The limits.


def test_what_takes_more_devices_than_are_free_waits():
    state = State(looks=[look(A, gain=0.9, devices=4), look(B, gain=0.1)])
    assert next_work(state, 100.0, 4).config == A
    assert next_work(state, 100.0, 2).config == B


def test_after_the_last_trial_there_are_no_looks_and_no_hand_setting_but_proof():
    state = State(
        looks=[look()], hand=option("hand setting", gain=0.5), pairs=[option("pair", gain=0.1)], out_of_looks=True
    )
    assert next_work(state, 1000.0).kind == "pair"
    assert next_work(replace(state, pairs=[], check=option("parity")), 1000.0).kind == "parity"


@pytest.mark.parametrize(
    ("state", "ended_by"),
    [
        (State(looks=[look(cost_s=99.0)], hopeful=True), "time"),
        (State(hopeful=True, out_of_looks=True), "max_trials"),
        (State(), "nothing_left"),
    ],
    ids=["time", "max_trials", "nothing_left"],
)
def test_an_end_says_why(state: State, ended_by: Any):
    end = next_work(state, 50.0)
    assert (end.kind, end.ended_by, end.why) == ("end", ended_by, ENDS[ended_by])
    assert next_work(replace(state, check=option("parity", 5.0)), 50.0).ended_by == ended_by, "so does what proves"


# Texts.


def test_a_piece_says_why_it_is_made_and_what_it_was_preferred_to():
    state = State(looks=[look(A, gain=0.4, cost_s=16.0), look(B, gain=0.041, cost_s=23.0)])
    work = next_work(state, 100.0)
    assert work.why == "a look"
    assert work.over == "look micro_batch=2 (gain 4.2%, 23 s)"
    alone = next_work(replace(state, looks=state.looks[:1]), 100.0)
    assert alone.over == ""


def test_what_comes_before_a_look_was_preferred_to_that_look():
    state = State(looks=[look(A, gain=0.4, cost_s=16.0)], sharpen=[option("probe", 5.0, why="rates are assumed")])
    work = next_work(state, 100.0)
    assert (work.kind, work.why, work.over) == ("probe", "rates are assumed", "look micro_batch=1 (gain 49.2%, 16 s)")


# What a piece gains.


def test_what_is_dear_waits_and_does_not_starve():
    """Sixteen times the seconds need eight times the gain; below a second nothing is cheaper still."""
    assert float(score(0.8, 160.0)) == pytest.approx(float(score(0.1, 10.0)))  # type: ignore[arg-type]
    assert float(score(0.1, 0.01)) == float(score(0.1, 1.0))  # type: ignore[arg-type]


def test_a_pair_gains_most_where_the_two_are_alike_and_not_known():
    def gain(difference: float, sd: float, pair_sd: float, ratio_sd: float = 0.1) -> float:
        return pair_gain(difference, sd, pair_sd, ratio_sd=ratio_sd)

    assert gain(0.1, 0.05, 0.03) < gain(0.0, 0.05, 0.03) < gain(-0.1, 0.05, 0.03)
    assert gain(0.0, 0.02, 0.03) < gain(0.0, 0.05, 0.03), "what is known well is not asked again"
    assert gain(0.0, 0.05, 0.1) < gain(0.0, 0.05, 0.03), "a pair that differs much tells little"
    assert gain(0.0, 0.05, 0.03) < gain(0.0, 10.0, 0.0) == pytest.approx(0.1 / math.sqrt(2 * math.pi), rel=1e-3)
    assert gain(0.1, 0.0, 0.03) == 0.0 and gain(-0.1, 0.0, 0.03) == pytest.approx(0.1)
    assert gain(-0.05, 0.03, 0.03, 0.01) < 0.01 < 0.04 < gain(-0.05, 0.03, 0.03), "of two alike the faster was lucky"
    assert gain(-0.05, 0.03, 0.03, 0.0) == 0.0


def test_a_check_gains_what_is_lost_if_the_leader_fails_it_at_the_end():
    risky = check_gain(0.7, 0.2, kind_has_passed=False)
    assert risky > check_gain(0.7, 0.2, kind_has_passed=True) > 0
    assert check_gain(0.7, 0.6, kind_has_passed=False) < risky
    assert check_gain(0.2, 0.7, kind_has_passed=False) == 0.0


# States that are drawn.


def drawn(draw: random.Random) -> State:
    """A state as a search may have it: what the leader needs holds its check and its claim."""

    def some(kind: Any, most_s: float = 60.0, **more: Any) -> Work:
        facts = {"gain": draw.choice([0.0, 0.0005, 0.01, 0.1, 0.7]), "cost_s": draw.uniform(0.2, most_s)}
        facts |= {"needs_s": draw.choice([0.0, draw.uniform(0.0, 80.0)]), "devices": draw.choice([1, 1, 1, 2])}
        facts["check_s"] = draw.random() * facts["needs_s"]
        return Work(kind=kind, **(facts | more))

    def maybe(kind: Any, **more: Any) -> Work | None:
        return some(kind, **more) if draw.random() < 0.5 else None

    check, claim = maybe("parity", needs_s=0.0, devices=1), maybe("claim", needs_s=0.0, devices=1)
    looks = [some("look") for _ in range(draw.randrange(6))]
    return State(
        looks=looks,
        sharpen=[some(kind) for kind in ("probe", "trace") if looks and draw.random() < 0.5],
        hand=maybe("hand setting"),
        check=check,
        pairs=[some("pair") for _ in range(draw.randrange(3))],
        leader_needs_s=sum(one.cost_s for one in (check, claim) if one is not None),
        claim=claim,
        shown=None if claim is None else ShownGain(gain=draw.uniform(0.0, 0.3), round_s=claim.cost_s / 2, most=5),
        claim_began=claim is not None and draw.random() < 0.2,
        out_of_looks=draw.random() < 0.2,
        hopeful=draw.random() < 0.5,
    )


def without(state: State, work: Work) -> State:
    """The state after a piece: it is made, and a look whose configuration leads then has its own needs."""
    same = [one for one in state.looks if (one.gain, one.cost_s) == (work.gain, work.cost_s)]
    match work.kind:
        case "look":
            return replace(state, looks=[one for one in state.looks if one is not same[0]])
        case "probe" | "trace":
            return replace(state, sharpen=[one for one in state.sharpen if one.kind != work.kind])
        case "hand setting":
            return replace(state, hand=None)
        case "pair":
            return replace(state, pairs=[one for one in state.pairs if one.cost_s != work.cost_s])
        case "parity":
            return replace(state, check=None, leader_needs_s=state.claim.cost_s if state.claim else 0.0)
        case "claim":
            return replace(state, claim=None, claim_began=True, leader_needs_s=0.0)
    raise AssertionError(work.kind)


def test_in_any_state_the_leader_keeps_what_it_needs_and_the_search_ends():
    draw, kinds = random.Random(0), set()
    for _ in range(3000):
        state, left_s, devices = drawn(draw), draw.uniform(-10.0, 400.0), draw.choice([1, 2])
        for _ in range(20):
            work = next_work(state, left_s, devices)
            kinds.add(work.kind)
            if work.kind == "end":
                break
            if work.kind == "claim":
                assert TRIED_SHARE * work.cost_s <= left_s
            elif work.kind != "parity":
                before_look = work.kind in ("probe", "trace")
                after_s = left_s - work.cost_s
                assert after_s >= (0.0 if before_look else work.check_s), "it could not be checked if it leads"
                assert after_s >= (0.0 if state.check is None else state.check.cost_s), "the leader's check was spent"
                assert not 0 < state.leader_needs_s <= left_s or after_s >= state.leader_needs_s, "its claim was spent"
                assert before_look or work.devices <= devices
                assert not state.claim_began
                assert not state.out_of_looks or work.kind == "pair", "--max-trials was passed"
            state, left_s = without(state, work), left_s - work.cost_s
        else:
            pytest.fail("it did not end")
        assert state.check is None or left_s <= 0, "a leader was left unchecked"
        cheap = [one for one in state.looks if one.cost_s + max(one.needs_s, state.leader_needs_s) <= left_s]
        open_to = not (state.claim_began or state.out_of_looks)
        assert not open_to or not [one for one in cheap if one.devices <= devices], "it ended with time for a look"
    assert kinds >= {"look", "probe", "trace", "hand setting", "pair", "parity", "claim", "end"}
