"""No technique ends a trace: a variant that fails is left out with its reason, and there is a limit of time."""

import pytest
import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.planner.trace.model_profile import PLAIN, TraceRequest, VariantKey, variants_of, variants_to_trace
from autoplan.planner.trace.rough_profile import rough_variant, with_rough_variants
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.workload import LossSum, Workload
from tests.strategies.tiny import GPT2, language


class Recounts(nn.Module):
    """A block that behaves differently when it runs again: no checkpointing can recompute it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.runs = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        hidden = torch.relu(self.up(inputs))
        for _ in range(self.runs):
            hidden = hidden.exp()
        return inputs + self.down(hidden)


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Recounts, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(depth)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def make_workload(build_model=Model, loss=None, **options) -> Workload:
    return Workload(
        name="recounts",
        build_model=build_model,
        make_batch=lambda count, index: torch.randn(count, 8, generator=torch.Generator().manual_seed(index)),
        loss=loss or (lambda model, batch: LossSum(model(batch).pow(2).sum(), len(batch))),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
        **options,
    )


def test_a_variant_that_cannot_be_recomputed_is_left_out_and_the_others_stay() -> None:
    profile = profile_workload(make_workload(), "cpu", identity="recounts")
    assert PLAIN.text() in profile.variants
    failed = {name for name in profile.failed_variants if name.startswith("fp32/own")}
    assert failed == {"fp32/own/full/full/eager"} | {n for n in failed if "fused" in n or "selective" in n}
    assert "CheckpointError" in profile.failed_variants["fp32/own/full/full/eager"]


def test_the_plain_variant_alone_decides_and_its_own_error_comes_first() -> None:
    def broken(model: nn.Module, batch: torch.Tensor) -> LossSum:
        raise KeyError("label")

    with pytest.raises(WorkloadError) as caught:
        profile_workload(make_workload(loss=broken), "cpu", identity="broken")
    assert str(caught.value).startswith("KeyError: 'label'") and "without any technique" in str(caught.value)


def test_only_the_wanted_variants_are_traced() -> None:
    wanted = variants_to_trace([TrainingConfig(micro_batch=1), TrainingConfig(micro_batch=1, precision="bf16")])
    assert [key.text() for key in wanted] == ["fp32/own/none/full/eager", "half/own/none/full/eager"]
    profile = profile_workload(language(), "cpu", identity="tiny", request=TraceRequest(variants=wanted))
    assert sorted(profile.variants) == ["fp32/own/none/full/eager", "half/own/none/full/eager"]
    assert not profile.failed_variants and not profile.rough_variants


def test_the_variants_of_a_configuration_are_those_the_cost_model_reads() -> None:
    mixed = TrainingConfig(micro_batch=1, checkpointing="every_2", compile="block", attention="sdpa")
    plain, checkpointed = variants_of(mixed)
    assert (plain.checkpointing, checkpointed.checkpointing) == ("none", "full")
    assert plain.compiled and plain.attention == "sdpa"
    assert {key.text() for key in variants_to_trace([mixed])} == {
        "fp32/own/none/full/eager",
        "fp32/sdpa/none/full/eager",
        "fp32/sdpa/full/full/eager",
    }


def test_what_there_is_no_time_for_is_estimated_and_named() -> None:
    wanted = variants_to_trace(
        [TrainingConfig(micro_batch=1, precision="bf16", checkpointing=value) for value in ("none", "full")]
    )
    hurried = profile_workload(
        language(), "cpu", identity="tiny", request=TraceRequest(variants=wanted, time_limit_s=0.0)
    )
    assert set(hurried.rough_variants) == {key.text() for key in wanted} - {PLAIN.text()}
    assert set(hurried.variants) == {key.text() for key in wanted}
    exact = profile_workload(language(), "cpu", identity="tiny", request=TraceRequest(variants=wanted))
    for name in hurried.rough_variants:
        rough, traced = hurried.variants[name], exact.variants[name]
        samples = 8
        peak_rough, peak_traced = (max(peak.first.at(samples) for peak in v.peaks) for v in (rough, traced))
        assert 0.25 < peak_rough / peak_traced < 4.0, name


def test_a_rough_variant_of_a_traced_one_changes_only_what_differs() -> None:
    profile = profile_workload(language(GPT2), "cpu", identity="tiny", request=TraceRequest(variants=(PLAIN,)))
    again = with_rough_variants(profile, [PLAIN])
    assert again == profile
    full = rough_variant(VariantKey(checkpointing="full"), profile.variants, profile.num_blocks)
    assert full.block_saved_bytes.per_sample < 0.2 * profile.variants[PLAIN.text()].block_saved_bytes.per_sample


@pytest.mark.parametrize("size", [2, 4])
def test_a_fixed_micro_batch_is_traced_at_its_size(size: int) -> None:
    """BatchNorm makes the micro-batch part of the training; the trace refused every value but 1."""
    workload = make_workload(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), fixed_micro_batch=size
    )
    profile = profile_workload(workload, "cpu", identity="normed")
    assert profile.fewest_samples == size and PLAIN.text() in profile.variants


def test_a_trace_leaves_the_users_config_alone() -> None:
    """build_model may make every model from one config object: cutting it would cut the models that come after."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**{**GPT2, "n_layer": 6})

    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        return LossSum(model(input_ids=batch, labels=batch).loss * batch.numel(), batch.numel())

    workload = Workload(
        name="shared config",
        build_model=lambda: GPT2LMHeadModel(config),
        make_batch=lambda count, index: torch.randint(1, 100, (count, 16)),
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
    )
    profile = profile_workload(workload, "cpu", identity="shared", request=TraceRequest(variants=(PLAIN,)))
    assert config.num_hidden_layers == 6 and profile.num_blocks == 6
    assert "the blocks differ" not in " ".join(profile.notes)


def test_a_batch_function_that_reads_values_is_run_for_real() -> None:
    """A collator that pads to the longest sample calls .item(); the model itself is traced all the same."""

    def padded(count: int, index: int) -> torch.Tensor:
        longest = int(torch.randint(4, 9, (count,)).max().item())
        return torch.randn(count, longest)[:, :1].expand(count, 8).contiguous()

    workload = make_workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    workload.make_batch = padded
    profile = profile_workload(workload, "cpu", identity="padded", request=TraceRequest(variants=(PLAIN,)))
    assert profile.method == "traced"


def test_sparse_gradients_are_counted_by_their_values() -> None:
    """The rows that a batch asked for have gradients, not the whole table: 8 rows of 4 numbers for each sample."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(1000, 4, sparse=True), nn.Flatten(), nn.Linear(32, 1))

    workload = Workload(
        name="words",
        build_model=build,
        make_batch=lambda count, index: torch.arange(8 * count).reshape(count, 8) % 1000,
        loss=lambda model, batch: LossSum(model(batch).square().sum(), len(batch)),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
    )
    profile = profile_workload(workload, "cpu", identity="words")
    assert PLAIN.text() in profile.variants and profile.trainable == 4000 + 33
