"""Products in fp8 on data-parallel ranks, emulated: the gradient of one process that takes the same micro-batches."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.techniques.fp8 import RECIPES, emulated_fp8
from tests.strategies.parallel.world import run_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torchao,
]

LAYOUTS: dict[str, tuple[dict[str, Any], float]] = {
    "ddp": ({"dp_replicate": 2}, 1e-5),
    "fsdp": ({"dp_shard": 2}, 0.15),  # it gathers bf16: some numbers of 8 bits are other ones
    "fsdp_kept": ({"dp_shard": 2, "reshard_after_forward": False, "checkpointing": "full"}, 0.15),
}
_OPEN = contextlib.ExitStack()


def emulated(run: TrainingRun | None) -> None:
    """In a rank, before its run is built, and as long as the process lives."""
    if run is None:
        _OPEN.enter_context(emulated_fp8())


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_have_the_gradient_of_one_process(zygote: Zygote, tmp_path: Path, recipe: str) -> None:
    def gradients(knobs: dict[str, Any], fp8: str = recipe) -> torch.Tensor:
        config = TrainingConfig.model_validate({"micro_batch": 2, "precision": "bf16", "fp8": fp8} | knobs)
        _, found = run_step(zygote, "llama", config, tmp_path, plant=emulated)
        return torch.cat([found["gradients"][name].flatten() for name in sorted(found["gradients"])])

    one, plain = gradients({}), gradients({}, fp8="off")
    assert (one - plain).norm() / plain.norm() > 0.01, "fp8 changes the numbers"
    for name, (knobs, allowed) in LAYOUTS.items():
        apart = float((gradients(knobs) - one).norm() / one.norm())
        assert apart < allowed, (name, apart)
