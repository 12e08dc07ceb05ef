"""From cut to whole step times: the arithmetic, what counts as agreement, and what the choice makes of it."""

import math

import numpy as np
import pytest

from autoplan.planner.records import Interval, Outcome, ShortTrial, ShortTrials, Trial
from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.extrapolation import LEAST_SD, LEVEL_SD, extrapolate, summary
from autoplan.planner.search.sampler import AutoplanSampler
from autoplan.planner.search.trial_cost import COMPILE_S, FIXED_S, TrialCost
from autoplan.planner.trials.measure import Spread
from autoplan.strategies.config import TrainingConfig
from tests.planner.search.test_search_sampler import CANDIDATES, LIMIT, Estimates, true_time
from tests.planner.search.test_search_sampler import make_trial as make_whole

QUIET = Spread(sd=0.01, freedom=12)


def config(micro_batch: int) -> TrainingConfig:
    return TrainingConfig(micro_batch=micro_batch)


def run(number: int, micro_batch: int, seconds: float, purpose: str = "search", **fields: object) -> Trial:
    values = {
        "number": number,
        "purpose": purpose,
        "config": config(micro_batch),
        "outcome": Outcome.OK,
        "phase": "done",
        "step_time_s": Interval(median=seconds, low=seconds, high=seconds, samples=5),
        "seconds_spent": 1.0,
    }
    return Trial.model_validate(values | fields)


def short(number: int, micro_batch: int, seconds: float, **fields: object) -> ShortTrial:
    trial = run(number, micro_batch, seconds, "short", **fields)
    return ShortTrial(trial=trial, depth=2, blocks=12, micro_ratio=4.0, optimizer_ratio=3.0)


def test_each_part_has_its_own_ratio():
    assert short(0, 1, 1.0, parts_s={"optimizer_step": 0.25, "micro_step": 0.7}).whole_s == pytest.approx(3.0 + 0.75)
    assert short(0, 1, 1.0).whole_s == pytest.approx(4.0), "without parts all of it is micro-steps"
    assert short(0, 1, 1.0, step_time_s=None, outcome=Outcome.TIMEOUT).whole_s is None


def test_the_level_comes_from_what_ran_both_ways():
    """Whole runs take 1.2 times what the ratios say: the first sets the level, the others check it."""
    shorts = [short(10 + size, size, 1.0 * size) for size in (1, 2, 4, 8)]
    wholes = [run(size, size, 1.2 * 4.0 * size) for size in (1, 2, 4)]
    found = extrapolate(shorts, wholes, QUIET)
    assert found.pairs == 3 and len(found.checks) == 2
    assert found.why_not is None
    assert all(0.97 < check < 1.0 for check in found.checks), "the level is drawn to 0, less with each"
    assert found.checks[0] < found.checks[1]
    assert found.level(config(8)) == pytest.approx(math.log(1.2), abs=0.02)
    assert found.log_time(shorts[3]) == pytest.approx(math.log(1.2 * 4.0 * 8), abs=0.02)
    none = extrapolate(shorts, [], QUIET)
    assert none.level(config(8)) == 0.0 and none.why_not is None and none.pairs == 0
    assert none.sds([config(8)]) == pytest.approx(math.hypot(LEVEL_SD, QUIET.of_ratio()[0]))


def test_the_level_is_less_known_the_more_knobs_differ():
    """What ran both ways is known as well as a run; bf16 is 20 % off, and so are its neighbours more than others."""
    plain = TrainingConfig(micro_batch=4)
    half = TrainingConfig(micro_batch=4, precision="bf16")
    near = TrainingConfig(micro_batch=4, precision="bf16", optimizer_step="fused")
    shorts, wholes = [], []
    for number, (one, off) in enumerate(((plain, 1.0), (half, 1.2))):
        trial = run(10 + number, 4, 1.0, "short", config=one)
        shorts.append(ShortTrial(trial=trial, depth=2, blocks=12, micro_ratio=4.0, optimizer_ratio=4.0))
        wholes.append(run(number, 4, 4.0 * off, config=one))
    found = extrapolate(shorts, wholes, QUIET)
    assert found.level(plain) < 0.03 < found.level(near) < found.level(half) < 0.2
    sds = found.sds([half, near, TrainingConfig(micro_batch=1, precision="bf16", checkpointing="full")])
    assert LEAST_SD <= found.error <= sds[0] <= sds[1] <= sds[2]


def test_a_check_is_judged_by_those_before_it_and_by_the_spread_between_runs():
    shorts = [short(10 + size, size, 1.0) for size in (1, 2)]
    off = math.exp(0.05)
    wholes = [run(1, 1, 4.0), run(2, 2, 4.0 * off)]
    narrow = extrapolate(shorts, wholes, QUIET)
    assert narrow.allowed == pytest.approx(2 * math.sqrt(2) * 0.01)
    assert narrow.error == pytest.approx(0.05, abs=0.002)
    assert narrow.why_not is not None and "differ by 5.0%" in narrow.why_not and "2.8%" in narrow.why_not
    assert extrapolate(shorts, wholes, Spread()).why_not is None, "runs that differ by 2.5 % allow 7 %"


def test_what_disagreed_once_stays_out():
    """The first check is 5 % off; many good ones after it do not bring the others back."""
    shorts = [short(10 + size, size, 1.0) for size in (1, 2, 4, 8, 16)]
    wholes = [
        run(size, size, 4.0 * off) for size, off in ((1, 1.0), (2, math.exp(0.05)), (4, 1.02), (8, 1.02), (16, 1.02))
    ]
    found = extrapolate(shorts, wholes, QUIET)
    assert abs(math.log(found.checks[-1])) < 0.02
    assert found.error == pytest.approx(0.05, abs=0.003) and found.why_not is not None


def test_a_first_one_that_is_far_off_ends_it():
    found = extrapolate([short(1, 1, 1.0)], [run(0, 1, 8.0)], QUIET)
    assert found.checks == () and found.why_not is not None
    assert "took 2.00 times" in found.why_not


def test_claims_and_failed_runs_are_no_pairs():
    shorts = [short(10, 1, 1.0), short(11, 2, 1.0, outcome=Outcome.PRUNED), short(12, 4, 1.0)]
    wholes = [run(1, 1, 4.0), run(2, 2, 4.0), run(3, 4, 4.0, outcome=Outcome.PRUNED), run(4, 1, 400.0, "claim")]
    found = extrapolate(shorts, wholes, QUIET)
    assert found.pairs == 1 and found.errors == pytest.approx((0.0,))


def test_a_plan_says_how_many_there_were_and_how_they_agree():
    shorts = [short(10 + size, size, 1.0) for size in (1, 2, 4)]
    found = summary(shorts, [run(1, 1, 4.0), run(2, 2, 4.08), run(3, 4, 3.92)], Spread())
    assert found is not None
    assert found.describe() == "3 short trials at 2 of 12 blocks; extrapolated/whole 1.01 (0.98 to 1.03) over 2"
    assert ShortTrials.model_validate_json(found.model_dump_json()) == found
    far = summary(shorts[:2], [run(1, 1, 4.0), run(2, 2, 5.0)], Spread())
    assert far is not None and far.describe().endswith("of one configuration by at most 7.1%")
    assert summary([], [], Spread()) is None


# What the choice makes of it.


def taught(shorts: list[ShortTrial]) -> CandidateModel:
    model = CandidateModel(CANDIDATES, Estimates(), memory_limit_bytes=LIMIT)  # type: ignore[arg-type]
    model.observe(make_whole(0, CANDIDATES[0]))
    model.use_short_trials(shorts, extrapolate(shorts, [], QUIET) if shorts else None)
    return model


def of_candidate(number: int, index: int, outcome: Outcome = Outcome.OK) -> ShortTrial:
    seconds = true_time(CANDIDATES[index]) / 4
    step = Interval(median=seconds, low=seconds, high=seconds, samples=5) if outcome is Outcome.OK else None
    trial = run(number, 1, seconds, "short", config=CANDIDATES[index], outcome=outcome, step_time_s=step)
    return ShortTrial(trial=trial, depth=2, blocks=12, micro_ratio=4.0, optimizer_ratio=4.0)


def test_a_short_trial_moves_the_choice_less_than_a_whole_one_and_leaves_its_configuration_untried():
    index = CANDIDATES.index(TrainingConfig(micro_batch=4, precision="bf16"))
    before, after = taught([]).assess(), taught([of_candidate(5, index)]).assess()
    whole = taught([])
    whole.observe(make_whole(5, CANDIDATES[index]))
    true = math.log(true_time(CANDIDATES[index]))
    errors = [abs(now.posterior.log_time[index] - true) for now in (before, after, whole.assess())]
    assert errors[0] > 0.5 > 0.2 > errors[1] > errors[2]
    widths = [now.posterior.log_time_sd[index] for now in (before, after, whole.assess())]
    assert widths[0] > widths[1] > widths[2]
    assert after.untried[index] and not whole.assess().untried[index]
    assert after.best_log_time == before.best_log_time, "only whole trials are to be beaten"
    sampler = AutoplanSampler(taught([of_candidate(5, index)]))
    now = sampler.model.assess()
    assert sampler.best_of(now, now.untried & sampler.hopeful(now)).precision == "bf16"  # type: ignore[union-attr]
    assert sampler.best_of(now, np.zeros(len(CANDIDATES), dtype=bool)) is None


def test_a_whole_trial_takes_the_place_of_the_short_one():
    index = CANDIDATES.index(TrainingConfig(micro_batch=4, precision="bf16"))
    both, alone = taught([of_candidate(5, index)]), taught([])
    for model in (both, alone):
        model.observe(make_whole(6, CANDIDATES[index]))
    np.testing.assert_allclose(both.assess().posterior.log_time, alone.assess().posterior.log_time)


def test_what_does_not_run_cut_is_less_likely_to_run_and_to_fit():
    index = CANDIDATES.index(TrainingConfig(micro_batch=4, precision="bf16"))
    before = taught([]).assess().posterior
    crashed = taught([of_candidate(5, index, Outcome.CRASHED)]).assess().posterior
    assert crashed.works[index] < 0.5 * before.works[index]
    assert crashed.fits[index] == pytest.approx(before.fits[index])
    large = taught([of_candidate(5, index, Outcome.OUT_OF_MEMORY)]).assess().posterior
    assert 0 < large.fits[index] == pytest.approx(0.1 * before.fits[index]), "no verdict: its chance is lower"
    np.testing.assert_allclose(np.delete(large.fits, index), np.delete(before.fits, index))


def test_short_trials_that_do_not_agree_have_no_part():
    index = CANDIDATES.index(TrainingConfig(micro_batch=4, precision="bf16"))
    model = taught([of_candidate(5, index)])
    model.use_short_trials([of_candidate(5, index)], None)
    np.testing.assert_allclose(model.assess().posterior.log_time, taught([]).assess().posterior.log_time)


# What they cost.


def test_a_short_trial_costs_its_share_of_what_is_not_fixed():
    configs = tuple(TrainingConfig(micro_batch=1, compile=scope) for scope in ("off", "block", "model"))  # type: ignore[arg-type]
    cost = TrialCost(configs, global_batch=8, num_blocks=12, device="cpu", time_box_s=10.0)
    step_s = np.full(3, 4.0)
    whole, cut = cost.all_s(step_s), cost.short_s(step_s, np.full(3, 0.25), 2)
    block_s, more_s = COMPILE_S["cpu"]
    assert cut[0] == pytest.approx(FIXED_S + 0.25 * (whole[0] - FIXED_S))
    assert cut[1] - cut[0] == pytest.approx(block_s), "one block is compiled, however many there are"
    assert cut[2] - cut[0] == pytest.approx(block_s + 2 * more_s)
