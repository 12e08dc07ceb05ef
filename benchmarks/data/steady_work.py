"""Workloads for benchmarks/false_wins.py: the same small training, and one with 15 % more micro-steps in each step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from autoplan.strategies.workloads.workload import LossSum, Workload

MICRO_STEPS = 20
"""Of a step of `steady`, at a micro-batch of 1; `more` has three more. All of a step's time is in them."""

WIDTH, PRODUCTS = 64, 5
"""Small enough that all tensors stay in a core's own cache, so that runs differ little; a step takes some 20 ms."""


def _looped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD that loops over the parameters of both groups, by a flag of one and by torch's choice for the other.

    So the form `for_loop` is offered, and is the same as its own.
    """
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight], "foreach": False}, {"params": [bias]}], lr=1e-3)


def _make(micro_steps: int) -> Workload:
    def build_model() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def make_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(num_samples, 4 * WIDTH, WIDTH, generator=generator)}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        x = batch["x"]
        for _ in range(PRODUCTS):
            x = torch.tanh(model(x))
        return LossSum(x.square().mean((1, 2)).sum(), len(x))

    return Workload(
        name=f"steady, {micro_steps} micro-steps",
        build_model=build_model,
        make_batch=make_batch,
        loss=loss,
        build_optimizer=_looped,
        global_batch=micro_steps,
    )


def steady() -> Workload:
    """The workload A."""
    return _make(MICRO_STEPS)


def more() -> Workload:
    """A with 15 % more work: A is 1.15 times as fast."""
    return _make(MICRO_STEPS + 3)
