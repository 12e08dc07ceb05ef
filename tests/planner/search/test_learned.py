"""What a search on a device learns starts the next one: widened, kept safely, said, and left out by --fresh."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoplan.planner.cost.calibrate import FACTORS, PRIOR_SD, Calibration, TimeFit
from autoplan.planner.search.learned import (
    LEAST_SPREAD,
    NOTHING,
    Learned,
    keep_learned,
    load_learned,
    starting_point,
    take_over,
)
from autoplan.planner.search.trial_cost import KeptCosts, TrialCost
from autoplan.planner.trials.measure import RUN_SPREAD, Spread
from autoplan.strategies.config import TrainingConfig
from tests.recorded import make_trial

MEMORY = FACTORS.index("memory")


def fitted(factor: float, observations: int) -> TimeFit:
    """A fit whose memory-bound part took `factor` times what was predicted."""
    fit = TimeFit()
    for _ in range(observations):
        parts = np.zeros(len(FACTORS))
        parts[MEMORY] = 1.0
        fit.observe(parts, factor)
    return fit


def calibration_of(fit: TimeFit) -> Calibration:
    return Calibration(
        factors=dict(zip(FACTORS, map(float, fit.theta), strict=True)),
        covariance=tuple(tuple(map(float, row)) for row in fit.covariance),
        memory_base_bytes=1e8,
        memory_slack=0.03,
        memory_sd=0.05,
        trials=len(fit.rows),
    )


def study(name: str, factor: float = 1.5, observations: int = 6, **given: Any) -> Learned:
    facts: dict[str, Any] = {
        "device": "Test CPU",
        "torch": "2.13.0",
        "study": name,
        "workload": f"model of {name}",
        "when": "2026-01-01T00:00:00+00:00",
        "trials": observations,
        "calibration": calibration_of(fitted(factor, observations)),
        "costs": KeptCosts(fixed_s=2.0, cold={"block": 0.5}, warm_share=0.1, slow_factor=5.0),
        "spread": 0.012,
        "freedom": 3,
    }
    return Learned(**(facts | given))


def keep(path: Path, learned: Learned) -> None:
    assert keep_learned(path, learned) is None


def test_a_second_search_starts_near_the_first_and_less_sure_than_it(tmp_path: Path):
    path = tmp_path / "learned" / "device.json"
    keep(path, study("a"))
    learned, note = load_learned(path)
    assert note is None
    start = take_over(learned, "b")
    assert start.calibration is not None
    first = fitted(1.5, 6)
    fit = TimeFit.starting_from(
        np.array([start.calibration.factors[name] for name in FACTORS]), np.array(start.calibration.covariance)
    )
    assert 1.0 < math.exp(fit.theta[MEMORY]) < math.exp(first.theta[MEMORY]) < 1.5
    assert first.covariance[MEMORY, MEMORY] < fit.covariance[MEMORY, MEMORY] < PRIOR_SD["memory"] ** 2
    others = [index for index in range(len(FACTORS)) if index != MEMORY]
    assert np.allclose(fit.theta[others], 0.0)
    assert np.allclose(np.diag(fit.covariance)[others], np.square(list(PRIOR_SD.values()))[others])
    assert start.text is not None
    assert "from the last search on this device (model of a; " in start.text
    assert "the calibration of predicted times (memory)" in start.text
    # Trials of another model win over what was taken over, and teach without it.
    parts = np.zeros(len(FACTORS))
    parts[MEMORY] = 1.0
    for _ in range(6):
        fit.observe(parts, 0.7)
    assert math.exp(fit.theta[MEMORY]) == pytest.approx(0.7, rel=0.1)
    alone = fitted(0.7, 6)
    assert np.allclose(fit.by_itself().theta, alone.theta)
    assert np.allclose(fit.by_itself().covariance, alone.covariance)


def test_the_last_search_counts_and_a_search_does_not_take_over_from_itself(tmp_path: Path):
    path = tmp_path / "device.json"
    keep(path, study("a", 1.5))
    keep(path, study("b", 1.4))
    learned, _ = load_learned(path)
    assert learned is not None and learned.study == "b"
    assert take_over(learned, "b") is NOTHING
    assert take_over(learned, "z").assumed_spread == RUN_SPREAD, "three repeats are too few"
    assert take_over(learned.model_copy(update={"freedom": 4}), "z").assumed_spread == pytest.approx(0.012)


def test_a_quiet_device_narrows_what_is_assumed_and_not_what_is_measured():
    quiet = take_over(study("a", freedom=12, spread=0.001), "other")
    assert quiet.assumed_spread == LEAST_SPREAD
    assumed = Spread.of([[1.0]], quiet.assumed_spread)
    assert (assumed.freedom, assumed.sd) == (0, LEAST_SPREAD)
    assert assumed.of_ratio()[0] < Spread().of_ratio()[0]
    runs = [[1.0, 1.1], [2.0, 2.2], [1.0, 1.1]]
    assert (
        Spread.of(runs, quiet.assumed_spread).of_ratio() == Spread.of(runs).of_ratio()
    )  # three repeats: measured alone


def test_the_cost_of_compiling_is_taken_over_for_a_model_of_another_depth():
    compiled = TrainingConfig(micro_batch=1, compile="block")
    options: dict[str, Any] = {"global_batch": 4, "num_blocks": 12, "device": "cpu"}
    first = TrialCost([compiled], **options)
    trial = make_trial(0, compiled, 0.1, phase_seconds={"start": 1.0, "compile": 50.0, "measure": 1.0})
    first.observe(trial)
    first.observe(trial.model_copy(update={"warnings": ("compile cache: 4 hit(s), 0 miss(es)",)}))
    kept = first.learned()
    assert kept.cold["block"] == 2.0
    second = TrialCost([compiled], **(options | {"num_blocks": 2}), kept=kept)
    assert second.compile_s(compiled) == 50.0
    assert second.fixed_s == 1.0
    assert second.learned() == kept  # what it did not see stays known


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99, "device": "", "torch": null}', "\x00"])
def test_a_damaged_file_is_said_and_not_used(text: str, tmp_path: Path):
    path = tmp_path / "device.json"
    path.write_text(text)
    start, note = starting_point(tmp_path / "own.json", path, study="a", begins=True, fresh=False)
    assert start is NOTHING
    assert note is not None
    assert "damaged or of another version" in note
    keep(path, study("a"))  # the next search writes it anew
    assert load_learned(path)[0] is not None


def test_figures_that_no_calibration_has_are_not_used(tmp_path: Path):
    path = tmp_path / "device.json"
    keep(path, study("a"))
    document = json.loads(path.read_text())
    document["calibration"]["covariance"][2][2] = -1.0
    path.write_text(json.dumps(document))
    assert load_learned(path)[0] is None


def test_a_search_keeps_what_it_began_with_and_fresh_begins_with_nothing(tmp_path: Path):
    path, own = tmp_path / "device.json", tmp_path / "study" / "learned.json"
    own.parent.mkdir()
    keep(path, study("a"))
    first, _ = starting_point(own, path, study="b", begins=True, fresh=False)
    keep(path, study("c", 0.5))
    again, _ = starting_point(own, path, study="b", begins=False, fresh=False)
    assert again == first
    own.unlink()
    assert starting_point(own, path, study="b", begins=True, fresh=True) == (NOTHING, None)
    assert starting_point(own, path, study="b", begins=False, fresh=False) == (NOTHING, None)
