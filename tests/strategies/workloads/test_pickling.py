"""Objects that travel: what cloudpickle alone refuses."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from autoplan.strategies.workloads.pickling import dumps, load


@pytest.mark.parametrize(
    "register", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_a_parametrized_module_travels_and_trains_on_as_it_would_have(register) -> None:
    torch.manual_seed(0)
    inner = register(nn.Linear(4, 4))
    model = nn.Sequential(inner, nn.Tanh(), inner)  # tied
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    twin = copy.deepcopy((model, optimizer))
    arrived = pickle.loads(dumps((model, optimizer)))
    losses = []
    for there, steps in (twin, arrived):
        assert there[0] is there[2], "still one module"
        seen = []
        for _ in range(3):
            loss = there(x).square().mean()
            loss.backward()
            steps.step()
            steps.zero_grad()
            seen.append(float(loss.detach()))
        losses.append(seen)
    assert losses[0] == losses[1] and losses[0][0] != losses[0][2]
    assert arrived[0].state_dict().keys() == model.state_dict().keys()
    pickle.loads(dumps(arrived[0]))


SCRIPT = """
import torch

SCALE = 2.0

def scaled(x):
    return torch.tanh(x) * SCALE

def set_scale(value):
    global SCALE
    SCALE = value

def own_name():
    return __name__
"""


def test_functions_of_a_script_compile_in_another_process() -> None:
    """torch.compile looks their globals up by the name of their module, which is another program's `__main__` there."""
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, script)
    names = ("scaled", "set_scale", "own_name")
    scaled, set_scale, own_name = load(io.BytesIO(dumps([script[name] for name in names])))
    compiled = torch.compile(lambda x: scaled(x) + 1.0, backend="eager")
    x = torch.ones(3)
    assert torch.equal(compiled(x), torch.tanh(x) * 2.0 + 1.0)
    set_scale(5.0)
    assert torch.equal(compiled(x), torch.tanh(x) * 5.0 + 1.0), "one set of globals for all functions of the script"
    assert sys.modules[own_name()].SCALE == 5.0
    again, set_again = load(io.BytesIO(dumps((scaled, set_scale))))
    set_again(3.0)
    assert torch.equal(torch.compile(lambda x: again(x), backend="eager")(x), torch.tanh(x) * 3.0)
    assert torch.equal(compiled(x), torch.tanh(x) * 5.0 + 1.0)


OWN_OPERATOR = """
import sys
import torch
from autoplan.strategies.workloads.pickling import dumps

@torch.library.custom_op("of_a_script::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by

@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)

def backward(context, gradient):
    return scaled(gradient, context.by), None

scaled.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]))

class Model(torch.nn.Module):
    def forward(self, x):
        return scaled(x, 3.0)

sys.stdout.buffer.write(dumps((Model(), Model())))
"""


def test_a_models_own_operator_travels_with_a_script() -> None:
    """A Triton kernel is wrapped in one; as it is, it cannot be pickled."""
    data = subprocess.run([sys.executable, "-c", OWN_OPERATOR], capture_output=True, check=True).stdout
    for _ in range(2):  # it is registered once
        model, _ = load(io.BytesIO(data))
        x = torch.ones(3, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((3,), 3.0))
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # asks the fake one
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))


@torch.library.custom_op("of_a_module::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_an_operator_of_a_module_is_that_of_the_module() -> None:
    assert load(io.BytesIO(dumps([doubled, nn.Linear(2, 2)])))[0] is doubled


def test_what_was_loaded_is_freed_at_once() -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, script)
    gc.disable()
    try:
        model, _ = load(io.BytesIO(dumps((nn.Linear(4, 4), script["scaled"]))))
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
