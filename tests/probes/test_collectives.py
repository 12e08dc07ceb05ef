"""The collectives probe: its arithmetic, and a short real run of two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.probes.collectives import (
    OPERATIONS,
    bus_factor,
    fit_line,
    group_sizes,
    make_reading,
    measure_groups,
    probe_collectives,
)
from autoplan.processes import RankContext, Task, Zygote

SIZES = [4096 * 4**power for power in range(6)]


def entry(samples: list[tuple[int, float]], **fields: Any) -> dict[str, Any]:
    base = {"operation": "all_reduce", "backend": "gloo", "group_size": 4, "samples": samples, "spread": 0.1}
    return base | fields


def test_a_straight_line_is_found_again() -> None:
    latency, bandwidth = fit_line([(size, 50e-6 + size / 2e9) for size in SIZES])
    assert latency == pytest.approx(50e-6, rel=1e-6)
    assert bandwidth == pytest.approx(2e9, rel=1e-6)


def test_one_slow_large_message_does_not_hide_the_latency() -> None:
    samples = [(size, 50e-6 + size / 2e9) for size in SIZES]
    samples[-1] = (samples[-1][0], 3 * samples[-1][1])
    latency, _ = fit_line(samples)
    assert latency == pytest.approx(50e-6, rel=0.25)  # plain least squares would put it below zero


def test_neither_latency_nor_bandwidth_is_negative() -> None:
    latency, bandwidth = fit_line([(1000, 1e-6), (2000, 4e-6), (4000, 16e-6)])
    assert latency == 0.0 and bandwidth > 0
    latency, bandwidth = fit_line([(1000, 2e-6), (2000, 1e-6)])
    assert latency > 0 and bandwidth == float("inf")


def test_bus_bandwidth_is_as_nccl_tests_defines_it() -> None:
    assert bus_factor("all_reduce", 8) == pytest.approx(2 * 7 / 8)
    assert bus_factor("all_gather", 8) == bus_factor("reduce_scatter", 8) == bus_factor("all_to_all", 8) == 7 / 8
    assert bus_factor("send_recv", 2) == 1
    reading = make_reading(entry([(size, size / 1e9) for size in SIZES]))
    assert reading.algbw_bytes_per_s.value == pytest.approx(1e9)
    assert reading.busbw_bytes_per_s.value == pytest.approx(1.5e9)


def test_an_unknown_bandwidth_is_no_number() -> None:
    reading = make_reading(entry([(1000, 2e-6), (2000, 2e-6)]))
    assert reading.algbw_bytes_per_s.value is None and reading.algbw_bytes_per_s.reason


def test_groups_double_up_to_all_ranks() -> None:
    assert group_sizes(2) == (2,)
    assert group_sizes(6) == (2, 4, 6)
    assert group_sizes(8) == (2, 4, 8)


def without_all_to_all(context: RankContext, *args: Any) -> Any:
    import torch.distributed as dist

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Backend gloo does not support alltoall")

    dist.all_to_all_single = refuse
    return measure_groups(context, *args)


@pytest.fixture
def zygote(training_zygote: Zygote) -> Zygote:
    return training_zygote


def test_two_ranks_measure_every_collective(zygote: Zygote) -> None:
    readings, notes = probe_collectives(zygote, device="cpu", ranks=2, budget_s=3.0, sizes_bytes=(4096, 65536, 1048576))
    assert notes == ()
    assert {reading.operation for reading in readings} == set(OPERATIONS)
    for reading in readings:
        assert reading.group_size == 2 and reading.backend == "gloo"
        assert [size for size, _ in reading.samples] == [4096, 65536, 1048576]
        assert all(seconds > 0 for _, seconds in reading.samples)


def test_an_operation_that_the_backend_lacks_is_left_out_with_the_reason(zygote: Zygote) -> None:
    report = zygote.run(
        Task(
            target=without_all_to_all,
            args=("cpu", (4096, 16384, 65536), [([0, 1], OPERATIONS)], 2.0),
            ranks=2,
            deadlines_s={"*": 60.0},
            env={"OMP_NUM_THREADS": "1"},
        )
    )
    result = report.ranks[0].result
    assert [found["operation"] for found in result["entries"]] == [op for op in OPERATIONS if op != "all_to_all"]
    assert result["notes"] == ["gloo all_to_all over 2 ranks is left out: Backend gloo does not support alltoall"]


def test_one_rank_has_nothing_to_measure(zygote: Zygote) -> None:
    readings, notes = probe_collectives(zygote, device="cpu", ranks=1)
    assert readings == () and "two ranks" in notes[0]


def test_a_message_of_one_rank_alone_is_left_out(zygote: Zygote) -> None:
    """It would wait for another rank without end: with NCCL already where the communicator is made."""
    task = Task(target=measure_groups, args=("cpu", (4096,), [([0], OPERATIONS)], 1.0), deadlines_s={"*": 60.0})
    result = zygote.run(task).check().ranks[0].result
    assert "gloo send_recv over 1 ranks is left out: a message needs two ranks" in result["notes"]
    assert {found["operation"] for found in result["entries"]} >= {"all_reduce", "all_gather"}


@pytest.mark.cuda
def test_nccl_with_one_rank() -> None:
    """Where there is one GPU: the communicator is made and the collectives run."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with Zygote(preload=("torch",)) as started:
        report = started.run(
            Task(
                target=measure_groups,
                args=("cuda", (4096, 65536, 1048576), [([0], OPERATIONS)], 5.0),
                deadlines_s={"*": 120.0},
            )
        )
    assert {found["operation"] for found in report.ranks[0].result["entries"]} >= {"all_reduce", "all_gather"}
