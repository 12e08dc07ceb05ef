"""No technique ends a trace: a variant that fails is left out with its reason, and there is a limit of time."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.planner.search.inspection import Means, inspect
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.planner.trace.model_profile import (
    PLAIN,
    ModelProfile,
    TraceRequest,
    VariantKey,
    variants_of,
    variants_to_trace,
)
from autoplan.planner.trace.rough_profile import rough_profile, rough_variant, with_rough_variants
from autoplan.planner.trace.trace import TraceLimits, trace_profile
from autoplan.probes.run import read_host_profile
from autoplan.processes import ProcessReport, Task, Zygote, cause
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.inspect import inspect_workload
from autoplan.strategies.workloads.objects import spec_from_objects, workload_from_objects
from autoplan.strategies.workloads.sources import load_workload, make_spec
from autoplan.strategies.workloads.workload import LossSum, Workload
from tests.recorded import make_hardware
from tests.strategies.tiny import GPT2, language

LIMIT_BYTES = 640 << 20


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


def make_workload(build_model=Model, loss=None, make_batch=None, **options) -> Workload:
    return Workload(
        name="recounts",
        build_model=build_model,
        make_batch=make_batch
        or (lambda count, index: torch.randn(count, 8, generator=torch.Generator().manual_seed(index))),
        loss=loss or (lambda model, batch: LossSum(model(batch).pow(2).sum(), len(batch))),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
        **options,
    )


def test_a_variant_that_cannot_be_recomputed_is_left_out_and_the_others_stay() -> None:
    wanted = tuple(
        VariantKey(precision=precision, checkpointing=checkpointing)
        for precision in ("fp32", "half")
        for checkpointing in ("none", "full", "selective")
    )
    request = TraceRequest(variants=wanted)
    profile = profile_workload(make_workload(), "cpu", identity="recounts", request=request)
    assert PLAIN.text() in profile.variants
    failed = {name for name in profile.failed_variants if name.startswith("fp32/own")}
    assert failed == {"fp32/own/full/full/eager"} | {n for n in failed if "fused" in n or "selective" in n}
    assert "CheckpointError" in profile.failed_variants["fp32/own/full/full/eager"]


def test_a_variant_that_runs_out_of_memory_is_estimated_and_may_still_run() -> None:
    """A micro-step that is run for real, beside a neighbour that holds the GPU's memory for the moment."""

    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        outputs = model(batch)
        assert outputs.isfinite().all()  # which needs values
        if torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return LossSum(outputs.sum(), len(batch))

    half = VariantKey(precision="half")
    request = TraceRequest(variants=(PLAIN, half), time_limit_s=60.0)
    found = profile_workload(make_workload(lambda: Model(Steady), loss), "cpu", identity="short", request=request)
    assert found.method == "measured_block" and not found.failed_variants
    assert found.rough_variants == (half.text(),) and half.text() in found.variants
    assert any(half.text() in note and "out of memory" in note for note in found.notes)


def test_the_plain_variant_alone_decides_and_its_own_error_comes_first() -> None:
    def broken(model: nn.Module, batch: torch.Tensor) -> LossSum:
        raise KeyError("label")

    with pytest.raises(WorkloadError) as caught:
        profile_workload(make_workload(loss=broken), "cpu", identity="broken")
    assert str(caught.value).startswith("KeyError: 'label'") and "of 2 or 4 samples" in str(caught.value)


WANTED = variants_to_trace(
    [TrainingConfig(micro_batch=1, precision="bf16", checkpointing=value) for value in ("none", "full")]
)


@pytest.fixture(scope="module")
def gpt2() -> ModelProfile:
    """A tiny one, of which the wanted variants are traced."""
    return profile_workload(language(), "cpu", identity="tiny", request=TraceRequest(variants=WANTED))


def test_only_the_wanted_variants_are_traced(gpt2: ModelProfile) -> None:
    wanted = variants_to_trace([TrainingConfig(micro_batch=1), TrainingConfig(micro_batch=1, precision="bf16")])
    assert [key.text() for key in wanted] == ["fp32/own/none/full/eager", "half/own/none/full/eager"]
    texts = ["fp32/own/none/full/eager", "half/own/full/full/eager", "half/own/none/full/eager"]
    assert sorted(key.text() for key in WANTED) == sorted(gpt2.variants) == texts
    assert not gpt2.failed_variants and not gpt2.rough_variants


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


def test_what_there_is_no_time_for_is_estimated_and_named(gpt2: ModelProfile) -> None:
    hurried = profile_workload(
        language(), "cpu", identity="tiny", request=TraceRequest(variants=WANTED, time_limit_s=0.0)
    )
    assert set(hurried.rough_variants) == {key.text() for key in WANTED} - {PLAIN.text()}
    assert set(hurried.variants) == {key.text() for key in WANTED}
    for name in hurried.rough_variants:
        rough, traced = hurried.variants[name], gpt2.variants[name]
        samples = 8
        peak_rough, peak_traced = (max(peak.first.at(samples) for peak in v.peaks) for v in (rough, traced))
        assert 0.25 < peak_rough / peak_traced < 4.0, name


def test_a_rough_variant_of_a_traced_one_changes_only_what_differs(gpt2: ModelProfile) -> None:
    again = with_rough_variants(gpt2, [PLAIN])
    assert again == gpt2
    full = rough_variant(VariantKey(checkpointing="full"), gpt2.variants, gpt2.num_blocks)
    assert full.block_saved_bytes.per_sample < 0.2 * gpt2.variants[PLAIN.text()].block_saved_bytes.per_sample


def test_a_rough_variant_in_bf16_has_the_launches_of_its_casts(gpt2: ModelProfile) -> None:
    """Without them an H100 was expected to run a small GPT in bf16 1.2 times as fast: it took 1.4 times as long."""
    key = VariantKey(precision="half")
    rough = rough_variant(key, {PLAIN.text(): gpt2.variants[PLAIN.text()]}, gpt2.num_blocks)
    assert rough.kernels == pytest.approx(gpt2.variants[key.text()].kernels, rel=0.15)


def test_checkpointing_frees_most_of_what_a_model_that_was_not_traced_keeps() -> None:
    """It was said to free one block's share of it, and could not be tried where nothing else fits."""
    facts = inspect_workload(spec_from_objects(make_workload(lambda: Model(Steady))), make_hardware(), "cpu")
    profile = rough_profile(facts.model_copy(update={"num_blocks": 24, "hidden_size": 512}), "cpu", "a test")
    full = rough_variant(VariantKey(checkpointing="full"), profile.variants, profile.num_blocks)
    plain, freed = (max(peak.later.at(8) for peak in found.peaks) for found in (profile.variants[PLAIN.text()], full))
    assert 0 < freed < plain / 3


def test_a_fixed_micro_batch_is_traced_at_its_size() -> None:
    """BatchNorm makes the micro-batch part of the training; the trace refused every value but 1."""
    workload = make_workload(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), fixed_micro_batch=4
    )
    profile = profile_workload(workload, "cpu", identity="normed", request=TraceRequest(variants=(PLAIN,)))
    assert profile.fewest_samples == 4 and PLAIN.text() in profile.variants


def test_a_program_for_one_micro_batch_alone_is_traced_at_it() -> None:
    """As a contrastive loss whose mask is made for its batch: twice the samples fail."""

    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        outputs = model(batch)
        alike = (outputs @ outputs.T).masked_fill(torch.eye(4, dtype=torch.bool), 0.0)
        return LossSum(alike.sum(), len(batch))

    workload = make_workload(lambda: Model(Steady, depth=6), loss, fixed_micro_batch=4)
    request = TraceRequest(variants=(PLAIN,), timing_budget_s=1.0)
    profile = profile_workload(workload, "cpu", identity="mask", request=request)
    twice = make_workload(lambda: Model(Steady, depth=6), fixed_micro_batch=4)
    other = profile_workload(twice, "cpu", identity="sum", request=TraceRequest(variants=(PLAIN,)))
    variant, line = profile.variants[PLAIN.text()], other.variants[PLAIN.text()]
    assert profile.method == "traced" and profile.num_blocks == 6
    blocks, same = ([one for one in each.groups if one.segment == "block"] for each in (variant, line))
    assert sum(one.count * one.flops.at(4) for one in blocks) == sum(one.count * one.flops.at(4) for one in same) > 0
    assert variant.block_saved_bytes.at(4) == line.block_saved_bytes.at(4)
    assert any(one.measured_s for one in blocks) and not any(one.measured_more_s for one in blocks)
    with pytest.raises(WorkloadError, match="of 2 or 4 samples") as caught:
        profile_workload(make_workload(lambda: Model(Steady), loss), "cpu", identity="mask")
    assert "fix the micro-batch" in str(caught.value.hint)
    with pytest.raises(WorkloadError, match="of 2 samples") as caught:
        profile_workload(make_workload(lambda: Model(Steady), loss, fixed_micro_batch=2), "cpu", identity="mask")
    assert "fix the micro-batch" not in str(caught.value.hint)


def test_a_trace_leaves_the_users_config_alone() -> None:
    """build_model may make every model from one config object: cutting it would cut the models that come after."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**{**GPT2, "n_layer": 6})

    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        return LossSum(model(input_ids=batch, labels=batch).loss * batch.numel(), batch.numel())

    workload = make_workload(
        lambda: GPT2LMHeadModel(config), loss, lambda count, index: torch.randint(1, 100, (count, 16))
    )
    profile = profile_workload(workload, "cpu", identity="shared", request=TraceRequest(variants=(PLAIN,)))
    assert config.num_hidden_layers == 6 and profile.num_blocks == 6
    assert "the blocks differ" not in " ".join(profile.notes)


def test_a_model_whose_optimizer_is_an_instance_is_traced_at_two_depths() -> None:
    """Such an optimizer can be made only over the whole model: here it has a weight decay for matrices alone."""
    blocks = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(6))
    model = nn.Sequential(nn.Embedding(16, 8), nn.Sequential(*blocks), nn.Linear(8, 16))
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))

    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        total = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), reduction="sum")
        return LossSum(total, batch.numel())

    spec = spec_from_objects(
        model=model,
        make_batch=lambda count, index: torch.randint(1, 16, (count, 4)),
        loss=loss,
        optimizer=torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=1e-3),
        global_batch=8,
    )
    profile = profile_workload(load_workload(spec), "cpu", identity="given", request=TraceRequest(variants=(PLAIN,)))
    assert profile.num_blocks == 6 and "the blocks differ" not in " ".join(profile.notes)


def test_a_batch_function_that_reads_values_is_run_for_real() -> None:
    """A collator that pads to the longest sample calls .item(); the model itself is traced all the same."""

    def padded(count: int, index: int) -> torch.Tensor:
        longest = int(torch.randint(4, 9, (count,)).max().item())
        return torch.randn(count, longest)[:, :1].expand(count, 8).contiguous()

    workload = make_workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), make_batch=padded)
    profile = profile_workload(workload, "cpu", identity="padded", request=TraceRequest(variants=(PLAIN,)))
    assert profile.method == "traced"


def test_sparse_gradients_are_counted_by_their_values() -> None:
    """The rows that a batch asked for have gradients, not the whole table: 8 rows of 4 numbers for each sample."""
    workload = make_workload(
        lambda: nn.Sequential(nn.Embedding(1000, 4, sparse=True), nn.Flatten(), nn.Linear(32, 1)),
        make_batch=lambda count, index: torch.arange(8 * count).reshape(count, 8) % 1000,
    )
    profile = profile_workload(workload, "cpu", identity="words", request=TraceRequest(variants=(PLAIN,)))
    assert PLAIN.text() in profile.variants and profile.trainable == 4000 + 33


class Hooked(nn.Module):
    """A hook writes into what the model reads, and holds a module of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        features = self.features = {}
        self.body.register_forward_hook(lambda module, inputs, output: features.update(last=output))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.body(inputs)
        return self.features["last"]


class Uncopied(nn.Module):
    """Keeps a tensor with a graph, which no deepcopy takes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.scale = self.body.weight.sum() * 0 + 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs) * self.scale.detach()


@pytest.mark.parametrize("build_model", [Hooked, Uncopied])
def test_a_model_that_cannot_be_copied_is_built_anew(build_model: type[nn.Module]) -> None:
    profile = profile_workload(
        make_workload(build_model), "cpu", identity="anew", request=TraceRequest(variants=(PLAIN,))
    )
    assert profile.method == "traced" and profile.trainable == 72


def test_a_hooked_instance_is_handed_over_with_its_hooks() -> None:
    instance = Hooked()
    build = workload_from_objects(
        model=instance, make_batch=lambda count, index: torch.ones(count, 8), loss=lambda model, batch: None,
        optimizer=torch.optim.SGD, global_batch=8,
    ).build_model  # fmt: skip
    made = build()
    made(torch.ones(1, 8))
    assert "last" in made.features and "last" not in instance.features


class Steady(Recounts):
    """A block that runs the same way each time."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.relu(self.up(inputs)))


class WithTables(Model):
    """Each block has a table beside the list of blocks."""

    def __init__(self) -> None:
        super().__init__(Steady, depth=6)
        self.tables = nn.ModuleDict({str(n): nn.Embedding(4, 8) for n in range(6)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            places = torch.zeros(len(inputs), dtype=torch.long)
            inputs = block(inputs + self.tables[str(number)](places))
        return inputs


def test_what_belongs_to_blocks_that_a_truncated_model_lacks_is_not_unused() -> None:
    request = TraceRequest(variants=(PLAIN,))
    found = profile_workload(make_workload(WithTables), "cpu", identity="tables", request=request)
    assert found.num_blocks == 6 and not found.notes, "two and three blocks stand for it"
    assert found.unused_parameters is False


def test_a_reference_model_that_a_loss_moves_to_its_batch_keeps_its_values() -> None:
    """As a Trainer of preferences does: what the inspection runs without values must not take them."""
    reference = Model(Steady)

    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        reference.to(batch.device)
        return LossSum((model(batch) - reference(batch).detach()).square().sum(), len(batch))

    spec = spec_from_objects(make_workload(lambda: Model(Steady), loss=loss))
    facts = inspect_workload(spec, make_hardware(), "cpu")
    assert facts.parallel is not None and facts.parallel.pp_reason is None
    assert facts.knob("micro_batch").values == (1, 2, 4, 8)


KEEPS_TENSORS = """
import torch, autoplan
from torch import nn

KEPT = {}

def kept(name):
    if name not in KEPT:
        KEPT[name] = torch.ones(8)
    return KEPT[name]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("scale", kept("scale"))

    def forward(self, inputs):
        hidden = self.body(inputs) * self.scale * kept("forward")
        return hidden if float(hidden.sum()) < 1e9 else -hidden

def workload():
    return autoplan.Workload(
        name="keeps", build_model=Net, make_batch=lambda count, index: torch.full((count, 8), 1.0 + index),
        loss=lambda model, batch: autoplan.LossSum(model(batch).sum(), len(batch)),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), global_batch=8,
    )
"""


def test_tensors_without_values_in_a_packages_globals_do_not_outlive_their_process(tmp_path, training_zygote) -> None:
    """The first run caches them; what runs for real afterwards is another process."""
    path = tmp_path / "keeps.py"
    path.write_text(KEEPS_TENSORS)
    spec = make_spec(model=f"{path}:workload")
    means = Means(options=SearchOptions(spec=spec), zygote=training_zygote, observer=SearchObserver())
    facts = inspect(means, read_host_profile(), "cpu", 1, None)
    assert facts.knob("micro_batch").values == (1, 2, 4, 8) and facts.parameters == 72
    profile = trace_profile(spec, device="cpu", zygote=training_zygote, variants=(PLAIN,), cache_dir=tmp_path / "cache")
    assert profile.method == "measured_block" and "not traced on fake tensors" in profile.notes[0]


@torch.library.custom_op("trace_failures::crashes", mutates_args=())
def crashes(inputs: torch.Tensor) -> torch.Tensor:
    """Ends the process where it runs by itself, on tensors with values."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return inputs.clone()


@crashes.register_fake
def _(inputs: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(inputs)


@torch.library.custom_op("trace_failures::looks_up", mutates_args=())
def looks_up(inputs: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Refuses the zeros that an operation by itself is given for whole numbers."""
    assert bool(kinds.any())
    return inputs.clone()


@looks_up.register_fake
def _(inputs: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(inputs)


def test_an_operation_that_refuses_its_operands_by_itself_is_not_timed() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        kinds = torch.ones(len(batch), dtype=torch.long)
        return LossSum(model(looks_up(batch, kinds)).sum(), len(batch))

    request = TraceRequest(variants=(PLAIN,), timing_budget_s=5.0)
    found = profile_workload(make_workload(lambda: nn.Linear(8, 8), loss), "cpu", identity="refuses", request=request)
    timed = {group.name: group.measured_s is not None for group in found.variants[PLAIN.text()].groups}
    assert found.method == "traced" and timed["trace_failures::looks_up"] is False and timed["sum"]


@torch.library.custom_op("trace_failures::hoards", mutates_args=())
def hoards(inputs: torch.Tensor) -> torch.Tensor:
    """Takes twice the memory of the limit, a little at a time."""
    held = []
    for _ in range(2 * LIMIT_BYTES >> 26):
        held.append(torch.ones(1 << 24))
        time.sleep(0.02)
    return inputs.clone()


@hoards.register_fake
def _(inputs: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(inputs)


def repeats(inputs: torch.Tensor) -> torch.Tensor:
    """400 MiB of two samples."""
    return inputs.repeat(1, 6_553_600).exp()


@pytest.mark.parametrize("operation", [repeats, hoards])
def test_an_operation_that_takes_much_memory_by_itself_costs_no_variant(
    operation: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, training_zygote: Zygote
) -> None:
    """What is seen to be large is not timed; what takes more than its operands is left out with the other times."""

    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        return LossSum(operation(batch).sum() + model(batch).sum(), len(batch))

    spec = spec_from_objects(make_workload(lambda: nn.Linear(8, 8), loss))
    found = trace_profile(
        spec,
        device="cpu",
        zygote=training_zygote,
        hardware=make_hardware(),
        facts=inspect_workload(spec, make_hardware(), "cpu"),
        variants=(PLAIN, VariantKey(precision="half")),
        cache_dir=tmp_path,
        limits=TraceLimits(timing_budget_s=5.0, memory_limit_bytes=LIMIT_BYTES),
    )
    groups = found.variants[PLAIN.text()].groups
    assert found.method == "traced" and not found.rough_variants
    assert any(group.measured_s for group in groups) is (operation is repeats)
    assert not any(group.measured_s for group in groups if group.name in ("repeat", "exp"))


def test_data_that_meets_the_limit_of_memory_costs_no_times(
    tmp_path: Path, training_zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile is known when make_batch is timed with more samples than were traced."""

    def make_batch(count: int, index: int) -> torch.Tensor:
        held = []
        for _ in range(2 * LIMIT_BYTES >> 26 if count > 4 else 0):
            held.append(torch.ones(1 << 24))
            time.sleep(0.02)
        return torch.randn(count, 8)

    runs: list[Task] = []
    run = training_zygote.run
    monkeypatch.setattr(training_zygote, "run", lambda task, **given: [runs.append(task), run(task, **given)][1])
    found = trace_profile(
        spec_from_objects(make_workload(lambda: nn.Linear(8, 8), make_batch=make_batch)),
        device="cpu",
        zygote=training_zygote,
        hardware=make_hardware(),
        variants=(PLAIN,),
        cache_dir=tmp_path,
        limits=TraceLimits(timing_budget_s=5.0, memory_limit_bytes=LIMIT_BYTES),
    )
    assert any("data loading is not estimated" in note for note in found.notes), found.notes
    assert len(runs) == 1
    assert any(group.measured_s for group in found.variants[PLAIN.text()].groups)


def test_a_larger_budget_times_every_known_variant_again(tmp_path: Path, training_zygote: Zygote) -> None:
    """What a small budget only scaled is in any of them; one for which there is no time stays as it was traced."""
    spec, half = spec_from_objects(make_workload(lambda: nn.Linear(8, 8))), VariantKey(precision="half")

    def trace(timing_s: float, time_limit_s: float) -> ModelProfile:
        limits = TraceLimits(time_limit_s=time_limit_s, timing_budget_s=timing_s)
        given = {"hardware": make_hardware(), "variants": (PLAIN, half), "cache_dir": tmp_path, "limits": limits}
        return trace_profile(spec, device="cpu", zygote=training_zygote, **given)

    def products(profile: ModelProfile) -> list[float | None]:
        groups = profile.variants[half.text()].groups
        return [group.measured_s for group in groups if group.kind == "matmul" and group.dtype == "bfloat16"]

    first = trace(1e-9, 60.0)
    assert not first.rough_variants and set(products(first)) == {None}
    hurried = trace(2e-9, 0.0)
    assert not hurried.rough_variants and hurried.variants[half.text()] == first.variants[half.text()]
    assert all(products(trace(5.0, 60.0)))


class Crashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(crashes(inputs))


def test_an_operation_that_crashes_by_itself_costs_the_times_and_not_the_trace(
    tmp_path: Path, training_zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an attention kernel did on a GPU, whose seed was made up."""
    monkeypatch.setattr(cause, "PAUSE_S", 0.05)
    spec = spec_from_objects(make_workload(Crashing))
    lost: list[ProcessReport] = []
    found = trace_profile(
        spec,
        device="cpu",
        zygote=training_zygote,
        hardware=make_hardware(),
        cache_dir=tmp_path,
        limits=TraceLimits(timing_budget_s=5.0),
        on_attempt=lost.append,
    )
    assert [report.first_failure.signal for report in lost if report.first_failure] == [signal.SIGSEGV]
    assert found.method == "traced" and not found.rough_variants
    assert all(group.measured_s is None for group in found.variants[PLAIN.text()].groups)
