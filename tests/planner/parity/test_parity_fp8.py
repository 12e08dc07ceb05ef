"""Products in fp8 beside a reference that rounds the same operands: right runs pass, planted bugs fail. Emulated."""

import pytest
import torch

from autoplan.planner.parity.tolerances import TOLERANCES, tolerance_of
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques import fp8 as fp8_module
from autoplan.strategies.techniques.fp8 import RECIPES, selected_linears
from tests.cases import some
from tests.contracts.parity_contract import check_parity, check_parity_of
from tests.planner.parity import planted
from tests.planner.parity.planted import failed, seen
from tests.strategies.emulated import emulated_fp8, reason_against_odd_sizes
from tests.strategies.tiny import BERT, LLAMA, T5, language

pytestmark = pytest.mark.torchao


@pytest.fixture(params=RECIPES)
def recipe(request):
    with emulated_fp8():
        yield request.param


ONE_RECIPE = pytest.mark.parametrize("recipe", some(RECIPES, ["tensorwise"]), indirect=True)
"""Of what is alike for both, `make test` runs one."""


def config(recipe, **knobs):
    return TrainingConfig.model_validate({"micro_batch": 2, "precision": "bf16", "fp8": recipe} | knobs)


def differences(parity):
    return {check.name: check.difference for check in parity.checks}


def llama():
    return language(LLAMA)


def bert():
    return language(BERT)


def decaying():
    return planted.decaying(LLAMA, max_grad_norm=0.3, weight_decay=0.01)


@pytest.mark.parametrize("model", [llama, bert], ids=["llama", "bert"])
def test_a_right_run_passes(recipe, model):
    parity = check_parity_of(model, config(recipe))
    assert parity.passed, parity.failures
    assert parity.changes_numerics and "products in fp8" in differences(parity)


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(3), [0]))
def test_a_model_that_is_sensitive_to_rounding_passes_too(recipe, seed):
    """T5's attention has no scale: 8 bits change a gradient of it by up to 17 % beside the same rounding in fp32."""
    parity = check_parity(language(T5, seed=seed), config(recipe))
    assert parity.passed, parity.failures


@ONE_RECIPE
@pytest.mark.parametrize(
    "knobs",
    [
        {"checkpointing": "full"},
        {"checkpointing": "selective"},
        {"loss": "fused"},
        {"parameters": "bf16"},
        {"optimizer_state": "bf16"},
        {"offload": "activations"},
        {"optimizer_step": "fused"},
    ],
    ids=str,
)
def test_beside_other_knobs(recipe, knobs):
    parity = check_parity_of(llama, config(recipe, **knobs))
    assert parity.passed, parity.failures


@pytest.mark.slow
def test_compiled():
    with emulated_fp8():
        parity = check_parity_of(llama, config("tensorwise", compile="block"))
    assert parity.passed, parity.failures


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", ["block", "model"])
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_more_that_is_compiled(recipe, compiled, checkpointing):
    parity = check_parity_of(llama, config(recipe, checkpointing=checkpointing, compile=compiled))
    assert parity.passed, parity.failures


def test_the_reference_that_rounds_alike_is_nearer_than_one_that_does_not(monkeypatch, recipe):
    alike = differences(check_parity_of(llama, config(recipe)))
    from autoplan.planner.parity import reference

    monkeypatch.setattr(reference._Reference, "round_products", lambda self, config: None)
    exact = differences(check_parity(llama(), config(recipe)))
    assert alike["whole gradient, step 1"] < 0.75 * exact["whole gradient, step 1"]


def test_only_a_candidate_in_fp8_has_its_tolerance():
    assert tolerance_of(config("off"), {"float32"}) == TOLERANCES["bf16"]
    assert tolerance_of(config("rowwise"), {"float32"}) == TOLERANCES["fp8"]


# Planted bugs: those that fail elsewhere.


LLAMA_HAS_NONE = (planted.biases_never_stepped, planted.dropout_switched_off)
IN_THE_RUN = planted.beside_rounding(*LLAMA_HAS_NONE)


@pytest.mark.slow
@ONE_RECIPE
@pytest.mark.parametrize(("change", "seen_in"), IN_THE_RUN, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_in_the_run(monkeypatch, recipe, change, seen_in):
    planted.plant(monkeypatch, change)
    parity = check_parity_of(decaying, config(recipe))
    assert not parity.passed
    assert seen_in in (None, *seen(parity)) or change is planted.gradients_never_cleared, parity.failures


# What only products in fp8 can do wrong, planted into what torchao is given.


def a_linear(run, part="down_proj"):
    return next(module for name, module in run.model.named_modules() if name.endswith(part))


def scaled(operand, by=1.25):
    """One layer whose operand is cast with a scale that its product does not take out again."""

    def plant(run):
        linear = a_linear(run)
        honest = linear.forward

        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value * by if operand == "output" else value.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient * by if operand == "gradient" else gradient

        linear.forward = lambda x: Wrong.apply(honest(x))

    return plant


@pytest.mark.parametrize("operand", ["output", "gradient"])
def test_an_operand_that_is_scaled_wrongly(monkeypatch, recipe, operand):
    planted.plant(monkeypatch, scaled(operand))
    parity = check_parity_of(decaying, config(recipe))
    assert "products in fp8" in failed(parity), parity.failures


def test_a_weight_whose_scale_is_never_updated(monkeypatch, recipe):
    """As with delayed scaling gone wrong: what is above the old largest number is cut off."""
    from torchao.float8 import float8_linear

    honest = float8_linear.hp_tensor_to_float8_dynamic

    def stale(value, *args, **kwargs):
        role = kwargs["gemm_input_role"]
        if role is float8_linear.GemmInputRole.WEIGHT:
            value = value.clamp(-value.std(), value.std())
        return honest(value, *args, **kwargs)

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", stale)
    assert "products in fp8" in failed(check_parity(decaying(), config(recipe)))


def test_a_layer_with_another_weight(monkeypatch, recipe):
    """A replaced module that does not hold the model's own parameter: it starts alike, and does not train."""

    def copied(run):
        linear = a_linear(run)
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone())

    planted.plant(monkeypatch, copied)
    assert not check_parity_of(decaying, config(recipe)).passed


def test_the_head_is_never_taken_even_if_it_is_large(recipe):
    model = language(LLAMA | {"vocab_size": 160}).build_model()
    names = {name for name, _ in selected_linears(find_structure(model), recipe)}
    assert names and "lm_head" not in names
    assert fp8_module.reason_against_sizes is reason_against_odd_sizes, "its size is no reason"
