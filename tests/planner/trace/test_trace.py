"""The trace against what a real run does: parameters, operations, live bytes; frozen parts; what cannot be traced."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from autoplan.planner.cost.traced.candidates import from_configs
from autoplan.planner.cost.traced.memory import traced_memory
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.planner.trace.linear_fit import fit_line
from autoplan.planner.trace.model_profile import (
    IN_FUSED_LOSS,
    IN_RNN,
    ModelProfile,
    TraceRequest,
    VariantKey,
    variants_to_trace,
)
from autoplan.planner.trace.op_recorder import OpRecorder
from autoplan.planner.trace.trace import _read_cache, _write_cache, cache_path, trace_workload
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques.loss_kernels import (
    limit_chunk_rows,
    precomputed_cross_entropy,
    watch_loss_of_logits,
)
from autoplan.strategies.workloads.batch import split_batch
from autoplan.strategies.workloads.sources import load_workload, make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.strategies.workloads.workload import LossSum, Workload

GLOBAL_BATCH = 8
RUN = (
    {"micro_batch": 4},
    {"micro_batch": 8},
    {"micro_batch": 2, "checkpointing": "full"},
    {"micro_batch": 4, "checkpointing": "selective", "loss": "fused"},
    {"micro_batch": 4, "checkpointing": "every_2", "precision": "bf16"},
    {"micro_batch": 8, "attention": "eager", "optimizer_step": "foreach"},
)
"""Configurations whose live bytes are compared with a run."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> WorkloadSpec:
    path = tmp_path_factory.mktemp("gpt2") / "config.json"
    config = {"model_type": "gpt2", "n_layer": 5, "n_embd": 64, "n_head": 4, "vocab_size": 1000, "n_positions": 64}
    path.write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    return make_spec(model=str(path), sequence_length=64, global_batch=GLOBAL_BATCH)


@pytest.fixture(scope="module")
def traced(spec: WorkloadSpec) -> ModelProfile:
    variants = variants_to_trace([TrainingConfig.model_validate(knobs) for knobs in RUN], has_blocks=True)
    return trace_workload(spec, "cpu", TraceRequest(variants=variants))


def test_parameters_are_counted_once_where_they_are_tied(spec: WorkloadSpec, traced: ModelProfile) -> None:
    model = load_workload(spec).build_model()
    assert traced.parameters == sum(p.numel() for p in model.parameters())
    assert traced.trainable == traced.parameters
    assert traced.num_blocks == 5 and traced.method == "traced"
    assert traced.optimizer_state_bytes_per_parameter == 8.0


def test_flops_follow_six_n_d(traced: ModelProfile) -> None:
    variant = traced.variants[VariantKey().text()]
    flops = sum(g.count * (5 if g.segment == "block" else 1) * g.flops.at(1) for g in variant.groups)
    embeddings = 64 * 64  # positions take no product
    expected = 6 * (traced.parameters - embeddings) * 64 + 12 * 5 * 64 * 64 * 64
    assert flops == pytest.approx(expected, rel=0.02)


def live_bytes(spec: WorkloadSpec, config: TrainingConfig) -> float:
    """The profiler's record of every allocation over two optimizer steps."""
    workload = load_workload(spec)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run = prepare(workload, config, device="cpu")
        for step in range(2):
            batch = workload.make_batch(config.micro_batch * run.accumulation, step)
            divisor = run.loss_divisor(batch)
            total = count = torch.zeros(())
            for number, micro in enumerate(split_batch(batch, config.micro_batch), start=1):
                a, b = run.micro_step(micro, divisor, sync=number == run.accumulation)
                total, count = total + a, count + b
            run.optimizer_step(total, count, divisor)
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return float(peak)


@pytest.mark.parametrize(
    "knobs",
    RUN,
    ids=lambda knobs: " ".join(f"{k}={v}" for k, v in knobs.items()),
)
def test_live_bytes_are_those_of_the_real_run(
    spec: WorkloadSpec, traced: ModelProfile, knobs: dict[str, object]
) -> None:
    config = TrainingConfig.model_validate(knobs)
    candidates = from_configs([config], GLOBAL_BATCH, device="cpu", num_blocks=traced.num_blocks)
    keys = [candidates.variants[int(code[0])] for code in (candidates.variant, candidates.full_variant)]
    plain, full = (traced.variants[key.text()] for key in keys)
    predicted = float(traced_memory(plain, full, traced, candidates).live[0])
    assert predicted == pytest.approx(live_bytes(spec, config), rel=0.10)


class Tiny(nn.Module):
    """Two linear layers, the first frozen; `branch` makes the forward depend on the data."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.first.requires_grad_(False)
        self.second = nn.Linear(32, 4)
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.branch and hidden.sum().item() > 0:
            hidden = hidden * 2
        return self.second(hidden)


def tiny_workload(branch: bool) -> Workload:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        logits = model(batch["x"])
        return LossSum(F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]))

    def make_batch(count: int, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.rand(count, 16, generator=generator), "y": torch.zeros(count, dtype=torch.long)}

    return Workload(
        name="tiny",
        build_model=lambda: Tiny(branch),
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
    )


def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    found = profile_workload(tiny_workload(branch=False), "cpu", identity="tiny")
    assert found.trainable == 32 * 4 + 4
    assert found.parameters == found.trainable + 16 * 32 + 32
    assert found.optimizer_state_bytes_per_parameter == 0.0
    assert found.num_blocks == 0
    assert all(variant.key.checkpointing == "none" for variant in found.variants.values())


def test_a_parameter_that_no_backward_reaches_is_seen() -> None:
    def build_with_pooler() -> nn.Module:
        model = Tiny(branch=False)
        model.pooler = nn.Linear(4, 4)
        return model

    request = TraceRequest(variants=(VariantKey(),))
    whole = tiny_workload(branch=False)
    for workload in (whole, dataclasses.replace(whole, build_model=build_with_pooler)):
        found = profile_workload(workload, "cpu", identity="tiny", request=request)
        assert found.unused_parameters is (workload is not whole)


def test_a_forward_that_asks_for_values_is_run_for_real_and_says_so() -> None:
    request = TraceRequest(variants=(VariantKey(),))
    found = profile_workload(tiny_workload(branch=True), "cpu", identity="tiny", request=request)
    assert found.method == "measured_block"
    assert "_local_scalar_dense" in found.notes[0] and "for real" in found.notes[0]
    assert found.variants[VariantKey().text()].groups


def test_a_damaged_cache_is_no_profile(spec: WorkloadSpec, traced: ModelProfile, tmp_path: Path) -> None:
    path = cache_path(spec, "cpu", tmp_path)
    _write_cache(path, traced)
    assert _read_cache(path) == traced
    path.write_text(path.read_text()[:-100])
    assert _read_cache(path) is None


def test_operations_are_timed_when_there_is_time_for_it() -> None:
    request = TraceRequest(variants=(VariantKey(),), timing_budget_s=30.0)
    found = profile_workload(tiny_workload(branch=False), "cpu", identity="tiny", request=request)
    groups = found.variants[VariantKey().text()].groups
    timed = [group for group in groups if group.measured_s is not None]
    assert len(timed) > 0.8 * len(groups)
    assert all(group.measured_s > 0 for group in timed if group.measured_s is not None)


def test_the_fused_loss_holds_the_logits_of_one_chunk_and_its_parts_are_marked() -> None:
    """What a chunk left until the next had its own made the peak grow with the rows: 9 GiB too much for a GPT-2."""
    classes, width, rows = 4096, 4, 8

    def recorded(chunks: int) -> OpRecorder:
        recorder = OpRecorder()
        hidden, targets = torch.randn(chunks * rows, width), torch.zeros(chunks * rows, dtype=torch.long)
        with limit_chunk_rows(rows), watch_loss_of_logits(recorder.mark_fused_loss), recorder:
            precomputed_cross_entropy(hidden, torch.randn(classes, width), None, targets, dtype=torch.float32)
        return recorder

    one, four = recorded(1), recorded(4)
    logits = rows * classes * 4
    grown = four.recording.peaks["forward"][0] - one.recording.peaks["forward"][0]
    assert one.recording.peaks["forward"][0] > logits > 10 * grown
    marked = [operation.name.startswith(IN_FUSED_LOSS) for operation in four.recording.operations]
    products = [operation.kind == "matmul" for operation in four.recording.operations]
    assert sum(marked) > 4 * 4 and not any(m and p for m, p in zip(marked, products, strict=True))


@pytest.mark.parametrize(("small", "large"), [(10, 25), (10, 40), (30, 20), (0, 9), (0, 0)])
def test_no_figure_is_predicted_below_zero(small: float, large: float) -> None:
    """Of batches of 2 and 5 samples whose lengths differ; the larger is more like those of a training."""
    line = fit_line(small, large, (2, 5))
    assert line.at(5) == pytest.approx(large) and min(line.at(n) for n in (1, 2, 8, 1000)) >= 0
    if (small, large) == (10, 25):
        assert line.at(2) == pytest.approx(small)


def test_a_model_of_ragged_batches_is_predicted_to_take_some_time() -> None:
    """Lengths come in pairs of short and long: two samples looked as if one took less than no time."""
    lengths = (3, 3, 40, 40, 5)

    def make_batch(samples: int, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(samples, max(lengths[:samples]), 8)}

    workload = Workload(
        name="ragged",
        build_model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda model, batch: LossSum(model(batch["x"]).square().sum(), torch.tensor(len(batch["x"]))),
        make_batch=make_batch,
        global_batch=8,
    )
    request = TraceRequest(variants=(VariantKey(),))
    found = profile_workload(workload, "cpu", identity="ragged", request=request)
    for group in found.variants[VariantKey().text()].groups:
        assert group.flops.at(1) >= 0 and group.bytes_moved.at(1) > 0, group


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU, nn.LSTM])
def test_what_an_rnn_does_is_marked_in_the_backward_too(make: type[nn.RNNBase]) -> None:
    """The compiler leaves these modules as they are: the search took a GRU's compilation to save two thirds."""
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "rnn": make(4, 4, num_layers=2, batch_first=True)})
    rnn_alone, recorder = OpRecorder(), OpRecorder()
    x = torch.randn(2, 3, 4)
    rnn_alone.mark_rnns(model)
    with rnn_alone:
        model["rnn"](x)[0].square().sum().backward()
    recorder.mark_rnns(model)
    with recorder:
        model["rnn"](model["first"](x))[0].square().sum().backward()
    for recording in (rnn_alone.recording, recorder.recording):
        for phase in ("forward", "backward"):
            names = [operation.name for operation in recording.operations if operation.phase == phase]
            marked = [name for name in names if name.startswith(IN_RNN)]
            assert 2 <= len(marked) < len(names), names
    products = [one for one in recorder.recording.operations if one.kind == "matmul" and one.phase == "backward"]
    marks = [one.name.startswith(IN_RNN) for one in products]
    assert not all(marks), "those of the linear layer are not its"
    assert any(marks) or make is nn.LSTM, "which is one operation here"


def test_an_operator_that_takes_functions_is_one_operation() -> None:
    """torch asks a mode for it, and raised an error for a program that trains."""
    from torch.nn.attention.flex_attention import flex_attention

    x = torch.randn(4)
    query, key, value = (torch.randn(1, heads, 128, 16) for heads in (4, 2, 2))
    with OpRecorder() as recorder:
        torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        flex_attention(query, key, value, enable_gqa=True)
    found = {operation.name: operation for operation in recorder.recording.operations}
    branch, attention = found["cond"], found["flex_attention"]
    assert (branch.kind, branch.output_bytes, branch.call) == ("memory", 16, None)
    assert (attention.kind, attention.flops, attention.call) == ("attention", 4 * 4 * 128 * 128 * 16, None)
    assert attention.output_bytes > 4 * query.numel()


def test_sparse_and_nested_tensors_are_recorded() -> None:
    """They have no strides, or no sizes: what takes them is not run by itself, and counts by its bytes."""
    x, y = torch.eye(8), torch.randn(8, 4)
    rows = [torch.randn(2, 8), torch.randn(3, 8)]
    with OpRecorder() as recorder:
        x.to_sparse_csr() @ y
        torch.nested.nested_tensor(rows) * 2
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        torch.nn.functional.linear(jagged, y.mT).values().sum().backward()
    product = next(operation for operation in recorder.recording.operations if operation.output_bytes == 8 * 4 * 4)
    doubled = next(operation for operation in recorder.recording.operations if operation.name == "mul")
    for operation in (product, doubled):
        assert (operation.kind, operation.flops, operation.call) == ("memory", 0.0, None)
    assert product.bytes_moved == 2 * 8 * 4 * 4
