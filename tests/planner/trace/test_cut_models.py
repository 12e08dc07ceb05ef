"""Models cut to a few blocks: the same training in all else, and the same in the cost model as if it were traced."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from autoplan.planner.cost.traced.estimator import Estimator, cut_profile
from autoplan.planner.trace.trace import trace_workload
from autoplan.planner.trace.truncated_models import cut_workload
from autoplan.planner.trace.variants import PLAIN
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.workloads.language_model import language_model_workload
from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.workload import Workload
from tests.recorded import make_hardware


def fields(depth: int) -> dict[str, object]:
    size = {"n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": depth, **size}


def workload(depth: int) -> Workload:
    return language_model_workload(fields(depth), name="tiny", sequence_length=16, global_batch=4, options={})


def test_a_cut_workload_trains_the_rest_as_it_is():
    whole = workload(8)
    cut = cut_workload(whole, 2)
    model = cut.build_model()
    assert len(model.transformer.h) == 2 and model.config.n_layer == 2
    assert len(whole.build_model().transformer.h) == 8, "the workload's own model is not touched"
    assert torch.equal(cut.make_batch(4, 0)["input_ids"], whole.make_batch(4, 0)["input_ids"])
    assert (cut.global_batch, cut.max_grad_norm, cut.loss) == (whole.global_batch, whole.max_grad_norm, whole.loss)
    run = prepare(cut, TrainingConfig(micro_batch=2, checkpointing="full", optimizer_step="fused"))
    result = run.step(cut.make_batch(4, 0))
    assert torch.isfinite(result.loss) and run.accumulation == 2


def test_a_config_that_models_share_keeps_its_depth():
    whole = workload(6)
    shared = whole.build_model()

    def build_model() -> nn.Module:
        model = workload(6).build_model()
        model.config = shared.config
        return model

    whole.build_model = build_model
    assert cut_workload(whole, 2).build_model().config.n_layer == 2
    assert shared.config.n_layer == 6


def test_a_cut_profile_is_that_of_the_shallower_model(tmp_path: Path):
    """Traced at 8 blocks and cut to 5, against traced at 5."""
    profiles = {}
    for depth in (8, 5):
        path = tmp_path / str(depth) / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(fields(depth)))
        spec = make_spec(model=str(path), sequence_length=16, global_batch=4)
        profiles[depth] = trace_workload(spec, "cpu", variants=(PLAIN,))
    cut, shallow = cut_profile(profiles[8], 5), profiles[5]
    assert (cut.num_blocks, cut.parameters, cut.trainable) == (5, shallow.parameters, shallow.trainable)
    assert cut.parameter_bytes == shallow.parameter_bytes
    assert cut.parameter_tensors == pytest.approx(shallow.parameter_tensors, rel=0.05)
    estimators = [
        Estimator(profile, make_hardware(), device="cpu", global_batch=4, memory_limit_bytes=None)
        for profile in (profiles[8], shallow)
    ]
    configs = [TrainingConfig(micro_batch=2), TrainingConfig(micro_batch=4, optimizer_step="fused")]
    mine, true = estimators[0].at_depth(5).table(configs), estimators[1].table(configs)
    assert mine.step_time_s == pytest.approx(true.step_time_s, rel=0.03)
    assert mine.hardware_flops == pytest.approx(true.hardware_flops, rel=1e-6)
    assert (estimators[0].table(configs).step_time_s > 1.2 * mine.step_time_s).all(), "the whole one is not changed"


def test_what_trials_teach_the_whole_model_the_cut_one_knows(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields(8)))
    spec = make_spec(model=str(path), sequence_length=16, global_batch=4)
    whole = Estimator(
        trace_workload(spec, "cpu", variants=(PLAIN,)),
        make_hardware(),
        device="cpu",
        global_batch=4,
        memory_limit_bytes=None,
    )
    cut, configs = whole.at_depth(2), [TrainingConfig(micro_batch=2)]
    before, parts = cut.table(configs), whole.table(configs)
    whole.time_fit.observe(parts.parts_s[:, 0], 3 * float(parts.step_time_s[0]))
    assert cut.table(configs).step_time_s[0] > 1.5 * before.step_time_s[0]
    micro_s, optimizer_s = cut.micro_steps_and_optimizer(configs)
    assert micro_s + optimizer_s == pytest.approx(cut.table(configs).step_time_s)
    assert (optimizer_s > 0).all()
