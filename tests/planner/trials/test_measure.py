"""The statistics of timed steps."""

import math

import numpy as np
import pytest

from autoplan.planner.records.trials import Interval, Outcome
from autoplan.planner.trials.measure import (
    drop_warmup,
    invert,
    median_interval,
    pool_runs,
    ratio_interval,
    relative_width,
    spread_warning,
    step_terms,
    sum_interval,
)
from autoplan.strategies.config import TrainingConfig
from tests.recorded import make_trial


def steady(median: float, spread: float = 0.0, samples: int = 9) -> Interval:
    return Interval(median=median, low=median * (1 - spread), high=median * (1 + spread), samples=samples)


def test_median_interval_holds_the_median_of_the_source_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(300):
        interval = median_interval(rng.lognormal(0.0, 0.05, 15), seed=trial)
        held += interval.low <= 1.0 <= interval.high
    assert held / 300 >= 0.90


def test_a_trial_at_another_pace_has_all_its_times_and_its_rate_at_that_pace():
    config = TrainingConfig(micro_batch=2)
    trial = make_trial(1, config, 0.5, parts_s={"micro_step": 0.2}, samples_s={"step": (0.4, 0.6)}, loss=2.0)
    trial = trial.model_copy(update={"step_time_s": steady(0.5, 0.5)})
    slow = trial.at_pace(2.0)
    assert slow.step_time_s == Interval(median=1.0, low=0.5, high=1.5, samples=9)
    assert (slow.parts_s, slow.samples_s) == ({"micro_step": 0.4}, {"step": (0.8, 1.2)})
    assert slow.tokens_per_s is not None and trial.tokens_per_s is not None
    assert slow.tokens_per_s.median == pytest.approx(trial.tokens_per_s.median / 2)
    assert slow.loss == 2.0 and slow.at_pace(0.5) == trial
    late = make_trial(1, config, None, outcome=Outcome.PRUNED, at_least_s=3.0).at_pace(2.0)
    assert (late.at_least_s, late.step_time_s, late.tokens_per_s) == (6.0, None, None)


def test_heavy_tails_move_the_median_interval_little():
    rng = np.random.default_rng(1)
    samples = 1.0 + 0.01 * rng.standard_normal(40)
    samples[::8] *= 10  # one step in eight is hit by something else
    interval = median_interval(samples)
    assert interval.median == pytest.approx(1.0, rel=0.01)
    assert relative_width(interval) < 0.05


def test_one_sample_is_never_taken_as_exact():
    interval = median_interval([2.0])
    assert interval.samples == 1
    assert interval.low < 2.0 < interval.high


def test_the_same_samples_give_the_same_interval():
    samples = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert median_interval(samples, seed=3) == median_interval(samples, seed=3)


def test_a_step_is_the_sum_of_its_parts():
    parts = {
        "first_micro_step": [2.0],
        "second_micro_step": [7.0],
        "micro_step": [1.0],
        "micro_step_sync": [3.0],
        "optimizer_step": [5.0],
    }
    assert sum_interval(step_terms(parts, 1)).median == 8.0  # the one micro-step syncs
    assert sum_interval(step_terms(parts, 2)).median == 10.0
    assert sum_interval(step_terms(parts, 3)).median == 2.0 + 7.0 + 3.0 + 5.0
    assert sum_interval(step_terms(parts, 6)).median == 2.0 + 7.0 + 3 * 1.0 + 3.0 + 5.0


def test_on_one_rank_missing_kinds_of_micro_steps_are_alike():
    assert sum_interval(step_terms({"micro_step": [1.0], "optimizer_step": [1.0]}, 4)).median == 5.0
    parts = {"first_micro_step": [2.0], "second_micro_step": [3.0], "optimizer_step": [1.0]}
    assert sum_interval(step_terms(parts, 2)).median == 6.0
    assert sum_interval(step_terms(parts, 4)).median == 12.0


def test_slow_first_samples_are_dropped_but_enough_are_kept():
    assert drop_warmup([3.0, 1.5, 1.0, 1.0, 1.0], keep=3) == [1.0, 1.0, 1.0]
    assert drop_warmup([3.0, 2.0, 1.0], keep=3) == [3.0, 2.0, 1.0]


def test_rate_from_time():
    rate = invert(Interval(median=2.0, low=1.0, high=4.0, samples=5), 8.0)
    assert (rate.median, rate.low, rate.high) == (4.0, 2.0, 8.0)


def test_a_large_spread_gives_a_warning():
    assert spread_warning([1.0, 1.0, 1.01, 1.0]) is None
    assert spread_warning([1.0, 2.0, 1.0, 2.0, 3.0]) is not None


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("between", [0.025, 0.04])
def test_equal_configurations_seldom_win(rounds: int, between: float):
    """At equal means the interval of the ratio leaves 1 below itself in at most 5 % of the cases."""
    rng = np.random.default_rng(7)
    wins = 0
    cases = 1500
    for _ in range(cases):
        runs = [[steady(math.exp(rng.normal(0, between)), 0.01) for _ in range(rounds)] for _ in range(2)]
        wins += ratio_interval(runs[0], runs[1]).low > 1.0
    assert wins / cases <= 0.05


def test_a_drift_that_hits_both_alike_cancels():
    drift = [1.0, 1.3, 1.7]
    candidate = [steady(1.0 * factor, 0.01) for factor in drift]
    reference = [steady(1.5 * factor, 0.01) for factor in drift]
    ratio = ratio_interval(candidate, reference)
    assert ratio.median == pytest.approx(1.5)
    assert ratio.low > 1.3


def test_a_clear_win_is_seen_in_one_round():
    ratio = ratio_interval([steady(1.0, 0.02)], [steady(2.0, 0.02)])
    assert ratio.low > 1.5
    assert ratio.high < 2.6


def test_heavy_tails_between_runs_do_not_make_a_win():
    ratio = ratio_interval([steady(1.0), steady(1.0), steady(2.0)], [steady(1.1), steady(1.0), steady(1.0)])
    assert ratio.low < 1.0 < ratio.high


def test_pooled_runs_hold_all_of_their_bounds():
    runs = [Interval(median=1.0, low=0.9, high=1.1, samples=5), Interval(median=2.0, low=1.8, high=2.2, samples=4)]
    pooled = pool_runs(runs)
    assert (pooled.low, pooled.high, pooled.samples) == (0.9, 2.2, 9)
    assert pooled.median == pytest.approx(math.sqrt(2.0))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_ratio_is_that_of_the_figures_shown(rounds: int):
    rng = np.random.default_rng(rounds)
    runs = [[steady(math.exp(rng.normal(0, 0.3)), 0.01) for _ in range(rounds)] for _ in range(2)]
    shown = [pool_runs(of_one).median for of_one in runs]
    assert ratio_interval(runs[0], runs[1]).median == pytest.approx(shown[1] / shown[0])


def test_one_disturbed_run_of_three_does_not_move_the_ratio_and_is_seen_in_its_interval():
    plan = [steady(1.0, 0.01)] * 3
    ratio = ratio_interval(plan, [steady(1.1), steady(40.0), steady(1.1)])
    assert ratio.median == pytest.approx(1.1)
    assert ratio.high > 5
