"""Why each knob has its value, and how the plan compares with what lost: by undisturbed runs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.planner.records.trials import ClaimRounds, LeftOutFamily, Outcome, Parity, Trial, Window
from autoplan.planner.search.claim import compare
from autoplan.planner.search.plan_maker import _alternatives, against, explain_choices, speed_words
from autoplan.planner.search.selection import CandidateRuns, collect_runs
from autoplan.planner.search.session import PLAIN_PARITY
from autoplan.planner.trials.measure import Spread
from autoplan.strategies.config import TrainingConfig
from tests import recorded

PLAIN = TrainingConfig(micro_batch=2)
FAST = PLAIN.model_copy(update={"precision": "bf16"})
SLOW = PLAIN.model_copy(update={"checkpointing": "full"})
VALUES: dict[str, Any] = {"micro_batch": (1, 2, 4), "precision": ("fp32", "bf16"), "checkpointing": ("none", "full")}
LEGAL = frozenset(
    TrainingConfig.model_validate({"micro_batch": m, "precision": p, "checkpointing": c})
    for m in VALUES["micro_batch"]
    for p in VALUES["precision"]
    for c in VALUES["checkpointing"]
)
LOUD = {"window": Window(seconds=1.0, disturbed="other work took 40% of the CPU time")}
QUIET = Spread(sd=0.005, freedom=20)


def run(number: int, config: TrainingConfig, step_s: float | None, **given: Any) -> Trial:
    return recorded.make_trial(number, config, step_s, **given)


def rounds(purpose: str, *times: tuple[TrainingConfig, float], first: int, count: int = 2, **given: Any) -> list[Trial]:
    """So many rounds in which each configuration ran once."""
    made = [(number, config, step_s) for number in range(count) for config, step_s in times]
    return [run(first + i, c, s, purpose=purpose, round=n, **given) for i, (n, c, s) in enumerate(made)]


def session(trials: list[Trial], *, ended_by: str = "time", parities: dict[Any, Parity] | None = None, **given: Any):
    """As much of a search as reasons read."""

    def predict(config: TrainingConfig) -> Any:
        factor = (0.8 if config.precision == "bf16" else 1.0) * (4 / 3 if config.checkpointing == "full" else 1.0)
        return SimpleNamespace(step_time_s=factor, model_flops=None)

    def comparison(runs: CandidateRuns) -> Any:
        candidates = collect_runs(trials)
        plain = next(one for one in candidates if one.config == PLAIN)
        claim = ClaimRounds(number=1, config=runs.config, reference=PLAIN, first_round=0, rounds=2, budget_s=60.0)
        made = claim if runs.claim_runs else None
        return compare(runs, plain, QUIET, chosen_from=len(candidates), claim=made)

    facts: dict[str, Any] = {
        "options": SimpleNamespace(fix={}, allows=lambda config: True),
        "context": SimpleNamespace(
            space=SimpleNamespace(values=VALUES),
            left_out=(),
            spec=SimpleNamespace(global_batch=16, sequence_length=None),
            device="cpu",
            hardware=recorded.make_hardware(),
        ),
        "store": SimpleNamespace(trials=tuple(trials), parities=parities or {}, parity_of=(parities or {}).get),
        "model": SimpleNamespace(legal=LEGAL),
        "objective": SimpleNamespace(name="throughput"),
        "plain_config": PLAIN,
        "run_spread": QUIET,
        "comparison": comparison,
        "predict": predict,
        "ended_by": ended_by,
    }
    return SimpleNamespace(**(facts | given))


def reasons(found: Any, winner: TrainingConfig = PLAIN) -> dict[str, str]:
    entries = collect_runs(found.store.trials)
    own = next(entry for entry in entries if entry.config == winner)
    return {choice.knob: choice.reason for choice in explain_choices(found, own)}


def alternatives(found: Any, winner: TrainingConfig) -> dict[TrainingConfig, Any]:
    entries = collect_runs(found.store.trials)
    own = next(entry for entry in entries if entry.config == winner)
    found.objective = recorded.make_plan().objective
    return {one.config: one for one in _alternatives(found, own, entries)}


@pytest.mark.parametrize(
    ("ended_by", "words"), [("time", "there was no time left"), ("max_trials", "--max-trials was reached")]
)
def test_a_value_expected_to_be_faster_comes_with_why_it_was_not_tried(ended_by: str, words: str) -> None:
    said = reasons(session([run(0, PLAIN, 1.0)], ended_by=ended_by))
    assert f"precision=bf16 is expected to be 25% faster (cost model; not tried: {words}" in said["precision"]
    assert "full is expected to be 25% slower (cost model)" in said["checkpointing"]


def test_slower_and_faster_compare_speeds() -> None:
    assert [speed_words(ratio) for ratio in (0.5, 0.995, 1.0, 2.0)] == [
        "50% slower",
        "as fast",
        "as fast",
        "100% faster",
    ]


def test_a_value_that_was_tried_comes_with_what_became_of_it() -> None:
    said = reasons(
        session(
            [
                run(0, PLAIN, 1.0),
                run(1, FAST, None, outcome=Outcome.CRASHED),
                run(2, SLOW, 1.5, outcome=Outcome.PRUNED),
                run(3, PLAIN.model_copy(update={"micro_batch": 4}), None, outcome=Outcome.TIMEOUT, budget_ended=True),
            ]
        )
    )
    assert said["precision"] == "precision=bf16 ended as crashed (trial 1)"
    assert said["checkpointing"] == (
        "checkpointing=full ran at 0.67 times the plan's speed, when it was stopped (trial 2)"
    )
    assert "micro_batch=4 had no time to be measured (trial 3)" in said["micro_batch"]
    assert "micro_batch=4 is expected" not in said["micro_batch"], "it was tried"


def test_looks_are_compared_and_named_as_single_runs() -> None:
    said = reasons(session([run(0, PLAIN, 2.0), run(1, FAST, 1.0)]), FAST)
    assert said["precision"] == "2.00 times as fast as precision=fp32 (trial 0), one run each"


def test_a_disturbed_run_is_no_measurement() -> None:
    trials = [run(0, PLAIN, 2.73, **LOUD), run(1, FAST, 1.0)]
    said = reasons(session(trials), FAST)
    assert "2.73" not in str(said)
    assert said["precision"] == "precision=fp32 ran while other work disturbed it or the plan (trial 0)"
    lost = alternatives(session(trials), FAST)[PLAIN]
    assert lost.why == "other work disturbed its run or the plan's"


def test_the_rounds_of_the_claim_speak_and_not_the_look_that_chose() -> None:
    """The look made it 2.73 times as fast; the rounds, in which both ran side by side, 1.2 times."""
    trials = [run(0, PLAIN, 2.73), run(1, FAST, 1.0), run(2, FAST.model_copy(update={"micro_batch": 4}), 2.4)]
    trials += rounds("claim", (FAST, 2.0), (PLAIN, 2.4), first=3)
    said = reasons(session(trials), FAST)
    assert said["precision"] == "1.20 times as fast as precision=fp32 (trial 0), side by side"
    assert said["micro_batch"].startswith(
        "1.20 times as fast as micro_batch=4 (trial 2), one run each; micro_batch=1 is"
    )
    lost = alternatives(session(trials), FAST)[PLAIN]
    assert lost.speed_ratio.median == pytest.approx(1 / 1.2) and lost.why == "17% slower"


def test_a_plan_that_is_the_plain_run_says_that_the_rounds_showed_no_gain() -> None:
    trials = [run(0, PLAIN, 2.0), run(1, FAST, 1.0), *rounds("claim", (FAST, 2.0), (PLAIN, 2.01), first=2)]
    said = reasons(session(trials))
    assert said["precision"] == "not told apart from precision=bf16 (trial 1), side by side: the plan is simpler"
    lost = alternatives(session(trials), PLAIN)[FAST]
    assert lost.speed_ratio.low < 1 < lost.speed_ratio.high
    assert lost.why == "no measurable difference in speed; the plan is simpler"
    trials[2:] = rounds("claim", (FAST, 2.2), (PLAIN, 2.0), first=2)
    assert reasons(session(trials))["precision"] == "1.10 times as fast as precision=bf16 (trial 1), side by side"
    assert alternatives(session(trials), PLAIN)[FAST].why == "9% slower"


def test_rounds_in_slices_are_compared_with_looks_as_the_baseline_says() -> None:
    """There each step takes longer: of the plan by as much as of the baseline."""
    other = FAST.model_copy(update={"micro_batch": 4})
    trials = [run(0, PLAIN, 2.0), run(1, FAST, 0.9), run(2, other, 1.1)]
    trials += rounds("claim", (FAST, 1.05), (PLAIN, 2.1), first=3, pauses=20)
    entries = {entry.config: entry for entry in collect_runs(trials)}
    found = against(session(trials), entries[FAST], entries[other])
    assert found is not None and found.ratio.median == pytest.approx(1.1)
    assert entries[FAST].as_look.step_time.median == pytest.approx(0.9), "a front has looks beside looks"


def test_where_cost_decides_the_reason_names_it() -> None:
    two = PLAIN.model_copy(update={"dp_replicate": 2})
    objective = SimpleNamespace(name="cost", describe=lambda: "the least cost")
    found = session([run(0, PLAIN, 1.6), run(1, two, 1.0)], objective=objective)
    found.context.space.values = {"dp_replicate": (1, 2)}
    assert reasons(found)["dp_replicate"] == (
        "dp_replicate=2 (trial 1) is 60% faster, one run each; this has 0.80 times its cost: the least cost"
    )


def test_disturbed_rounds_of_the_claim_compare_nothing() -> None:
    trials = [run(0, PLAIN, 2.0), run(1, FAST, 1.0), *rounds("claim", (FAST, 1.0), (PLAIN, 2.0), first=2, **LOUD)]
    entries = {entry.config: entry for entry in collect_runs(trials)}
    assert against(session(trials), entries[FAST], entries[PLAIN]) is None


def test_pairs_speak_before_looks_and_a_disturbed_pair_does_not_count() -> None:
    other = FAST.model_copy(update={"micro_batch": 4})
    trials = [run(0, PLAIN, 3.0), run(1, FAST, 1.0), run(2, other, 0.9)]
    trials += rounds("finalist", (FAST, 1.0), (other, 1.3), first=3, count=1)
    trials += [
        run(9 + i, config, step_s, purpose="finalist", round=7, **LOUD)
        for i, (config, step_s) in enumerate(((FAST, 1.0), (other, 0.1)))
    ]
    said = reasons(session(trials), FAST)["micro_batch"]
    assert said.startswith("1.30 times as fast as micro_batch=4 (trial 2), side by side; ")


def test_what_is_faster_and_may_not_be_the_plan_says_why() -> None:
    trials = [run(0, PLAIN, 2.0), run(1, FAST, 1.0)]
    failed = PLAIN_PARITY.model_copy(update={"passed": False})
    said = reasons(session(trials, parities={FAST: failed}))
    fails = "it fails parity: it would not train the same thing"
    assert said["precision"] == f"precision=bf16 (trial 1) is 100% faster, one run each; {fails}"
    assert alternatives(session(trials, parities={FAST: failed}), PLAIN)[FAST].why == fails
    assert reasons(session(trials))["precision"].endswith("one run each; it was not proved to be")
    assert alternatives(session(trials), PLAIN)[FAST].why == "100% faster, one run each; it was not proved to be"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"dp_replicate": 2}, "gradient_sync=every needs dp_shard >= 2"),
        ({"dp_shard": 2, "micro_batch": 8}, "gradient_sync=every needs several micro-batches per step"),
        ({"dp_shard": 2}, "gradient_sync=every left out: it is not needed"),
    ],
)
def test_a_value_that_does_not_go_with_the_plan_says_which_rule_forbids_it(knobs: dict[str, int], words: str) -> None:
    config = TrainingConfig.model_validate({"micro_batch": 2} | knobs)
    found = session([run(0, config, 1.0)])
    found.context.space.values = {"gradient_sync": ("last", "every")}
    found.context.left_out = (
        LeftOutFamily(family="gradient_sync=every", limit="it is not needed", by="", configurations=1),
    )
    assert reasons(found, config)["gradient_sync"].startswith(words)
