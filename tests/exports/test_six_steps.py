"""The harness of the proofs: what trains the same is the same, and each thing that an export could lose shows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from autoplan.processes import Zygote
from tests.exports import workloads
from tests.exports.six_steps import (
    BATCH_NORM,
    WORKLOAD,
    SixSteps,
    compare,
    function_of,
    make_plan,
    plain_loop,
    prepared,
)
from tests.exports.workloads import STEPS


@pytest.mark.parametrize("workload", [WORKLOAD, BATCH_NORM])
def test_a_plan_trains_as_the_plain_loop_does(workload: str) -> None:
    plan = make_plan(workload)
    wanted = plain_loop(plan)
    assert compare(prepared(plan), wanted) == []
    limit = function_of(plan).max_grad_norm
    assert min(wanted.grad_norms) > 2 * limit, "clipping would change nothing"
    assert len(set(wanted.learning_rates)) > 2 and len(wanted.losses) == STEPS
    assert all((value != wanted.start[name]).any() for name, value in wanted.parameters.items())


@pytest.mark.slow
def test_two_ranks_with_shards_train_as_the_plain_loop_does(training_zygote: Zygote) -> None:
    plan = make_plan(WORKLOAD, dp_shard=2)
    assert compare(prepared(plan, training_zygote), plain_loop(plan)) == []


@pytest.mark.slow
def test_two_ranks_have_the_buffers_of_the_first(training_zygote: Zygote) -> None:
    plan = make_plan(BATCH_NORM, dp_replicate=2)
    found = prepared(plan, training_zygote)
    assert compare(found, plain_loop(plan)) == []
    other_share = compare(found, plain_loop(plan, shares="interleaved"))
    assert other_share and all("running" in difference for difference in other_share)


def decayed_throughout(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer without the group that has no weight decay."""
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.3)


def mean_of_means(model: Any, batch: Any) -> Any:
    loss, count = workloads.causal_loss(model, batch)
    return workloads.LossSum(loss / count, 1)


WRONG: dict[str, dict[str, Any]] = {
    "clipping": {"max_grad_norm": 1e9},
    "schedule": {"build_schedule": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)},
    "weight decay": {"build_optimizer": decayed_throughout},
    "mean of means": {"loss": mean_of_means, "count": lambda batch: 4},
}


@pytest.fixture(scope="module")
def wanted() -> SixSteps:
    """Six steps of the language model, of which nothing is lost."""
    return plain_loop(make_plan())


@pytest.mark.parametrize("lost", WRONG)
def test_what_an_export_could_lose_shows(lost: str, wanted: SixSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    right = workloads.language()
    monkeypatch.setattr(workloads, "language", lambda: dataclasses.replace(right, **WRONG[lost]))
    differences = compare(plain_loop(plan), wanted)
    assert differences and any("is off by" in difference for difference in differences), differences


def test_a_record_is_saved_and_what_is_missing_is_named(tmp_path: Any) -> None:
    wanted = plain_loop(make_plan(BATCH_NORM))
    found = SixSteps.load(wanted.save(tmp_path / "steps.pt"))
    assert compare(found, wanted) == []
    lost = dataclasses.replace(found, losses=found.losses[:5], parameters={}, buffers={})
    text = " ".join(compare(lost, wanted))
    assert "losses: 5 of them, wanted 6" in text and "classify.weight is missing" in text
    assert "first_norm.running_mean is missing" in text
    broken = found.parameters["classify.bias"] * float("nan")
    assert (
        "classify.bias is off by"
        in compare(dataclasses.replace(found, parameters=found.parameters | {"classify.bias": broken}), wanted)[0]
    )
