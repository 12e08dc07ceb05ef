"""The roofline: kinds, FLOPs and bytes of a trace, and which bound needs most time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autoplan.planner.diagnose.records import Diagnosis, Operations, Rates
from autoplan.planner.diagnose.roofline import (
    device_s,
    find_scores,
    fp32_is_exact,
    fused_attention_s,
    kind_of,
    measure_rates,
    read_operations,
    without_shapes,
)
from autoplan.planner.records.trials import Interval
from autoplan.report.diagnosis import document, operation_rows

RATES = Rates(flops_per_s={"float32": 1e9}, bytes_per_s=1e9, launch_s=1e-6)


def event(name: str, ts: float, us: float, *shapes: object, cat: str = "cpu_op", external: int = -1) -> dict[str, Any]:
    """A complete event of a trace, with inputs in fp32."""
    arguments = {"Input Dims": list(shapes), "Input type": ["float"] * len(shapes), "External id": external}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": us, "args": arguments}


def read(*events: dict[str, Any], whole_s: float = 0.1) -> dict[str, Operations]:
    return {one.kind: one for one in read_operations({"traceEvents": list(events)}, 1, whole_s, RATES)}


def test_each_kind_has_the_bound_that_needs_most_time() -> None:
    found = read(
        event("aten::linear", 0, 4000, [100, 100], [100, 100], [100]),
        event("aten::addmm", 0, 4000, [100], [100, 100], [100, 100]),
        event("aten::add", 5000, 24_000, [1_000_000], [1_000_000]),
        *(event("aten::sum", 40_000 + 20 * n, 10, [4]) for n in range(100)),
        event("Optimizer.step#SGD.step", 50_000, 3000, cat="user_annotation"),
        event("aten::add_", 50_500, 1000, [1000], [1000]),
    )
    products, sums = found["matrix products"], found["reductions"]
    assert products.calls == 1 and products.seconds == pytest.approx(4e-3) and products.bound == "compute"
    assert products.of_rate == pytest.approx(0.5)  # 2e6 FLOP at 1e9 in 2 ms
    assert found["elementwise"].bound == "memory"
    assert found["elementwise"].of_rate == pytest.approx(0.5)  # 12 MB in 12 ms
    assert sums.bound == "launch" and sums.calls == 100 and sums.of_rate == pytest.approx(0.1)
    assert found["optimizer"].seconds == pytest.approx(1e-3)
    *_, between = found
    assert between == "between operations" and sum(one.share for one in found.values()) == pytest.approx(1.0)


def attention_by_hand(*, inside: str | None = None) -> list[dict[str, Any]]:
    """Of 2 x 4 heads with 96 queries and keys of 16 numbers; `inside`: what calls all of it."""
    scores, flat, queries = [2, 4, 96, 96], [8, 96, 96], [8, 96, 16]
    calls = [
        event("aten::bmm", 10, 100, queries, [8, 16, 96]),
        event("aten::div", 200, 10, scores, []),
        event("aten::softmax", 300, 30, scores),
        event("aten::_softmax", 305, 20, scores),
        event("aten::bmm", 400, 100, flat, queries),
        event("aten::_softmax_backward_data", 600, 40, scores, scores),
    ]
    return calls if inside is None else [event(inside, 0, 1000, [2, 4, 96, 16]), *calls]


def test_attention_in_single_operations_is_all_that_works_on_its_scores() -> None:
    others = [
        event("aten::add", 2000, 500, [2, 4, 96, 16], [2, 4, 96, 16]),
        event("aten::_softmax", 3000, 50, [4, 96, 1000]),  # over classes: no batched product made it
        event("aten::mm", 4000, 50, [384, 64], [64, 1000]),
    ]
    (found,) = find_scores({"traceEvents": [*attention_by_hand(), *others]})
    assert (found.shape, found.head_dim, found.calls, found.dtype) == ((2, 4, 96, 96), 16, 1, "float32")
    assert found.seconds == pytest.approx((100 + 10 + 30 + 100 + 40) / 1e6)
    assert not (found.dropout or found.bias)
    assert find_scores({"traceEvents": attention_by_hand(inside="aten::scaled_dot_product_attention")}) == []
    assert find_scores({"traceEvents": others}) == []
    more = [
        event("aten::add", 700, 5, [2, 4, 96, 96], [1, 1, 96, 96], []),
        event("aten::native_dropout", 800, 5, [2, 4, 96, 96], [], []),
    ]
    (with_both,) = find_scores({"traceEvents": [*attention_by_hand(), *more]})
    assert with_both.dropout and with_both.bias and (fused_attention_s(with_both, "cpu") or 0) > 0
    fused_s = fused_attention_s(found, "cpu")
    assert fused_s is not None and 0 < fused_s < 1


def test_on_a_gpu_the_time_is_that_of_the_kernels() -> None:
    found = read(
        event("aten::mm", 0, 5, [100, 100], [100, 100], external=7),
        event("gemm", 3, 4000, cat="kernel", external=7),
        whole_s=0.01,
    )
    assert found["matrix products"].seconds == pytest.approx(4e-3)
    assert found["device idle"].share == pytest.approx(0.6)


def test_on_a_gpu_shares_are_of_steps_that_were_not_traced() -> None:
    """Tracing makes the host slower: 10 ms, of which kernels fill 5, where the step takes 6."""
    events = (
        event("aten::mm", 0, 5, [100, 100], [100, 100], external=7),
        event("gemm", 3, 4000, cat="kernel", external=7),
        event("gemm", 1003, 4000, cat="kernel", external=7),  # beside it, in another stream
        event("copy", 9000, 0, cat="gpu_memcpy", external=8),
    )
    found = {one.kind: one for one in read_operations({"traceEvents": list(events)}, 1, 0.01, RATES, plain_s=0.006)}
    idle = found["device idle"]
    assert idle.share == pytest.approx(1 / 6) and idle.seconds == pytest.approx(1e-3)
    assert idle.seconds / idle.share - idle.seconds == pytest.approx(5e-3)
    found = {one.kind: one for one in read_operations({"traceEvents": list(events)}, 1, 0.01, RATES, plain_s=0.004)}
    assert found["device idle"].share == 0


def test_kernels_of_a_graph_that_no_operation_launched_are_no_idle_time() -> None:
    found = read(
        event("aten::copy_", 0, 5, [10], [10], external=7),
        event("Memcpy", 3, 1000, cat="gpu_memcpy", external=7),
        event("gemm", 2000, 5000, cat="kernel", external=99),
        whole_s=0.01,
    )
    assert found["other"].share == pytest.approx(0.5) and found["device idle"].share == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::native_layer_norm_backward", "norm"),
        ("aten::normal_", "elementwise"),
        ("aten::_log_softmax", "softmax and loss"),
        ("aten::embedding_dense_backward", "indexing"),
        ("aten::t", "views"),
        ("aten::tanh", "elementwise"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::baddbmm", "matrix products"),
        ("aten::copy_", "copies"),
    ],
)
def test_the_kind_of_an_operation(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def traced(step: Callable[[], object], folder: Path) -> dict[str, Any]:
    """A step's trace with shapes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return json.loads((folder / "trace.json").read_text())


def test_flops_of_a_real_step_are_those_of_torchs_counter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 16))
    inputs = torch.randn(4, 3, 16, 16, requires_grad=True)

    def step() -> None:
        model(inputs).square().mean().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    found = read_operations(traced(step, tmp_path), 1, 1.0, RATES)
    total = sum(one.flops_per_s * one.seconds for one in found if one.flops_per_s)
    assert total == pytest.approx(counter.get_total_flops(), rel=1e-3)
    by_kind = {one.kind: one for one in found}
    assert by_kind["convolution"].bound == by_kind["matrix products"].bound == "compute"


def test_the_time_of_a_device_counts_once_where_streams_work_together() -> None:
    kernels = [event("gemm", 0, 3000, cat="kernel"), event("copy", 2000, 2000, cat="gpu_memcpy")]
    assert device_s({"traceEvents": [*kernels, event("aten::mm", 0, 9000)]}) == pytest.approx(4e-3)
    assert device_s({"traceEvents": [event("aten::mm", 0, 9000)]}) == 0.0


def test_a_fused_optimizer_and_attention_are_read_from_a_real_trace(tmp_path: Path) -> None:
    query = torch.randn(2, 4, 64, 16, requires_grad=True)
    weight = nn.Parameter(torch.randn(1000, 100))
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step() -> None:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    step()
    found = {one.kind: one for one in read_operations(traced(step, tmp_path), 1, 1.0, RATES)}
    attention, fused = found["attention"], found["optimizer"]
    assert (attention.flops_per_s or 0) * attention.seconds == pytest.approx(6.0 * 2 * 4 * 64 * 64 * 16)
    assert (fused.bytes_per_s or 0) * fused.seconds == pytest.approx(7 * 400_000, rel=0.1)


def test_a_trace_for_perfetto_has_no_shapes() -> None:
    trace = {"schemaVersion": 1, "traceEvents": [event("aten::mm", 0, 5, [1, 2]), {"ph": "M", "name": "x"}]}
    kept = without_shapes(trace)
    assert kept["schemaVersion"] == 1 and kept["traceEvents"][0]["args"] == {"External id": -1}
    assert trace["traceEvents"][0]["args"]["Input Dims"] == [[1, 2]]  # type: ignore[index]


@pytest.mark.parametrize("how", ["allow_tf32", "fp32_precision", "high"])
def test_a_script_that_has_tf32_already_is_read(how: str) -> None:
    matmul = torch.backends.cuda.matmul
    assert fp32_is_exact()
    try:
        if how == "high":
            torch.set_float32_matmul_precision(how)
        else:
            setattr(matmul, how, True if how == "allow_tf32" else "tf32")
        assert not fp32_is_exact()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert fp32_is_exact()


def test_rates_are_measured_and_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(1)
    first = torch.rand(1)
    torch.manual_seed(1)
    rates = measure_rates("cpu", ["float32", "float64"])
    assert torch.rand(1) == first
    assert set(rates.flops_per_s) == {"float32", "float64"} and all(rate > 0 for rate in rates.flops_per_s.values())
    assert rates.bytes_per_s is not None and rates.bytes_per_s > 0 and rates.launch_s > 0


def test_the_screen_has_the_large_kinds_and_the_document_all() -> None:
    step = Interval(median=0.1, low=0.1, high=0.1, samples=9)
    kinds = (
        Operations(
            kind="matrix products", seconds=0.05, share=0.5, calls=12, flops_per_s=45e9, bound="compute", of_rate=0.62
        ),
        Operations(kind="elementwise", seconds=0.02, share=0.2, calls=3, bytes_per_s=9e9, bound="memory", of_rate=1.4),
        Operations(kind="norm", seconds=0.001, share=0.01, calls=2),
        Operations(kind="between operations", seconds=0.029, share=0.02),
    )
    found = Diagnosis(
        script="t.py", steps=9, step_s=step, parts=(), findings=(), tested=(), notes=(), seconds=1.0, operations=kinds
    )
    rows = operation_rows(found).rows
    assert [row[0] for row in rows] == ["matrix products", "elementwise", "between operations"]
    assert rows[0][1:] == ("50%", "12", "45.0 GFLOP/s", "", "compute (62%)")
    assert rows[1][-1] == "memory (140%, in caches)" and rows[2][2:] == ("", "", "", "")
    assert len(document(found)["operations"]) == 4
