"""Parameters and moments that are kept rounded, over ranks: states that move on, and replicas that stay alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.processes import RankContext, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques.mesh import gather_full, local_tensor, named_parameters
from autoplan.strategies.techniques.rounded_steps import rounding_of
from tests.strategies.parallel.world import adamw, each_in_turn, go_on, make_workload, run_ranks

BF16 = {"parameters": "bf16", "precision": "bf16"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"micro_batch": 4, "precision": "bf16"},
    "one": {"micro_batch": 4, **BF16},
    "ddp": {"micro_batch": 2, "dp_replicate": 2, **BF16},
    "fsdp": {"micro_batch": 2, "dp_shard": 2, **BF16},
    "fsdp_moments": {"micro_batch": 2, "dp_shard": 2, "optimizer_state": "bf16", **BF16},
}


def train(context: RankContext, config: TrainingConfig, steps: list[int], load: str, save: str, out: str) -> int:
    """Some steps from a checkpoint (or the start), and how many in all.

    Rank 0 writes what the parameters, or their fp32 copies, have changed by.
    """
    run = prepare(make_workload("gpt2", build_optimizer=adamw), config, device="cpu")
    start = gather_full({name: p.detach().clone() for name, p in named_parameters(run.model)}, run.mesh)
    go_on(run, steps, load, save)
    rounding = rounding_of(run.optimizer)
    exact = {name: p if rounding is None else rounding.master(p) for name, p in named_parameters(run.model)}
    full = gather_full(exact, run.mesh)
    if context.rank == 0:
        torch.save({name: tensor.float() - start[name].float() for name, tensor in full.items()}, out)
    return run.steps


@pytest.mark.slow
def test_a_state_goes_on_under_another_layout(zygote: Zygote, tmp_path: Path) -> None:
    """Two steps of one process, and the same with a checkpoint between two layouts.

    The change is compared: a lost moment, step count or master copy is 30 % of it and more; bf16 gradients that were
    added up in another order are 4 %.
    """
    config = {name: TrainingConfig.model_validate(knobs) for name, knobs in LAYOUTS.items()}

    def place(*names: str) -> str:
        return str(tmp_path / "-".join(names))

    def run(ranks: int, *jobs: tuple[Any, ...]) -> list[Any]:
        return list(run_ranks(zygote, each_in_turn, ranks, (train, jobs)).ranks[0].result)

    run(2, *[(config[one], [0], "", place(one), place("first")) for one in ("fsdp", "ddp", "fsdp_moments")])
    pairs = {1: [("fsdp", "one"), ("fsdp_moments", "plain")], 2: [("ddp", "fsdp_moments")]}
    loaded = {
        ranks: [(config[two], [1], place(one), "", place(one, two)) for one, two in those]
        for ranks, those in pairs.items()
    }
    results = run(1, (config["one"], [0, 1], "", "", place("whole")), *loaded[1]) + run(2, *loaded[2])
    assert results == [2] * 4
    expected = torch.load(place("whole"))
    for first, second in [*pairs[1], *pairs[2]]:
        found = torch.load(place(first, second))
        apart = sum(float((found[name] - tensor).square().sum()) for name, tensor in expected.items()) ** 0.5
        whole = sum(float(tensor.square().sum()) for tensor in expected.values()) ** 0.5
        assert apart < 0.1 * whole, (first, second, apart / whole)


def weights_after_steps(context: RankContext, config: TrainingConfig) -> float:
    """The weights of a rank after three steps, in one number that goes by the place of each."""
    context.init_process_group("gloo", 60.0)
    run = prepare(make_workload("gpt2", build_optimizer=adamw), config, device="cpu")
    go_on(run, range(3))
    weights = torch.cat([p.detach().flatten().double() for p in run.model.parameters()])
    return float((weights * torch.arange(1, len(weights) + 1)).sum())


@pytest.mark.slow
def test_replicas_round_alike(zygote: Zygote) -> None:
    config = TrainingConfig.model_validate(
        LAYOUTS["ddp"] | {"parameters": "bf16_stochastic", "optimizer_state": "bf16"}
    )
    first, second = (rank.result for rank in run_ranks(zygote, weights_after_steps, 2, (config,)).ranks)
    assert first == second


def load_and_step(context: RankContext, config: TrainingConfig) -> list[float]:
    """Writes 2 into every parameter of the model, and steps: the smallest and largest master copy after it."""
    context.init_process_group("gloo", 60.0)
    workload = make_workload("gpt2", build_optimizer=adamw)
    run = prepare(workload, config, device="cpu")
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(2.0)
    run.step(run.local_share(workload.make_batch(workload.global_batch, 0)))
    rounding = rounding_of(run.optimizer)
    assert rounding is not None
    found = gather_full({name: rounding.master(p) for name, p in named_parameters(run.model)}, run.mesh)  # type: ignore[misc]
    return [min(float(t.min()) for t in found.values()), max(float(t.max()) for t in found.values())]


def test_weights_that_are_written_into_shards_are_stepped(zygote: Zygote) -> None:
    report = run_ranks(zygote, load_and_step, 2, (TrainingConfig(**LAYOUTS["fsdp"]),))
    for rank in report.ranks:
        assert 1.99 < rank.result[0] <= rank.result[1] < 2.01


def same_sample(count: int, index: int) -> Any:
    batch = make_workload("gpt2").make_batch(1, 0)
    return {name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in batch.items()}


def mean_of_the_same(context: RankContext, config: TrainingConfig) -> dict[str, float]:
    """How far the mean gradient of 64 micro-steps of one sample is from that of a single one, by parameter."""
    context.init_process_group("gloo", 60.0)
    changes = []
    for global_batch in (2, 128):
        options = {"global_batch": global_batch, "make_batch": same_sample, "max_grad_norm": None}
        run = prepare(make_workload("gpt2", **options), config, device="cpu")
        rounding = rounding_of(run.optimizer)
        assert rounding is not None
        before = {name: local_tensor(rounding.master(p)).clone() for name, p in named_parameters(run.model)}
        run.step(run.local_share(same_sample(global_batch, 0)))
        after = {name: local_tensor(rounding.master(p)) for name, p in named_parameters(run.model)}
        changes.append({name: tensor - before[name] for name, tensor in after.items() if tensor.numel()})
    one, many = changes
    return {name: float((many[name] - one[name]).norm() / one[name].norm()) for name in one if one[name].norm() > 0}


def test_shards_add_their_gradients_up_in_fp32_outside_of_the_blocks_too(zygote: Zygote) -> None:
    """Embeddings, head and the last norm are of the outermost unit, which has no policy of the blocks."""
    config = TrainingConfig.model_validate(LAYOUTS["fsdp"] | {"micro_batch": 1})
    report = run_ranks(zygote, mean_of_the_same, 2, (config,))
    for rank in report.ranks:
        assert len(rank.result) > 10
        assert max(rank.result.values()) < 1e-3, {k: v for k, v in rank.result.items() if v >= 1e-3}
