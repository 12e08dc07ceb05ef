"""The fused loss of the user's own loss function over ranks, whether they share the head or not."""

from pathlib import Path
from typing import Any

import pytest

from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from tests.strategies.parallel.world import differences, run_step

DEGREES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2},
    "tp": {"tp": 2, "micro_batch": 4},
    "pp": {"pp": 2, "pp_microbatches": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("degree", DEGREES)
def test_deferred_logits_over_ranks(zygote: Zygote, degree: str, tmp_path: Path) -> None:
    plain = TrainingConfig(micro_batch=2)
    ranks = TrainingConfig.model_validate({"micro_batch": 2, "loss": "fused"} | DEGREES[degree])
    _, one = run_step(zygote, "llama", plain, tmp_path, head=None)
    _, two = run_step(zygote, "llama", ranks, tmp_path, head=None)
    assert max(differences(one, two).values()) < 1e-4
