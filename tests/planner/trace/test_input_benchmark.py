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


@pytest.mark.parametrize(
    ("global_batch", "sample_s", "batch_s", "limit_s", "counts", "least_s"),
    [
        (8, 0.003, 0.0, 5.0, [2, *[8] * MAX_BATCHES], 0.003),
        (4096, 0.0, 0.0, 5.0, [2, *[MAX_SAMPLES] * MAX_BATCHES], 0.0),  # batches of a bounded size
        (8, 0.0, 0.05, 0.04, [2], 0.025),  # the time limit ends it
    ],
)
def test_seconds_are_per_sample_and_measured_on_one_thread(
    global_batch: int, sample_s: float, batch_s: float, limit_s: float, counts: list[int], least_s: float
) -> None:
    asked: list[tuple[int, int]] = []

    def make_batch(count: int, index: int) -> dict[str, torch.Tensor]:
        asked.append((count, torch.get_num_threads()))
        time.sleep(sample_s * count + batch_s)
        return {"x": torch.zeros(count, 2)}

    before = torch.get_num_threads()
    seconds, why_not = measure_input(workload_of(make_batch, global_batch), time_limit_s=limit_s)
    assert why_not is None and seconds is not None and seconds >= least_s
    assert [count for count, _ in asked] == counts
    assert {threads for _, threads in asked} == {1} and torch.get_num_threads() == before


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
