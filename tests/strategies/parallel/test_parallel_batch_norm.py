"""BatchNorm at a fixed micro-batch over data-parallel ranks: the gradient is that of accumulation on one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from autoplan.processes import RankContext, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from tests.strategies.parallel.world import GLOBAL_BATCH, Case, Steps, differences, run_ranks
from tests.strategies.tiny import Classifier, classifier, image_batch, image_loss

MICRO_BATCH = 2
NORMED: dict[str, Any] = {
    "build_model": functools.partial(Classifier, True),
    "make_batch": image_batch,
    "loss": image_loss,
    "count": None,
    "head": None,
    "sequence_length": None,
    "fixed_micro_batch": MICRO_BATCH,
}


def test_the_gradient_is_that_of_accumulation(zygote: Zygote, tmp_path: Path) -> None:
    layouts = (("dp_replicate", 1), ("dp_replicate", 2), ("dp_shard", 2))
    configs = [TrainingConfig.model_validate({"micro_batch": MICRO_BATCH, degree: ranks}) for degree, ranks in layouts]
    one, *shared = (Case(model="gpt2", config=config, options=NORMED) for config in configs)
    steps = Steps(zygote, tmp_path, [one, *shared])
    for case in shared:
        assert max(differences(steps.of(one)[1], steps.of(case)[1]).values()) < 1e-4, case.config


def statistics(context: RankContext, config: TrainingConfig) -> dict[str, Any]:
    """This rank's running mean after a step, and what its state holds."""
    context.init_process_group("gloo", 60.0)
    workload = classifier(norm=True, global_batch=GLOBAL_BATCH, fixed_micro_batch=MICRO_BATCH)
    run = prepare(workload, config, device="cpu")
    run.step(run.local_share(workload.make_batch(GLOBAL_BATCH, 0)))
    own = run.model.stages[0][0].norm.running_mean  # type: ignore[union-attr,index]
    state = run.state_dict()["model"]["stages.0.0.norm.running_mean"]
    return {"own": own.tolist(), "state": state.tolist()}


def test_each_rank_keeps_the_statistics_of_its_own_micro_batches(zygote: Zygote) -> None:
    report = run_ranks(zygote, statistics, 2, (TrainingConfig(micro_batch=MICRO_BATCH, dp_replicate=2),))
    first, second = (rank.result for rank in report.ranks)
    assert first["own"] != second["own"]
    assert first["state"] == first["own"] and second["state"] == second["own"]
    workload = classifier(norm=True, global_batch=GLOBAL_BATCH // 2, fixed_micro_batch=MICRO_BATCH)
    alone = prepare(workload, TrainingConfig(micro_batch=MICRO_BATCH))
    batch = workload.make_batch(GLOBAL_BATCH, 0)
    alone.step({key: value[: GLOBAL_BATCH // 2] for key, value in batch.items()})
    expected = alone.model.stages[0][0].norm.running_mean  # type: ignore[union-attr,index]
    torch.testing.assert_close(torch.tensor(first["own"]), expected)
