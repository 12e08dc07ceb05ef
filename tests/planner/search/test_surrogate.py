"""What the surrogate takes from times, from lower bounds of times, and from times that were disturbed."""

import math
from typing import Any

import numpy as np
import pytest

from autoplan.planner.records.trials import Interval, Outcome, Trial, Window
from autoplan.planner.search import surrogate
from autoplan.planner.search.candidate_model import FOLLOWS_CORE, CandidateModel
from autoplan.planner.search.surrogate import NOISE, Posterior, Prior, Surrogate, as_value
from autoplan.strategies.config import TrainingConfig
from tests.planner.search.stand_in import flat_model
from tests.recorded import make_trial

CONFIGS = [TrainingConfig(micro_batch=size) for size in (1, 2, 4, 8)]
PRIOR_S, SD = 1.0, 0.2


def prior_of(count: int) -> Prior:
    time, memory = np.full(count, math.log(PRIOR_S)), np.full(count, math.log(2**30))
    return Prior(log_time=time, log_time_sd=np.full(count, SD), log_memory=memory, log_memory_sd=np.full(count, 0.05))


def posterior(*trials: Trial) -> Posterior:
    return Surrogate(CONFIGS, 2.0**33, "cpu").posterior(prior_of(len(CONFIGS)), trials, prior_of(len(trials)))


def stopped(at_least_s: float | None, **given: Any) -> Trial:
    return make_trial(0, CONFIGS[2], 2.5, outcome=Outcome.PRUNED, at_least_s=at_least_s, **given)


def with_interval(trial: Trial, low: float, high: float) -> Trial:
    return trial.model_copy(update={"step_time_s": Interval(median=2.0, low=low, high=high, samples=4)})


@pytest.mark.parametrize("bound", [-0.6, -0.2, 0.0, 0.1, 0.3])
def test_a_bound_as_a_value_says_what_a_normal_cut_off_there_says(bound: float):
    values, noise = as_value(np.array([bound]), np.array([0.0]), np.array([SD]))
    share = SD**2 / (SD**2 + noise[0] ** 2)
    truth = np.random.default_rng(0).normal(0.0, SD, 400_000)
    left = truth[truth + np.random.default_rng(1).normal(0.0, NOISE, truth.size) > bound]
    assert share * values[0] == pytest.approx(left.mean(), abs=0.003)
    assert math.sqrt(SD**2 * (1 - share)) == pytest.approx(left.std(), abs=0.003)


def test_a_stopped_look_below_the_prediction_says_nothing_and_one_above_moves_it():
    here = 2
    low, high = posterior(stopped(0.4)), posterior(stopped(1.5))
    assert low.log_time == pytest.approx(np.zeros(4), abs=1e-3)
    assert low.log_time_sd == pytest.approx(np.full(4, SD), abs=1e-3)
    assert high.log_time[here] > math.log(1.45)
    assert high.log_time[here] > high.log_time[0] > 0
    measured = posterior(make_trial(0, CONFIGS[here], 1.5))
    assert high.log_time[here] > measured.log_time[here]  # at least that, so more is expected
    assert high.log_time_sd[here] > measured.log_time_sd[here]


def test_a_bound_counts_beside_what_other_trials_say():
    near = make_trial(1, CONFIGS[3], 3.0)
    assert posterior(near, stopped(1.0)).log_time == pytest.approx(posterior(near).log_time, abs=0.01)


def test_a_timeout_is_a_lower_bound_as_a_stopped_look_is():
    late = make_trial(0, CONFIGS[2], None, outcome=Outcome.TIMEOUT, at_least_s=1.5, budget_ended=True)
    assert posterior(late).log_time == pytest.approx(posterior(stopped(1.5)).log_time)


def test_what_was_disturbed_counts_less_the_more_others_took():
    def seen(share: float | None, disturbed: str | None) -> float:
        window = Window(seconds=1.0, others_cpu_share=share, disturbed=disturbed)
        return float(posterior(make_trial(0, CONFIGS[2], 2.0, window=window)).log_time[2])

    quiet, unknown, loud = seen(0.01, None), seen(None, "other work"), seen(0.8, "other work")
    assert math.log(1.9) < quiet
    assert 0 < loud < 0.1 < unknown < 0.4 < quiet


def on_core(number: int, seconds: float, core_s: float) -> Trial:
    window = Window(seconds=1.0, core_s=core_s, core_readings=4)
    return make_trial(number, CONFIGS[number], seconds, window=window)


def test_a_look_whose_core_was_slow_or_fast_says_less_of_those_like_it(monkeypatch: pytest.MonkeyPatch):
    def seen(core_s: float) -> tuple[float, float]:
        log_time = posterior(on_core(0, 1.0, 0.001), on_core(1, 1.0, 0.001), on_core(2, 1.7, core_s)).log_time
        return float(log_time[2]), float(log_time[3])

    as_others, faster, slower = seen(0.001), seen(0.0005), seen(0.002)
    assert faster == pytest.approx(slower) and math.log(1.6) < as_others[0]
    monkeypatch.setattr(surrogate, "CORE_SD", 0.0)
    by_spread_alone = seen(0.002)
    assert all(0 < slower[place] < by_spread_alone[place] < as_others[place] for place in (0, 1))


def test_looks_are_compared_as_if_the_cores_had_kept_the_speed_of_the_first():
    """In a search on a shared Xeon one look in a slow minute, 0.58 of what was expected, gave the lead to another."""

    def model_of(*trials: Trial, device: str = "cpu") -> CandidateModel:
        model = flat_model(CONFIGS, device=device)
        for trial in trials:
            model.observe(trial)
        return model

    slow = on_core(1, 0.9 * 1.6**FOLLOWS_CORE, 0.0016)
    model = model_of(on_core(0, 1.0, 0.001), slow)
    as_others = model_of(on_core(0, 1.0, 0.001), on_core(1, 0.9, 0.001))
    best = model.best_trial()
    assert best is not None and best.step_time_s is not None
    assert best.config == CONFIGS[1] and best.step_time_s.median == pytest.approx(0.9)
    believed, expected = (one.believed_s(CONFIGS[2]) for one in (model, as_others))
    assert believed == pytest.approx(expected, rel=0.03)
    assert model.trials[1] == slow, "the record has what was measured"
    assert model_of(*model.trials).believed_s(CONFIGS[2]) == believed, "also where it is taken in again"
    assert model.pace == pytest.approx(1.6**FOLLOWS_CORE)
    late = make_trial(2, CONFIGS[2], None, outcome=Outcome.TIMEOUT, at_least_s=2.0)
    assert model.pace_of(late) == model.pace, "without a reading its cores were those of now"
    ranks = make_trial(3, TrainingConfig(micro_batch=1, dp_replicate=2), 9.0, window=slow.window)
    model.observe(ranks)
    assert model.pace_of(ranks) == 1.0 and model.pace > 1.0, "one reading is none of several ranks"
    gpu = model_of(on_core(0, 1.0, 0.001), slow, device="cuda").best_trial()
    assert gpu is not None and gpu.config == CONFIGS[0], "there a core of the host is not what computes"


def test_a_time_that_is_wide_counts_less():
    assert posterior(with_interval(make_trial(0, CONFIGS[2], 2.0), 1.0, 4.0)).log_time[2] < 0.3


@pytest.mark.parametrize(("share", "most"), [(0.001, 0.03), (0.05, 0.08)])
def test_another_optimizer_step_is_no_other_configuration_where_it_is_a_small_part_of_the_step(
    share: float, most: float
):
    """Looks at all of them found what one process differs from the next, and took a sixth of a search."""
    fused = CONFIGS[0].model_copy(update={"optimizer_step": "fused"})
    eager = CONFIGS[0].model_copy(update={"attention": "eager"})
    seen = make_trial(0, CONFIGS[0], 1.5).model_copy(update={"parts_s": {"optimizer_step": 1.5 * share}})

    def of(trial: Trial) -> Posterior:
        return Surrogate((fused, eager), 2.0**33, "cpu").posterior(prior_of(2), [trial], prior_of(1))

    known, unknown = of(seen), of(make_trial(0, CONFIGS[0], 1.5))
    here = posterior(make_trial(0, CONFIGS[0], 1.5))
    assert known.log_time[0] == pytest.approx(here.log_time[0], abs=0.1 * SD)
    assert here.log_time_sd[0] <= known.log_time_sd[0] < most < unknown.log_time_sd[0] < SD
    assert known.log_time_sd[1] == unknown.log_time_sd[1], "another attention may take any time"
    assert known.log_memory_sd[0] == unknown.log_memory_sd[0], "its memory is another matter"


def test_another_optimizer_step_counts_as_any_knob_where_it_takes_a_fifth_of_the_step():
    assert surrogate.time_weights([]) == {}
    trial = make_trial(0, CONFIGS[0], 2.0).model_copy(update={"parts_s": {"optimizer_step": 0.5}})
    assert set(surrogate.time_weights([trial]).values()) == {1.0}


def test_what_looks_have_to_beat_is_no_lucky_look():
    """The fastest of several was lucky: by all trials it is slower."""
    model = flat_model(CONFIGS)
    for number, seconds in enumerate((1.0, 1.05, 0.7)):
        model.observe(make_trial(number, CONFIGS[number], seconds))
    now = model.assess()
    assert now.best is not None
    assert math.log(0.7) < now.best < math.log(1.0)
    assert now.best == pytest.approx(now.posterior.log_time[:3].min())


def test_what_fails_its_check_leads_no_more_and_its_like_may_fail_too():
    bf16 = [config.model_copy(update={"precision": "bf16"}) for config in CONFIGS]
    model = flat_model([*CONFIGS, *bf16])
    model.observe(make_trial(0, CONFIGS[0], 1.0))
    model.observe(make_trial(1, bf16[0], 0.5))
    before = model.assess()
    model.set_back(bf16[0])
    assert model.assess().best == pytest.approx(model.assess().posterior.log_time[0])
    model.set_failed(bf16[0])
    after = model.assess()
    assert before.best is not None and after.best is not None
    assert before.best == pytest.approx(before.posterior.log_time[len(CONFIGS)])
    assert before.best < after.best == pytest.approx(after.posterior.log_time[0])
    works, place = after.posterior.works / before.posterior.works, len(CONFIGS) + 1
    assert works[place] < 0.7 < works[1], "those in bf16 may fail theirs"
