"""What is timed is what the names say, and one operation cannot spoil the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autoplan.probes.operations import (
    LARGEST_BUFFER_BYTES,
    attention_operations,
    bandwidth_operations,
    float8_operations,
    linear_train_operations,
    matmul,
    matmul_operations,
    thread_operations,
    transfer_operations,
)
from autoplan.probes.timing import (
    TORCH_DTYPES,
    Operation,
    Rates,
    Timing,
    device_answers,
    filled,
    measure_operations,
    probe_launch,
    summarise,
)
from autoplan.probes.worker import ProbeRequest, probe_devices

CPU = torch.device("cpu")
LIMITS = {"cap_s": 0.02, "memory_limit_bytes": 1e9}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_operation(
    build: Callable[[], Callable[[], object]],
    *,
    work: float = 1.0,
    memory_bytes: int = 0,
    kind: str = "x",
    dtype: str = "float32",
    size: int = 1,
) -> Operation:
    return Operation(
        kind=kind, dtype=dtype, shape=(size,), work=work, unit="flop/s", memory_bytes=memory_bytes, build=build
    )


def measure(operations: list[Operation], **changes: object) -> tuple[list[str], list[str]]:
    options: dict[str, object] = {"limit_s": 5.0} | LIMITS | changes
    readings, notes = measure_operations(operations, device=CPU, **options)  # type: ignore[arg-type]
    return [reading.kind for reading in readings], notes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_product_is_that_of_a_linear_layer(dtype: str) -> None:
    (operation,) = matmul_operations(CPU, (dtype,), ((3, 5, 7),))
    y = operation.build()()
    assert isinstance(y, torch.Tensor)
    assert y.shape == (3, 5) and y.dtype == TORCH_DTYPES[dtype]
    assert operation.work == 2 * 3 * 5 * 7


def test_the_product_in_8_bits_is_that_of_a_linear_layer() -> None:
    """torch._scaled_mm runs on a CPU too, slowly: what is timed on a GPU is shown to be the product."""
    operation = matmul(CPU, "float8", (32, 16, 48))
    y = operation.build()()
    assert isinstance(y, torch.Tensor)
    assert y.shape == (32, 16) and y.dtype == torch.bfloat16 and operation.work == 2 * 32 * 16 * 48
    assert not list(float8_operations(CPU, ((32, 16, 48),))), "a search on a CPU does not time it"


@pytest.mark.parametrize(("capability", "shapes"), [((8, 0), []), ((8, 9), [(64, 64, 64), (32, 16, 48)])])
def test_8_bits_are_timed_where_the_chip_multiplies_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shapes: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = float8_operations(torch.device("cuda"), ((32, 16, 48), (8192, 50257, 768), (64, 64, 64)))
    assert [operation.shape for operation in found] == shapes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_linear_train_is_forward_and_backward_with_float32_weights(dtype: str) -> None:
    (operation,) = linear_train_operations(CPU, (dtype,), ((16, 8, 32),))
    gradients = operation.build()()
    assert isinstance(gradients, tuple)
    assert [tuple(g.shape) for g in gradients] == [(16, 32), (8, 32)]
    assert all(g.dtype == torch.float32 and g.abs().sum() > 0 for g in gradients)
    assert operation.work == 6 * 16 * 8 * 32


def test_both_attentions_compute_the_same_causal_gradients() -> None:
    fused, eager = attention_operations(CPU, ("float32",), ((2, 3, 17, 8),))
    assert (fused.kind, eager.kind) == ("sdpa_train", "eager_attention_train")
    assert fused.work == eager.work == 6 * 2 * 3 * 17 * 17 * 8
    torch.manual_seed(1)
    first = fused.build()()
    torch.manual_seed(1)
    second = eager.build()()
    assert isinstance(first, tuple) and isinstance(second, tuple)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_bandwidth_buffers_are_larger_than_the_cache_within_bounds() -> None:
    touch, copy, add = bandwidth_operations(CPU, cache_bytes=1 << 20)
    assert copy.work == 2 * 128 * 2**20 and add.work == 3 * 128 * 2**20
    assert touch.kind == "first_touch" and touch.work == touch.memory_bytes > 32 * 2**20  # what glibc maps anew
    _, copy, _ = bandwidth_operations(CPU, cache_bytes=40 << 20)
    assert copy.shape == (160 * 2**20 // 4,)
    _, copy, _ = bandwidth_operations(CPU, cache_bytes=1 << 40)
    assert copy.shape == (LARGEST_BUFFER_BYTES // 4,)
    assert list(transfer_operations(CPU)) == []


def test_threads_are_set_for_one_operation_and_put_back() -> None:
    seen: list[int] = []

    def build() -> Callable[[], object]:
        return lambda: seen.append(torch.get_num_threads())

    source = next(iter(thread_operations(CPU, (2,))))
    assert source.threads == 2 and source.shape[-1] == 2
    operation = Operation(
        kind="x", dtype="float32", shape=(1,), work=1, unit="flop/s", memory_bytes=0, build=build, threads=2
    )
    measure([operation])
    assert set(seen) == {2} and torch.get_num_threads() == 1


def test_tf32_is_switched_on_for_its_operation_only() -> None:
    seen: list[str] = []

    def build() -> Callable[[], object]:
        return lambda: seen.append(torch.get_float32_matmul_precision())

    for dtype in ("tf32", "float32"):
        operation = Operation(kind="x", dtype=dtype, shape=(1,), work=1, unit="flop/s", memory_bytes=0, build=build)
        measure([operation])
    assert list(dict.fromkeys(seen)) == ["high", "highest"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_lower_quartile_and_spread() -> None:
    timing = summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.seconds == 2.0 and timing.spread == pytest.approx(2 / 3)
    assert summarise([2.0, 1.0]).seconds == 1.0 and summarise([1.0, 2.0]).spread is None


@pytest.mark.timing
def test_the_first_call_is_not_counted() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        if len(calls) == 1:
            sum(math.sin(i) for i in range(300_000))  # setting up: tens of milliseconds

    (reading,), _ = measure_operations([make_operation(lambda: call)], device=CPU, limit_s=5.0, **LIMITS)
    assert reading.seconds.value is not None and reading.seconds.value < 0.005


def test_an_operation_that_fails_is_left_out_with_the_reason() -> None:
    def broken() -> Callable[[], object]:
        raise RuntimeError('"addmm" not implemented for this dtype\nmore text')

    kinds, notes = measure([make_operation(broken, kind="broken"), make_operation(lambda: lambda: None, kind="fine")])
    assert kinds == ["fine"]
    assert len(notes) == 1 and "not implemented for this dtype" in notes[0] and "more text" not in notes[0]


def test_an_operation_that_ends_the_device_is_raised_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Callable[[], object]:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def refuse(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    cuda = torch.device("cuda")
    assert device_answers(CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)  # the driver's answers
    operations = [make_operation(broken, kind="broken")]
    assert len(measure_operations(operations, device=cuda, limit_s=5.0, **LIMITS)[1]) == 1
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    assert not device_answers(cuda)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        measure_operations(operations, device=cuda, limit_s=5.0, **LIMITS)


def test_an_operation_that_cannot_fit_is_not_built() -> None:
    def build() -> Callable[[], object]:
        raise AssertionError("built")

    kinds, notes = measure([make_operation(build, memory_bytes=2**40)])
    assert kinds == [] and "1024.0 GiB" in notes[0]


def test_a_slow_dtype_is_not_measured_at_larger_sizes() -> None:
    slow = make_operation(lambda: lambda: sum(range(100_000)), work=1e3)
    larger = make_operation(lambda: lambda: None, work=1e9, size=2)
    of_another_kind = make_operation(lambda: lambda: None, work=1e9, kind="other", size=3)
    of_another_dtype = make_operation(lambda: lambda: None, work=1e9, dtype="bfloat16", kind="fine", size=4)
    kinds, notes = measure([slow, larger, of_another_kind, of_another_dtype])
    assert kinds == ["x", "fine"]
    assert len(notes) == 2 and all("what was measured before" in note for note in notes)


def test_a_kind_that_was_slow_once_is_tried_again_where_the_dtype_is_fast() -> None:
    rates = Rates()
    fast = make_operation(lambda: lambda: None, work=1e9, kind="matmul")
    slow = make_operation(lambda: lambda: None, work=1e9, kind="train")
    for operation, seconds in ((fast, 0.001), (slow, 0.3)):
        rates.learn(operation, Timing(seconds=seconds, fastest_s=seconds, spread=None, samples=1))
    assert rates.expected_s(slow) == pytest.approx(0.3 / 4)
    assert rates.expected_s(fast) == pytest.approx(0.001)
    assert rates.expected_s(make_operation(lambda: lambda: None, dtype="float16")) == 0


def test_operations_of_one_shape_take_turns() -> None:
    order: list[str] = []

    def recorder(name: str) -> Callable[[], Callable[[], object]]:
        def call() -> None:
            order.append(name)
            time.sleep(0.003)  # longer than the least sample: one call each

        return lambda: call

    operations = [make_operation(recorder(name), kind=name) for name in ("a", "b")]
    kinds, _ = measure(operations)
    assert kinds == ["a", "b"]
    turns = "".join(order[4:])  # after two calls each to warm up
    assert turns[:4] == "abab"


def test_operations_that_do_not_fit_together_are_measured_one_by_one() -> None:
    held: list[str] = []

    def builder(name: str) -> Callable[[], Callable[[], object]]:
        def build() -> Callable[[], object]:
            held.append(name)
            return lambda: held.append(name)

        return build

    operations = [make_operation(builder(name), kind=name, memory_bytes=600) for name in ("a", "b")]
    kinds, notes = measure(operations, memory_limit_bytes=1000)
    assert kinds == ["a", "b"] and notes == []
    assert "".join(held).lstrip("a") == "b" * held.count("b"), "b is built after a is done"


def test_when_the_time_is_over_the_rest_is_left_out() -> None:
    kinds, notes = measure([make_operation(lambda: lambda: None)], limit_s=0.0)
    assert kinds == [] and len(notes) == 1 and "time for the probes was over" in notes[0]


def test_filled_has_the_shape_and_no_nonfinite_numbers() -> None:
    x = filled((300, 500), torch.float16, CPU)
    assert x.shape == (300, 500) and x.dtype == torch.float16 and bool(torch.isfinite(x).all()) and x.std() > 0.5


def test_launch_cost_is_measured() -> None:
    reading = probe_launch(CPU, repeats=3)
    assert reading.value is not None and 0 < reading.value < 1


class Written:
    """A rank's context that records its calls."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.results: list[Any] = []
        self.phase, self.report = self.phases.append, self.results.append

    def heartbeat(self, **facts: object) -> None: ...


def test_each_series_is_written_as_soon_as_it_is_there() -> None:
    context: Any = Written()
    request = ProbeRequest(type="cpu", index=0, budget_s=0.5, threads=1, memory_limit_bytes=64e6)
    (result,) = probe_devices(context, [request])
    assert context.phases == ["cpu:0"]
    assert len(context.results) == 6 and context.results[-1] == [result]
    assert [found.complete for (found,) in context.results] == [False] * 5 + [True]
    counts = [len(found.operations) for (found,) in context.results]
    assert counts == sorted(counts) and counts[-1] > 0
    assert any("GiB" in note for note in result.notes), "bandwidth buffers do not fit in 64 MB"
    rate, seconds = result.operations[0].rate, result.operations[0].seconds
    assert (rate.value or 0) * (seconds.value or 0) == pytest.approx(2 * math.prod(result.operations[0].shape))
    assert rate.provenance == "measured" and rate.unit == "flop/s"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured() -> None:
    context: Any = Written()
    request = ProbeRequest(type="cuda", index=0, budget_s=5.0, threads=1)
    (result,) = probe_devices(context, [request])
    kinds = {operation.kind for operation in result.operations}
    assert {"matmul", "linear_train", "copy", "sdpa_train", "host_to_device_pinned"} <= kinds
