"""Operations are timed on tensors of their recorded shapes, at two sizes, on memory that no recent run has touched."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from autoplan.planner.cost.traced.rates import MatmulFit, Rates
from autoplan.planner.cost.traced.step_time import discard_outlier_timings, measured_seconds
from autoplan.planner.trace import op_benchmark
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.planner.trace.linear_fit import group_key, timings_of
from autoplan.planner.trace.model_profile import (
    PLAIN,
    LinearFit,
    ModelProfile,
    OperationGroup,
    TraceRequest,
    VariantKey,
    VariantProfile,
)
from autoplan.planner.trace.op_benchmark import (
    OpRunner,
    OpTiming,
    TimingRequest,
    extrapolate_call,
    time_operations,
    without_dropout,
)
from autoplan.planner.trace.op_recorder import OpCall, TensorShape
from autoplan.planner.trace.variant_tracer import VariantTracer
from autoplan.strategies.workloads.workload import LossSum, Workload
from tests.strategies.tiny import language

ATEN = torch.ops.aten
NOTHING_SAVED: dict[str, Any] = {"block_saved_bytes": LinearFit(), "rest_saved_bytes": LinearFit()}
ONE: dict[str, Any] = {"segment": "block", "phase": "forward", "dtype": "float32", "count": 1}
PLAIN_PROFILE: dict[str, Any] = {
    "identity": "x",
    "method": "traced",
    "device": "cpu",
    "parameters": 1,
    "trainable": 1,
    "parameter_bytes": 4,
    "block_parameters": 1.0,
    "largest_unit_parameters": 1.0,
    "num_blocks": 1,
    "sequence_length": None,
}


def shape(*sizes: int) -> TensorShape:
    strides = [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]
    return TensorShape(sizes, tuple(strides), torch.float32)


def once(call: OpCall, flops: float = 1.0) -> TimingRequest:
    """Timed at one size."""
    return TimingRequest(small_batch=call, large_batch=None, count=1, flops=flops)


def product(samples: int) -> OpCall:
    return OpCall(ATEN.mm.default, (shape(64 * samples, 256), shape(256, 128)), {})


BROKEN = OpCall(ATEN.bmm.default, (shape(1, 2, 3), shape(1, 5, 7)), {})
TIMED = OperationGroup(
    **ONE | {"name": "mul", "kind": "memory"},
    bytes_moved=LinearFit(per_sample=100.0),
    measured_s=1.0,
    measured_samples=2,
    measured_more_s=10.0,
    measured_more_samples=16,
)


def test_an_operation_grows_by_the_sizes_that_differ() -> None:
    more = extrapolate_call(product(2), product(4), 8)
    assert more is not None
    assert more.arguments == product(16).arguments
    view = extrapolate_call(
        OpCall(ATEN.new_zeros.default, (shape(2, 5), [2, 5, 1]), {}),
        OpCall(ATEN.new_zeros.default, (shape(4, 5), [4, 5, 1]), {}),
        4,
    )
    assert view is not None and view.arguments == (shape(8, 5), [8, 5, 1])


def test_attention_with_dropout_is_timed_without_it() -> None:
    """With it, the kernel reads the seed in host memory, where a seed that is made up is an address of the GPU."""
    operands = [shape(1, 2, 8, 4)] * 4
    call = OpCall(
        ATEN._scaled_dot_product_efficient_attention_backward.default,
        (*operands, None, shape(1, 2, 8, 4), shape(1, 2, 8), shape(), shape(), 0.1, [True] * 3 + [False], True),
        {},
    )
    changed = without_dropout(call)
    assert changed.arguments == (*call.arguments[:9], 0.0, *call.arguments[10:])
    assert without_dropout(product(2)) == product(2)


def test_operations_that_differ_in_more_than_sizes_do_not_grow() -> None:
    other = OpCall(ATEN.mm.default, (shape(256, 256), shape(256, 128)), {"out": None})
    assert extrapolate_call(product(2), other, 4) is None
    assert extrapolate_call(product(2), OpCall(ATEN.mul.Tensor, product(4).arguments, {}), 4) is None


@pytest.mark.timing
def test_both_sizes_are_timed_and_the_larger_takes_longer() -> None:
    timing = TimingRequest(small_batch=product(2), large_batch=product(4), count=3, flops=2.0 * 128 * 256 * 128)
    timed = time_operations({"product": timing}, torch.device("cpu"), 5.0)["product"]
    assert timed.larger_factor == 8 and timed.larger_s is not None
    assert timed.larger_s > timed.seconds > 0


def test_what_does_not_grow_is_timed_once_and_what_cannot_run_is_left_out() -> None:
    found = time_operations({"batch": once(product(2)), "broken": once(BROKEN)}, torch.device("cpu"), 5.0)
    assert found["batch"].larger_s is None
    assert "broken" not in found


def test_the_timing_ends_with_a_note_where_the_device_runs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an assertion in a kernel: the device is asked, and one operation on a CPU fails for real."""
    monkeypatch.setattr(op_benchmark, "device_answers", lambda device: False)
    requests = {"broken": once(BROKEN, flops=1e-3), "sound": once(product(2))}
    notes: list[str] = []
    assert time_operations(requests, torch.device("cpu"), 5.0, notes) == {}
    assert len(notes) == 1 and "aten.bmm.default: RuntimeError: " in notes[0] and "ended early" in notes[0]
    monkeypatch.undo()
    assert set(time_operations(requests, torch.device("cpu"), 5.0, notes)) == {"sound"} and len(notes) == 1


@pytest.mark.timing
def test_an_operation_without_time_left_takes_seconds_in_proportion_to_its_kind() -> None:
    """A budget that the first of the kind uses up: the others have half and twice its work."""
    sizes = {"small": 1 << 20, "middle": 2 << 20, "large": 4 << 20}
    requests = {name: once(OpCall(ATEN.exp.default, (shape(size),), {}), flops=0.0) for name, size in sizes.items()}
    found = time_operations(requests, torch.device("cpu"), 1e-9)
    assert found == {}
    found = time_operations(requests, torch.device("cpu"), 0.002)  # time for the first; three times another is more
    assert set(found) == set(requests)
    assert found["small"].seconds == pytest.approx(found["large"].seconds / 4)


def test_between_two_timed_sizes_lies_a_line_and_beyond_them_proportion() -> None:
    found = measured_seconds(TIMED, np.array([1.0, 2.0, 9.0, 16.0, 32.0]))
    assert found == pytest.approx([0.5, 1.0, 5.5, 10.0, 20.0])


def test_an_operation_that_was_timed_in_the_forward_is_known_in_the_backward() -> None:
    """What a checkpointed block runs again; an operation of another size, or that was not timed, is not known."""
    again = TIMED.model_copy(update={"phase": "backward", "measured_s": None})
    larger = again.model_copy(update={"bytes_moved": LinearFit(per_sample=200.0)})
    untimed = again.model_copy(update={"name": "add"})
    variant = VariantProfile(key=VariantKey(), groups=(TIMED, untimed), kernels=2, peaks=(), **NOTHING_SAVED)
    profile = ModelProfile(**PLAIN_PROFILE, variants={VariantKey().text(): variant})
    found = timings_of(profile, [group_key(group) for group in (again, larger, untimed)])
    assert found == {group_key(again): OpTiming(seconds=1.0, larger_s=10.0, larger_factor=8)}


def test_what_was_only_scaled_is_timed_with_a_larger_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that take minutes, of a kind of which there is time for one."""
    monkeypatch.setattr(OpRunner, "time", lambda self, call, *, signed=False: 100.0)
    groups = {
        size: OperationGroup(**ONE | {"name": "exp", "kind": "memory"}, bytes_moved=LinearFit(per_sample=8.0 * size))
        for size in (1 << 20, 2 << 20, 4 << 20)
    }
    requests = {
        group_key(group): once(OpCall(ATEN.exp.default, (shape(size),), {}), flops=0.0)
        for size, group in groups.items()
    }
    tracer = VariantTracer(language(), "cpu", contextlib.nullcontext())
    tracer.timings = time_operations(requests, torch.device("cpu"), 5.0)
    timed = tuple(tracer.with_timing(group) for group in groups.values())
    assert [group.measured_s for group in timed] == [25.0, 50.0, 100.0]
    variant = VariantProfile(key=VariantKey(), groups=timed, kernels=3, peaks=(), **NOTHING_SAVED)
    profile = ModelProfile(**PLAIN_PROFILE, variants={VariantKey().text(): variant})
    known = timings_of(profile, requests)
    assert {key for key, one in known.items() if not one.scaled} == {group_key(groups[4 << 20])}
    found = time_operations(requests, torch.device("cpu"), 1000.0, known=known)
    assert {one.seconds for one in found.values()} == {100.0} and not any(one.scaled for one in found.values())


@pytest.mark.parametrize("budget_s", [5.0, 1e-9, 0.0])
def test_a_later_trace_runs_nothing_that_was_too_long_and_keeps_what_was_scaled(
    monkeypatch: pytest.MonkeyPatch, budget_s: float
) -> None:
    """The same with a whole trace, and another whose budget is as small, used up, or none (as after a crash)."""
    run: list[OpCall] = []

    def time_call(self: OpRunner, call: OpCall, *, signed: bool = False) -> float:
        run.append(call)
        return 100.0

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        total = model(batch["x"]).sum()
        for repeats in (1, 2, 4):
            total = total + batch["x"].repeat(1, repeats << 10).sin().sum()
        return LossSum(total, len(batch["x"]))

    def trace(budget_s: float, known: ModelProfile | None = None) -> ModelProfile:
        request = TraceRequest(variants=(PLAIN,), timing_budget_s=budget_s, known=known)
        return profile_workload(workload, "cpu", identity="slow", request=request)

    monkeypatch.setattr(OpRunner, "time", time_call)
    workload = Workload(
        name="slow",
        build_model=lambda: torch.nn.Linear(2, 2),
        make_batch=lambda count, index: {"x": torch.zeros(count, 2)},
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
    )
    first = trace(5.0)
    sines = [group.measured_s for group in first.variants[PLAIN.text()].groups if group.name == "sin"]
    assert sines == [25.0, 50.0, 100.0]
    run.clear()
    later = trace(budget_s, first)
    assert not run
    assert later.variants == first.variants


def test_what_is_known_by_another_of_its_kind_is_not_run_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation that was measured is in another variant, which is not traced now; a new one is larger still."""
    monkeypatch.setattr(OpRunner, "time", lambda self, call, *, signed=False: pytest.fail(f"{call} was run"))
    requests = {size: once(OpCall(ATEN.exp.default, (shape(size << 20),), {}), flops=0.0) for size in (1, 2)}
    known = {1: OpTiming(seconds=25.0, scaled=True)}
    found = time_operations(requests, torch.device("cpu"), 5.0, known=known)
    assert found == {1: known[1], 2: OpTiming(seconds=50.0, scaled=True)}


def test_times_that_a_busy_machine_disturbed_are_left_out() -> None:
    """Products that take ten times as long as the probe found: nothing that was timed with them is used."""
    fit = MatmulFit(coefficients=np.array([1e-11, 0.0, 0.0, 0.0, 0.0]))
    rates = Rates(
        device="cpu",
        matmul={"float32": fit},
        attention_flops_per_s={"float32": 1e11},
        memory_bytes_per_s=1e10,
        dispatch_s=1e-6,
    )
    for times, kept in ((1.5, True), (10.0, False)):
        product = OperationGroup(
            **ONE | {"name": "mm", "kind": "matmul"},
            flops=LinearFit(per_sample=2e9),
            m=LinearFit(per_sample=1000.0),
            n=LinearFit(fixed=1000.0),
            k=LinearFit(fixed=1000.0),
            measured_s=times * 2e9 * 1e-11,
            measured_samples=1,
        )
        key = VariantKey()
        variant = VariantProfile(key=key, groups=(product,), kernels=1, peaks=(), **NOTHING_SAVED)
        profile = ModelProfile(**PLAIN_PROFILE, variants={key.text(): variant})
        found = discard_outlier_timings(profile, rates)
        assert (found.variants[key.text()].groups[0].measured_s is not None) is kept
        assert bool(found.notes) is not kept


def test_an_allocator_that_keeps_memory_takes_no_new_pages() -> None:
    """In a process of its own: the setting lasts for the process's life."""
    import subprocess
    import sys

    script = """
import resource, torch
from autoplan.strategies.techniques.allocator import keep_freed_memory
def touch():
    held = [torch.empty(12 << 20).fill_(1.0) for _ in range(4)]  # 48 MiB each: past what glibc keeps by itself
def new_pages():
    for _ in range(8):  # where the C library puts what grows differs by process: some need six passes
        touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    touch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
own = new_pages()
assert keep_freed_memory()
print(own, new_pages())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    own, keep = map(int, done.stdout.split())
    assert own > 40_000  # 192 MiB in pages of 4 KiB, or nearly
    assert keep < 0.05 * own
