"""Losses that draw noise of their own: both runs are seeded alike for each micro-batch, and compared all the same."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from autoplan.planner.parity.compare import compare
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.workload import LossSum, Workload
from tests.contracts.parity_contract import candidate, check_parity, reference


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)])
        self.head = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor, skip: float = 0.0) -> torch.Tensor:
        for block in self.blocks:
            if random.random() >= skip:
                inputs = inputs + block(inputs)
        return self.head(inputs)


def torch_noise(model: nn.Module, batch: torch.Tensor) -> LossSum:
    """As a diffusion model: the noise is drawn in the loss."""
    noise = torch.randn_like(batch)
    return LossSum((model(batch + noise) - noise).pow(2).sum(), batch.numel())


def layerdrop(model: nn.Module, batch: torch.Tensor) -> LossSum:
    """As transformers' layerdrop: Python's generator decides which layer is skipped."""
    return LossSum((model(batch, skip=0.5) - batch.roll(1, 1)).pow(2).sum(), batch.numel())


def numpy_mask(model: nn.Module, batch: torch.Tensor) -> LossSum:
    """As the masks of transformers' audio models: NumPy's global generator."""
    mask = torch.from_numpy(np.random.rand(*batch.shape) < 0.5)
    return LossSum((model(batch * mask) - batch).pow(2).sum(), batch.numel())


def make_workload(loss) -> Workload:
    return Workload(
        name="noisy",
        build_model=Denoiser,
        make_batch=lambda count, index: torch.randn(count, 8, generator=torch.Generator().manual_seed(index)),
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        global_batch=8,
    )


@pytest.mark.parametrize("loss", [torch_noise, layerdrop, numpy_mask])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_noise_in_the_loss_is_no_reason_to_refuse(loss, checkpointing: str) -> None:
    parity = check_parity(make_workload(loss), TrainingConfig(micro_batch=2, checkpointing=checkpointing))
    assert parity.passed, parity.note
    assert "draws noise of its own" in parity.note


def test_a_bug_under_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.strategies import run as run_module

    scale = run_module.TrainingRun._loss_scale
    monkeypatch.setattr(run_module.TrainingRun, "_loss_scale", lambda self, divisor: 1.1 * scale(self, divisor))
    parity = check_parity(make_workload(torch_noise), TrainingConfig(micro_batch=2))
    assert not parity.passed and "draws noise of its own" in parity.note


def test_noise_in_the_loss_is_a_reason_against_ranks_that_share_a_model() -> None:
    workload, config = make_workload(torch_noise), TrainingConfig(micro_batch=2)
    plain = reference(workload, config)
    ours = [candidate(workload, config, plain)]
    for degrees in ({"tp": 2}, {"pp": 2, "pp_microbatches": 4}):
        parity = compare(plain, ours, config.model_copy(update=degrees))
        assert not parity.passed and "use tp=1 and pp=1" in parity.note
