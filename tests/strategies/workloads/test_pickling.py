"""Objects that travel: what cloudpickle alone refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from autoplan.strategies.workloads.pickling import dumps


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
