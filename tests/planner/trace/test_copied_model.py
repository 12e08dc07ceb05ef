"""A loop's model is copied for the trace: one with buffers is traced on fake tensors like any other."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autoplan
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.strategies.workloads.sources import load_workload, spec_from_objects
from tests.strategies.loops import Points


class Net(nn.Module):
    """Points in, classes out."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        sizes = Points(1)[0][0].numel()
        self.layers = nn.Sequential(nn.Linear(sizes, 16), norm, nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x) * self.scale
        return logits


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(16), nn.LayerNorm(16)], ids=["batch", "layer"])
def test_a_model_with_buffers_is_traced(norm: nn.Module) -> None:
    model = Net(norm)
    loader: Any = DataLoader(Points(32), batch_size=8)
    optimizer = torch.optim.Adam(model.parameters())
    workload = autoplan.from_loop(model, optimizer, loader, nn.CrossEntropyLoss())
    profile = profile_workload(load_workload(spec_from_objects(workload)), "cpu", identity="copied")
    assert profile.method == "traced", profile.notes
    assert all(tensor.device.type == "cpu" and torch.isfinite(tensor).all() for tensor in model.state_dict().values())
