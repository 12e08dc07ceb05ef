"""From the looks to the plan: what leads is checked and claimed, else the next one, else the plain run; the traps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from autoplan.planner.parity import check as parity_check
from autoplan.planner.parity import compare
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.search import run as search_run
from autoplan.planner.search import state as search_state
from autoplan.planner.search import work as search_work
from autoplan.planner.search.candidate_model import FEWEST_LOOKS, FOLLOWS_CORE
from autoplan.planner.search.claim import LEAST_ROUNDS, is_claim_over
from autoplan.planner.search.objective import DROP_LEVEL, drop_level
from autoplan.planner.search.plan_maker import barred
from autoplan.planner.search.references import hand_setting
from autoplan.planner.search.selection import collect_runs, measured_spread, rank
from autoplan.planner.search.session import PLAIN_PARITY, is_checked_alike
from autoplan.planner.trials.runner import TrialOrder
from autoplan.report import facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loading.settings import LoaderSpec
from tests.planner.search.stand_in import (
    CANDIDATES,
    LOAD,
    PLAIN,
    ClockedStore,
    Observer,
    Searched,
    Searches,
    World,
    searches,
    usual_s,
    verdict,
)

__all__ = ["searches"]

BEST = TrainingConfig(micro_batch=16, precision="bf16", optimizer_step="fused")


def plan_of(searched: Searched) -> Any:
    assert searched.result.status == "plan_found", searched.result.reason
    plan = searched.result.plan
    assert plan is not None
    return plan


def some(*chosen: TrainingConfig) -> tuple[TrainingConfig, ...]:
    """The plain run, and some others."""
    return (PLAIN, *chosen)


# A plan, and where its time went.


def test_a_search_finds_checks_and_claims_and_says_where_its_time_went(searches: Searches):
    world = World(input_s=0.9)
    found = searches.search(world)
    plan = plan_of(found)
    assert plan.config == BEST and plan.parity.passed and plan.claim.claimed
    ranked = rank(collect_runs(found.result.trials), measured_spread(found.result.trials))
    assert plan.config == ranked[0].config, "the record gives the same answer"
    assert plan.speedup.median == pytest.approx(usual_s(PLAIN) / usual_s(BEST), rel=0.03)
    kinds = [line.kind for line in plan.ledger]
    assert kinds == found.observer.kinds
    assert kinds[:2] == ["baseline", "look"]
    assert sorted(kinds[2:4]) == ["hand setting", "parity"], "the leader is checked early, and compared"
    assert kinds.count("look") > 1, "there was more to look at"
    for left_s, time_s in world.check_times:
        assert 0 < time_s < left_s / 2, "no check takes what is left for looks and rounds"
    first_claim = kinds.index("claim")
    assert set(kinds[first_claim:]) == {"claim"} and len(kinds[first_claim:]) >= LEAST_ROUNDS
    assert [line.began_s for line in plan.ledger] == sorted(line.began_s for line in plan.ledger)
    assert sum(line.seconds for line in plan.ledger) == pytest.approx(found.result.spent_s)
    assert all(line.why for line in plan.ledger)
    assert found.result.spent_s <= 120.0 and found.session.ended_by == "nothing_left"
    assert plan.hand is not None and plan.hand.config == TrainingConfig(micro_batch=8, precision="bf16"), "16 gains 3 %"
    assert plan.hand.speedup.median > 1.0
    assert any("Data loading is the bottleneck" in note and "workers" in note for note in plan.notes), "no run waits"
    assert found.session.side is None and all(trial.beside == 0 for trial in found.result.trials)
    assert all(line.part is None for line in plan.ledger), "nothing runs side by side"
    assert all(is_claim_over(found.result.trials, claim) for claim in found.session.store.claims)


def test_looks_without_a_gain_do_not_end_a_search_before_three_had_time_for_a_claim(searches: Searches):
    found = searches.search(World())
    session = found.session
    lines = [line for line in session.store.ledger if line.with_claim]
    assert len(lines) >= 3 and session.claim_fitted
    session.store = SimpleNamespace(ledger=lines[:2])
    assert not session.claim_fitted


def test_cores_that_become_slower_change_neither_the_plan_nor_its_speed_up(searches: Searches):
    """What runs later is compared, predicted and priced as on the cores of its time."""
    world = World(core_slower=lambda number: 2.0 if number else 1.0)
    plan = plan_of(searches.search(world, budget=600.0))
    assert plan.config == BEST and plan.claim.claimed
    assert plan.speedup.median == pytest.approx(usual_s(PLAIN) / usual_s(BEST), rel=0.03)
    assert plan.measurement.step_time_s.median == pytest.approx(2**FOLLOWS_CORE * usual_s(BEST), rel=0.03)
    assert plan.prediction.step_time_s == pytest.approx(2**FOLLOWS_CORE * usual_s(BEST))
    looks = [order for order in world.orders[2:] if order.purpose == "search"]
    assert looks, "more than the one that ran as the cores became slower"
    for order in looks:
        assert order.prediction is not None
        assert order.prediction.step_time_s == pytest.approx(2**FOLLOWS_CORE * usual_s(order.config))
    claims = [line for line in plan.ledger if line.kind == "claim"]
    assert [line.predicted_s / line.seconds for line in claims[1:]] == pytest.approx([1.0] * len(claims[1:]), abs=0.25)


def test_the_budget_holds_what_the_leader_needs(searches: Searches):
    """Hundreds of candidates are as good as each other: looks end in time for the check and the rounds."""
    many = tuple(
        TrainingConfig.model_validate({"micro_batch": size, "precision": precision, "checkpointing": kept})
        for size in (1, 2, 4, 8, 16)
        for precision in ("fp32", "bf16")
        for kept in ("none", "full", "every_2")
    )
    flat = World(seconds=lambda config: 0.3 if config == PLAIN else 0.25, candidates=many, width=2.0, check_s=6.9)
    found = searches.search(flat, budget=60.0)
    plan = plan_of(found)
    assert found.session.ended_by == "time" and plan.claim.rounds >= LEAST_ROUNDS
    assert flat.purposes().count("search") > 3 and flat.checked
    assert found.result.spent_s <= 1.05 * 60.0


def test_a_budget_that_holds_no_claim_gives_a_checked_plan_that_claims_nothing(searches: Searches):
    slow = World(seconds=lambda config: 8 * usual_s(config), check_s=8.0)
    found = searches.search(slow, budget=32.0)
    plan = plan_of(found)
    assert plan.config != PLAIN and plan.parity.passed and not slow.purposes().count("claim")
    assert plan.claim.rounds == 0 and plan.claim.chosen_from > 1 and not plan.claim.claimed


def test_all_looks_of_a_search_together_have_one_level():
    levels = [drop_level(number) for number in range(1, 5001)]
    assert sum(levels) < DROP_LEVEL and levels == sorted(levels, reverse=True)
    assert levels[0] == levels[9] > 10 * levels[99]


LADDER = tuple(
    TrainingConfig.model_validate({"micro_batch": size, "precision": precision, "checkpointing": kept, "loss": loss})
    for size in (1, 2, 4)
    for precision in ("fp32", "bf16")
    for kept in ("none", "full")
    for loss in ("full", "fused")
)


def needs_full_checkpointing(order: TrialOrder, before: int) -> dict[str, Any] | None:
    if order.config.checkpointing == "full" and order.config.micro_batch < 4:
        return None
    return {"outcome": Outcome.OUT_OF_MEMORY, "reason": "more than there is"}


def test_where_the_plain_run_does_not_fit_the_run_with_checkpointing_stands_for_it(searches: Searches):
    world = World(fate=needs_full_checkpointing, candidates=LADDER)
    plan = plan_of(searches.search(world))
    stands = TrainingConfig(micro_batch=2, checkpointing="full")
    baselines = [config for purpose, config, _ in world.made if purpose == "baseline"]
    assert [config.checkpointing for config in baselines] == ["none"] * 3 + ["full"] * 2 and baselines[-1] == stands
    assert plan.baseline.config == stands == world.checked[0], "it is proved before anything is compared with it"
    assert plan.config.precision == "bf16" and plan.config.checkpointing == "full" and plan.parity.passed
    assert plan.claim is not None and plan.claim.claimed
    assert " the speed of the run with checkpointing=full (the plain run does not fit)" in facts.headline(plan)
    assert any("the plain run does not fit; all others are compared with" in note for note in plan.notes)


def test_where_no_rung_runs_the_search_ends_there_and_says_what_would_fit(searches: Searches):
    fate = {"outcome": Outcome.OUT_OF_MEMORY, "reason": "more than there is"}
    world = World(fate=lambda order, before: dict(fate), candidates=LADDER)
    found = searches.search(world)
    assert set(world.purposes()) == {"baseline"}, "what cannot be compared with anything is not looked at"
    assert (found.result.status, found.result.exit_code) == ("no_feasible_plan", 3)
    assert "checkpointing=full loss=fused: out_of_memory: more than there is" in (found.result.reason or "")
    hint = found.result.hint or ""
    assert all(way in hint for way in ("--seq-len", "LoRA (some", "a device with more memory", "More devices"))
    assert searches.search(world).result.from_record


def test_some_looks_are_made_before_no_candidate_is_taken_to_be_able_to_win(searches: Searches):
    """All are predicted to be far slower, and are; one look says little of a cost model that may be wrong."""
    world = World(seconds=lambda config: usual_s(config) * (1.0 if config == PLAIN else 5.0), width=1.05)
    found = searches.search(world)
    assert world.purposes().count("search") == FEWEST_LOOKS == 3
    assert found.session.ended_by == "nothing_left" and plan_of(found).config == PLAIN


@pytest.mark.parametrize(("disturbed", "runs"), [(LOAD, 2), (None, 1)])
def test_a_plain_run_that_a_stall_slowed_down_is_measured_again(searches: Searches, disturbed: str | None, runs: int):
    """Else nothing fits into the budget any more, and the search ends with what it has."""

    def stalled(order: TrialOrder, before: int) -> dict[str, Any] | None:
        return {"slower": 30.0, "disturbed": disturbed} if order.purpose == "baseline" and before < runs else None

    world = World(fate=stalled)
    found = searches.search(world, budget=300.0)
    assert world.purposes().count("baseline") == (1 + runs if disturbed else 1)
    if not disturbed:
        return  # it is as slow as that, by all that is known
    plan = plan_of(found)
    assert plan.baseline.number == runs and plan.config == BEST and plan.claim is not None and plan.claim.claimed
    assert found.session.model.trials[0].number == runs, "nothing is learnt from those before"
    assert any("it ran again" in note for note in plan.notes)
    again = searches.search(world, budget=400.0)
    assert again.session.baseline is not None and again.session.baseline.number == runs


def test_one_round_of_a_claim_is_no_claim(searches: Searches):
    """The second would have come after the budget's end."""
    late = {"outcome": Outcome.TIMEOUT, "reason": "late", "budget_ended": True}
    world = World(fate=lambda order, before: dict(late) if order.purpose == "claim" and order.round else None)
    plan = plan_of(searches.search(world))
    assert plan.claim.rounds == 1 and not plan.claim.claimed and "after one round" in (plan.claim.why_not or "")


def test_what_stands_for_the_plain_run_may_be_the_plan_and_has_passed_its_check(searches: Searches):
    world = World(
        fate=needs_full_checkpointing,
        candidates=LADDER,
        seconds=lambda config: (
            usual_s(config.model_copy(update={"precision": "fp32"}))
            * (2.0 if config.precision == "bf16" or config.loss == "fused" else 1.0)
        ),
    )
    plan = plan_of(searches.search(world))
    assert plan.config == plan.baseline.config and plan.config.checkpointing == "full"
    assert plan.parity.passed and plan.parity != PLAIN_PARITY
    assert "the plan is the run with checkpointing=full" in facts.headline(plan)
    assert "plan.prepare()" in facts.next_step(plan, "plan.json").words, "the user's own program does not fit"


def test_a_stand_in_for_the_plain_run_that_fails_its_check_is_no_plan(searches: Searches):
    world = World(
        fate=needs_full_checkpointing, candidates=LADDER, passes=lambda config: config.knobs_off_default() != STANDS
    )
    found = searches.search(world)
    assert found.result.plan is None or found.result.plan.config.knobs_off_default() != STANDS


STANDS = {"micro_batch": 2, "checkpointing": "full"}


@pytest.mark.parametrize(("slower", "budget"), [(20, 20.0), (200, 60.0)])
def test_a_budget_too_small_is_refused_before_the_first_run_with_one_that_does(
    searches: Searches, slower: int, budget: float
):
    world = World(seconds=lambda config: slower * usual_s(config), check_s=8.0)
    found = searches.search(world, budget=budget)
    assert (found.result.status, found.result.exit_code, world.made) == ("budget_ended", 5, [])
    assert "too small" in str(found.result.reason)
    (longer,) = re.findall(r"--budget (\d+m)", found.result.hint or "")
    plan_of(searches.search(world, budget=longer))


# The plain run is the plan.


def test_a_plain_run_that_leads_needs_no_claim_and_no_check(searches: Searches):
    world = World(seconds=lambda config: 0.3 if config == PLAIN else 0.6, predicted=lambda config: 0.3)
    plan = plan_of(searches.search(world))
    assert plan.config == PLAIN and plan.parity == PLAIN_PARITY
    assert not plan.claim.claimed and plan.claim.why_not == "nothing faster was found"
    assert world.checked == [] and set(world.purposes()) <= {"baseline", "search", "finalist"}


@pytest.mark.parametrize("in_rounds", [1.0, 1.3], ids=["within noise", "slower"])
def test_a_leader_without_a_gain_in_its_rounds_gives_way_to_the_plain_run(searches: Searches, in_rounds: float):
    """Drift: it was fast when it was chosen. The rounds decide, and they say so."""
    one = BEST

    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        return {"slower": in_rounds * usual_s(PLAIN) / usual_s(one)} if order.purpose == "claim" and before else None

    world = World(
        candidates=some(one),
        fate=lambda order, before: fate(order, before) if order.config == one else None,
    )
    found = searches.search(world)
    plan = plan_of(found)
    assert plan.config == PLAIN and plan.parity == PLAIN_PARITY
    assert not plan.claim.claimed and plan.claim.why_not == "nothing faster was found"
    (note,) = [note for note in plan.notes if "the plan is the plain run" in note]
    assert one.describe() in note and "side by side with the plain run" in note
    assert found.session.store.parity_of(one) is not None
    other = next(other for other in plan.alternatives if other.config == one)
    assert other.speed_ratio.low < 1.0
    assert (other.speed_ratio.high < 1.0) is (in_rounds > 1.0)


def test_where_only_some_may_be_the_plan_the_plain_run_is_not(searches: Searches):
    """It does not keep what was fixed; the leader stays, and claims nothing."""
    world = World(
        fate=lambda order, before: {"slower": 9.0} if order.purpose == "claim" and order.config != PLAIN else None
    )
    plan = plan_of(searches.search(world, fix={"optimizer_step": "fused"}))
    assert plan.config.optimizer_step == "fused"
    assert not plan.claim.claimed and plan.claim.why_not == "it was measured slower"


def test_disturbed_rounds_leave_the_leader_without_a_claim(searches: Searches):
    world = World(fate=lambda order, before: {"disturbed": LOAD, "slower": 3.0} if order.purpose == "claim" else None)
    plan = plan_of(searches.search(world))
    assert plan.config == BEST and not plan.claim.claimed and "disturbed: not a claim" in plan.claim.why_not
    assert plan.speedup.low <= 1.0 <= plan.speedup.high


def test_a_round_that_is_made_again_has_the_number_of_the_one_that_it_replaces(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
):
    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        return {"disturbed": LOAD} if order.purpose == "claim" and order.round == 0 else None

    said: list[str] = []
    monkeypatch.setattr(Observer, "on_phase", lambda self, name, detail="": said.append(f"{name} {detail}"))
    plan_of(searches.search(World(fate=fate), budget=300.0))
    rounds = [text for text in said if text.startswith("claim round ")]
    assert rounds[:3] == ["claim round 1 of 2", "claim round 1 of 2", "claim round 2 of 2"]


def test_a_leader_that_disturbed_rounds_put_below_the_plain_run_is_left_without_their_figure(searches: Searches):
    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        if order.purpose != "claim":
            return None
        return {"disturbed": LOAD, "slower": 9.0 if order.config != PLAIN else 1.0}

    plan = plan_of(searches.search(World(fate=fate)))
    assert plan.config == PLAIN
    (note,) = [note for note in plan.notes if "led the search" in note]
    assert "it showed no gain, and other work disturbed it: the plan is the plain run" in note
    assert "times its speed" not in note


def test_what_a_check_takes_is_predicted_by_the_plain_run_and_not_by_a_micro_batch_that_the_training_cannot_have(
    searches: Searches,
):
    """With BatchNorm the micro-batch is fixed; of single samples a step is bound by launches, and takes 100 times."""

    def seconds(config: TrainingConfig) -> float:
        return 0.1 if config.micro_batch == 16 else 10.0

    candidates = [config for config in CANDIDATES if config.micro_batch == 16]
    run = searches.open(World(seconds=seconds, predicted=seconds, candidates=candidates))
    with run.store:
        assert run.session is not None
        assert run.session.parity_cost.sample_s == pytest.approx(0.1 / 16)
    plan_of(searches.search(World(seconds=seconds, predicted=seconds, candidates=candidates), budget=60.0))


def test_the_best_so_far_is_compared_as_if_the_cores_had_kept_their_speed(searches: Searches):
    """Else the screen says 1.6 times from a look in a fast minute, of a plan that is 1.1 times as fast."""

    def slower(number: int) -> float:
        return 2.0 if number else 1.0

    run = searches.open(World(core_slower=slower, sd=0.0))
    with run.store:
        session = run.session
        assert session is not None
        for purpose, config in (("baseline", PLAIN), ("search", BEST)):
            session.measure(purpose, config, deadline_s=60.0)
        gain, raw = session.budget().gain, _ratio(session.store.trials)
        true = usual_s(PLAIN) / usual_s(BEST)
        assert session.best is not None and session.best.config == BEST
        assert gain is not None and raw < gain
        assert gain == pytest.approx(true, rel=0.01)


def _ratio(trials: Sequence[Trial]) -> float:
    one, other = (trial.step_time_s.median for trial in trials if trial.step_time_s is not None)
    return one / other


def test_many_that_are_compiled_and_cannot_be_proved_in_time_hide_none_that_can(searches: Searches):
    """A small GPT on an H100: hundreds of compiled ones were expected to gain most, and the search ended at once."""
    knobs = {
        "micro_batch": (1, 2, 4, 8, 16),
        "precision": ("fp32", "bf16"),
        "checkpointing": ("none", "full", "every_2", "every_3", "every_4"),
        "optimizer_step": ("own", "foreach", "fused"),
        "compile": ("block", "model"),
    }
    compiled = [
        TrainingConfig.model_validate(dict(zip(knobs, values, strict=True))) for values in product(*knobs.values())
    ]
    faster = PLAIN.model_copy(update={"optimizer_step": "fused"})

    def seconds(config: TrainingConfig) -> float:
        return 0.1 / (30.0 if config.compile != "off" else 1.06 if config == faster else 1.0)

    assert len(compiled) > search_state.MOST_LOOKS
    world = World(seconds=seconds, candidates=[PLAIN, faster, *compiled], compile_s=60.0)
    found = searches.search(world, budget=40.0)
    assert plan_of(found).config == faster


# A leader that fails.


def test_a_leader_that_fails_in_a_round_gives_way_and_the_next_one_is_checked_and_claimed(searches: Searches):
    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        crashes = order.purpose == "claim" and order.config == BEST
        return {"outcome": Outcome.CRASHED, "reason": "planted"} if crashes else None

    world = World(fate=fate)
    found = searches.search(world)
    plan = plan_of(found)
    assert plan.config != BEST and plan.config in world.checked and plan.claim.claimed
    assert [claim.config for claim in found.session.store.claims] == [BEST, plan.config]
    own = {trial.number for trial in found.result.trials if trial.is_repeat and trial.config == BEST}
    assert not own & set(plan.claim.trials)


def test_a_plain_run_that_fails_in_a_round_ends_the_claim_and_leaves_the_checked_leader(searches: Searches):
    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        crashes = order.purpose == "claim" and order.config == PLAIN
        return {"outcome": Outcome.CRASHED, "reason": "planted"} if crashes else None

    world = World(fate=fate)
    plan = plan_of(searches.search(world))
    assert plan.config == BEST and plan.claim.rounds == 0 and plan.claim.chosen_from > 1
    assert [config for purpose, config, _ in world.made if purpose == "claim"].count(PLAIN) == 1, "once"


def test_a_leader_that_fails_its_check_gives_way_and_nothing_is_dropped_for_it(searches: Searches):
    """What computes something else may be as fast as it likes."""
    wrong = TrainingConfig(micro_batch=8, precision="bf16", optimizer_step="fused")

    def seconds(config: TrainingConfig) -> float:
        return 0.05 if config == wrong else usual_s(config)

    world = World(seconds=seconds, predicted=usual_s, passes=lambda config: config != wrong)
    found = searches.search(world)
    plan = plan_of(found)
    assert world.checked.count(wrong) == 1, "once"
    assert plan.config == BEST and plan.failed_parity == (wrong,) and plan.parity.passed
    assert any(wrong.describe() in note and "fails parity" in note for note in plan.notes)
    looks = [order for order in world.orders if order.purpose in ("search", "reference")]
    after = [order for order in looks if order.number > orders_of(world, wrong)[0]]
    bars = [math.exp(order.to_beat.log_s) for order in after if order.to_beat is not None]
    assert all(bar > 0.1 for bar in bars[1:]), "the one that failed is no leader"


SAME = {"optimizer_step": "own", "allocator": "own", "threads": None}


def test_what_fails_its_check_before_the_optimizer_steps_takes_those_with_it_whose_check_is_the_same(
    searches: Searches,
):
    """Else one after the other is looked at and checked, and all of them fail."""

    def seconds(config: TrainingConfig) -> float:
        return usual_s(config) / (3 if config.precision == "bf16" else 1)

    failed = "gradients, step 1"
    world = World(seconds=seconds, predicted=seconds, passes=lambda config: config.precision != "bf16", failed=failed)
    found = searches.search(world)
    plan = plan_of(found)
    wrong = [config for config in world.checked if config.precision == "bf16"]
    kinds = {
        config.model_copy(update={"micro_batch": min(config.micro_batch, 2), "optimizer_step": "own"})
        for config in wrong
    }
    assert plan.config.precision != "bf16" and len(wrong) == len(kinds), "each kind once"
    looked_at = [order.config for order in world.orders if order.purpose == "search"]
    after = looked_at[looked_at.index(wrong[0]) + 1 :]
    alike = [one for one in world.candidates if is_checked_alike(one, wrong[0], verdict(False, failed))]
    assert not set(after).intersection(alike)
    unchecked = [config for config in alike if config not in wrong]
    assert unchecked, "some were left out without a check of their own"
    why = {barred(found.session, config) for config in unchecked}
    assert why == {"one whose check is the same failed parity"}


def test_what_another_planner_found_to_fail_takes_those_with_it_too(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = searches.open(World())
    session, told = run.session, [BEST]
    assert session is not None

    def refresh(store: ClockedStore) -> tuple[Trial, ...]:
        for config in told:
            store.add_parity(config, verdict(False, "gradients, step 1"))
        told.clear()
        return ()

    monkeypatch.setattr(ClockedStore, "shared", True)
    monkeypatch.setattr(ClockedStore, "refresh", refresh)
    monkeypatch.setattr(ClockedStore, "others", lambda store: {})
    with run.store:
        session.take_in_others()
        assert BEST.model_copy(update={"optimizer_step": "own"}) in session.model.out_of_turn


def test_which_checks_are_the_same() -> None:
    failed = TrainingConfig(micro_batch=8, precision="bf16", optimizer_step="fused")
    others = {
        "micro_batch": failed.model_copy(update={"micro_batch": 32}),
        "allocator": failed.model_copy(update={"allocator": "keep"}),
        "optimizer": failed.model_copy(update={"optimizer_step": "own"}),
        "compile": failed.model_copy(update={"compile": "block"}),
        "one sample": failed.model_copy(update={"micro_batch": 1}),
    }

    def alike(name: str) -> list[str]:
        return [what for what, config in others.items() if is_checked_alike(config, failed, verdict(False, name))]

    assert alike("gradients, dropout on, in fp32") == ["micro_batch", "allocator", "optimizer"]
    assert alike("change of the parameters") == ["micro_batch", "allocator"]
    whole = verdict(False, "change of the parameters").model_copy(update={"own_shapes": True})
    assert [what for what, config in others.items() if is_checked_alike(config, failed, whole)] == ["allocator"]


def orders_of(world: World, config: TrainingConfig) -> list[int]:
    return [order.number for order in world.orders if order.config == config]


@pytest.mark.parametrize("fix", [{}, {"optimizer_step": "fused"}], ids=["any", "fixed"])
def test_a_check_that_does_not_end_in_its_time_is_no_verdict_and_no_plan(searches: Searches, fix: dict[str, Any]):
    world = World(passes=lambda config: None)
    found = searches.search(world, fix=fix, budget=60.0)
    assert (found.result.status, found.result.exit_code) == ("budget_ended", 5), found.result.reason
    assert "parity" in str(found.result.reason) and "--budget" in str(found.result.hint)
    assert world.checked and found.session.store.parity_of(world.checked[0]) is None
    notes = [note for note in found.observer.notes if "did not end in its time" in note]
    assert len(notes) == len(set(notes)) == len(world.checked), "each is said once"
    longer = World()
    assert plan_of(searches.search(longer, fix=fix, budget=200.0)).parity.passed
    assert world.checked[0] in longer.checked, "the same one is checked again"


def test_a_check_that_hangs_leaves_the_search_the_rest_of_a_long_budget(searches: Searches):
    world = World(passes=lambda config: None if config == BEST else True)
    plan = plan_of(searches.search(world, budget=20_000.0))
    assert BEST in world.checked and plan.config != BEST and plan.parity.passed
    deadline_s, _ = world.check_times[world.checked.index(BEST)]
    assert deadline_s == 2_000.0, "a tenth"


def test_a_check_that_hangs_is_no_end_of_the_budget(searches: Searches):
    """Where nothing else is faster the plain run is the plan, with a note; a larger budget would hang again."""
    world = World(candidates=some(BEST), passes=lambda config: None)
    plan = plan_of(searches.search(world, budget=20_000.0))
    assert plan.config == PLAIN and any("did not end in its time" in note for note in plan.notes)


def test_where_only_what_hangs_may_be_the_plan_no_larger_budget_is_advised(searches: Searches):
    world = World(candidates=some(BEST), passes=lambda config: None)
    found = searches.search(world, budget=20_000.0, fix={"optimizer_step": "fused"}).result
    assert found.status == "no_feasible_plan" and "--budget" not in str(found.hint)
    assert "no parity check came to its end" in str(found.reason)


def test_what_passed_its_check_is_the_plan_if_the_time_ends_before_the_check_of_what_leads(searches: Searches):
    """That it trains the same is not known of the faster one."""
    other = BEST.model_copy(update={"micro_batch": 8})
    run = searches.open(World(seconds=lambda config: {PLAIN: 1.0, other: 0.55}.get(config, 0.5), sd=0.0))
    with run.store:
        session = run.session
        assert session is not None
        for purpose, config in (("baseline", PLAIN), ("search", other), ("search", BEST)):
            session.measure(purpose, config, deadline_s=60.0)
        assert session.shown_best is not None and session.shown_best.config == BEST
        assert search_run._conclude(run, session).status == "budget_ended", "neither was checked"
        session.store.add_parity(other, verdict(True))
        result = search_run._conclude(run, session)
    assert result.status == "plan_found" and result.plan is not None and result.plan.config == other
    assert any(BEST.describe() in note and "before its parity check" in note for note in result.plan.notes)


def test_ctrl_c_while_the_loader_is_measured_takes_no_plan_away(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def interrupt(session: Any, leader: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search_run, "measure_loading", interrupt)
    loader, out = LoaderSpec(kind="function", reference="train.py:rows", identity="rows"), tmp_path / "plan.json"
    found = searches.search(World(), loader=loader, out=out)
    assert (found.result.status, found.result.exit_code) == ("interrupted", 130)
    assert Plan.load(out).config == BEST and "the plan that was found is" in str(found.result.reason)
    assert found.result.unverified_path is None
    monkeypatch.setattr(search_run, "measure_loading", lambda session, leader: None)
    again = World()
    assert plan_of(searches.search(again, loader=loader, out=out)).config == BEST and not again.made


# Looks.


@pytest.mark.parametrize("disturbed", [1, 9])
def test_a_disturbed_look_is_made_again_once_and_then_void(searches: Searches, disturbed: int):
    """Not a lost race: it is not stopped early, and the run that was not disturbed counts."""

    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        return {"disturbed": LOAD, "slower": 2.0} if order.config == BEST and before < disturbed else None

    world = World(fate=fate)
    found = searches.search(world)
    looks = [trial for trial in found.result.trials if trial.config == BEST and not trial.is_repeat]
    assert [trial.outcome for trial in looks] == [Outcome.OK] * 2
    assert [bool(trial.disturbed) for trial in looks] == [True, disturbed > 1]
    assert disturbed > 1 or (plan_of(found).config == BEST and plan_of(found).claim.claimed)


def test_under_a_load_that_lasts_each_look_counts_and_nothing_is_claimed(searches: Searches):
    world = World(fate=lambda order, before: {"disturbed": LOAD})
    found = searches.search(world)
    looks = [trial.config for trial in found.result.trials if not trial.is_repeat]
    assert len(looks) > 5 and len(looks) - len(set(looks)) <= 2, "they are not all repeated"
    assert not plan_of(found).claim.claimed
    assert world.orders[0].remeasure > 0 and world.orders[-1].remeasure == 0, "nor is the load waited for"


@pytest.mark.parametrize(("disturbed", "more"), [(None, False), (LOAD, True)])
def test_under_a_load_no_time_is_kept_for_rounds_that_could_claim_nothing(
    searches: Searches, disturbed: str | None, more: bool
):
    world = World(
        seconds=lambda config: 8 * usual_s(config),
        check_s=8.0,
        fate=lambda order, before: {"disturbed": disturbed},
    )
    plan = plan_of(searches.search(world, budget=60.0))
    assert plan.parity.passed and plan.config != PLAIN and plan.claim.claimed is not more
    looks = {config for purpose, config, _ in world.made if purpose in ("search", "reference")}
    assert (len(looks) > 2) is more and ("claim" in world.purposes()) is not more


def test_a_look_that_a_bound_puts_behind_the_leader_is_stopped_with_a_lower_bound(searches: Searches):
    world = World(predicted=lambda config: 0.2, candidates=CANDIDATES[::2])
    found = searches.search(world)
    dropped = [trial for trial in found.result.trials if trial.outcome is Outcome.PRUNED]
    assert dropped and plan_of(found).config not in {trial.config for trial in dropped}
    for trial in dropped:
        assert trial.at_least_s is not None and trial.at_least_s < usual_s(trial.config) * 1.05
    levels = [order.to_beat.level for order in world.orders if order.purpose == "search" and order.to_beat is not None]
    assert levels and set(levels) == {drop_level(1)}, "corrected for the number of looks"


def test_a_stopped_hand_setting_is_compared_by_what_is_known_of_it(searches: Searches):
    """At least so many times the hand setting: its race is not run to the end, and it is no look of the search."""
    one, hand = TrainingConfig(micro_batch=8, checkpointing="full"), TrainingConfig(micro_batch=4)

    def seconds(config: TrainingConfig) -> float:
        return {one: 0.1, hand: 0.95}.get(config, 1.0)

    world = World(
        candidates=some(one, TrainingConfig(micro_batch=4), TrainingConfig(micro_batch=1, optimizer_step="fused")),
        seconds=seconds,
        predicted=lambda config: {one: 0.8, hand: 0.95}.get(config, 1.0),
        width=1.2,
    )
    plan = plan_of(searches.search(world))
    assert plan.config == one and plan.hand is not None and plan.hand.config == hand
    (look,) = [trial for trial in plan.evidence if trial.config == hand]
    assert look.outcome is Outcome.PRUNED
    assert plan.hand.speedup.median == pytest.approx(9.5, rel=0.1)
    assert look.at_least_s is not None and plan.hand.speedup.low == pytest.approx(look.at_least_s / 0.1, rel=0.02)


def test_what_failed_its_check_is_not_shown_as_the_best_so_far(searches: Searches):
    found = searches.search(World(passes=lambda config: config != BEST))
    assert found.session.best is not None and found.session.best.config == BEST, "it is the fastest that ran"
    assert found.session.shown_best is not None and found.session.shown_best.config == plan_of(found).config != BEST
    assert found.result.best == found.session.shown_best, "the end says the same"
    again = searches.search(World()).result
    assert again.from_record and again.best is not None and again.best.config != BEST, "and the record"


def test_what_compiled_once_costs_its_warm_time_from_then_on(searches: Searches):
    """Cold and warm: a pair and the rounds find their kernels, and are priced so."""
    compiled = TrainingConfig(micro_batch=16, compile="model")
    world = World(candidates=some(compiled), compile_s=30.0)
    found = searches.search(world, budget=200.0)
    plan = plan_of(found)
    assert plan.config == compiled
    look, *rounds = [line for line in plan.ledger if line.kind in ("look", "claim")]
    assert look.seconds > 30.0 and look.predicted_s > 20.0
    assert rounds and all(line.seconds < 20.0 for line in rounds)
    assert all(line.predicted_s < 1.6 * line.seconds for line in rounds[1:]), "a round is not priced as a compilation"
    first = next(trial for trial in found.result.trials if trial.config == compiled)
    assert found.session.trial_cost.repeat_s(first) < 0.5 * first.seconds_spent


# The limits.


def test_one_trial_is_the_plain_run(searches: Searches):
    world = World()
    found = searches.search(world, max_trials=1)
    assert plan_of(found).config == PLAIN and world.purposes() == ["baseline"]
    assert found.session.ended_by == "max_trials"
    more = World()
    again = searches.search(more, max_trials=3)
    assert plan_of(again).config != PLAIN, "a larger number goes on"
    assert more.purposes().count("baseline") == 0 and sum(not t.is_repeat for t in again.result.trials) == 3


def test_one_trial_is_no_plan_where_the_plain_run_may_not_be_it(searches: Searches):
    found = searches.search(World(), max_trials=1, fix={"optimizer_step": "fused"})
    assert (found.result.status, found.result.exit_code) == ("no_feasible_plan", 3)
    assert "the baseline alone ran" in str(found.result.reason) and "--max-trials" in str(found.result.hint)


@pytest.mark.parametrize("sampler", ["tpe", optuna.samplers.RandomSampler(seed=0)], ids=["tpe", "an object"])
def test_another_sampler_draws_and_its_leader_is_proved_like_any_other(searches: Searches, sampler: Any):
    candidates = [PLAIN, *(config for config in CANDIDATES if config != PLAIN)]  # the plain run is the first of them
    world = World(candidates=candidates, check_s=16.0)
    found = searches.search(world, sampler=sampler, budget=55.0)
    plan = plan_of(found)
    assert plan.parity.passed and plan.claim.rounds >= LEAST_ROUNDS, "time was left for its proof"
    looks = [trial.config for trial in found.result.trials if not trial.is_repeat]
    assert len(looks) == len(set(looks)) > 3
    assert found.session.ended_by == "time"
    first = next(work for work in found.observer.works if work.kind == "look")
    assert first.needs_s > first.check_s > 0, "the plain run, which needs nothing, is not what is drawn"
    assert all(f"--sampler {sampler} draws it" in line.why for line in plan.ledger if line.kind == "look")


def test_the_least_memory_above_the_floor_is_the_plan(searches: Searches):
    found = searches.search(World(), objective="memory", min_throughput=0.6)
    plan = plan_of(found)
    fastest = min(t.step_time_s.median for t in found.result.trials if t.step_time_s is not None)
    assert plan.config.micro_batch < 16 and plan.measurement.step_time_s.median < fastest / 0.6 * 1.02
    assert plan.parity.passed


def test_cost_counts_each_rank_in_pairs_too(searches: Searches):
    one, two = BEST, BEST.model_copy(update={"dp_replicate": 2, "micro_batch": 8})
    world = World(candidates=some(one, two), seconds=lambda c: 0.6 * usual_s(c) if c == two else usual_s(c))
    found = searches.search(world, objective="cost")
    assert plan_of(found).config == one, "two ranks are 1.67 times as fast"
    gains = [line.gain for line in plan_of(found).ledger if line.kind == "pair"]
    assert all(gain < 0.1 for gain in gains), "a pair is not expected to gain what the second rank costs"


# What must not go on for ever.


def test_a_trace_that_stays_rough_is_not_made_again(searches: Searches, monkeypatch: pytest.MonkeyPatch):
    """There was no time for the variant, or it cannot be traced: its look is made by the rough prediction."""
    run = searches.open(World())
    session = run.session
    assert session is not None
    made = []
    monkeypatch.setattr(search_state, "trace_cost_s", lambda context, variants: 0.5)
    monkeypatch.setattr(search_work, "trace_more", lambda context, variants: made.append(1) or context)
    context: Any = session.context
    context.rough = lambda config: config.precision == "bf16"  # until its trace was asked for
    monkeypatch.setattr(type(session), "take_context", lambda self, _: setattr(context, "rough", lambda config: False))
    with run.store:
        result = search_run._find(run, session)
    assert result.status == "plan_found" and 1 <= len(made) <= 2
    assert "trace" in run.observer.kinds  # type: ignore[attr-defined]


def test_a_check_that_something_outside_ends_leads_no_further(searches: Searches, monkeypatch: pytest.MonkeyPatch):
    world = World()
    run = searches.open(world)
    assert run.session is not None
    passes = parity_check.check_parity

    def lost(zygote: Any, spec: Any, config: TrainingConfig, **rest: Any) -> Any:
        if config == BEST:
            world.checked.append(config)
            raise compare.CandidateDidNotRunError("killed three times")
        return passes(zygote, spec, config, **rest)

    monkeypatch.setattr(parity_check, "check_parity", lost)
    with run.store:
        result = search_run._find(run, run.session)
    assert result.status == "plan_found" and result.plan is not None and result.plan.config != BEST
    assert world.checked.count(BEST) == 1
    assert any("it was not checked and is not the plan" in note for note in result.notes)


def test_the_hand_setting_is_what_the_predictions_like_of_what_fits():
    """Its micro-batch is not the largest that fits, and on CPU bf16 is taken only if it is predicted to gain."""

    def session(best: int, bf16: float, nproc: int = 1, **fixed: Any) -> Any:
        def predict(config: TrainingConfig) -> Any:
            assert config.accumulation(24), "an illegal one is an error of the real estimator too"
            step_s = 1.2 / config.world_size if config.world_size > 1 else 1.0
            step_s *= (1.0 + abs(math.log2(config.micro_batch / best))) * (bf16 if config.precision == "bf16" else 1.0)
            return SimpleNamespace(step_time_s=step_s, peak_memory_high_bytes=10 * config.micro_batch)

        context = SimpleNamespace(
            space=SimpleNamespace(values=values | {"dp_replicate": (1, 2), "dp_shard": (1, 2)}),
            device="cpu",
            nproc=nproc,
            memory_limit_bytes=90,
            spec=SimpleNamespace(global_batch=24),
            estimator=SimpleNamespace(estimate=lambda configs: [predict(config) for config in configs]),
        )
        return SimpleNamespace(context=context, options=SimpleNamespace(fix=fixed), predict=predict)

    values = {"micro_batch": [1, 2, 3, 4, 8, 12, 24], "precision": ["fp32", "bf16"]}
    assert hand_setting(session(2, 0.5)) == TrainingConfig(micro_batch=2, precision="bf16")
    spread = hand_setting(session(2, 0.5, nproc=2))
    assert spread == TrainingConfig(micro_batch=2, precision="bf16", dp_replicate=2), "both devices"
    assert hand_setting(session(2, 1.5)) == TrainingConfig(micro_batch=2)
    assert hand_setting(session(64, 1.5)) == TrainingConfig(micro_batch=8), "12 and 24 do not fit"
    assert hand_setting(session(2, 0.5, micro_batch=4)) == TrainingConfig(micro_batch=4, precision="bf16")
    for device in ("cpu", "cuda"):
        old = session(2, 0.5, precision="fp16")
        old.context.device, old.context.space.values["precision"] = device, ["fp16"]
        old.context.space.values |= {"optimizer_step": ("own",), "attention": ("own",), "compile": ("off",)}
        chosen = hand_setting(old)
        assert chosen is not None and chosen.precision == "fp16", "the precision that is fixed, or the best there is"
    tight = session(2, 0.5)
    tight.context.memory_limit_bytes = 5
    assert hand_setting(tight) is None


def test_a_claim_is_as_long_as_what_it_has_to_show_and_never_longer_than_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Fixed before its first round, and kept in the record."""
    rounds = {}
    for number, (gain, budget) in enumerate(((2.0, 300.0), (1.04, 300.0), (1.04, 60.0))):
        world = World(
            candidates=some(BEST),
            seconds=lambda config, gain=gain: 0.4 / gain if config == BEST else 0.4,  # type: ignore[misc]
            predicted=lambda config: 0.35,
        )
        found = Searches(tmp_path / str(number), monkeypatch).search(world, budget=budget)
        (claim,) = found.session.store.claims
        rounds[gain, budget] = claim.rounds
        assert found.result.spent_s <= 1.05 * budget
    assert rounds[2.0, 300.0] == LEAST_ROUNDS < rounds[1.04, 60.0] < rounds[1.04, 300.0]
