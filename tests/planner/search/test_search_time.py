"""What a search expects of its time: looks, compilations by scope and mode, the parity check."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoplan.planner.records.trials import RECOMPILED, Interval, Outcome, Trial, Window, WorkLine
from autoplan.planner.search import state as search_state
from autoplan.planner.search import work as search_work
from autoplan.planner.search.candidate_model import CandidateModel, next_looks
from autoplan.planner.search.next_work import CHECKED_RISK, UNCHECKED_RISK
from autoplan.planner.search.sampler import make_sampler
from autoplan.planner.search.state import check_s
from autoplan.planner.search.trial_cost import (
    COMPILE_S,
    FIXED_S,
    SLOW_MODE_FACTOR,
    WARM_SHARE,
    ModelCost,
    TrialCost,
    first_steps_s,
    own_length_s,
    parity_parts_s,
    parity_s,
    takes_own_shapes,
)
from autoplan.planner.trials.request import look_s
from autoplan.strategies.config import CUDAGRAPH_MODES, TrainingConfig, knob_values
from tests.planner.search.stand_in import flat_model

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
        (0.5, 8, 6 * 0.0625 + 0.5 + 2.5),  # two short steps, one whole step, five that count
        (0.9, 1, 4 * 0.9),  # expensive: four steps, and three of them count
        (25.6, 64, 6 * 0.4 + 2 * 6 * 0.4),  # parts
        (100.0, 32, 3 * 3.125),  # very expensive: 1 + 2 micro-steps
        (9.0, 1, 2 * 9.0),  # of steps with one each: 1 + 1
    ],
)
def test_a_look_lasts_as_long_as_its_step_asks_for_whatever_the_budget_is(
    step_s: float, accumulation: int, expected_s: float
):
    assert look_s(np.array([step_s]), np.array([float(accumulation)]))[0] == pytest.approx(expected_s)
    config = PLAIN.model_copy(update={"micro_batch": 8 // min(accumulation, 8)})
    cost = trial_cost(config)
    assert cost.one_s(config, 0.05) == pytest.approx(FIXED_S + 1.2)


@pytest.mark.parametrize(
    ("step_s", "changes", "saved_s"),
    [
        (80.0, {}, 10.0),  # one micro-step less, of eight
        (80.0, {"micro_batch": 8}, 0.0),  # the step is one micro-step: a look has two of them
        (80.0, {"compile": "model"}, 10.0),
        (8.0, {}, 0.0),  # micro-steps of 1 s have as many samples as in a look
        (14.0, {}, 0.0),  # a look has 4 of 1.75 s: it is as long as one of very expensive ones
        (80.0, {"dp_replicate": 2}, 0.0),
        (80.0, {"compile": "model", "compile_mode": "reduce-overhead"}, 0.0),  # its first two record a CUDA graph
    ],
)
def test_a_further_run_of_very_expensive_micro_steps_has_two(step_s: float, changes: dict[str, Any], saved_s: float):
    config = PLAIN.model_copy(update={"micro_batch": 1} | changes)
    micro_step_s = step_s / config.accumulation(8)
    cost = trial_cost(config)
    look_takes_s = cost.one_s(config, step_s)
    warm_s = cost.compile_s(config) - cost.compile_s(config, warm=True)
    assert look_takes_s - cost.warm_s(config, step_s) == pytest.approx(saved_s + warm_s)
    compile_s = 7.0 + micro_step_s if config.compile != "off" else 0.0
    trial = trial_of(config, seconds=step_s, seconds_spent=200.0, compile_s=compile_s)
    cost.observe(trial)
    again_s = 200.0 - saved_s - (1 - WARM_SHARE) * cost.compile_s(config)
    assert cost.repeat_s(trial) == pytest.approx(again_s)
    before = cost.one_s(config, step_s)
    cost.observe(trial_of(config, number=1, seconds=step_s, seconds_spent=20.0, round=0, purpose="claim"))
    assert cost.one_s(config, step_s) == before, "a shorter run says nothing about a look"


def test_of_a_compilation_the_micro_step_in_it_does_not_count_where_it_is_very_expensive():
    config = COMPILED.model_copy(update={"micro_batch": 1})
    cost = trial_cost(config)
    look = trial_of(config, seconds=80.0, compile_s=37.0, seconds_spent=70.0)  # a micro-step of 10 s in the 37 s
    cost.observe(look)
    assert cost.compile_s(config) == pytest.approx(27.0)
    warm = "compile cache: 3 hit(s), 0 miss(es)"
    cost.observe(trial_of(config, number=1, round=0, seconds=80.0, compile_s=16.0, warnings=(warm,)))
    assert cost.compile_s(config, warm=True) == pytest.approx(6.0)
    assert cost.repeat_s(look) == pytest.approx(70.0 - 10.0 - 27.0 + 6.0)


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
    slower = 60.0 / (block + 12 * more)
    assert cost.compile_s(PLAIN.model_copy(update={"compile": "block"})) == pytest.approx(slower * block)


def test_a_slow_compilation_of_blocks_says_that_the_whole_model_compiles_slowly_too():
    block = COMPILED.model_copy(update={"compile": "block"})
    cost = trial_cost()
    before_s = cost.compile_s(COMPILED)
    cost.observe(trial_of(block, compile_s=2 * COMPILE_S["cpu"][0]))
    assert cost.compile_s(COMPILED) == pytest.approx(2 * before_s)
    cost.observe(trial_of(COMPILED, number=1, compile_s=60.0))
    assert cost.compile_s(COMPILED) == 60.0, "what was seen counts alone"


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


@pytest.mark.parametrize("kind", ["autoplan", "random"])
def test_the_slow_modes_are_for_the_leader_alone(kind: str):
    model = flat_model(MODES)
    sampler = None if kind == "autoplan" else make_sampler(kind, model, seed=0)
    tried: list[TrainingConfig] = []
    while (model.hopeful() if sampler is None else model.assess().untried).any():
        config = model.ranking()[0] if sampler is None else sampler.draw(math.inf)
        if config.compile_mode.startswith("max-autotune"):
            best = min((c for c in tried), key=seconds_of)
            assert {**config.model_dump(), "compile_mode": ""} == {**best.model_dump(), "compile_mode": ""}
        seconds = seconds_of(config)
        step = Interval(median=seconds, low=seconds, high=seconds, samples=5)
        model.observe(trial_of(config).model_copy(update={"number": len(tried), "step_time_s": step}))
        tried.append(config)
    assert len(set(tried)) == len(tried)
    assert any(config.compile_mode == "max-autotune" and config.micro_batch == 8 for config in tried)


def test_a_slow_mode_that_the_user_fixed_waits_for_nothing():
    graphs = [config for config in MODES if config.compile_mode == "max-autotune"]
    assert graphs[0].compile_mode in CUDAGRAPH_MODES
    assert flat_model(graphs).assess().untried.all()


def test_a_slow_mode_that_would_take_much_of_the_budget_is_not_tried():
    cost = TrialCost(MODES, global_batch=8, num_blocks=12, device="cuda")
    fast = MODES[0]
    tuned = fast.model_copy(update={"compile_mode": "max-autotune"})
    for limit_s, waits in ((1000.0, False), (60.0, True)):
        model = flat_model(MODES, cost, device="cuda", slow_mode_limit_s=limit_s)
        model.observe(trial_of(fast))
        assert model.wait_for_the_leader()[MODES.index(tuned)] == waits


BUSY = Window(seconds=1.0, others_cpu_share=0.5, disturbed="other work took 50 % of the cores")
THREADS = [TrainingConfig(micro_batch=size, threads=count) for size in (1, 2) for count in (None, 1, 2)]


def next_configs(model: CandidateModel) -> list[TrainingConfig]:
    now = model.assess()
    return [config for config, wanted in zip(model.candidates, next_looks(now)[1], strict=True) if wanted]


def test_numbers_of_threads_are_looked_at_last_while_other_work_disturbs_each_trial():
    model = flat_model(THREADS)
    model.observe(trial_of(THREADS[0], window=BUSY))
    assert {config.threads for config in next_configs(model)} == {None}
    model.observe(trial_of(THREADS[0], number=1, window=BUSY))
    model.observe(trial_of(THREADS[3], number=2, window=BUSY))
    assert {config.threads for config in next_configs(model)} == {1, 2}, "no other is left"
    model.observe(trial_of(THREADS[3], number=3, window=Window(seconds=1.0)))
    assert {config.threads for config in next_configs(model)} == {1, 2}, "and the load is over"
    itself = Window(seconds=1.0, disturbed=f"{RECOMPILED} while it was measured")
    other = flat_model(THREADS)
    other.observe(trial_of(THREADS[0], window=itself))
    assert {config.threads for config in next_configs(other)} == {None, 1, 2}, "no other work"


def test_a_number_of_threads_that_ran_only_beside_other_work_is_no_plan():
    model = flat_model(THREADS)
    model.observe(trial_of(THREADS[0], seconds=2.0, window=Window(seconds=1.0)))
    model.observe(trial_of(THREADS[1], number=1, seconds=1.0, window=BUSY))
    assert model.best_trial().config == THREADS[0] and model.hanging == [THREADS[1]]
    model.observe(trial_of(THREADS[1], number=2, seconds=1.5, window=Window(seconds=1.0)))
    assert model.best_trial().config == THREADS[1] and not model.hanging


@pytest.mark.parametrize("counts", [{1}, {1, 2}])
def test_where_the_user_chose_numbers_of_threads_none_of_them_hangs_on_the_load(counts: set[int]):
    chosen = [config for config in THREADS if config.threads in counts]
    model = flat_model(chosen)
    model.observe(trial_of(chosen[0], window=BUSY))
    assert len(next_configs(model)) > 0 and not model.hanging
    assert model.best_trial().config == chosen[0]


def test_what_several_ranks_take_to_start_is_known_after_their_first_trial():
    both = PLAIN, PLAIN.model_copy(update={"dp_replicate": 2})
    cost, steps = trial_cost(*both), np.array([1.0, 1.0])
    cost.observe(trial_of(PLAIN))
    one, two = cost.all_s(steps)
    assert one == two
    slow = {"start": 4.0, "init": 5.0, "build": 0.5, "warmup": 1.0, "measure": 2.0}
    cost.observe(trial_of(both[1], number=1, phase_seconds=slow))
    now_one, now_two = cost.all_s(steps)
    assert now_one == pytest.approx(one) and now_two == pytest.approx(one + 9.0)
    assert cost.one_s(both[1], 1.0) == pytest.approx(now_two)


# The parity check.


def test_the_check_knows_what_the_leader_compiles():
    cost = trial_cost()
    eager_s = parity_s(cost, COST, PLAIN)
    cost.observe(trial_of(COMPILED, compile_s=60.0))
    eager_now_s = parity_s(cost, COST, PLAIN)
    assert eager_now_s == pytest.approx(eager_s, abs=2.0), "less what starting a process was seen to take"
    compiled_s = parity_s(cost, COST, COMPILED)
    assert compiled_s > eager_now_s + 60.0, "no verdict does without one compilation"
    assert compiled_s == pytest.approx(eager_now_s + 60.0, rel=0.1), "and the first step once more in fp32"


def test_the_check_grows_with_the_model():
    cost = trial_cost()
    small = ModelCost(sequence_length=128, parameters=1e6, sample_s=0.01)
    assert parity_s(cost, small, PLAIN) < 8.0
    assert 2 * cost.fixed_s < first_steps_s(cost, small, PLAIN) < parity_s(cost, small, PLAIN) / 2
    slow = ModelCost(sequence_length=1024, parameters=124e6, sample_s=20.0, optimizer_s=1.0)
    assert parity_s(cost, slow, PLAIN) + own_length_s(cost, slow, PLAIN) > 80.0
    # a GPT-2 of 124M on two cores: 44 CPU-seconds were measured, where a sample takes 8 to 10
    gpt2 = ModelCost(sequence_length=1024, parameters=124e6, sample_s=9.0, optimizer_s=0.3)
    assert 40.0 < parity_s(cost, gpt2, PLAIN) + own_length_s(cost, gpt2, PLAIN) < 60.0
    assert parity_s(cost, gpt2, PLAIN) < 30.0, "no time is kept for what a verdict can do without"
    compiled_s = own_length_s(cost, gpt2, COMPILED) - own_length_s(cost, gpt2, PLAIN)
    assert compiled_s == cost.compile_s(COMPILED), "another length is another graph"
    assert own_length_s(cost, dataclasses.replace(gpt2, sequence_length=16), COMPILED) == 0.0, "as long as the steps"
    pictures = ModelCost(sequence_length=None, parameters=1e6, sample_s=0.5, fixed_micro_batch=True)
    larger = PLAIN.model_copy(update={"micro_batch": 8})
    starts_s = 2 * cost.fixed_s
    assert parity_s(cost, pictures, larger) - starts_s == pytest.approx(
        2 * (parity_s(cost, pictures, PLAIN) - starts_s)
    )


def test_a_check_takes_the_trials_own_shapes_where_that_costs_less_than_compiling():
    """Cold compilations of 30 s and more; a model whose samples take 5 ms, without dropout."""
    cost, quick = trial_cost(), ModelCost(sequence_length=None, parameters=5e6, sample_s=0.005, has_dropout=False)
    larger = COMPILED.model_copy(update={"micro_batch": 8})
    cost.observe(trial_of(larger, compile_s=60.0))
    assert takes_own_shapes(cost, quick, larger)
    warm_s = cost.compile_s(larger, warm=True)
    assert parity_s(cost, quick, larger) < 10.0 + warm_s < cost.compile_s(larger)
    slow = dataclasses.replace(quick, sample_s=2.0)
    assert not takes_own_shapes(cost, slow, larger), "9 micro-steps of 8 samples take longer than compiling"
    noisy = dataclasses.replace(quick, has_dropout=True)
    assert not takes_own_shapes(cost, noisy, larger), "without dropout it is another graph"
    for knobs in ({"compile": "off"}, {"loss": "fused"}):
        assert not takes_own_shapes(cost, quick, larger.model_copy(update=knobs))


def test_what_a_check_took_says_nothing_of_the_next_ones_compilation():
    """On a GPU the first check took five times what was expected; the next one compiles too."""
    trials = TrialCost((PLAIN, COMPILED), global_batch=8, num_blocks=12, device="cuda")
    eager_s, _ = parity_parts_s(trials, COST, PLAIN)
    line = WorkLine(kind="parity", config=PLAIN, began_s=0.0, seconds=5 * eager_s, predicted_s=2.0)
    passed = SimpleNamespace(checks=(), finished=True)
    store = SimpleNamespace(ledger=(line,), parity_of=lambda config: passed if config == PLAIN else None)
    session: Any = SimpleNamespace(store=store, trial_cost=trials, parity_cost=COST)
    running_s, compiling_s = parity_parts_s(trials, COST, COMPILED)
    assert compiling_s > 10.0
    assert check_s(session, COMPILED) == pytest.approx(5 * running_s + compiling_s)
    passed.finished, session.model = False, SimpleNamespace(pace=1.0)
    assert check_s(session, COMPILED) < 2 * running_s + compiling_s + 5, "one that was ended says nothing"


def test_the_pass_at_the_own_length_is_no_part_of_what_the_next_check_is_expected_to_take():
    trials = trial_cost()
    running_s, _ = parity_parts_s(trials, COST, PLAIN)
    whole_s = running_s + own_length_s(trials, COST, PLAIN)
    assert whole_s > running_s
    line = WorkLine(kind="parity", config=PLAIN, began_s=0.0, seconds=2 * whole_s, predicted_s=2.0)
    passed = SimpleNamespace(checks=(SimpleNamespace(name="gradients, own length"),), finished=True)
    store = SimpleNamespace(ledger=(line,), parity_of=lambda config: passed if config == PLAIN else None)
    session: Any = SimpleNamespace(store=store, trial_cost=trials, parity_cost=COST)
    other = PLAIN.model_copy(update={"attention": "eager"})
    assert check_s(session, other) == pytest.approx(2 * running_s)


def test_only_a_check_that_no_look_waits_for_has_time_for_the_own_length(monkeypatch: pytest.MonkeyPatch):
    trials = trial_cost()
    monkeypatch.setattr(search_work, "check_s", lambda session, config: 30.0)
    monkeypatch.setattr(search_work, "needs_s", lambda session, config: 130.0)
    session: Any = SimpleNamespace(model=SimpleNamespace(pace=2.0), trial_cost=trials, parity_cost=COST, left_s=1000.0)
    assert search_work._check_time_s(session, PLAIN, whole=False) == pytest.approx(1.5 * 30 + 5)
    whole_s = 30 + 2.0 * own_length_s(trials, COST, PLAIN)
    assert search_work._check_time_s(session, PLAIN, whole=True) == pytest.approx(1.5 * whole_s + 5)
    session.left_s = 110.0
    assert search_work._check_time_s(session, PLAIN, whole=True) == 30.0, "the rounds of the claim keep their time"


def test_a_look_leaves_the_leaders_check_where_there_is_no_room_for_a_claim(monkeypatch: pytest.MonkeyPatch):
    """Also where its own check would be shorter."""
    monkeypatch.setattr(search_work, "needs_s", lambda session, config: 100.0)
    monkeypatch.setattr(search_work, "check_s", lambda session, config: 15.0 if config == PLAIN else 5.0)
    monkeypatch.setattr(search_work, "find_leader", lambda session: SimpleNamespace(config=PLAIN))
    session: Any = SimpleNamespace(
        model=SimpleNamespace(cost_s=lambda config: 18.0, pace=1.0),
        left_s=40.0,
        hard_deadline_s=lambda after_s: 42.0 - after_s,
        known_parity=lambda config: None,
        eligible=[],
        objective=SimpleNamespace(name="throughput"),
        run_spread=None,
        trials_done=2,
        side=None,
    )
    assert search_work.look_limits(session, COMPILED)["deadline_s"] == 42.0 - 15.0
    session.known_parity = lambda config: "passed"
    assert search_work.look_limits(session, COMPILED)["deadline_s"] == 42.0 - 5.0


def test_what_computes_as_the_baseline_does_is_not_checked_early(monkeypatch: pytest.MonkeyPatch):
    """Another optimizer step or allocator; another attention may be wrong."""
    base = trial_of(PLAIN, seconds=10.0)
    monkeypatch.setattr(search_state, "at_plain_pace_s", lambda session, runs: 5.0)
    monkeypatch.setattr(search_state, "check_s", lambda session, config: 30.0)
    store = SimpleNamespace(parity_of=lambda config: None)
    session: Any = SimpleNamespace(
        known_parity=lambda config: None, eligible=(), store=store, baseline=base, taken=frozenset()
    )

    def gain(**changes: Any) -> float:
        runs: Any = SimpleNamespace(config=PLAIN.model_copy(update=changes))
        option = search_state._check(session, runs)
        assert option is not None
        return option.gain

    alike = gain(optimizer_step="fused", allocator="keep")
    assert alike == pytest.approx(CHECKED_RISK * math.log(2.0))
    assert gain(attention="eager") == pytest.approx(UNCHECKED_RISK * math.log(2.0))
