"""Numbers that are no numbers: NaN is no agreement, wherever a comparison meets it, also after it went through JSON."""

import json

import pytest
import torch

from autoplan.planner.parity.compare import Samples, compare
from autoplan.planner.parity.judge import CAP, largest
from autoplan.planner.parity.recorder import Recorder
from autoplan.planner.parity.records import CHECK_STEPS, ParityMeasurement
from autoplan.strategies.config import TrainingConfig
from tests.contracts.parity_contract import candidate, check_parity, check_parity_of, plain_beside
from tests.planner.parity import planted
from tests.planner.parity.planted import OPTIMIZER, failed
from tests.strategies.tiny import classifier, language

PLAIN = TrainingConfig(micro_batch=2)
NAN = float("nan")


def test_a_step_that_leaves_nan_at_the_end_fails(monkeypatch):
    planted.plant(monkeypatch, planted.nan_after_the_last_step)
    parity = check_parity_of(language, TrainingConfig(micro_batch=2, precision="bf16"))
    assert not parity.passed and parity.worst_update_difference == CAP
    assert parity.failures[0] == "parameters are not finite after the last step: transformer.wte.weight"
    assert any(text.startswith(f"{OPTIMIZER}: transformer.wte.weight differs by 1e+06") for text in parity.failures)


def test_the_replay_sees_nan_in_the_last_step_by_itself(monkeypatch):
    honest, name = Recorder.after_step, "transformer.ln_f.weight"

    def spoiled(self, model, **facts):
        honest(self, model, **facts)
        self.stepped[-1][name][0] = NAN

    plain = plain_beside(language, PLAIN)
    monkeypatch.setattr(Recorder, "after_step", spoiled)
    ours = candidate(language(), PLAIN, plain)
    differences = dict(ours.measurement.replay.differences)
    assert differences.pop(name) == CAP and max(differences.values()) < 1e-5
    assert OPTIMIZER in failed(compare(plain, [ours], PLAIN))


@pytest.mark.parametrize("parameters", ["bf16", "bf16_stochastic"])
def test_parameters_that_are_kept_as_nan_fail(monkeypatch, parameters):
    """What the step gave in fp32 is right; what is kept of it is not."""
    config = TrainingConfig(micro_batch=2, precision="bf16", parameters=parameters)
    planted.plant(monkeypatch, planted.nan_after_the_last_step)
    parity = check_parity_of(language, config)
    assert "rounding of the parameters" in failed(parity)
    assert ("rounding by chance" in failed(parity)) is (parameters == "bf16_stochastic")


def test_moments_that_are_kept_as_nan_fail(monkeypatch):
    def spoil_moments(run):
        def spoil(_):
            run.optimizer.state[planted.first_parameter(run)]["exp_avg"].view(-1)[0] = NAN

        planted.around_step(run, lambda: None, planted.in_the_last_step(spoil))

    config = TrainingConfig(micro_batch=2, optimizer_state="bf16")
    assert check_parity_of(language, config).passed
    planted.plant(monkeypatch, spoil_moments)
    assert failed(check_parity_of(language, config)) == {"moments as they are kept"}


def test_running_statistics_that_become_nan_fail(monkeypatch):
    def spoil_statistics(run):
        def spoil(_):
            next(run.model.buffers()).view(-1)[0] = NAN

        planted.around_step(run, lambda: None, planted.in_the_last_step(spoil))

    workload = classifier(norm=True, fixed_micro_batch=4)
    planted.plant(monkeypatch, spoil_statistics)
    parity = check_parity(workload, TrainingConfig(micro_batch=4))
    assert parity.failures[0].startswith("buffers are not finite after the last step: ")
    assert "buffers" in failed(parity)


def test_a_mask_of_infinities_is_no_alarm():
    workload = classifier()
    build = workload.build_model

    def masked():
        model = build()
        model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        return model

    workload.build_model = masked
    parity = check_parity(workload, PLAIN)
    assert parity.passed, parity.failures


def test_a_plain_run_that_ends_in_nan_is_named_before_anything_else():
    """A schedule that divides by zero: all gradients are numbers, the parameters after the last step are not."""
    workload = classifier()
    workload.build_schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: NAN if step == CHECK_STEPS - 1 else 1.0
    )
    parity = check_parity(workload, PLAIN)
    assert parity.failures[0].startswith("the plain run itself has parameters that are not finite after its steps (")
    assert not any(text.startswith("parameters are not finite") for text in parity.failures)


def test_nan_goes_through_json_and_still_fails(monkeypatch):
    plain = plain_beside(language, PLAIN)
    planted.plant(monkeypatch, planted.nan_after_the_last_step)
    ours = candidate(language(), PLAIN, plain)
    measured = ours.measurement
    written = (measured.model_dump_json(), json.dumps(measured.model_dump(mode="json")))  # pydantic's way, the ranks'
    for read in (*map(ParityMeasurement.model_validate_json, written), *map(json.loads, written)):
        again = Samples(ParityMeasurement.model_validate(read), ours.elements)
        assert compare(plain, [again], PLAIN).failures == compare(plain, [ours], PLAIN).failures


def test_the_largest_difference_is_the_one_that_is_no_number():
    for differences in ({"a": 1.0, "b": NAN}, {"b": NAN, "a": 1.0}):
        found = largest("what", 0.1, differences)
        assert (found.where, found.difference) == ("b", CAP)
