"""Products in fp8 on data-parallel ranks, emulated: the gradient of one process that takes the same micro-batches."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.techniques.fp8 import RECIPES
from tests.strategies.emulated import emulated_fp8
from tests.strategies.parallel.world import Case, Steps

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
    """In a rank, before a run is built, and as long as the process lives."""
    if run is None:
        _OPEN.enter_context(emulated_fp8())


def case_of(fp8: str, **knobs: Any) -> Case:
    config = TrainingConfig.model_validate({"micro_batch": 2, "precision": "bf16", "fp8": fp8} | knobs)
    return Case(model="llama", config=config, plant=emulated)


PLAIN = case_of("off")
ALONE = {recipe: case_of(recipe) for recipe in RECIPES}
SHARED = {(recipe, name): case_of(recipe, **knobs) for recipe in RECIPES for name, (knobs, _) in LAYOUTS.items()}


@pytest.fixture(scope="module")
def steps(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Those of both recipes; their ranks start once."""
    return Steps(zygote, tmp_path_factory.mktemp("steps"), [PLAIN, *ALONE.values(), *SHARED.values()])


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_have_the_gradient_of_one_process(steps: Steps, recipe: str) -> None:
    def gradients(case: Case) -> torch.Tensor:
        found = steps.of(case)[1]["gradients"]
        return torch.cat([found[name].flatten() for name in sorted(found)])

    one, plain = gradients(ALONE[recipe]), gradients(PLAIN)
    assert (one - plain).norm() / plain.norm() > 0.01, "fp8 changes the numbers"
    for name, (_, allowed) in LAYOUTS.items():
        apart = float((gradients(SHARED[recipe, name]) - one).norm() / one.norm())
        assert apart < allowed, (name, apart)
