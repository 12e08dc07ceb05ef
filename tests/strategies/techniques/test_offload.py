"""Offload on a CPU, where what goes to the host is a copy beside the device's: the same numbers, bit for bit."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.errors import ConfigError
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques import host_memory, offload
from autoplan.strategies.techniques.host_memory import HostActivations, keep_states_on_host, reason_against_pieces
from autoplan.strategies.techniques.rules import incompatible
from tests.contracts.parity_contract import check_parity
from tests.recorded import make_hardware
from tests.strategies.tiny import GPT2, LLAMA, language


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have pieces and saved tensors too."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(host_memory, "SMALLEST_BYTES", 1)


def adamw(**options: Any) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


def rising(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)


def gpt2(**fields: Any) -> Any:
    return dataclasses.replace(language(GPT2), **({"build_optimizer": adamw(), "max_grad_norm": 0.1} | fields))


def run_steps(workload: Any, config: TrainingConfig, steps: int = 3, first: int = 0, state: Any = None) -> Any:
    run = prepare(workload, config)
    if state is not None:
        run.load_state_dict(state)
    losses = [run.step(workload.make_batch(run.local_batch, first + number)).loss.item() for number in range(steps)]
    return run, losses


def same(one: Any, two: Any) -> bool:
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


OPTIMIZERS = {
    "adamw": adamw(),
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_pieces_is_the_step(name: str) -> None:
    workload = gpt2(build_optimizer=OPTIMIZERS[name], build_schedule=rising)
    plain, expected = run_steps(workload, TrainingConfig(micro_batch=2))
    moved, found = run_steps(workload, TrainingConfig(micro_batch=2, offload="optimizer"))
    assert found == expected and same(plain, moved)
    assert moved.schedule.last_epoch == 3


@pytest.mark.parametrize(
    ("first", "second"), [("optimizer", "none"), ("none", "optimizer"), ("optimizer", "optimizer")]
)
def test_a_state_resumes_under_another_offload(first: str, second: str, tmp_path: Any) -> None:
    workload = gpt2(build_schedule=rising)
    whole, expected = run_steps(workload, TrainingConfig(micro_batch=2), steps=4)
    half, _ = run_steps(workload, TrainingConfig(micro_batch=2, offload=first), steps=2)
    torch.save(half.state_dict(), tmp_path / "state.pt")
    resumed, found = run_steps(
        workload,
        TrainingConfig(micro_batch=2, offload=second),
        steps=2,
        first=2,
        state=torch.load(tmp_path / "state.pt"),
    )
    assert found == expected[2:] and same(whole, resumed)


def test_a_loss_scale_skips_the_step_of_all_pieces() -> None:
    config = TrainingConfig(micro_batch=2, precision="fp16", offload="optimizer")
    workload = gpt2()
    plain, expected = run_steps(workload, config.model_copy(update={"offload": "none"}), steps=2)
    moved, found = run_steps(workload, config, steps=2)
    assert found == expected and same(plain, moved)
    run = prepare(workload, config)
    before = [parameter.detach().clone() for parameter in run.parameters]
    parts = run.forward_backward(workload.make_batch(run.local_batch, 0))
    run.parameters[-1].grad.fill_(float("inf"))
    assert run.optimizer_step(*parts).skipped
    assert all(torch.equal(one, two) for one, two in zip(before, run.parameters, strict=True))


class OneRateForAll(torch.optim.Optimizer):
    """Looks at the gradients of all parameters together."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in held)
        for parameter in held:
            self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
            parameter.sub_(self.state[parameter]["sum"], alpha=0.1 / (1 + norm))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (OneRateForAll, "looks at all parameters together"),
        (lambda parameters: torch.optim.LBFGS(parameters), "failed"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), "keeps no states"),
    ],
    ids=["together", "closure", "stateless"],
)
def test_an_optimizer_that_cannot_be_stepped_in_pieces_is_refused(build: Any, words: str) -> None:
    assert words in (reason_against_pieces(build, 3) or "")
    with pytest.raises(ConfigError, match=words):
        prepare(gpt2(build_optimizer=build), TrainingConfig(micro_batch=2, offload="optimizer"))


def test_a_load_puts_states_on_the_host_at_once() -> None:
    """A meta parameter stands for a GPU's: a state that were moved to it would have no numbers."""
    parameters = [nn.Parameter(torch.ones(8, 8))]
    saved = torch.optim.AdamW(parameters)
    parameters[0].grad = torch.ones(8, 8)
    saved.step()
    away = [nn.Parameter(torch.ones(8, 8, device="meta"))]
    optimizer = torch.optim.AdamW(away)
    keep_states_on_host(optimizer)
    optimizer.load_state_dict(saved.state_dict())
    assert torch.equal(optimizer.state[away[0]]["exp_avg"], saved.state[parameters[0]]["exp_avg"])


def test_hooks_of_a_step_run_once() -> None:
    called: list[str] = []
    parameters = [nn.Parameter(torch.ones(8, 8)) for _ in range(4)]
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_post_hook(lambda *_: called.append("before"))
    keep_states_on_host(optimizer, piece_bytes=1)
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert called == ["before", "after"] and float(optimizer.state[parameters[3]]["step"]) == 1


def test_a_parameter_without_a_gradient_keeps_its_state_and_place() -> None:
    parameters = [nn.Parameter(torch.ones(8, 8)) for _ in range(4)]
    others = [nn.Parameter(torch.ones(8, 8)) for _ in range(4)]
    pair = torch.optim.AdamW(parameters), torch.optim.AdamW(others)
    keep_states_on_host(pair[1], piece_bytes=300)
    for round_ in range(4):
        for index, (one, two) in enumerate(zip(parameters, others, strict=True)):
            used = (round_ + index) % 3 != 0
            one.grad = torch.full((8, 8), float(index + 1)) if used else None
            two.grad = None if one.grad is None else one.grad.clone()
        for optimizer in pair:
            optimizer.step()
        assert [two.grad is None for two in others] == [one.grad is None for one in parameters]
    assert all(torch.equal(one, two) for one, two in zip(parameters, others, strict=True))


# Activations.


@pytest.mark.parametrize(
    ("fields", "knobs"),
    [
        (GPT2, {}),
        (GPT2, {"checkpointing": "full"}),
        (GPT2, {"loss": "fused"}),
        (GPT2, {"precision": "fp16"}),
        (GPT2, {"precision": "bf16", "attention": "eager"}),
        (LLAMA, {}),
        (LLAMA, {"precision": "bf16", "attention": "eager"}),
    ],
    ids=lambda value: value.get("model_type", str(value)),
)
def test_activations_that_come_back_from_the_host_are_the_same(fields: Any, knobs: Any) -> None:
    workload = language(fields)
    plain, expected = run_steps(workload, TrainingConfig(micro_batch=2, **knobs), steps=2)
    moved, found = run_steps(workload, TrainingConfig(micro_batch=2, offload="activations", **knobs), steps=2)
    assert found == expected and same(plain, moved)


@pytest.mark.exhaustive
def test_activations_of_compiled_blocks() -> None:
    config = TrainingConfig(micro_batch=2, compile="block", offload="activations")
    assert check_parity(language(GPT2), config).passed


def test_what_moves_is_moved_once_and_parameters_stay() -> None:
    torch.manual_seed(0)
    first, second, third = (nn.Linear(16, 16) for _ in range(3))
    saved: list[Any] = []
    hooks = HostActivations()
    pack = hooks.pack_hook

    def watched(tensor: torch.Tensor) -> Any:
        saved.append((tensor.data_ptr(), pack(tensor)))
        return saved[-1][1]

    hooks.pack_hook = watched
    x = torch.randn(4, 16, requires_grad=True)
    leaves = [x, *first.parameters(), *third.parameters()]
    with hooks:
        hidden = torch.tanh(first(x))
        y = second(hidden) * third(hidden)
    moved = [(place, packed[0]) for place, packed in saved if isinstance(packed, tuple)]
    parameters = {p.data_ptr() for layer in (first, second, third) for p in layer.parameters()}
    assert any(place in parameters for place, packed in saved if isinstance(packed, torch.Tensor))
    assert not any(place in parameters for place, _ in moved)
    assert len({id(one) for _, one in moved}) < len(moved)  # hidden is saved more than once
    gradients = torch.autograd.grad(y.sum(), leaves)
    hidden = torch.tanh(first(x))
    again = torch.autograd.grad((second(hidden) * third(hidden)).sum(), leaves)
    assert all(torch.equal(one, two) for one, two in zip(gradients, again, strict=True))


def test_parts_of_one_tensor_move_as_one_and_keep_their_strides() -> None:
    hooks = HostActivations()
    fused = torch.randn(2, 8, 48)
    parts = [part.view(2, 8, 4, 4).transpose(1, 2) for part in fused.split(16, dim=2)]
    packed = [hooks.pack_hook(part) for part in parts]
    assert len({id(one[0]) for one in packed}) == 1 and packed[0][0]._host.nbytes == fused.nbytes
    for part, one in zip(parts, packed, strict=True):
        back = hooks.unpack_hook(one)
        assert torch.equal(back, part) and back.stride() == part.stride() and back.data_ptr() != part.data_ptr()
    corner = torch.randn(64, 64)[:8, :8]
    stays = hooks.pack_hook(corner)  # its whole would be 64 times as much
    assert stays.data_ptr() == corner.data_ptr() and stays.stride() == corner.stride() and stays.shape == corner.shape
    column_major = torch.randn(6, 8).t()
    back = hooks.unpack_hook(hooks.pack_hook(column_major))
    assert torch.equal(back, column_major) and back.stride() == column_major.stride()


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    hooks = HostActivations()
    packed = []
    for value in range(50):
        packed.append(hooks.pack_hook(torch.full((64,), float(value))))
    assert [float(hooks.unpack_hook(one)[0]) for one in packed] == list(range(50))


def test_the_memory_of_a_host_copy_ends_with_the_graph() -> None:
    hooks = HostActivations()
    x = torch.randn(8, 8, requires_grad=True)
    with hooks:
        y = torch.tanh(x) * 2
    assert any(reference() is not None for _, reference in hooks._known.values())
    y.sum().backward()
    assert not any(reference() is not None for _, reference in hooks._known.values())


def test_a_tensor_and_its_conjugate_are_two() -> None:
    z = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)

    def gradient() -> torch.Tensor:
        y = z * 1.0  # no leaf
        (y * y.conj() * y.conj().imag).abs().sum().backward()
        found, z.grad = z.grad, None
        assert found is not None
        return found

    wanted = gradient()
    with HostActivations():
        assert torch.equal(gradient(), wanted)


def test_a_result_that_no_backward_reaches_ends_with_its_last_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """tanh saves its result, which must not hold itself: only the collector of cycles would free it."""
    monkeypatch.setattr(host_memory, "SMALLEST_BYTES", 2**20)
    gc.disable()
    try:
        with HostActivations():
            y = torch.tanh(torch.randn(8, 8, requires_grad=True))
        reference = weakref.ref(y)
        del y
        assert reference() is None
    finally:
        gc.enable()


# Choices, rules, the host's memory.


def test_on_a_cpu_the_host_is_the_device_and_on_cuda_all_are_offered() -> None:
    workload = language(GPT2)
    structure = find_structure(workload.build_model())
    strategy = offload.OffloadStrategy()
    here = strategy.choices(workload, structure, make_hardware(), "cpu")
    assert here.values == ("none",) and all("the host is the device" in found.reason for found in here.left_out)
    there = strategy.choices(workload, structure, make_hardware(), "cuda")
    assert there.values == ("none", "optimizer", "activations", "parameters")


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"offload": "parameters"}, "needs FSDP2"),
        ({"offload": "parameters", "dp_shard": 2, "precision": "fp16"}, "loss scaler"),
        ({"offload": "optimizer", "tp": 2}, "does not go with tp=2"),
        ({"offload": "activations", "checkpointing": "selective"}, "selective"),
        ({"offload": "activations", "compile": "model", "compile_mode": "reduce-overhead"}, "CUDA graphs"),
    ],
)
def test_what_does_not_go_together(knobs: dict[str, Any], words: str) -> None:
    assert words in (incompatible(TrainingConfig(micro_batch=2, **knobs)) or "")


def test_a_host_that_cannot_hold_the_states_refuses_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_hardware().host
    little = host.memory_available_bytes.model_copy(update={"value": 1e6})
    monkeypatch.setattr(offload, "read_host", lambda: host.model_copy(update={"memory_available_bytes": little}))
    with pytest.raises(ConfigError, match="1.3 MB into the host's memory.*0.8 MB may be taken|MiB|KiB") as caught:
        prepare(gpt2(), TrainingConfig(micro_batch=2, offload="optimizer"))
    assert caught.value.hint and "offload=optimizer puts" in caught.value.message
