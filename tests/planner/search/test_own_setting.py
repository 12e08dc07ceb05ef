"""A search starts from the setting that the training has: it is the baseline, in the words of every screen too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import ConfigError, UsageError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.baseline import run_words
from autoplan.planner.records.trials import Outcome
from autoplan.planner.search.inspection import with_own_setting
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.references import plain_configs
from autoplan.planner.search.run import _baseline_of
from autoplan.planner.store.store import study_identity
from autoplan.planner.trials.runner import WORKLOAD, TrialOrder
from autoplan.report import facts, pieces
from autoplan.strategies.analysis.facts import Choices, LeftOut, WorkloadFacts
from autoplan.strategies.config import TrainingConfig
from tests.planner.search.stand_in import PLAIN, Killed, Searches, World, searches
from tests.recorded import make_plan

__all__ = ["searches"]

OWN = TrainingConfig(micro_batch=2, precision="bf16", checkpointing="full")
SLOW = {"seconds": lambda config: 0.4 if config == OWN else 0.8}
SPEC = make_plan().workload  # of a global batch of 16


def facts_of(**spec: Any) -> WorkloadFacts:
    """Facts of a workload on a CPU that has no compiler."""
    offered = {
        "micro_batch": (1, 2, 4, 8, 16),
        "checkpointing": ("none", "full"),
        "precision": ("fp32", "bf16"),
        "compile": ("off",),
    }
    left_out = LeftOut(knob="compile", value="model", reason="no C++ compiler is installed")
    choices = [Choices(knob=knob, values=values, left_out=(left_out,)) for knob, values in offered.items()]
    return WorkloadFacts.model_construct(spec=SPEC.model_copy(update=spec), choices=tuple(choices))


def resolved(baseline: Any = None, **spec: Any) -> Any:
    return with_own_setting(facts_of(**spec), SearchOptions(spec=SPEC, baseline=baseline))


# What the setting is.


def test_what_was_read_is_the_setting_unless_the_user_says_another() -> None:
    assert resolved().own_setting is None
    assert resolved(own_setting=OWN).own_setting == OWN
    assert resolved("plain", own_setting=OWN).own_setting is None
    said = resolved({"precision": "fp32", "micro_batch": 4}, own_setting=OWN).own_setting
    assert said == TrainingConfig(micro_batch=4, checkpointing="full"), "what is not named stays as it was read"
    assert resolved("precision=bf16,micro_batch=4").own_setting == TrainingConfig(micro_batch=4, precision="bf16")


def test_a_fixed_micro_batch_is_that_of_the_setting() -> None:
    found = resolved({"precision": "bf16"}, options={"fixed_micro_batch": 8})
    assert found.own_setting == TrainingConfig(micro_batch=8, precision="bf16")


@pytest.mark.parametrize("said", [None, {"precision": "bf16"}])
def test_a_micro_batch_that_is_fixed_now_takes_the_place_of_the_one_that_was_read(said: Any) -> None:
    spec = SPEC.model_copy(update={"own_setting": OWN, "options": {"fixed_micro_batch": 8}})
    why = LeftOut(knob="micro_batch", value=2, reason="the workload fixes the micro-batch to 8")
    fixed = Choices(knob="micro_batch", values=(8,), left_out=(why,))
    others = [one for one in facts_of().choices if one.knob != "micro_batch"]
    facts = WorkloadFacts.model_construct(spec=spec, choices=(fixed, *others))
    found = with_own_setting(facts, SearchOptions(spec=SPEC, baseline=said))
    assert found.own_setting == OWN.model_copy(update={"micro_batch": 8}) and found.notes == SPEC.notes


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (TrainingConfig(micro_batch=2, compile="model"), "compile=model: no C++ compiler is installed"),
        (TrainingConfig(micro_batch=3), "micro_batch=3 does not divide the global batch of 16"),
        (TrainingConfig(micro_batch=2, dp_replicate=2), "is of several processes"),
        (TrainingConfig(micro_batch=2, compile_mode="max-autotune"), "nothing is compiled"),
    ],
)
def test_a_setting_that_is_not_possible_here(own: TrainingConfig, why: str) -> None:
    """One that was read is left out, and a note says why; one that the user says is an error."""
    left_out = resolved(own_setting=own)
    assert left_out.own_setting is None
    assert "is not the baseline" in left_out.notes[-1] and why in left_out.notes[-1]
    with pytest.raises(ConfigError, match="is not possible here") as raised:
        resolved(own.knobs_off_default())
    assert why in raised.value.message and 'baseline="plain"' in str(raised.value.hint)


def test_a_setting_without_a_micro_batch() -> None:
    with pytest.raises(UsageError, match="names no micro_batch") as raised:
        resolved({"precision": "bf16"})
    assert raised.value.hint is not None and 'baseline={"micro_batch": 16}' in raised.value.hint


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"precisoin": "bf16"}, "precisoin"),
        ({"precision": "bf17"}, "precision='bf17' is not a value of precision"),
        ("bf16", "'bf16' is not of the form knob=value"),
        ("precision=bf16,precision=fp32", "--baseline precision is given twice"),
        (4, "--baseline is 4"),
    ],
)
def test_wrong_values_are_refused_when_the_options_are_made(given: Any, text: str) -> None:
    with pytest.raises(UsageError) as raised:
        SearchOptions(spec=SPEC, baseline=given)
    assert text in raised.value.flag_message


def test_another_baseline_is_another_study() -> None:
    def of(baseline: Any, own: TrainingConfig | None = None) -> Any:
        return _baseline_of(SearchOptions(spec=SPEC.model_copy(update={"own_setting": own}), baseline=baseline))

    assert of(None) is None and of("plain", OWN) is None
    assert of(None, OWN) == {"micro_batch": 2, "precision": "bf16", "checkpointing": "full"}
    assert of({"micro_batch": 4}, OWN) == of(None, OWN) | {"micro_batch": 4}
    assert of("micro_batch=4") == {"micro_batch": 4}
    asked: dict[str, Any] = {"device": "cpu", "fix": {}, "bound": {}, "nproc": 1, "memory_limit_bytes": None}
    studies = {study_identity(SPEC, "here", **asked, baseline=one) for one in (None, {"micro_batch": 2}, of(None, OWN))}
    assert len(studies) == 3


# What a search makes of it.


def test_it_is_the_baseline_and_the_plan_if_nothing_is_faster(searches: Searches) -> None:
    """No check and no hand setting is needed: it is the training as the user has it."""
    found = searches.search(World(own=OWN, **SLOW))  # type: ignore[arg-type]
    plan = found.result.plan
    assert plan is not None and plan.config == plan.baseline.config == OWN
    assert plan.has_own_baseline and OWN not in found.session.context.candidates
    assert "hand setting" not in found.observer.kinds and plan.hand is None
    assert plan.parity.note == "the plan is your setting, the training as it was: nothing was checked"
    assert plan.parity.passed
    assert OWN.describe() in facts.headline(plan) and says_no_plain_run(plan)


def says_no_plain_run(plan: Plan) -> bool:
    """Whether no screen of a plan names the plain run."""
    told = [facts.headline(plan), facts.headline_clause(plan), facts.measured_words(plan), *plan.notes]
    told += [text for _, text in facts.about(plan)] + list(facts.comparison(plan).headings)
    return not any("plain" in text for text in told)


def test_a_plan_is_compared_with_it(searches: Searches) -> None:
    found = searches.search(World(own=OWN, seconds=lambda config: 3.0 if config == OWN else 1.0))
    plan = found.result.plan
    assert plan is not None and plan.config != OWN and plan.baseline.config == OWN
    assert plan.speedup.median == pytest.approx(3.0, rel=0.05)
    assert f"the speed of your setting ({OWN.describe()})" in facts.headline(plan)
    assert "the hand setting" not in facts.headline(plan)
    assert says_no_plain_run(plan) and "; yours: " in facts.measured_words(plan)
    assert Plan.model_validate_json(plan.model_dump_json()).has_own_baseline, "a report that is made later knows"


def test_a_check_beside_it_compares_the_own_length_with_the_plain_run(searches: Searches) -> None:
    """What the user's setting needs says nothing about what the plain run would need."""
    world = World(own=OWN, seconds=lambda config: 3.0 if config == OWN else 1.0)
    searches.search(world)
    assert world.rungs and set(world.rungs) == {"plain"}


def test_it_is_tried_first_and_the_plain_run_stands_in(searches: Searches) -> None:
    full = {"outcome": Outcome.OUT_OF_MEMORY, "reason": "9 GiB over the limit"}
    found = searches.search(World(own=OWN, fate=lambda order, before: full if order.config == OWN else None))
    plan = found.result.plan
    assert plan is not None and plan.baseline.config == PLAIN and not plan.has_own_baseline
    assert found.session.store.trials[0].config == OWN
    (note,) = [note for note in plan.notes if note.startswith("your setting")]
    assert OWN.describe() in note and "9 GiB over the limit" in note
    assert "all others are compared with the plain run, micro_batch=16" in note
    assert "the plain baseline (your setting does not run here)" in facts.headline(plan)


def test_one_that_is_not_known_any_more_is_not_the_baseline(searches: Searches) -> None:
    """A search without a setting compares with fp32 with nothing applied, and not with what an earlier one ran."""
    own = TrainingConfig(micro_batch=2, precision="bf16")
    with pytest.raises(Killed):
        searches.search(World(own=own), die_before=3)
    world = World()
    plan = searches.search(world).result.plan
    assert world.made[0][:2] == ("baseline", PLAIN)
    assert plan is not None and plan.baseline.config == PLAIN and "does not fit" not in facts.headline(plan)


def test_the_plain_run_is_asked_for_in_a_study_of_its_own_where_a_file_may_have_a_setting() -> None:
    spec = SPEC.model_copy(update={"own_setting": None})
    file = spec.model_copy(update={"kind": "function", "reference": "train.py:make"})
    asked, unasked = (SearchOptions(spec=file, baseline=said) for said in ("plain", None))
    assert _baseline_of(asked) != _baseline_of(unasked)
    named = spec.model_copy(update={"kind": "model", "reference": "gpt2"})
    assert _baseline_of(SearchOptions(spec=named, baseline="plain")) is None, "it has none anyway"


@pytest.mark.parametrize("more_s", [0.0, 5.0])
def test_one_that_the_budget_ended_does_run_here(searches: Searches, more_s: float) -> None:
    """A little more time ends it again: that is no reason to compare with something else."""

    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        late = {"outcome": Outcome.TIMEOUT, "reason": "late", "budget_ended": True, "seconds_spent": order.deadline_s}
        return late if order.config == OWN else None

    for budget in (60.0, 60.0 + more_s):
        world = World(own=OWN, fate=fate)
        found = searches.search(world, budget=budget)
        assert found.result.status == "budget_ended" and "--budget" in str(found.result.hint)
        assert {config for purpose, config, _ in world.made if purpose == "baseline"} <= {OWN}


@pytest.mark.parametrize("before", [OWN, None], ids=["another", "none"])
@pytest.mark.parametrize("runs", [True, False])
def test_another_setting_than_that_of_an_earlier_run_is_measured(searches: Searches, runs: bool, before: Any) -> None:
    """The function of a file may read its setting from elsewhere, which is in no name of a study."""
    with pytest.raises(Killed):
        searches.search(World(own=before), die_before=3)
    other = TrainingConfig(micro_batch=4, precision="bf16")
    full = {"outcome": Outcome.OUT_OF_MEMORY, "reason": "9 GiB over the limit"}

    def fate(order: TrialOrder, made: int) -> dict[str, Any] | None:
        return full if order.config == other and not runs else None

    world = World(own=other, fate=fate)
    result = searches.search(world).result
    plan = result.plan
    assert world.made[0][:2] == ("baseline", other)
    assert result.baseline is not None and result.baseline.config == (other if runs else PLAIN)
    assert plan is not None and plan.baseline.config == (other if runs else PLAIN)
    assert ("your setting does not run here" in facts.headline(plan)) != runs


def test_a_claim_against_an_earlier_setting_is_not_gone_on_with(searches: Searches) -> None:
    """Its rounds are with another baseline: no further one would count, and no look would be made any more."""

    def fate(order: TrialOrder, before: int) -> dict[str, Any] | None:
        if sum(one.purpose == "claim" for one in first.orders) == 3:  # the first run of the second round
            raise Killed
        return None

    first, other = World(fate=fate), TrainingConfig(micro_batch=4, precision="bf16")
    with pytest.raises(Killed):
        searches.search(first, budget=300.0)
    found = searches.search(World(own=other), budget=300.0)
    assert found.result.plan is not None and found.result.plan.baseline.config == other
    assert [claim.reference for claim in found.session.store.claims] == [PLAIN, other]
    assert "look" in found.observer.kinds or found.result.plan.claim.rounds >= 2


@pytest.mark.parametrize("detail", [None, WORKLOAD])
def test_one_that_fails_is_no_end_of_the_search(searches: Searches, detail: str | None) -> None:
    crashed = {"outcome": Outcome.CRASHED, "reason": "the compiler failed", "detail": detail}
    found = searches.search(World(own=OWN, fate=lambda order, before: crashed if order.config == OWN else None))
    assert found.result.plan is not None and found.result.plan.baseline.config == PLAIN


def test_it_is_one_configuration_and_then_the_plain_ladder(searches: Searches) -> None:
    own = TrainingConfig(micro_batch=3, precision="bf16")
    with (run := searches.open(World(own=own))).store:
        assert run.session is not None
        assert plain_configs(run.session) == [own, *(TrainingConfig(micro_batch=n) for n in (16, 8, 4, 2, 1))]
        run.session.context.spec = run.session.context.spec.model_copy(update={"own_setting": PLAIN})
        assert plain_configs(run.session).count(PLAIN) == 1


# Words.


def test_what_a_baseline_is_called() -> None:
    assert run_words(OWN, OWN) == "your setting"
    assert run_words(OWN, OWN, whole=True) == f"your setting ({OWN.describe()})"
    assert run_words(PLAIN, OWN) == run_words(PLAIN, None) == "the plain run"
    assert run_words(PLAIN, PLAIN) == "your setting"
    assert run_words(TrainingConfig(micro_batch=1, checkpointing="full"), None) == "the run with checkpointing=full"


def test_progress_names_it(searches: Searches, tmp_path: Path) -> None:
    found = searches.search(World(own=OWN, **SLOW))  # type: ignore[arg-type]
    first = found.observer.works[0]
    assert pieces.work_words(first, OWN).startswith(f"your setting, {OWN.describe()} (")
    assert pieces.work_words(first).startswith("the run with ")
    base = found.session.baseline
    assert pieces.best_words(base, base, "tokens", OWN).endswith("tokens/s, your setting")
    spent = pieces.time_words(found.session.store.ledger, OWN)
    assert spent is not None and "your setting" in spent and "plain run" not in spent
