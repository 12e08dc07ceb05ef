"""The surrogate, the samplers and Optuna's study: legal, better with evidence, one fixed distribution per knob."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest

from autoplan.errors import StoreError
from autoplan.planner.records.trials import Interval, Outcome, PeakMemory, Trial
from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.sampler import MovingSampler, make_sampler
from autoplan.planner.search.selection import collect_runs, rank, speed_ratio
from autoplan.planner.search.surrogate import Posterior, Prior, Surrogate, expected_improvement, similarity
from autoplan.planner.search.trial_cost import TrialCost
from autoplan.planner.store.optuna_study import NUMBER, add_trials, choices_of, load_study, make_distributions
from autoplan.planner.store.store import Store
from autoplan.strategies.config import KNOBS, TrainingConfig
from tests.planner.search.stand_in import flat_model

LIMIT = float(8 << 30)
CANDIDATES = tuple(
    TrainingConfig(micro_batch=m, precision=p, checkpointing=c)  # type: ignore[arg-type]
    for m in (1, 2, 4, 8)
    for p in ("fp32", "bf16")
    for c in ("none", "full")
)
VALUES = choices_of(CANDIDATES)
SPACES = make_distributions(VALUES)


def true_time(config: TrainingConfig) -> float:
    """The machine of these tests: bf16 is three times as fast, recomputing costs a third, small micro-batches cost."""
    factor = 1.0 if config.precision == "bf16" else 3.0
    return factor * (4 / 3 if config.checkpointing == "full" else 1.0) * (1 + 1 / config.micro_batch)


def true_memory(config: TrainingConfig) -> float:
    return (2.0 + 1.2 * config.micro_batch * (0.2 if config.checkpointing == "full" else 1.0)) * 2**30


class Estimates:
    """A cost model that sees no difference between precisions: it must be taught by trials."""

    def __init__(self) -> None:
        self.told: list[Trial] = []

    def table(self, configs: Any) -> Any:
        times = np.array([true_time(c.model_copy(update={"precision": "fp32"})) for c in configs])
        memory = np.array([true_memory(c) for c in configs])
        return SimpleNamespace(
            step_time_s=times,
            step_time_low_s=times / 4,
            step_time_high_s=times * 4,
            peak_memory_bytes=memory,
            peak_memory_low_bytes=memory / 1.3,
            peak_memory_high_bytes=memory * 1.3,
        )

    def observe(self, trial: Trial) -> None:
        self.told.append(trial)


def make_trial(number: int, config: TrainingConfig, outcome: Outcome | None = None, **fields: Any) -> Trial:
    if outcome is None:
        outcome = Outcome.OK if true_memory(config) <= LIMIT else Outcome.OUT_OF_MEMORY
    good = outcome is Outcome.OK
    time = true_time(config)
    values: dict[str, Any] = {
        "number": number,
        "purpose": "search",
        "config": config,
        "outcome": outcome,
        "phase": "done",
        "step_time_s": Interval(median=time, low=0.99 * time, high=1.01 * time, samples=5) if good else None,
        "peak_memory": PeakMemory(resident_bytes=int(min(true_memory(config), LIMIT)), limit_bytes=int(LIMIT)),
        "seconds_spent": 5.0,
    }
    return Trial(**(values | fields))


class Search:
    """A search over the machine of these tests: its looks are ranked, or drawn by another sampler."""

    def __init__(self, kind: Any = "autoplan") -> None:
        cost = TrialCost(CANDIDATES, global_batch=8, num_blocks=2, device="cpu")
        estimator: Any = Estimates()
        self.model = CandidateModel(CANDIDATES, estimator, cost, memory_limit_bytes=LIMIT)
        self.sampler = None if kind == "autoplan" else make_sampler(kind, self.model, seed=0)

    def next_one(self) -> TrainingConfig | None:
        """None where there is no further one."""
        if self.sampler is None:
            return next(iter(self.model.ranking()), None)
        return self.sampler.draw(math.inf) if self.model.assess().untried.any() else None

    def run_one(self, number: int, outcome: Outcome | None = None) -> TrainingConfig | None:
        """One trial; None where there is no further one."""
        config = self.next_one()
        if config is not None:
            self.model.observe(make_trial(number, config, outcome))
        return config

    def run(self, most: int = len(CANDIDATES)) -> list[TrainingConfig]:
        """So many trials at most, as far as there are any."""
        done: list[TrainingConfig] = []
        while len(done) < most and (config := self.run_one(len(done))) is not None:
            done.append(config)
        return done


FOREIGN = {
    "tpe": lambda: "tpe",
    "random": lambda: "random",
    "grid": lambda: optuna.samplers.GridSampler({k: v for k, v in VALUES.items() if len(v) > 1}, seed=0),
    "a grid that ends": lambda: optuna.samplers.GridSampler(
        {k: [v[-1]] if k == "micro_batch" else list(v) for k, v in VALUES.items() if len(v) > 1}, seed=0
    ),
    "genetic": lambda: optuna.samplers.NSGAIISampler(population_size=4, seed=0),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_every_trial_of_a_foreign_sampler_is_legal_and_new_until_all_were_tried(kind: str):
    search = Search(FOREIGN[kind]())
    done = search.run()
    assert len(set(done)) == len(done) and set(done) == set(CANDIDATES)
    assert search.sampler is not None
    states = [trial.state.name for trial in search.sampler.study.trials]
    assert states.count("FAIL") == len(CANDIDATES), "what was drawn is no trial of the search"
    assert states.count("COMPLETE") + states.count("PRUNED") == len(CANDIDATES) - 1, "the last one is not told"


def test_a_gaussian_process_of_optunas_copes_with_every_outcome_and_learns():
    pytest.importorskip("scipy")
    search = Search(optuna.samplers.GPSampler(seed=0, n_startup_trials=4))
    for number, outcome in enumerate((Outcome.CRASHED, Outcome.OUT_OF_MEMORY, Outcome.PRUNED, Outcome.INTERRUPTED)):
        search.run_one(number, outcome)
    done = [search.run_one(number) for number in range(4, 13)]
    assert None not in done and set(done) <= set(CANDIDATES)
    fitting = [config for config in CANDIDATES if true_memory(config) <= LIMIT]
    assert min(fitting, key=true_time) in done


def test_a_sampler_that_draws_one_point_for_ever_is_moved_to_its_nearest_neighbours():
    class Stubborn(optuna.samplers.RandomSampler):
        drawn = 0

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            self.drawn += param_name == "micro_batch"
            return param_distribution.choices[0]

    stubborn = Stubborn()
    search = Search(stubborn)
    done = search.run(4)
    assert len(set(done)) == 4 == stubborn.drawn
    drawn = TrainingConfig.model_validate({knob: values[0] for knob, values in VALUES.items()})
    away = [sum(getattr(one, knob) != getattr(drawn, knob) for knob in VALUES) for one in done]
    assert away == sorted(away) and away[-1] == 1


def test_a_point_is_moved_to_the_candidates_of_the_present_model():
    """A probe leaves out some of those that the sampler began with, and brings others in."""
    configs = [TrainingConfig(micro_batch=size) for size in (1, 2, 4, 8)]
    inner = optuna.samplers.GridSampler({"micro_batch": [4]}, seed=0)
    sampler = MovingSampler(flat_model(configs[:3]), inner, seed=0)
    sampler.model = flat_model(configs[1:])
    assert sampler.draw(math.inf) == configs[2]
    sampler.model.observe(make_trial(0, configs[2]))
    sampler.model.observe(make_trial(1, configs[1]))
    assert sampler.draw(math.inf) == configs[3], "the study has no such value"


def test_every_trial_of_ours_is_legal_and_new_and_the_best_that_fits_comes_early():
    done = Search().run()
    assert len(set(done)) == len(done) < len(CANDIDATES) and set(done) <= set(CANDIDATES)
    fitting = [config for config in CANDIDATES if true_memory(config) <= LIMIT]
    assert min(fitting, key=true_time) in done[:8]


def beliefs(*trials: Trial) -> tuple[Prior, Posterior]:
    """What the cost model says of the candidates, and what these trials make of it."""
    estimates = Estimates()
    prior, told = (Prior.of(estimates.table(some)) for some in (CANDIDATES, [trial.config for trial in trials]))
    return prior, Surrogate(CANDIDATES, LIMIT, "cpu").posterior(prior, trials, told)


def test_what_was_learnt_of_one_carries_over_to_its_neighbours():
    config = TrainingConfig(micro_batch=4, precision="bf16")
    prior, belief = beliefs(make_trial(0, config))
    here = CANDIDATES.index(config)
    near = CANDIDATES.index(TrainingConfig(micro_batch=2, precision="bf16"))
    far = CANDIDATES.index(TrainingConfig(micro_batch=1, precision="fp32", checkpointing="full"))
    moved = prior.log_time - belief.log_time
    assert moved[here] == pytest.approx(math.log(3), abs=0.05)
    assert moved[here] > moved[near] > moved[far] >= 0
    assert belief.log_time_sd[here] < belief.log_time_sd[near] < belief.log_time_sd[far]


def test_out_of_memory_lowers_the_chance_of_larger_neighbours():
    config = TrainingConfig(micro_batch=4)
    (_, before), (_, after) = beliefs(), beliefs(make_trial(0, config, Outcome.OUT_OF_MEMORY))
    larger = CANDIDATES.index(TrainingConfig(micro_batch=4, precision="bf16"))
    assert after.fits[CANDIDATES.index(config)] < 0.2
    assert after.fits[larger] < before.fits[larger]


def test_failures_make_neighbours_less_likely_but_not_impossible():
    _, belief = beliefs(make_trial(0, TrainingConfig(micro_batch=2, precision="bf16"), Outcome.CRASHED))
    near = CANDIDATES.index(TrainingConfig(micro_batch=4, precision="bf16"))
    far = CANDIDATES.index(TrainingConfig(micro_batch=8, precision="fp32", checkpointing="full"))
    assert 0 < belief.works[near] < belief.works[far] <= 1


def test_expected_improvement_needs_a_chance_to_win():
    belief = Posterior(
        log_time=np.array([-1.0, 0.0, 1.0]),
        log_time_sd=np.full(3, 0.01),
        fits=np.ones(3),
        works=np.array([0.5, 1, 1]),
        log_memory=np.zeros(3),
        log_memory_sd=np.ones(3),
    )
    gain = expected_improvement(belief, 0.5)
    assert gain == pytest.approx([0.75, 0.5, 0.0], abs=1e-6)


def test_similarity_is_one_for_the_same_and_less_for_each_knob():
    codes = np.zeros((3, len(KNOBS)))
    column = KNOBS.index("precision")
    codes[1, column] = 7.0
    codes[2, column], codes[2, KNOBS.index("loss")] = 7.0, 9.0
    row = similarity(codes, codes)[0]
    assert row[0] == 1.0 > row[1] > row[2] > 0


def test_what_does_not_fit_in_the_time_is_not_ranked_and_drawn_only_where_nothing_does():
    search, drawn = Search(), Search("random")
    assert search.model.ranking() and not search.model.ranking(time_left_s=0.5)
    assert drawn.sampler is not None and drawn.sampler.draw(0.5) in CANDIDATES


def test_a_trial_that_the_budget_ended_says_nothing_and_may_run_again():
    for ended, again in ((True, True), (False, False)):
        search = Search()
        first = make_trial(0, CANDIDATES[0])
        late = make_trial(1, CANDIDATES[1], Outcome.TIMEOUT, budget_ended=ended)
        search.model.observe(first)
        search.model.observe(late)
        now = search.model.assess()
        assert bool(now.untried[1]) is again and not now.untried[0]
        assert bool(now.posterior.works[1] == 1.0) is again


# The study.


def test_the_study_is_made_again_from_the_record(tmp_path: Path):
    """As it was told: one distribution per knob, memory as a constraint; also as a database, for Optuna's dashboard."""
    outcomes = {0: Outcome.OK, 7: Outcome.OUT_OF_MEMORY, 1: Outcome.OK, 3: Outcome.CRASHED}
    trials = [make_trial(number, CANDIDATES[i], how) for number, (i, how) in enumerate(outcomes.items())]
    with Store(tmp_path / "s", "0" * 16, summary={}) as store:
        for trial in trials:
            store.add(trial)
        storage = f"sqlite:///{tmp_path}/study.sqlite3"
        load_study(store.folder, storage)  # while the search owns the folder
    exported = optuna.load_study(study_name="autoplan", storage=storage)
    again = optuna.create_study()
    add_trials(again, trials, SPACES)
    for study in (again, exported):
        assert [t.state.name for t in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE", "FAIL"]
        assert [t.user_attrs[NUMBER] for t in study.trials] == [0, 1, 2, 3]
        assert [TrainingConfig.model_validate(t.params) for t in study.trials] == [trial.config for trial in trials]
        assert study.trials[0].value == trials[0].step_time_s.median  # type: ignore[union-attr]
        assert study.trials[0].constraints["memory"] <= 0 < study.trials[1].constraints["memory"]
        assert len({tuple(t.distributions.items()) for t in study.trials}) == 1
        assert optuna.importance.get_param_importances(study) is not None
    with pytest.raises(StoreError, match="no record of a search"):
        load_study(tmp_path)


def test_a_search_without_a_finished_trial_is_a_study_without_trials(tmp_path: Path):
    with Store(tmp_path / "s", "0" * 16, summary={}) as store:
        assert load_study(store.folder).trials == []


# The selection.


def finalist(
    number: int,
    config: TrainingConfig,
    time: float,
    peak: int = 1 << 30,
    outcome: Outcome = Outcome.OK,
    **fields: Any,
) -> Trial:
    step = Interval(median=time, low=0.995 * time, high=1.005 * time, samples=9)
    memory = PeakMemory(resident_bytes=peak, limit_bytes=int(LIMIT))
    return make_trial(number, config, outcome, step_time_s=step, peak_memory=memory, **fields)


def test_interleaved_runs_decide_over_single_ones():
    a, b = CANDIDATES[0], CANDIDATES[1]
    trials = [finalist(0, a, 1.0), finalist(1, b, 1.1)]
    trials += [finalist(2 + i, a, 1.5, purpose="finalist") for i in range(2)]
    trials += [finalist(4 + i, b, 1.1, purpose="finalist") for i in range(2)]
    assert [entry.config for entry in rank(collect_runs(trials))] == [b, a]


def test_one_noisy_finalist_run_is_no_speed_up_by_itself():
    """Seen for real: the one finalist run of the baseline was hit, and the plan claimed a speed-up of 38."""
    plain, fast = CANDIDATES[0], CANDIDATES[1]
    trials = [finalist(0, plain, 1.15), finalist(1, fast, 1.0)]
    trials += [finalist(2, fast, 1.0, purpose="finalist"), finalist(3, plain, 38.0, purpose="finalist")]
    entries = {entry.config: entry for entry in collect_runs(trials)}
    ratio = speed_ratio(entries[fast], entries[plain])
    assert ratio.median == pytest.approx(math.sqrt(1.15 * 38))
    assert ratio.median == pytest.approx(entries[plain].step_time.median / entries[fast].step_time.median)
    assert ratio.low < 1.0
    trials += [finalist(4, fast, 1.0, purpose="finalist"), finalist(5, plain, 1.15, purpose="finalist")]
    trials += [finalist(6, fast, 1.0, purpose="finalist"), finalist(7, plain, 1.15, purpose="finalist")]
    entries = {entry.config: entry for entry in collect_runs(trials)}
    assert speed_ratio(entries[fast], entries[plain]).median == pytest.approx(1.15)


def test_only_runs_made_side_by_side_are_compared():
    a, b = CANDIDATES[0], CANDIDATES[1]
    trials = [finalist(0, a, 9.0), finalist(1, b, 9.0)]
    trials += [finalist(2 + i, a, 1.0 + i, purpose="finalist") for i in range(3)]  # the last is without b
    trials += [finalist(5 + i, b, 2.0 * (1.0 + i), purpose="finalist") for i in range(2)]
    entries = {entry.config: entry for entry in collect_runs(trials)}
    ratio = speed_ratio(entries[a], entries[b])
    assert (ratio.samples, ratio.median) == (2, pytest.approx(2.0))


def test_a_tie_goes_to_less_memory_and_then_to_fewer_knobs():
    plain, knobby = TrainingConfig(micro_batch=2), TrainingConfig(micro_batch=2, precision="bf16")
    lean = TrainingConfig(micro_batch=1)
    trials = [finalist(0, knobby, 1.0, 4 << 30), finalist(1, plain, 1.005, 4 << 30), finalist(2, lean, 1.01, 2 << 30)]
    assert rank(collect_runs(trials))[0].config == lean
    assert rank(collect_runs(trials[:2]))[0].config == plain


def test_a_clear_difference_is_no_tie():
    fast, lean = TrainingConfig(micro_batch=2), TrainingConfig(micro_batch=1)
    trials = [finalist(0, fast, 1.0, 4 << 30), finalist(1, lean, 1.05, 1 << 30)]
    assert rank(collect_runs(trials))[0].config == fast


def test_what_failed_as_a_finalist_is_out():
    a, b = CANDIDATES[0], CANDIDATES[1]
    trials = [finalist(0, a, 1.0), finalist(1, b, 2.0), make_trial(2, a, Outcome.CRASHED, purpose="finalist")]
    assert [entry.config for entry in collect_runs(trials)] == [b]
