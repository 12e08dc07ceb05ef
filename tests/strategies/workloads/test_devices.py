from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake

from autoplan.strategies.workloads.devices import build_fake


def make() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    return model


def given() -> Callable[[], nn.Module]:
    model = make()
    return lambda: model


@pytest.mark.parametrize("build", [make, given()], ids=["a function makes it", "it exists"])
def test_a_fake_model_is_on_its_device_wherever_its_owner_has_it(build: Callable[[], nn.Module]):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = build_fake(build, mode, "meta")
    for tensor in (*fake.parameters(), *fake.buffers()):
        assert is_fake(tensor)
        assert tensor.device.type == "meta"
    assert fake[2].weight is fake[0].weight
    assert [parameter.requires_grad for parameter in fake[0].parameters()] == [True, False]
    with mode:
        assert fake(torch.ones(2, 4, device="meta")).shape == (2, 4)


def test_the_owners_model_stays_where_it_is():
    build = given()
    build_fake(build, FakeTensorMode(allow_non_fake_inputs=True), "meta")
    assert {parameter.device.type for parameter in build().parameters()} == {"cpu"}
    assert not any(is_fake(parameter) for parameter in build().parameters())
