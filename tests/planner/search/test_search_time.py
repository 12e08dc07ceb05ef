"""What a search expects of its time: compilations by scope and mode, the parity check's reserve, the fallback."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoplan.planner.parity import compare
from autoplan.planner.records import Interval, Outcome, Parity, Trial
from autoplan.planner.search import parity_time
from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.objective import THROUGHPUT
from autoplan.planner.search.parity_time import ModelCost
from autoplan.planner.search.sampler import AutoplanSampler, RedrawingSampler, make_sampler
from autoplan.planner.search.session import BudgetOver, Session
from autoplan.planner.search.stages import find_verified, manual_settings, run_manual_setting
from autoplan.planner.search.trial_cost import COMPILE_S, FIXED_S, SLOW_MODE_FACTOR, WARM_SHARE, TrialCost
from autoplan.planner.trials.measure import ASSUMED
from autoplan.planner.trials.request import look_s
from autoplan.processes import Ended, TaskFailedError
from autoplan.strategies.config import CUDAGRAPH_MODES, TrainingConfig, knob_values

PLAIN = TrainingConfig(micro_batch=4)
COMPILED = PLAIN.model_copy(update={"compile": "model"})
TUNED = COMPILED.model_copy(update={"compile_mode": "max-autotune-no-cudagraphs"})
COST = ModelCost(sequence_length=1024, parameters=124e6, sample_s=4.0, optimizer_s=0.3)


def trial_of(config: TrainingConfig, *, number: int = 0, seconds: float = 1.0, compile_s: float = 0.0, **fields: Any):
    phases = {"start": 0.2, "build": 0.3, "warmup": 1.0, "measure": 2.0} | ({"compile": compile_s} if compile_s else {})
    values: dict[str, Any] = {
        "number": number,
        "purpose": "search",
        "config": config,
        "outcome": Outcome.OK,
        "phase": "done",
        "step_time_s": Interval(median=seconds, low=seconds, high=seconds, samples=5),
        "seconds_spent": 3.5 + compile_s,
        "phase_seconds": phases,
    }
    return Trial(**(values | fields))


def trial_cost(*configs: TrainingConfig) -> TrialCost:
    return TrialCost(configs or (PLAIN,), global_batch=8, num_blocks=12, device="cpu")


# The length of a look.


@pytest.mark.parametrize(
    ("step_s", "accumulation", "expected_s"),
    [
        (0.002, 4, 1.2),  # warm-up and two stretches of the load monitor
        (0.05, 1, 1.2),
        (0.5, 8, 6 * 0.0625 + 0.5 + 2.5),  # two short steps, one whole step, five that count
        (0.9, 1, 4 * 0.9),  # expensive: four steps, and three of them count
        (25.6, 64, 6 * 0.4 + 2 * 6 * 0.4),  # parts
        (100.0, 32, 3 * 3.125),  # very expensive: 1 + 2 micro-steps
        (290.0, 64, 3 * 4.53125),
    ],
)
def test_a_look_lasts_as_long_as_its_step_asks_for_whatever_the_budget_is(
    step_s: float, accumulation: int, expected_s: float
):
    assert look_s(np.array([step_s]), np.array([float(accumulation)]))[0] == pytest.approx(expected_s)
    config = PLAIN.model_copy(update={"micro_batch": 8 // min(accumulation, 8)})
    cost = trial_cost(config)
    assert cost.one_s(config, 0.05) == pytest.approx(FIXED_S + 1.2)


# Compilations.


def test_a_compilation_is_known_by_its_scope_and_its_mode():
    cost = trial_cost()
    block, more = COMPILE_S["cpu"]
    assert cost.compile_s(PLAIN) == 0.0
    assert cost.compile_s(COMPILED) == block + 12 * more
    assert cost.compile_s(TUNED) == SLOW_MODE_FACTOR * (block + 12 * more)
    cost.observe(trial_of(COMPILED, compile_s=60.0))
    assert cost.compile_s(COMPILED) == 60.0
    assert cost.compile_s(TUNED) == SLOW_MODE_FACTOR * 60.0, "assumed from the default mode that was seen"
    cost.observe(trial_of(TUNED, compile_s=150.0))
    assert (cost.compile_s(COMPILED), cost.compile_s(TUNED)) == (60.0, 150.0)
    assert cost.compile_s(PLAIN.model_copy(update={"compile": "block"})) == block


def test_a_compilation_from_the_cache_says_nothing_about_one_without():
    cost = trial_cost()
    cost.observe(trial_of(COMPILED, compile_s=60.0, warnings=("compile cache: 0 hit(s), 3 miss(es)",)))
    assert cost.compile_s(COMPILED, warm=True) == WARM_SHARE * 60.0
    cost.observe(trial_of(COMPILED, compile_s=9.0, warnings=("compile cache: 3 hit(s), 0 miss(es)",)))
    assert cost.compile_s(COMPILED) == 60.0
    assert cost.compile_s(COMPILED, warm=True) == 9.0


def test_a_candidate_that_differs_in_its_optimizer_alone_is_expected_to_find_its_kernels():
    fused = COMPILED.model_copy(update={"optimizer_step": "fused"})
    larger = COMPILED.model_copy(update={"micro_batch": 8})
    cost = trial_cost(COMPILED, fused, larger)
    cost.observe(trial_of(COMPILED, compile_s=60.0))
    here = cost.all_s(np.array([1.0, 1.0, 1.0]))
    saved_s = (1 - WARM_SHARE) * 60.0
    assert here[1] == pytest.approx(here[2] - saved_s, abs=1.0)
    assert cost.one_s(fused, 1.0) == pytest.approx(cost.one_s(larger, 1.0) - saved_s, abs=1.0)


def test_a_repeat_finds_its_kernels_in_the_cache():
    cost = trial_cost()
    cold = trial_of(COMPILED, compile_s=60.0)
    cost.observe(cold)
    assert cost.repeat_s(cold) == pytest.approx(3.5 + WARM_SHARE * 60.0)
    warm = trial_of(COMPILED, number=1, compile_s=9.0, warnings=("compile cache: 3 hit(s), 0 miss(es)",))
    cost.observe(warm)
    assert cost.repeat_s(cold) == pytest.approx(3.5 + 9.0)
    assert cost.repeat_s(warm) == warm.seconds_spent
    assert cost.repeat_s(trial_of(PLAIN)) == 3.5


# Slow modes.

MODES = tuple(
    TrainingConfig.model_validate({"micro_batch": size, "compile": "model", "compile_mode": mode})
    for size in (1, 2, 4, 8)
    for mode in knob_values("compile_mode") or ()
)


def seconds_of(config: TrainingConfig) -> float:
    return (2.0 + 1.0 / config.micro_batch) * (0.97 if config.compile_mode.startswith("max-autotune") else 1.0)


@pytest.mark.parametrize("sampler", ["autoplan", "random"])
def test_the_slow_modes_are_for_the_leader_alone(sampler: str):
    model = CandidateModel(MODES)
    drawn = make_sampler(sampler, model, None, seed=0)
    assert isinstance(drawn, AutoplanSampler | RedrawingSampler)
    import optuna

    study = optuna.create_study(sampler=drawn)
    tried: list[TrainingConfig] = []
    while drawn.reason_to_stop(study) is None:
        asked = study.ask(drawn.distributions)
        config = TrainingConfig.model_validate(asked.params)
        if config.compile_mode.startswith("max-autotune"):
            best = min((c for c in tried), key=seconds_of)
            assert {**config.model_dump(), "compile_mode": ""} == {**best.model_dump(), "compile_mode": ""}
        tried.append(config)
        study.tell(asked, seconds_of(config))
    assert len(set(tried)) == len(tried)
    assert any(config.compile_mode == "max-autotune" and config.micro_batch == 8 for config in tried)


def test_a_slow_mode_that_the_user_fixed_waits_for_nothing():
    graphs = [config for config in MODES if config.compile_mode == "max-autotune"]
    assert graphs[0].compile_mode in CUDAGRAPH_MODES
    assert CandidateModel(graphs).assess().untried.all()


def test_a_slow_mode_that_would_take_much_of_the_budget_is_not_tried():
    cost = TrialCost(MODES, global_batch=8, num_blocks=12, device="cuda")
    fast = MODES[0]
    tuned = fast.model_copy(update={"compile_mode": "max-autotune"})
    for limit_s, waits in ((1000.0, False), (60.0, True)):
        model = CandidateModel(MODES, None, cost, device="cuda", slow_mode_limit_s=limit_s)
        model.observe(trial_of(fast))
        assert model.wait_for_the_leader()[MODES.index(tuned)] == waits


# The reserve.


def test_the_reserve_knows_what_the_winner_compiles():
    cost = trial_cost()
    eager_s = parity_time.reserve_s(cost, COST, PLAIN, 600.0)
    cost.observe(trial_of(COMPILED, compile_s=60.0))
    assert parity_time.reserve_s(cost, COST, PLAIN, 600.0) == eager_s
    short, own, dropout = 60.0, 60.0, 60.0
    assert parity_time.reserve_s(cost, COST, COMPILED, 600.0) == pytest.approx(eager_s + short + own + dropout)
    short_budget_s = [parity_time.reserve_s(cost, COST, config, 120.0) for config in (PLAIN, COMPILED)]
    assert short_budget_s[1] - short_budget_s[0] == pytest.approx(60.0), "no verdict does without one compilation"


def test_the_reserve_grows_with_the_model():
    cost = trial_cost()
    small = ModelCost(sequence_length=128, parameters=1e6, sample_s=0.01)
    assert parity_time.reserve_s(cost, small, PLAIN, 600.0) == 45.0
    assert parity_time.reserve_s(cost, small, PLAIN, 30.0) == 5.0
    slow = ModelCost(sequence_length=1024, parameters=124e6, sample_s=20.0, optimizer_s=1.0)
    assert parity_time.reserve_s(cost, slow, PLAIN, 600.0) > 100.0
    assert parity_time.reserve_s(cost, slow, PLAIN, 300.0) == parity_time.MOST_SHARE * 300.0
    # a GPT-2 of 124M on two cores: 44 CPU-seconds were measured, where a sample takes 8 to 10
    gpt2 = ModelCost(sequence_length=1024, parameters=124e6, sample_s=9.0, optimizer_s=0.3)
    assert 40.0 < parity_time.check_s(cost, gpt2, PLAIN) < 60.0
    pictures = ModelCost(sequence_length=None, parameters=1e6, sample_s=0.5, fixed_micro_batch=True)
    larger = PLAIN.model_copy(update={"micro_batch": 8})
    assert parity_time.running_s(cost, pictures, larger) == 2 * parity_time.running_s(cost, pictures, PLAIN)


def test_a_check_takes_the_trials_own_shapes_where_that_costs_less_than_compiling():
    """Cold compilations of 30 s and more; a model whose samples take 5 ms, without dropout."""
    cost, quick = trial_cost(), ModelCost(sequence_length=None, parameters=5e6, sample_s=0.005, has_dropout=False)
    larger = COMPILED.model_copy(update={"micro_batch": 8})
    cost.observe(trial_of(larger, compile_s=60.0))
    assert parity_time.takes_own_shapes(cost, quick, larger)
    warm_s = cost.compile_s(larger, warm=True)
    assert parity_time.check_s(cost, quick, larger) < 10.0 + warm_s < cost.compile_s(larger)
    assert parity_time.reserve_s(cost, quick, larger, 300.0) < 40.0 + warm_s
    slow = dataclasses.replace(quick, sample_s=2.0)
    assert not parity_time.takes_own_shapes(cost, slow, larger), "9 micro-steps of 8 samples take longer than compiling"
    noisy = dataclasses.replace(quick, has_dropout=True)
    assert not parity_time.takes_own_shapes(cost, noisy, larger), "without dropout it is another graph"
    for knobs in ({"compile": "off"}, {"loss": "fused"}):
        assert not parity_time.takes_own_shapes(cost, quick, larger.model_copy(update=knobs))


def test_a_check_may_run_past_the_budget_and_leaves_time_for_the_eager_one():
    late = parity_time.deadline_s(-5.0, 100.0, expected_s=30.0, fallback_s=0.0, has_fallback=False)
    assert late == pytest.approx(5.0)
    both = parity_time.deadline_s(60.0, 100.0, expected_s=30.0, fallback_s=20.0, has_fallback=True)
    assert both == pytest.approx(50.0)
    short = parity_time.deadline_s(30.0, 100.0, expected_s=30.0, fallback_s=20.0, has_fallback=True)
    assert short == pytest.approx(30.0), "the winner's own time comes first"


def test_what_is_kept_for_the_claim_is_a_share_of_the_time_for_trials():
    """Probes, inspection and trace had 25 of 40 s: 30 % of all would leave no time for a trial."""
    parts = SimpleNamespace(
        store=SimpleNamespace(trials=(trial_of(PLAIN, seconds_spent=3.0),), spent_s=28.0, compiled_ahead=()),
        budget_s=40.0,
        parity_reserve_s=5.0,
    )
    assert Session.trials_s.fget(parts) == pytest.approx(10.0)  # type: ignore[attr-defined]
    parts.store.compiled_ahead = (SimpleNamespace(seconds=4.0),)
    assert Session.trials_s.fget(parts) == pytest.approx(14.0), "that time was for trials"  # type: ignore[attr-defined]
    parts.store.compiled_ahead = ()
    parts.store.spent_s = 60.0
    assert Session.trials_s.fget(parts) == 0.0  # type: ignore[attr-defined]


# The fallback.


def checked(passed: bool) -> Parity:
    return Parity(
        passed=passed,
        tolerance=1e-3,
        worst_gradient_difference=0.0,
        worst_update_difference=0.0,
        worst_group="",
        loss_difference=0.0,
        global_batch=8,
        sequence_length=None,
        changes_numerics=False,
    )


class Searched:
    """As much of a session as the last stage asks for; the clock stands still."""

    def __init__(self, trials: tuple[Trial, ...], folder: Path, left_s: float = 40.0) -> None:
        self.notes: list[str] = []
        self.budget_s, self.left_s = 100.0, left_s
        self.store = SimpleNamespace(
            trials=trials, folder=folder, parity_of=lambda config: None, add_parity=lambda config, parity: None
        )
        self.options = SimpleNamespace(allows=lambda config: True)
        self.observer = SimpleNamespace(on_phase=lambda *texts: None)
        self.zygote = None
        self.objective, self.run_spread = THROUGHPUT, ASSUMED
        self.context = SimpleNamespace(
            spec=SimpleNamespace(global_batch=8, sequence_length=None),
            facts=SimpleNamespace(step_s=None),
            device="cpu",
            host_limit_bytes=None,
        )
        self.trial_cost = trial_cost()
        self.parity_cost = ModelCost(sequence_length=128, parameters=1e6, sample_s=0.01)
        for trial in trials:
            self.trial_cost.observe(trial)

    def note(self, text: str) -> None:
        self.notes.append(text)


def plant(monkeypatch: pytest.MonkeyPatch, ends: Any) -> list[tuple[TrainingConfig, float]]:
    """A parity check that ends as `ends(config)` says; None: not in its time."""
    asked: list[tuple[TrainingConfig, float]] = []

    def run_parity(zygote: Any, spec: Any, config: TrainingConfig, *, deadline_s: float, **rest: Any) -> Parity:
        asked.append((config, deadline_s))
        passed = ends(config)
        if passed is None:
            report: Any = SimpleNamespace(
                describe=lambda: "the deadline passed", ended=Ended.CANCELLED, phase="", first_failure=None
            )
            raise TaskFailedError(report)
        return checked(passed)

    monkeypatch.setattr(compare, "run_parity", run_parity)
    return asked


TRIALS = (
    trial_of(COMPILED, number=1, seconds=1.0, compile_s=20.0),
    trial_of(COMPILED.model_copy(update={"optimizer_step": "fused"}), number=2, seconds=1.1, compile_s=20.0),
    trial_of(COMPILED.model_copy(update={"micro_batch": 8}), number=3, seconds=1.2, compile_s=20.0),
    trial_of(PLAIN, number=4, seconds=2.0),
)


def test_an_eager_configuration_is_checked_where_the_compiled_winner_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = plant(monkeypatch, lambda config: None if config.compile != "off" else True)
    session: Any = Searched(TRIALS, tmp_path)
    found = find_verified(session)
    assert found is not None and found[0].config == PLAIN
    assert [config for config, _ in asked] == [COMPILED, PLAIN], "no further compiled one is tried"
    assert asked[0][1] < 50.0 == asked[1][1], "the first leaves time for the second"
    assert "did not end in its time" in session.notes[0]


def test_a_search_ends_without_a_plan_only_where_no_check_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = plant(monkeypatch, lambda config: None)
    session: Any = Searched(TRIALS, tmp_path)
    with pytest.raises(BudgetOver, match="compile=model"):
        find_verified(session)
    assert [config for config, _ in asked] == [COMPILED, PLAIN]


def test_past_its_budget_a_search_checks_the_winner_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = plant(monkeypatch, lambda config: True)
    session: Any = Searched(TRIALS[3:], tmp_path, left_s=-2.0)
    found = find_verified(session)
    assert found is not None and asked == [(PLAIN, pytest.approx(8.0))]
    assert session.notes == [f"the parity check of {PLAIN.describe()} ended 2.0 s past the budget"]


# The hand setting.


@pytest.mark.parametrize(("sizes", "chosen"), [([1, 2, 3, 6, 8], [8, 2, 1]), ([6], [6]), ([3, 6], [3])])
def test_the_hand_setting_halves_the_micro_batch_until_it_fits(sizes: list[int], chosen: list[int]):
    def predict(config: TrainingConfig) -> Any:
        return SimpleNamespace(peak_memory_bytes=100 if config.micro_batch in (3, 4, 6) else 10)

    space = SimpleNamespace(values={"micro_batch": sizes, "precision": ["fp32"]})
    context = SimpleNamespace(space=space, device="cpu", memory_limit_bytes=50, spec=SimpleNamespace(global_batch=24))
    session = SimpleNamespace(context=context, options=SimpleNamespace(fix={}), predict=predict)
    assert [config.micro_batch for config in manual_settings(session, "fp32")] == chosen  # type: ignore[arg-type]


def test_a_hand_setting_that_there_is_no_time_for_is_named():
    notes: list[str] = []
    baseline = SimpleNamespace(
        purpose="baseline", config=TrainingConfig(micro_batch=2), outcome=Outcome.OK, budget_ended=False
    )
    space = SimpleNamespace(values={"micro_batch": [1, 2], "precision": ["fp32", "bf16"]})
    context = SimpleNamespace(space=space, device="cpu", memory_limit_bytes=50, spec=SimpleNamespace(global_batch=2))
    session: Any = SimpleNamespace(
        context=context,
        options=SimpleNamespace(fix={}, max_trials=None),
        predict=lambda config: SimpleNamespace(peak_memory_bytes=10),
        store=SimpleNamespace(trials=[baseline]),
        model=SimpleNamespace(cost_s=lambda config: 90.0),
        search_left_s=60.0,
        parity_reserve_s=10.0,
        hard_deadline_s=lambda reserve_s: 60.0 - reserve_s,
        note=notes.append,
    )
    run_manual_setting(session)
    (note,) = notes
    assert "micro_batch=2 precision=bf16 was not measured: it takes about 90 s" in note and "--budget" in note


@pytest.mark.parametrize(("spent_s", "measured"), [(40.0, True), (200.0, False)])
def test_a_hand_setting_that_the_budget_ended_is_measured_again_with_more_time(spent_s: float, measured: bool):
    made: list[Any] = []
    config = TrainingConfig(micro_batch=2, precision="bf16")
    ended = {"budget_ended": True, "outcome": Outcome.TIMEOUT, "seconds_spent": spent_s}
    good = {"budget_ended": False, "outcome": Outcome.OK, "seconds_spent": 20.0}
    trials = [
        SimpleNamespace(purpose="baseline", config=TrainingConfig(micro_batch=2), **good),
        SimpleNamespace(purpose="reference", config=config, **ended),
    ]

    def measure(purpose: str, config: TrainingConfig, **facts: Any) -> Any:
        made.append((purpose, config, facts["deadline_of_budget"]))
        return SimpleNamespace(purpose=purpose, config=config, **good)

    session: Any = SimpleNamespace(
        context=SimpleNamespace(
            space=SimpleNamespace(values={"micro_batch": [2], "precision": ["fp32", "bf16"]}),
            device="cpu",
            memory_limit_bytes=50,
            spec=SimpleNamespace(global_batch=2),
        ),
        options=SimpleNamespace(fix={}, max_trials=None),
        predict=lambda config: SimpleNamespace(peak_memory_bytes=10),
        store=SimpleNamespace(trials=trials),
        model=SimpleNamespace(cost_s=lambda config: 90.0),
        search_left_s=150.0,
        parity_reserve_s=10.0,
        hard_deadline_s=lambda reserve_s: 160.0 - reserve_s,
        measure=measure,
    )
    run_manual_setting(session)
    assert made == ([("reference", config, True)] if measured else [])
