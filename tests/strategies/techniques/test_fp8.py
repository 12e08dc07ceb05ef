"""Products in fp8: which layers are taken, what a replaced one computes, names in a state, refusals; on a CPU."""

import copy
import importlib.util
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoplan.errors import ConfigError
from autoplan.planner.parity.rounded_products import RoundedProducts
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques import fp8
from autoplan.strategies.techniques.fp8 import (
    RECIPES,
    Fp8Strategy,
    fp8_linears,
    linear_weights,
    reason_against_fp8,
    use_fp8,
)
from autoplan.strategies.techniques.rules import incompatible
from autoplan.strategies.techniques.sizes import reason_against_sizes
from tests.recorded import make_hardware
from tests.strategies.emulated import emulated_fp8, reason_against_odd_sizes
from tests.strategies.tiny import GPT2, LLAMA, language

FP8 = {"micro_batch": 2, "precision": "bf16", "fp8": "tensorwise"}
BIG = LLAMA | {"hidden_size": 4096, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}


def on_meta(fields):
    with torch.device("meta"):
        return language(fields).build_model()


def config(**knobs):
    return TrainingConfig.model_validate(FP8 | knobs)


def trained(workload, steps=3, state=None, **knobs):
    """A run after some steps, and its losses."""
    run = prepare(workload, config(**knobs))
    if state is not None:
        run.load_state_dict(state)
    return run, [float(run.step(workload.make_batch(workload.global_batch, step)).loss) for step in range(steps)]


# Which layers are taken.


def test_large_layers_of_the_blocks_are_taken_and_the_head_is_not():
    model = on_meta(BIG)
    blocks = [name for name, _ in find_structure(model).blocks]
    tensorwise, rowwise = (fp8_linears(model, blocks, recipe) for recipe in RECIPES)
    of_a_block = {name.rpartition(".")[2] for name in tensorwise}
    assert of_a_block == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, "keys and values are small"
    assert len(tensorwise) == 2 * 5 and not any("lm_head" in name or "embed" in name for name in tensorwise)
    assert rowwise == tensorwise
    assert linear_weights(find_structure(model)) == (
        (1024, 4096, 4),
        (4096, 4096, 4),
        (4096, 8192, 2),
        (8192, 4096, 4),
    )


@pytest.mark.parametrize(
    ("sizes", "tensorwise", "rowwise"),
    [
        ((1024, 4096), "small", "small"),
        ((1040, 4096), None, "small"),
        ((4096, 2048), None, "small"),
        ((4096, 4096), None, None),
        ((14336, 4096), None, None),
        ((8192, 1024), None, "small"),
        ((4097, 4096), "multiples of 16", "multiples of 16"),
        ((4096, 4104), "multiples of 16", "multiples of 16"),
    ],
)
def test_sizes(sizes, tensorwise, rowwise):
    for recipe, expected in (("tensorwise", tensorwise), ("rowwise", rowwise)):
        reason = reason_against_sizes(*sizes, recipe)
        assert reason is None if expected is None else expected in reason


@pytest.mark.torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_are_those_of_torchaos_own_filter(recipe):
    from torchao.float8 import _auto_filter_for_recipe

    takes = _auto_filter_for_recipe(recipe, filter_fqns=[])
    sizes = (512, 1024, 1040, 2048, 2064, 4096, 4112, 4100, 8192)
    for n in sizes:
        for k in sizes:
            assert takes(nn.Linear(k, n, device="meta"), "layer") is (reason_against_sizes(n, k, recipe) is None), (
                n,
                k,
            )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.router = nn.Linear(32, 16)
        self.gate = nn.Linear(32, 16)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16)})
        self.odd = nn.Linear(32, 20)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.hooked = nn.Linear(32, 32)
        self.hooked.register_forward_hook(lambda module, args, output: None)
        self.own = nn.Linear(32, 32)
        self.own.forward = lambda x: x
        self.kind = type("Another", (nn.Linear,), {})(32, 32)
        self.down = nn.Linear(64, 32)


def test_what_a_replaced_module_would_change_or_lose_stays(monkeypatch):
    monkeypatch.setattr(fp8, "reason_against_sizes", reason_against_odd_sizes)
    model = nn.Sequential(nn.Linear(32, 32), nn.ModuleList([Block(), Block()]))
    assert fp8_linears(model, ["1.0", "1.1"], "tensorwise") == [
        *("1.0.up", "1.0.down"),
        *("1.1.up", "1.1.down"),
    ]


# Refusals.


def test_a_cpu_has_none_and_a_missing_library_is_named_with_its_install_line(monkeypatch):
    structure = find_structure(on_meta(BIG))
    with pytest.raises(ConfigError, match=r"fp8=tensorwise does not apply: .*compute capability 8.9"):
        prepare(language(LLAMA), config())
    choices = Fp8Strategy().choices(None, structure, make_hardware(), "cpu")
    assert choices.values == ("off",)
    reasons = {found.value: found.reason for found in choices.left_out}
    assert "capability 8.9" in reasons["tensorwise"] and "capability 9.0" in reasons["rowwise"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = reason_against_fp8(structure, "rowwise", "cpu")
    assert "capability 9.0" in reason and 'pip install "autoplan[cuda]"' in reason, "both, so that neither comes after"


@pytest.mark.parametrize(
    ("capability", "offered"),
    [((8, 0), ()), ((8, 9), ("tensorwise",)), ((9, 0), ("tensorwise", "rowwise")), ((12, 0), RECIPES)],
)
def test_chips(monkeypatch, capability, offered):
    """The chip alone is made up here: nothing runs on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(fp8, "_reason_against_torchao", lambda: None)
    choices = Fp8Strategy().choices(None, find_structure(on_meta(BIG)), make_hardware(), "cuda")
    assert choices.values == ("off", *offered)
    assert all(f"this one has {capability[0]}.{capability[1]}" in found.reason for found in choices.left_out)


def test_a_torchao_without_fp8_training_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(__spec__=None))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    assert "pip install" in (fp8._reason_against_torchao() or "")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: on_meta(LLAMA), "of the largest, .* is too small to gain"),
        (lambda: on_meta(GPT2), "Conv1D of transformers, which torchao does not know"),
        (lambda: nn.Linear(8, 8), "no repeated blocks"),
    ],
)
def test_a_model_without_such_layers_says_why(monkeypatch, model, reason):
    monkeypatch.setattr(fp8, "_reason_against_chip", lambda recipe, device, capability: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(fp8, "_reason_against_torchao", lambda: None)
    assert re.search(reason, reason_against_fp8(find_structure(model()), "tensorwise", "cuda") or "")


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"precision": "fp32"}, "needs precision=bf16"),
        ({"precision": "fp16"}, "needs precision=bf16"),
        ({"tp": 2}, "does not go with tp=2"),
        ({"pp": 2}, "does not go with pp=2"),
        ({"offload": "parameters", "dp_shard": 2}, "offload=parameters"),
    ],
)
def test_what_it_does_not_go_with(knobs, reason):
    assert reason in (incompatible(config(**knobs)) or "")
    assert incompatible(config(**knobs, fp8="off")) is None


# What it computes.


@pytest.mark.torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_replaced_layer_computes_the_recipe(recipe):
    """Beside the reference's own rounding: bit for bit where both see the same numbers, in all three products."""
    torch.manual_seed(0)
    theirs, ours = nn.Sequential(nn.Linear(48, 32)), nn.Sequential(nn.Linear(48, 32))
    ours.load_state_dict(theirs.state_dict())
    with emulated_fp8():
        use_fp8(theirs, ["0"], recipe)
    RoundedProducts([ours[0]], recipe)
    gradient = torch.randn(2, 24, 32).bfloat16().float()
    found = []
    for model in (theirs, ours):
        x = (torch.randn(2, 24, 48, generator=torch.Generator().manual_seed(1)) * 3).requires_grad_()
        y = model(x)
        y.backward(gradient)
        found.append((y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    exact = nn.functional.linear(x.detach(), ours[0].weight, ours[0].bias)
    apart = (found[0][0] - exact).norm() / exact.norm()
    assert 0.01 < apart < 0.06, "the operands are rounded to 4 bits of mantissa"


@pytest.mark.torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_real_products_are_those_of_the_emulation(recipe):
    """torch._scaled_mm has a slow kernel for a CPU: what a GPU runs, but for the order of its sums."""
    torch.manual_seed(0)
    real, emulated = nn.Sequential(nn.Linear(48, 32)), nn.Sequential(nn.Linear(48, 32))
    emulated.load_state_dict(real.state_dict())
    use_fp8(real, ["0"], recipe)
    with emulated_fp8():
        use_fp8(emulated, ["0"], recipe)
    for rows in (32, 17, 48):  # the batches of one training may have any length
        x, gradient = torch.randn(rows, 48).bfloat16(), torch.randn(rows, 32).bfloat16()
        found = []
        for model in (real, emulated):
            given = x.clone().requires_grad_()
            model.zero_grad()
            y = model(given)
            y.backward(gradient)
            found.append((y.detach(), given.grad, model[0].weight.grad))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)


@pytest.mark.torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_names_and_objects_stay_and_a_state_goes_both_ways(recipe):
    workload = language(LLAMA)
    with emulated_fp8():
        run, losses = trained(workload, fp8=recipe)
        model = run.model
        kinds = {type(module).__name__ for module in model.modules()}
        assert "Float8Linear" in kinds and type(model.lm_head) is nn.Linear
        state = run.state_dict()
        plain, plain_losses = trained(workload, fp8="off")
    assert set(state["model"]) == set(plain.state_dict()["model"])
    assert losses[0] == pytest.approx(plain_losses[0], rel=2e-2) and losses != plain_losses
    assert all(value.dtype == torch.float32 for value in state["model"].values())
    resumed = prepare(workload, config(fp8="off"))
    resumed.load_state_dict(state)
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.torchao
def test_a_resumed_run_goes_on_bit_for_bit():
    workload = language(LLAMA)
    with emulated_fp8():
        run, _ = trained(workload, steps=2)
        state = copy.deepcopy(run.state_dict())
        onward = [float(run.step(workload.make_batch(4, step)).loss) for step in (2, 3)]
        again = prepare(workload, config())
        again.load_state_dict(state)
        assert [float(again.step(workload.make_batch(4, step)).loss) for step in (2, 3)] == onward


@pytest.mark.torchao
def test_rows_that_16_does_not_divide_are_filled_up():
    """torch._scaled_mm sums over multiples of 16 alone, and tokens are what the gradient of a weight sums over."""
    from torchao.float8.float8_linear import Float8Linear

    workload = language(LLAMA)
    with emulated_fp8():
        run = prepare(workload, config(micro_batch=1))
    linears = [module for module in run.model.modules() if isinstance(module, Float8Linear)]
    assert linears and all(linear.config.emulate for linear in linears)
    for length in (32, 29, 32):
        batch = {name: tensor[:, :length] for name, tensor in workload.make_batch(run.local_batch, 0).items()}
        run.step(batch)
        for linear in linears:
            assert all(product.pad_inner_dim is (length == 29) for product in linear.linear_mm_config)
    model = nn.Sequential(nn.Linear(16, 16))
    use_fp8(model, ["0"], "tensorwise")
    assert not model[0].config.emulate, "outside of tests the products are real ones"


@pytest.mark.torchao
@pytest.mark.slow
def test_compiled():
    workload = language(LLAMA)
    with emulated_fp8():
        _, eager = trained(workload, steps=2)
        _, compiled = trained(workload, steps=2, compile="block")
    assert compiled == pytest.approx(eager, rel=1e-2)
