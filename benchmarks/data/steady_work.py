"""Workloads for benchmarks/false_wins.py: the same small training twice, and with 15 % more work in each step."""

from __future__ import annotations

import torch
from torch import nn

from autoplan.strategies.workloads.workload import LossSum, Workload

PRODUCTS = 20
"""Matrix products in a step of `steady`; `more` has 15 % more of them."""

WIDTH = 64
"""Small enough that all tensors stay in a core's own cache, so that runs differ little."""


def _make(products: int) -> Workload:
    def build_model() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def make_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(num_samples, WIDTH, WIDTH, generator=generator)}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        x = batch["x"]
        for _ in range(products):
            x = torch.tanh(model(x))
        return LossSum(x.square().mean((1, 2)).sum(), len(x))

    return Workload(
        name=f"steady, {products} products",
        build_model=build_model,
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        global_batch=4,
    )


def steady() -> Workload:
    """The workload A."""
    return _make(PRODUCTS)


def more() -> Workload:
    """A with 15 % more work: A is 1.15 times as fast."""
    return _make(PRODUCTS * 115 // 100)
