"""What ranks have to agree on besides gradients: random states, skipped steps, and refusals with their reasons."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import autoplan
from autoplan.errors import ConfigError, PlanError
from autoplan.processes import RankContext, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques.mesh import local_tensor, named_parameters
from autoplan.strategies.workloads.sources import spec_from_objects
from autoplan.strategies.workloads.workload import LossSum, Workload
from tests.recorded import make_plan
from tests.strategies.parallel.world import build_gpt2, each_in_turn, make_workload, run_ranks


def build_gpt2_with_dropout() -> Any:
    model = build_gpt2()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    return model


def train_with_dropout(context: RankContext, config: TrainingConfig) -> dict[str, Any]:
    """Two steps; the sums of what this rank holds of the norms, and one random number drawn after."""
    workload = make_workload("gpt2", build_model=build_gpt2_with_dropout)
    run = prepare(workload, config, device="cpu")
    first = float(torch.rand(()))
    for index in range(2):
        run.step(run.local_share(workload.make_batch(workload.global_batch, index)))
    sums = {
        name: float(local_tensor(parameter.detach()).double().sum())
        for name, parameter in named_parameters(run.model)
        if ".ln_" in name or "wpe" in name
    }
    return {"sums": sums, "first": first}


def overflow_on_one_rank(context: RankContext, config: TrainingConfig) -> dict[str, Any]:
    workload = make_workload("gpt2")
    run = prepare(workload, config, device="cpu")
    before = {name: local_tensor(value.detach()).clone() for name, value in named_parameters(run.model)}
    parts = run.forward_backward(run.local_share(workload.make_batch(workload.global_batch, 0)))
    if context.rank == 1:
        gradient = next(value.grad for _, value in named_parameters(run.model) if value.grad is not None)
        local_tensor(gradient).view(-1)[0] = float("inf")
    result = run.optimizer_step(*parts)
    same = all(torch.equal(local_tensor(value.detach()), before[name]) for name, value in named_parameters(run.model))
    assert run.scaler is not None
    return {"skipped": result.skipped, "same": same, "scale": run.scaler.get_scale()}


class Batches:
    """A batch sampler of one's own: pairs, drawn from a generator of its own or from torch's."""

    def __init__(self, samples: int, seed: int | None) -> None:
        self.samples, self.numbers = samples, None if seed is None else np.random.default_rng(seed)

    def __iter__(self) -> Any:
        order: Any = torch.randperm(self.samples) if self.numbers is None else self.numbers.permutation(self.samples)
        return iter(order.reshape(-1, 2).tolist())

    def __len__(self) -> int:
        return self.samples // 2


def apply_to_a_loop(context: RankContext) -> dict[str, Any]:
    """Two epochs of the loader that plan.apply_to gives this rank, by how the loop's own loader takes its samples."""
    warnings.simplefilter("ignore")
    data = [(torch.tensor([float(number)]), torch.zeros(1)) for number in range(18)]
    loaders = {
        "in order": DataLoader(data, batch_size=8),
        "shuffled": DataLoader(data, batch_size=8, shuffle=True),
        "drawn": DataLoader(data, batch_sampler=Batches(18, None)),
        "split": DataLoader(data, batch_size=8, sampler=DistributedSampler(data, 2, context.rank)),
        "apart": DataLoader(data, batch_sampler=Batches(18, context.rank)),
        "uneven": DataLoader(data[: 18 - context.rank], batch_size=8),
    }
    found: dict[str, Any] = {}
    for name, loader in loaders.items():
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        parts = (model, torch.optim.SGD(model.parameters(), lr=0.01), loader, torch.nn.MSELoss())
        searched = autoplan.from_loop(*parts[:2], loaders["in order"], parts[3], global_batch=8)
        config = TrainingConfig(micro_batch=2, dp_replicate=2)
        plan = make_plan(config, workload=spec_from_objects(searched), training=None)
        try:
            run, own = plan.apply_to(*parts, global_batch=8)
        except PlanError as error:
            found[name] = str(error)
            continue
        found[name] = [[batch[0].flatten().int().tolist() for batch in own] for _ in range(2)]
        run.step(next(iter(own)))
    return found


def refuse(context: RankContext, config: TrainingConfig, model: str, options: dict[str, Any]) -> str:
    try:
        prepare(make_workload(model, **options), config, device="cpu")
    except ConfigError as error:
        return str(error)
    return "no error"


def build_encoder() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    )


def build_mostly_frozen_gpt2() -> Any:
    """The last of four blocks and the last norm train."""
    model: Any = build_gpt2()
    for module in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[:3]):
        module.requires_grad_(False)
    return model


def prepare_given(context: RankContext, config: TrainingConfig, name: str) -> list[float]:
    """Sums of a parameter that both ranks hold, and of buffers, of a model that was made otherwise on each rank."""
    torch.manual_seed(context.rank)
    model = build_gpt2()
    model.register_buffer("repeated", torch.rand(3).expand(2, 3))
    model.register_buffer("turns", torch.randn(2, dtype=torch.complex64))
    model.register_buffer("across", torch.rand(3, 2).t())
    run = prepare(make_workload("gpt2"), config, device="cpu", model=model)
    held = next(value for key, value in named_parameters(run.model) if key == name)
    tensors = [local_tensor(held.detach()), *(model.get_buffer(key) for key in ("repeated", "turns", "across"))]
    return [float(tensor.abs().sum()) for tensor in tensors]


class Partly(torch.nn.Module):
    """Its pooler is never reached; its branch by micro-batches that begin with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch, self.pooler = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.body(rows)
        return found + self.branch(rows) if rows[0, 0] > 0 else found


def partly_workload() -> Workload:
    def make_batch(count: int, index: int) -> torch.Tensor:
        rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(index))
        rows[:, 0] = torch.where(torch.arange(count) == 0, 1.0, -1.0)
        return rows

    return Workload(
        name="partly",
        build_model=Partly,
        make_batch=make_batch,
        loss=lambda model, batch: LossSum(model(batch).pow(2).sum(), len(batch)),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        global_batch=8,
        find_unused_parameters=True,
    )


def train_partly(context: RankContext | None, ranks: int) -> dict[str, list[float]]:
    """The parameters after two steps; the branch is reached in the first micro-batch of the first rank alone."""
    run = prepare(partly_workload(), TrainingConfig(micro_batch=2, dp_replicate=ranks), device="cpu")
    for index in range(2):
        run.step(run.local_share(run.workload.make_batch(8, index)))
    return {name: parameter.flatten().tolist() for name, parameter in named_parameters(run.model)}


def read_ddp(context: RankContext) -> Any:
    run = prepare(make_workload("gpt2"), TrainingConfig(micro_batch=4, dp_replicate=2), device="cpu")
    ddp: Any = run._build.module
    return [ddp.gradient_as_bucket_view, ddp.broadcast_buffers]


def call(context: RankContext, function: Callable[..., Any], *given: Any) -> Any:
    return function(context, *given)


DROPOUT: list[dict[str, Any]] = [{"tp": 2}, {"dp_replicate": 2}]
OVERFLOW: list[dict[str, Any]] = [{"pp": 2, "pp_microbatches": 4}, {"dp_shard": 2}, {"tp": 2}]
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"dp_replicate": 8, "micro_batch": 1}, ("for 8 rank(s)", "2 run(s)", "torchrun", "--nproc-per-node 8")),
    ({"dp_shard": 2, "gradient_sync": "every", "micro_batch": 4}, ("micro_batch=4 on 2 ranks makes 1",)),
    ({"pp": 2, "pp_microbatches": 4, "virtual_stages": 4, "pp_schedule": "interleaved_1f1b"}, ("4 blocks",)),
]
GIVEN: dict[str, dict[str, Any]] = {
    "transformer.wpe.weight": {"tp": 2},
    "transformer.wte.weight": {"pp": 2, "pp_microbatches": 4},  # tied, so that both stages hold it
}
NO_PLAN = {"build_model": build_encoder, "head": None}


def config_of(knobs: dict[str, Any]) -> TrainingConfig:
    return TrainingConfig(**({"micro_batch": 2} | knobs))


@pytest.fixture(scope="module")
def answers(zygote: Zygote) -> dict[str, list[Any]]:
    """What two ranks answer to each question; they are asked one after another."""
    jobs = {f"dropout {knobs}": (train_with_dropout, config_of(knobs)) for knobs in DROPOUT}
    half = {"precision": "fp16"}
    jobs |= {f"overflow {knobs}": (overflow_on_one_rank, config_of(half | knobs)) for knobs in OVERFLOW}
    asked: dict[str, tuple[Any, ...]] = {
        **jobs,
        **{f"refused {knobs}": (refuse, config_of(knobs), "gpt2", {}) for knobs, _ in REFUSED},
        "no plan": (refuse, config_of({"tp": 2}), "gpt2", NO_PLAN),
        "frozen": (refuse, config_of(OVERFLOW[0]), "gpt2", {"build_model": build_mostly_frozen_gpt2}),
        **{f"given {name}": (prepare_given, config_of(knobs), name) for name, knobs in GIVEN.items()},
        "partly": (train_partly, 2),
        "loop": (apply_to_a_loop,),
        "ddp": (read_ddp,),
    }
    report = run_ranks(zygote, each_in_turn, 2, (call, list(asked.values())))
    return {name: [rank.result[number] for rank in report.ranks] for number, name in enumerate(asked)}


Answers = dict[str, list[Any]]


@pytest.mark.parametrize("knobs", DROPOUT, ids=str)
def test_with_dropout_ranks_draw_differently_and_hold_the_same(answers: Answers, knobs: dict[str, Any]) -> None:
    one, other = answers[f"dropout {knobs}"]
    assert one["first"] != other["first"]
    assert one["sums"] == other["sums"] and one["sums"]


@pytest.mark.parametrize("knobs", OVERFLOW, ids=str)
def test_an_overflow_on_one_rank_is_skipped_by_all(answers: Answers, knobs: dict[str, Any]) -> None:
    one, other = answers[f"overflow {knobs}"]
    assert one == other
    assert one["skipped"] and one["same"]


def test_a_loops_own_loader_is_shared_by_its_ranks(answers: Answers) -> None:
    one, other = answers["loop"]
    for name in ("in order", "shuffled", "drawn"):
        assert [len(epoch) for epoch in one[name]] == [len(epoch) for epoch in other[name]] == [2, 2]
        for epoch, theirs in zip(one[name], other[name], strict=True):
            assert len({*sum(epoch, []), *sum(theirs, [])}) == 16, name
        assert (one[name][0] == one[name][1]) is (name == "in order")
    assert one["in order"][0] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    for found in (one, other):
        assert "split over 2 processes already (DistributedSampler)" in found["split"]
        assert "the sampler _Flat gives other samples on one rank" in found["apart"]
        assert "the dataset has 17 samples on one rank and 18 on another" in found["uneven"]
        assert all("plan.loader(dataset, run=run)" in found[name] for name in ("split", "apart", "uneven"))


@pytest.mark.parametrize(("knobs", "words"), REFUSED, ids=str)
def test_what_does_not_go_together_is_refused_with_the_reason(
    answers: Answers, knobs: dict[str, Any], words: tuple[str, ...]
) -> None:
    for said in answers[f"refused {knobs}"]:
        assert all(word in said for word in words), said


def test_tp_needs_a_plan_and_a_degree_that_divides(zygote: Zygote, answers: Answers) -> None:
    job = (refuse, TrainingConfig(micro_batch=2, tp=3), "gpt2", {})
    (said,) = run_ranks(zygote, each_in_turn, 3, (call, [job])).ranks[0].result
    assert "4 attention heads" in said and "tp can be 1, 2, 4" in said
    assert "has no tensor-parallel plan" in answers["no plan"][0]


def test_ddp_keeps_gradients_once_and_leaves_buffers_to_each_rank(answers: Answers) -> None:
    assert answers["ddp"][0] == [True, False]


def test_a_rank_that_would_train_nothing_is_refused_on_every_rank(answers: Answers) -> None:
    assert all("parameters of pipeline rank 0 are frozen" in said for said in answers["frozen"])


@pytest.mark.parametrize("name", GIVEN)
def test_a_model_that_was_handed_in_is_made_alike_on_all_ranks(answers: Answers, name: str) -> None:
    one, other = answers[f"given {name}"]
    assert one == other and all(one)


def test_parameters_that_few_backwards_reach_are_trained_as_in_one_process(answers: Answers) -> None:
    alone = train_partly(None, 1)
    torch.manual_seed(0)
    begun = Partly()
    for found in answers["partly"]:
        for name, parameter in begun.named_parameters():
            assert found[name] == pytest.approx(alone[name], rel=1e-5)
            assert (found[name] == parameter.flatten().tolist()) is name.startswith("pooler")
