"""No value of a knob goes untried: the parity contract, or the parity tests over ranks, run each one.

A new knob fails here until it has values to try and a test that runs them.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import KNOBS, NUMBERS, PLAIN, TrainingConfig
from autoplan.strategies.prepare import STRATEGIES
from autoplan.strategies.techniques.rules import incompatible
from tests.contracts.knob_cases import NUMBERS_TRIED, needed_by, tried_values
from tests.contracts.test_parity_contract import WORKLOADS, offered
from tests.recorded import make_hardware
from tests.strategies.parallel import test_parallel_parity as over_ranks

ONLY_ON_CUDA = {"compile_mode": {"reduce-overhead", "max-autotune"}, "precision": {"tf32"}}
"""No test here can run these: they need a GPU."""

TOO_SLOW = {"compile_mode": {"max-autotune-no-cudagraphs"}}
"""On a CPU it tunes for minutes at each compilation."""


@functools.cache
def run_by_tests() -> set[tuple[str, Any]]:
    """(knob, value) of every configuration that a parity test runs."""
    on_one_rank = {case.values[1:] for name in WORKLOADS for case in offered(name)}
    tables = (over_ranks.DATA, over_ranks.TENSOR_PARALLEL, over_ranks.PIPELINE, over_ranks.FOUR_RANKS)
    return on_one_rank | {pair for table in tables for knobs in table.values() for pair in knobs.items()}


@functools.cache
def left_out_here() -> set[tuple[str, Any]]:
    """(knob, value) of what no workload of the contract offers on this machine, for a stated reason."""
    workload = WORKLOADS["gpt2"]()
    with torch.device("meta"):
        structure = find_structure(workload.build_model())
    choices = [strategy.choices(workload, structure, make_hardware(), "cpu") for strategy in STRATEGIES]
    return {(choice.knob, found.value) for choice in choices for found in choice.left_out}


def test_numbers_have_values_to_try() -> None:
    assert set(NUMBERS_TRIED) == set(NUMBERS), "say in tests/contracts/knob_cases.py which values of the knob are tried"
    assert all(tried_values(knob) for knob in KNOBS)


@pytest.mark.parametrize("knob", KNOBS)
def test_each_value_is_run_by_a_parity_test(knob: str) -> None:
    done, left_out = run_by_tests(), left_out_here()
    excused = ONLY_ON_CUDA.get(knob, set()) | TOO_SLOW.get(knob, set())
    for value in tried_values(knob):
        if value in excused:
            assert (knob, value) in left_out, "excused, and yet it is offered here"
        elif (knob, value) not in left_out:
            assert (knob, value) in done, f"no parity test runs {knob}={value}"


def test_a_value_that_no_test_runs_is_seen() -> None:
    assert ("dp_shard", 3) not in run_by_tests()
    assert ("gradient_sync", "every") in run_by_tests()


@pytest.mark.parametrize("knob", [knob for knob in KNOBS if needed_by(knob)])
def test_what_a_knob_needs_is_enough_for_one_of_its_values(knob: str) -> None:
    for needed, example in needed_by(knob).items():
        assert example != getattr(PLAIN, needed), f"the plain run has {needed}={example} already: it is no need"
    legal = [
        value
        for value in tried_values(knob)
        if incompatible(TrainingConfig(**({"micro_batch": 1} | needed_by(knob) | {knob: value}))) is None
    ]
    assert legal or knob == "virtual_stages"  # needs a schedule of several stages per rank besides
