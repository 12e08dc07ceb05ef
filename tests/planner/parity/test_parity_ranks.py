"""check_parity: reference and candidate in ranks of their own, one and more; and checks that do not finish."""

import dataclasses
import json

import pytest
import torch

from autoplan.planner.parity import compare as parity
from autoplan.planner.parity.check import check_parity
from autoplan.planner.parity.reference import RankBuffers
from autoplan.processes import TaskFailedError
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.language_model import causal_loss
from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
from tests.cases import some
from tests.strategies.tiny import GPT2, classifier, language


@pytest.fixture
def zygote(training_zygote):
    return training_zygote


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the models, and the references that are kept: those of one test answer in the next."""
    made = tmp_path_factory.mktemp("parity")
    (made / "config.json").write_text(json.dumps(GPT2))
    (made / "long.json").write_text(json.dumps(GPT2 | {"n_positions": 256}))
    return made


@pytest.fixture
def check(zygote, folder, tmp_path):
    spec = make_spec(model=str(folder / "config.json"), global_batch=32)

    def run(deadline_s=120.0, kept=folder / "kept", spec=spec, **knobs):
        config = TrainingConfig.model_validate({"micro_batch": 4} | knobs)
        return check_parity(
            zygote,
            spec,
            config,
            plain=None,
            device="cpu",
            directory=tmp_path / "check",
            deadline_s=deadline_s,
            cache_dir=kept,
        )

    return run


def test_one_rank_at_its_own_length_and_the_reference_is_kept(check, folder, tmp_path):
    kept_here = tmp_path / "kept"
    spec = make_spec(model=str(folder / "long.json"), global_batch=32, sequence_length=192)
    verdict = check(kept=kept_here, spec=spec, loss="fused", checkpointing="full")
    assert verdict.passed, verdict.model_dump_json()
    assert verdict.worst_gradient_difference < 1e-4
    assert verdict.global_batch == 10 and verdict.sequence_length == 128
    assert "micro-batches of 2" in verdict.note and "one forward and backward at 192 tokens" in verdict.note
    assert {"whole gradient, own length", "gradient scale, own length"} <= {one.name for one in verdict.checks}
    assert verdict.not_checked == ()
    (kept,) = kept_here.glob("reference-*/measurements.json")
    stamp = kept.stat().st_mtime_ns
    assert check(kept=kept_here, spec=spec, precision="bf16").passed
    assert [path.stat().st_mtime_ns for path in kept_here.glob("reference-*/measurements.json")] == [stamp]


TWO_RANKS = {
    "ddp": {"dp_replicate": 2},
    "fsdp2": {"dp_shard": 2},
    "fsdp2_every": {"dp_shard": 2, "gradient_sync": "every"},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "pp_microbatches": 2, "micro_batch": 2},
}
ROUNDED = {
    "ddp": {"dp_replicate": 2, "precision": "bf16", "parameters": "bf16"},
    "ddp_chance": {"dp_replicate": 2, "precision": "bf16", "parameters": "bf16_stochastic"},
    "fsdp2": {"dp_shard": 2, "precision": "bf16", "parameters": "bf16"},
    "fsdp2_chance": {
        "dp_shard": 2,
        "precision": "bf16",
        "parameters": "bf16_stochastic",
        "gradient_sync": "every",
    },
    "fsdp2_moments": {"dp_shard": 2, "optimizer_state": "bf16"},
}


@pytest.mark.parametrize("name", some(TWO_RANKS, ("fsdp2_every", "tp", "pp")))
def test_two_ranks(check, name):
    verdict = check(**TWO_RANKS[name])
    assert verdict.passed, verdict.model_dump_json()
    assert verdict.worst_gradient_difference < 1e-4


@pytest.mark.parametrize("name", some(ROUNDED, ("ddp_chance", "fsdp2_moments")))
def test_what_is_kept_rounded_on_two_ranks(check, name):
    """Rounding by chance too: replicas whose parameters differed would be seen, since each rank is judged."""
    verdict = check(**ROUNDED[name])
    assert verdict.passed, verdict.failures
    assert verdict.changes_numerics


def test_a_candidate_that_does_not_run_has_not_passed(check):
    verdict = check(precision="tf32")
    assert not verdict.passed
    assert "did not finish" in verdict.note and "CUDA" in verdict.note
    assert verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_a_check_past_its_deadline_is_no_verdict(check, tmp_path):
    with pytest.raises(TaskFailedError, match="deadline"):
        check(deadline_s=0.05, kept=tmp_path / "kept")


def test_comparing_loads_no_torch():
    import subprocess
    import sys

    code = f"import sys, {parity.__name__}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_running_statistics_of_each_rank_are_compared(zygote, tmp_path):
    spec = spec_from_objects(classifier(norm=True, global_batch=12, fixed_micro_batch=2))
    config = TrainingConfig(micro_batch=2, dp_replicate=2)
    verdict = check_parity(zygote, spec, config, plain=None, device="cpu", directory=tmp_path, deadline_s=120.0)
    assert verdict.passed, verdict.model_dump_json()
    (found,) = [check for check in verdict.checks if check.name == "buffers"]
    assert "running" in found.where and found.difference < 1e-4
    assert not any("buffers" in text for text in verdict.not_checked)


class Replacing(torch.nn.BatchNorm1d):
    """Makes its buffer anew in each forward."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.running_mean = self.running_mean.clone()
        return outputs


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, Replacing])
def test_each_rank_has_the_statistics_of_its_own_micro_batches(kind):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 3, generator=generator) + shift for shift in range(6)]
    model = kind(3)
    ranks = RankBuffers(model, ranks=2, accumulation=3)
    for number, batch in enumerate(batches):
        ranks.before(number)
        model(batch)
    for rank in ranks.each():
        alone = kind(3)
        for batch in batches[3 * rank : 3 * rank + 3]:
            alone(batch)
        torch.testing.assert_close(model.running_mean, alone.running_mean)
        assert int(model.num_batches_tracked) == 3


def test_a_verdict_says_whether_its_check_had_the_shapes_of_training(zygote, tmp_path):
    spec, more = spec_from_objects(classifier(global_batch=8)), {"device": "cpu", "deadline_s": 120.0}
    config = TrainingConfig(micro_batch=4)
    verdict = check_parity(zygote, spec, config, plain=None, directory=tmp_path, own_shapes=True, **more)
    assert verdict.passed and verdict.own_shapes and "micro-batches of 4" in verdict.note


def greedy_loss(model, batch):
    """More memory than there is for long samples in all blocks."""
    if batch["input_ids"].shape[1] > 128 and len(model.transformer.h) > 2:
        raise MemoryError
    return causal_loss(model, batch)


def test_a_plain_run_that_lacks_memory_at_its_own_length_alone_leaves_that_length_out(zygote, tmp_path):
    """The next one tried is that with checkpointing, then none."""
    fields = GPT2 | {"n_positions": 256, "n_layer": 3}
    workload = dataclasses.replace(language(fields, length=192), loss=greedy_loss, head=None)
    config = TrainingConfig(micro_batch=2)
    spec = spec_from_objects(workload)
    verdict = check_parity(zygote, spec, config, plain=None, device="cpu", directory=tmp_path, deadline_s=120.0)
    assert verdict.finished and verdict.passed, verdict.note
    assert any("192 tokens: the plain run does not fit" in text for text in verdict.not_checked)


class WithDropout(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.whole = classifier().build_model()
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, images):
        return self.whole(self.dropout(images))


def seeding_schedule(optimizer):
    """Called after prepare() has given each rank a seed of its own, and takes it away again."""
    torch.manual_seed(0)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, seeding_schedule])
def test_ranks_draw_masks_of_their_own(zygote, tmp_path, schedule):
    workload = dataclasses.replace(classifier(global_batch=12), build_model=WithDropout, build_schedule=schedule)
    spec = spec_from_objects(workload)
    config = TrainingConfig(micro_batch=2, dp_replicate=2)
    verdict = check_parity(zygote, spec, config, plain=None, device="cpu", directory=tmp_path, deadline_s=120.0)
    alike = "dropout draws the same masks on data-parallel ranks 0 and 1"
    assert verdict.failures == (() if schedule is None else (alike,))
