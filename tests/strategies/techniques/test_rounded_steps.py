"""Parameters in bf16 and moments in fewer bits: what is kept, how a step rounds, saving, resuming, refusals."""

import copy
import functools

import pytest
import torch
from torch import nn

from autoplan.errors import ConfigError
from autoplan.planner.cost.states import state_bytes
from autoplan.planner.cost.traced.candidates import from_configs
from autoplan.planner.cost.traced.memory import PIECE_ELEMENTS as PREDICTED_PIECE
from autoplan.planner.cost.traced.memory import profile_size, profile_widths
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.planner.trace.model_profile import TraceRequest
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques import rounded_steps
from autoplan.strategies.techniques.rounded_steps import (
    round_by_chance,
    rounding_of,
    with_rounding,
)
from autoplan.strategies.techniques.rules import incompatible
from tests.strategies.tiny import GPT2, LLAMA, classifier, language

NO_DROPOUT = GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BF16 = {"parameters": "bf16", "precision": "bf16"}
CHANCE = {"parameters": "bf16_stochastic", "precision": "bf16"}
EIGHT = pytest.param({"optimizer_state": "8bit"}, marks=pytest.mark.torchao)
ROUNDED = [CHANCE, EIGHT, BF16 | {"optimizer_state": "bf16"}]


def config(**knobs):
    return TrainingConfig.model_validate({"micro_batch": 2} | knobs)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)


def train(run, first, last):
    return [float(run.step(run.workload.make_batch(run.local_batch, index)).loss) for index in range(first, last)]


def test_rounding_by_chance_is_right_on_average_and_exact_where_it_can_be():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(round_by_chance(exact, generator).float(), exact)
    value = torch.full((200_000,), 1 + 0.3 * 2**-7)  # three tenths of the way to the next number of bf16
    rounded = round_by_chance(value, generator).float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    up = float((rounded > 1).float().mean())
    assert up == pytest.approx(0.3, abs=5 * (0.21 / 200_000) ** 0.5)
    assert round_by_chance(torch.tensor([-3.3e-39, float("inf"), float("-inf")]), generator)[1:].tolist() == [
        float("inf"),
        float("-inf"),
    ]
    assert round_by_chance(torch.tensor([float("nan")]), generator).isnan().all()


@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_is_the_plain_optimizers_on_the_master_copies(flags, monkeypatch):
    """In pieces as well: the same numbers as one fp32 optimizer that gets the same bf16 gradients."""
    monkeypatch.setattr("autoplan.strategies.techniques.rounded_steps.PIECE_ELEMENTS", 20)
    torch.manual_seed(0)
    start = [torch.randn(size).bfloat16() for size in ((5, 3), (7,), (4, 4), (2,))]
    low = [nn.Parameter(tensor.clone()) for tensor in start]
    plain = [nn.Parameter(tensor.float()) for tensor in start]
    groups = lambda ps: [{"params": ps[:2], "weight_decay": 0.5}, {"params": ps[2:], "lr": 3e-3}]  # noqa: E731
    ours = with_rounding(torch.optim.AdamW(groups(low), lr=1e-2, **flags), parameters="bf16", states="own")
    theirs = torch.optim.AdamW(groups(plain), lr=1e-2, foreach=False)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (ours, theirs)]
    assert isinstance(ours, torch.optim.AdamW) and rounding_of(theirs) is None
    seen = []
    ours.register_step_pre_hook(lambda *_: seen.append([p.dtype for p in low]))
    for number in range(4):
        for one, other in zip(low, plain, strict=True):
            given = torch.randn(one.shape).bfloat16()
            if number == 2 and one is low[1]:
                continue  # no gradient: neither optimizer may move it
            one.grad, other.grad = given, given.float()
        before = low[1].detach().clone()
        ours.step()
        theirs.step()
        assert number != 2 or torch.equal(before, low[1])
        for one, other in zip(low, plain, strict=True):
            assert one.dtype is torch.bfloat16 and (one.grad is None or one.grad.dtype is torch.bfloat16)
            torch.testing.assert_close(rounding_of(ours).master(one), other.detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(one.detach(), rounding_of(ours).master(one).bfloat16())
            assert ours.state[one]["exp_avg"].dtype is torch.float32
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            optimizer.zero_grad()
            schedule.step()
    assert seen == [[torch.bfloat16] * 4] * 4  # hooks run once a step, whatever the pieces


def test_small_updates_are_lost_by_rounding_to_nearest_alone():
    """200 updates of 1e-4 on parameters at 1, where bf16 has steps of 0.4 to 0.8 %: what the two forms are for."""

    def moved(parameters):
        weight = nn.Parameter(torch.ones(4096).bfloat16())
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        if parameters != "own":
            optimizer = with_rounding(optimizer, parameters=parameters, states="own")
        for _ in range(200):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        rounding = rounding_of(optimizer)
        master = None if rounding is None else rounding.master(weight)
        return float((1 - (weight.detach().float() if master is None else master)).mean())

    assert moved("own") == 0.0
    assert moved("bf16") == pytest.approx(0.02, rel=1e-3)
    assert moved("bf16_stochastic") == pytest.approx(0.02, rel=0.05)


def test_what_is_cast_and_what_is_not():
    run = prepare(language(NO_DROPOUT), config(**BF16))
    assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
    assert run.model.lm_head.weight is run.model.transformer.wte.weight  # tied
    frozen = language(NO_DROPOUT)
    build = frozen.build_model

    def half_frozen():
        model = build()
        model.transformer.wte.weight.requires_grad_(False)
        return model

    frozen.build_model = half_frozen
    run = prepare(frozen, config(**BF16))
    before = run.model.transformer.wte.weight.detach().clone()
    train(run, 0, 2)
    assert before.dtype is torch.bfloat16 and torch.equal(before, run.model.transformer.wte.weight)
    llama = prepare(language(LLAMA), config(**BF16))
    assert llama.model.model.rotary_emb.inv_freq.dtype is torch.float32
    norm = prepare(classifier(norm=True, fixed_micro_batch=4), config(micro_batch=4, **BF16))
    by_kind = {type(m).__name__: m.weight.dtype for m in norm.model.modules() if hasattr(m, "weight")}
    assert by_kind["BatchNorm2d"] is torch.float32 and by_kind["Conv2d"] is torch.bfloat16
    train(norm, 0, 2)


def test_clipping_measures_in_fp32():
    workload = language(NO_DROPOUT)
    workload.max_grad_norm = 1e-3
    run = prepare(workload, config(**BF16))
    norms = []
    run.observe_gradients(
        lambda: norms.append(sum(float(p.grad.double().square().sum()) for p in run.parameters) ** 0.5)
    )
    result = run.step(run.workload.make_batch(4, 0))
    assert float(result.grad_norm) == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("knobs", ROUNDED, ids=str)
def test_resuming_is_bit_for_bit(knobs, tmp_path):
    workload = language(GPT2)  # with dropout: rounding by chance leaves its random numbers alone
    workload.build_schedule = warm_up
    run = prepare(workload, config(**knobs))
    train(run, 0, 2)
    torch.save(run.state_dict(), tmp_path / "state.pt")
    expected = train(run, 2, 4)
    resumed = prepare(workload, config(**knobs))
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    if knobs.get("optimizer_state") == "8bit":  # what is saved in fp32 is rounded to 8 bits once more
        assert train(resumed, 2, 4) == pytest.approx(expected, rel=1e-4)
        return
    assert train(resumed, 2, 4) == expected
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    for one, other in zip(run.parameters, resumed.parameters, strict=True):
        masters = [rounding_of(r.optimizer).master(p) for r, p in ((run, one), (resumed, other))]
        assert masters[0] is None or torch.equal(*masters)


@pytest.mark.parametrize("knobs", [BF16, {"optimizer_state": "bf16"}, EIGHT], ids=str)
def test_a_state_goes_to_a_plain_run_and_back(knobs):
    """What is saved is fp32: a plain run that loads it holds the master copies and the moments."""
    workload = language(NO_DROPOUT)
    run = prepare(workload, config(**knobs))
    train(run, 0, 2)
    state = copy.deepcopy(run.state_dict())
    assert {t.dtype for t in state["model"].values() if t.is_floating_point()} == {torch.float32}
    plain = prepare(workload, config())
    plain.load_state_dict(state)
    rounding = rounding_of(run.optimizer)
    for one, other in zip(run.parameters, plain.parameters, strict=True):
        master = rounding.master(one)
        assert torch.equal(one.detach() if master is None else master, other.detach())
        own = rounding.state_of(run.optimizer, one)["exp_avg"]
        assert own.dtype is torch.float32 and torch.equal(own, plain.optimizer.state[other]["exp_avg"])
    expected = train(run, 2, 4)
    back = prepare(workload, config(**knobs))
    back.load_state_dict(copy.deepcopy(plain.state_dict()))
    exact = knobs.get("optimizer_state") != "8bit"
    assert train(back, 2, 4) == (expected if exact else pytest.approx(expected, rel=1e-4))


def test_the_optimizers_own_state_dict_has_all_that_it_needs():
    """For a loop that saves model and optimizer by itself."""
    make = functools.partial(prepare, language(NO_DROPOUT), config(**BF16))
    run = make()
    train(run, 0, 2)
    saved = copy.deepcopy(run.optimizer.state_dict())
    other = make()
    other.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    other.optimizer.load_state_dict(saved)
    other.steps = run.steps
    assert train(other, 2, 4) == train(run, 2, 4)


def test_weights_that_are_loaded_into_the_model_are_what_the_next_step_starts_from():
    run, other = (prepare(language(NO_DROPOUT), config(**BF16)) for _ in range(2))
    train(run, 0, 2)
    with torch.no_grad():
        for parameter in run.parameters:
            parameter.mul_(1.5)
    other.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    masters = [rounding_of(other.optimizer).master(p) for p in other.parameters]
    assert all(torch.equal(one, p.detach().float()) for one, p in zip(masters, run.parameters, strict=True))
    saved = other.state_dict()["model"]
    name = "transformer.wpe.weight"
    assert torch.equal(saved[name], run.model.get_parameter(name).detach().float())
    before = [p.detach().float() for p in other.parameters]
    train(other, 0, 1)
    for start, parameter in zip(before, other.parameters, strict=True):
        moved = (parameter.detach().float() - start).abs()
        assert bool((moved <= 2e-3 + 2**-7 * start.abs()).all())  # AdamW's first step is the learning rate, rounded


def test_an_element_that_is_written_leaves_the_precision_of_the_others():
    for size in (8, 7):
        weight = nn.Parameter(torch.ones(size).bfloat16())
        optimizer = with_rounding(torch.optim.SGD([weight], lr=1e-4), parameters="bf16", states="own")
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        with torch.no_grad():
            weight[1] = 5.0
            weight.data[2] = float("nan")
        optimizer.step()
        master = rounding_of(optimizer).master(weight)
        assert master[1] == 5.0 - torch.tensor(1e-4) and master[2].isnan()
        assert master[[0, *range(3, size)]].tolist() == pytest.approx([1 - 4e-4] * (size - 2), abs=2e-7)
        assert weight[1] == 5.0 and bool((weight[[0, 3]] == 1.0).all())


@pytest.mark.parametrize(
    ("states", "share"), [("own", 8.0), ("bf16", 4.0), pytest.param("8bit", 2.1, marks=pytest.mark.torchao)]
)
def test_the_bytes_that_are_kept(states, share):
    workload = language(NO_DROPOUT | {"n_embd": 256})
    run = prepare(workload, config(optimizer_state=states))
    train(run, 0, 1)

    def size(tensor):
        codes = getattr(tensor, "codes", None)
        return tensor.nbytes if codes is None else codes.nbytes + tensor.scale.nbytes

    held = sum(size(v) for s in run.optimizer.state.values() for k, v in s.items() if k != "step")
    assert held / sum(p.numel() for p in run.parameters) == pytest.approx(share, rel=0.05)


def test_the_cost_model_counts_the_bytes_that_a_run_keeps():
    """States of a traced model against those that prepare() made."""
    workload = language(NO_DROPOUT | {"n_embd": 128})
    profile = profile_workload(workload, "cpu", identity="x", request=TraceRequest(variants=()))
    for knobs in ({}, BF16, CHANCE, {"optimizer_state": "bf16"}, BF16 | {"optimizer_state": "bf16"}):
        run = prepare(workload, config(**knobs))
        train(run, 0, 1)
        rounding = rounding_of(run.optimizer)
        moments = sum(v.nbytes for s in run.optimizer.state.values() for k, v in s.items() if k != "step")
        masters = [] if rounding is None else [rounding.master(p) for p in run.parameters]
        states = moments + sum(tensor.nbytes for tensor in masters if tensor is not None)
        columns = from_configs([config(**knobs)], 4, device="cpu", num_blocks=3)
        predicted = state_bytes(columns, profile_size(profile), profile_widths(profile, columns))
        assert predicted.optimizer[0] == pytest.approx(states, rel=0.01)
        held = sum(p.nbytes for p in run.parameters)
        assert predicted.parameters[0] == pytest.approx(held, rel=0.01)
        assert predicted.gradients[0] == pytest.approx(held, rel=0.01)  # a gradient has the dtype of its parameter
    assert rounded_steps.PIECE_ELEMENTS == PREDICTED_PIECE


def test_what_is_refused():
    step = language(NO_DROPOUT)
    with pytest.raises(ConfigError, match="needs precision=bf16"):
        prepare(step, config(parameters="bf16"))
    with pytest.raises(ConfigError, match=r"Adam and AdamW; this optimizer is torch\.optim\.sgd\.SGD"):
        prepare(classifier(), config(optimizer_state="bf16"))
    wide = config(micro_batch=1, **BF16)
    assert "adds 64 gradients up in bf16" in incompatible(wide, 64)
    assert incompatible(wide, 32) is None
    assert "does not go with tp=2" in incompatible(config(tp=2, **BF16), 64)
    amsgrad = language(NO_DROPOUT)
    amsgrad.build_optimizer = functools.partial(torch.optim.Adam, lr=1e-3, amsgrad=True)
    with pytest.raises(ConfigError, match="amsgrad"):
        prepare(amsgrad, config(optimizer_state="bf16"))
    low = language(NO_DROPOUT)
    build = low.build_model
    low.build_model = lambda: build().bfloat16()
    with pytest.raises(ConfigError, match="none of the parameters that train is in fp32"):
        prepare(low, config(**BF16))
    with pytest.raises(ConfigError, match="have their dtype already"):
        prepare(low, config(precision="bf16", optimizer_state="bf16"))


def test_8_bits_without_torchao_names_the_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(ConfigError, match="pip install torchao"):
        prepare(language(NO_DROPOUT), config(optimizer_state="8bit"))
