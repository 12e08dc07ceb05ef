"""The replay of recorded trials (benchmarks/trials_saved.py), over its smaller record: an image model on two cores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autoplan.planner.records.trials import Outcome
from autoplan.strategies.config import TrainingConfig
from benchmarks import replay, trials_saved
from benchmarks.replay import SearchMethod
from benchmarks.trials_saved import WAYS
from benchmarks.trials_saved_record import LIMIT_BYTES, Recorded, choose, is_plain, read
from tests.cases import some

DRAWS = 9
BY_NAME = {way.name: way for way in WAYS}


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return next(one for one in read(trials_saved.RESULTS) if one.name == "image")


def test_ours_needs_no_more_trials_than_random(recorded: Recorded) -> None:
    ours = trials_saved.replays(recorded, BY_NAME["ours"], 3)
    random = [one.to_target or math.inf for one in trials_saved.replays(recorded, BY_NAME["random"], DRAWS)]
    assert len(random) == DRAWS and max(random) > min(random)
    assert max(one.to_target or math.inf for one in ours) <= np.median(random)


def test_the_cost_model_ends_the_search_sooner_and_no_worse(recorded: Recorded) -> None:
    ours, flat = (trials_saved.replay_trials(recorded, BY_NAME[name], 0) for name in ("ours", "ours, no cost model"))
    assert ours.trials < flat.trials <= len(recorded.candidates)
    assert ours.regret <= trials_saved.tolerance(recorded)


def test_what_is_dropped_by_predicted_memory_would_not_have_run(recorded: Recorded) -> None:
    peaks = dict(zip(recorded.candidates, recorded.peaks, strict=True))
    dropped = 0
    for limit in trials_saved.limits(recorded):
        stays = replay.kept(recorded, replay.make_estimator(recorded, "search", limit), limit)
        gone = set(recorded.candidates) - set(stays)
        assert all(peaks[config] > limit for config in gone)
        dropped += len(gone)
    assert dropped


def test_a_recorded_peak_above_the_limit_is_answered_as_out_of_memory(recorded: Recorded) -> None:
    trial = recorded.rounds[0][0]
    peak = trial.peak_memory_bytes
    assert peak is not None and replay.answer(trial, 7, LIMIT_BYTES) == trial.model_copy(update={"number": 7})
    over = replay.answer(trial, 7, peak - 1)
    assert (over.outcome, over.step_time_s, over.peak_memory_bytes) == (Outcome.OUT_OF_MEMORY, None, peak - 1)


def test_a_record_holds_the_plain_runs_and_spreads_over_the_rest() -> None:
    legal = [
        TrainingConfig(micro_batch=m, precision=p, checkpointing=c, compile=s)  # type: ignore[arg-type]
        for m in (1, 2, 4, 8)
        for p in ("fp32", "bf16")
        for c in ("none", "full")
        for s in ("off", "block")
    ]
    chosen = choose(legal, 10, 3)
    eager = [config for config in chosen if config.compile == "off"]
    assert (len(eager), len(chosen), len(set(chosen))) == (10, 13, 13)
    assert [config for config in chosen if is_plain(config)] and set(filter(is_plain, legal)) <= set(chosen)
    pairs = {(config.precision, config.checkpointing) for config in eager}
    assert len(pairs) == 4 and chosen == choose(legal, 10, 3)


def looked_at(recorded: Recorded, name: str, seed: int) -> list[TrainingConfig]:
    """The candidates in the order of their looks, with all the time."""
    way = SearchMethod(name=name, sampler=name, drops=False)  # type: ignore[arg-type]
    *_, last = replay.replay(recorded, way, seed, budget_s=5000.0)
    return [trial.config for trial in last.trials if not trial.is_repeat]


@pytest.mark.parametrize("name", some(["random", "tpe", "gp"], ["random", "tpe"]))
def test_the_other_samplers_choose_among_the_table_and_take_each_candidate_once(name: str, recorded: Recorded) -> None:
    taken = [looked_at(recorded, name, seed) for seed in (0, 1)]
    for configs in taken:
        assert len(configs) == len(set(configs)) and set(configs) == set(recorded.candidates)
    assert taken[0] != taken[1]


@pytest.mark.parametrize("name", some(["tpe", "gp"], ["tpe"]))
def test_a_sampler_that_learns_comes_to_fast_candidates_sooner_than_random(name: str, recorded: Recorded) -> None:
    """The mean place, in the order of looks, of the fastest quarter of the candidates."""

    def place(sampler: str) -> float:
        fast = set(np.argsort(recorded.seconds)[: len(recorded.candidates) // 4].tolist())
        numbers = {config: number for number, config in enumerate(recorded.candidates)}
        walks = [[numbers[config] for config in looked_at(recorded, sampler, seed)] for seed in range(4)]
        return float(np.mean([place for walk in walks for place, number in enumerate(walk) if number in fast]))

    assert place(name) < place("random")
