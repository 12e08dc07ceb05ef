"""How fast batches are made: what is timed, what a failure reports, how many workers a step needs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.planner.trace.input_benchmark import (
    MAX_BATCHES,
    MAX_SAMPLES,
    describe_input,
    measure_input,
    workers_needed,
)
from autoplan.strategies.workloads.workload import LossSum, Workload


def workload_of(make_batch: Any, global_batch: int = 8) -> Workload:
    return Workload(
        name="data",
        build_model=lambda: nn.Linear(2, 2),
        make_batch=make_batch,
        loss=lambda model, batch: LossSum(model(batch["x"]).sum(), len(batch["x"])),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=global_batch,
    )


def test_seconds_are_per_sample_and_measured_on_one_thread() -> None:
    asked: list[tuple[int, int, int]] = []

    def make_batch(count: int, index: int) -> dict[str, torch.Tensor]:
        asked.append((count, index, torch.get_num_threads()))
        time.sleep(0.003 * count)
        return {"x": torch.zeros(count, 2)}

    before = torch.get_num_threads()
    seconds, why_not = measure_input(workload_of(make_batch), time_limit_s=5.0)
    assert why_not is None and seconds is not None and seconds >= 0.003
    assert {threads for _, _, threads in asked} == {1} and torch.get_num_threads() == before
    assert asked[0][0] == 2 and len(asked) == 1 + MAX_BATCHES and {count for count, _, _ in asked[1:]} == {8}


def test_quick_data_is_timed_in_batches_of_a_bounded_size() -> None:
    counts: list[int] = []

    def make_batch(count: int, index: int) -> dict[str, torch.Tensor]:
        counts.append(count)
        return {"x": torch.zeros(count, 2)}

    measure_input(workload_of(make_batch, global_batch=4096), time_limit_s=5.0)
    assert max(counts) == MAX_SAMPLES


def test_slow_data_ends_with_the_time_limit() -> None:
    counts: list[int] = []

    def make_batch(count: int, index: int) -> dict[str, torch.Tensor]:
        counts.append(count)
        time.sleep(0.05)
        return {"x": torch.zeros(count, 2)}

    seconds, _ = measure_input(workload_of(make_batch), time_limit_s=0.04)
    assert counts == [2] and seconds is not None and seconds >= 0.025


def test_a_failure_is_a_reason_and_not_the_end() -> None:
    def make_batch(count: int, index: int) -> dict[str, torch.Tensor]:
        raise FileNotFoundError("shard 7")

    assert measure_input(workload_of(make_batch)) == (
        None,
        "data loading is not estimated: make_batch raised FileNotFoundError: shard 7",
    )


@pytest.mark.parametrize("load_s, step_s, workers", [(0.32, 0.1, 4), (0.3, 0.1001, 3), (0.05, 0.1, 1), (0.1, 0.1, 1)])
def test_as_many_workers_as_the_data_takes_steps(load_s: float, step_s: float, workers: int) -> None:
    assert workers_needed(load_s, step_s) == workers


def test_the_sentence_says_what_matters_and_no_more() -> None:
    assert describe_input(0.001, 0.1, 16) is None
    hidden = describe_input(0.05, 0.1, 16)
    assert (
        hidden is not None and "one loader worker beside the training is fast enough" in hidden and "150 ms" in hidden
    )
    bound = describe_input(0.32, 0.1, 16)
    assert bound is not None and "Data loading is the bottleneck" in bound
    assert "makes 50.0 samples/s, the steps use 160; 4 workers, each" in bound and "420 ms" in bound
    shared = describe_input(0.32, 0.1, 16, ranks=2)
    assert shared is not None and "one loader worker per rank makes 100 samples/s, the steps use 320" in shared
    assert "4 workers per rank" in shared and "on each of 2 data-parallel ranks" in shared
