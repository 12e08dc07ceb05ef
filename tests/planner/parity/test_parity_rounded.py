"""Parameters and moments that are kept rounded: right runs pass; the bugs that fail elsewhere fail with them too."""

from typing import Any

import pytest
import torch
from torch import nn

from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques import rounded_steps
from autoplan.strategies.techniques.mesh import local_tensor
from autoplan.strategies.techniques.rounded_steps import StepRounding, rounding_of
from tests.cases import some
from tests.contracts.parity_contract import check_parity, check_parity_of, plain_beside
from tests.planner.parity import planted
from tests.planner.parity.planted import OPTIMIZER, clipped, failed, seen
from tests.strategies.tiny import BERT, LLAMA, classifier, language

BF16 = {"parameters": "bf16", "precision": "bf16"}
CHANCE = {"parameters": "bf16_stochastic", "precision": "bf16"}
MOMENTS = {"optimizer_state": "bf16"}
FORMS = {"bf16": BF16, "chance": CHANCE, "moments": MOMENTS, "both": BF16 | MOMENTS}


@pytest.fixture(params=some(FORMS, ["both"]))  # a run that keeps parameters and moments rounded does all of it
def config(request):
    return config_of(FORMS[request.param])


def config_of(form):
    return TrainingConfig.model_validate({"micro_batch": 2} | form)


@pytest.fixture(scope="module", autouse=True)
def _plain_runs():
    """Made before anything is planted."""
    for form in FORMS.values():
        plain_beside(clipped, config_of(form))


@pytest.mark.parametrize("form", FORMS)
def test_a_right_run_passes(form):
    config = config_of(FORMS[form])
    parity = check_parity_of(clipped, config)
    assert parity.passed, parity.failures
    assert parity.changes_numerics
    names = {check.name for check in parity.checks}
    assert ("rounding of the parameters" in names) is (config.parameters != "own")
    assert ("rounding by chance" in names) is (config.parameters == "bf16_stochastic")
    assert ("moments as they are kept" in names) is (config.optimizer_state != "own")


@pytest.mark.parametrize(
    ("name", "form"), [("llama", "chance"), ("norms", "chance"), ("tiny_rate", "bf16"), ("tiny_rate", "chance")]
)
def test_other_models_pass(name, form):
    """The parity contract (tests/contracts) runs the first two rounded to nearest."""
    workload = {
        "llama": lambda: language(LLAMA),
        "norms": lambda: classifier(norm=True, fixed_micro_batch=4),
        "tiny_rate": lambda: language(learning_rate=1e-7),  # updates far below the last bit of bf16
    }[name]()
    size = workload.fixed_micro_batch or 2
    parity = check_parity(workload, config_of(FORMS[form] | {"micro_batch": size}))
    assert parity.passed, parity.failures


def test_moments_of_gradients_that_are_all_rounding():
    """A key's bias in BERT: its squares are 1e-28 and less, which fp32 norms cannot tell from 0."""
    parity = check_parity(language(BERT), TrainingConfig(micro_batch=2, optimizer_state="bf16"))
    assert parity.passed, parity.failures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "seen_in"), planted.beside_rounding(), ids=lambda value: getattr(value, "__name__", "")
)
def test_planted_in_the_run(monkeypatch, config, change, seen_in):
    planted.plant(monkeypatch, change)
    parity = check_parity_of(clipped, config)
    assert not parity.passed
    assert seen_in is None or seen_in in seen(parity), parity.failures


# What only a run that keeps something rounded can do wrong.


def master_lost(run):
    """Each step begins at the rounded parameters: small updates are lost."""
    rounding = rounding_of(run.optimizer)

    def forget():
        for parameter in run.parameters:
            rounding._masters[id(parameter)].copy_(local_tensor(parameter.detach()))

    planted.around_step(run, forget)


def parameters_never_written(run):
    honest = StepRounding._narrow_all

    def keep_old(self, optimizer):
        old = [(parameter, parameter.detach().clone()) for parameter, _ in self._stepped]
        honest(self, optimizer)
        for parameter, values in old:
            parameter.data.copy_(values)

    rounding = rounding_of(run.optimizer)
    if rounding is not None:  # the run in fp32 keeps nothing rounded
        rounding._narrow_all = keep_old.__get__(rounding)


@pytest.mark.parametrize(
    ("change", "seen_in"),
    [(master_lost, OPTIMIZER), (parameters_never_written, "rounding of the parameters")],
    ids=["master_lost", "never_written"],
)
def test_planted_in_the_master_copies(monkeypatch, change, seen_in):
    planted.plant(monkeypatch, change)
    parity = check_parity_of(clipped, config_of(BF16))
    assert seen_in in failed(parity), parity.failures


@pytest.mark.parametrize("wrong", ["nearest", "towards_zero"])
def test_rounding_that_is_not_by_chance(monkeypatch, wrong):
    def nearest(value, generator):
        return value.to(torch.bfloat16)

    def towards_zero(value, generator):
        return (value.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)

    monkeypatch.setattr(rounded_steps, "round_by_chance", locals()[wrong])
    parity = check_parity_of(clipped, config_of(CHANCE))
    assert "rounding by chance" in failed(parity), parity.failures


@pytest.mark.torchao
@pytest.mark.parametrize("form", [{}, BF16], ids=["own", "bf16"])
def test_moments_in_8_bits(monkeypatch, form):
    config = TrainingConfig.model_validate({"micro_batch": 2, "optimizer_state": "8bit"} | form)
    assert check_parity_of(clipped, config).passed
    planted.plant(monkeypatch, planted.other_betas)
    assert OPTIMIZER in failed(check_parity_of(clipped, config))


QWEN: dict[str, Any] = {
    **{"model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}


def qwen():
    return language(QWEN, learning_rate=1e-3)


@pytest.mark.torchao
def test_moments_in_8_bits_of_parameters_with_small_gradients(monkeypatch):
    """A key's bias moves far where its second moment is rounded to 0, which is what 8 bits do to a training."""
    config = TrainingConfig(micro_batch=2, optimizer_state="8bit")
    parity = check_parity_of(qwen, config)
    assert parity.passed, parity.failures
    (later,) = (check for check in parity.checks if check.name == "gradient scale, later steps")
    assert later.difference > 1e-5, "more than fp32 moments are off by (9e-7 seen)"
    planted.plant(monkeypatch, planted.gradients_never_cleared)
    assert not check_parity_of(qwen, config).passed


def test_moments_that_are_not_kept(monkeypatch):
    monkeypatch.setattr(rounded_steps, "round_by_chance", lambda value, generator: torch.zeros_like(value).bfloat16())
    parity = check_parity_of(clipped, config_of(MOMENTS))
    assert "moments as they are kept" in failed(parity), parity.failures


def test_a_tied_weight_that_is_cast_twice(monkeypatch):
    """Cast to a new parameter each, the head would train apart from the embedding."""

    def untie(run):
        run.model.lm_head.weight = nn.Parameter(run.model.lm_head.weight.detach().clone())

    planted.plant(monkeypatch, untie)
    assert not check_parity_of(clipped, config_of(BF16)).passed
