"""Which models are split over tensor-parallel ranks and pipeline stages, and the reasons why others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoplan.strategies.analysis.pipeline_trace import trace_pipeline
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.analysis.tensor_plans import find_tensor_plan
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.inspect import inspect_workload
from autoplan.strategies.techniques.degrees import factorings, pipeline_schedules
from autoplan.strategies.techniques.pipeline_parallel import cut_stages
from autoplan.strategies.techniques.rules import incompatible
from autoplan.strategies.workloads.language_model import causal_loss
from autoplan.strategies.workloads.sources import spec_from_objects
from tests.recorded import make_hardware
from tests.strategies.parallel.world import LLAMA_PLAN, MODELS, adamw, build_gpt2, make_workload, token_batch


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def plan_of(name: str, own: dict[str, str] | None = None) -> Any:
    model = on_meta(name)
    return find_tensor_plan(model, find_structure(model), own)


def test_known_families_have_a_plan() -> None:
    gpt2, llama = plan_of("gpt2"), plan_of("llama")
    assert gpt2.styles["transformer.h.0.attn.c_attn"] == "fused_colwise_3"
    assert (gpt2.entry, gpt2.exit, gpt2.head) == ("transformer.drop", "transformer.ln_f", "lm_head")
    assert gpt2.vocabulary_tables == ("transformer.wte",)
    assert gpt2.unit == 4 and llama.unit == 2  # heads; two key-value heads
    assert {"model.layers.0.self_attn", "model.layers.0.mlp"} <= set(llama.regions)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"layers.*.nothing": "colwise"}, "no module matches 'layers.*.nothing'"),
        (LLAMA_PLAN | {"model.layers.*.mlp.up_proj": "sideways"}, "'sideways'"),
        ({"model.layers.*.self_attn.q_proj": "colwise"}, "no rowwise projection"),
        ({"model.norm": "colwise"}, "is a LlamaRMSNorm"),
        ({k: v for k, v in LLAMA_PLAN.items() if "mlp" not in k}, "is not in its tensor-parallel plan"),
    ],
)
def test_a_plan_that_does_not_work_says_why(own: dict[str, str], words: str) -> None:
    reason = plan_of("llama", own)
    assert isinstance(reason, str) and words in reason, reason


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class SkipsABlock(nn.Module):
    """A row of blocks of which each takes the first one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        return self.layers[1](first) + self.layers[2](first)


class SharedBetween(SkipsABlock):
    """A norm outside the blocks that runs between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norms = []
        for layer in self.layers:
            x = layer(x)
            norms.append(self.norm(x))
        return torch.stack(norms).sum(0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (SkipsABlock, "does not take what"),
        (SharedBetween, "is outside the blocks and runs between them"),
        (lambda: nn.Linear(8, 8), "0 stack(s) of repeated blocks"),
    ],
)
def test_a_model_that_cannot_be_cut_says_why(model: Any, words: str) -> None:
    workload = make_workload("gpt2", loss=lambda model, batch: model(batch), make_batch=lambda n, i: torch.ones(n, 8))
    made = model()
    reason = trace_pipeline(made, find_structure(made), workload)
    assert isinstance(reason, str) and words in reason, reason


def test_stages_are_cut_by_cost() -> None:
    assert cut_stages([1.0] * 12, 2, last_cost=4.0) == [(0, 8), (8, 12)]
    assert cut_stages([1.0] * 4, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert cut_stages([5.0, 1.0, 1.0, 1.0], 2) == [(0, 1), (1, 4)]
    assert cut_stages([1.0] * 7, 3, first_cost=1.0, last_cost=1.0) == [(0, 2), (2, 5), (5, 7)]
    with pytest.raises(ValueError, match="3 blocks cannot make 4 stages"):
        cut_stages([1.0] * 3, 4)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_has_a_cheaper_costliest_stage(seed: int) -> None:
    import itertools
    import random

    random.seed(seed)
    costs = [random.uniform(0.5, 3) for _ in range(7)]
    first, last, stages = random.uniform(0, 4), random.uniform(0, 4), random.randint(1, 4)

    def worst(cuts: list[tuple[int, int]]) -> float:
        totals = [sum(costs[start:stop]) for start, stop in cuts]
        totals[0] += first
        totals[-1] += last
        return max(totals)

    best = min(
        worst(list(itertools.pairwise([0, *inner, 7]))) for inner in itertools.combinations(range(1, 7), stages - 1)
    )
    assert worst(cut_stages(costs, stages, first_cost=first, last_cost=last)) == pytest.approx(best)


def test_every_factoring_once() -> None:
    found = list(factorings(8))
    assert len(found) == len(set(found)) == 20  # 8 = 2^3 over four axes
    assert all(pp * tp * replicate * shard == 8 for pp, tp, replicate, shard in found)


def test_schedules_that_torch_takes() -> None:
    assert pipeline_schedules(12, 4, 2) == []  # fewer micro-batches than stages
    assert ("interleaved_1f1b", 2) in pipeline_schedules(12, 2, 4)
    assert ("zero_bubble", 2) not in pipeline_schedules(12, 2, 4, dp=2)
    assert ("interleaved_1f1b", 2) not in pipeline_schedules(3, 2, 4)  # 3 blocks, 4 stages
    assert pipeline_schedules(12, 4, 9) == [("gpipe", 1), ("1f1b", 1)]  # rounds of 4.5


def test_knobs_that_do_not_go_with_a_pipeline() -> None:
    def reason(batch: int | None = 8, **knobs: Any) -> str:
        return str(incompatible(TrainingConfig(**({"micro_batch": 2, "pp": 2, "pp_microbatches": 4} | knobs)), batch))

    assert reason() == reason(pp_microbatches=2) == "None"  # one pass, two passes
    assert "does not divide the 4 micro-batches" in reason(pp_microbatches=3)
    assert "idle throughout" in reason(pp_microbatches=1)
    assert "goes in rounds" in reason(18, pp_microbatches=9, pp_schedule="interleaved_1f1b", virtual_stages=2)
    assert "it takes 2 or more" in reason(pp_schedule="interleaved_1f1b")
    assert "it takes 1" in reason(virtual_stages=2)
    assert "compile=model" in reason(compile="model")
    assert "once per pass" in reason(dp_shard=2, pp_microbatches=2, gradient_sync="every")
    zero = {"pp_schedule": "zero_bubble", "virtual_stages": 2}
    assert reason(**zero) == "None"
    assert "hooks" in reason(16, **zero, dp_shard=2)
    assert "twice" in reason(**zero, loss="fused")


def test_an_optimizer_that_is_an_instance_is_for_no_pipeline() -> None:
    """It is made again over all parameters of the model, and a stage has some of them."""
    parts = {"make_batch": token_batch, "loss": causal_loss, "global_batch": 8, "sequence_length": 16}
    reasons = []
    for instance in (False, True):
        model = build_gpt2()
        optimizer = adamw(model.parameters()) if instance else adamw
        facts = inspect_workload(spec_from_objects(model=model, optimizer=optimizer, **parts), make_hardware(), "cpu")
        assert facts.parallel is not None and facts.parallel.tp_reason is None
        reasons.append(facts.parallel.pp_reason)
    assert reasons[0] is None and "given as an instance" in str(reasons[1])


def test_an_embedding_that_does_more_than_look_up_is_not_split_with_the_head() -> None:
    class Normed(nn.Embedding):
        def __init__(self, rows: int, width: int) -> None:
            super().__init__(rows, width)
            self.norm = nn.LayerNorm(width)

    model: Any = build_gpt2()
    model.transformer.wte = Normed(67, 32)
    model.tie_weights()
    reason = find_tensor_plan(model, find_structure(model))
    assert isinstance(reason, str) and "transformer.wte (Normed) is tied to the output head" in reason
